"""`Slots`: the caches of a fixed number of sequences, which come and go between the steps of one batch.

Rounding must not depend on who shares the batch, or a request would give different tokens in company: a matrix product
rounds its rows alike only where it has the same number of them. So products over the batch always have `step_rows`
rows, filled up with zeros, while attention, whose rows are independent of each other, runs on the rows in use alone.
Each row is folded when its own window is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Self, cast

import torch
from torch import Tensor

from sympow.generation.cache import activation_dtype, empty_state, fold, gates_per_pair
from sympow.generation.prefix import Prefix
from sympow.layers.mixers import ConformalAttention, LayerCache, Mixer
from sympow.model.gpt import GPT
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.state import State
from sympow.ops.torch.softmax import KeyValueState
from sympow.ops.window import Window
from sympow.ops.window_batch import copy_scales
from sympow.serving.engine.captured import CapturedCalls
from sympow.serving.engine.prefill_graphs import StateBuffer


class SlotWindow(Window):
    """A window whose rows round alike in every selection of them, and however full other rows are.

    Attributes:
        whole: the rows of the window that this one shows some rows of; 0: this is all.
    """

    whole = 0

    def _rows(self, start: int, stop: int) -> Self:
        shown = super()._rows(start, stop)
        shown.whole = self.whole or len(self.values)
        return shown

    def replace_row(self, row: Tensor, state: State) -> None:
        """As `put` of a state of one sequence, with a row (1,) on the device, so that one CUDA graph serves all rows.

        Args:
            state: in the dtype of the window's own.
        """
        assert self.kv is not None
        assert self.normalizer is not None
        for emptied in (self.keys, self.values, self.decay, self.count, self.arrivals):
            emptied.index_fill_(0, row, 0)
        self.kv.index_copy_(0, row, state.kv)
        self.normalizer.index_copy_(0, row, state.normalizer)
        if self.phase is not None and state.phase is not None:
            self.phase.index_copy_(0, row, state.phase)
        if self.conv_state is not None and state.conv_state is not None:
            self.conv_state.index_copy_(0, row, state.conv_state.to(self.conv_state.dtype))
        if self.kv_half is not None and self.kv_scale is not None:
            scale, factor = copy_scales(state.kv)
            half = torch.empty_like(state.kv, dtype=self.kv_half.dtype)
            self.kv_scale.index_copy_(0, row, scale)
            self.kv_half.index_copy_(0, row, torch.mul(state.kv, factor.unsqueeze(-1), out=half))

    def _filled(self) -> tuple[int, bool]:
        return self.capacity, False

    def _split_batch(self) -> int:
        return self.whole


class PaddedCache:
    """A cache of some rows in the place of one of `rows` rows: the outputs of the others are zero."""

    def __init__(self, cache: LayerCache, rows: int) -> None:
        self.cache, self._rows = cache, rows

    @property
    def values(self) -> Tensor:
        return self.cache.values

    @property
    def conv_state(self) -> Tensor | None:
        return self.cache.conv_state

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None,
        beta: Tensor | None,
        theta: Tensor | None,
        backend: str,
    ) -> Tensor:
        """As `Window.step`."""
        count = len(self.values)
        # Windows fold themselves at the end of eager steps only, and all rows together: `Slots` folds them.
        self.cache.tokens = 0
        q, k, v = q[:count], k[:count], v[:count]
        log_gamma, beta = (None if x is None else x[:count] for x in (log_gamma, beta))
        y = self.cache.step(q, k, v, log_gamma, beta, theta, backend=backend)
        if count == self._rows:
            return y
        padded = y.new_zeros(self._rows, *y.shape[1:])
        padded[:count] = y
        return padded


class Slots:
    """The caches, next logits and tokens of `slots` sequences, in rows that are replaced one at a time.

    Args:
        model: the model.
        slots: rows.
        window: tokens of a row between two folds.
        max_context: capacity of a row for softmax, in tokens.
        step_rows: rows of every matrix product.
        graphs: whether to capture steps as CUDA graphs, on a GPU: one for each number of rows that is a power of two.
        buffer: through which states are put into rows by one graph for all rows; others may use it between calls.
            None: without a graph.

    Attributes:
        logits: of the next token, (slots, vocabulary), float32 or better; sometimes with a row more.
        seen: which tokens of the vocabulary occurred, of the same shape, bool.
        tokens: the tokens that a step takes, one for each row and for padding.
        calls: the graphs.
    """

    def __init__(
        self,
        model: GPT,
        slots: int,
        *,
        window: int,
        max_context: int | None,
        step_rows: int,
        graphs: bool,
        buffer: StateBuffer | None = None,
    ) -> None:
        weight = model.embedding.weight
        device, vocabulary = weight.device, model.config.vocab_size
        self._model, self._slots, self._step_rows = model, slots, step_rows
        self._backend = model.config.backend
        self._capture = graphs and device.type == "cuda"
        self.calls = CapturedCalls(capture=self._capture, optional=True)
        padded = -(-slots // step_rows) * step_rows
        self.tokens = torch.zeros(padded, dtype=torch.int64, device=device)
        # A batch of one has other strides than any other, for which products and sums may add in another order: no step
        # works on one row, unless all do. The last row may need one beside it for that.
        self._least = min(2, step_rows)
        rows = slots + (slots % step_rows == 1 and self._least == 2)
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self.logits = torch.zeros(rows, vocabulary, dtype=dtype, device=device)
        self.seen = torch.zeros(rows, vocabulary, dtype=torch.bool, device=device)
        mixers = [mixer for mixer in model.modules() if isinstance(mixer, Mixer)]
        self._layers = [_empty_cache(model, mixer, rows, window, max_context) for mixer in mixers]
        self._window = window if isinstance(self._layers[0], Window) else None
        self._held = [0] * rows  # tokens in the window of each row
        self._fronts: dict[tuple[int, int], list[PaddedCache]] = {}
        self._buffer = buffer
        self._row = torch.zeros(1, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return sum(layer.nbytes for layer in self._layers)

    def batch_rows(self, rows: int) -> int:
        """The rows that a step of the first `rows` rows works on: on a GPU, where graphs are captured, a few sizes."""
        size = min(self._slots, 1 << (rows - 1).bit_length()) if self._capture else rows
        return max(size, min(self._least, len(self.logits)))

    def put(self, row: int, prefix: Prefix) -> None:
        """Replaces a row by a prefix of one sequence, which is not modified."""
        state = fold(prefix.state)
        if self._buffer is not None:
            self._buffer.load(state)
            self._row.fill_(row)
            self.calls(self._put_buffer)
        else:
            for layer, entry in zip(self._layers, state, strict=True):
                layer.put(row, entry)  # type: ignore[arg-type]
        self.logits[row] = prefix.logits[0]
        self.seen[row] = prefix.seen[0]
        self._held[row] = 0

    def move(self, source: int, target: int) -> None:
        """Replaces a row by another one, which is then free."""
        for layer in self._layers:
            layer.put(target, layer._rows(source, source + 1))  # type: ignore[arg-type]
        for tensor in (self.logits, self.seen, self.tokens):
            tensor[target] = tensor[source]
        self._held[target] = self._held[source]

    def step(self, rows: int) -> None:
        """Advances the first `rows` rows by their `tokens`: updates caches, `logits` and `seen` in place.

        On a GPU it returns before the step is complete.
        """
        for first, count in self._groups(rows):
            if any(self._held[row] == self._window for row in range(first, first + count)):
                self._fold_full(first, count)
            self.calls(self._step_rows_from, first, count)
            for row in range(first, first + count):
                self._held[row] += 1

    def fold_full(self, rows: int) -> None:
        """Folds those of the first `rows` rows whose windows are full, as steps do by themselves.

        Where none is full it changes nothing, but runs all the same, so that later folds need neither be compiled nor
        captured.
        """
        if self._window is not None:
            for first, count in self._groups(rows):
                self._fold_full(first, count)

    def _groups(self, rows: int) -> Iterator[tuple[int, int]]:
        """First row and number of rows of each part of a step."""
        rows = self.batch_rows(rows)
        for first in range(0, rows, self._step_rows):
            yield first, max(min(rows - first, self._step_rows), self._least)

    def _fold_full(self, first: int, count: int) -> None:
        full = [row for row in range(first, first + count) if self._held[row] == self._window]
        if self._capture:
            self.calls(self._fold_rows_from, first, count)
        else:
            for row in full or [first]:
                for layer in self._layers:
                    assert isinstance(layer, Window)
                    layer._rows(row, row + 1).fold(self._backend, only_full=True)
        for row in full:
            self._held[row] = 0

    def _front(self, first: int, count: int) -> list[PaddedCache]:
        """The caches of some rows, for a batch of `step_rows`."""
        key = (first, count)
        if key not in self._fronts:
            views = [layer._rows(first, first + count) for layer in self._layers]
            self._fronts[key] = [PaddedCache(view, self._step_rows) for view in views]
        return self._fronts[key]

    @torch.no_grad()
    def _step_rows_from(self, first: int, count: int) -> None:
        tokens = self.tokens[first : first + self._step_rows]
        caches = cast("Sequence[LayerCache]", self._front(first, count))
        self.logits[first : first + count] = self._model.step(tokens, caches)[:count]
        self.seen[first : first + count].scatter_(1, tokens[:count].unsqueeze(1), True)

    def _put_buffer(self) -> None:
        assert self._buffer is not None
        for layer, state in zip(self._layers, self._buffer.layers, strict=True):
            assert isinstance(layer, SlotWindow)
            layer.replace_row(self._row, state)

    def _fold_rows_from(self, first: int, count: int) -> None:
        for padded in self._front(first, count):
            assert isinstance(padded.cache, Window)
            padded.cache.fold(self._backend, only_full=True)


def _empty_cache(model: GPT, mixer: Mixer, slots: int, window: int, max_context: int | None) -> LayerCache:
    """A layer's cache of `slots` sequences before their first tokens."""
    dtype, device = activation_dtype(model), mixer.device
    if isinstance(mixer, ConformalAttention):
        state = empty_state(mixer, slots, dtype)
        opened = Window.open(state, capacity=window, dtype=dtype, gate_per_pair=gates_per_pair(model), copy=False)
        slot_window = SlotWindow(**opened._members())
        if slot_window._backend(model.config.backend, device.type, dtype) == "triton":
            # Before any selection of rows, which then share this copy of the state instead of each having its own.
            slot_window._ensure_copy()
        return slot_window
    assert max_context is not None
    heads, dim = mixer.key_value_heads, mixer.head_dim
    nothing = torch.zeros(slots, 0, heads, dim, dtype=dtype, device=device)
    decay = None if model.config.gating == "none" else torch.zeros(slots, 0, heads, dtype=torch.float64, device=device)
    rotated = model.config.rotary != "none"
    phase = torch.zeros(slots, heads, dim // 2, dtype=torch.float64, device=device) if rotated else None
    conv_state = mixer.initial_conv_state(slots, dtype, device)
    empty = KeyValueState(nothing, nothing, decay, phase, conv_state=conv_state)
    return KeyValueCache.open(empty, capacity=max_context)
