"""`KeyValueCache`: softmax decoding with a cache of fixed capacity, updated in place.

It is to softmax attention what `Window` is to symmetric power attention, so that the two are compared at their best.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sympow.checks import check_choice, check_positive, check_row
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.ops.compilation import TensorRecord, conv_shape, register_as_pytree
from sympow.ops.dispatch import softmax_step_backend
from sympow.ops.inputs import Inputs
from sympow.ops.numerics import without_autocast
from sympow.ops.rotation import rotate_inputs
from sympow.ops.torch.softmax import CLOSED_GATE, KeyValueState, PaddedKeyValueState
from sympow.ops.validation import check_tensors
from sympow.settings import BACKENDS


@dataclass(eq=False)
class KeyValueCache(TensorRecord):
    """The keys and values of a batch of sequences, with free positions for more. Steps update it in place.

    As with `Window`, a step does not synchronize with the device, so that one captured CUDA graph can be replayed
    however full the cache is. A step into a full cache returns NaN and does not modify the cache.

    Attributes:
        keys: rotated keys, (b, h_kv, W, d).
        values: (b, h_kv, W, e).
        decay: running sums of log γ, (b, h_kv, W) float64; None without gates.
        count: tokens held, (b, h_kv) int32; sequences may hold different numbers.
        arrivals: for the kernel, zero between calls, (b, h_kv) int32.
        phase: μ after the last token, (b, h_kv, d/2) float64; None without rotation.
        tokens: the largest `count` as the host knows it; the caller counts the steps that are replayed from a graph.
        workspace: for the kernel, allocated by the first step that uses it.
        conv_state: as in `State`; a layer's steps update it in place.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor | None
    count: Tensor
    arrivals: Tensor
    phase: Tensor | None
    tokens: int
    workspace: Tensor | None = None
    conv_state: Tensor | None = field(default=None, kw_only=True)

    @classmethod
    def open(cls, state: KeyValueState, *, capacity: int) -> KeyValueCache:
        """A copy of a state's keys and values, with a capacity of `capacity` tokens in all."""
        check_positive("capacity", capacity)
        if not isinstance(state, KeyValueState):
            raise ArgumentTypeError("state", f"must be a KeyValueState, got {type(state).__name__}")
        batch, length, heads, _ = state.k.shape
        if capacity < length:
            raise ArgumentError("capacity", f"must be at least {length}, the tokens of the state; got {capacity}")
        counts = torch.full((batch,), length, device=state.k.device)
        order = None
        if isinstance(state, PaddedKeyValueState):
            # Tokens before padding, in order.
            order = (~state.mask).to(torch.int8).argsort(dim=1, stable=True)
            counts = state.mask.sum(1)

        def placed(x: Tensor) -> Tensor:
            if order is not None:
                x = x.gather(1, order.reshape(*order.shape, *[1] * (x.ndim - 2)).expand_as(x))
            room = x.new_zeros(batch, heads, capacity, *x.shape[3:])
            room[:, :, :length] = x.transpose(1, 2)
            return room

        count = counts.to(torch.int32).unsqueeze(1).expand(-1, heads).contiguous()
        return cls(
            keys=placed(state.k),
            values=placed(state.v),
            decay=None if state.decay is None else placed(state.decay),
            count=count,
            arrivals=torch.zeros_like(count),
            phase=None if state.phase is None else state.phase.clone(memory_format=torch.contiguous_format),
            tokens=length,
            conv_state=None if state.conv_state is None else state.conv_state.clone(),
        )

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def _rows(self, start: int, stop: int) -> KeyValueCache:
        """Sequences of the batch, from `start` up to `stop`, as a cache on the same memory.

        The view has its own `tokens`, which the caller keeps.
        """
        return replace(self._map(lambda tensor: tensor[start:stop]), workspace=None)

    @torch.no_grad()
    def put(self, row: int, sequence: KeyValueState | KeyValueCache) -> None:
        """Replaces one sequence of the batch in place; the others are not touched.

        Args:
            row: which.
            sequence: the state, or the cache, of one sequence, with no more tokens than the capacity.
        """
        check_row(row, self.keys.shape[0])
        if isinstance(sequence, KeyValueState):
            sequence = KeyValueCache.open(sequence, capacity=max(1, sequence.length))
        if not isinstance(sequence, KeyValueCache):
            raise ArgumentTypeError(
                "sequence", f"must be a KeyValueState or a KeyValueCache, got {type(sequence).__name__}"
            )
        kinds = [
            (
                c.keys.shape[1],
                c.keys.shape[3],
                c.values.shape[3],
                c.decay is not None,
                c.phase is not None,
                conv_shape(c),
            )
            for c in (sequence, self)
        ]
        if sequence.keys.shape[0] != 1 or kinds[0] != kinds[1]:
            raise ArgumentError(
                "sequence",
                "must be one sequence and agree with the cache in (heads, key dim, value dim, gated, rotated, "
                f"short_conv); got {sequence.keys.shape[0]} of {kinds[0]}, expected 1 of {kinds[1]}",
            )
        if sequence.tokens > self.capacity:
            raise ArgumentError("sequence", f"has {sequence.tokens} tokens, more than the capacity of {self.capacity}")
        tokens = min(sequence.capacity, self.capacity)
        for name, tensor in replace(self, workspace=None)._tensors().items():
            source = getattr(sequence, name)[0]
            if name in ("keys", "values", "decay"):
                # Zeros beyond the tokens, since NaN would spread from there.
                tensor[row, :, tokens:] = 0
                tensor[row, :, :tokens] = source[:, :tokens]
            else:
                tensor[row] = source
        self.tokens = max(self.tokens, sequence.tokens)

    def resized(self, capacity: int) -> KeyValueCache:
        """A copy with another capacity, at least the number of tokens held."""
        return KeyValueCache.open(self.close(), capacity=capacity)

    def close(self) -> KeyValueState:
        """The keys and values as a `KeyValueState`; shorter sequences are padded on the left."""
        counts = self.count[:, :1].long()  # (b, 1)
        length = self.tokens
        # Position s of the state is position s − (length − count) of the cache.
        positions = torch.arange(length, device=counts.device) - (length - counts)
        mask = positions >= 0
        positions = positions.clamp(min=0)

        def taken(x: Tensor) -> Tensor:
            x = x.transpose(1, 2)
            return x.gather(1, positions.reshape(*positions.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))

        decay = None if self.decay is None else taken(self.decay)
        phase, conv_state = (None if x is None else x.clone() for x in (self.phase, self.conv_state))
        if bool(mask.all()):
            return KeyValueState(taken(self.keys), taken(self.values), decay, phase, conv_state=conv_state)
        return PaddedKeyValueState(taken(self.keys), taken(self.values), decay, phase, mask, conv_state=conv_state)

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
        """y (b, 1, h, e) of one token, which is added to the cache; arguments as in `softmax_attention`.

        Args:
            backend: "torch", "triton", or "auto": the kernel on a GPU, except for float64.
        """
        check_choice("backend", backend, BACKENDS)
        check_tensors(q, k, v, log_gamma, beta, theta)
        if q.shape[1] != 1:
            raise ArgumentError("q", f", k and v must be one token long, (b, 1, h, d); got {q.shape[1]}")
        if k.shape[0::2] != self.keys.shape[:2] or k.shape[3] != self.keys.shape[3]:
            shape = (*self.keys.shape[:2], self.keys.shape[3])
            raise ArgumentError("k", f"must have (batch, heads, dim) {shape}, as the cache does; got {tuple(k.shape)}")
        if v.shape[3] != self.values.shape[3]:
            raise ArgumentError("v", f"has head dim {v.shape[3]}, but the cache was made for {self.values.shape[3]}")
        if v.dtype != self.values.dtype:
            raise ArgumentTypeError("v", f"is in {v.dtype}, but the cache holds {self.values.dtype}")
        for name, given, held in (("log_gamma", log_gamma, self.decay), ("theta", theta, self.phase)):
            if (given is None) != (held is None):
                made, used = ("without", "with") if held is None else ("with", "without")
                raise UserError(f"{name}: the cache was made {made} it, but is used {used}")
        if log_gamma is not None and log_gamma.ndim == 4:
            log_gamma = log_gamma.mean(-1)
        inputs = Inputs(q, k, v, log_gamma, beta, theta, power=1)
        if inputs.needs_grad:
            raise UserError("the inputs of a cache's step must not require gradients: steps are not differentiable")
        fused = softmax_step_backend(backend, inputs) == "triton"
        self.tokens = min(self.tokens + 1, self.capacity)
        with torch.no_grad(), without_autocast(q.device):
            return self._fused_step(inputs) if fused else self._portable_step(inputs, backend)

    def _fused_step(self, inputs: Inputs) -> Tensor:
        from sympow.kernels.decode.op import fused_softmax_step
        from sympow.kernels.decode.softmax_step import softmax_workspace

        if self.workspace is None:
            sequences = inputs.batch * inputs.key_heads
            length = softmax_workspace(sequences, inputs.group, inputs.value_dim, self.capacity)
            self.workspace = self.keys.new_empty(length, dtype=torch.float32)
        y: Tensor = fused_softmax_step(
            *inputs.one_token(),
            self.keys,
            self.values,
            self.decay,
            self.count,
            self.phase,
            self.arrivals,
            self.workspace,
        )
        return y.unsqueeze(1)

    def _portable_step(self, inputs: Inputs, backend: str) -> Tensor:
        q, k, phase = rotate_inputs(inputs, self.phase, backend=backend)
        full = (self.count >= self.capacity).unsqueeze(-1)  # (b, n, 1)
        if phase is not None and self.phase is not None:
            self.phase.copy_(torch.where(full, self.phase, phase))
        place = self.count.long().clamp(max=self.capacity - 1).unsqueeze(-1)  # (b, n, 1)
        total = None
        if self.decay is not None and inputs.log_gamma is not None:
            so_far = self.decay.gather(2, (place - 1).clamp(min=0)) * (place > 0)
            total = so_far + inputs.log_gamma.to(torch.float64).clamp(min=CLOSED_GATE).transpose(1, 2)
            _write(self.decay, place, total, full)
        for held, new in ((self.keys, k), (self.values, inputs.v)):
            _write(held, place.unsqueeze(-1).expand(-1, -1, -1, held.shape[-1]), new.transpose(1, 2), full[..., None])
        self.count.add_(1).clamp_(max=self.capacity)
        filled = self.capacity if self.count.is_cuda else int(self.count.max())
        hidden = torch.arange(filled, device=q.device) >= self.count.unsqueeze(-1)  # (b, n, filled)
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        if total is not None and self.decay is not None:
            between = total - self.decay[:, :, :filled]
            hidden = hidden | (between <= CLOSED_GATE)
            bias = between.to(q.dtype)
        bias = bias.masked_fill(hidden, float("-inf")).repeat_interleave(inputs.group, dim=1)
        y = scaled_dot_product_attention(
            q.transpose(1, 2),
            self.keys[:, :, :filled],
            self.values[:, :, :filled],
            attn_mask=bias.unsqueeze(2),
            enable_gqa=inputs.group > 1,
        )
        # A token beyond the capacity must not go unnoticed.
        full = full.repeat_interleave(inputs.group, dim=1).unsqueeze(-1)
        return y.masked_fill(full, float("nan")).transpose(1, 2)


def _write(held: Tensor, place: Tensor, new: Tensor, full: Tensor) -> None:
    """Writes to a position of the third axis; full sequences are not modified."""
    held.scatter_(2, place, torch.where(full, held.gather(2, place), new))


register_as_pytree(KeyValueCache, "tokens")
