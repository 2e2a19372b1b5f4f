"""`StateLayer`: the entry of a swapped layer in a `DynamicCache`, beside the keys and values of softmax layers."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.generation.cache import CachePolicy
from sympow.hf.past import Past
from sympow.layers.mixers import LayerCache, LayerState
from sympow.model.gpt import ModelState


class StateLayer(Past, CacheLayerMixin):  # type: ignore[override]
    """The past of one swapped layer: a state, or keys and values while these take less memory.

    How it is held, and how `crop` removes tokens, says `Past`; what is recorded for `crop` are the hidden states before
    the layer.

    Args:
        cache_policy: as in `sympow.hf.SympowCache`.
    """

    is_sliding = False
    supports_early_init = False
    keys = values = None

    def __init__(self, cache_policy: CachePolicy = "auto", **ignored: Any) -> None:
        # The __init__ of `CacheLayerMixin` is not called: it sets `is_initialized`, which is a property here.
        super().__init__(cache_policy)

    @property
    def past(self) -> LayerState | LayerCache | None:
        """A `State`, a `Window`, or None before the first token."""
        layers = self._state if self._decoding is None else self._decoding.layers
        return None if layers is None else layers[0]

    def _may_overwrite(self, state: ModelState) -> bool:
        # Only this cache refers to the state of a prefill, and autograd if it needs it.
        return not state[0].requires_grad

    def offload(self) -> None:
        """Does nothing: a state is small, and stays where it is."""

    def prefetch(self) -> None:
        """Does nothing."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("lazy_initialization is not supported: a swapped layer itself advances its cache")


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
