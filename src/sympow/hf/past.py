"""`Past`: states of one or several layers as a cache of transformers, for `SympowCache` and `StateLayer`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from sympow.checks import check_choice
from sympow.errors import ArgumentError
from sympow.generation.cache import (
    CACHE_POLICIES,
    CachePolicy,
    DecodingCache,
    autocast_dtype,
    fold,
    layers_before_prefill,
)
from sympow.layers.mixers import LayerCache, LayerState, Mixer
from sympow.model.gpt import ModelState

Result = TypeVar("Result")


@dataclass(frozen=True)
class Segment:
    """Inputs of consecutive tokens, and a mask of those that are not padding.

    Attributes:
        inputs: embeddings, or hidden states before a layer, (b, t, width).
        mask: (b, t) bool, False for padding.
    """

    inputs: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    def first(self, tokens: int) -> Segment:
        return Segment(self.inputs[:, :tokens], self.mask[:, :tokens])

    def then(self, other: Segment) -> Segment:
        return Segment(torch.cat([self.inputs, other.inputs], 1), torch.cat([self.mask, other.mask], 1))

    def select(self, indices: Tensor) -> Segment:
        indices = indices.to(self.mask.device)
        return Segment(self.inputs[indices], self.mask[indices])


class Past:
    """The states of one or several layers, or their keys and values, with the methods of transformers' caches.

    While tokens are decoded one by one, it holds a `DecodingCache` that every step updates in place: a window beside a
    state, or keys and values as long as they take less memory (`sympow.generation.cache`). A prefill of more tokens
    converts that to a state.

    Tokens cannot be removed from a state. Assisted generation, which has to remove tokens, first calls
    `activate_past_recording`: from then on the state at that point is kept too, and the inputs of all later tokens.
    `crop` restores that state, and the next call of the layers first prefills the tokens that were kept.

    Args:
        cache_policy: "auto": keys and values until they would take more bytes than a state, then a state; "state": a
            state from the first token on; "keys": keys and values only.

    Attributes:
        record_past: whether tokens can be removed.
        pending: after a crop, the tokens to prefill again, which are not in the state.
    """

    is_compileable = False
    # `crop` needs `activate_past_recording`.
    is_croppable = False

    def __init__(self, cache_policy: CachePolicy = "auto") -> None:
        check_choice("cache_policy", cache_policy, CACHE_POLICIES)
        self.cache_policy = cache_policy
        self._state: ModelState | None = None
        # Takes the place of the state while tokens are decoded one by one.
        self._decoding: DecodingCache | None = None
        self._length = 0
        self._batch = -1
        self.record_past = False
        # While recording: the state before the tokens of `_recorded`.
        self._before: ModelState | None = None
        self._recorded: Segment | None = None
        self.pending: Segment | None = None

    def start(self, mixers: Sequence[Mixer], x: Tensor, device: torch.device | None = None) -> ModelState | None:
        """The state from which layers prefill x (b, t, width); the prefill does not modify it.

        Args:
            device: of the layers; None: where their weights are.
        """
        state = self._closed()
        if not torch.is_grad_enabled():
            given = (mixers, state, *x.shape[:2], self.cache_policy, autocast_dtype(x), device)
            # Only of a past there is something to fold.
            return layers_before_prefill(*given) if state is None else uncompiled(layers_before_prefill, *given)
        if self.cache_policy == "keys":
            raise ArgumentError(
                "cache_policy", "='keys' is for calls under torch.no_grad(): only states support gradients"
            )
        return None if state is None else uncompiled(fold, state)

    def advance(self, state: ModelState, x: Tensor, mask: Tensor | None) -> None:
        """Replaces the state by the one after more tokens, which the layers have prefilled.

        Args:
            state: after these tokens.
            x: their inputs, (b, t, width).
            mask: (b, t) bool, False for padding; None: no padding.
        """
        if self.record_past:
            mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
            segment = Segment(x.detach(), mask)
            self._recorded = segment if self._recorded is None else self._recorded.then(segment)
        self._state, self._decoding = state, None
        self._length += x.shape[1]
        self._batch = x.shape[0]

    def catch_up(self, state: ModelState) -> None:
        """Replaces the state by the one after the `pending` tokens, which the layers have prefilled again."""
        self._state = self._before = state
        self.pending = None

    @property
    def can_step(self) -> bool:
        """Whether `step` can decode the next token: there is a past, and it is not being recorded for `crop`."""
        return self.is_initialized and not self.record_past and self.pending is None

    def step(self, mixers: Sequence[Mixer], x: Tensor) -> list[LayerCache]:
        """The caches of the layers for decoding one more token, x (b, 1, width); the layers update them in place."""
        if self._decoding is None:
            assert self._state is not None
            how: dict[str, Any] = {"cache_policy": self.cache_policy, "owned": self._may_overwrite(self._state)}
            self._decoding = DecodingCache(mixers, self._state, autocast_dtype(x), **how)
            self._state = None
        elif self._decoding.layers[0].count.is_inference() and not torch.is_inference_mode_enabled():
            # Outside of inference mode, tensors that were made in it cannot be updated in place.
            self._decoding = _with_layers(self._decoding, lambda layer: layer.clone())
        self._decoding.ensure_capacity()
        self._length += 1
        return self._decoding.layers

    def _may_overwrite(self, state: ModelState) -> bool:
        """Whether nothing else refers to a state's tensors."""
        return False

    def _closed(self) -> ModelState | None:
        """The state, after converting a `DecodingCache` to one."""
        if self._decoding is not None:
            self._state, self._decoding = uncompiled(self._decoding.close), None
        return self._state

    def __deepcopy__(self, seen: dict[int, Any]) -> Self:
        # Layer by layer with `clone`: `copy.deepcopy` refuses tensors that are part of an autograd graph.
        seen[id(self)] = fork = copy.copy(self)
        fork._map(lambda layer: layer.clone())
        return fork

    def _map(self, function: Callable[[Any], Any]) -> None:
        """Replaces every layer's state or cache by a function of it."""
        self._state, self._before = (
            None if state is None else tuple(map(function, state)) for state in (self._state, self._before)
        )
        if self._decoding is not None:
            self._decoding = _with_layers(self._decoding, function)

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including room for further tokens."""
        if self._decoding is not None:
            return self._decoding.nbytes
        return sum(layer.nbytes for layer in self._state or ())

    @property
    def is_initialized(self) -> bool:
        return self._state is not None or self._decoding is not None

    @property
    def batch_size(self) -> int:
        """The number of sequences, or −1 before the first token."""
        return self._batch

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens so far, padding included: the length of the attention mask."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No maximum; the earlier name."""
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """The length that an attention mask covers, and its offset."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._length + new, 0

    def reset(self) -> None:
        """Empties the cache, which then does not record tokens for `crop` any more."""
        self._state = self._decoding = self._before = self._recorded = self.pending = None
        self._length, self._batch, self.record_past = 0, -1, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some sequences of the batch, which may be repeated and reordered."""
        # After a crop to before the first token there is no state, but there may be tokens to prefill again.
        if not self.is_initialized and self.pending is None:
            return
        self._map(lambda layer: _select(layer, indices))
        self._recorded, self.pending = (
            None if segment is None else segment.select(indices) for segment in (self._recorded, self.pending)
        )
        self._batch = len(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence, copies next to each other."""
        if self._batch >= 0:
            self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Makes `crop` possible for all tokens from now on."""
        if not self.record_past:
            self.record_past, self._before = True, self._closed()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last n tokens for `tokens_to_remove` = −n; 0 makes all tokens so far final.

        Raises:
            ValueError: the tokens came before `activate_past_recording`, or are final.
        """
        removed = -int(tokens_to_remove)
        if removed == 0:
            if self.record_past and self.pending is None:
                self._before, self._recorded = self._state, None
            return
        if removed < 0:
            raise ArgumentError(
                "tokens_to_remove",
                f"must not be positive: −n removes n tokens; got {-removed}. Assisted generation calls crop in this "
                "way from transformers 5.16 on",
            )
        available = 0 if self._recorded is None else self._recorded.length
        if self._recorded is None or removed > available:
            raise ArgumentError(
                "tokens_to_remove",
                f"is {removed} tokens, but {available} were recorded: tokens can be removed from a state only if "
                "activate_past_recording was called before them",
            )
        self.pending = self._recorded.first(available - removed) if removed < available else None
        self._state, self._recorded = self._before, None
        self._length -= removed
        if self._length == 0:
            self._batch = -1

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(f"update is not supported: the model itself advances its {type(self).__name__}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, nbytes={self.nbytes})"


def uncompiled(function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function outside of graphs of torch.compile, in which windows neither count steps nor fold."""
    # Without a graph to leave, decoding steps need not pay for torch.compiler.disable.
    if not torch.compiler.is_compiling():
        return function(*arguments)
    result: Result = _call_uncompiled(function, *arguments)
    return result


def _call(function: Callable[..., Result], *arguments: Any) -> Result:
    return function(*arguments)


_call_uncompiled: Any = torch.compiler.disable(_call)


def _with_layers(cache: DecodingCache, function: Callable[[LayerCache], LayerCache]) -> DecodingCache:
    """A copy of a cache with a function of every layer's in its place."""
    copied = copy.copy(cache)
    copied.layers = [function(layer) for layer in cache.layers]
    return copied


def _select(layer: Any, indices: Tensor) -> LayerState | LayerCache:
    """Some sequences of a layer's state or cache."""
    if hasattr(layer, "workspace"):
        # The kernels' workspace is allocated again.
        layer = replace(layer, workspace=None)
    selected: LayerState | LayerCache = layer.select(indices.to(next(iter(layer._tensors().values())).device))
    return selected
