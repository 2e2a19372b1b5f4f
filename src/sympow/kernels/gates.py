"""Running sums of log gates, G, in float64, and what follows from them.

b_ij = exp(G_i − G_j). G grows with the length while only its differences matter, so it is kept in float64: at 65,536
tokens float32 would already lose three digits of each decay. A closed gate, log γ = −inf, becomes a finite number so
negative that no decay across it survives in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# exp(−110) is 0 in float32, subnormals included.
CLOSED_GATE = tl.constexpr(-110.0)
SCAN_BLOCK = 1024


@triton.jit
def _load_gates(log_gamma_ptr, batch, head, rows, length, stride_b, stride_t, stride_h):
    pointers = log_gamma_ptr + batch.to(tl.int64) * stride_b + rows.to(tl.int64) * stride_t + head * stride_h
    gates = tl.load(pointers, mask=rows < length, other=0.0)
    return tl.maximum(gates.to(tl.float32), CLOSED_GATE).to(tl.float64)


@triton.jit
def _block_totals_kernel(
    log_gamma_ptr, totals_ptr, length, heads, blocks, stride_b, stride_t, stride_h, BLOCK: tl.constexpr
):
    """Sum of log γ over each block of BLOCK tokens: (b, h, blocks)."""
    block, sequence = tl.program_id(0), tl.program_id(1)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    gates = _load_gates(log_gamma_ptr, sequence // heads, sequence % heads, rows, length, stride_b, stride_t, stride_h)
    tl.store(totals_ptr + sequence * blocks + block, tl.sum(gates, axis=0))


@triton.jit
def _running_sums_kernel(
    log_gamma_ptr,
    totals_ptr,
    sums_ptr,
    to_end_ptr,
    from_start_ptr,
    length,
    heads,
    blocks,
    stride_b,
    stride_t,
    stride_h,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """G_j, (b, h, t), and the decays from j to the end of its tile of TILE tokens and from the tile's start to j,
    exp(G_end − G_j) and exp(G_j − G_start), up to whole blocks."""
    block, sequence = tl.program_id(0), tl.program_id(1)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, block, BLOCK):
        index = start + tl.arange(0, BLOCK)
        before += tl.load(totals_ptr + sequence * blocks + index, mask=index < block, other=0.0)
    gates = _load_gates(log_gamma_ptr, sequence // heads, sequence % heads, rows, length, stride_b, stride_t, stride_h)
    sums = tl.cumsum(gates, axis=0) + tl.sum(before, axis=0)
    in_tiles = tl.reshape(sums, (BLOCK // TILE, TILE))
    # Sums never grow, so a tile's first is its largest and its last its least.
    to_end = tl.exp((tl.min(in_tiles, axis=1)[:, None] - in_tiles).to(tl.float32))
    from_start = tl.exp((in_tiles - tl.max(in_tiles, axis=1)[:, None]).to(tl.float32))
    tl.store(sums_ptr + sequence.to(tl.int64) * length + rows, sums, mask=rows < length)
    padded = sequence.to(tl.int64) * (blocks * BLOCK) + rows
    tl.store(to_end_ptr + padded, tl.reshape(to_end, (BLOCK,)))
    tl.store(from_start_ptr + padded, tl.reshape(from_start, (BLOCK,)))


@triton.jit
def _gate_gradient_kernel(
    row_ptr,
    column_ptr,
    totals_ptr,
    out_ptr,
    length,
    blocks,
    GROUP: tl.constexpr,
    POWER: tl.constexpr,
    BLOCK: tl.constexpr,
    TOTALS_ONLY: tl.constexpr,
):
    """Σ_{i≥m} dG_i with dG_i = (q_i · dq_i − k_i · dk_i) / p, summed over the query heads of a key head.

    B_ij is homogeneous of degree p in q_i and in k_j, so Σ_j B_ij dB_ij = q_i · dq_i / p, and likewise for columns.
    Analytically q_i · dq_i = 0 (rows are normalised); kept, it cancels the rounding of the columns' terms.
    """
    block, sequence = tl.program_id(0), tl.program_id(1)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    mask = rows < length
    terms = -tl.load(column_ptr + sequence.to(tl.int64) * length + rows, mask=mask, other=0.0).to(tl.float64)
    for member in range(GROUP):
        offset = (sequence * GROUP + member).to(tl.int64) * length
        terms += tl.load(row_ptr + offset + rows, mask=mask, other=0.0).to(tl.float64)
    terms = terms / POWER
    if TOTALS_ONLY:
        tl.store(totals_ptr + sequence * blocks + block, tl.sum(terms, axis=0))
    else:
        after = tl.zeros((BLOCK,), tl.float64)
        for start in range(block + 1, blocks, BLOCK):
            index = start + tl.arange(0, BLOCK)
            after += tl.load(totals_ptr + sequence * blocks + index, mask=index < blocks, other=0.0)
        # Suffix sums from prefix sums: Σ_{i≥m} = total − Σ_{i<m}.
        suffix = tl.sum(terms, axis=0) - tl.cumsum(terms, axis=0) + terms + tl.sum(after, axis=0)
        tl.store(out_ptr + sequence.to(tl.int64) * length + rows, suffix, mask=mask)


@dataclass(frozen=True)
class Gates:
    """What the kernels read of the gates.

    Attributes:
        sums: G, (b, h_kv, t) float64.
        to_end: exp(G_end − G_j) for the tile of `tile` tokens that holds j, (b, h_kv, ≥ t) float32. As long as a
            multiple of `SCAN_BLOCK`, so that kernels may read past the last token.
        from_start: exp(G_j − G_start), likewise.
    """

    sums: Tensor
    to_end: Tensor
    from_start: Tensor
    tile: int


def running_sums(log_gamma: Tensor, tile: int) -> Gates:
    """G and the decays within tiles, from log γ (b, t, h_kv)."""
    batch, length, heads = log_gamma.shape
    blocks = triton.cdiv(length, SCAN_BLOCK)
    totals = log_gamma.new_empty(batch, heads, blocks, dtype=torch.float64)
    sums = log_gamma.new_empty(batch, heads, length, dtype=torch.float64)
    to_end = log_gamma.new_empty(batch, heads, blocks * SCAN_BLOCK, dtype=torch.float32)
    from_start = torch.empty_like(to_end)
    grid = (blocks, batch * heads)
    if blocks > 1:
        _block_totals_kernel[grid](
            log_gamma, totals, length, heads, blocks, *log_gamma.stride(), BLOCK=SCAN_BLOCK, enable_fp_fusion=True
        )
    _running_sums_kernel[grid](
        log_gamma, totals, sums, to_end, from_start, length, heads, blocks, *log_gamma.stride(),
        BLOCK=SCAN_BLOCK, TILE=tile, enable_fp_fusion=True,
    )  # fmt: skip
    return Gates(sums, to_end, from_start, tile)


def gate_gradient(row_terms: Tensor, column_terms: Tensor, power: int) -> Tensor:
    """Σ_{i≥m} dG_i (b, h_kv, t) float64 from q_i · dq_i (b, h, t) and k_j · dk_j (b, h_kv, t): d log γ_m, with all the
    rounding of later rows and columns in it (`anchoring.anchored` takes most of that out)."""
    batch, heads, length = column_terms.shape
    blocks = triton.cdiv(length, SCAN_BLOCK)
    totals = column_terms.new_empty(batch, heads, blocks, dtype=torch.float64)
    out = column_terms.new_empty(batch, heads, length, dtype=torch.float64)
    grid = (blocks, batch * heads)
    for totals_only in (True, False):
        _gate_gradient_kernel[grid](
            row_terms, column_terms, totals, out, length, blocks, GROUP=row_terms.shape[1] // heads, POWER=power,
            BLOCK=SCAN_BLOCK, TOTALS_ONLY=totals_only, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def span_anchors(spans: Tensor, to_end: Tensor, span: int) -> Tensor:
    """Σ B_ij dB_ij over the pairs on either side of 0, span, 2 span, … and t: (b, h, ⌈t / span⌉ + 1) float64.

    Args:
        spans: the sums over the queries of each span, key by key, decays counted from the end of the key's tile,
            (b, h, ⌈t / span⌉, t) float32.
        to_end: decays from a key to the end of its tile, (b, h, ≥ t) float32.
    """
    count, length = spans.shape[2:]
    by_key = spans * to_end[:, :, None, :length]
    padded = torch.nn.functional.pad(by_key, (0, count * span - length)).unflatten(-1, (count, span))
    pairs = padded.sum(-1, dtype=torch.float64)  # (b, h, spans of queries, spans of keys)
    later = torch.nn.functional.pad(pairs.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    return torch.nn.functional.pad(later.cumsum(3), (1, 0)).diagonal(dim1=2, dim2=3)
