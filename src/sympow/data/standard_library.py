"""A dataset that needs no download: the source code of the running Python's standard library."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
import tokenize
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_choice
from sympow.data.dataset import SPLITS, StoredDocuments
from sympow.data.sources import HASHES, hash_of
from sympow.data.tokenizer import ByteTokenizer, Tokenizer
from sympow.errors import UserError

# Its name as a source of data.
STANDARD_LIBRARY = "stdlib"
HELDOUT = 0.1
# Some distributions omit the tests, and some of their files have unusual encodings on purpose.
_TEST_FOLDERS = {"test", "tests", "idle_test", "testmock"}


class StandardLibrary(StoredDocuments):
    """Modules and packages of the standard library, one document each, in memory.

    A package is the concatenation of its files in order of their paths, each after a comment with its path. A tenth of
    the documents, chosen by a hash of their names, is held out.

    Args:
        split: "train" or "heldout".
    """

    vocab_size, boundary = ByteTokenizer.vocab_size, ByteTokenizer.boundary

    def __init__(self, split: str = "train") -> None:
        check_choice("split", split, SPLITS)
        self._paths = [path for name, path in _modules().items() if _split_of(name) == split]
        tokens = [
            np.append(ByteTokenizer().encode(_source(path)), self.boundary).astype(np.uint16) for path in self._paths
        ]
        name = f"the standard library of Python {sys.version_info.major}.{sys.version_info.minor} ({split})"
        together = np.concatenate(tokens)
        super().__init__(name, [together], [np.array([len(document) for document in tokens])])
        self.blocks: NDArray[np.int64] = np.array([0, len(tokens)])
        self.fingerprint = hashlib.sha256(together.data).hexdigest()[:16]

    def document_name(self, document: int) -> str:
        return str(self._paths[document])

    def load_tokenizer(self) -> Tokenizer:
        return ByteTokenizer()


def _split_of(name: str) -> str:
    # With this prefix a tenth of the tokens is held out as well, some long packages among them.
    return "heldout" if hash_of(f"module {name}".encode()) < HELDOUT * HASHES else "train"


@cache
def _modules() -> dict[str, Path]:
    """File of every top-level module and folder of every package, by name, in alphabetical order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        name = path.name.removesuffix(".py")
        # Generated files hold paths of this machine and differ between machines.
        if name not in sys.stdlib_module_names or name.startswith("_sysconfigdata"):
            continue
        if path.suffix == ".py" or (path / "__init__.py").is_file():
            found[name] = path
    if not found:
        raise UserError(f"this Python has no source files of its standard library in {root}")
    return found


def _source(path: Path) -> str:
    if path.is_file():
        return _read(path)
    inside = sorted(file for file in path.rglob("*.py") if not _TEST_FOLDERS & set(file.relative_to(path).parts))
    return "".join(f"# {file.relative_to(path.parent).as_posix()}\n{_read(file)}\n" for file in inside)


def _read(path: Path) -> str:
    """A source file in the encoding that it declares."""
    with tokenize.open(path) as file:
        return file.read()
