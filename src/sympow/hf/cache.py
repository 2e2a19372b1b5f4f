"""`SympowCache`: the state of a model as transformers passes it around."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from sympow.checks import check_choice
from sympow.generation.cache import MEMORIES, Memories, Memory, Model, fold, prepare
from sympow.layers.mixers import LayerMemory, LayerState
from sympow.model.gpt import ModelState


@dataclass(frozen=True)
class Stretch:
    """Inputs of some tokens, and which of them are no padding.

    Attributes:
        inputs: embeddings (b, t, width).
        mask: (b, t) bool.
    """

    inputs: Tensor
    mask: Tensor

    @property
    def length(self) -> int:
        return self.mask.shape[1]

    def first(self, tokens: int) -> Stretch:
        return Stretch(self.inputs[:, :tokens], self.mask[:, :tokens])

    def then(self, other: Stretch) -> Stretch:
        return Stretch(torch.cat([self.inputs, other.inputs], 1), torch.cat([self.mask, other.mask], 1))

    def select(self, index: Tensor) -> Stretch:
        return Stretch(self.inputs[index], self.mask[index])


@dataclass(frozen=True, eq=False)
class SympowCacheLayer:
    """What one layer has read, as an entry of `SympowCache.layers`."""

    state: LayerState
    is_compileable = False
    is_croppable = False
    is_initialized = True
    is_sliding = False


class SympowCache(Cache):
    """What a model has read so far. With the sympow mixer its size is bounded, however much that was.

    Takes the place of transformers' `DynamicCache` as `past_key_values`. Sequences of the batch can be reordered,
    selected and repeated; `copy.deepcopy` forks it.

    Between single tokens, layers keep memories that every step changes in place: a window behind a state, or keys and
    values as long as they take less than a state (`sympow.generation.cache`). They become a state where one is asked
    for.

    A state cannot give tokens back. Assisted generation asks for that, and announces it with `activate_past_recording`:
    from then on the cache also keeps the state before the tokens in question, and their embeddings. `crop` goes back to
    that state, and the next call of the model first reads again what was to be kept.

    Args:
        memory: "auto": keys and values until they would take more bytes than a state; "state": a state from the first
            token on; "keys": keys and values, however many.
    """

    def __init__(self, memory: Memory = "auto") -> None:
        # Not the base's __init__: it makes a list of layers, which are made here from the state when asked for.
        check_choice("memory", memory, MEMORIES)
        self.layer_class_to_replicate = None
        self.offloading = False
        self.memory = memory
        self._state: ModelState | None = None
        # In place of the state while tokens come one by one.
        self._memories: Memories | None = None
        self._is_user_defined = False
        self._length = 0
        self._batch = -1
        self._recording = False
        # While recording: the state before `_recorded`, and after a crop what is to be read again.
        self._before: ModelState | None = None
        self._recorded: Stretch | None = None
        self.unread: Stretch | None = None

    @property
    def state(self) -> ModelState | None:
        """What was read, as `sympow.GPT` takes it: one entry per layer; None before the first token.

        Entries are states, or windows of keys and values while these take less.
        """
        if self._memories is None:
            return self._state
        return copy.deepcopy(self)._closed()

    @property
    def layers(self) -> list[SympowCacheLayer]:  # type: ignore[override]
        """What each layer has read; none before the first token."""
        return [SympowCacheLayer(layer) for layer in self.state or ()]

    def start(self, model: Model, batch: int, tokens: int) -> ModelState | None:
        """What reading some more tokens starts from; for the model. What is kept stays as it is."""
        state = self._closed()
        if torch.is_grad_enabled():
            if self.memory == "keys":
                raise ValueError("memory='keys' is for calls under torch.no_grad(): gradients go through states alone")
            return None if state is None else fold(state)
        return prepare(model, state, batch, tokens, self.memory)

    def advance(self, state: ModelState, read: Stretch) -> None:
        """Takes the state after some more tokens; for the model."""
        if self._recording:
            self._recorded = read if self._recorded is None else self._recorded.then(read)
        self._state, self._memories = state, None
        self._length += read.length
        self._batch = read.mask.shape[0]

    def catch_up(self, state: ModelState) -> None:
        """Takes the state after the tokens that a crop left to be read again; for the model."""
        self._state = self._before = state
        self.unread = None

    @property
    def can_step(self) -> bool:
        """Whether a token may come by `step`: something was read, and none of it may be wanted back."""
        return self.is_initialized and not self._recording and self.unread is None

    def step(self, model: Model, dtype: torch.dtype) -> list[LayerMemory]:
        """The memories with which one more token is decoded; for the model, which then changes them.

        Args:
            dtype: what the model computes in.
        """
        if self._memories is None:
            assert self._state is not None
            self._memories = Memories(model, self._state, memory=self.memory, dtype=dtype)
            self._state = None
        elif self._memories.layers[0].count.is_inference() and not torch.is_inference_mode_enabled():
            # Such tensors cannot be changed any more.
            self._memories = _copied(self._memories)
        self._memories.make_room()
        self._length += 1
        return self._memories.layers

    def _closed(self) -> ModelState | None:
        """The state, into which memories are turned if there are any."""
        if self._memories is not None:
            self._state, self._memories = self._memories.close(), None
        return self._state

    def __deepcopy__(self, seen: dict[int, Any]) -> SympowCache:
        # Records one by one: a tensor that is part of a graph refuses to be copied otherwise.
        fork = copy.copy(self)
        seen[id(self)] = fork
        fork._state, fork._before = (
            None if state is None else tuple(layer.clone() for layer in state) for state in (self._state, self._before)
        )
        fork._memories = None if self._memories is None else _copied(self._memories)
        return fork

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, room for tokens to come included."""
        if self._memories is not None:
            return self._memories.nbytes
        return sum(layer.nbytes for layer in self._state or ())

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read, padding included: how far the attention mask reaches."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """No maximum; the earlier name."""
        return -1

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Positions that a mask covers, and where it starts."""
        new = query_length if isinstance(query_length, int) else query_length.shape[0]
        return self._length + new, 0

    def reset(self) -> None:
        """Forgets everything."""
        self._state = self._memories = self._before = self._recorded = self.unread = None
        self._length, self._batch = 0, -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some sequences of the batch, which may be repeated and reordered."""
        if not self.is_initialized:
            return
        if self._memories is not None:
            selected = copy.copy(self._memories)
            selected.layers = [_select_memory(layer, indices) for layer in self._memories.layers]
            self._memories = selected
        self._state = None if self._state is None else _select(self._state, indices)
        self._before = None if self._before is None else _select(self._before, indices)
        self._recorded = (
            None if self._recorded is None else self._recorded.select(indices.to(self._recorded.mask.device))
        )
        self.unread = None if self.unread is None else self.unread.select(indices.to(self.unread.mask.device))
        self._batch = len(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence so many times over, copies beside each other."""
        self.batch_select_indices(torch.arange(self._batch).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """From now on, keeps what `crop` needs."""
        if not self._recording:
            self._recording, self._before = True, self._closed()

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Takes back the last tokens, given as a negative number; 0 makes all so far final.

        Raises:
            ValueError: they were read before `activate_past_recording`, or are final.
        """
        tokens_to_remove = int(tokens_to_remove)
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must not be positive: −n takes back n tokens; got {tokens_to_remove}. Assisted "
                "generation asks in this way from transformers 5.16 on"
            )
        if tokens_to_remove == 0:
            if self._recording and self.unread is None:
                self._before, self._recorded = self._state, None
            return
        available = 0 if self._recorded is None else self._recorded.length
        if self._recorded is None or -tokens_to_remove > available:
            raise ValueError(
                f"tokens_to_remove asks for {-tokens_to_remove} tokens back, but {available} were recorded: a state "
                "cannot give tokens back, unless activate_past_recording was called before they were read"
            )
        kept = self._recorded.first(available + tokens_to_remove)
        self._state, self._recorded = self._before, None
        self.unread = kept if kept.length else None
        self._length += tokens_to_remove

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("a SympowCache holds states, not keys and values: the model itself advances it")

    @property
    def batch_size(self) -> int:
        """Sequences, or −1 before the first token."""
        return self._batch

    @property
    def max_batch_size(self) -> int:
        return self._batch

    @property
    def is_initialized(self) -> bool:
        return self._state is not None or self._memories is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Not without recording."""
        return False

    def is_recording_past(self, layer_idx: int = 0) -> bool:
        """Whether tokens can be taken back."""
        return self._recording

    def __len__(self) -> int:
        """Layers; none before the first token."""
        return len(self._memories.layers if self._memories is not None else self._state or ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, nbytes={self.nbytes})"


def _select(state: ModelState, indices: Tensor) -> ModelState:
    return tuple(layer.select(indices.to(_device(layer))) for layer in state)


def _select_memory(layer: LayerMemory, indices: Tensor) -> LayerMemory:
    # A workspace is for the kernels, and is made again.
    return replace(layer, workspace=None).select(indices.to(layer.count.device))


def _copied(memories: Memories) -> Memories:
    copied = copy.copy(memories)
    copied.layers = [layer.clone() for layer in memories.layers]
    return copied


def _device(layer: LayerState) -> torch.device:
    return next(iter(layer._tensors().values())).device
