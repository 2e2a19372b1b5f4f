"""`StateLayer`: the entry of a swapped layer in a `DynamicCache`, beside the keys and values of softmax layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.generation.cache import CachePolicy, Room, closed, empty_window
from sympow.hf.model.cache import Segment, uncompiled, without_last
from sympow.layers.gates import VectorGate
from sympow.layers.mixers import ConformalAttention, LayerCache
from sympow.ops.state import State
from sympow.ops.window import Window


class StateLayer(CacheLayerMixin):
    """The past of one swapped layer: a state, or keys and values while these take less memory.

    Tokens cannot be removed from a state. Assisted generation, which has to remove tokens, first calls
    `activate_past_recording`: from then on the layer also holds the state at that point, and the hidden states of all
    later tokens. `crop` restores that state, and at its next call the attention module first prefills the tokens that
    were kept.

    Args:
        cache_policy: as in `sympow.hf.SympowCache`.

    Attributes:
        past: a `State`, a `Window`, or None before the first token.
        record_past: whether tokens can be removed.
        pending: after a crop, the tokens to prefill again, which are not in `past`.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache_policy: CachePolicy = "auto", **ignored: Any) -> None:
        super().__init__()
        self.cache_policy = cache_policy
        self.past: State | Window | None = None
        # Whether `past` is a window with room for more tokens, which `step` updates in place.
        self._open = False
        self._length = 0
        self.record_past = False
        # While recording: the state before the tokens of `_recorded`.
        self._before: State | Window | None = None
        self._recorded: Segment | None = None
        self.pending: Segment | None = None

    def start(self, layer: ConformalAttention, x: Tensor) -> State | Window | None:
        """The state or window that a prefill of x (b, t, width) continues, which the prefill does not modify."""
        self._close()
        if torch.is_grad_enabled():
            if self.cache_policy == "keys":
                raise ArgumentError(
                    "cache_policy", "='keys' is for calls under torch.no_grad(): only states support gradients"
                )
            return uncompiled(self.past.folded) if isinstance(self.past, Window) else self.past
        tokens, keys_only = x.shape[1], self.cache_policy == "keys"
        if isinstance(self.past, Window):
            outgrown = self.past.tokens + tokens > self.past.break_even_tokens
            return uncompiled(self.past.folded) if outgrown and not keys_only else self.past
        if self.past is None and self.cache_policy != "state":
            window = empty_window(layer, x.shape[0], _activation_dtype(x), x.device)
            return window if keys_only or tokens <= window.break_even_tokens else None
        return self.past

    def advance(self, past: State | Window, x: Tensor, mask: Tensor | None) -> None:
        """Replaces the past by the one after more tokens, which the attention module has prefilled.

        Args:
            past: the state or window after these tokens.
            x: their hidden states, (b, t, width).
            mask: (b, t) bool, False for padding; None: no padding.
        """
        if self.record_past:
            segment = Segment(x.detach(), x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask)
            self._recorded = segment if self._recorded is None else self._recorded.then(segment)
        self.past, self._open, self.is_initialized = past, False, True
        self._length += x.shape[1]

    def catch_up(self, past: State | Window) -> None:
        """Replaces the past by the one after the `pending` tokens, which were prefilled again."""
        self.past = self._before = past
        self.pending = None

    @property
    def can_step(self) -> bool:
        """Whether the next token can be decoded by `step`."""
        return self.past is not None and not self.record_past

    def step(self, layer: ConformalAttention, x: Tensor) -> Window:
        """The window for decoding one more token; the decoding step updates it in place."""
        assert self.past is not None
        dtype = _activation_dtype(x)
        room = Room(self.cache_policy, dtype, isinstance(layer.gate, VectorGate), layer.backend)
        past = self.past
        window: LayerCache
        if not self._open or isinstance(past, State):
            # Only this cache refers to the state of a prefill, so it may be overwritten unless autograd needs it.
            window = room.open(past, owned=not (isinstance(past, State) and past.requires_grad))
        elif past.count.is_inference() and not torch.is_inference_mode_enabled():
            # Outside of inference mode, tensors that were made in it cannot be updated in place.
            window = past.clone()
        else:
            window = past
        assert isinstance(window, Window)
        if window.tokens == window.capacity and window.kv is None:
            window = room.make(window)
            assert isinstance(window, Window)
        self.past, self._open = window, True
        self._length += 1
        return window

    def _close(self) -> None:
        """Turns an open window into what `start` may return."""
        if self._open:
            assert isinstance(self.past, Window)
            past = uncompiled(closed, self.past)
            assert isinstance(past, State | Window)
            self.past, self._open = past, False

    @property
    def nbytes(self) -> int:
        """Bytes allocated, including room for further tokens."""
        return 0 if self.past is None else self.past.nbytes

    @property
    def batch_size(self) -> int:
        """The number of sequences, or −1 before the first token."""
        if self.past is None:
            # After a crop to before the first token, all tokens that are left are to be prefilled again.
            return -1 if self.pending is None else self.pending.mask.shape[0]
        return self.past.batch if isinstance(self.past, State) else self.past.count.shape[0]

    def get_seq_length(self) -> int:
        """The number of tokens so far, padding included."""
        return self._length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """The length that an attention mask covers, and its offset."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._length + new, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No maximum; the earlier name."""
        return -1

    def reset(self) -> None:
        """Empties the cache, which then does not record tokens for `crop` any more."""
        self.past, self._open, self._length, self.is_initialized, self.record_past = None, False, 0, False, False
        self._before = self._recorded = self.pending = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some sequences of the batch, which may be repeated and reordered."""
        self.past, self._before = _select(self.past, indices), _select(self._before, indices)
        self._recorded, self.pending = (
            None if segment is None else segment.select(indices.to(segment.mask.device))
            for segment in (self._recorded, self.pending)
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every sequence, copies next to each other."""
        if self.batch_size >= 0:
            self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Makes `crop` possible for all tokens from now on."""
        if not self.record_past:
            self._close()
            self.record_past, self._before = True, self.past

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last n tokens for `tokens_to_remove` = −n; 0 makes all tokens so far final.

        Raises:
            ValueError: the tokens came before `activate_past_recording`, or are final.
        """
        removed = -int(tokens_to_remove)
        if removed == 0:
            if self.record_past and self.pending is None:
                self._before, self._recorded = self.past, None
            return
        self.pending = without_last(self._recorded, removed)
        self.past, self._recorded = self._before, None
        self._length -= removed

    def offload(self) -> None:
        """Does nothing: a state is small, and stays where it is."""

    def prefetch(self) -> None:
        """Does nothing."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("lazy_initialization is not supported: a swapped layer itself advances its cache")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("update is not supported: a swapped layer itself advances its cache")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, nbytes={self.nbytes})"


def state_layer(cache: Cache, index: int, cache_policy: CachePolicy) -> StateLayer:
    """The entry of a cache for the swapped layer `index`.

    An empty entry of another kind is replaced: `generate` and the models make the entries of a `DynamicCache` by the
    layer types in the config, among which there is none for swapped layers. This is early enough, since all kinds of
    empty entries report the same length.

    Raises:
        TypeError, ValueError: the cache is of another kind, has too few layers, or keys and values for this one.
    """
    layers = getattr(cache, "layers", None)
    if not isinstance(cache, Cache) or not isinstance(layers, list):
        raise ArgumentTypeError("past_key_values", f"must be a DynamicCache, got {type(cache).__name__}")
    kind = cache.layer_class_to_replicate
    while kind is not None and len(layers) <= index:
        layers.append(kind())
    if len(layers) <= index:
        raise ArgumentError(
            "past_key_values",
            f"must have an entry for layer {index}, which was swapped; it has {len(layers)}, so it was "
            "made for another model",
        )
    layer = layers[index]
    if isinstance(layer, StateLayer):
        return layer
    if layer.is_compileable:
        raise ArgumentError(
            "past_key_values",
            f"must be a DynamicCache: layer {index} was swapped, and its state has one implementation; "
            f"got {type(cache).__name__}",
        )
    if layer.get_seq_length():
        raise ArgumentError(
            "past_key_values",
            f"must have a state for layer {index}, which was swapped; it has keys and values of "
            f"{layer.get_seq_length()} tokens, so it was made by another model",
        )
    layers[index] = layer = StateLayer(cache_policy)
    return layer


def prefetch_next(cache: Cache, index: int, device: torch.device) -> None:
    """Starts to bring the keys and values of the layer after `index` back to a GPU, if the cache offloads them.

    `Cache.update` prefetches for the layer after its own, but is not called for swapped layers. As in `Cache.update`,
    each stream first waits for the other: keys must have arrived before they are read, and left before they are
    fetched.
    """
    # Not every version of transformers has the attribute.
    if not getattr(cache, "offloading", False):
        return
    streams: Any = cache.prefetch_stream, torch.cuda.default_stream(device)
    streams[1].wait_stream(streams[0])
    streams[0].wait_stream(streams[1])
    cache.prefetch(index + 1, cache.only_non_sliding)


def _select(past: State | Window | None, indices: Tensor) -> State | Window | None:
    if isinstance(past, Window):
        # The kernels' workspace is allocated again.
        return replace(past, workspace=None).select(indices.to(past.count.device))
    return None if past is None else past.select(indices.to(past.kv.device))


def _activation_dtype(x: Tensor) -> torch.dtype:
    """The dtype of queries, keys and values that are projected from x."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
