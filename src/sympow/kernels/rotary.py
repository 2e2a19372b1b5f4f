"""Rotation of queries and keys by the accumulated phase (data-dependent RoPE), fused in one pass, and its gradients.

The phase of pair m after token i is μ_im = μ_0m + c_i θ_m with c_i the running sum of β (or c_im, if every pair has its
own β; paper §3.2). It is computed in float64, in revolutions; only an angle of at most an eighth of a revolution is
rounded to float32. `sympow.kernels.reference.rotation_reference` is the plain PyTorch reference.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import Documents, split_program_id, sums_from_start, sums_to_end
from sympow.kernels.launch import ceil_div, flat_grid, launch, rows_contiguous
from sympow.kernels.operator import operator
from sympow.kernels.running_sums import correct_drift, running_sum

TWO_PI = tl.constexpr(2 * math.pi)
# Tokens of one CTA.
TOKENS = 32


@triton.jit
def cos_sin(revolutions):
    """Cosine and sine of an angle in revolutions, float64 → float32, to about 1e-7.

    The nearest quarter is split off in float64; for the rest, at most an eighth of a revolution, short Taylor series
    suffice. The library's functions have a slow path for large angles, which costs registers.
    """
    quarters = tl.floor(revolutions * 4 + 0.5)
    x = ((revolutions - quarters * 0.25) * TWO_PI).to(tl.float32)
    square = x * x
    sine = x * (1 + square * (-1 / 6 + square * (1 / 120 + square * (-1 / 5040 + square * (1 / 362880)))))
    cosine = 1 + square * (-1 / 2 + square * (1 / 24 + square * (-1 / 720 + square * (1 / 40320))))
    quadrant = quarters.to(tl.int64) & 3
    swapped = (quadrant & 1) == 1
    cos_sign = tl.where((quadrant == 1) | (quadrant == 2), -1.0, 1.0)
    sin_sign = tl.where(quadrant >= 2, -1.0, 1.0)
    return tl.where(swapped, sine, cosine) * cos_sign, tl.where(swapped, cosine, sine) * sin_sign


@triton.jit
def _phase(beta_sums_ptr, theta_ptr, start_ptr, sequence, tokens, pairs, length, mask, PER_PAIR: tl.constexpr,
           PAIRS: tl.constexpr, FIXED: tl.constexpr, STARTED: tl.constexpr):  # fmt: skip
    """c_i (or c_im), and the phase in revolutions: (tokens, pairs) float64."""
    rates = tl.load(theta_ptr + pairs, mask=pairs < PAIRS, other=0.0).to(tl.float64)
    if FIXED:
        beta_sums = (tokens[:, None] + 1).to(tl.float64) + tl.zeros_like(rates)[None, :]
    elif PER_PAIR:
        offsets = (sequence * PAIRS + pairs[None, :]) * length + tokens[:, None]
        beta_sums = tl.load(beta_sums_ptr + offsets, mask=mask, other=0.0)
    else:
        offsets = sequence * length + tokens
        beta_sums = (
            tl.load(beta_sums_ptr + offsets, mask=tokens < length, other=0.0)[:, None] + tl.zeros_like(rates)[None, :]
        )
    revolutions = beta_sums * (rates * (1 / TWO_PI))[None, :]
    if STARTED:
        start = tl.load(start_ptr + sequence * PAIRS + pairs, mask=pairs < PAIRS, other=0.0)
        revolutions += (start * (1 / TWO_PI))[None, :]
    return beta_sums, revolutions


@triton.jit
def _load_pairs(pointers, mask, TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    """Even and odd entries of rows: two of (tokens, pairs), float32."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    return tl.split(tl.reshape(x, (TOKENS, BLOCK_PAIRS, 2)))


@triton.jit
def _store_rotated(pointers, even, odd, cos, sin, mask, TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr):
    rotated = tl.join(even * cos - odd * sin, even * sin + odd * cos)
    rotated = tl.reshape(rotated, (TOKENS, 2 * BLOCK_PAIRS))
    tl.store(pointers, rotated.to(pointers.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, beta_sums_ptr, theta_ptr, start_ptr, length, heads,
    q_batch, q_time, q_head, k_batch, k_time, k_head,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, PER_PAIR: tl.constexpr,
    FIXED: tl.constexpr, STARTED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Rotates a block of tokens of one key head and of the query heads that read it. Outputs are contiguous."""
    block, sequence = split_program_id(tl.cdiv(length, TOKENS))
    batch, head = sequence // heads, sequence % heads
    tokens = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    pairs, entries = tl.arange(0, BLOCK_PAIRS), tl.arange(0, 2 * BLOCK_PAIRS)
    inside = (tokens < length)[:, None] & (pairs < PAIRS)[None, :]
    mask = (tokens < length)[:, None] & (entries < 2 * PAIRS)[None, :]
    _, revolutions = _phase(beta_sums_ptr, theta_ptr, start_ptr, sequence, tokens, pairs, length, inside,
                      PER_PAIR, PAIRS, FIXED, STARTED)  # fmt: skip
    cos, sin = cos_sin(revolutions)

    source = batch * k_batch + head * k_head + tokens[:, None] * k_time + entries[None, :]
    target = ((batch * length + tokens[:, None]) * heads + head) * (2 * PAIRS) + entries[None, :]
    even, odd = _load_pairs(k_ptr + source, mask, TOKENS, BLOCK_PAIRS)
    _store_rotated(k_out_ptr + target, even, odd, cos, sin, mask, TOKENS, BLOCK_PAIRS)
    for member in range(GROUP):
        query_head = head * GROUP + member
        source = batch * q_batch + query_head * q_head + tokens[:, None] * q_time + entries[None, :]
        target = ((batch * length + tokens[:, None]) * heads * GROUP + query_head) * (2 * PAIRS) + entries[None, :]
        even, odd = _load_pairs(q_ptr + source, mask, TOKENS, BLOCK_PAIRS)
        _store_rotated(q_out_ptr + target, even, odd, cos, sin, mask, TOKENS, BLOCK_PAIRS)


@triton.jit
def _rotate_back(
    x_ptr, dx_ptr, out_ptr, source, target, cos, sin, mask, TOKENS: tl.constexpr, BLOCK_PAIRS: tl.constexpr
):
    """Writes the gradient of an input from that of the rotated vector, and returns the gradient of the angle."""
    even, odd = _load_pairs(x_ptr + target, mask, TOKENS, BLOCK_PAIRS)
    d_even, d_odd = _load_pairs(dx_ptr + source, mask, TOKENS, BLOCK_PAIRS)
    _store_rotated(out_ptr + target, d_even, d_odd, cos, -sin, mask, TOKENS, BLOCK_PAIRS)
    return even * d_odd - odd * d_even


@triton.jit
def _rotate_backward_kernel(
    q_ptr, k_ptr, dq_ptr, dk_ptr, q_out_ptr, k_out_ptr, beta_sums_ptr, theta_ptr, start_ptr,
    d_beta_sums_ptr, d_theta_ptr, d_start_ptr, length, heads, blocks,
    q_batch, q_time, q_head, k_batch, k_time, k_head,
    GROUP: tl.constexpr, PAIRS: tl.constexpr, BLOCK_PAIRS: tl.constexpr, PER_PAIR: tl.constexpr,
    FIXED: tl.constexpr, STARTED: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """From rotated queries and keys and their gradients: the gradients of the inputs and of c, and partial sums of
    those of θ and μ_0.

    Rotated vectors are contiguous, their gradients need not be. Each CTA writes its own partial sum over time, so that
    their total is the same in every run.
    """
    block, sequence = split_program_id(blocks)
    batch, head = sequence // heads, sequence % heads
    tokens = (block * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    pairs, entries = tl.arange(0, BLOCK_PAIRS), tl.arange(0, 2 * BLOCK_PAIRS)
    inside = (tokens < length)[:, None] & (pairs < PAIRS)[None, :]
    mask = (tokens < length)[:, None] & (entries < 2 * PAIRS)[None, :]
    beta_sums, revolutions = _phase(beta_sums_ptr, theta_ptr, start_ptr, sequence, tokens, pairs, length, inside,
                         PER_PAIR, PAIRS, FIXED, STARTED)  # fmt: skip
    cos, sin = cos_sin(revolutions)

    source = batch * k_batch + head * k_head + tokens[:, None] * k_time + entries[None, :]
    target = ((batch * length + tokens[:, None]) * heads + head) * (2 * PAIRS) + entries[None, :]
    d_angle = _rotate_back(k_ptr, dk_ptr, k_out_ptr, source, target, cos, sin, mask, TOKENS, BLOCK_PAIRS)
    for member in range(GROUP):
        query_head = head * GROUP + member
        source = batch * q_batch + query_head * q_head + tokens[:, None] * q_time + entries[None, :]
        target = ((batch * length + tokens[:, None]) * heads * GROUP + query_head) * (2 * PAIRS) + entries[None, :]
        d_angle += _rotate_back(q_ptr, dq_ptr, q_out_ptr, source, target, cos, sin, mask, TOKENS, BLOCK_PAIRS)

    rates = tl.load(theta_ptr + pairs, mask=pairs < PAIRS, other=0.0).to(tl.float64)
    d_angle = d_angle.to(tl.float64)
    if PER_PAIR:
        offsets = (batch * length + tokens[:, None]) * heads * PAIRS + head * PAIRS + pairs[None, :]
        tl.store(d_beta_sums_ptr + offsets, d_angle * rates[None, :], mask=inside)
    elif not FIXED:
        offsets = (batch * length + tokens) * heads + head
        tl.store(d_beta_sums_ptr + offsets, tl.sum(d_angle * rates[None, :], axis=1), mask=tokens < length)
    partial = (sequence * blocks + block) * PAIRS + pairs
    if d_theta_ptr is not None:
        tl.store(d_theta_ptr + partial, tl.sum(d_angle * beta_sums, axis=0), mask=pairs < PAIRS)
    if STARTED:
        tl.store(d_start_ptr + partial, tl.sum(d_angle, axis=0), mask=pairs < PAIRS)


def _launch_options(q: Tensor, k: Tensor, beta_sums: Tensor | None, start: Tensor | None) -> dict[str, int]:
    heads, dim = k.shape[2:]
    return {
        "GROUP": q.shape[2] // heads,
        "PAIRS": dim // 2,
        "BLOCK_PAIRS": triton.next_power_of_2(dim // 2),
        "PER_PAIR": beta_sums is not None and beta_sums.shape[1] != heads,
        "FIXED": beta_sums is None,
        "STARTED": start is not None,
        "TOKENS": TOKENS,
    }


def rotate_forward(
    q: Tensor, k: Tensor, beta_sums: Tensor | None, theta: Tensor, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    """q and k rotated by μ, contiguous.

    Args:
        q: (b, t, h, d), any strides with a contiguous last axis.
        k: (b, t, h_kv, d), likewise.
        beta_sums: running sums of β, (b, h_kv, t) or (b, h_kv · d/2, t) float64 contiguous; None: β = 1.
        theta: (d/2,) contiguous.
        start: μ_0, (b, h_kv, d/2) float64 contiguous; None: 0.
    """
    q_out, k_out = (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        torch.empty_like(k, memory_format=torch.contiguous_format),
    )
    batch, length, heads, _ = k.shape
    launch(
        _rotate_kernel, flat_grid(ceil_div(length, TOKENS), batch * heads),
        q, k, q_out, k_out, beta_sums, theta, start, length, heads, *q.stride()[:3], *k.stride()[:3],
        **_launch_options(q, k, beta_sums, start), enable_fp_fusion=True,
    )  # fmt: skip
    return q_out, k_out


def rotate_backward(
    q: Tensor,
    k: Tensor,
    dq: Tensor,
    dk: Tensor,
    beta_sums: Tensor | None,
    theta: Tensor,
    start: Tensor | None,
    want_theta: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, the running sums of β (b, t, h_kv or h_kv · d/2), θ and μ_0; None for what is not there or,
    for θ, not wanted.

    Args:
        q, k: the rotated ones, contiguous.
        dq, dk: their gradients.
        beta_sums, theta, start: as in `rotate_forward`.
    """
    batch, length, heads, dim = k.shape
    blocks = ceil_div(length, TOKENS)
    q_out, k_out = torch.empty_like(q), torch.empty_like(k)
    d_beta_sums = None if beta_sums is None else k.new_empty(batch, length, beta_sums.shape[1], dtype=torch.float64)
    d_theta, d_start = (
        k.new_empty(batch * heads, blocks, dim // 2, dtype=torch.float64) if wanted else None
        for wanted in (want_theta, start is not None)
    )
    launch(
        _rotate_backward_kernel, flat_grid(blocks, batch * heads),
        q, k, dq, dk, q_out, k_out, beta_sums, theta, start, d_beta_sums, d_theta, d_start, length, heads, blocks,
        *dq.stride()[:3], *dk.stride()[:3], **_launch_options(q, k, beta_sums, start), enable_fp_fusion=True,
    )  # fmt: skip
    d_start_summed = None if d_start is None else d_start.sum(1).unflatten(0, (batch, heads))
    return q_out, k_out, d_beta_sums, None if d_theta is None else d_theta.sum((0, 1)), d_start_summed


@operator("sympow::rotate")
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
    """q and k rotated by the phase, and the running sums of β (None for β = 1 without documents).

    `relative`: the result is used only through differences of phases, so that rotating all tokens alike changes
    nothing.
    """
    beta_sums = None if beta is None else running_sum(beta.flatten(2))
    if document_start is not None:
        if beta_sums is None:
            tokens = torch.arange(1, k.shape[1] + 1, dtype=torch.float64, device=k.device)
            beta_sums = tokens.expand(1, k.shape[2], -1)
        beta_sums = sums_from_start(beta_sums, document_start).contiguous()
    return *rotate_forward(q, k, beta_sums, theta, start), beta_sums  # type: ignore[return-value]


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
) -> tuple[Tensor, Tensor, Tensor | None]:
    contiguous = torch.contiguous_format
    beta_sums: tuple[int, ...] | None = None
    if beta is not None:
        beta_sums = (beta.shape[0], beta[0, 0].numel(), beta.shape[1])
    elif document_start is not None:
        beta_sums = (1, k.shape[2], k.shape[1])
    return (
        torch.empty_like(q, memory_format=contiguous),
        torch.empty_like(k, memory_format=contiguous),
        None if beta_sums is None else q.new_empty(beta_sums, dtype=torch.float64),
    )


@operator("sympow::rotate_backward")
def _rotate_backward(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    beta_sums: Tensor | None,
    theta: Tensor,
    start: Tensor | None,
    document_end: Tensor | None,
    relative: bool,
    want_theta: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, β (b, t, columns; None for β = 1), θ (None if not wanted) and μ_0 (None without), from the
    rotated q and k."""
    d_q, d_k, d_beta_sums, d_theta, d_start = rotate_backward(
        q, k, rows_contiguous(dq), rows_contiguous(dk), beta_sums, theta, start, want_theta
    )
    d_beta = None
    if d_beta_sums is not None:
        later = running_sum(d_beta_sums, reverse=True)
        if relative:
            # The first β rotates all tokens alike, so that its gradient is exactly 0.
            d_beta = correct_drift(later, None, later.shape[2], document_end, dtype=torch.float64)
        else:
            later = later if document_end is None else sums_to_end(later, document_end)
            d_beta = later.transpose(1, 2).contiguous()
    return d_q, d_k, d_beta, d_theta, d_start  # type: ignore[return-value]


@_rotate_backward.register_fake
def _(
    dq: Tensor,
    dk: Tensor,
    q: Tensor,
    k: Tensor,
    beta_sums: Tensor | None,
    theta: Tensor,
    start: Tensor | None,
    document_end: Tensor | None,
    relative: bool,
    want_theta: bool,
) -> tuple[Tensor | None, ...]:
    return (
        torch.empty_like(q),
        torch.empty_like(k),
        None if beta_sums is None else beta_sums.new_empty(beta_sums.shape[0], beta_sums.shape[2], beta_sums.shape[1]),
        torch.empty_like(theta, dtype=torch.float64) if want_theta else None,
        None if start is None else torch.empty_like(start),
    )


def _save_rotate(ctx, inputs, output) -> None:
    _, _, beta, theta, start, _, document_end, relative = inputs
    ctx.save_for_backward(*output, theta, start, document_end)
    ctx.beta = None if beta is None else (beta.shape, beta.dtype)
    ctx.relative = relative
    if output[2] is not None:
        ctx.mark_non_differentiable(output[2])


def _differentiate_rotate(ctx, dq, dk, _):
    want_theta = ctx.needs_input_grad[3]
    # Read once: gradient checkpointing frees what it computed again after the first read.
    saved = ctx.saved_tensors
    *_, theta, start, _ = saved
    d_q, d_k, d_beta, d_theta, d_start = _rotate_backward(dq, dk, *saved, ctx.relative, want_theta)
    beta_gradient = None
    if ctx.beta is not None:
        shape, dtype = ctx.beta
        beta_gradient = d_beta.reshape(shape).to(dtype)
    theta_gradient = d_theta.to(theta.dtype) if want_theta else None
    return d_q, d_k, beta_gradient, theta_gradient, None if start is None else d_start, None, None, None


_rotate.register_gradient(_save_rotate, _differentiate_rotate)


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
    """q and k rotated by μ_i = μ_0 + Σ_{j≤i} β_j θ; with documents, summed over each document alone.

    Args:
        relative: there is no state before or after the tokens, so that only differences of phases matter.
    """
    begin, end = documents or (None, None)
    start = None if start is None else start.contiguous()
    rotated_q, rotated_k, _ = _rotate(
        rows_contiguous(q), rows_contiguous(k), beta, theta.contiguous(), start, begin, end, relative
    )
    return rotated_q, rotated_k
