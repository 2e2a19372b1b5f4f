"""The rotation of queries and keys as a PyTorch operator. Where something is missing, an empty tensor stands for it."""

# No `from __future__ import annotations`: the schemas are read off the annotations.

import torch
from torch import Tensor

from sympow.kernels.anchoring import anchored
from sympow.kernels.common import rows_contiguous
from sympow.kernels.documents import Documents, sums_from_start, sums_to_end
from sympow.kernels.rotation import rotate_backward, rotate_forward
from sympow.kernels.scan import running_sum


@torch.library.custom_op("sympow::rotate", mutates_args=())
def _rotate(
    q: Tensor,
    k: Tensor,
    beta: Tensor | None,
    theta: Tensor,
    start: Tensor | None,
    document_start: Tensor | None,
    document_end: Tensor | None,
    relative: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k turned by the phase, and the running sums of β (empty for β = 1 without documents).

    `relative`: what follows depends on differences of phases alone: to turn all tokens together changes nothing.
    """
    sums = None if beta is None else running_sum(beta.flatten(2))
    if document_start is not None:
        if sums is None:
            tokens = torch.arange(1, k.shape[1] + 1, dtype=torch.float64, device=k.device)
            sums = tokens.expand(1, k.shape[2], -1)
        sums = sums_from_start(sums, document_start).contiguous()
    turned_q, turned_k = rotate_forward(q, k, sums, theta, start)
    return turned_q, turned_k, q.new_empty(0, dtype=torch.float64) if sums is None else sums


@_rotate.register_fake
def _(
    q: Tensor,
    k: Tensor,
    beta: Tensor | None,
    theta: Tensor,
    start: Tensor | None,
    document_start: Tensor | None,
    document_end: Tensor | None,
    relative: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    contiguous = torch.contiguous_format
    sums: tuple[int, ...] = (0,)
    if beta is not None:
        sums = (beta.shape[0], beta[0, 0].numel(), beta.shape[1])
    elif document_start is not None:
        sums = (1, k.shape[2], k.shape[1])
    return (
        torch.empty_like(q, memory_format=contiguous),
        torch.empty_like(k, memory_format=contiguous),
        q.new_empty(sums, dtype=torch.float64),
    )


@torch.library.custom_op("sympow::rotate_backward", mutates_args=())
def _rotate_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    sums: Tensor,
    theta: Tensor,
    start: Tensor | None,
    document_end: Tensor | None,
    relative: bool,
    want_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, β (b, t, columns; empty for β = 1), θ (empty if not wanted) and μ_0 (empty without), from the
    turned q and k."""
    d_q, d_k, d_sums, d_theta, d_start = rotate_backward(
        q, k, rows_contiguous(dq), rows_contiguous(dk), sums if sums.numel() else None, theta, start, want_theta
    )
    d_beta = sums.new_empty(0)
    if d_sums is not None:
        later = running_sum(d_sums, reverse=True)
        if relative:
            # The first β turns all tokens, and so nothing; the rounding in its place is spread over the others.
            d_beta = anchored(later, None, later.shape[2], document_end, dtype=torch.float64)
        else:
            later = later if document_end is None else sums_to_end(later, document_end)
            d_beta = later.transpose(1, 2).contiguous()
    d_theta, d_start = (sums.new_empty(0) if x is None else x for x in (d_theta, d_start))
    return d_q, d_k, d_beta, d_theta, d_start


@_rotate_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    sums: Tensor,
    theta: Tensor,
    start: Tensor | None,
    document_end: Tensor | None,
    relative: bool,
    want_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    beta = (sums.shape[0], sums.shape[2], sums.shape[1]) if sums.numel() else (0,)
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        sums.new_empty(beta),
        theta.new_empty(theta.shape if want_theta else (0,), dtype=torch.float64),
        sums.new_empty((0,) if start is None else start.shape),
    )


def _save_rotate(ctx, inputs, output) -> None:
    _, _, beta, theta, start, _, document_end, relative = inputs
    ctx.save_for_backward(*output, theta, start, document_end)
    ctx.beta = None if beta is None else (beta.shape, beta.dtype)
    ctx.relative = relative
    ctx.mark_non_differentiable(output[2])


def _differentiate_rotate(ctx, dq, dk, _):
    want_theta = ctx.needs_input_grad[3]
    d_q, d_k, d_beta, d_theta, d_start = _rotate_backward(dq, dk, *ctx.saved_tensors, ctx.relative, want_theta)
    *_, theta, start, _ = ctx.saved_tensors
    beta_gradient = None
    if ctx.beta is not None:
        shape, dtype = ctx.beta
        beta_gradient = d_beta.reshape(shape).to(dtype)
    theta_gradient = d_theta.to(theta.dtype) if want_theta else None
    return d_q, d_k, beta_gradient, theta_gradient, None if start is None else d_start, None, None, None


_rotate.register_autograd(_differentiate_rotate, setup_context=_save_rotate)


def fused_rotation(
    q: Tensor,
    k: Tensor,
    beta: Tensor | None,
    theta: Tensor,
    start: Tensor | None,
    documents: Documents | None = None,
    *,
    relative: bool = False,
) -> tuple[Tensor, Tensor]:
    """q and k turned by μ_i = μ_0 + Σ_{j≤i} β_j θ; with documents, summed over each document alone.

    Args:
        relative: no state comes before or after, so that only differences of phases matter.
    """
    begin, end = documents or (None, None)
    start = None if start is None else start.contiguous()
    turned_q, turned_k, _ = _rotate(
        rows_contiguous(q), rows_contiguous(k), beta, theta.contiguous(), start, begin, end, relative
    )
    return turned_q, turned_k
