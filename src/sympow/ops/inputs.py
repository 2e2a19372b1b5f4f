"""`Inputs`, the checked inputs of one call, and their preparation for plain PyTorch: rotated, scaled, head-major."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise, repeat

import torch
from torch import Tensor

from sympow.ops.numerics import compute_dtype, log_gate_root, power_of_two, running_key_exponents, unit_length
from sympow.ops.rotary import accumulate_phase, last_phase, rotate
from sympow.ops.state import State


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of `sympow.attention` for a batch of sequences of one length, time on the second axis."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gamma: Tensor | None
    beta: Tensor | None
    theta: Tensor | None
    power: int

    @property
    def length(self) -> int:
        return self.q.shape[1]

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def key_heads(self) -> int:
        return self.k.shape[2]

    @property
    def key_dim(self) -> int:
        return self.k.shape[3]

    @property
    def value_dim(self) -> int:
        return self.v.shape[3]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.q.shape[2] // self.key_heads

    @property
    def rotated(self) -> bool:
        return self.theta is not None

    @property
    def vector_gate(self) -> bool:
        """Whether each rotated pair has its own gate."""
        return self.log_gamma is not None and self.log_gamma.ndim == 4

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype in which plain PyTorch computes and keeps states."""
        return compute_dtype(self.q.dtype)

    @property
    def needs_grad(self) -> bool:
        tensors = (self.q, self.k, self.v, self.log_gamma, self.beta, self.theta)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    def __getitem__(self, time: slice) -> Inputs:
        return Inputs(
            q=self.q[:, time],
            k=self.k[:, time],
            v=self.v[:, time],
            log_gamma=None if self.log_gamma is None else self.log_gamma[:, time],
            beta=None if self.beta is None else self.beta[:, time],
            theta=self.theta,
            power=self.power,
        )

    def split(self, size: int) -> list[Inputs]:
        """Consecutive parts of `size` tokens, the last one of the rest.

        The gradient of a slice is as large as the whole; those of all parts together are put together once.
        """
        names = ("q", "k", "v", "log_gamma", "beta")
        tensors = (getattr(self, name) for name in names)
        # None is repeated without end.
        parts = zip(*(repeat(None) if x is None else x.split(size, dim=1) for x in tensors), strict=False)
        return [replace(self, **dict(zip(names, part, strict=True))) for part in parts]

    def one_token(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """q (b, h, d), k, v, log γ, β and θ of a sequence of one token, without the time axis."""
        q, k, v, log_gamma, beta = (
            None if x is None else x.squeeze(1) for x in (self.q, self.k, self.v, self.log_gamma, self.beta)
        )
        assert q is not None
        assert k is not None
        assert v is not None
        return q, k, v, log_gamma, beta, self.theta


@dataclass(frozen=True)
class Prepared:
    """A chunk of a sequence, rotated, scaled and head-major, as `sympow.ops.torch.products` takes it.

    Attributes:
        q: (b, h_kv, g, t, d), unit length.
        k: (b, h_kv, t, d), at most about unit length.
        v: (b, h_kv, t, e).
        decay: running sum over the chunk of log γ^(1/p) and of the logs of the factors by which earlier keys were
            rescaled (`sympow.ops.numerics`), (b, h_kv, t, 1 or d/2) float64. No entry exceeds an earlier one by more
            than log 2.
        phase: μ after the chunk, (b, h_kv, d/2) float64, or None.
        exponent: keys of a state after the chunk are divided by 2^exponent, (b, h_kv).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    phase: Tensor | None
    exponent: Tensor


def prepare(inputs: Inputs, phase: Tensor | None, exponent: Tensor) -> Prepared:
    """Rotates and scales the inputs of a chunk, and brings them into head-major layout.

    Args:
        inputs: those of the chunk.
        phase: μ before it, (b, h_kv, d/2), or None for zero.
        exponent: keys before it are divided by 2^exponent, (b, h_kv).
    """
    dtype = inputs.compute_dtype
    q = unit_length(inputs.q.to(dtype)).unflatten(2, (inputs.key_heads, inputs.group))
    k = inputs.k.to(dtype)
    gates = None if inputs.log_gamma is None else log_gate_root(inputs.log_gamma, inputs.power).cumsum(2)
    exponents = running_key_exponents(k, exponent, gates)
    k = k * power_of_two(-exponents, dtype).unsqueeze(-1)
    if inputs.theta is not None:
        angles = accumulate_phase(inputs.theta, inputs.beta, phase, length=inputs.length)
        q, k = rotate(q, angles.unsqueeze(3)), rotate(k, angles)
        phase = last_phase(angles, phase, inputs.batch, inputs.key_heads)
    decay = (exponent.unsqueeze(1) - exponents).to(torch.float64).mul(math.log(2)).transpose(1, 2).unsqueeze(-1)
    if gates is not None:
        decay = decay + gates
    return Prepared(
        q=q.permute(0, 2, 3, 1, 4),
        k=k.transpose(1, 2),
        v=inputs.v.to(dtype).transpose(1, 2),
        decay=decay,
        phase=phase,
        exponent=exponents[:, -1],
    )


def divide(numerator: Tensor, denominator: Tensor, dtype: torch.dtype) -> Tensor:
    """Y = numerator / denominator in the public layout, 0 where all scores of a row are 0: (b, t, h, e).

    Args:
        numerator: (b, h_kv, g, t, e).
        denominator: (b, h_kv, g, t).
    """
    weightless = denominator == 0  # not `<= 0`, which would let NaN become 0
    y = torch.where(weightless.unsqueeze(-1), 0.0, numerator) / torch.where(weightless, 1.0, denominator).unsqueeze(-1)
    return y.permute(0, 3, 1, 2, 4).flatten(2, 3).to(dtype)


def run_documents(
    inputs: Inputs,
    offsets: list[int],
    initial_state: State | None,
    run: Callable[[Inputs, State | None], tuple[Tensor, State | None]],
) -> tuple[Tensor, State | None]:
    """Applies `run` to each document with its own initial state, and concatenates the results.

    Args:
        inputs: batch 1, all documents along time.
        offsets: the first token of each document, and the end of the last one.
        initial_state: one batch entry per document, or None.
        run: takes a document and its initial state, returns y and, if it makes one, the final state.
    """
    outputs, states = [], []
    for document, (start, stop) in enumerate(pairwise(offsets)):
        before = None if initial_state is None else initial_state.select(slice(document, document + 1))
        y, after = run(inputs[start:stop], before)
        outputs.append(y)
        if after is not None:
            states.append(after)
    return torch.cat(outputs, dim=1), State.cat(states) if states else None
