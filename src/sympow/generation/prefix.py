"""A text as a model has read it: something to keep, to fork, and to go on from a week later.

reading = Reading.start(model, tokens)          # tokens (b, t); a million of them take no more memory than a piece
reading.save("book.reading", model)
reading = Reading.load("book.reading", model)   # the model that made it, and no other
for token in generate(model, 100, reading=reading): ...

What a reading holds is a state of fixed size, or, while they take less, the keys and values of what was read
(`sympow.generation.cache`); with softmax always the latter.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from sympow import tensor_file
from sympow.generation.cache import Memory, fold, prepare
from sympow.layers.mixers import LayerState
from sympow.model.config import WAYS_TO_COMPUTE
from sympow.model.gpt import GPT, PIECE, ModelState
from sympow.ops.state import State
from sympow.ops.torch.softmax import KeyValueState, PaddedKeyValueState
from sympow.ops.window import Window

FORMAT = "sympow reading 2"
# Written by versions without checksums.
OLDER_FORMAT = "sympow reading 1"
KINDS: dict[str, type[LayerState]] = {
    kind.__name__: kind for kind in (State, KeyValueState, PaddedKeyValueState, Window)
}


@dataclass(frozen=True)
class Reading:
    """What a model has read of a batch of texts.

    Attributes:
        logits: of the token after the last one, (b, vocabulary).
        state: one entry per layer.
        tokens: how many were read; of texts of different lengths, the longest's.
        seen: which tokens of the vocabulary occurred, (b, vocabulary) bool, for a repetition penalty; None: not known,
            as of a file that an earlier version wrote.
    """

    logits: Tensor
    state: ModelState
    tokens: int
    seen: Tensor | None = None

    @classmethod
    @torch.no_grad()
    def start(cls, model: GPT, tokens: Tensor, *, piece: int = PIECE, memory: Memory = "auto") -> Reading:
        """Reads a text from its beginning.

        Args:
            tokens: (b, t), at least one.
            piece: tokens read at a time; memory depends on it, and not on t.
            memory: what to keep. "auto": keys and values if they take no more bytes than a state, else a state;
                "state", "keys": the one or the other. All give the same numbers.
        """
        logits, state = _read(model, tokens, None, piece, memory)
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, tokens, True)
        return cls(logits, state, tokens.shape[1], seen)

    @torch.no_grad()
    def more(self, model: GPT, tokens: Tensor, *, piece: int = PIECE, memory: Memory = "auto") -> Reading:
        """Reads on; this reading stays as it is."""
        logits, state = _read(model, tokens, self.state, piece, memory)
        seen = None if self.seen is None else self.seen.scatter(1, tokens, True)
        return Reading(logits, state, self.tokens + tokens.shape[1], seen)

    @classmethod
    @torch.no_grad()
    def cat(cls, readings: Sequence[Reading]) -> Reading:
        """Several readings as one batch, of any lengths; keys and values beside a state are folded into one."""
        if not readings:
            raise ValueError("readings must hold at least one reading, got none")
        states = [reading.state for reading in readings]
        if any(reading.folded for reading in readings):
            states = [fold(state) for state in states]
        layers = [_joined(members) for members in zip(*states, strict=True)]
        logits = torch.cat([reading.logits for reading in readings])
        known = [reading.seen for reading in readings if reading.seen is not None]
        seen = torch.cat(known) if len(known) == len(readings) else None
        return cls(logits, tuple(layers), max(reading.tokens for reading in readings), seen)

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(layer.nbytes for layer in self.state)

    @property
    def batch(self) -> int:
        return self.logits.shape[0]

    @property
    def folded(self) -> bool:
        """Whether it holds a state, and not keys and values."""
        return any(isinstance(layer, State) for layer in self.state)

    def select(self, index: slice | Tensor) -> Reading:
        """Some of the texts, by a slice or an integer tensor, which may repeat and reorder them."""
        return replace(
            self,
            logits=self.logits[index],
            state=tuple(layer.select(index) for layer in self.state),
            seen=None if self.seen is None else self.seen[index],
        )

    def fork(self, count: int) -> Reading:
        """Every text so many times over, to go on from in different ways; in memory of their own."""
        if count < 1:
            raise ValueError(f"count must be at least 1, got {count}")
        return self.select(torch.arange(self.batch, device=self.logits.device).repeat_interleave(count))

    def save(self, path: str | PathLike[str], model: GPT) -> None:
        """Writes a file that `load` reads, in safetensors' layout, with the fingerprint of the model that has read.

        An earlier file of that name is replaced once this one is complete.
        """
        tensors = {"logits": self.logits} | ({} if self.seen is None else {"seen": self.seen})
        layers = []
        for number, layer in enumerate(self.state):
            members = {field.name: getattr(layer, field.name) for field in fields(layer)}
            tensors |= {f"{number}.{name}": x for name, x in members.items() if isinstance(x, Tensor)}
            plain = {name: x for name, x in members.items() if not isinstance(x, Tensor)}
            layers.append({"kind": type(layer).__name__, **plain})
        words = {"tokens": str(self.tokens), "fingerprint": fingerprint_of(model), "layers": json.dumps(layers)}
        tensor_file.save(path, FORMAT, tensors, words)

    @classmethod
    def load(cls, path: str | PathLike[str], model: GPT) -> Reading:
        """Reads a file written by `save`, onto the model's device.

        Raises:
            ValueError: it is no such file, is damaged, or was made by another model.
        """
        try:
            tensors, words = tensor_file.load(path, FORMAT, OLDER_FORMAT)
        except ValueError as error:
            raise ValueError(f"{path} is no reading, or is damaged: {error}") from error
        made_by, own = words.get("fingerprint", ""), fingerprint_of(model)
        if made_by != own:
            raise ValueError(
                f"{path} was made by another model: its fingerprint is {made_by[:16]}…, that of this model {own[:16]}…"
            )
        tensors = {name: x.to(model.embedding.weight.device) for name, x in tensors.items()}
        try:
            layers = [_layer(number, plain, tensors) for number, plain in enumerate(json.loads(words["layers"]))]
            reading = cls(tensors["logits"], tuple(layers), int(words["tokens"]), tensors.get("seen"))
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} is no reading, or is damaged: {error}") from error
        if len(layers) != len(model.blocks) or reading.logits.shape[1:] != (model.config.vocab_size,):
            raise ValueError(
                f"{path} is damaged: it must have {len(model.blocks)} layers and logits of {model.config.vocab_size:,} "
                f"tokens, got {len(layers)} and shape {tuple(reading.logits.shape)}"
            )
        return reading


def fingerprint_of(model: GPT) -> str:
    """A hash of a model's config and parameters: only the same model goes on from what it has read.

    How it computes (form, backend, chunks) is no part of it: all give the same numbers.
    """
    described = asdict(model.config)
    for name in WAYS_TO_COMPUTE:
        described.pop(name)
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=32)
    for name, parameter in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(str(parameter.dtype).encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _joined(layers: Sequence[LayerState]) -> LayerState:
    """One layer of several readings as a batch."""
    kind: Any = KeyValueState if isinstance(layers[0], KeyValueState) else type(layers[0])
    return kind.cat(layers)


def _read(
    model: GPT, tokens: Tensor, state: ModelState | None, piece: int, memory: Memory
) -> tuple[Tensor, ModelState]:
    """The logits after the last token, (b, vocabulary), and the state."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be (batch, time) with at least one token, got shape {tuple(tokens.shape)}")
    if piece < 1:
        raise ValueError(f"piece must be at least 1, got {piece}")
    batch, length = tokens.shape
    state = prepare(model, state, batch, length, memory)
    for part in tokens.split(piece, dim=1):
        features, state = model.features(part, state)
    assert state is not None
    return linear(features[:, -1], model.embedding.weight), state


def _layer(number: int, plain: dict[str, Any], tensors: dict[str, Tensor]) -> LayerState:
    prefix = f"{number}."
    members: dict[str, Any] = {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}
    kind: Any = KINDS[plain.pop("kind")]
    return kind(**plain, **members)
