"""Decoding with a window: the last tokens as keys and values, folded into the state in blocks.

A recurrent step reads and writes the whole state for one token. With a window of W tokens it only reads it: tokens
since the last fold answer by their scores, as in the attention form, and every W tokens all of them are folded into the
state at once, as at the end of a chunk. Before the first fold there may be no state at all: then a window is a cache of
keys and values, which is smaller than a state until it has grown to about D tokens.

    y, state = sympow.attention(q, k, v, ..., return_state=True)     # read the prompt
    window = Window.open(state, dtype=q.dtype)
    for ...:
        y = window.step(q, k, v, log_gamma, beta, theta)             # one token each, (b, 1, h, d)
    state = window.close()                                           # good in every form, as any state
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sympow.checks import check_choice
from sympow.ops.backend import Request, choose_backend, triton_available, triton_interpreted
from sympow.ops.blocks import attend_to_past, causal_attention, query_state, update_state
from sympow.ops.decay import apply_decay, log_gate_root
from sympow.ops.operator import attention
from sympow.ops.precision import without_autocast
from sympow.ops.record import TensorRecord, register_as_tree
from sympow.ops.rotary import accumulate_phase, last_phase, rotate
from sympow.ops.scaling import (
    least_exponent,
    power_of_two,
    running_key_exponents,
    state_exponents,
    unit_length,
)
from sympow.ops.sequence import Sequence, divide
from sympow.ops.state import FLOAT_DTYPES, State
from sympow.ops.symmetric import even_power, feature_indices, multinomial_weights, symmetric_dim
from sympow.ops.validation import BACKENDS, check_positive, check_power, check_tensors

# Tokens between two folds. More make folds rarer, and steps score more keys: beside a state of thousands of features
# both are small.
CAPACITY = 64


@dataclass(eq=False)
class Window(TensorRecord):
    """The last tokens of a batch of sequences, beside the state of all earlier ones. Steps change it in place.

    Made by `open` from a state, or by `empty` without one. A step waits for nothing on the host: how many tokens the
    window holds stands in `count`, on the device, so that one captured CUDA graph of a step, and one of a fold, can be
    replayed at any filling. Eager steps fold by themselves when the window is full. Inside a capture or torch.compile
    a step is the device's work alone: there the caller replays a fold after every `capacity` steps. A step for which
    there is no room returns NaN.

    Attributes:
        keys: turned keys, (b, h_kv, d, W), those of a token in a column.
        values: (b, h_kv, W, e).
        decay: running sums of log γ^(1/p) since the last fold, (b, h_kv, W, 1 or d/2) float64.
        count: tokens in the window, (b, h_kv) int32. Sequences may have read different numbers of them.
        arrivals: for the kernels, zero between calls, (b, h_kv) int32.
        phase: μ after the last token, (b, h_kv, d/2) float64; None without rotation.
        kv, normalizer: the state at the last fold, as in `State`; None before there is one.
        power: p.
        tokens: the largest `count` as the host knows it; what is replayed from a graph is for the caller to count.
        workspace: for the kernels, made by the first step that uses them.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor
    count: Tensor
    arrivals: Tensor
    phase: Tensor | None
    kv: Tensor | None
    normalizer: Tensor | None
    power: int
    tokens: int = 0
    workspace: Tensor | None = None

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
            key_dtype: what turned keys are kept in. None: float32, or float64 from float64 inputs, so that they are as
                exact as in a state; half precision makes long windows smaller.
            gate_per_pair: whether gates will be one per rotated pair.
            device: where.
        """
        check_power(power)
        check_positive("capacity", capacity)
        for name, value in (("dtype", dtype), ("key_dtype", key_dtype)):
            if value is not None and value not in FLOAT_DTYPES:
                raise TypeError(f"{name} must be one of {', '.join(map(str, FLOAT_DTYPES))}; got {value}")
        if (rotated or gate_per_pair) and key_dim % 2:
            raise ValueError(f"key_dim must be even for pairs of entries to be rotated or gated, got {key_dim}")
        key_dtype = key_dtype or _compute_dtype(dtype)
        gates = key_dim // 2 if gate_per_pair else 1
        # Zeros, not whatever is there: masked rows still take part in products, where NaN would spread.
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
        """An empty window behind a state.

        Args:
            state: what came before.
            capacity, dtype, key_dtype, gate_per_pair: as in `empty`.
            copy: whether to copy the state; otherwise folds change it, for states too large to have twice.
        """
        if not isinstance(state, State):
            raise TypeError(f"state must be a sympow.State, got {type(state).__name__}")
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
        kept = _compute_dtype(dtype)
        window.kv, window.normalizer = (
            x.detach().to(kept, copy=copy).contiguous() for x in (state.kv, state.normalizer)
        )
        if window.phase is not None and state.phase is not None:
            window.phase.copy_(state.phase.detach())
        return window

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def key_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    @property
    def bytes_of_a_token(self) -> int:
        """What a token takes in the window, for each sequence and key head."""
        return sum(x.element_size() * x[0, 0].numel() // self.capacity for x in (self.keys, self.values, self.decay))

    @property
    def bytes_of_a_state(self) -> int:
        """What a state takes, or would take, for each sequence and key head."""
        features = symmetric_dim(self.key_dim, self.power)
        return features * (self.value_dim + 1) * _compute_dtype(self.values.dtype).itemsize

    @property
    def most_tokens(self) -> int:
        """How many tokens take no more memory as keys and values than as a state."""
        return self.bytes_of_a_state // self.bytes_of_a_token

    def select(self, index: slice | Tensor) -> Window:
        """Some sequences of the batch, as a window that shares no memory with this one."""
        return self._map(lambda tensor: tensor[index].clone(memory_format=torch.contiguous_format))

    def resized(self, capacity: int) -> Window:
        """A copy with room for another number of tokens.

        Args:
            capacity: at least as many as the window holds.
        """
        check_positive("capacity", capacity)
        if capacity < self.tokens:
            raise ValueError(
                f"capacity must be at least {self.tokens}, the tokens that the window holds; got {capacity}"
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
        """Several windows as one batch, with just enough room for what they hold; they may hold different numbers."""
        if not windows:
            raise ValueError("windows must hold at least one window, got none")
        kinds = {
            (w.power, *w.keys.shape[1:3], w.value_dim, w.decay.shape[3], w.phase is not None, w.kv is not None)
            for w in windows
        }
        if len(kinds) > 1:
            raise ValueError(
                "windows to be joined must agree in (power, heads, key dim, value dim, gates, rotated, with a state); "
                f"got {sorted(kinds)}"
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
        """y (b, 1, h, e) of one token, which the window then holds.

        Args:
            q, k, v, log_gamma, beta, theta: as in `sympow.attention`, one token long; without gradients.
            backend: as in `sympow.attention`.

        Raises:
            ValueError, TypeError: where an argument does not fit; the message names it.
        """
        sequence = self._check(q, k, v, log_gamma, beta, theta)
        if sequence.length != 1:
            raise ValueError(f"q, k and v must be one token long, (b, 1, h, d); got {sequence.length}")
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
        """y (b, t, h, e) of any number of tokens for which there is room; the window then holds them.

        Args:
            q, k, v, log_gamma, beta, theta: as in `sympow.attention`, without gradients.
            backend: as in `sympow.attention`, for the tokens among themselves; what the window holds is queried in
                plain PyTorch.
        """
        sequence = self._check(q, k, v, log_gamma, beta, theta)
        check_choice("backend", backend, BACKENDS)
        self._check_room(sequence.length)
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
        """Puts tokens into the window without asking anything: a prompt, where there is to be no state yet.

        Args:
            k, v, log_gamma, beta, theta: as in `sympow.attention`, any number of tokens for which there is room.
        """
        sequence = self._check(k, k, v, log_gamma, beta, theta)
        self._check_room(sequence.length)
        if not sequence.length:
            return
        with torch.no_grad(), without_autocast(k.device):
            _, key = self._turn(sequence)
            self._put(key, sequence.v.transpose(1, 2), self._decay_through(sequence))
        self.tokens += sequence.length

    def fold(self, backend: str = "auto") -> None:
        """Folds the window's tokens into the state, and empties it. Makes a state where there was none.

        Args:
            backend: as in `sympow.attention`.
        """
        chosen = self._backend(backend, self.keys.device.type, self.values.dtype)
        with torch.no_grad(), without_autocast(self.keys.device):
            if chosen == "triton":
                self._fused_fold()
            else:
                self._portable_fold()
        if _on_host():
            self.tokens = 0

    def close(self, backend: str = "auto") -> State:
        """The exact state after the last token. It takes over the window's memory; to go on with both, `clone` first.

        Args:
            backend: as in `sympow.attention`.
        """
        self.fold(backend)
        assert self.kv is not None
        assert self.normalizer is not None
        return State(self.kv, self.normalizer, self.phase, power=self.power, key_dim=self.key_dim)

    def folded(self, backend: str = "auto") -> State:
        """The same, and the window stays as it is.

        Args:
            backend: as in `sympow.attention`.
        """
        return replace(self, **self._copies_of_what_folds_change()).close(backend)

    def _copies_of_what_folds_change(self) -> dict[str, Any]:
        """By field: all but keys, values and their decays, which a fold only reads."""
        return {
            name: None if x is None else x.clone(memory_format=torch.contiguous_format)
            for name in ("count", "arrivals", "phase", "kv", "normalizer")
            for x in [getattr(self, name)]
        }

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
                raise ValueError(f"k has {what} {came}, but the window was made for {expected}")
        if v.shape[3] != self.value_dim:
            raise ValueError(f"v has head dim {v.shape[3]}, but the window was made for {self.value_dim}")
        if v.dtype != self.values.dtype:
            raise TypeError(f"v is in {v.dtype}, but the window was made for {self.values.dtype}")
        if v.device != self.values.device:
            raise ValueError(f"v is on {v.device}, but the window is on {self.values.device}")
        if (theta is None) != (self.phase is None):
            made, used = ("without", "with") if self.phase is None else ("with", "without")
            raise ValueError(f"theta: the window was made {made} rotation, but is used {used}")
        if log_gamma is not None and log_gamma.ndim == 4 and log_gamma.shape[-1] != self.decay.shape[-1]:
            raise ValueError("log_gamma has a gate per rotated pair, but the window was made for one per head")
        sequence = Sequence(q, k, v, log_gamma, beta, theta, self.power)
        if sequence.needs_grad:
            raise ValueError("q, k, v and what goes with them must not require gradients: steps of a window have none")
        return sequence

    def _check_room(self, tokens: int) -> None:
        if self.tokens + tokens > self.capacity:
            raise ValueError(
                f"k holds {tokens} tokens, but the window has room for {self.capacity - self.tokens} of its "
                f"{self.capacity}"
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
        return choose_backend(backend, request, available=triton_available, interpreted=triton_interpreted())

    def _fused_step(self, sequence: Sequence) -> Tensor:
        from sympow.kernels.window import window_workspace
        from sympow.kernels.window_op import fused_window_step

        index = weight = None
        if self.kv is not None:
            index, weight = self._feature_tables()
        length = window_workspace(
            sequence.batch,
            sequence.key_heads,
            sequence.group,
            self.key_dim,
            self.value_dim,
            0 if weight is None else weight.shape[0],
            self.capacity,
            has_state=self.kv is not None,
        )
        if self.workspace is None or self.workspace.numel() < length:
            batch = sequence.batch
            self.workspace = self.decay.new_empty(batch, -(-length // batch), dtype=torch.float32)
        y = fused_window_step(
            *sequence.one_token(),
            self.kv,
            self.normalizer,
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
        )
        return y.unsqueeze(1)

    def _fused_fold(self) -> None:
        from sympow.kernels.window_op import fused_fold

        if self.kv is None or self.normalizer is None:
            if not _on_host():
                raise ValueError(
                    "a window's first state cannot be made inside a CUDA graph or torch.compile: call fold once before"
                )
            heads = (*self.keys.shape[:2], symmetric_dim(self.key_dim, self.power))
            self.kv = self.decay.new_zeros(*heads, self.value_dim, dtype=torch.float32)
            self.normalizer = self.decay.new_zeros(heads, dtype=torch.float32)
        fused_fold(
            self.kv,
            self.normalizer,
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

    def _portable_step(self, sequence: Sequence) -> Tensor:
        power, dtype = self.power, sequence.compute_dtype
        query, key = self._turn(sequence)
        value = sequence.v.to(dtype).transpose(1, 2)  # (b, n, 1, e)
        decay = self._decay_through(sequence)  # (b, n, 1, 1 or d/2)
        keys, values, held_decay = self._held(dtype)
        query = query * self._query_scales(keys, key)

        scores = even_power(query @ apply_decay(keys, decay - held_decay).mT.unsqueeze(2), power)  # (b, n, g, 1, W)
        own = even_power((query * key.unsqueeze(2)).sum(-1, keepdim=True), power)  # (b, n, g, 1, 1)
        numerator = scores @ values.unsqueeze(2) + own * value.unsqueeze(2)
        denominator = scores.sum(-1) + own.squeeze(-1)
        if self.kv is not None and self.normalizer is not None:
            past = query_state(query, decay, self.kv, self.normalizer, power)
            numerator, denominator = numerator + past[0], denominator + past[1]
        y = divide(numerator, denominator, sequence.q.dtype)

        # As in the kernels: a token for which there is no room must not go unseen.
        full = (self.count >= self.capacity).repeat_interleave(sequence.group, dim=1)
        self._put(key, value, decay)
        return y.masked_fill(full[:, None, :, None], float("nan"))

    def _portable_read(self, sequence: Sequence) -> Tensor:
        power, dtype = self.power, sequence.compute_dtype
        query, key = self._turn(sequence)
        value = sequence.v.to(dtype).transpose(1, 2)  # (b, n, t, e)
        decay = self._decay_through(sequence)  # (b, n, t, 1 or d/2)
        keys, values, held_decay = self._held(dtype)
        query = query * self._query_scales(keys, key)
        numerator, denominator = causal_attention(query, key, value, decay, power)
        parts = [attend_to_past(query, keys, values, decay, held_decay, power)]
        if self.kv is not None and self.normalizer is not None:
            parts.append(query_state(query, decay, self.kv, self.normalizer, power))
        for more, weights in parts:
            numerator, denominator = numerator + more, denominator + weights
        self._put(key, value, decay)
        return divide(numerator, denominator, sequence.q.dtype)

    def _portable_fold(self) -> None:
        keys, values, decay = self._held(_compute_dtype(self.values.dtype))
        self.kv, self.normalizer = update_state(
            keys, values, decay, self.kv, self.normalizer, self.power, in_place=True
        )
        self.count.zero_()

    def _held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Keys (b, n, s, d), values (b, n, s, e) and running sums (b, n, s, 1 or d/2) of what the window holds.

        Where a sequence holds fewer tokens than s, keys and values are zero, and the sum is that of its last token:
        such keys have no score, and nothing decays after the last token.
        """
        places, empty = self._places()
        keys, values = (x[:, :, places].to(dtype).masked_fill(empty, 0.0) for x in (self.keys.mT, self.values))
        return keys, values, torch.where(empty, self._decay_so_far(), self.decay[:, :, places])

    def _places(self) -> tuple[slice, Tensor]:
        """Those to look at, and which of them hold nothing, (b, n, s, 1) bool."""
        filled = self._filled()
        slots = torch.arange(filled, device=self.count.device)
        return slice(filled), (slots >= self.count.unsqueeze(-1)).unsqueeze(-1)

    def _filled(self) -> int:
        """How many places, from the first, have to be looked at; on a GPU all, since only the device knows."""
        if self.count.device.type != "cpu" or torch.compiler.is_compiling():
            return self.capacity
        return max(1, int(self.count.max()))

    def _decay_so_far(self) -> Tensor:
        """The running sum of log γ^(1/p) up to the last token in the window: (b, n, 1, 1 or d/2)."""
        places, empty = self._places()
        # The last is the least, since none grows.
        return self.decay[:, :, places].masked_fill(empty, 0.0).amin(2, keepdim=True)

    def _decay_through(self, sequence: Sequence) -> Tensor:
        """The same up to each of the new tokens: (b, n, t, 1 or d/2)."""
        so_far = self._decay_so_far()
        if sequence.log_gamma is None:
            return so_far.expand(-1, -1, sequence.length, -1)
        return so_far + log_gate_root(sequence.log_gamma, self.power).cumsum(2)

    def _turn(self, sequence: Sequence) -> tuple[Tensor, Tensor]:
        """Queries of unit length (b, n, g, t, d) and keys (b, n, t, d), turned; the phase moves on."""
        dtype = sequence.compute_dtype
        q = unit_length(sequence.q.to(dtype)).unflatten(2, (sequence.key_heads, sequence.group))
        k = sequence.k.to(dtype)
        if sequence.theta is not None and self.phase is not None:
            angles = accumulate_phase(sequence.theta, sequence.beta, self.phase, length=sequence.length)
            q, k = rotate(q, angles.unsqueeze(3)), rotate(k, angles)
            self.phase.copy_(last_phase(angles, self.phase, sequence.batch, sequence.key_heads))
        return q.permute(0, 2, 3, 1, 4), k.transpose(1, 2)

    def _query_scales(self, keys: Tensor, new: Tensor) -> Tensor:
        """Powers of two for queries of unit length that keep every score within range: (b, n, 1, t, 1).

        Args:
            keys: what the window holds, (b, n, s, d).
            new: keys of the queries' own tokens, (b, n, t, d).
        """
        exponents = torch.full_like(self.count, least_exponent(keys.dtype))
        if self.normalizer is not None:
            exponents = state_exponents(self.normalizer, self.power)
        exponents = running_key_exponents(torch.cat([keys, new], dim=2).transpose(1, 2), exponents)
        exponents = exponents[:, -new.shape[2] :]
        if self.normalizer is not None:
            # No further up than the features of a query have room for.
            exponents = exponents.clamp(min=least_exponent(keys.dtype) // self.power)
        return power_of_two(-exponents, keys.dtype).transpose(1, 2)[:, :, None, :, None]

    def _put(self, key: Tensor, value: Tensor, decay: Tensor) -> None:
        """Writes tokens behind those in the window: (b, n, t, d), (b, n, t, e), (b, n, t, 1 or d/2)."""
        new = torch.arange(key.shape[2], device=key.device)
        slots = (self.count.unsqueeze(-1) + new).unsqueeze(-1)  # (b, n, t, 1)
        room = slots < self.capacity
        slots = slots.clamp(max=self.capacity - 1)
        for held, tokens in ((self.keys.mT, key), (self.values, value), (self.decay, decay)):
            places = slots.expand(-1, -1, -1, held.shape[-1])
            # As in the kernels, a token for which there is no room leaves what is there as it is.
            held.scatter_(2, places, torch.where(room, tokens.to(held.dtype), held.gather(2, places)))
        self.count.add_(key.shape[2]).clamp_(max=self.capacity)


register_as_tree(Window, "power", "tokens")


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _on_host() -> bool:
    """Whether a call runs now, rather than being traced or captured to run later and again."""
    if torch.compiler.is_compiling():
        return False
    return not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
