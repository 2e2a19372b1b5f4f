"""The decoding cache of a model, and the policy that chooses between a state and keys and values.

A state has D (e + 1) numbers for each head, which is large for large p or d: 29 GB in float32 for p = 4 and d = 64 in
the 124M model. The keys and values of the tokens so far take less memory until there are about D of them, and give the
same numbers. By default they are cached until they would take more memory than the state, and are then folded into one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from sympow.checks import check_choice
from sympow.errors import ArgumentError
from sympow.layers.gates import VectorGate
from sympow.layers.mixers import ConformalAttention, LayerCache, LayerState, Mixer, SoftmaxAttention
from sympow.layers.rotations import NoRotation
from sympow.model.gpt import GPT, ModelState
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


class DecodingCache:
    """One cache for each layer of a model, which decoding steps update in place.

    Args:
        mixers: the layers that computed the state.
        state: their state after the prefix, one entry for each. It is not modified, unless owned.
        dtype: of queries, keys and values.
        tokens: the number of tokens to be decoded, for which memory is allocated. None: the caches grow as needed.
        cache_policy: as in `sympow.generation.decoder.Decoder`.
        owned: whether the state's tensors may be overwritten, which saves a copy.

    Attributes:
        layers: one cache for each layer, all of the same kind.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer],
        state: ModelState,
        dtype: torch.dtype,
        *,
        tokens: int | None = None,
        cache_policy: CachePolicy = "auto",
        owned: bool = False,
    ) -> None:
        check_cache_policy(cache_policy, mixers, state)
        if len(state) != len(mixers):
            raise ArgumentError("prefix", f"must be of a model with {len(mixers)} layers, got {len(state)}")
        self._cache_policy, self._dtype = cache_policy, dtype
        self._gate_per_pair, self._backend = isinstance(mixers[0].gate, VectorGate), mixers[0].backend
        self.layers: list[LayerCache] = [self._open(layer, tokens, owned) for layer in state]

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
            self.layers[number] = self._grown(layer)
        return True

    def fold(self) -> None:
        """Folds the windows of all layers into their states."""
        for layer in self.layers:
            assert isinstance(layer, Window)
            layer.fold(self._backend)

    @torch.no_grad()
    def close(self) -> ModelState:
        """The model's state after the last token. The cache cannot be used afterwards."""
        state: list[LayerState] = []
        while self.layers:
            layer = self.layers.pop(0)
            if isinstance(layer, Window) and layer.kv is None:
                state.append(layer.resized(max(1, layer.tokens)))
            else:
                state.append(layer.close())
        return tuple(state)

    @torch.no_grad()
    def _open(self, layer: LayerState, tokens: int | None, owned: bool) -> LayerCache:
        """The cache that continues a layer's state."""
        if isinstance(layer, KeyValueState):
            return KeyValueCache.open(layer, capacity=self._capacity(layer.length, tokens))
        if isinstance(layer, State):
            return self._open_window(layer, owned)
        if self._cache_policy == "state" or self._outgrown(layer):
            return self._open_window(layer.folded(), owned=True)
        return layer.resized(self._capacity(layer.tokens, tokens, layer.break_even_tokens))

    def _grown(self, cache: LayerCache) -> LayerCache:
        """A cache with room for more tokens in place of a full one without a state, which is not used any more."""
        if isinstance(cache, KeyValueCache):
            return cache.resized(self._capacity(cache.tokens))
        if self._outgrown(cache):
            return self._open_window(cache.close(self._backend), owned=True)
        return cache.resized(self._capacity(cache.tokens, break_even=cache.break_even_tokens))

    def _outgrown(self, window: Window) -> bool:
        return self._cache_policy == "auto" and window.tokens >= window.break_even_tokens

    def _open_window(self, state: State, owned: bool) -> Window:
        per_pair = self._gate_per_pair
        return Window.open(state, capacity=CAPACITY, dtype=self._dtype, gate_per_pair=per_pair, copy=not owned)

    def _capacity(self, held: int, expected: int | None = None, break_even: int | None = None) -> int:
        """Tokens to allocate memory for, those held included; at most the break-even, unless the policy is "keys"."""
        capacity = max(held + MIN_FREE_TOKENS, 2 * held) if expected is None else held + max(1, expected)
        return capacity if break_even is None or self._cache_policy == "keys" else min(capacity, break_even)


def check_cache_policy(cache_policy: str, mixers: Sequence[Mixer], state: ModelState | None = None) -> None:
    """Raises ValueError for a policy that a model's layers do not support, or that their state so far rules out."""
    check_choice("cache_policy", cache_policy, CACHE_POLICIES)
    if cache_policy == "state" and isinstance(mixers[0], SoftmaxAttention):
        raise ArgumentError(
            "cache_policy", "='state' is for symmetric power attention: softmax has no state, only keys and values"
        )
    if cache_policy == "keys" and state is not None and any(isinstance(layer, State) for layer in state):
        raise ArgumentError(
            "cache_policy", "='keys' is not possible here: keys and values were already folded into a state"
        )


def prefill_state(
    model: GPT, state: ModelState | None, batch: int, tokens: int, cache_policy: CachePolicy
) -> ModelState | None:
    """As `layers_before_prefill`, for all layers of a model."""
    return layers_before_prefill(mixers_of(model), state, batch, tokens, cache_policy, activation_dtype(model))


def layers_before_prefill(
    mixers: Sequence[Mixer],
    state: ModelState | None,
    batch: int,
    tokens: int,
    cache_policy: CachePolicy,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> ModelState | None:
    """The state from which a prefill of more tokens starts.

    Args:
        mixers: the layers.
        state: after the tokens so far, one entry for each layer; None: there were none.
        batch: sequences.
        tokens: the number of tokens to be prefilled.
        cache_policy: one of CACHE_POLICIES.
        dtype: of queries, keys and values.
        device: of these; None: where the weights are.

    Returns:
        The given state, or a copy with keys and values folded; without one, empty windows if keys and values are to be
        cached, and None if a state is to be computed.
    """
    check_cache_policy(cache_policy, mixers, state)
    if isinstance(mixers[0], SoftmaxAttention):
        return state
    if state is not None:
        first = state[0]
        outgrown = isinstance(first, Window) and first.tokens + tokens > first.break_even_tokens
        return fold(state) if cache_policy == "state" or (cache_policy == "auto" and outgrown) else state
    if cache_policy == "state" or (device is None and _offloaded(mixers)):
        return None
    windows = _empty_windows(mixers, batch, dtype, device)
    return windows if cache_policy == "keys" or tokens <= windows[0].break_even_tokens else None


def fold(state: ModelState) -> ModelState:
    """A copy in which keys and values are folded into states; the argument is not modified."""
    return tuple(layer.folded() if isinstance(layer, Window) else layer for layer in state)


def break_even_tokens(model: GPT) -> int:
    """The most tokens whose keys and values take no more bytes than a state, for symmetric power attention."""
    return empty_windows(model, 1)[0].break_even_tokens


def state_nbytes(windows: ModelState) -> int:
    """The bytes of a state in place of these keys and values."""
    held = [w for w in windows if isinstance(w, Window)]
    return sum(w.state_nbytes * w.count.numel() + (0 if w.conv_state is None else w.conv_state.nbytes) for w in held)


def empty_windows(model: GPT, batch: int) -> tuple[Window, ...]:
    """A window without tokens and without a state for every layer of symmetric power attention."""
    return _empty_windows(mixers_of(model), batch, activation_dtype(model))


def _empty_windows(
    mixers: Sequence[Mixer], batch: int, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[Window, ...]:
    windows = []
    for mixer in mixers:
        if not isinstance(mixer, ConformalAttention):
            continue
        place = mixer.device if device is None else device
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
            device=place,
        )
        window.conv_state = mixer.initial_conv_state(batch, dtype, place)
        windows.append(window)
    return tuple(windows)


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


def mixers_of(model: GPT) -> list[Mixer]:
    """The attention layers of a model."""
    return [cast("Mixer", block.mixer) for block in model.blocks]


def _offloaded(mixers: Sequence[Mixer]) -> bool:
    """Whether weights are moved to their device only when they are used, so that the device is not known before."""
    return any(parameter.is_meta for mixer in mixers for parameter in mixer.parameters())


def activation_dtype(model: GPT) -> torch.dtype:
    """The dtype of queries, keys and values: that of autocast if enabled, else of the parameters."""
    return autocast_dtype(model.embedding.weight)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with a tensor: that of autocast if enabled, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def gates_per_pair(model: GPT) -> bool:
    """Whether every rotated pair has its own gate."""
    return model.config.gating == "vector"
