"""Gates of a layer: γ = σ(W_γ x), the factor by which the state decays at each step (paper §3.1 and its conclusion).

Every gate maps x (b, t, width) to log γ (b, t, h_kv), or (b, t, h_kv, d/2) for a gate per rotated pair, in float32 or
better, or to None for no gating. A gate that projects x has a `projection`, and accepts its result if that is computed
already.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from sympow.checks import check_choice
from sympow.layers.precision import ConstantTable, FloatLinear, KeepsFloat32, project
from sympow.settings import GATES, check_gate_heads, check_initial_gate

# σ(6.906768) ≈ 0.999, the initial value in the authors' code. The half-life of a state is then about 700 tokens.
INITIAL_LOGIT = 6.906768
# From here on a clamped gate is 1: so far below the initial value that a logit rounded to bfloat16 is still above it.
KEEPS_ALL = 0.9989


class Gate(nn.Module, ABC):
    """Base class of gates: x (b, t, width) → log γ, or None."""

    @property
    def projection(self) -> nn.Module | None:
        """The projection of x, or None."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, projected: Tensor | None = None) -> Tensor | None: ...


class NoGate(Gate):
    """γ = 1."""

    def forward(self, x: Tensor, projected: Tensor | None = None) -> Tensor | None:
        return None


class FixedGate(Gate):
    """One constant γ per head, log γ = −m, with ALiBi's slopes: m = 2^(−8 i / heads), i = 1 … heads.

    Args:
        heads: h_kv.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        first, last = math.log(2.0 ** (-8 / heads)), math.log(2.0**-8)
        logs = torch.linspace(first, last, heads, dtype=torch.float64, device="cpu")
        self.slopes = ConstantTable(logs.exp())

    def forward(self, x: Tensor, projected: Tensor | None = None) -> Tensor:
        log_gamma = -self.slopes(x.device)
        return log_gamma.expand(*x.shape[:2], -1)


class LearnedGate(KeepsFloat32, Gate):
    """One learned γ = σ(logit) per head, the same for every input.

    Args:
        initial_logit: of γ at first, here and below.
    """

    def __init__(self, heads: int, initial_logit: float = INITIAL_LOGIT) -> None:
        super().__init__()
        self.initial_logit = initial_logit
        self.logit = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes γ, by default to about 0.999."""
        nn.init.constant_(self.logit, self.initial_logit)

    def forward(self, x: Tensor, projected: Tensor | None = None) -> Tensor:
        logit = self.logit.to(torch.promote_types(self.logit.dtype, torch.float32))
        return logsigmoid(logit).expand(*x.shape[:2], -1)


class DataDependentGate(Gate):
    """γ_i = σ(W_γ x_i): base class of the paper's gate and of the one per pair."""

    def __init__(self, width: int, outputs: int, initial_logit: float = INITIAL_LOGIT) -> None:
        super().__init__()
        self.gamma_proj = FloatLinear(width, outputs, bias=initial_logit)

    @property
    def projection(self) -> nn.Module:
        return self.gamma_proj

    def by_heads(self, log_gamma: Tensor) -> Tensor:
        """log γ (b, t, outputs) in the shape of a gate's result."""
        return log_gamma

    def forward(self, x: Tensor, projected: Tensor | None = None) -> Tensor:
        return self.by_heads(logsigmoid(project(x, self.gamma_proj) if projected is None else projected))


class ScalarGate(DataDependentGate):
    """γ_i = σ(W_γ x_i), one per head and token: the paper's gate (§3.1)."""

    def __init__(self, width: int, heads: int, initial_logit: float = INITIAL_LOGIT) -> None:
        super().__init__(width, heads, initial_logit)


class VectorGate(DataDependentGate):
    """γ_i = σ(W_γ x_i) for every rotated pair of every head: the "vector gating" of the paper's conclusion."""

    def __init__(self, width: int, heads: int, head_dim: int, initial_logit: float = INITIAL_LOGIT) -> None:
        super().__init__(width, heads * (head_dim // 2), initial_logit)
        self.heads = heads

    def by_heads(self, log_gamma: Tensor) -> Tensor:
        return log_gamma.unflatten(-1, (self.heads, -1))


class ClampedGate(ScalarGate):
    """γ_i = min(1, σ(W_γ x_i) / 0.9989): a gate that can be exactly 1, and is at first.

    σ comes near 1 but never reaches it, so that the paper's gate loses whatever a state holds after some thousands of
    tokens. The gradient is that of the gate without the bound, since one of zero would leave a gate at 1 for good.
    """

    def by_heads(self, log_gamma: Tensor) -> Tensor:
        raised = log_gamma - math.log(KEEPS_ALL)
        return raised - raised.detach().clamp(min=0.0)


class HalfGate(DataDependentGate):
    """The paper's gate in the first half of the heads, rounded down, and γ = 1 in the others."""

    def __init__(self, width: int, heads: int, initial_logit: float = INITIAL_LOGIT) -> None:
        super().__init__(width, heads // 2, initial_logit)
        self.ungated = heads - heads // 2

    def by_heads(self, log_gamma: Tensor) -> Tensor:
        return pad(log_gamma, (0, self.ungated))


_MAKERS: dict[str, Callable[[int, int, int, float], Gate]] = {
    "none": lambda width, heads, head_dim, initial_logit: NoGate(),
    "fixed": lambda width, heads, head_dim, initial_logit: FixedGate(heads),
    "learned": lambda width, heads, head_dim, initial_logit: LearnedGate(heads, initial_logit),
    "scalar": lambda width, heads, head_dim, initial_logit: ScalarGate(width, heads, initial_logit),
    "vector": VectorGate,
    "clamped": lambda width, heads, head_dim, initial_logit: ClampedGate(width, heads, initial_logit),
    "half": lambda width, heads, head_dim, initial_logit: HalfGate(width, heads, initial_logit),
}


def make_gate(kind: str, width: int, heads: int, head_dim: int, initial_gate: float | None = None) -> Gate:
    """The gate called `kind`: one of GATES.

    Args:
        initial_gate: γ before training, between 0 and 1, of the kinds that learn it; None: about 0.999. A clamped gate
            with 0.9989 or more starts at exactly 1.
    """
    check_choice("gating", kind, GATES)
    check_gate_heads(kind, heads)
    if initial_gate is None:
        return _MAKERS[kind](width, heads, head_dim, INITIAL_LOGIT)
    check_initial_gate(initial_gate, kind)
    return _MAKERS[kind](width, heads, head_dim, math.log(initial_gate / (1 - initial_gate)))
