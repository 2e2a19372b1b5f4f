"""What p = 2 computes on a CPU: features and scores in blocks that stay in a cache and are multiplied there.

A feature of p = 2 is x_i x_j for i ≤ j, times √2 for i < j, and those of one i are consecutive. So they are made by one
product for each i, as rows over time, without a table of indices. A block holds the features of some i's, some tokens
and some heads, and is multiplied by values or by a state while it is in the cache. Made whole, the features would go
through memory several times, which takes longer than the products.

    contract(x, kv)         φ(x_t) S                 (n, t, d), (n, D, e) → (n, t, e)
    expand(x, v)            Σ_t φ(x_t) v_tᵀ          (n, t, d), (n, t, e) → (n, D, e)
    pull_back(x, kv, v)     ∂/∂x Σ_t φ(x_t) S v_t    → (n, t, d)

Each is differentiable any number of times: the gradients of the three are made of the three. `attend` weighs values by
the squares of scores, and keeps no scores for its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from sympow.ops.compilation import runs_now_on_cpu
from sympow.ops.numerics import decay_to_meet
from sympow.ops.symmetric import multinomial_weights

# A block of so many features and tokens of one head takes 256 KiB in float32.
FEATURES = 256
TOKENS = 256
# Elements of a block for each thread: the heads that are computed together.
ELEMENTS_PER_THREAD = 1 << 18
# For fewer tokens the products of single i's take longer than indexing.
LEAST_TOKENS = 32

ROOT_2 = math.sqrt(2)


def supports(x: Tensor, power: int) -> bool:
    """Whether these functions serve queries or keys (..., t, d)."""
    return runs_now_on_cpu(x) and power == 2 and x.shape[-2] >= LEAST_TOKENS


def attend(q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor, column_decay: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_s B_ts v_s and Σ_s B_ts of keys before all queries: (b, n, g, t, e) and (b, n, g, t).

    Args:
        q: (b, n, g, t, d).
        k, v: (b, n, s, ·).
        row_decay, column_decay: running sums at the queries (b, n, t, 1 or d/2) and at earlier keys (b, n, s, ·).
    """
    return _Attend.apply(q, k, v, row_decay, column_decay)


def contract(x: Tensor, kv: Tensor) -> Tensor:
    """φ(x_t) S: (n, t, d), (n, D, e) → (n, t, e)."""
    return _Contract.apply(x, kv)


def expand(x: Tensor, v: Tensor) -> Tensor:
    """Σ_t φ(x_t) v_tᵀ: (n, t, d), (n, t, e) → (n, D, e)."""
    return _Expand.apply(x, v)


def expand_into(x: Tensor, v: Tensor, kv: Tensor) -> None:
    """Adds Σ_t φ(x_t) v_tᵀ to S (n, D, e) in place, without gradients."""
    for heads, tokens, features, block in _blocks(x):
        part = kv[heads, features]
        torch.baddbmm(part, block, v[heads, tokens], out=part)


def contract_normalizer(q: Tensor, normalizer: Tensor) -> tuple[Tensor, Tensor]:
    """φ(q) Z and |φ(q)| |Z|, the latter without gradients: (b, n, g, t, d), (b, n, D) → (b, n, g, t) each.

    As quadratic forms of the query, which need no features.
    """
    dim = q.shape[-1]
    matrix = normalizer.new_zeros(*normalizer.shape[:2], dim * dim)
    weighted = normalizer * multinomial_weights(dim, 2, q.dtype, q.device)
    matrix = matrix.index_copy(2, _upper(dim), weighted).unflatten(2, (1, dim, dim))
    with torch.no_grad():
        magnitude = ((q.abs() @ matrix.abs()) * q.abs()).sum(-1)
    return ((q @ matrix) * q).sum(-1), magnitude


def expand_normalizer(k: Tensor) -> Tensor:
    """Σ_t φ(k_t): (b, n, t, d) → (b, n, D)."""
    dim = k.shape[-1]
    return (k.mT @ k).flatten(2).index_select(2, _upper(dim)) * multinomial_weights(dim, 2, k.dtype, k.device)


@lru_cache(maxsize=64)
def _upper(dim: int) -> Tensor:
    """Where the entries (i, j) with i ≤ j of a flat matrix are: (D,) int64."""
    with torch.inference_mode(False):
        first, second = torch.triu_indices(dim, dim)
        return first * dim + second


def _pull_back(x: Tensor, kv: Tensor, v: Tensor) -> Tensor:
    gradient = torch.empty_like(x)
    for heads, tokens in _tiles(x):
        rows = x[heads, tokens].mT.contiguous()
        scaled = rows * ROOT_2
        # Of Σ_{i ≤ j} P_ij x_i (√2 x_j) with respect to both factors; the squares have √2 too many.
        first, second = torch.zeros_like(rows), torch.zeros_like(rows)
        values = v[heads, tokens].mT
        for group in _groups(x.shape[2]):
            block = torch.bmm(kv[heads, group.features], values)
            block[:, group.starts] *= 1 / ROOT_2
            for i, start in zip(group.members, group.starts, strict=True):
                part = block[:, start : start + x.shape[2] - i]
                torch.sum(part * scaled[:, i:], 1, out=first[:, i])
                second[:, i:].addcmul_(part, rows[:, i : i + 1])
        gradient[heads, tokens] = first.add_(second, alpha=ROOT_2).mT
    return gradient


def _blocks(x: Tensor) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """The features of x (n, t, d) in blocks (heads, features, tokens), which share memory, with where they belong."""
    for heads, tokens in _tiles(x):
        rows = x[heads, tokens].mT.contiguous()
        scaled = rows * ROOT_2
        squares = rows.square()
        count, dim, length = rows.shape
        memory = x.new_empty(count * max(FEATURES, dim) * length)
        for group in _groups(dim):
            size = group.features.stop - group.features.start
            block = memory[: count * size * length].view(count, size, length)
            for i, start in zip(group.members, group.starts, strict=True):
                torch.mul(rows[:, i : i + 1], scaled[:, i:], out=block[:, start : start + dim - i])
            block[:, group.starts] = squares[:, group.members.start : group.members.stop]
            yield heads, tokens, group.features, block


def _tiles(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of the heads and tokens of x (n, t, d) whose blocks fit into the caches."""
    heads, length, dim = x.shape
    together = max(1, torch.get_num_threads() * ELEMENTS_PER_THREAD // (max(FEATURES, dim) * min(TOKENS, length)))
    for first in range(0, heads, together):
        for token in range(0, length, TOKENS):
            yield slice(first, min(first + together, heads)), slice(token, min(token + TOKENS, length))


@dataclass(frozen=True)
class Group:
    """Consecutive features x_i x_j of several i, FEATURES at most or those of one i.

    Attributes:
        members: the i's.
        starts: where the features of each begin within the group, which is where its square is.
        features: the place of all of them among the D.
    """

    members: range
    starts: list[int]
    features: slice


@lru_cache(maxsize=64)
def _groups(dim: int) -> list[Group]:
    groups = []
    first = before = 0
    while first < dim:
        starts, size, i = [0], dim - first, first + 1
        while i < dim and size + dim - i <= FEATURES:
            starts.append(size)
            size, i = size + dim - i, i + 1
        groups.append(Group(range(first, i), starts, slice(before, before + size)))
        first, before = i, before + size
    return groups


class _Attend(Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(*inputs)
        return _attend(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # a derivative of this gradient will be needed
            with_graph = [x.view_as(x) for x in inputs]
            return _gradients(_attend(*with_graph), with_graph, gradients, ctx.needs_input_grad, create_graph=True)
        q, k, v, row_decay, column_decay = (x.detach().requires_grad_() for x in inputs)
        with torch.enable_grad():
            rows, columns = decay_to_meet(q, k, row_decay, column_decay)
        of_numerator, of_denominator = (x.flatten(2, 3) for x in (gradients[0], gradients[1].unsqueeze(-1)))
        flat = rows.detach().flatten(2, 3)
        scores = flat @ columns.detach().mT
        of_scores = (of_numerator @ v.detach().mT).add_(of_denominator).mul_(scores)
        of_rows = (of_scores @ columns.detach()).mul_(2).unflatten(2, q.shape[2:4])
        of_columns = (of_scores.mT @ flat).mul_(2)
        of_v = scores.square_().mT @ of_numerator
        needed = ctx.needs_input_grad
        of_q, of_k, *of_decays = _gradients(
            (rows, columns), [q, k, row_decay, column_decay], (of_rows, of_columns), [*needed[:2], *needed[3:]]
        )
        return of_q, of_k, of_v, *of_decays


def _attend(q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor, column_decay: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = decay_to_meet(q, k, row_decay, column_decay)
    scores = rows.flatten(2, 3) @ columns.mT
    weights = scores * scores if scores.requires_grad else scores.square_()
    numerator, denominator = weights @ v, weights.sum(-1)
    return numerator.unflatten(2, q.shape[2:4]), denominator.unflatten(2, q.shape[2:4])


def _gradients(
    outputs: tuple[Tensor, ...],
    leaves: list[Tensor],
    gradients: tuple[Tensor, ...],
    needed: Sequence[bool],
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Gradients of those leaves that need one, None for the others."""
    wanted = [x for x, needs in zip(leaves, needed, strict=True) if needs]
    found = iter(torch.autograd.grad(outputs, wanted, gradients, create_graph=create_graph) if wanted else ())
    return tuple(next(found) if needs else None for needs in needed)


class _Contract(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kv: Tensor) -> Tensor:
        ctx.save_for_backward(x, kv)
        y = x.new_zeros(*x.shape[:2], kv.shape[-1])
        for heads, tokens, features, block in _blocks(x):
            part = y[heads, tokens]
            torch.baddbmm(part, block.mT, kv[heads, features], out=part)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, kv = ctx.saved_tensors
        of_x, of_kv = ctx.needs_input_grad
        return _PullBack.apply(x, kv, gradient) if of_x else None, expand(x, gradient) if of_kv else None


class _Expand(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(x, v)
        dim = x.shape[2]
        kv = x.new_zeros(x.shape[0], dim * (dim + 1) // 2, v.shape[-1])
        expand_into(x, v, kv)
        return kv

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, v = ctx.saved_tensors
        of_x, of_v = ctx.needs_input_grad
        return _PullBack.apply(x, gradient, v) if of_x else None, contract(x, gradient) if of_v else None


class _PullBack(Function):
    """∂/∂x of the quadratic form Σ_t φ(x_t) S v_t."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kv: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(x, kv, v)
        return _pull_back(x, kv, v)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kv, v = ctx.saved_tensors
        of_x, of_kv, of_v = ctx.needs_input_grad
        # A quadratic form's derivative in a direction is half the difference of its values on both sides, at any
        # distance. One as long as x loses least to rounding.
        with torch.no_grad():
            lengths, own = (y.norm(dim=-1, keepdim=True) for y in (gradient, x))
            scale = torch.where((lengths > 0) & (own > 0), own / lengths, 1.0)
        step, half = gradient * scale, 0.5 / scale
        return (
            _PullBack.apply(gradient, kv, v) if of_x else None,
            expand(x + step, v * half) - expand(x - step, v * half) if of_kv else None,
            (contract(x + step, kv) - contract(x - step, kv)) * half if of_v else None,
        )
