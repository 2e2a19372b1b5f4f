"""Decoding with a window in plain PyTorch: one token, a segment of tokens, and the fold into the state.

Callers use `sympow.ops.window.Window`, which checks arguments, chooses between this and the kernels, and counts tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sympow.ops.compilation import TensorRecord
from sympow.ops.inputs import Inputs, divide
from sympow.ops.numerics import (
    compute_dtype,
    least_exponent,
    log_gate_root,
    power_of_two,
    running_key_exponents,
    state_exponents,
    unit_length,
)
from sympow.ops.rotary import accumulate_phase, last_phase, rotate
from sympow.ops.torch.products import (
    attend_to_past,
    attend_to_self,
    causal_attention,
    query_state,
    update_state,
)


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
        power, dtype = self.power, inputs.compute_dtype
        query, key = self._rotate(inputs)
        value = inputs.v.to(dtype).transpose(1, 2)  # (b, n, 1, e)
        decay = self._decay_through(inputs)  # (b, n, 1, 1 or d/2)
        keys, values, held_decay = self._held(dtype)
        query = query * self._query_scales(keys, held_decay, key, decay)

        sums = attend_to_past(query, keys, values, decay, held_decay, power)
        sums = sums.plus(attend_to_self(query, key, value, power))
        if self.kv is not None and self.normalizer is not None:
            sums = sums.plus(query_state(query, decay, self.kv, self.normalizer, power))
        y = divide(sums.numerator, sums.denominator, inputs.q.dtype)

        # As in the kernels, NaN marks a token beyond the capacity.
        full = (self.count >= self.capacity).repeat_interleave(inputs.group, dim=1)
        self._put(key, value, decay)
        return y.masked_fill(full[:, None, :, None], float("nan"))

    def _portable_read(self, inputs: Inputs) -> Tensor:
        """y (b, t, h, e) of tokens within the capacity, which are added to the window."""
        power, dtype = self.power, inputs.compute_dtype
        query, key = self._rotate(inputs)
        value = inputs.v.to(dtype).transpose(1, 2)  # (b, n, t, e)
        decay = self._decay_through(inputs)  # (b, n, t, 1 or d/2)
        keys, values, held_decay = self._held(dtype)
        query = query * self._query_scales(keys, held_decay, key, decay)
        sums = causal_attention(query, key, value, decay, power)
        sums = sums.plus(attend_to_past(query, keys, values, decay, held_decay, power))
        if self.kv is not None and self.normalizer is not None:
            sums = sums.plus(query_state(query, decay, self.kv, self.normalizer, power))
        self._put(key, value, decay)
        return divide(sums.numerator, sums.denominator, inputs.q.dtype)

    def _portable_extend(self, inputs: Inputs) -> None:
        """Adds tokens to the window without computing their outputs."""
        _, key = self._rotate(inputs)
        self._put(key, inputs.v.transpose(1, 2), self._decay_through(inputs))

    def _portable_fold(self) -> None:
        """Folds the tokens into the state, which is created if there is none, and empties the window."""
        keys, values, decay = self._held(compute_dtype(self.values.dtype))
        self.kv, self.normalizer = update_state(
            keys, values, decay, self.kv, self.normalizer, self.power, in_place=True
        )
        self.count.zero_()

    def _held(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Keys (b, n, s, d), values (b, n, s, e) and running sums (b, n, s, 1 or d/2) of the tokens in the window.

        Where a sequence holds fewer tokens than s, keys and values are zero, and the sum is that of its last token:
        such keys have no score, and nothing decays after the last token.
        """
        places, empty = self._places()
        keys, values = (x[:, :, places].to(dtype).masked_fill(empty, 0.0) for x in (self.keys.mT, self.values))
        return keys, values, torch.where(empty, self._decay_so_far(), self.decay[:, :, places])

    def _places(self) -> tuple[slice, Tensor]:
        """The places to read, and which of them are empty, (b, n, s, 1) bool."""
        filled = self._filled()
        places = torch.arange(filled, device=self.count.device)
        return slice(filled), (places >= self.count.unsqueeze(-1)).unsqueeze(-1)

    def _filled(self) -> int:
        """How many places, from the first, to read: on a GPU all of them, since only the device knows the count."""
        if self.count.device.type != "cpu" or torch.compiler.is_compiling():
            return self.capacity
        return max(1, int(self.count.max()))

    def _decay_so_far(self) -> Tensor:
        """The running sum of log γ^(1/p) up to the last token in the window: (b, n, 1, 1 or d/2)."""
        places, empty = self._places()
        # The last one is the smallest, since log γ is never positive.
        return self.decay[:, :, places].masked_fill(empty, 0.0).amin(2, keepdim=True)

    def _decay_through(self, inputs: Inputs) -> Tensor:
        """The same up to each of the new tokens: (b, n, t, 1 or d/2)."""
        so_far = self._decay_so_far()
        if inputs.log_gamma is None:
            return so_far.expand(-1, -1, inputs.length, -1)
        return so_far + log_gate_root(inputs.log_gamma, self.power).cumsum(2)

    def _rotate(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Rotated queries of unit length (b, n, g, t, d) and keys (b, n, t, d). Advances the phase."""
        dtype = inputs.compute_dtype
        q = unit_length(inputs.q.to(dtype)).unflatten(2, (inputs.key_heads, inputs.group))
        k = inputs.k.to(dtype)
        if inputs.theta is not None and self.phase is not None:
            angles = accumulate_phase(inputs.theta, inputs.beta, self.phase, length=inputs.length)
            q, k = rotate(q, angles.unsqueeze(3)), rotate(k, angles)
            self.phase.copy_(last_phase(angles, self.phase, inputs.batch, inputs.key_heads))
        return q.permute(0, 2, 3, 1, 4), k.transpose(1, 2)

    def _query_scales(self, keys: Tensor, held_decay: Tensor, new: Tensor, decay: Tensor) -> Tensor:
        """Powers of two for queries of unit length that keep every score within range: (b, n, 1, t, 1).

        Args:
            keys: what the window holds, (b, n, s, d).
            held_decay: running sums at those, (b, n, s, 1 or d/2).
            new: keys of the queries' own tokens, (b, n, t, d).
            decay: running sums at those, (b, n, t, 1 or d/2).
        """
        exponents = torch.full_like(self.count, least_exponent(keys.dtype))
        if self.normalizer is not None:
            exponents = state_exponents(self.normalizer, self.power)
        decays = torch.cat([held_decay, decay], dim=2)
        exponents = running_key_exponents(torch.cat([keys, new], dim=2).transpose(1, 2), exponents, decays)
        exponents = exponents[:, -new.shape[2] :]
        if self.normalizer is not None:
            # Bounded, so that the features of a query do not overflow.
            exponents = exponents.clamp(min=least_exponent(keys.dtype) // self.power)
        return power_of_two(-exponents, keys.dtype).transpose(1, 2)[:, :, None, :, None]

    def _put(self, key: Tensor, value: Tensor, decay: Tensor) -> None:
        """Writes tokens after those in the window: (b, n, t, d), (b, n, t, e), (b, n, t, 1 or d/2)."""
        new = torch.arange(key.shape[2], device=key.device)
        position = (self.count.unsqueeze(-1) + new).unsqueeze(-1)  # (b, n, t, 1)
        room = position < self.capacity
        position = position.clamp(max=self.capacity - 1)
        for held, tokens in ((self.keys.mT, key), (self.values, value), (self.decay, decay)):
            places = position.expand(-1, -1, -1, held.shape[-1])
            # As in the kernels, a token beyond the capacity changes nothing.
            held.scatter_(2, places, torch.where(room, tokens.to(held.dtype), held.gather(2, places)))
        self.count.add_(key.shape[2]).clamp_(max=self.capacity)
