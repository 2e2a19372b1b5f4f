"""`SympowCache`: the model's state, or its keys and values, as `past_key_values` of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers import Cache

from sympow.checks import check_choice
from sympow.errors import ArgumentError
from sympow.generation.cache import CACHE_POLICIES, CachePolicy, DecodingCache, Model, fold, prefill_state
from sympow.layers.mixers import LayerCache, LayerState
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

    def select(self, index: Tensor) -> Segment:
        return Segment(self.inputs[index], self.mask[index])


@dataclass(frozen=True, eq=False)
class SympowCacheLayer:
    """The state of one layer, as an entry of `SympowCache.layers`."""

    state: LayerState
    is_compileable = False
    is_croppable = False
    is_initialized = True
    is_sliding = False


class SympowCache(Cache):
    """The past of a `SympowModel`. With the sympow mixer its size is bounded, however long the text.

    It is passed as `past_key_values` in place of transformers' `DynamicCache`. Sequences of a batch can be reordered,
    selected and repeated; `copy.deepcopy` forks the cache.

    While tokens are decoded one by one, the cache holds a `DecodingCache` that every step updates in place: a window
    beside a state, or keys and values as long as they take less memory (`sympow.generation.cache`). `state` and a
    prefill of more tokens convert it to a state.

    Tokens cannot be removed from a state. Assisted generation, which has to remove tokens, first calls
    `activate_past_recording`: from then on the cache also holds the state at that point, and the embeddings of all
    later tokens. `crop` restores that state, and the next call of the model first prefills the tokens that were kept.

    Args:
        cache_policy: "auto": keys and values until they would take more bytes than a state, then a state; "state": a
            state from the first token on; "keys": keys and values only.
    """

    def __init__(self, cache_policy: CachePolicy = "auto") -> None:
        # The base's __init__ is not called: it sets `layers`, which is a property here.
        check_choice("cache_policy", cache_policy, CACHE_POLICIES)
        self.layer_class_to_replicate = None
        self.offloading = False
        self.cache_policy = cache_policy
        self._state: ModelState | None = None
        # Takes the place of the state while tokens are decoded one by one.
        self._decoding: DecodingCache | None = None
        self._is_user_defined = False
        self._length = 0
        self._batch = -1
        self._recording = False
        # While recording: the state before `_recorded`, and after a crop the tokens to be prefilled again.
        self._before: ModelState | None = None
        self._recorded: Segment | None = None
        self.pending: Segment | None = None

    @property
    def state(self) -> ModelState | None:
        """The model's state as `sympow.GPT` takes it: one entry for each layer; None before the first token.

        Entries are states, or windows of keys and values while these take less memory.
        """
        if self._decoding is None:
            return self._state
        return copy.deepcopy(self)._closed()

    @property
    def layers(self) -> list[SympowCacheLayer]:  # type: ignore[override]
        """The state of each layer; empty before the first token."""
        return [SympowCacheLayer(layer) for layer in self.state or ()]

    def start(self, model: Model, batch: int, tokens: int) -> ModelState | None:
        """The state from which the model prefills more tokens; the prefill does not modify the cache's own state."""
        state = self._closed()
        if torch.is_grad_enabled():
            if self.cache_policy == "keys":
                raise ArgumentError(
                    "cache_policy", "='keys' is for calls under torch.no_grad(): only states support gradients"
                )
            return None if state is None else uncompiled(fold, state)
        if state is None:
            return prefill_state(model, state, batch, tokens, self.cache_policy)
        return uncompiled(prefill_state, model, state, batch, tokens, self.cache_policy)

    def advance(self, state: ModelState, segment: Segment) -> None:
        """Replaces the state by the one after a segment of tokens that the model has prefilled."""
        if self._recording:
            self._recorded = segment if self._recorded is None else self._recorded.then(segment)
        self._state, self._decoding = state, None
        self._length += segment.length
        self._batch = segment.mask.shape[0]

    def catch_up(self, state: ModelState) -> None:
        """Replaces the state by the one after the `pending` tokens, which the model has prefilled again."""
        self._state = self._before = state
        self.pending = None

    @property
    def can_step(self) -> bool:
        """Whether `step` can decode the next token: there is a past, and it is not being recorded for `crop`."""
        return self.is_initialized and not self._recording and self.pending is None

    def step(self, model: Model, dtype: torch.dtype) -> list[LayerCache]:
        """The caches of the layers for decoding one more token; the model updates them in place.

        Args:
            dtype: the dtype of the model's activations.
        """
        if self._decoding is None:
            assert self._state is not None
            self._decoding = DecodingCache(model, self._state, cache_policy=self.cache_policy, dtype=dtype)
            self._state = None
        elif self._decoding.layers[0].count.is_inference() and not torch.is_inference_mode_enabled():
            # Outside of inference mode, tensors that were made in it cannot be updated in place.
            self._decoding = _copied(self._decoding)
        self._decoding.ensure_capacity()
        self._length += 1
        return self._decoding.layers

    def _closed(self) -> ModelState | None:
        """The state, after converting a `DecodingCache` to one."""
        if self._decoding is not None:
            self._state, self._decoding = uncompiled(self._decoding.close), None
        return self._state

    def __deepcopy__(self, seen: dict[int, Any]) -> SympowCache:
        # Layer by layer with `clone`: `copy.deepcopy` refuses tensors that are part of an autograd graph.
        fork = copy.copy(self)
        seen[id(self)] = fork
        fork._state, fork._before = (
            None if state is None else tuple(layer.clone() for layer in state) for state in (self._state, self._before)
        )
        fork._decoding = None if self._decoding is None else _copied(self._decoding)
        return fork

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including room for further tokens."""
        if self._decoding is not None:
            return self._decoding.nbytes
        return sum(layer.nbytes for layer in self._state or ())

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
        self._length, self._batch, self._recording = 0, -1, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some sequences of the batch, which may be repeated and reordered."""
        # After a crop to before the first token there is no state, but there may be tokens to prefill again.
        if not self.is_initialized and self.pending is None:
            return
        if self._decoding is not None:
            selected = copy.copy(self._decoding)
            selected.layers = [_select_cache(layer, indices) for layer in self._decoding.layers]
            self._decoding = selected
        self._state = None if self._state is None else _select(self._state, indices)
        self._before = None if self._before is None else _select(self._before, indices)
        self._recorded = (
            None if self._recorded is None else self._recorded.select(indices.to(self._recorded.mask.device))
        )
        self.pending = None if self.pending is None else self.pending.select(indices.to(self.pending.mask.device))
        self._batch = len(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence, copies next to each other."""
        self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Makes `crop` possible for all tokens from now on."""
        if not self._recording:
            self._recording, self._before = True, self._closed()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last n tokens for `tokens_to_remove` = −n; 0 makes all tokens so far final.

        Raises:
            ValueError: the tokens came before `activate_past_recording`, or are final.
        """
        removed = -int(tokens_to_remove)
        if removed == 0:
            if self._recording and self.pending is None:
                self._before, self._recorded = self._state, None
            return
        self.pending = without_last(self._recorded, removed)
        self._state, self._recorded = self._before, None
        self._length -= removed
        if self._length == 0:
            self._batch = -1

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("update is not supported: SympowModel itself advances a SympowCache")

    @property
    def batch_size(self) -> int:
        """The number of sequences, or −1 before the first token."""
        return self._batch

    @property
    def max_batch_size(self) -> int:
        return self._batch

    @property
    def is_initialized(self) -> bool:
        return self._state is not None or self._decoding is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """False: `crop` needs `activate_past_recording`."""
        return False

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Whether tokens can be removed."""
        return self._recording

    def __len__(self) -> int:
        """The number of layers; 0 before the first token."""
        return len(self._decoding.layers if self._decoding is not None else self._state or ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, nbytes={self.nbytes})"


def without_last(recorded: Segment | None, removed: int) -> Segment | None:
    """What is left of recorded tokens; None: nothing is.

    Raises:
        ValueError: fewer were recorded than are to be removed, or a negative number is.
    """
    if removed < 0:
        raise ArgumentError(
            "tokens_to_remove",
            f"must not be positive: −n removes n tokens; got {-removed}. Assisted generation calls crop in this way "
            "from transformers 5.16 on",
        )
    available = 0 if recorded is None else recorded.length
    if recorded is None or removed > available:
        raise ArgumentError(
            "tokens_to_remove",
            f"is {removed} tokens, but {available} were recorded: tokens can be removed from a state only if "
            "activate_past_recording was called before them",
        )
    return recorded.first(available - removed) if removed < available else None


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


def _select(state: ModelState, indices: Tensor) -> ModelState:
    return tuple(layer.select(indices.to(_device(layer))) for layer in state)


def _select_cache(layer: LayerCache, indices: Tensor) -> LayerCache:
    # The kernels' workspace is allocated again.
    return replace(layer, workspace=None).select(indices.to(layer.count.device))


def _copied(cache: DecodingCache) -> DecodingCache:
    copied = copy.copy(cache)
    copied.layers = [layer.clone() for layer in cache.layers]
    return copied


def _device(layer: LayerState) -> torch.device:
    return next(iter(layer._tensors().values())).device
