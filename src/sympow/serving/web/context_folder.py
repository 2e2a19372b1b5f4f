"""`ContextFolder`: contexts on disk. Writes are atomic: a killed process leaves no incomplete context.

    DIR/ctx_5d41…/context.json        the `Record` of a context
    DIR/ctx_5d41…/state.prefix        its prefix
    DIR/.writing-8f3a…/               contexts that one process is writing or deleting
    DIR/.writing-8f3a…/lock           locked while that process lives

A context is written below `.writing-…` and renamed once it is synced to disk. A killed process releases its lock, and
the next process that opens the folder then removes what the killed one was writing. Several processes, also on several
machines, can share a folder.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from filelock import lock_descriptor
from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass

from sympow import tensor_file
from sympow.files import flush, write_atomically
from sympow.generation.prefix import FORMAT as PREFIX_FORMAT
from sympow.generation.prefix import Prefix
from sympow.locks import lock_file
from sympow.model.gpt import GPT

ID = re.compile("ctx_[0-9a-f]{24}")
RECORD_FILE = "context.json"
PREFIX_FILE = "state.prefix"
LOCK_FILE = "lock"
FOLDER_LOCK_FILE = ".lock"
WRITING = ".writing-"


def new_id() -> str:
    return f"ctx_{secrets.token_hex(12)}"


def is_id(text: str) -> bool:
    """Whether a text can be the id of a context; a path never is."""
    return ID.fullmatch(text) is not None


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class Record:
    """The metadata of a context on disk.

    Attributes:
        id: its name in the folder.
        name: name given by the user, or "".
        created_at: time of creation in seconds since 1970.
        tokens: number of tokens, including those of the context that it was forked from.
        nbytes: bytes of its state.
        parent: id of the context that it was forked from; None: it was not forked.
    """

    id: str
    name: str
    created_at: int
    tokens: int
    nbytes: int
    parent: str | None = None


RECORDS = TypeAdapter(Record)


class ContextFolder:
    """The contexts of one model in a folder; contexts of other models are ignored.

    Args:
        path: the folder, which is created if it does not exist.
        model: the model that prefilled the contexts.
        fingerprint: the model's fingerprint.
    """

    def __init__(self, path: Path, model: GPT, fingerprint: str) -> None:
        self.path, self._model, self._fingerprint = path, model, fingerprint
        # Contexts do not change, so each is read once. None: the context is of another model, or damaged.
        self._known: dict[str, Record | None] = {}
        path.mkdir(parents=True, exist_ok=True)
        self._own = path / f"{WRITING}{secrets.token_hex(8)}"
        with lock_file(path / FOLDER_LOCK_FILE):
            # A folder whose lock is free is that of a process that no longer lives.
            for folder in path.glob(f"{WRITING}*"):
                with suppress(BlockingIOError), lock_file(folder / LOCK_FILE, wait=False):
                    shutil.rmtree(folder, ignore_errors=True)
            self._own.mkdir()
            self._lock = os.open(self._own / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            lock_descriptor(self._lock)

    def close(self) -> None:
        shutil.rmtree(self._own, ignore_errors=True)
        os.close(self._lock)

    def records(self) -> dict[str, Record]:
        """The contexts in the folder now, by id, including those written by other processes; none if it is removed."""
        there: set[str] = set()
        with suppress(FileNotFoundError):
            there = {entry.name for entry in os.scandir(self.path) if is_id(entry.name)}
        self._known = {id_: record for id_, record in self._known.items() if id_ in there}
        found = {id_: self._look(id_) for id_ in there}
        return {id_: record for id_, record in found.items() if record is not None}

    def exists(self) -> bool:
        """Whether contexts can be written: nobody has removed the folder meanwhile."""
        return self._own.is_dir()

    def others(self) -> int:
        """The number of contexts found that are of other models, or damaged."""
        return sum(record is None for record in self._known.values())

    def find(self, id_: str) -> Record | None:
        if not is_id(id_) or not (self.path / id_).is_dir():
            return None
        return self._look(id_)

    def write(self, record: Record, prefix: Prefix) -> None:
        """Writes a context and syncs it to disk; once this returns, it survives a crash of the machine."""
        draft = self._own / record.id
        draft.mkdir()
        try:
            prefix.save(draft / PREFIX_FILE, self._model, fingerprint=self._fingerprint)
            write_atomically(draft / RECORD_FILE, (json.dumps(asdict(record), indent=2) + "\n").encode())
            draft.rename(self.path / record.id)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
        flush(self.path)

    def load(self, id_: str) -> Prefix:
        """The prefix of a context.

        Raises:
            ValueError: the file is damaged.
            OSError: the file cannot be read.
        """
        assert is_id(id_)
        return Prefix.load(self.path / id_ / PREFIX_FILE, self._model, fingerprint=self._fingerprint)

    def remove(self, id_: str) -> None:
        """Deletes a context atomically: it is no longer listed, even if the process is killed while deleting files."""
        assert is_id(id_)
        rubbish = self._own / f"deleted-{secrets.token_hex(4)}"
        try:
            (self.path / id_).rename(rubbish)
        except FileNotFoundError:
            return
        shutil.rmtree(rubbish)

    def _look(self, id_: str) -> Record | None:
        """A context's record; None if it is of another model, or damaged, or cannot be opened now."""
        if id_ not in self._known:
            folder = self.path / id_
            try:
                record = RECORDS.validate_json((folder / RECORD_FILE).read_bytes())
                words = tensor_file.load_words(folder / PREFIX_FILE, PREFIX_FORMAT)
                usable = record.id == id_ and words.get("fingerprint") == self._fingerprint
                self._known[id_] = record if usable else None
            except ValueError:
                self._known[id_] = None
            except OSError:
                # It is tried again next time.
                return None
        return self._known[id_]
