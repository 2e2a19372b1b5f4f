"""`open_dataset`: any dataset by its name, folder, file or address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sympow.data.associative_recall import RECALL, AssociativeRecall
from sympow.data.dataset import SPLITS, TokenDataset
from sympow.data.formats.longcrawl64 import ARRAY_ENDING, LongCrawl64, split_of_array
from sympow.data.formats.shards import ShardDataset
from sympow.data.formats.token_files import ENDINGS, TokenFiles, find_token_files
from sympow.data.manifest import MANIFEST_FILE, WORK_FOLDER, Manifest
from sympow.data.standard_library import STANDARD_LIBRARY, StandardLibrary
from sympow.errors import ArgumentError, UserError


def open_dataset(
    source: Path | str = STANDARD_LIBRARY, split: str = "train", *, storage_options: dict[str, Any] | None = None
) -> TokenDataset:
    """Opens tokenized documents.

    Args:
        source: "stdlib" (this Python's standard library as bytes), a folder that `prepare` wrote, or LongCrawl64: the
            folder or fsspec address that has `train.zarr` and `heldout.zarr`, or one of these arrays; or "mqar", the
            synthetic task of associative recall, with options as in "mqar:pairs=32,length=256"; or token files of
            datatrove (.ds), Megatron (.bin with .idx) or nanoGPT (.bin): a folder of them, or one file.
        split: "train" or "heldout". A single array of LongCrawl64 has one of them: `heldout.zarr` documents that are
            held out, an array of any other name training documents. Of token files, those with a word such as "val" or
            "heldout" in their names are held out.
        storage_options: for an address, what fsspec needs to open it.
    """
    if source == STANDARD_LIBRARY:
        return StandardLibrary(split)
    if str(source).partition(":")[0] == RECALL and not Path(source).exists():
        return AssociativeRecall.parse(str(source), split)
    path = Path(source)
    if (path / MANIFEST_FILE).is_file():
        return ShardDataset(path, split)
    if "://" in str(source) or path.suffix == ".zarr" or any(path.glob("*.zarr")):
        return LongCrawl64(source, split, storage_options=storage_options)
    if (path / WORK_FOLDER).is_dir():
        raise UserError(f"{source} is only partly prepared: run the same `sympow data prepare` again to finish it")
    if path.exists() and any(find_token_files(path).values()):
        return TokenFiles(path, split)
    raise ArgumentError(
        "source",
        f"must be {STANDARD_LIBRARY!r}, a prepared folder (with a {MANIFEST_FILE}), {RECALL!r}, a folder or "
        f"address of LongCrawl64 (with a {split}.zarr), or token files ({', '.join(ENDINGS)}); got {str(source)!r}",
    )


def splits_of(source: Path | str) -> list[str]:
    """The splits that a source has; at an address, where looking is slow, both are assumed to be there."""
    path = Path(source)
    if path.suffix == ARRAY_ENDING:
        return [split_of_array(str(source))]
    if (path / MANIFEST_FILE).is_file():
        return [split for split, shards in Manifest.load(path).splits.items() if shards]
    arrays = [split for split in SPLITS if (path / f"{split}{ARRAY_ENDING}").is_dir()]
    return arrays or [split for split, files in find_token_files(path).items() if files] or list(SPLITS)


def names_a_folder(source: str) -> bool:
    """Whether a source is a local folder, rather than a name that `open_dataset` knows or an address."""
    if source == STANDARD_LIBRARY or "://" in source:
        return False
    return source.partition(":")[0] != RECALL or Path(source).exists()
