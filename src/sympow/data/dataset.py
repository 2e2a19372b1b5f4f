"""The dataset interface `TokenDataset`, and `open_dataset`, which opens any of them by name, folder or address."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from numpy import int64, unsignedinteger
from numpy.typing import NDArray

from sympow.data.tokenizer import Tokenizer

SPLITS = ("train", "heldout")
STANDARD_LIBRARY = "stdlib"
RECALL = "mqar"

Tokens = NDArray[unsignedinteger[Any]]


class TokenDataset(Protocol):
    """Documents as token ids, read by ranges of tokens.

    A loader needs only these members, so that any class that has them can be trained on.

    Attributes:
        name: where the data come from, for messages.
        lengths: tokens of every document, (documents,).
        blocks: offsets into the documents, (blocks + 1,), strictly increasing from 0 to their number. Documents of one
            block are quick to read together, so a shuffled epoch reads a few blocks at a time.
        vocab_size: every id is below this.
        boundary: the id before a document's first token.
        fingerprint: changes when the data change; a loader's position is valid for one fingerprint only.
    """

    @property
    def name(self) -> str: ...

    @property
    def lengths(self) -> NDArray[int64]: ...

    @property
    def blocks(self) -> NDArray[int64]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def boundary(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...

    def read(self, document: int, start: int, stop: int) -> Tokens:
        """Tokens start to stop of a document, (stop - start,), read-only."""
        ...

    def document_name(self, document: int) -> str:
        """The file, line or row that a document comes from."""
        ...

    def load_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""
        ...


def open_dataset(
    source: Path | str = STANDARD_LIBRARY, split: str = "train", *, storage_options: dict[str, Any] | None = None
) -> TokenDataset:
    """Opens tokenized documents.

    Args:
        source: "stdlib" (this Python's standard library as bytes), a folder that `prepare` wrote, or LongCrawl64: the
            folder or fsspec address that has `train.zarr` and `heldout.zarr`, or one of these arrays; or "mqar", the
            synthetic task of associative recall, with options as in "mqar:pairs=32,length=256".
        split: "train" or "heldout". A single array of LongCrawl64 has one of them: `heldout.zarr` documents that are
            held out, an array of any other name training documents.
        storage_options: for an address, what fsspec needs to open it.
    """
    # Imported here: each of these modules imports this one.
    from sympow.data.associative_recall import AssociativeRecall, RecallTask
    from sympow.data.longcrawl64 import LongCrawl64
    from sympow.data.manifest import MANIFEST_FILE, WORK_FOLDER
    from sympow.data.standard_library import StandardLibrary
    from sympow.data.token_shards import ShardDataset

    if source == STANDARD_LIBRARY:
        return StandardLibrary(split)
    if str(source).partition(":")[0] == RECALL and not Path(source).exists():
        return AssociativeRecall(RecallTask.parse(str(source)), split)
    path = Path(source)
    if (path / MANIFEST_FILE).is_file():
        return ShardDataset(path, split)
    if "://" in str(source) or path.suffix == ".zarr" or any(path.glob("*.zarr")):
        return LongCrawl64(source, split, storage_options=storage_options)
    if (path / WORK_FOLDER).is_dir():
        raise ValueError(f"{source} is only partly prepared: run the same `sympow data prepare` again to finish it")
    raise ValueError(
        f"source must be {STANDARD_LIBRARY!r}, a prepared folder (with a {MANIFEST_FILE}), {RECALL!r}, or a folder or "
        f"address of LongCrawl64 (with a {split}.zarr); got {str(source)!r}"
    )


def names_a_folder(source: str) -> bool:
    """Whether a source is a local folder, rather than a name that `open_dataset` knows or an address."""
    if source == STANDARD_LIBRARY or "://" in source:
        return False
    return source.partition(":")[0] != RECALL or Path(source).exists()


def check_fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be at least 0 and below 1, got {value}")


def check_range(name: str, start: int, stop: int, length: int) -> None:
    """Refuses a range that is not inside a document; slicing would silently return fewer tokens."""
    if not 0 <= start <= stop <= length:
        raise ValueError(f"{name} has {length:,} tokens; tokens {start:,} to {stop:,} were asked for")
