"""`Prefix`: a text prefilled in segments, which can be extended, forked, saved, loaded, and decoded from.

    prefix = Prefix.prefill(model, tokens)      # tokens (b, t); memory depends on the segment size, not on t
    prefix.save("book.prefix", model)
    prefix = Prefix.load("book.prefix", model)  # only by the model that prefilled it
    for token in generate(model, 100, prefix=prefix): ...

A prefix holds a state of fixed size, or the keys and values of its tokens while those take less memory
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
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.generation.cache import CachePolicy, fold, prefill_state
from sympow.layers.mixers import LayerState
from sympow.model.config import EXECUTION_OPTIONS
from sympow.model.gpt import GPT, SEGMENT_SIZE, ModelState
from sympow.ops.compilation import DERIVED
from sympow.ops.state import State, check_phase
from sympow.ops.torch.softmax import KeyValueState, PaddedKeyValueState
from sympow.ops.window import Window

FORMAT = "sympow prefix 1"
# What a file must have besides the tensors of layers.
TENSORS, WORDS = ("logits", "seen"), ("fingerprint", "layers", "tokens")
# A layer's "kind" in a file.
KINDS: dict[str, type[LayerState]] = {
    "State": State,
    "KeyValueState": KeyValueState,
    "PaddedKeyValueState": PaddedKeyValueState,
    "Window": Window,
}
KIND_NAMES = {kind: name for name, kind in KINDS.items()}


@dataclass(frozen=True)
class Prefix:
    """A batch of prefilled texts: the model's state after their last tokens, and the logits of the next ones.

    Attributes:
        logits: of the next token, (b, vocabulary).
        state: the model's state, one entry for each layer.
        tokens: the number of tokens; of texts of different lengths, the longest's.
        seen: which tokens of the vocabulary occurred, (b, vocabulary) bool, for a repetition penalty.
    """

    logits: Tensor
    state: ModelState
    tokens: int
    seen: Tensor

    @classmethod
    @torch.no_grad()
    def prefill(
        cls, model: GPT, tokens: Tensor, *, segment_size: int = SEGMENT_SIZE, cache_policy: CachePolicy = "auto"
    ) -> Prefix:
        """Prefills texts from their beginning, one segment of tokens after another.

        Args:
            tokens: (b, t), at least one token.
            segment_size: tokens of a segment; memory depends on it, and not on t.
            cache_policy: what the prefix holds. "auto": keys and values if they take no more bytes than a state, else a
                state; "state" or "keys": always the one or the other. All give the same numbers.
        """
        logits, state = _prefill(model, tokens, None, segment_size, cache_policy)
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, tokens, True)
        return cls(logits, state, tokens.shape[1], seen)

    @torch.no_grad()
    def extend(
        self, model: GPT, tokens: Tensor, *, segment_size: int = SEGMENT_SIZE, cache_policy: CachePolicy = "auto"
    ) -> Prefix:
        """A prefix with more tokens (b, t) at its end; this one is not modified. Arguments as in `prefill`."""
        logits, state = _prefill(model, tokens, self.state, segment_size, cache_policy)
        return Prefix(logits, state, self.tokens + tokens.shape[1], self.seen.scatter(1, tokens, True))

    @classmethod
    @torch.no_grad()
    def cat(cls, prefixes: Sequence[Prefix]) -> Prefix:
        """Joins prefixes of any lengths into one batch. If one holds a state, all others are folded into states."""
        if not prefixes:
            raise ArgumentError("prefixes", "must hold at least one prefix, got none")
        for prefix in prefixes:
            if not isinstance(prefix, Prefix):
                raise ArgumentTypeError("prefixes", f"must hold objects of class Prefix, got {type(prefix).__name__}")
        states = [prefix.state for prefix in prefixes]
        if any(prefix.folded for prefix in prefixes):
            states = [fold(state) for state in states]
        layers = [_joined(members) for members in zip(*states, strict=True)]
        logits = torch.cat([prefix.logits for prefix in prefixes])
        seen = torch.cat([prefix.seen for prefix in prefixes])
        return cls(logits, tuple(layers), max(prefix.tokens for prefix in prefixes), seen)

    @property
    def nbytes(self) -> int:
        """Bytes of the state, or of the keys and values."""
        return sum(layer.nbytes for layer in self.state)

    @property
    def total_nbytes(self) -> int:
        """Bytes of all tensors: `nbytes`, and those of `logits` and `seen`."""
        return self.nbytes + self.logits.nbytes + self.seen.nbytes

    @property
    def batch(self) -> int:
        return self.logits.shape[0]

    @property
    def folded(self) -> bool:
        """Whether it holds a state rather than keys and values."""
        return any(isinstance(layer, State) for layer in self.state)

    def select(self, index: slice | Tensor) -> Prefix:
        """Some of the texts, by a slice or an integer tensor, which may repeat and reorder them."""
        return replace(
            self,
            logits=self.logits[index],
            state=tuple(layer.select(index) for layer in self.state),
            seen=self.seen[index],
        )

    def fork(self, count: int) -> Prefix:
        """A batch with every text `count` times, to be continued in different ways; shares no memory with this one."""
        if count < 1:
            raise ArgumentError("count", f"must be at least 1, got {count}")
        return self.select(torch.arange(self.batch, device=self.logits.device).repeat_interleave(count))

    def save(self, path: str | PathLike[str], model: GPT, *, fingerprint: str | None = None) -> None:
        """Writes a file that `load` reads, in the layout of safetensors, with the fingerprint of the model.

        An existing file is replaced once the new one is complete.

        Args:
            fingerprint: the model's, if the caller knows it: `fingerprint_of` reads all parameters.
        """
        tensors = {"logits": self.logits, "seen": self.seen}
        layers = []
        for number, layer in enumerate(self.state):
            members = {name: getattr(layer, name) for name in _stored(type(layer))}
            tensors |= {f"{number}.{name}": x for name, x in members.items() if isinstance(x, Tensor)}
            plain = {name: x for name, x in members.items() if not isinstance(x, Tensor)}
            layers.append({"kind": KIND_NAMES[type(layer)], **plain})
        words = {
            "tokens": str(self.tokens),
            "fingerprint": fingerprint or fingerprint_of(model),
            "layers": json.dumps(layers),
        }
        tensor_file.save(path, FORMAT, tensors, words)

    @classmethod
    def load(cls, path: str | PathLike[str], model: GPT, *, fingerprint: str | None = None) -> Prefix:
        """Reads a file written by `save`, onto the model's device.

        Args:
            fingerprint: the model's, as in `save`.

        Raises:
            ValueError: the file is something else or damaged, or was written by another model, or in another dtype.
        """
        try:
            tensors, words = tensor_file.load(path, FORMAT)
        except ValueError as error:
            raise UserError(f"{path} is not a prefix file, or is damaged: {error}") from error
        missing = [name for name in TENSORS if name not in tensors] + [name for name in WORDS if name not in words]
        if missing:
            raise UserError(f"{path} is not a prefix file, or is damaged: it lacks {', '.join(missing)}")
        made_by, own = words["fingerprint"], fingerprint or fingerprint_of(model)
        if made_by != own:
            _check_dtype(path, tensors, model)
            raise UserError(
                f"{path} was made by another model: its fingerprint is {made_by[:16]}…, that of this model {own[:16]}…"
            )
        tensors = {name: x.to(model.embedding.weight.device) for name, x in tensors.items()}
        try:
            layers = [_layer(number, plain, tensors) for number, plain in enumerate(json.loads(words["layers"]))]
            prefix = cls(tensors["logits"], tuple(layers), int(words["tokens"]), tensors["seen"])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise UserError(f"{path} is not a prefix file, or is damaged: {error}") from error
        if len(layers) != len(model.blocks) or prefix.logits.shape[1:] != (model.config.vocab_size,):
            raise UserError(
                f"{path} is damaged: it must have {len(model.blocks)} layers and logits of {model.config.vocab_size:,} "
                f"tokens, got {len(layers)} and shape {tuple(prefix.logits.shape)}"
            )
        return prefix


def _check_dtype(path: str | PathLike[str], tensors: dict[str, Tensor], model: GPT) -> None:
    """Raises if the reason why a file does not fit a model is its dtype, which is that of the logits."""
    made_in, own = tensors["logits"].dtype, model.output_weight.dtype
    if made_in != own:
        raise UserError(
            f"{path} was made by a model in {str(made_in).removeprefix('torch.')}, and this model is in "
            f"{str(own).removeprefix('torch.')}: load the model in the dtype of the file, or prefill the text again"
        )


def fingerprint_of(model: GPT) -> str:
    """A hash of a model's config and parameters: a prefix is only valid for the model that prefilled it.

    Execution options (form, backend, chunk size) are left out: all of them give the same numbers.
    """
    described = asdict(model.config) | dict(model.description)
    for name in EXECUTION_OPTIONS:
        described.pop(name)
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=32)
    hashed = set()
    for name, parameter in sorted(model.state_dict().items()):
        # Models of transformers have tensors under several names.
        place = (parameter.data_ptr(), parameter.shape, parameter.stride())
        if place in hashed and model.description:
            continue
        hashed.add(place)
        digest.update(name.encode())
        digest.update(str(parameter.dtype).encode())
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _joined(layers: Sequence[LayerState]) -> LayerState:
    """One layer of several prefixes as a batch."""
    kind: Any = KeyValueState if isinstance(layers[0], KeyValueState) else type(layers[0])
    return kind.cat(layers)


def _prefill(
    model: GPT, tokens: Tensor, state: ModelState | None, segment_size: int, cache_policy: CachePolicy
) -> tuple[Tensor, ModelState]:
    """The logits after the last token, (b, vocabulary), and the state."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ArgumentError("tokens", f"must be (batch, time) with at least one token, got shape {tuple(tokens.shape)}")
    if segment_size < 1:
        raise ArgumentError("segment_size", f"must be at least 1, got {segment_size}")
    batch, length = tokens.shape
    state = prefill_state(model, state, batch, length, cache_policy)
    for segment in tokens.split(segment_size, dim=1):
        features, state = model.features(segment, state)
    assert state is not None
    return linear(features[:, -1], model.output_weight), state


def _layer(number: int, plain: dict[str, Any], tensors: dict[str, Tensor]) -> LayerState:
    """A layer's entry of the state, from its plain values and its tensors in a file."""
    start = f"{number}."
    members: dict[str, Any] = {name.removeprefix(start): x for name, x in tensors.items() if name.startswith(start)}
    kind: Any = KINDS[plain.pop("kind")]
    if missing := _stored(kind) - plain.keys() - members.keys():
        raise UserError(f"layer {number} lacks {', '.join(sorted(missing))}")
    check_phase(members.get("phase"))
    return kind(**plain, **members)


def _stored(kind: type[LayerState]) -> set[str]:
    """The fields of a layer's state that a file has."""
    return {field.name for field in fields(kind) if field.metadata != DERIVED}
