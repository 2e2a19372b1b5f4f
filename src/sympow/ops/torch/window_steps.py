"""Decoding with a window in plain PyTorch: one token, a segment of tokens, and the fold into the state.

Callers use `sympow.ops.window.Window`, which checks arguments, chooses between this and the kernels, and counts tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sympow.ops.compilation import TensorRecord, runs_now_on_cpu
from sympow.ops.inputs import Inputs, divide
from sympow.ops.numerics import (
    compute_dtype,
    largest_entry,
    least_exponent,
    log_gate_root,
    power_of_two,
    running_exponents,
    state_exponents,
    unit_length,
)
from sympow.ops.rotary import accumulate_phase, rotate
from sympow.ops.torch.products import (
    Sums,
    attend_to_past,
    attend_to_self,
    causal_attention,
    query_state,
    update_state,
)


@dataclass(frozen=True)
class Held:
    """What a window holds of s places, head-major.

    Where a sequence holds fewer tokens, keys and values are zero, and the sum is that of its last token: such keys have
    no score, and nothing decays after the last token.

    Attributes:
        keys: (b, n, s, d).
        values: (b, n, s, e).
        decay: running sums of log γ^(1/p) since the last fold, (b, n, s, 1 or d/2) float64.
        so_far: that of the last token, (b, n, 1, 1 or d/2).
        count: the number of tokens, if the host knows it, it is s for all sequences, and there is room for more.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor
    so_far: Tensor
    count: int | None = None


@dataclass(eq=False)
class PortableWindow(TensorRecord):
    """The last tokens of a batch of sequences, beside the state of all earlier ones.

    Attributes:
        keys: rotated keys, (b, h_kv, d, W), one column per token.
        values: (b, h_kv, W, e).
        decay: running sums of log γ^(1/p) since the last fold, (b, h_kv, W, 1 or d/2) float64.
        count: tokens in the window, (b, h_kv) int32. It can differ between sequences.
        phase: μ after the last token, (b, h_kv, d/2) float64; None without rotation.
        kv, normalizer: the state at the last fold, as in `State`; None before there is one.
        power: p.
        conv_state: as in `State`; a layer's steps update it in place.
    """

    keys: Tensor
    values: Tensor
    decay: Tensor
    count: Tensor
    phase: Tensor | None
    kv: Tensor | None
    normalizer: Tensor | None
    power: int
    conv_state: Tensor | None = field(default=None, kw_only=True)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def key_dim(self) -> int:
        return self.keys.shape[2]

    @property
    def value_dim(self) -> int:
        return self.values.shape[3]

    def _portable_step(self, inputs: Inputs) -> Tensor:
        """y (b, 1, h, e) of one token, which is added to the window; NaN where the window is full."""
        power = self.power
        held = self._held(inputs.compute_dtype)
        query, key, value, decay = self._prepare(inputs, held)
        sums = attend_to_past(query, held.keys, held.values, decay, held.decay, power)
        sums = sums.plus(attend_to_self(query, key, value, power))
        y = self._finish(sums, query, decay, inputs)
        if held.count is None:
            # As in the kernels, NaN marks a token beyond the capacity.
            full = (self.count >= self.capacity).repeat_interleave(inputs.group, dim=1)
            y = y.masked_fill(full[:, None, :, None], float("nan"))
        self._put(key, value, decay, held.count)
        return y

    def _portable_read(self, inputs: Inputs) -> Tensor:
        """y (b, t, h, e) of tokens within the capacity, which are added to the window."""
        power = self.power
        held = self._held(inputs.compute_dtype)
        query, key, value, decay = self._prepare(inputs, held)
        sums = causal_attention(query, key, value, decay, power)
        sums = sums.plus(attend_to_past(query, held.keys, held.values, decay, held.decay, power))
        y = self._finish(sums, query, decay, inputs)
        self._put(key, value, decay, held.count)
        return y

    def _portable_extend(self, inputs: Inputs) -> None:
        """Adds tokens to the window without computing their outputs."""
        held = self._held(self.values.dtype)
        _, key = self._rotate(inputs)
        self._put(key, inputs.v.transpose(1, 2), self._decay_through(inputs, held), held.count)

    def _portable_fold(self) -> None:
        """Folds the tokens into the state, which is created if there is none, and empties the window."""
        held = self._held(compute_dtype(self.values.dtype))
        self.kv, self.normalizer = update_state(
            held.keys, held.values, held.decay, self.kv, self.normalizer, self.power, in_place=True
        )
        self.count.zero_()

    def _held(self, dtype: torch.dtype) -> Held:
        """What the window holds, keys and values in a dtype."""
        filled, all_filled = self._filled()
        keys, values, decay = self.keys.mT[:, :, :filled], self.values[:, :, :filled], self.decay[:, :, :filled]
        if all_filled:
            return Held(keys.to(dtype), values.to(dtype), decay, decay[:, :, -1:], filled)
        places = torch.arange(filled, device=self.count.device)
        empty = (places >= self.count.unsqueeze(-1)).unsqueeze(-1)
        # The last one is the smallest, since log γ is never positive.
        so_far = decay.masked_fill(empty, 0.0).amin(2, keepdim=True)
        keys, values = (x.to(dtype).masked_fill(empty, 0.0) for x in (keys, values))
        return Held(keys, values, torch.where(empty, so_far, decay), so_far)

    def _filled(self) -> tuple[int, bool]:
        """How many places, from the first, to read, and whether all sequences hold a token in each, with room for more.

        On a GPU all places, since only the device knows the counts.
        """
        if not runs_now_on_cpu(self.count):
            return self.capacity, False
        least, most = (int(count) for count in self.count.aminmax())
        return max(1, most), 0 < least == most < self.capacity

    def _prepare(self, inputs: Inputs, held: Held) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Scaled queries (b, n, g, t, d), keys (b, n, t, d), values (b, n, t, e) and running sums (b, n, t, ·)."""
        query, key = self._rotate(inputs)
        decay = self._decay_through(inputs, held)
        query = query * self._query_scales(held, key, decay)
        return query, key, inputs.v.to(inputs.compute_dtype).transpose(1, 2), decay

    def _finish(self, sums: Sums, query: Tensor, decay: Tensor, inputs: Inputs) -> Tensor:
        """y (b, t, h, e) from the sums over tokens and what the state adds to them."""
        if self.kv is not None and self.normalizer is not None:
            sums = sums.plus(query_state(query, decay, self.kv, self.normalizer, self.power))
        return divide(sums.numerator, sums.denominator, inputs.q.dtype)

    def _decay_through(self, inputs: Inputs, held: Held) -> Tensor:
        """The running sum of log γ^(1/p) up to each of the new tokens: (b, n, t, 1 or d/2)."""
        if inputs.log_gamma is None:
            return held.so_far.expand(-1, -1, inputs.length, -1)
        return held.so_far + log_gate_root(inputs.log_gamma, self.power).cumsum(2)

    def _rotate(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Rotated queries of unit length (b, n, g, t, d) and keys (b, n, t, d). Advances the phase."""
        dtype = inputs.compute_dtype
        q = unit_length(inputs.q.to(dtype)).unflatten(2, (inputs.key_heads, inputs.group))
        k = inputs.k.to(dtype)
        if inputs.theta is not None and self.phase is not None:
            angles = accumulate_phase(inputs.theta, inputs.beta, self.phase, length=inputs.length)
            both = rotate(torch.cat([q, k.unsqueeze(3)], dim=3), angles.unsqueeze(3))
            q, k = both[:, :, :, :-1], both[:, :, :, -1]
            self.phase.copy_(angles[:, -1])
        return q.permute(0, 2, 3, 1, 4), k.transpose(1, 2)

    def _query_scales(self, held: Held, new: Tensor, decay: Tensor) -> Tensor:
        """Powers of two for queries of unit length that keep every score within range: (b, n, 1, t, 1).

        Args:
            new: keys of the queries' own tokens, (b, n, t, d).
            decay: running sums at those, (b, n, t, 1 or d/2).
        """
        exponents = torch.full_like(self.count, least_exponent(new.dtype))
        if self.normalizer is not None:
            exponents = state_exponents(self.normalizer, self.power)
        largest = torch.cat([largest_entry(held.keys), largest_entry(new)], dim=2).transpose(1, 2)
        exponents = running_exponents(largest, self.key_dim, exponents, torch.cat([held.decay, decay], dim=2))
        exponents = exponents[:, -new.shape[2] :]
        if self.normalizer is not None:
            # Bounded, so that the features of a query do not overflow.
            exponents = exponents.clamp(min=least_exponent(new.dtype) // self.power)
        return power_of_two(-exponents, new.dtype).transpose(1, 2)[:, :, None, :, None]

    def _put(self, key: Tensor, value: Tensor, decay: Tensor, count: int | None) -> None:
        """Writes tokens after those in the window: (b, n, t, d), (b, n, t, e), (b, n, t, 1 or d/2)."""
        length = key.shape[2]
        pairs = ((self.keys.mT, key), (self.values, value), (self.decay, decay))
        if count is not None and count + length <= self.capacity:
            for held, tokens in pairs:
                held[:, :, count : count + length] = tokens
            self.count.add_(length)
            return
        new = torch.arange(length, device=key.device)
        position = (self.count.unsqueeze(-1) + new).unsqueeze(-1)  # (b, n, t, 1)
        room = position < self.capacity
        position = position.clamp(max=self.capacity - 1)
        for held, tokens in pairs:
            places = position.expand(-1, -1, -1, held.shape[-1])
            # As in the kernels, a token beyond the capacity changes nothing.
            held.scatter_(2, places, torch.where(room, tokens.to(held.dtype), held.gather(2, places)))
        self.count.add_(length).clamp_(max=self.capacity)
