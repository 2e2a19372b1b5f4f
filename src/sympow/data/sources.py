"""Documents in files: which files, in which portions, and the texts in them.

Each line of a .jsonl file is a document, and each row of a .parquet file; any other file is text, and one document.
Files are cut into portions of about equal size, whatever the number of processes that will read them, so the same
sources always give the same portions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sympow.data.plain_text import decode, read_text
from sympow.data.rows import group_by_size
from sympow.extras import require

LINES, ROWS = ".jsonl", ".parquet"
# What is taken for a document in a folder. A file that is named itself may have any name.
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


@dataclass(frozen=True)
class Extent:
    """Part of a file: bytes of a text or .jsonl, row groups of a .parquet.

    Attributes:
        file: its path, as the user wrote it.
        begin: first byte or row group.
        end: one after the last. A line belongs to the extent in which it begins.
        size: bytes, for progress and to share out the work.
        split: "train", "heldout", or "hash": by each document's content.
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
        position: where in the file: byte of the line, number of the row, 0 for a text.
    """

    text: str
    position: int


@dataclass(frozen=True)
class FileList:
    """What was found: the files to read, in order, and those in folders with another ending."""

    files: tuple[Path, ...]
    ignored: tuple[Path, ...]


def find_files(sources: Iterable[Path | str]) -> FileList:
    """Files, whatever their names, and in alphabetical order of their paths what is inside folders.

    Of a folder, files with one of EXTENSIONS are taken, in upper or lower case. Hidden files and folders in it, such as
    `.git` and `.venv`, are not looked at.
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
                    "with other names can be named themselves"
                )
            files += found
            ignored += [path for path in inside if _ending(path) not in EXTENSIONS]
        elif not source.is_file():
            raise ValueError(f"source {source} is neither a file nor a folder")
        else:
            files.append(source)
    return FileList(tuple(files), tuple(ignored))


def extents_of(path: Path, split: str, portion_bytes: int, *, may_be_empty: bool = False) -> list[Extent]:
    """A file in portions of at most `portion_bytes`, where it can be cut: a text is one document."""
    if _ending(path) == ROWS:
        with _open_parquet(path) as file:
            rows = file.metadata.num_rows
            sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.metadata.num_row_groups)]
        groups = group_by_size(range(len(sizes)), sizes.__getitem__, portion_bytes)
        extents = [Extent(str(path), g[0], g[-1] + 1, sum(sizes[g[0] : g[-1] + 1]), split) for g in groups]
    else:
        rows = size = path.stat().st_size
        step = portion_bytes if _ending(path) == LINES else max(size, 1)
        ends = [min(start + step, size) for start in range(0, max(size, 1), step)]
        extents = [Extent(str(path), start, end, end - start, split) for start, end in pairwise([0, *ends])]
    if not rows and not may_be_empty:
        raise ValueError(f"{path} is empty; skip_empty leaves such files out")
    return extents


def read_documents(extent: Extent, field: str) -> Iterator[Document]:
    """The documents of an extent, in order.

    Args:
        extent: which.
        field: key of a line or column of a table that has the text.
    """
    path = Path(extent.file)
    if _ending(path) == LINES:
        yield from _read_lines(path, extent, field)
    elif _ending(path) == ROWS:
        yield from _read_rows(path, extent, field)
    else:
        yield Document(read_text(path), 0)


def describe_position(file: str, position: int) -> str:
    """A document's place for people, from what is stored with it."""
    kind = {LINES: ", line at byte {:,}", ROWS: ", row {:,}"}.get(_ending(Path(file)), "")
    return file + kind.format(position)


def _read_lines(path: Path, extent: Extent, field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        if extent.begin:
            # The line that the byte before belongs to began earlier; if that byte ends it, nothing is skipped.
            file.seek(extent.begin - 1)
            file.readline()
        while (position := file.tell()) < extent.end:
            line = file.readline()
            if line.strip():
                yield Document(_text_of_line(line, path, position, field), position)


def _text_of_line(line: bytes, path: Path, position: int, field: str) -> str:
    where = f"{path}, line at byte {position:,}"
    text = decode(line, where)
    try:
        record = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: must be an object with a field {field!r}, got {type(record).__name__}")
    if field not in record:
        raise ValueError(f"{where}: no field {field!r}; it has {', '.join(map(repr, record)) or 'none'}")
    if not isinstance(record[field], str):
        raise ValueError(f"{where}: field {field!r} must be text, got {type(record[field]).__name__}")
    return record[field]


def _read_rows(path: Path, extent: Extent, field: str) -> Iterator[Document]:
    with _open_parquet(path) as file:
        if field not in file.schema_arrow.names:
            raise ValueError(f"{path}: no column {field!r}; it has {', '.join(map(repr, file.schema_arrow.names))}")
        row = sum(file.metadata.row_group(group).num_rows for group in range(extent.begin))
        for batch in file.iter_batches(row_groups=range(extent.begin, extent.end), columns=[field]):
            for value in batch.column(0):
                text = value.as_py()
                if not isinstance(text, str):
                    raise ValueError(f"{path}, row {row:,}: column {field!r} must be text, got {type(text).__name__}")
                yield Document(text, row)
                row += 1


def _open_parquet(path: Path) -> Any:
    arrow = require("pyarrow", "data")
    try:
        return require("pyarrow.parquet", "data").ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a readable .parquet file: {error}") from error


def _ending(path: Path) -> str:
    return path.suffix.lower()


def _hidden(path: Path, folder: Path) -> bool:
    """Whether the file, or a folder on the way to it, is."""
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def portions_of(extents: Sequence[Extent], portion_bytes: int) -> list[tuple[Extent, ...]]:
    """Extents in the order given, small ones together: each portion becomes a shard."""
    return [tuple(group) for group in group_by_size(extents, lambda extent: extent.size, portion_bytes)]
