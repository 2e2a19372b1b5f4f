"""Source documents: finding files, cutting them into ranges, reading their documents, and choosing the held-out ones.

Each line of a .jsonl file is a document, and each row of a .parquet file; any other file is text, and one document.
Files are cut into ranges of about equal size that do not depend on the number of processes, so that the same sources
always give the same shards.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sympow.data.plain_text import decode, read_text
from sympow.data.rows import group_by_size
from sympow.extras import require

LINES, ROWS = ".jsonl", ".parquet"
# Extensions of documents in a folder. A file that is given by itself may have any.
PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".adoc", ".org", ".tex", ".htm", ".html")
CODE = (
    ".c",
    ".cpp",
    ".cu",
    ".go",
    ".h",
    ".hpp",
    ".java",
    ".jl",
    ".js",
    ".py",
    ".r",
    ".rb",
    ".rs",
    ".sh",
    ".sql",
    ".ts",
)
EXTENSIONS = frozenset((*PROSE, *CODE, LINES, ROWS))
# Instead of a split's name: each document's split depends on the hash of its content.
BY_HASH = "hash"
# Hashes are below this.
HASHES = 2**64


@dataclass(frozen=True)
class FileRange:
    """A range of a file: bytes of a text or .jsonl, row groups of a .parquet.

    Attributes:
        file: its path, as the user wrote it.
        begin: first byte or row group.
        end: one after the last. A line belongs to the range in which it begins.
        size: bytes.
        split: "train", "heldout", or BY_HASH: by each document's content.
    """

    file: str
    begin: int
    end: int
    size: int
    split: str


@dataclass(frozen=True)
class Document:
    """A document's text.

    Attributes:
        text: all of it.
        position: in the file: byte of the line, number of the row, 0 for a text.
    """

    text: str
    position: int


@dataclass(frozen=True)
class FileList:
    """The files to read, in order, and those in folders with other extensions."""

    files: tuple[Path, ...]
    ignored: tuple[Path, ...]


def find_files(sources: Iterable[Path | str]) -> FileList:
    """The given files, and the files inside the given folders in alphabetical order of their paths.

    In a folder, files with one of EXTENSIONS count, in upper or lower case. Hidden files and folders, such as `.git`
    and `.venv`, are skipped.
    """
    files: list[Path] = []
    ignored: list[Path] = []
    for source in map(Path, sources):
        if source.is_dir():
            inside = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path, source))
            found = [path for path in inside if _ending(path) in EXTENSIONS]
            if not found:
                raise ValueError(
                    f"{source} has no document in it: text ({', '.join(PROSE)}), source code, {LINES} or {ROWS}; files "
                    "with other names can be given by themselves"
                )
            files += found
            ignored += [path for path in inside if _ending(path) not in EXTENSIONS]
        elif not source.is_file():
            raise ValueError(f"source {source} is neither a file nor a folder")
        else:
            files.append(source)
    return FileList(tuple(files), tuple(ignored))


def file_ranges(path: Path, split: str, shard_bytes: int, *, may_be_empty: bool = False) -> list[FileRange]:
    """A file in ranges of at most `shard_bytes`, where it can be cut: a text is one document."""
    if _ending(path) == ROWS:
        with _open_parquet(path) as file:
            rows = file.metadata.num_rows
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        groups = group_by_size(range(len(sizes)), sizes.__getitem__, shard_bytes)
        ranges = [FileRange(str(path), g[0], g[-1] + 1, sum(sizes[g[0] : g[-1] + 1]), split) for g in groups]
    else:
        rows = size = path.stat().st_size
        step = shard_bytes if _ending(path) == LINES else max(size, 1)
        ends = [min(start + step, size) for start in range(0, max(size, 1), step)]
        ranges = [FileRange(str(path), start, end, end - start, split) for start, end in pairwise([0, *ends])]
    if not rows and not may_be_empty:
        raise ValueError(f"{path} is empty; skip_empty leaves such files out")
    return ranges


def group_ranges(ranges: Sequence[FileRange], shard_bytes: int) -> list[tuple[FileRange, ...]]:
    """Groups consecutive ranges up to `shard_bytes`; each group becomes one shard per split."""
    return [tuple(group) for group in group_by_size(ranges, lambda file_range: file_range.size, shard_bytes)]


def check_field(ranges: Iterable[FileRange], field: str) -> None:
    """Refuses files without the field, by their first line or their columns, before all of them are read."""
    for file_range in ranges:
        path = Path(file_range.file)
        if _ending(path) == LINES and file_range.begin == 0:
            next(_read_lines(path, file_range, field), None)
        elif _ending(path) == ROWS and file_range.begin == 0:
            with _open_parquet(path) as file:
                _check_column(path, file, field)


def read_documents(file_range: FileRange, field: str) -> Iterator[Document]:
    """The documents of a file range, in order.

    Args:
        file_range: of lines, row groups or a whole text.
        field: key of a line or column of a table that has the text.
    """
    path = Path(file_range.file)
    if _ending(path) == LINES:
        yield from _read_lines(path, file_range, field)
    elif _ending(path) == ROWS:
        yield from _read_rows(path, file_range, field)
    else:
        yield Document(read_text(path), 0)


def describe_position(file: str, position: int) -> str:
    """The position of a document, for messages."""
    kind = {LINES: ", line at byte {:,}", ROWS: ", row {:,}"}.get(_ending(Path(file)), "")
    return file + kind.format(position)


def _read_lines(path: Path, file_range: FileRange, field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        if file_range.begin:
            # Skips the rest of a line that begins in the range before; nothing, if the byte before ends a line.
            file.seek(file_range.begin - 1)
            file.readline()
        while (position := file.tell()) < file_range.end:
            line = file.readline()
            if line.strip():
                yield Document(_text_of_line(line, path, position, field), position)


def _text_of_line(line: bytes, path: Path, position: int, field: str) -> str:
    where = f"{path}, line at byte {position:,}"
    text = decode(line, where)
    try:
        record = json.loads(text)
    except RecursionError as error:
        raise ValueError(f"{where}: not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be an object with a field {field!r}, got {type(record).__name__}")
    if field not in record:
        raise ValueError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"{where}: field {field!r} must be text, got {type(record[field]).__name__}")
    return record[field]


def _read_rows(path: Path, file_range: FileRange, field: str) -> Iterator[Document]:
    with _open_parquet(path) as file:
        _check_column(path, file, field)
        row = sum(file.metadata.row_group(group).num_rows for group in range(file_range.begin))
        for batch in file.iter_batches(row_groups=range(file_range.begin, file_range.end), columns=[field]):
            for value in batch.column(0):
                text = value.as_py()
                if not isinstance(text, str):
                    raise ValueError(f"{path}, row {row:,}: column {field!r} must be text, got {type(text).__name__}")
                yield Document(text, row)
                row += 1


def _check_column(path: Path, file: Any, field: str) -> None:
    if field not in file.schema_arrow.names:
        raise ValueError(f"{path}: no column {field!r}; it has {', '.join(map(repr, file.schema_arrow.names))}")


def _open_parquet(path: Path) -> Any:
    arrow = require("pyarrow", "data")
    try:
        return require("pyarrow.parquet", "data").ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable .parquet file: {error}") from error


def _ending(path: Path) -> str:
    return path.suffix.lower()


def _hidden(path: Path, folder: Path) -> bool:
    """Whether the file, or a folder between it and `folder`, is hidden."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def hash_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def split_by_hash(content: bytes, heldout: float) -> str:
    """Returns "heldout" for that fraction of all contents and "train" for the others; equal contents go together."""
    return "heldout" if hash_of(content) < heldout * HASHES else "train"


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

    def split(self, text: str) -> list[tuple[str, str]]:
        """A document's text by split: whole in one of them, or its beginning and its end."""
        if self.tail and len(text) > 1:
            cut = min(max(1, round(len(text) * (1 - self.tail))), len(text) - 1)
            return [("train", text[:cut]), ("heldout", text[cut:])]
        return [("heldout" if hash_of(text.encode()) < self.below else "train", text)]
