"""Rotations of a layer: rates θ and scales β = 1 + tanh(W_β x), with W_β initialized to zero (paper §2.2 and §3.2).

"pairs" has one β per rotated pair. "signed" and "grid" turn half of the pairs by angles of their own, which can hold a
state. With a `fraction` below 1, all of this holds of the fastest pairs, and the others keep their direction: their θ
is 0, and no β is projected for them.

Every rotation maps x (b, t, width) to (θ, β): θ (d/2,), β (b, t, h_kv) or (b, t, h_kv, d/2), either None where it does
not apply, in float32 or better. A rotation that projects x has a `projection`, and accepts its result if that is
computed already.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sympow.checks import check_choice
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.layers.precision import ConstantTable, FloatLinear, KeepsFloat32, project
from sympow.ops.rotary import rotary_rates
from sympow.settings import (
    MAX_RATE,
    ROTATIONS,
    WITH_GIVEN_RATES,
    check_rotation_dim,
    check_rotation_settings,
    check_takes_rates,
    rotated_pairs,
)

# Divisions of a half turn: counts modulo 2, 3, 4, 5, 6, 8, 10, 12, 15 and multiples that divide it are exact.
GRID = 120

RatesAndScales = tuple[Tensor | None, Tensor | None]


class Rotation(nn.Module, ABC):
    """Base class of rotations: x (b, t, width) → (θ, β)."""

    @property
    def projection(self) -> nn.Module | None:
        """The projection of x, or None."""
        return None

    def scales_of_rates(self, beta: Tensor | None) -> Tensor | None:
        """What statistics of β are computed from: β where it scales the rates of RoPE, and 1 is RoPE.

        Args:
            beta: what `forward` returned.

        Returns:
            Between 0 and 2; None: β scales no rates, or there is none.
        """
        return beta

    @abstractmethod
    def forward(self, x: Tensor, projected: Tensor | None = None) -> RatesAndScales: ...


class NoRotation(Rotation):
    """No rotation."""

    def forward(self, x: Tensor, projected: Tensor | None = None) -> RatesAndScales:
        return None, None


class FixedRotation(Rotation):
    """θ at every step: RoPE (§2.2).

    Args:
        rates: θ (d/2,), here and below.
    """

    def __init__(self, rates: Tensor) -> None:
        super().__init__()
        self.rates = ConstantTable(rates)

    def forward(self, x: Tensor, projected: Tensor | None = None) -> RatesAndScales:
        return self.rates(x.device), None


class LearnedRotation(KeepsFloat32, Rotation):
    """θ learned, starting from the fixed rates, the same for every input."""

    def __init__(self, rates: Tensor, unrotated: int = 0) -> None:
        super().__init__()
        self.initial, self.unrotated = ConstantTable(rates), unrotated
        self.theta = nn.Parameter(torch.empty(len(rates)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Starts at the fixed rates."""
        if not self.theta.is_meta:
            with torch.no_grad():
                self.theta.copy_(self.initial(self.theta.device))

    def forward(self, x: Tensor, projected: Tensor | None = None) -> RatesAndScales:
        theta = self.theta.to(torch.promote_types(self.theta.dtype, torch.float32))
        return pad(theta, (0, self.unrotated)) if self.unrotated else theta, None


class DataDependentRotation(Rotation):
    """β_i = 1 + tanh(W_β x_i): base class of the paper's rotation and of the one per pair.

    Args:
        outputs: rows of W_β.
        rates: θ of the pairs that are rotated.
        unrotated: number of the pairs behind them.

    Attributes:
        gradient_scale: factor on the gradient that comes back through β, to all its parameters and to x alike; the
            output is the same. Each β rotates all later queries and keys, so its gradient is a sum over all later
            positions. Adam is invariant to the scale of a parameter's gradient; the gradient of x and gradient clipping
            are not. Set by training, and not saved with a model.
    """

    def __init__(self, width: int, outputs: int, rates: Tensor, unrotated: int = 0) -> None:
        super().__init__()
        self.rates, self.unrotated = ConstantTable(pad(rates, (0, unrotated))), unrotated
        self.beta_proj = FloatLinear(width, outputs)
        self.gradient_scale = 1.0

    @property
    def projection(self) -> nn.Module:
        return self.beta_proj

    def by_heads(self, beta: Tensor) -> Tensor:
        """β of the rotated pairs, (b, t, h_kv) or (b, t, h_kv, pairs), from 1 + tanh(W_β x), (b, t, outputs)."""
        return beta

    def scales_of_rates(self, beta: Tensor | None) -> Tensor | None:
        if beta is None or beta.ndim == 3:
            return beta
        return beta[..., : beta.shape[-1] - self.unrotated]

    def forward(self, x: Tensor, projected: Tensor | None = None) -> RatesAndScales:
        projected = project(x, self.beta_proj) if projected is None else projected
        beta = self.by_heads(1 + projected.tanh())
        if self.unrotated and beta.ndim == 4:
            beta = pad(beta, (0, self.unrotated), value=1.0)
        if self.gradient_scale != 1:
            # The term added is exactly zero; only its gradient is not.
            beta = beta.detach() + self.gradient_scale * (beta - beta.detach())
        return self.rates(x.device), beta


class ScaledRotation(DataDependentRotation):
    """β_i = 1 + tanh(W_β x_i), one per head and token: the paper's rotation (§3.2). W_β = 0 is RoPE."""

    def __init__(self, width: int, heads: int, rates: Tensor, unrotated: int = 0) -> None:
        super().__init__(width, heads, rates, unrotated)


class PairRotation(DataDependentRotation):
    """β_i = 1 + tanh(W_β x_i) for every rotated pair of every head (§3.2: "independently … each pair")."""

    def __init__(self, width: int, heads: int, rates: Tensor, unrotated: int = 0) -> None:
        super().__init__(width, heads * len(rates), rates, unrotated)
        self.heads = heads

    def by_heads(self, beta: Tensor) -> Tensor:
        return beta.unflatten(-1, (self.heads, -1))


class SignedRotation(DataDependentRotation):
    """RoPE in the first half of the pairs, and in the others a signed angle (π/2) tanh(W x), at first zero.

    Scores are even powers, so that an angle counts modulo π, and these are all angles. The first half of the pairs says
    where a token is, the second half can hold a state that tokens turn, such as a parity or a count.

    Args:
        divisions: round the angles to multiples of π / divisions, with the gradient of the angles themselves; 0: do
            not round. A sum of angles that are not exact drifts away from a state's angle with every token, while a
            count modulo any divisor of `divisions` is exact at every length.
    """

    def __init__(self, width: int, heads: int, rates: Tensor, unrotated: int = 0, *, divisions: int = 0) -> None:
        turned = len(rates) // 2
        unit = math.pi / divisions if divisions else math.pi / 2
        # Every other rate: as far apart as those of all pairs together.
        turning = torch.cat([rates[::2], rates.new_full((turned,), unit)])
        super().__init__(width, heads * turned, turning, unrotated)
        self.heads, self.still, self.divisions = heads, len(rates) - turned, divisions

    def scales_of_rates(self, beta: Tensor | None) -> Tensor | None:
        # β is a constant 1 in one half of the pairs, and in the other an angle in units of its own.
        return None

    def by_heads(self, beta: Tensor) -> Tensor:
        steps = beta - 1
        if self.divisions:
            steps = steps * (self.divisions / 2)
            steps = steps + (steps.round() - steps).detach()
        return pad(steps.unflatten(-1, (self.heads, -1)), (self.still, 0), value=1.0)


# Each takes the width, the heads, θ of the rotated pairs, and the number of the others.
_MAKERS: dict[str, Callable[[int, int, Tensor, int], Rotation]] = {
    "fixed": lambda width, heads, rates, unrotated: FixedRotation(pad(rates, (0, unrotated))),
    "learned": lambda width, heads, rates, unrotated: LearnedRotation(rates, unrotated),
    "scale": ScaledRotation,
    "pairs": PairRotation,
    "signed": SignedRotation,
    "grid": partial(SignedRotation, divisions=GRID),
}


def make_rotation(
    kind: str,
    width: int,
    heads: int,
    head_dim: int,
    max_document: int,
    rates: Tensor | None = None,
    *,
    max_rate: float = MAX_RATE,
    fraction: float = 1.0,
) -> Rotation:
    """The rotation called `kind`: one of ROTATIONS.

    Args:
        max_document: N of the rates θ_i = θ_1 / N^(2(i-1)/d), the longest document expected.
        rates: other rates, (head_dim / 2,) on any device but meta; None: those of max_document. Only the kinds
            WITH_GIVEN_RATES take them.
        max_rate: θ_1, radians per token of the fastest pair; the paper's is 2π.
        fraction: the part of the pairs that is rotated, the fastest ones. The rates of these are what they are without
            it.
    """
    if rates is not None:
        # Before the choice of kinds, since it says why some of them do not take rates.
        check_takes_rates(kind)
    check_choice("rotary", kind, ROTATIONS if rates is None else WITH_GIVEN_RATES)
    check_rotation_settings(kind, max_rate, fraction)
    check_rotation_dim(kind, head_dim, fraction)
    if rates is not None:
        if kind == "none":
            raise ArgumentError("rates", "are for layers with a rotation; got some with rotary='none'")
        if not isinstance(rates, Tensor):
            raise ArgumentTypeError("rates", f"must be a tensor, got {type(rates).__name__}")
        if max_rate != MAX_RATE:
            raise ArgumentError("max_rate", f"cannot be combined with rates, which have a fastest one; got {max_rate}")
        if fraction != 1:
            raise ArgumentError(
                "rotary_fraction", f"cannot be combined with rates, which can be 0 in some pairs; got {fraction}"
            )
    if rates is not None and tuple(rates.shape) != (head_dim // 2,):
        raise ArgumentError(
            "rates",
            f"must hold one rate per pair of entries, ({head_dim // 2},) for heads of {head_dim}; "
            f"got {tuple(rates.shape)}",
        )
    if rates is not None and not rates.is_meta and not rates.isfinite().all():
        raise ArgumentError("rates", f"must be finite, got {rates.tolist()}")
    if kind == "none":
        return NoRotation()
    if rates is None:
        rates = rotary_rates(head_dim, max_document, max_rate=max_rate, device="cpu")
        rates = rates[: rotated_pairs(head_dim, fraction)]
    return _MAKERS[kind](width, heads, rates, head_dim // 2 - len(rates))
