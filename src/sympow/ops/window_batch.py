"""`WindowBatch`: the windows of a batch of sequences, made, taken out, put back, resized and joined.

Callers use `sympow.ops.window.Window`, which decodes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from sympow.checks import check_positive, check_row
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.ops.compilation import DERIVED, conv_shape
from sympow.ops.numerics import compute_dtype
from sympow.ops.state import FLOAT_DTYPES, State
from sympow.ops.torch.window_steps import PortableWindow
from sympow.settings import check_state_sizes, symmetric_dim

# Tokens between two folds. With more tokens folds are rarer, but steps score more keys; both cost little next to
# reading a state of thousands of features.
CAPACITY = 64


@dataclass(eq=False)
class WindowBatch(PortableWindow):
    """The windows of a batch of sequences, each with any number of tokens.

    Attributes, beside those of `PortableWindow`:
        arrivals: for the kernels, zero between calls, (b, h_kv) int32.
        tokens: the largest `count` as the host knows it; the caller counts the steps that are replayed from a graph.
        workspace: for the kernels, allocated by the first step that uses them.
        kv_half, kv_scale: for the kernels with bfloat16 inputs and p = 2, made by the first step that reads the state:
            kv in 16 bits, which steps read instead, (b, h_kv, D, e) float16, and what its rows are to be multiplied
            with, (b, h_kv, D) float32. Folds are exact, and write both again. Derived from kv: they are not saved.
    """

    arrivals: Tensor
    tokens: int = 0
    workspace: Tensor | None = None
    kv_half: Tensor | None = field(default=None, metadata=DERIVED)
    kv_scale: Tensor | None = field(default=None, metadata=DERIVED)

    @classmethod
    def empty(
        cls,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        power: int,
        *,
        rotated: bool,
        capacity: int = CAPACITY,
        dtype: torch.dtype = torch.float32,
        key_dtype: torch.dtype | None = None,
        gate_per_pair: bool = False,
        device: torch.device | str | None = None,
    ) -> Self:
        """A window before the first token, without a state until the first fold.

        Args:
            batch, heads, key_dim, value_dim: b, h_kv, d and e.
            power: p.
            rotated: whether steps will rotate.
            capacity: W, tokens between two folds.
            dtype: of the queries, keys and values to come.
            key_dtype: of the rotated keys. None: float32, or float64 from float64 inputs, so that they are as precise
                as in a state; half precision makes long windows smaller.
            gate_per_pair: whether gates will be one per rotated pair.
            device: of the tensors.
        """
        check_state_sizes(batch, heads, key_dim, value_dim, power, rotated=rotated, gate_per_pair=gate_per_pair)
        check_positive("capacity", capacity)
        for name, value in (("dtype", dtype), ("key_dtype", key_dtype)):
            if value is not None and value not in FLOAT_DTYPES:
                raise ArgumentTypeError(name, f"must be one of {', '.join(map(str, FLOAT_DTYPES))}; got {value}")
        key_dtype = key_dtype or compute_dtype(dtype)
        gates = key_dim // 2 if gate_per_pair else 1
        # Zeros, not uninitialized memory: masked rows still take part in products, where NaN would spread.
        return cls(
            keys=torch.zeros(batch, heads, key_dim, capacity, dtype=key_dtype, device=device),
            values=torch.zeros(batch, heads, capacity, value_dim, dtype=dtype, device=device),
            decay=torch.zeros(batch, heads, capacity, gates, dtype=torch.float64, device=device),
            count=torch.zeros(batch, heads, dtype=torch.int32, device=device),
            arrivals=torch.zeros(batch, heads, dtype=torch.int32, device=device),
            phase=torch.zeros(batch, heads, key_dim // 2, dtype=torch.float64, device=device) if rotated else None,
            kv=None,
            normalizer=None,
            power=power,
        )

    @classmethod
    def open(
        cls,
        state: State,
        *,
        capacity: int = CAPACITY,
        dtype: torch.dtype = torch.float32,
        key_dtype: torch.dtype | None = None,
        gate_per_pair: bool = False,
        copy: bool = True,
    ) -> Self:
        """An empty window that continues a state.

        Args:
            state: the state of all tokens before.
            capacity, dtype, key_dtype, gate_per_pair: as in `empty`.
            copy: whether to copy the state; otherwise folds overwrite it, for states too large to hold twice.
        """
        if not isinstance(state, State):
            raise ArgumentTypeError("state", f"must be a sympow.State, got {type(state).__name__}")
        window = cls.empty(
            state.batch,
            state.heads,
            state.key_dim,
            state.value_dim,
            state.power,
            rotated=state.phase is not None,
            capacity=capacity,
            dtype=dtype,
            key_dtype=key_dtype,
            gate_per_pair=gate_per_pair,
            device=state.kv.device,
        )
        kept = compute_dtype(dtype)
        window.kv, window.normalizer = (
            x.detach().to(kept, copy=copy).contiguous() for x in (state.kv, state.normalizer)
        )
        if window.phase is not None and state.phase is not None:
            window.phase.copy_(state.phase.detach())
        if state.conv_state is not None:
            window.conv_state = state.conv_state.detach().to(dtype, copy=copy).contiguous()
        return window

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in the window, for each sequence and key head."""
        return sum(x.element_size() * x[0, 0].numel() // self.capacity for x in (self.keys, self.values, self.decay))

    @property
    def state_nbytes(self) -> int:
        """Bytes of a state, whether there is one or not, for each sequence and key head."""
        features = symmetric_dim(self.key_dim, self.power)
        return features * (self.value_dim + 1) * compute_dtype(self.values.dtype).itemsize

    @property
    def break_even_tokens(self) -> int:
        """The most tokens whose keys and values take no more bytes than a state."""
        return self.state_nbytes // self.token_nbytes

    def select(self, index: slice | Tensor) -> Self:
        """Some sequences of the batch, as a window that shares no memory with this one."""
        return self._map(lambda tensor: tensor[index].clone(memory_format=torch.contiguous_format))

    def _rows(self, start: int, stop: int) -> Self:
        """Sequences of the batch, from `start` up to `stop`, as a window on the same memory.

        The view has its own `tokens`, which the caller keeps. Before steps of a view that read the 16-bit copy of the
        state, `_ensure_copy` must have been called on the whole: a copy of the view's own would not be renewed when
        the whole, or another view, changes the state.
        """
        return replace(self._map(lambda tensor: tensor[start:stop]), workspace=None)

    @property
    def _kind(self) -> tuple[Any, ...]:
        """What windows of one batch share: power, heads, key dim, value dim, width of gates, rotated, short_conv."""
        sizes = (*self.keys.shape[1:3], self.value_dim, self.decay.shape[3])
        return self.power, *sizes, self.phase is not None, conv_shape(self)

    def take(self, row: int) -> Self:
        """One sequence of the batch, as a window of its own, which `put` puts back."""
        check_row(row, self.keys.shape[0])
        return self._rows(row, row + 1).clone()

    @torch.no_grad()
    def put(self, row: int, sequence: State | WindowBatch) -> None:
        """Replaces one sequence of the batch in place; the others are not touched.

        Args:
            row: which.
            sequence: the state, or the window, of one sequence. A window must fit into the capacity.
        """
        check_row(row, self.keys.shape[0])
        if isinstance(sequence, State):
            like: dict[str, Any] = {"dtype": self.values.dtype, "key_dtype": self.keys.dtype}
            per_pair = self.decay.shape[-1] > 1
            sequence = self.open(sequence, capacity=self.capacity, gate_per_pair=per_pair, copy=False, **like)
        if not isinstance(sequence, WindowBatch):
            raise ArgumentTypeError("sequence", f"must be a sympow.State or a Window, got {type(sequence).__name__}")
        fitted = sequence if sequence.capacity == self.capacity else sequence.resized(self.capacity)
        kinds = [w._kind for w in (fitted, self)]
        if fitted.keys.shape[0] != 1 or kinds[0] != kinds[1] or (self.kv is None and fitted.kv is not None):
            raise ArgumentError(
                "sequence",
                "must be one sequence and agree with the window in (power, heads, key dim, value dim, gates, "
                "rotated, short_conv), and have no state where the window has none; "
                f"got {fitted.keys.shape[0]} of {kinds[0]}, "
                f"expected 1 of {kinds[1]}",
            )
        for name in ("keys", "values", "decay", "count", "arrivals", "phase", "kv", "normalizer", "conv_state"):
            target, source = getattr(self, name), getattr(fitted, name)
            if target is not None:
                # Before the first fold the state is zero.
                target[row].zero_() if source is None else target[row].copy_(source[0])
        self.refresh_copy(slice(row, row + 1))
        self.tokens = max(self.tokens, fitted.tokens)

    def resized(self, capacity: int) -> Self:
        """A copy with another capacity.

        Args:
            capacity: at least the number of tokens that the window holds.
        """
        check_positive("capacity", capacity)
        if capacity < self.tokens:
            raise ArgumentError(
                "capacity", f"must be at least {self.tokens}, the tokens that the window holds; got {capacity}"
            )

        def fitted(x: Tensor, axis: int) -> Tensor:
            shape = list(x.shape)
            shape[axis] = capacity
            kept = min(capacity, x.shape[axis])
            resized = x.new_zeros(shape)
            resized.narrow(axis, 0, kept).copy_(x.narrow(axis, 0, kept))
            return resized

        return replace(
            self,
            keys=fitted(self.keys, 3),
            values=fitted(self.values, 2),
            decay=fitted(self.decay, 2),
            workspace=None,
            **self._copies_of_what_folds_change(),
        )

    @classmethod
    def cat(cls, windows: Sequence[Self]) -> Self:
        """Joins windows, of any numbers of tokens, into one batch with just the capacity for the longest."""
        if not windows:
            raise ArgumentError("windows", "must hold at least one window, got none")
        kinds = {(*w._kind, w.kv is not None) for w in windows}
        if len(kinds) > 1:
            raise ArgumentError(
                "windows",
                "to be joined must agree in (power, heads, key dim, value dim, gates, rotated, short_conv, "
                "with a state); "
                f"got {sorted(kinds)}",
            )
        tokens = max(window.tokens for window in windows)
        resized = [window.resized(max(1, tokens)) for window in windows]

        def joined(name: str) -> Any:
            members = [getattr(window, name) for window in resized]
            return members[0] if not isinstance(members[0], Tensor) else torch.cat(members)

        changes = {name: joined(name) for name in resized[0]._members() if name not in ("power", "tokens")}
        return replace(resized[0], tokens=tokens, **changes)

    def refresh_copy(self, rows: slice = slice(None)) -> None:
        """Makes the 16-bit copy of kv again, if there is one, after something else than a fold changed kv.

        Args:
            rows: which sequences of the batch changed.
        """
        if self.kv_half is None or self.kv_scale is None:
            return
        assert self.kv is not None
        kv = self.kv[rows]
        scale, factor = copy_scales(kv)
        self.kv_scale[rows].copy_(scale)
        # Into float16 as it is computed: no second float32 tensor as large as kv.
        torch.mul(kv, factor.unsqueeze(-1), out=self.kv_half[rows])

    def _copies_of_what_folds_change(self) -> dict[str, Any]:
        """Copies, by name, of all tensors but keys, values and decays, which a fold only reads; without kv_half."""
        copies = {
            name: None if x is None else x.clone(memory_format=torch.contiguous_format)
            for name in ("count", "arrivals", "phase", "kv", "normalizer", "conv_state")
            for x in [getattr(self, name)]
        }
        return {**copies, "kv_half": None, "kv_scale": None}


def copy_scales(kv: Tensor) -> tuple[Tensor, Tensor]:
    """`Window.kv_scale` for kv (b, h_kv, D, e), and the factors that take its rows to those of `kv_half`: (b, h_kv, D).

    They are powers of two that bring the largest entry of a row to between 2^14 and 2^15, read off its bits, as a
    fold's.
    """
    exponent = (torch.linalg.vector_norm(kv, torch.inf, dim=-1).view(torch.int32) >> 23).sub_(14).clamp_(min=1)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)
