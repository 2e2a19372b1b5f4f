"""`TokenFiles`: a folder of token files that other programs wrote, as a dataset.

Such files hold ids and no tokenizer. A tokenizer belongs beside them: a `tokenizer.json`, or what `name_tokenizer`
wrote. datatrove's metadata name one, which is used if it is "gpt2" or a file that is there.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_choice
from sympow.data.dataset import SPLITS, StoredDocuments
from sympow.data.formats import datatrove, megatron, nanogpt
from sympow.data.formats.token_file import TokenFile
from sympow.data.tokenizer import MODEL_FILE, SETTINGS_FILE, Tokenizer, load_tokenizer
from sympow.errors import ArgumentError, UserError

ENDINGS = (datatrove.ENDING, megatron.ENDING)
# A file is held out if a word of its name, or of a folder's between, is one of these.
HELDOUT_WORDS = {"heldout", "val", "valid", "validation", "eval", "test"}
# Any document is quick to read from any file; but a block may end in an incomplete row.
BLOCK_TOKENS = 2**26
# Tokens at both ends of a file that its fingerprint depends on: all of them would take too long to read.
EDGE = 4_096


class TokenFiles(StoredDocuments):
    """One split of a folder of token files of datatrove, Megatron or nanoGPT, or a single one of these files.

    Args:
        source: the folder, in which files may be at any depth, or the file.
        split: "train" or "heldout", which are the files with a word such as "val" or "heldout" in their names.
        tokenizer: what made the ids; by default the one beside the files, or that datatrove's metadata name.
    """

    def __init__(self, source: Path | str, split: str = "train", tokenizer: Tokenizer | None = None) -> None:
        check_choice("split", split, SPLITS)
        source = Path(source)
        paths = find_token_files(source)[split]
        if not paths:
            raise UserError(
                f"{source} has no split {split!r}: files to hold out must have a word such as 'heldout' or 'val' in "
                "their names, and files for training none"
            )
        self._tokenizer = tokenizer or _find_tokenizer(source, paths)
        self.vocab_size, self.boundary = self._tokenizer.vocab_size, self._tokenizer.boundary
        # A file beside others with indices has lost its own, and is not of another format.
        indexed = {path.parent for path in paths if path.with_suffix(megatron.INDEX_ENDING).exists()}

        def read(path: Path) -> TokenFile:
            if path.suffix == datatrove.ENDING:
                return datatrove.read_datatrove(path)
            if path.parent in indexed:
                return megatron.read_megatron(path)
            return nanogpt.read_nanogpt(path, self._tokenizer)

        # A task of datatrove without documents leaves a file without tokens.
        self._files = [file for file in map(read, paths) if len(file.tokens)]
        if not self._files:
            raise UserError(f"{source} ({split}) has no tokens in its {len(paths):,} files")
        self.formats = sorted({file.format for file in self._files})
        tokens, lengths = zip(*((file.tokens, np.diff(file.ends, prepend=0)) for file in self._files), strict=True)
        super().__init__(f"{source} ({split})", tokens, lengths)
        blocks = (np.cumsum(self.lengths) - self.lengths) // BLOCK_TOKENS
        self.blocks: NDArray[np.int64] = np.concatenate([[0], np.flatnonzero(np.diff(blocks)) + 1, [len(blocks)]])
        contents = hashlib.sha256(json.dumps([self.vocab_size, self.boundary]).encode())
        for file in self._files:
            contents.update(repr((file.tokens.dtype.str, len(file.tokens))).encode())
            for array in (file.ends, file.tokens[:EDGE], file.tokens[-EDGE:]):
                contents.update(np.ascontiguousarray(array).data)
        self.fingerprint = contents.hexdigest()[:16]

    def document_name(self, document: int) -> str:
        number = self._array_of(document)
        return f"{self._files[number].path}, document {document - self._first_documents[number]:,}"

    def load_tokenizer(self) -> Tokenizer:
        return self._tokenizer


def find_token_files(source: Path) -> dict[str, list[Path]]:
    """The token files of a folder, or the one that is named, by split and in the order of their paths."""
    folder, found = (source, sorted(source.rglob("*"))) if source.is_dir() else (source.parent, [source])
    splits: dict[str, list[Path]] = {split: [] for split in SPLITS}
    for path in found:
        if path.suffix in ENDINGS:
            words = re.split("[^a-z]+", path.relative_to(folder).as_posix().lower())
            splits["train" if HELDOUT_WORDS.isdisjoint(words) else "heldout"].append(path)
    return splits


def name_tokenizer(folder: Path, tokenizer: str, boundary_token: str | None = None) -> Tokenizer:
    """Saves a tokenizer beside the token files in a folder, for `TokenFiles`.

    Args:
        folder: with token files.
        tokenizer: as for `load_tokenizer`.
        boundary_token: of a tokenizer.json, if its name is unusual.
    """
    if not folder.is_dir() or not any(find_token_files(folder).values()):
        raise ArgumentError("folder", f"must have token files in it ({', '.join(ENDINGS)}), got {str(folder)!r}")
    made = load_tokenizer(tokenizer, boundary_token)
    made.save(folder)
    return made


def _find_tokenizer(source: Path, paths: list[Path]) -> Tokenizer:
    folder = source if source.is_dir() else source.parent
    if (folder / SETTINGS_FILE).exists():
        return load_tokenizer(folder)
    if (folder / MODEL_FILE).is_file():
        return load_tokenizer(folder / MODEL_FILE)
    metadata = (datatrove.tokenizer_of(path) for path in paths if path.suffix == datatrove.ENDING)
    named = sorted({found[0] for found in metadata if found is not None})
    if len(named) == 1 and (named[0] == "gpt2" or Path(named[0]).is_file()):
        return load_tokenizer(named[0])
    said = f"; its metadata name {', '.join(map(repr, named))}, which is not here" if named else ""
    raise UserError(
        f"{source} does not say which tokenizer made its ids{said}: put the tokenizer.json into {folder}, or name it "
        f"with `sympow data tokenizer {folder} NAME`"
    )
