"""Reference implementation: the paper's equations written out, slow, and sharing no code with what it checks.

Every function takes q (b, t, h, d), k (b, t, h, d), v (b, t, h, e), log_gamma (b, t, h) or (b, t, h, d/2) or None,
beta (b, t, h) or (b, t, h, d/2) or None, theta (d/2,) or None, all in one dtype (usually float64) and
with as many key as query heads, and returns y (b, t, h, e). Memory and time are those of the formulas.

Misprints of the paper corrected here: b_ij = ∏ γ_k (printed γ_m), c_ij = Σ β_k (printed β_i), and the transpose on
R(c_ij θ) that §2.2 has and §3.2 lacks.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

Triple = tuple[Tensor, Tensor, Tensor]


def phi(x: Tensor, power: int) -> Tensor:
    """φ^p(x), monomial by monomial (§2.1): (..., d) → (..., D)."""
    features = []
    for index in itertools.combinations_with_replacement(range(x.shape[-1]), power):
        coefficient = math.factorial(power)
        for i in set(index):
            coefficient //= math.factorial(index.count(i))
        product = x[..., index[0]]
        for i in index[1:]:
            product = product * x[..., i]
        features.append(math.sqrt(coefficient) * product)
    return torch.stack(features, dim=-1)


def rotation_matrix(angles: Tensor) -> Tensor:
    """R(angles), block diagonal (§2.2): (..., d/2) → (..., d, d)."""
    pairs = angles.shape[-1]
    zero = torch.zeros_like(angles[..., 0])
    rows = []
    for j in range(pairs):
        before, after = [zero] * (2 * j), [zero] * (2 * (pairs - j - 1))
        cos, sin = angles[..., j].cos(), angles[..., j].sin()
        rows.append(torch.stack([*before, cos, -sin, *after], dim=-1))
        rows.append(torch.stack([*before, sin, cos, *after], dim=-1))
    return torch.stack(rows, dim=-2)


def power_of_matrix(matrix: Tensor, power: int) -> Tensor:
    """P̄ = Eᵀ (P ⊗ ⋯ ⊗ P) E (Prop. 3), where E embeds symmetric tensors in all tensors: (d, d) → (D, D)."""
    dim = matrix.shape[-1]
    tensor_power = matrix
    for _ in range(power - 1):
        tensor_power = torch.kron(tensor_power, matrix)
    embedding = symmetric_embedding(dim, power, matrix.dtype)
    return embedding.T @ tensor_power @ embedding


def symmetric_embedding(dim: int, power: int, dtype: torch.dtype) -> Tensor:
    """The isometry E with E φ^p(x) = x ⊗ ⋯ ⊗ x: (d^p, D)."""
    columns = {index: n for n, index in enumerate(itertools.combinations_with_replacement(range(dim), power))}
    embedding = torch.zeros(dim**power, len(columns), dtype=dtype)
    for row, index in enumerate(itertools.product(range(dim), repeat=power)):
        embedding[row, columns[tuple(sorted(index))]] = 1.0
    return embedding / embedding.norm(dim=0)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
) -> Tensor:
    """Y_i = Σ_j A_ij V_j with B_ij = b_ij (Q_iᵀ R(c_ij θ)ᵀ K_j)^p (§3.3, conformal-sympow)."""
    outputs = []
    for i in range(q.shape[1]):
        scores = torch.stack(
            [_score(q, k, i, j, power, log_gamma, beta, theta) for j in range(i + 1)], dim=-1
        )  # (b, h, i + 1)
        weights = scores / scores.sum(-1, keepdim=True)
        outputs.append(torch.einsum("bhj,bjhe->bhe", weights, v[:, : i + 1]))
    return torch.stack(outputs, dim=1)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    initial: Triple | None = None,
) -> tuple[Tensor, Triple]:
    """The update in practice (eq. conformal_in_practice): gate the state, rotate the key.

    `initial` and the second result are (S, Z, μ): S (b, h, e, D), Z (b, h, D), μ (b, h, d/2).
    """
    batch, length, heads, dim = k.shape
    s, z, mu = initial or _zero_triple(k, v, power)
    outputs = []
    for i in range(length):
        if theta is not None:
            mu = mu + _step_angles(beta, theta, i, batch, heads)
        rotation = rotation_matrix(mu) if theta is not None else torch.eye(dim, dtype=k.dtype)
        query = phi((rotation @ q[:, i].unsqueeze(-1)).squeeze(-1), power)
        key = phi((rotation @ k[:, i].unsqueeze(-1)).squeeze(-1), power)
        gate = _gate_on_features(log_gamma, i, dim, power)  # (b, h, D), or 1
        s = s * (gate.unsqueeze(-2) if isinstance(gate, Tensor) else gate) + v[:, i].unsqueeze(-1) * key.unsqueeze(-2)
        z = z * gate + key
        outputs.append((s @ query.unsqueeze(-1)).squeeze(-1) / (z * query).sum(-1, keepdim=True))
    return torch.stack(outputs, dim=1), (s, z, mu)


def conformal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
) -> Tensor:
    """The update in theory (eq. conformal_in_theory): S ← S (γ_i R̄(θ, β_i)) + V_i φ(K_i)ᵀ, R̄ = power of R(β_i θ).

    Neither query nor key is rotated: this S is the one of `recurrent` times R̄(μ_i).
    """
    batch, length, heads, dim = k.shape
    s, z, _ = _zero_triple(k, v, power)
    outputs = []
    for i in range(length):
        angles = torch.zeros(batch, heads, dim // 2, dtype=k.dtype)
        if theta is not None:
            angles = _step_angles(beta, theta, i, batch, heads).expand(batch, heads, -1)
        rotations = rotation_matrix(angles) if theta is not None else torch.eye(dim, dtype=k.dtype)
        rotations = rotations.expand(batch, heads, dim, dim)
        bars = torch.stack(
            [torch.stack([power_of_matrix(rotations[b, h], power) for h in range(heads)]) for b in range(batch)]
        )
        gate = _gate_on_features(log_gamma, i, dim, power)
        step = bars * (gate.unsqueeze(-2) if isinstance(gate, Tensor) else gate)  # R̄ times diag of the gate
        key, query = phi(k[:, i], power), phi(q[:, i], power)
        s = s @ step + v[:, i].unsqueeze(-1) * key.unsqueeze(-2)
        z = (z.unsqueeze(-2) @ step).squeeze(-2) + key
        outputs.append((s @ query.unsqueeze(-1)).squeeze(-1) / (z * query).sum(-1, keepdim=True))
    return torch.stack(outputs, dim=1)


def _score(
    q: Tensor,
    k: Tensor,
    i: int,
    j: int,
    power: int,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
) -> Tensor:
    """B_ij: (b, h)."""
    key = k[:, j]
    if theta is not None:
        relative_phase = sum(
            (_step_angles(beta, theta, m, k.shape[0], k.shape[2]) for m in range(j + 1, i + 1)),
            torch.zeros(k.shape[0], k.shape[2], k.shape[3] // 2, dtype=k.dtype),
        )
        key = (rotation_matrix(relative_phase).mT @ key.unsqueeze(-1)).squeeze(-1)
    decay: Tensor | float = 1.0
    for m in range(j + 1, i + 1):
        if log_gamma is not None and log_gamma.ndim == 4:
            key = key * (log_gamma[:, m] / power).exp().repeat_interleave(2, dim=-1)
        elif log_gamma is not None:
            decay = decay * log_gamma[:, m].exp()
    return decay * (q[:, i] * key).sum(-1) ** power


def _step_angles(beta: Tensor | None, theta: Tensor, i: int, batch: int, heads: int) -> Tensor:
    """β_i θ: (b, h, d/2)."""
    if beta is None:
        return theta.expand(batch, heads, -1)
    return (beta[:, i] if beta.ndim == 4 else beta[:, i].unsqueeze(-1)) * theta


def _gate_on_features(log_gamma: Tensor | None, i: int, dim: int, power: int) -> Tensor | float:
    """γ_i for each feature: (b, h, D), or (b, h, 1) if all are equal, or 1."""
    if log_gamma is None:
        return 1.0
    if log_gamma.ndim == 3:
        return log_gamma[:, i].exp().unsqueeze(-1)
    pair_gates = (log_gamma[:, i] / power).exp()
    factors = []
    for index in itertools.combinations_with_replacement(range(dim), power):
        factor = pair_gates[..., index[0] // 2]
        for entry in index[1:]:
            factor = factor * pair_gates[..., entry // 2]
        factors.append(factor)
    return torch.stack(factors, dim=-1)


def _zero_triple(k: Tensor, v: Tensor, power: int) -> Triple:
    batch, _, heads, dim = k.shape
    features = len(list(itertools.combinations_with_replacement(range(dim), power)))
    return (
        torch.zeros(batch, heads, v.shape[-1], features, dtype=k.dtype),
        torch.zeros(batch, heads, features, dtype=k.dtype),
        torch.zeros(batch, heads, dim // 2, dtype=k.dtype),
    )
