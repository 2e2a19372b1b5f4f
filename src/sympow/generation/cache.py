"""The decoding cache of a model, and the policy that chooses between a state and keys and values.

A state has D (e + 1) numbers for each head, which is large for large p or d: 29 GB in float32 for p = 4 and d = 64 in
the 124M model. The keys and values of the tokens so far take less memory until there are about D of them, and give the
same numbers. By default they are cached until they would take more memory than the state, and are then folded into one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn

from sympow.checks import check_choice
from sympow.errors import ArgumentError
from sympow.layers.gates import VectorGate
from sympow.layers.mixers import ConformalAttention, LayerCache, LayerState
from sympow.layers.rotations import NoRotation
from sympow.model.gpt import ModelState
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.numerics import compute_dtype
from sympow.ops.state import State
from sympow.ops.torch.softmax import KeyValueState
from sympow.ops.window import Window
from sympow.ops.window_batch import CAPACITY

# "auto": keys and values until they would take more bytes than a state, then a state; "state": a state from the first
# token on; "keys": keys and values only.
CachePolicy = Literal["auto", "state", "keys"]
CACHE_POLICIES = ("auto", "state", "keys")
# Free positions of a new cache if the number of tokens to come is not known; later the capacity doubles.
MIN_FREE_TOKENS = 256


class Model(Protocol):
    """The attributes of a model that are used here: `sympow.GPT` and `sympow.hf.SympowModel` have them."""

    @property
    def blocks(self) -> nn.ModuleList: ...
    @property
    def embedding(self) -> nn.Embedding: ...
    @property
    def config(self) -> Any: ...


class DecodingCache:
    """One cache for each layer of a model, which decoding steps update in place.

    Args:
        model: the model that computed the state.
        state: the model's state after the prefix. It is not modified, unless owned.
        tokens: the number of tokens to be decoded, for which memory is allocated. None: the caches grow as needed.
        cache_policy: as in `sympow.generation.decoder.Decoder`.
        owned: whether the state's tensors may be overwritten, which saves a copy.
        dtype: of queries, keys and values; None: `activation_dtype` of the model.

    Attributes:
        layers: one cache for each layer, all of the same kind.
    """

    def __init__(
        self,
        model: Model,
        state: ModelState,
        *,
        tokens: int | None = None,
        cache_policy: CachePolicy = "auto",
        owned: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_cache_policy(cache_policy, model, state)
        if len(state) != len(model.blocks):
            raise ArgumentError("prefix", f"must be of a model with {len(model.blocks)} layers, got {len(state)}")
        self._backend = model.config.backend
        self._room = Room(
            cache_policy, activation_dtype(model) if dtype is None else dtype, gates_per_pair(model), self._backend
        )
        self.layers: list[LayerCache] = [self._room.open(layer, tokens, owned=owned) for layer in state]

    @property
    def folded(self) -> bool:
        """Whether there is a state, and not only keys and values."""
        return any(isinstance(layer, Window) and layer.kv is not None for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, free positions included."""
        return sum(layer.nbytes for layer in self.layers)

    @torch.no_grad()
    def ensure_capacity(self, fold: Callable[[], None] | None = None) -> bool:
        """Ensures capacity for one more token: folds or grows full caches. Returns whether any cache was replaced.

        Args:
            fold: the function that folds all layers; None: `fold`.
        """
        first = self.layers[0]
        if first.tokens < first.capacity:
            return False
        if isinstance(first, Window) and first.kv is not None:
            (fold or self.fold)()
            for layer in self.layers:
                layer.tokens = 0
            return False
        # One layer at a time, so that its old cache is freed before the next layer's new one is allocated.
        for number, layer in enumerate(self.layers):
            self.layers[number] = self._room.make(layer)
        return True

    def fold(self) -> None:
        """Folds the windows of all layers into their states."""
        for layer in self.layers:
            assert isinstance(layer, Window)
            layer.fold(self._backend)

    @torch.no_grad()
    def close(self) -> ModelState:
        """The model's state after the last token. The cache cannot be used afterwards."""
        layers: list[LayerState] = []
        while self.layers:
            layers.append(closed(self.layers.pop(0)))
        return tuple(layers)


@dataclass(frozen=True)
class Room:
    """How one layer's cache gets room for more tokens: which kind of cache it is, and how large.

    Attributes:
        cache_policy: one of CACHE_POLICIES.
        dtype: of queries, keys and values.
        gate_per_pair: whether every rotated pair has its own gate.
        backend: as in `sympow.attention`, for folds.
    """

    cache_policy: CachePolicy
    dtype: torch.dtype
    gate_per_pair: bool
    backend: str = "auto"

    @torch.no_grad()
    def open(self, layer: LayerState, tokens: int | None = None, *, owned: bool = False) -> LayerCache:
        """The cache that continues a layer's state.

        Args:
            tokens: the number of tokens to be decoded, for which memory is allocated; None: not known.
            owned: whether the state's tensors may be overwritten, which saves a copy.
        """
        if isinstance(layer, KeyValueState):
            return KeyValueCache.open(layer, capacity=self._capacity(layer.length, tokens))
        if isinstance(layer, State):
            return self._open_window(layer, owned)
        if self.cache_policy == "state" or (self.cache_policy == "auto" and layer.tokens >= layer.break_even_tokens):
            return self._open_window(layer.folded(), owned=True)
        return layer.resized(self._capacity(layer.tokens, tokens, layer.break_even_tokens))

    @torch.no_grad()
    def make(self, cache: LayerCache) -> LayerCache:
        """A cache with room for more tokens in place of a full one without a state, which is not used any more."""
        if isinstance(cache, KeyValueCache):
            return cache.resized(self._capacity(cache.tokens))
        if self.cache_policy == "auto" and cache.tokens >= cache.break_even_tokens:
            return self._open_window(cache.close(self.backend), owned=True)
        return cache.resized(self._capacity(cache.tokens, break_even=cache.break_even_tokens))

    def _open_window(self, state: State, owned: bool) -> Window:
        return Window.open(state, capacity=CAPACITY, dtype=self.dtype, gate_per_pair=self.gate_per_pair, copy=not owned)

    def _capacity(self, held: int, expected: int | None = None, break_even: int | None = None) -> int:
        """Tokens to allocate memory for, those held included; at most the break-even, unless the policy is "keys"."""
        capacity = max(held + MIN_FREE_TOKENS, 2 * held) if expected is None else held + max(1, expected)
        return capacity if break_even is None or self.cache_policy == "keys" else min(capacity, break_even)


def closed(cache: LayerCache) -> LayerState:
    """A layer's state after the last token: a `State`, or keys and values. The cache cannot be used afterwards."""
    if isinstance(cache, KeyValueCache) or cache.kv is not None:
        return cache.close()
    return cache.resized(max(1, cache.tokens))


def check_cache_policy(cache_policy: str, model: Model, state: ModelState | None = None) -> None:
    """Raises ValueError for a policy that a model does not support, or that its state so far rules out."""
    check_choice("cache_policy", cache_policy, CACHE_POLICIES)
    if cache_policy == "state" and model.config.mixer == "softmax":
        raise ArgumentError(
            "cache_policy", "='state' is for symmetric power attention: softmax has no state, only keys and values"
        )
    if cache_policy == "keys" and state is not None and any(isinstance(layer, State) for layer in state):
        raise ArgumentError(
            "cache_policy", "='keys' is not possible here: keys and values were already folded into a state"
        )


def prefill_state(
    model: Model, state: ModelState | None, batch: int, tokens: int, cache_policy: CachePolicy
) -> ModelState | None:
    """The state from which a prefill of more tokens starts.

    Args:
        state: after the tokens so far; None: there were none.
        batch: sequences.
        tokens: the number of tokens to be prefilled.
        cache_policy: one of CACHE_POLICIES.

    Returns:
        The given state, or a copy with keys and values folded; without one, empty windows if keys and values are to be
        cached, and None if a state is to be computed.
    """
    check_cache_policy(cache_policy, model, state)
    if model.config.mixer == "softmax":
        return state
    if state is None:
        if cache_policy == "state" or _offloaded(model):
            return None
        return empty_windows(model, batch) if cache_policy == "keys" or tokens <= break_even_tokens(model) else None
    return fold(state) if cache_policy == "state" or (cache_policy == "auto" and outgrown(state, tokens)) else state


def outgrown(state: ModelState, tokens: int) -> bool:
    """Whether the state holds keys and values that, with those of more tokens, would take more bytes than a state."""
    layer = state[0]
    return isinstance(layer, Window) and layer.tokens + tokens > layer.break_even_tokens


def fold(state: ModelState) -> ModelState:
    """A copy in which keys and values are folded into states; the argument is not modified."""
    return tuple(layer.folded() if isinstance(layer, Window) else layer for layer in state)


def break_even_tokens(model: Model) -> int:
    """The most tokens whose keys and values take no more bytes than a state, for symmetric power attention."""
    return empty_windows(model, 1)[0].break_even_tokens


def state_nbytes(windows: ModelState) -> int:
    """The bytes of a state in place of these keys and values."""
    held = [w for w in windows if isinstance(w, Window)]
    return sum(w.state_nbytes * w.count.numel() + (0 if w.conv_state is None else w.conv_state.nbytes) for w in held)


def empty_windows(model: Model, batch: int) -> tuple[Window, ...]:
    """A window without tokens and without a state for every layer."""
    dtype = activation_dtype(model)
    mixers = [block.mixer for block in model.blocks]
    return tuple(
        empty_window(mixer, batch, dtype, mixer.device) for mixer in mixers if isinstance(mixer, ConformalAttention)
    )


def empty_window(mixer: ConformalAttention, batch: int, dtype: torch.dtype, device: torch.device) -> Window:
    """A window of one layer without tokens and without a state.

    Args:
        dtype: of queries, keys and values.
    """
    window = Window.empty(
        batch,
        mixer.key_value_heads,
        mixer.head_dim,
        mixer.head_dim,
        mixer.power,
        rotated=not isinstance(mixer.rotation, NoRotation),
        capacity=1,
        dtype=dtype,
        gate_per_pair=isinstance(mixer.gate, VectorGate),
        device=device,
    )
    window.conv_state = mixer.initial_conv_state(batch, dtype, device)
    return window


def empty_state(mixer: ConformalAttention, batch: int, dtype: torch.dtype) -> State:
    """The state of one layer before the first token.

    Args:
        dtype: of queries, keys and values.
    """
    state = State.zeros(
        batch,
        mixer.key_value_heads,
        mixer.head_dim,
        mixer.head_dim,
        mixer.power,
        rotated=not isinstance(mixer.rotation, NoRotation),
        dtype=compute_dtype(dtype),
        device=mixer.device,
    )
    return replace(state, conv_state=mixer.initial_conv_state(batch, dtype, mixer.device))


def _offloaded(model: Model) -> bool:
    """Whether weights are moved to their device only when they are used, so that the device is not known before."""
    return any(parameter.is_meta for parameter in model.blocks.parameters())


def activation_dtype(model: Model) -> torch.dtype:
    """The dtype of queries, keys and values: that of autocast if enabled, else of the parameters."""
    weight = model.embedding.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def gates_per_pair(model: Model) -> bool:
    """Whether every rotated pair has its own gate."""
    return model.config.gating == "vector"
