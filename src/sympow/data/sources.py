"""Source documents: which files and datasets there are, their documents in order, and the choice of the held-out ones.

A text file is one document, read here. Everything else is read by the library `datasets` as a stream of rows, of which
each is a document: tables in files, and whatever `datasets.load_dataset` finds by a name (`hf:NAME`).
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from sympow.data.plain_text import read_text
from sympow.errors import ArgumentError, UserError
from sympow.extras import require

# Before the name of a dataset that `datasets.load_dataset` finds, and its arguments: hf:NAME,split=train,revision=main
HUB = "hf:"
# Endings of tables: the name of a builder of `datasets`, and its options.
TABLES: dict[str, tuple[str, dict[str, Any]]] = {
    ".jsonl": ("json", {}),
    ".json": ("json", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".parquet": ("parquet", {}),
    ".arrow": ("arrow", {}),
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
# Endings of documents in a folder. A file that is given by itself may have any; in a folder, .json and .csv may be
# anything but documents.
PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".htm", ".html")
COMPILED = (".c", ".cpp", ".cu", ".go", ".h", ".hpp", ".java", ".rs", ".ts")
SCRIPTS = (".jl", ".js", ".py", ".r", ".rb", ".sh", ".sql")
FOLDER_TABLES = (".jsonl", ".parquet")
IN_FOLDERS = frozenset((*PROSE, *COMPILED, *SCRIPTS, *FOLDER_TABLES))
# Instead of a split's name: each document's split depends on the hash of its content.
BY_HASH = "hash"
# Hashes are below this.
HASHES = 2**64
# The state of a stream is saved every so many rows: saving takes as long as reading a few of them.
SAVED_ROWS = 1_000
# What `datasets`, pandas and pyarrow raise on names and files that they cannot read.
UNREADABLE = (EOFError, NotImplementedError, OSError, TypeError, ValueError)


@dataclass(frozen=True)
class Source:
    """A text file, a table, or a dataset that `datasets` finds by its name.

    Attributes:
        name: the path as the user wrote it, or `hf:NAME` with options.
        split: "train", "heldout", or BY_HASH: by each document's content.
    """

    name: str
    split: str


@dataclass(frozen=True)
class Document:
    """A document's text and where it comes from.

    Attributes:
        text: all of it.
        source: the source's name.
        position: the row, or 0 for a text.
        split: the source's.
    """

    text: str
    source: str
    position: int
    split: str

    def __str__(self) -> str:
        return describe_position(self.source, self.position)


@dataclass(frozen=True)
class ReadingPlace:
    """A place between documents, to read on from.

    Attributes:
        source: number of the source.
        row: of the source, which is the next to read.
        stream_row: a row not after it, where `stream` is.
        stream: state of the stream of `datasets` at `stream_row`; None: at the source's beginning.
    """

    source: int = 0
    row: int = 0
    stream_row: int = 0
    stream: dict[str, Any] | None = None


class Reader:
    """Iterates over the documents of sources, one source after the other.

    Args:
        sources: what to read.
        field: column with the text, in sources that have rows.
        place: where to begin.

    Attributes:
        place: of the document that was given last, so that a reader from there on gives this document again; at the
            end, the place after all documents.
    """

    def __init__(self, sources: Sequence[Source], field: str, place: ReadingPlace = ReadingPlace()) -> None:
        self._sources, self._field, self.place = sources, field, place

    def __iter__(self) -> Iterator[Document]:
        begin = self.place
        for number in range(begin.source, len(self._sources)):
            source = self._sources[number]
            if not has_rows(source.name):
                self.place = ReadingPlace(number)
                yield Document(read_text(source.name), source.name, 0, source.split)
            else:
                yield from self._read_rows(source, begin if number == begin.source else ReadingPlace(number))
        self.place = ReadingPlace(len(self._sources))

    def _read_rows(self, source: Source, begin: ReadingPlace) -> Iterator[Document]:
        stream, saved, state = _open_stream(source.name, self._field), begin.stream_row, begin.stream
        if state is not None:
            stream.load_state_dict(state)
        rows = _named_errors(source.name, stream)
        for row in count(saved):
            if row and row % SAVED_ROWS == 0:
                saved, state = row, stream.state_dict()
            content = next(rows, None)
            if content is None:
                return
            if row < begin.row:
                continue
            if self._field not in content:
                raise UserError(f"{source.name}: no column {self._field!r}; it has {', '.join(map(repr, content))}")
            self.place = ReadingPlace(begin.source, row, saved, state)
            text = content[self._field]
            # In a table without a value, as in a .csv, an empty text is a missing one.
            document = Document("" if text is None else text, source.name, row, source.split)
            if not isinstance(document.text, str):
                raise UserError(f"{document}: column {self._field!r} must be text, got {type(text).__name__}")
            yield document


def list_sources(
    sources: Sequence[Path | str], heldout_sources: Sequence[Path | str], split: str, *, may_be_empty: bool
) -> tuple[list[Source], list[str]]:
    """All sources, folders as the files in them, each with its split; and the files in folders that are no documents.

    A file of a folder among the sources that is held out is in the held-out split alone.

    Args:
        sources: files, folders and names of datasets.
        heldout_sources: those that are held out.
        split: of the sources that are not held out.
        may_be_empty: whether to accept empty files.
    """
    found, ignored = _find(sources)
    heldout, ignored_heldout = _find(heldout_sources)
    held = set(map(_resolve, heldout))
    for given in map(str, sources):
        if _resolve(given) in held and not Path(given).is_dir():
            raise ArgumentError(
                "sources",
                f"and heldout_sources both contain {given}; name its folder among the sources to train on "
                "the others of its files",
            )
    names = [name for name in found if _resolve(name) not in held]
    if not names:
        raise ArgumentError("heldout_sources", "must leave a file of the sources for training, and contain all of them")
    listed: list[Source] = []
    seen: dict[str, str] = {}
    for names_split, group in ((split, names), ("heldout", heldout)):
        for name in group:
            if _resolve(name) in seen:
                raise ArgumentError("sources", f"contain {name} twice, also as {seen[_resolve(name)]}")
            seen[_resolve(name)] = name
            source = Source(name, names_split)
            empty = not name.startswith(HUB) and Path(name).stat().st_size == 0
            if empty and not may_be_empty:
                raise ArgumentError(name, "is empty; skip_empty leaves such files out")
            # An empty table has no rows, and not one that is empty.
            if not empty or not has_rows(name):
                listed.append(source)
    others = {_resolve(name): name for name in (*ignored, *ignored_heldout)}
    return listed, [name for resolved, name in others.items() if resolved not in seen]


def sources_fingerprint(sources: Iterable[Source]) -> str:
    """Changes when a source does: its name, split, size or modification time, or the version of a hub's dataset."""
    state: list[Any] = []
    for source in sources:
        if source.name.startswith(HUB):
            path, options = _hub_arguments(source.name)
            options.pop("split")
            with _naming(source.name):
                builder = require("datasets", "datasets").load_dataset_builder(path, **options)
            found: list[Any] = [builder.hash, builder.config_id]
        else:
            status = Path(source.name).stat()
            found = [status.st_size, status.st_mtime_ns]
        state.append([source.name, source.split == "heldout", *found])
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()


def text_bytes(sources: Iterable[Source]) -> int | None:
    """Bytes of all texts; None: unknown, since some are in tables."""
    sources = list(sources)
    if any(has_rows(source.name) for source in sources):
        return None
    return sum(Path(source.name).stat().st_size for source in sources)


def check_field(sources: Iterable[Source], field: str) -> None:
    """Refuses a field that the first source with rows does not have, before all of them are read."""
    if first := next((source for source in sources if has_rows(source.name)), None):
        next(iter(Reader([first], field)), None)


def has_rows(name: str) -> bool:
    return name.startswith(HUB) or _table_ending(Path(name)) is not None


def describe_position(source: str, position: int) -> str:
    """The position of a document, for messages."""
    return f"{source}, row {position:,}" if has_rows(source) else source


def _table_ending(path: Path) -> str | None:
    endings = [ending.lower() for ending in path.suffixes]
    if endings and endings[-1] in COMPRESSIONS:
        endings.pop()
    return endings[-1] if endings and endings[-1] in TABLES else None


def _find(sources: Iterable[Path | str]) -> tuple[list[str], list[str]]:
    """The given files and datasets and the files in the given folders, in alphabetical order; and the others there.

    In a folder, files with one of IN_FOLDERS count, in upper or lower case. Hidden files and folders, such as `.git`
    and `.venv`, are skipped.
    """
    found: list[str] = []
    ignored: list[str] = []
    for source in sources:
        path = Path(source)
        if str(source).startswith(HUB):
            _hub_arguments(str(source))
            found.append(str(source))
        elif path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file() and not _hidden(file, path))
            documents = [file for file in inside if (_table_ending(file) or file.suffix.lower()) in IN_FOLDERS]
            if not documents:
                raise UserError(
                    f"{source} has no document in it: text ({', '.join(PROSE)}), source code, "
                    f"{' or '.join(FOLDER_TABLES)}; files with other names can be given by themselves"
                )
            found += map(str, documents)
            ignored += sorted(map(str, set(inside) - set(documents)))
        elif path.is_file():
            found.append(str(path))
        else:
            raise UserError(f"source {source} is neither a file nor a folder, nor {HUB}NAME of a dataset")
    return found, ignored


def _hidden(path: Path, folder: Path) -> bool:
    """Whether the file, or a folder between it and `folder`, is hidden."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def _resolve(name: str) -> str:
    return name if name.startswith(HUB) else str(Path(name).resolve())


def _hub_arguments(name: str) -> tuple[str, dict[str, str]]:
    """The path and the keyword arguments of `datasets.load_dataset` in a name such as "hf:NAME,split=train"."""
    path, *options = name.removeprefix(HUB).split(",")
    given = dict(option.partition("=")[::2] for option in options)
    if not path or not all(key.isidentifier() and value for key, value in given.items()):
        raise UserError(f"a dataset must be named as {HUB}NAME or {HUB}NAME,split=train,OPTION=VALUE; got {name!r}")
    return path, {"split": "train", **given}


def _open_stream(name: str, field: str) -> Any:
    """The rows of a source as a `datasets.IterableDataset` of one column."""
    if name.startswith(HUB):
        path, options = _hub_arguments(name)
    else:
        ending = _table_ending(Path(name))
        assert ending is not None
        path, settings = TABLES[ending]
        # The name is a pattern for `datasets`.
        options = {"split": "train", "data_files": glob.escape(name), **settings}
    with _naming(name):
        stream = require("datasets", "datasets").load_dataset(path, streaming=True, **options)
    # Of some files, the columns are known only when rows are read.
    return stream.select_columns([field]) if field in (stream.column_names or ()) else stream


def _named_errors(name: str, rows: Iterable[Any]) -> Iterator[Any]:
    with _naming(name):
        yield from rows


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Adds the source to the message of an error of `datasets`."""
    try:
        yield
    except UNREADABLE as error:
        raise ArgumentError(name, f"cannot be read by datasets: {error}") from error


def hash_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class HeldoutRule:
    """Which documents are held out.

    Attributes:
        below: documents whose hash is below this are held out.
        tail: fraction at the end of every other document that is held out; 0: documents stay whole.
    """

    below: int
    tail: float = 0.0

    @classmethod
    def for_documents(cls, contents: Iterable[bytes], heldout: float) -> HeldoutRule:
        """Holds out a fraction of the documents by their hash, at least one, and leaves at least one for training.

        If the fraction of a few documents would be none or all of them, the one with the lowest hash is held out, or
        the one with the highest is not. Of a single document (or copies of one), the end is held out.

        Args:
            contents: of all documents. They are read only until one for each split is found.
            heldout: the fraction; above 0.
        """
        below = math.ceil(heldout * HASHES)
        lowest, highest = HASHES, -1
        for content in contents:
            hashed = hash_of(content)
            lowest, highest = min(lowest, hashed), max(highest, hashed)
            if lowest < below <= highest:
                return cls(below)
        if lowest >= highest:
            return cls(0, tail=heldout)
        return cls(lowest + 1 if lowest >= below else highest)

    def split(self, document: Document) -> list[tuple[str, str]]:
        """A document's text by split: whole in one of them, or its beginning and its end."""
        text = document.text
        if document.split != BY_HASH:
            return [(document.split, text)]
        if self.tail and len(text) > 1:
            cut = min(max(1, round(len(text) * (1 - self.tail))), len(text) - 1)
            return [("train", text[:cut]), ("heldout", text[cut:])]
        return [("heldout" if hash_of(text.encode()) < self.below else "train", text)]
