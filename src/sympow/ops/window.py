"""`Window`: decoding from a state with the recent tokens as keys and values, which are folded into it in blocks.

A recurrent step reads and writes the whole state for one token. With a window of W tokens, a step only reads it: the
recent tokens, those not yet folded into the state, contribute by their scores, as in the attention form. After every W
tokens all of them are folded into the state at once, as at the end of a chunk. Before the first fold there may be no
state at all: then a window is a cache of keys and values, which takes less memory than a state for up to about D
tokens.

    y, state = sympow.attention(q, k, v, ..., return_state=True)     # prefill
    window = Window.open(state, dtype=q.dtype)
    for ...:
        y = window.step(q, k, v, log_gamma, beta, theta)             # one token each, (b, 1, h, d)
    state = window.close()                                           # a state like any other
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sympow.checks import check_choice, check_positive, check_row
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.ops.compilation import DERIVED, conv_shape, register_as_pytree
from sympow.ops.dispatch import Request, choose_backend
from sympow.ops.interface import attention
from sympow.ops.numerics import compute_dtype, without_autocast
from sympow.ops.sequence import Sequence
from sympow.ops.state import FLOAT_DTYPES, State
from sympow.ops.symmetric import feature_indices, multinomial_weights
from sympow.ops.torch.window_steps import PortableWindow
from sympow.ops.validation import check_tensors
from sympow.settings import BACKENDS, check_state_sizes, symmetric_dim

# Tokens between two folds. With more tokens folds are rarer, but steps score more keys; both cost little next to
# reading a state of thousands of features.
CAPACITY = 64
# Inputs with which steps of the kernels read a 16-bit copy of the state, for p = 2: its rounding is finer than that of
# outputs in this dtype. For p = 4 single rows can be off by several times the rounding of outputs, where gates leave
# weight to few tokens.
COPY_DTYPES = (torch.bfloat16,)
COPY_POWER = 2


@dataclass(eq=False)
class Window(PortableWindow):
    """The recent tokens of a batch of sequences, and the state of all earlier ones. Steps update it in place.

    It is made by `open` from a state, or by `empty` without one. A step does not synchronize with the device: the
    number of tokens that the window holds is the tensor `count`, so that one captured CUDA graph of a step, and one of
    a fold, can be replayed however full the window is. Eager steps fold a full window by themselves. Steps in a graph
    or under torch.compile do not: the caller replays a fold after every `capacity` steps. A step into a full window
    returns NaN.

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
    ) -> Window:
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
    ) -> Window:
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

    def select(self, index: slice | Tensor) -> Window:
        """Some sequences of the batch, as a window that shares no memory with this one."""
        return self._map(lambda tensor: tensor[index].clone(memory_format=torch.contiguous_format))

    def _rows(self, start: int, stop: int) -> Window:
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

    def take(self, row: int) -> Window:
        """One sequence of the batch, as a window of its own, which `put` puts back."""
        check_row(row, self.keys.shape[0])
        return self._rows(row, row + 1).clone()

    @torch.no_grad()
    def put(self, row: int, sequence: State | Window) -> None:
        """Replaces one sequence of the batch in place; the others are not touched.

        Args:
            row: which.
            sequence: the state, or the window, of one sequence. A window must fit into the capacity.
        """
        check_row(row, self.keys.shape[0])
        if isinstance(sequence, State):
            like: dict[str, Any] = {"dtype": self.values.dtype, "key_dtype": self.keys.dtype}
            per_pair = self.decay.shape[-1] > 1
            sequence = Window.open(sequence, capacity=self.capacity, gate_per_pair=per_pair, copy=False, **like)
        if not isinstance(sequence, Window):
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

    def resized(self, capacity: int) -> Window:
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
    def cat(cls, windows: abc.Sequence[Window]) -> Window:
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

    def step(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None = None,
        beta: Tensor | None = None,
        theta: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """y (b, 1, h, e) of one token, which is added to the window.

        Args:
            q, k, v, log_gamma, beta, theta: as in `sympow.attention`, one token long; without gradients.
            backend: as in `sympow.attention`.

        Raises:
            ValueError, TypeError: where an argument does not fit; the message names it.
        """
        sequence = self._check(q, k, v, log_gamma, beta, theta)
        if sequence.length != 1:
            raise ArgumentError("q", f", k and v must be one token long, (b, 1, h, d); got {sequence.length}")
        chosen = self._backend(backend, q.device.type, q.dtype)
        if _on_host():
            if self.tokens == self.capacity:
                self.fold(backend)
            self.tokens += 1
        # Under autocast the products below would silently run in half precision.
        with torch.no_grad(), without_autocast(q.device):
            return self._fused_step(sequence) if chosen == "triton" else self._portable_step(sequence)

    def read(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None = None,
        beta: Tensor | None = None,
        theta: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """y (b, t, h, e) of any number of tokens within the capacity, which are added to the window.

        Args:
            q, k, v, log_gamma, beta, theta: as in `sympow.attention`, without gradients.
            backend: as in `sympow.attention`, for attention among the new tokens; attention to those in the window runs
                in plain PyTorch.
        """
        sequence = self._check(q, k, v, log_gamma, beta, theta)
        check_choice("backend", backend, BACKENDS)
        self._check_room(sequence.length)
        if not sequence.length:
            return q.new_empty(*q.shape[:3], self.value_dim)
        if self.kv is None and self.tokens == 0:
            with torch.no_grad():
                y = attention(q, k, v, self.power, log_gamma, beta, theta, backend=backend)  # type: ignore[call-overload]
            self.extend(k, v, log_gamma, beta, theta)
            return y
        with torch.no_grad(), without_autocast(q.device):
            y = self._portable_read(sequence)
        self.tokens += sequence.length
        return y

    def extend(
        self,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None = None,
        beta: Tensor | None = None,
        theta: Tensor | None = None,
    ) -> None:
        """Adds tokens to the window without computing outputs.

        Args:
            k, v, log_gamma, beta, theta: as in `sympow.attention`, any number of tokens within the capacity.
        """
        sequence = self._check(k, k, v, log_gamma, beta, theta)
        self._check_room(sequence.length)
        if not sequence.length:
            return
        with torch.no_grad(), without_autocast(k.device):
            self._portable_extend(sequence)
        self.tokens += sequence.length

    def fold(self, backend: str = "auto", *, only_full: bool = False) -> None:
        """Folds the window's tokens into the state, which is made if there was none, and empties the window.

        Args:
            backend: as in `sympow.attention`.
            only_full: whether sequences keep their tokens unless they are as many as the capacity.
        """
        chosen = self._backend(backend, self.keys.device.type, self.values.dtype)
        count = self.count
        with torch.no_grad(), without_autocast(self.keys.device):
            if only_full:
                # The fold sees the others as empty.
                full = count >= self.capacity
                self.count = count * full
            if chosen == "triton":
                self._fused_fold()
            else:
                self._portable_fold()
                self.refresh_copy()
            if only_full:
                self.count = count.masked_fill_(full, 0)
        if _on_host():
            self.tokens = min(self.tokens, self.capacity - 1) if only_full else 0

    def close(self, backend: str = "auto") -> State:
        """The exact state after the last token. It shares the window's memory; to continue with both, `clone` first.

        Args:
            backend: as in `sympow.attention`.
        """
        self.fold(backend)
        assert self.kv is not None
        assert self.normalizer is not None
        return State(
            self.kv,
            self.normalizer,
            self.phase,
            power=self.power,
            key_dim=self.key_dim,
            conv_state=self.conv_state,
        )

    def folded(self, backend: str = "auto") -> State:
        """As `close`, without modifying the window.

        Args:
            backend: as in `sympow.attention`.
        """
        return replace(self, **self._copies_of_what_folds_change()).close(backend)

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

    def _check(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_gamma: Tensor | None,
        beta: Tensor | None,
        theta: Tensor | None,
    ) -> Sequence:
        check_tensors(q, k, v, log_gamma, beta, theta)
        expectations = (
            ("batch", k.shape[0], self.keys.shape[0]),
            ("heads", k.shape[2], self.keys.shape[1]),
            ("head dim", k.shape[3], self.key_dim),
        )
        for what, came, expected in expectations:
            if came != expected:
                raise ArgumentError("k", f"has {what} {came}, but the window was made for {expected}")
        if v.shape[3] != self.value_dim:
            raise ArgumentError("v", f"has head dim {v.shape[3]}, but the window was made for {self.value_dim}")
        if v.dtype != self.values.dtype:
            raise ArgumentTypeError("v", f"is in {v.dtype}, but the window was made for {self.values.dtype}")
        if v.device != self.values.device:
            raise ArgumentError("v", f"is on {v.device}, but the window is on {self.values.device}")
        if (theta is None) != (self.phase is None):
            made, used = ("without", "with") if self.phase is None else ("with", "without")
            raise UserError(f"theta: the window was made {made} rotation, but is used {used}")
        if log_gamma is not None and log_gamma.ndim == 4 and log_gamma.shape[-1] != self.decay.shape[-1]:
            raise ArgumentError("log_gamma", "has a gate per rotated pair, but the window was made for one per head")
        sequence = Sequence(q, k, v, log_gamma, beta, theta, self.power)
        if sequence.needs_grad:
            raise UserError("the inputs of a window's step must not require gradients: steps are not differentiable")
        return sequence

    def _check_room(self, tokens: int) -> None:
        if self.tokens + tokens > self.capacity:
            raise ArgumentError(
                "k",
                f"holds {tokens} tokens, but the window has room for {self.capacity - self.tokens} of its "
                f"{self.capacity}",
            )

    def _backend(self, backend: str, device: str, dtype: torch.dtype) -> str:
        check_choice("backend", backend, BACKENDS)
        request = Request(
            device=device,
            dtype=dtype,
            power=self.power,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            vector_gate=self.decay.shape[-1] > 1,
            step=True,
        )
        return choose_backend(backend, request)

    def _fused_step(self, sequence: Sequence) -> Tensor:
        from sympow.kernels.decode.op import fused_window_step
        from sympow.kernels.decode.window_step import window_workspace

        index = weight = None
        if self.kv is not None:
            index, weight = self._feature_tables()
            self._ensure_copy()
        length = window_workspace(
            sequence.batch,
            sequence.key_heads,
            sequence.group,
            self.key_dim,
            self.value_dim,
            0 if weight is None else weight.shape[0],
            self.capacity,
            has_state=self.kv is not None,
            copied=self.kv_half is not None,
            split_batch=self._split_batch(),
        )
        if self.workspace is None or self.workspace.numel() < length:
            batch = sequence.batch
            self.workspace = self.decay.new_empty(batch, -(-length // batch), dtype=torch.float32)
        y: Tensor = fused_window_step(
            *sequence.one_token(),
            self.kv if self.kv_half is None else self.kv_half,
            self.normalizer,
            self.kv_scale,
            self.keys,
            self.values,
            self.decay,
            self.count,
            self.phase,
            self.arrivals,
            self.workspace,
            index,
            weight,
            self.power,
            self._split_batch(),
        )
        return y.unsqueeze(1)

    def _split_batch(self) -> int:
        """The batch by whose size the kernels split their sums among CTAs; 0: this window's own."""
        return 0

    def _ensure_copy(self) -> None:
        """Makes the 16-bit copy that steps with bfloat16 inputs and p = 2 read, unless there is one or no state."""
        copied = self.values.dtype in COPY_DTYPES and self.power == COPY_POWER
        if self.kv is None or self.kv_half is not None or not copied:
            return
        if _captured():
            raise UserError("a window's copy of its state cannot be made inside a CUDA graph: call step once before")
        self.kv_half = torch.empty_like(self.kv, dtype=torch.float16)
        self.kv_scale = torch.empty_like(self.kv[..., 0], memory_format=torch.contiguous_format)
        self.refresh_copy()

    def _fused_fold(self) -> None:
        from sympow.kernels.decode.op import fused_fold

        if _captured():
            self._ensure_copy()  # replays of this fold would not write to a copy that is made later
        if self.kv is None or self.normalizer is None:
            if not _on_host():
                raise UserError(
                    "a window's first state cannot be made inside a CUDA graph or torch.compile: call fold once before"
                )
            heads = (*self.keys.shape[:2], symmetric_dim(self.key_dim, self.power))
            self.kv = self.decay.new_zeros(*heads, self.value_dim, dtype=torch.float32)
            self.normalizer = self.decay.new_zeros(heads, dtype=torch.float32)
        fused_fold(
            self.kv,
            self.normalizer,
            self.kv_half,
            self.kv_scale,
            self.keys,
            self.values,
            self.decay,
            self.count,
            self.arrivals,
            *self._feature_tables(),
        )

    def _feature_tables(self) -> tuple[Tensor, Tensor]:
        device = self.keys.device
        index = feature_indices(self.key_dim, self.power, device)
        return index, multinomial_weights(self.key_dim, self.power, torch.float32, device)


register_as_pytree(Window, "power", "tokens")


def copy_scales(kv: Tensor) -> tuple[Tensor, Tensor]:
    """`Window.kv_scale` for kv (b, h_kv, D, e), and the factors that take its rows to those of `kv_half`: (b, h_kv, D).

    They are powers of two that bring the largest entry of a row to between 2^14 and 2^15, read off its bits, as a
    fold's.
    """
    exponent = (torch.linalg.vector_norm(kv, torch.inf, dim=-1).view(torch.int32) >> 23).sub_(14).clamp_(min=1)
    return (exponent << 23).view(torch.float32), ((254 - exponent) << 23).view(torch.float32)


def _on_host() -> bool:
    """Whether a call runs eagerly, and is not traced by torch.compile or captured into a CUDA graph."""
    return not (torch.compiler.is_compiling() or _captured())


def _captured() -> bool:
    """Whether a call is captured into a CUDA graph, and not traced by torch.compile."""
    if torch.compiler.is_compiling():
        return False
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
