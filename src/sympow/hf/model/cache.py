"""`SympowCache`: the model's state, or its keys and values, as `past_key_values` of transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass

from transformers import Cache

from sympow.generation.cache import CachePolicy
from sympow.hf.past import Past
from sympow.layers.mixers import LayerState
from sympow.model.gpt import ModelState


@dataclass(frozen=True, eq=False)
class SympowCacheLayer:
    """The state of one layer, as an entry of `SympowCache.layers`."""

    state: LayerState
    is_compileable = False
    is_croppable = False
    is_initialized = True
    is_sliding = False


class SympowCache(Past, Cache):
    """The past of a `SympowModel`. With the sympow mixer its size is bounded, however long the text.

    It is passed as `past_key_values` in place of transformers' `DynamicCache`. Sequences of a batch can be reordered,
    selected and repeated; `copy.deepcopy` forks the cache. How it is held, and how `crop` removes tokens, says `Past`;
    what is recorded for `crop` are the embeddings of tokens.

    Args:
        cache_policy: "auto": keys and values until they would take more bytes than a state, then a state; "state": a
            state from the first token on; "keys": keys and values only.
    """

    def __init__(self, cache_policy: CachePolicy = "auto") -> None:
        # The __init__ of `Cache` is not called: it sets `layers`, which is a property here.
        super().__init__(cache_policy)
        self.layer_class_to_replicate = None
        self.offloading = False
        self._is_user_defined = False

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

    @property
    def max_batch_size(self) -> int:
        return self.batch_size

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Whether tokens can be removed."""
        return self.record_past

    def __len__(self) -> int:
        """The number of layers; 0 before the first token."""
        return len(self._decoding.layers if self._decoding is not None else self._state or ())
