"""`SympowCache`: the state of a model as transformers passes it around."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import Cache

from sympow.layers.mixers import LayerState
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


class SympowCache(Cache):
    """What a model has read so far. With the sympow mixer its size does not depend on how much that was.

    Takes the place of transformers' `DynamicCache` as `past_key_values`. Sequences of the batch can be reordered,
    selected and repeated; `copy.deepcopy` forks it.

    A state cannot give tokens back. Assisted generation asks for that, and announces it with `activate_past_recording`:
    from then on the cache also keeps the state before the tokens in question, and their embeddings. `crop` goes back to
    that state, and the next call of the model first reads again what was to be kept.

    Attributes:
        state: one entry per layer, as `sympow.GPT` returns it; None before the first token.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: ModelState | None = None
        self._is_user_defined = False
        self._length = 0
        self._batch = -1
        self._recording = False
        # While recording: the state before `_recorded`, and after a crop what is to be read again.
        self._before: ModelState | None = None
        self._recorded: Stretch | None = None
        self.unread: Stretch | None = None

    def advance(self, state: ModelState, read: Stretch) -> None:
        """Takes the state after some more tokens; for the model."""
        if self._recording:
            self._recorded = read if self._recorded is None else self._recorded.then(read)
        self.state = state
        self._length += read.length
        self._batch = read.mask.shape[0]

    def catch_up(self, state: ModelState) -> None:
        """Takes the state after the tokens that a crop left to be read again; for the model."""
        self.state = self._before = state
        self.unread = None

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return sum(layer.nbytes for layer in self.state or ())

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
        self.state = self._before = self._recorded = self.unread = None
        self._length, self._batch = 0, -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what sequence beam_idx[i] was."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps some sequences of the batch, which may be repeated and reordered."""
        if self.state is None:
            return
        self.state = _select(self.state, indices)
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
            self._recording, self._before = True, self.state

    def crop(self, tokens_to_remove: int) -> None:
        """Takes back the last tokens, given as a negative number; 0 makes all so far final.

        Raises:
            ValueError: they were read before `activate_past_recording`, or are final.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must not be positive: −n takes back n tokens; got {tokens_to_remove}. Assisted "
                "generation asks in this way from transformers 5.16 on"
            )
        if tokens_to_remove == 0:
            if self._recording and self.unread is None:
                self._before, self._recorded = self.state, None
            return
        available = 0 if self._recorded is None else self._recorded.length
        if self._recorded is None or -tokens_to_remove > available:
            raise ValueError(
                f"tokens_to_remove asks for {-tokens_to_remove} tokens back, but {available} were recorded: a state "
                "cannot give tokens back, unless activate_past_recording was called before they were read"
            )
        kept = self._recorded.first(available + tokens_to_remove)
        self.state, self._recorded = self._before, None
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
        return self.state is not None

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        """Not without recording."""
        return False

    def __len__(self) -> int:
        return len(self.state or ())

    def __repr__(self) -> str:
        return f"{type(self).__name__}(length={self._length}, nbytes={self.nbytes})"


def _select(state: ModelState, indices: Tensor) -> ModelState:
    return tuple(layer.select(indices.to(_device(layer))) for layer in state)


def _device(layer: LayerState) -> torch.device:
    return next(iter(layer._tensors().values())).device
