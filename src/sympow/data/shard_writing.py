"""The work of one `prepare` process: tokenizes a group of file ranges and writes one shard per split."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sympow.data.manifest import INDEX_ENDING, TOKENS_ENDING, Shard
from sympow.data.plain_text import check_text
from sympow.data.sources import BY_HASH, Document, FileRange, HeldoutRule, describe_position, read_documents
from sympow.data.tokenizer import Tokenizer
from sympow.files import write_atomically
from sympow.parsing import read_json

WORK_FOLDER = ".prepare"
RECORDS = "portion-*.json"


@dataclass(frozen=True)
class Job:
    """Settings that are the same for all groups."""

    out: Path
    field: str
    rule: HeldoutRule
    skip_empty: bool


@dataclass(frozen=True)
class Record:
    """The record of a finished group, from which an interrupted preparation resumes."""

    splits: dict[str, Shard]
    source_bytes: int
    empty_documents_skipped: int

    def save(self, path: Path) -> None:
        write_atomically(path, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, path: Path) -> Record:
        content = read_json(path)
        try:
            splits = {name: Shard.from_dict(shard) for name, shard in content.pop("splits").items()}
            return cls(**content, splits=splits)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not the record of a shard: {error}; overwrite what was prepared") from error


def split_documents(file_range: FileRange, job: Job) -> Iterator[tuple[str, Document]]:
    """The documents of a file range, each with its split; a single document may be cut in two."""
    for document in documents_of(file_range, job.field):
        if file_range.split != BY_HASH:
            yield file_range.split, document
            continue
        for split, text in job.rule.split(document.text):
            yield split, replace(document, text=text)


def documents_of(file_range: FileRange, field: str) -> Iterator[Document]:
    """The documents of a file range. Text without a UTF-8 encoding (lone surrogates in JSON) is refused."""
    for document in read_documents(file_range, field):
        check_text(describe_position(file_range.file, document.position), document.text)
        yield document


def write_shards(group: tuple[FileRange, ...], number: int, job: Job, tokenizer: Tokenizer) -> Record:
    """Tokenizes a group of file ranges and writes its shards, then its record."""
    writers: dict[str, ShardWriter] = {}
    skipped = 0
    for file_range in group:
        for split, document in split_documents(file_range, job):
            where = describe_position(file_range.file, document.position)
            if not document.text:
                if not job.skip_empty:
                    raise ValueError(f"{where}: the document is empty; skip_empty leaves such documents out")
                skipped += 1
                continue
            ids = tokenizer.encode(document.text)
            if len(ids) and ids.max() >= tokenizer.vocab_size:
                raise ValueError(
                    f"{where}: token id {ids.max()} is beyond the tokenizer's vocabulary of {tokenizer.vocab_size:,}"
                )
            if split not in writers:
                writers[split] = ShardWriter(id_dtype(tokenizer.vocab_size), tokenizer.boundary)
            writers[split].add(ids, file_range.file, document.position)
    shards = {split: writer.save(job.out, f"{split}-{number:05d}") for split, writer in writers.items()}
    record = Record(shards, sum(file_range.size for file_range in group), skipped)
    record.save(record_path(job.out, number))
    return record


class ShardWriter:
    """Collects the documents of one shard.

    Args:
        dtype: of the stored ids.
        boundary: id to end every document with.
    """

    def __init__(self, dtype: np.dtype[Any], boundary: int) -> None:
        self._boundary = np.array([boundary], dtype)
        self._tokens: list[NDArray[Any]] = []
        self._index: list[tuple[int, int, int]] = []
        self._sources: dict[str, int] = {}

    def add(self, ids: NDArray[Any], file: str, position: int) -> None:
        """Appends a document, (tokens,), from a position in a file."""
        self._tokens += [ids.astype(self._boundary.dtype), self._boundary]
        source = self._sources.setdefault(file, len(self._sources))
        self._index.append((len(ids) + 1, source, position))

    def save(self, folder: Path, name: str) -> Shard:
        tokens = np.concatenate(self._tokens)
        index = np.array(self._index, np.int64)
        return Shard(
            name,
            documents=len(index),
            tokens=len(tokens),
            tokens_sha256=_save_array(folder / f"{name}{TOKENS_ENDING}", tokens),
            index_sha256=_save_array(folder / f"{name}{INDEX_ENDING}", index),
            sources=tuple(self._sources),
        )


def _save_array(path: Path, array: NDArray[Any]) -> str:
    """Writes an array and returns the hash of its file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    content = buffer.getbuffer()
    write_atomically(path, content)
    return hashlib.sha256(content).hexdigest()


def id_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def record_path(out: Path, number: int) -> Path:
    return out / WORK_FOLDER / RECORDS.replace("*", f"{number:05d}")
