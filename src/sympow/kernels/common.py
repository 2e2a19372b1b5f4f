"""What the kernels share: @triton.jit helpers (powers, decays, query scales), tensor descriptors, packed documents."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.launch import block_dim, ceil_div, empty_aligned, flat_grid, head_major, launch

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Whether kernels are compiled to PTX, NVIDIA's, in which `wait_for_mma` is written; not so by torch for AMD's GPUs.
IN_PTX = tl.constexpr(torch.version.hip is None)
LOG2_E = tl.constexpr(1.4426950408889634)
# φ(q) Z is indistinguishable from rounding where it is less than this fraction of Σ |φ(q)_i Z_i|: the eps of float32,
# as in `sympow.ops.torch.products.drop_rounding`. States of chunks have the dtype of the inputs: in bfloat16
# each entry has a relative error of up to 2^-9, in float16 of 2^-12, and a sum of many entries less. Write these
# constants to the right of a tensor: Triton's interpreter treats `EPSILON * tensor` as a constant, which it rejects as
# an operand since 3.7.
EPSILON = tl.constexpr(2.0**-23)
STATE_EPSILON = tl.constexpr(2.0**-10)
HALF_STATE_EPSILON = tl.constexpr(2.0**-13)


@triton.jit
def split_program_id(inner, outer_type: tl.constexpr = tl.int64):
    """The indices of a CTA along two logical axes that `flat_grid` launches as one: the inner (below `inner`, int32)
    and the outer.

    Both fit in 32 bits; products of the outer with a size or a stride need not. Where the outer is a coordinate of a
    TMA descriptor, or is divided further, `outer_type` is int32.
    """
    program = tl.program_id(0)
    return program % inner, (program // inner).to(outer_type)


@triton.jit
def even_power(s, POWER: tl.constexpr):
    """s^POWER for POWER in 2, 4, 6, 8."""
    square = s * s
    if POWER == 2:
        return square
    elif POWER == 4:
        return square * square
    elif POWER == 6:
        return square * square * square
    else:
        fourth = square * square
        return fourth * fourth


@triton.jit
def odd_power(s, EXPONENT: tl.constexpr):
    """s^EXPONENT for EXPONENT in 1, 3, 5, 7."""
    if EXPONENT == 1:
        return s
    else:
        return even_power(s, EXPONENT - 1) * s


@triton.jit
def split_sum(sums, reference):
    """(sums − reference) / log 2 as an integer and a fractional part, both float32.

    Strong gates make the sums of a tile large; differences of two such pairs are then exact where those of two float32
    sums are not.
    """
    relative = (sums - reference) * LOG2_E
    whole = tl.floor(relative)
    return whole.to(tl.float32), (relative - whole).to(tl.float32)


@triton.jit
def pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal):
    """exp(G_i − G_j) where `causal`, else 0, from the parts that `split_sum` gives."""
    log_decay = (row_whole[:, None] - column_whole[None, :]) + (row_rest[:, None] - column_rest[None, :])
    return tl.exp2(tl.where(causal, log_decay, float("-inf")))


@triton.jit
def wait_for_mma(acc):
    """acc, after the matrix product (wgmma) that computes it has finished.

    Prevents a miscompilation seen with Triton 3.6 on sm_90: in a pipelined loop whose product takes a left operand that
    was just computed in registers, Triton leaves the asynchronous product in flight into the next iteration, where the
    next operand overwrites the registers it still reads. Results are wrong and differ from run to run, without a
    warning. The move below costs no instruction, but uses `acc`, so the compiler has to wait before it. After several
    products, waiting for the last is enough. `tests/kernels/test_sm90.py` checks every loop of every kernel for it.
    """
    if IN_PTX and not INTERPRETED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return acc


@triton.jit
def partial_row_sums(weights, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Four partial sums of each row, each over the columns that one thread holds in the layout of a matrix product, so
    that threads exchange nothing. The Gluon kernels in `hopper` call this, too."""
    return tl.sum(tl.sum(tl.reshape(weights, (ROWS, COLUMNS // 8, 4, 2)), axis=3), axis=1)


@triton.jit
def divide_steps(step, tiles, GROUP: tl.constexpr):
    """step // tiles and step % tiles, for a loop over GROUP query heads of `tiles` tiles each; one head needs no
    division."""
    if GROUP == 1:
        return 0, step
    else:
        return step // tiles, step % tiles


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x ≥ 0, float32, rounded to the precision of `dtype`; for bfloat16 by integer arithmetic, which is faster here."""
    if dtype == tl.bfloat16:
        # The GPU's canonical NaN, 0x7FFFFFFF, would overflow to zero.
        bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFF7FFF)
        return ((bits + 0x8000) & -0x10000).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def or_one(x):
    """x, or 1 where x is 0: a divisor for rows without weight."""
    return tl.where(x == 0, 1.0, x)


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of tl.dot: for float32 operands the sum of three products of their halves, 22 bits of each, on
    the tensor cores; on AMD's GPUs, which multiply float32 itself, "ieee". Without effect for half precision ones."""
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


class Documents(NamedTuple):
    """The first position of each token's document and the one past its last, (t,) int32 each."""

    start: Tensor
    end: Tensor


def locate(cu_seqlens: Tensor, length: int) -> Documents:
    """The bounds of each token's document, from the offsets (n + 1,) of documents packed into `length` tokens.

    Does not synchronize with the device.
    """
    positions = torch.arange(length, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    after = torch.searchsorted(cu_seqlens, positions, right=True)
    return Documents(cu_seqlens[after - 1].to(torch.int32), cu_seqlens[after].to(torch.int32))


def close_gates(log_gamma: Tensor | None, documents: Documents, heads: int) -> Tensor:
    """log γ (1, t, heads[, pairs]) with −inf at the first token of each document, so that nothing before it is seen."""
    first = documents.start == torch.arange(len(documents.start), device=documents.start.device)
    if log_gamma is None:
        log_gamma = first.new_zeros(1, len(first), heads, dtype=torch.float32)
    return log_gamma.masked_fill(first.reshape(-1, *[1] * (log_gamma.ndim - 2)), -torch.inf)


def sums_to_end(suffix_sums: Tensor, end: Tensor) -> Tensor:
    """Σ over the rest of each token's own document, from reverse cumulative sums over all tokens (…, t)."""
    return suffix_sums - torch.nn.functional.pad(suffix_sums, (0, 1))[..., end]


def sums_from_start(prefix_sums: Tensor, start: Tensor) -> Tensor:
    """Σ over each token's own document so far, from cumulative sums over all tokens (…, t)."""
    return prefix_sums - torch.nn.functional.pad(prefix_sums, (1, 0))[..., start]


@triton.jit
def power_of_two_scale(x):
    """The power of two that scales the largest entry of each row into [1, 2), 1 for a row of zeros: (rows, d) → (rows,)
    float32.

    Outputs do not depend on the scale of a query, so each query is multiplied by such a power of two: exact, and no
    score overflows. In float16 the scale is at most 2^15, so that it is a float16 number itself. The Gluon kernels in
    `hopper` call this, too.
    """
    largest = tl.max(tl.abs(x.to(tl.float32)), axis=1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    inverse = tl.maximum(254 - exponent, 1)
    if x.dtype == tl.float16:
        inverse = tl.minimum(inverse, 127 + 15)
    scale = (inverse << 23).to(tl.float32, bitcast=True)
    return tl.where(largest == 0, 1.0, scale)


@triton.jit
def scale_kernel(q_desc, scaled_desc, scale_ptr, length, heads, D: tl.constexpr, ROWS: tl.constexpr):
    """Each row of q times its `power_of_two_scale`, and the scales."""
    tile, sequence = split_program_id(tl.cdiv(length, ROWS), tl.int32)
    first = tile * ROWS
    batch, head = sequence // heads, sequence % heads
    rows = first + tl.arange(0, ROWS)
    q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
    scale = power_of_two_scale(q)
    scaled = (q * scale[:, None]).to(q.dtype)
    scaled_desc.store([batch, head, first, 0], scaled.reshape(1, 1, ROWS, D))
    tl.store(scale_ptr + sequence.to(tl.int64) * length + rows, scale, mask=rows < length)


def scale_queries(q: Tensor, rows: int = 128) -> tuple[Tensor, Tensor]:
    """q with each row times its `power_of_two_scale`, (b, t, h, d), and the scales, (b, h, t) float32."""
    batch, length, heads, dim = q.shape
    block = (rows, block_dim(dim))
    scaled = empty_aligned(q, *q.shape)
    scale = q.new_empty(batch, heads, length, dtype=torch.float32)
    launch(
        scale_kernel, flat_grid(ceil_div(length, rows), batch * heads),
        head_major(q, block), head_major(scaled, block), scale, length, heads,
        D=block[1], ROWS=rows, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return scaled, scale
