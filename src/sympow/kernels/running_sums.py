"""Running sums over time in float64, of log gates, rotation scales and their gradients, and their drift correction.

The decay from token j to token i is b_ij = exp(G_i − G_j), with G the running sum of log γ. G grows with the length
while only its differences matter: at 65,536 tokens float32 would already lose three digits of each decay. A closed
gate, log γ = −inf, becomes a finite number so negative that no decay across it survives in float32.

The gradients of gates and rotation scales are reverse cumulative sums over all later tokens, and accumulate the
rounding errors of all of them. `correct_drift` removes this drift: where the exact value of the sum is known, at chunk
boundaries and at both ends, it replaces the sum by that value, and between two such positions it interpolates the
correction.

Every sum over a sequence takes two launches: the first writes the totals of blocks of `SCAN_BLOCK` tokens, so that in
the second no block has to wait for another.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sympow.kernels.common import LOG2_E, split_program_id
from sympow.kernels.launch import ceil_div, flat_grid, launch

# exp(−300) = 2^-433 is 0 in float32, also times the powers of two, up to 2^180, that scale a row of float16
# (`float16_range`).
CLOSED_GATE = tl.constexpr(-300.0)
SCAN_BLOCK = 1024
DRIFT_BLOCK = 256
# In the attention form the drift of the gates' gradient is corrected after every block of so many queries ...
DRIFT_SPACING = 4096
# ... or fewer times for long sequences: what the kernels write for it grows with the number of blocks and the length.
MAX_DRIFT_BLOCKS = 16
# Blocks are multiples of the tiles of every kernel.
DRIFT_MULTIPLE = 128
# Tokens per tile within which `Gates` has decays: the tiles of the portable kernels and of those for short sequences.
GATE_TILE = 64


@triton.jit
def _scan_kernel(
    x_ptr, totals_ptr, out_ptr, length, columns, blocks, stride_batch, stride_time, stride_column,
    BLOCK: tl.constexpr, REVERSE: tl.constexpr, TOTALS_ONLY: tl.constexpr,
):  # fmt: skip
    """Cumulative sums within a block of tokens, plus the totals of all blocks before it (REVERSE: after it)."""
    block, sequence = split_program_id(blocks)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    x_ptr += (sequence // columns) * stride_batch + (sequence % columns) * stride_column
    x = tl.load(x_ptr + tokens.to(tl.int64) * stride_time, mask=tokens < length, other=0.0).to(tl.float64)
    total = tl.sum(x, axis=0)
    if TOTALS_ONLY:
        tl.store(totals_ptr + sequence * blocks + block, total)
    else:
        others = tl.zeros((BLOCK,), tl.float64)
        for start in range(0, blocks, BLOCK):
            index = start + tl.arange(0, BLOCK)
            wanted = (index > block) if REVERSE else (index < block)
            others += tl.load(totals_ptr + sequence * blocks + index, mask=wanted & (index < blocks), other=0.0)
        sums = tl.cumsum(x, axis=0)
        if REVERSE:
            sums = total - sums + x
        tl.store(out_ptr + sequence * length + tokens, sums + tl.sum(others, axis=0), mask=tokens < length)


def running_sum(x: Tensor, *, reverse: bool = False) -> Tensor:
    """Σ_{j≤i} x_j, or Σ_{j≥i} x_j in reverse, over the second axis: (b, t, c) → (b, c, t) float64."""
    batch, length, columns = x.shape
    blocks = ceil_div(length, SCAN_BLOCK)
    totals = x.new_empty(batch, columns, blocks, dtype=torch.float64)
    out = x.new_empty(batch, columns, length, dtype=torch.float64)
    for totals_only in (True, False):
        launch(
            _scan_kernel, flat_grid(blocks, batch * columns),
            x, totals, out, length, columns, blocks, *x.stride(),
            BLOCK=SCAN_BLOCK, REVERSE=reverse, TOTALS_ONLY=totals_only, enable_fp_fusion=True,
        )  # fmt: skip
    return out


# Gates --------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_gates(log_gamma_ptr, batch, head, rows, length, stride_b, stride_t, stride_h):
    pointers = log_gamma_ptr + batch.to(tl.int64) * stride_b + rows.to(tl.int64) * stride_t
    pointers += head.to(tl.int64) * stride_h
    gates = tl.load(pointers, mask=rows < length, other=0.0)
    return tl.maximum(gates.to(tl.float32), CLOSED_GATE).to(tl.float64)


@triton.jit
def _block_totals_kernel(
    log_gamma_ptr, totals_ptr, length, heads, blocks, stride_b, stride_t, stride_h, BLOCK: tl.constexpr
):
    """Sum of log γ over each block of BLOCK tokens: (b, h, blocks)."""
    block, sequence = split_program_id(blocks, tl.int32)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    gates = _load_gates(log_gamma_ptr, sequence // heads, sequence % heads, rows, length, stride_b, stride_t, stride_h)
    tl.store(totals_ptr + sequence * blocks + block, tl.sum(gates, axis=0))


@triton.jit
def _running_sums_kernel(
    log_gamma_ptr,
    totals_ptr,
    gate_sums_ptr,
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
    exp(G_end − G_j) and exp(G_j − G_start), padded to whole blocks."""
    block, sequence = split_program_id(blocks, tl.int32)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, block, BLOCK):
        index = start + tl.arange(0, BLOCK)
        earlier += tl.load(totals_ptr + sequence * blocks + index, mask=index < block, other=0.0)
    gates = _load_gates(log_gamma_ptr, sequence // heads, sequence % heads, rows, length, stride_b, stride_t, stride_h)
    sums = tl.cumsum(gates, axis=0) + tl.sum(earlier, axis=0)
    in_tiles = tl.reshape(sums, (BLOCK // TILE, TILE))
    # log γ ≤ 0, so the first sum of a tile is its largest and the last its smallest.
    to_end = tl.exp((tl.min(in_tiles, axis=1)[:, None] - in_tiles).to(tl.float32))
    from_start = tl.exp((in_tiles - tl.max(in_tiles, axis=1)[:, None]).to(tl.float32))
    tl.store(gate_sums_ptr + sequence.to(tl.int64) * length + rows, sums, mask=rows < length)
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
    Analytically q_i · dq_i = 0 (rows are normalized); kept, it cancels the rounding of the columns' terms.
    """
    block, sequence = split_program_id(blocks, tl.int32)
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
        # Reverse cumulative sums from forward ones: Σ_{i≥m} = total − Σ_{i<m}.
        suffix = tl.sum(terms, axis=0) - tl.cumsum(terms, axis=0) + terms + tl.sum(after, axis=0)
        tl.store(out_ptr + sequence.to(tl.int64) * length + rows, suffix, mask=mask)


@triton.jit
def _split_kernel(gate_sums_ptr, whole_ptr, rest_ptr, length, padded, BLOCK: tl.constexpr):
    block, sequence = split_program_id(padded // BLOCK)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(gate_sums_ptr + sequence * length + tl.minimum(rows, length - 1)) * LOG2_E
    whole = tl.floor(sums)
    tl.store(whole_ptr + sequence * padded + rows, whole.to(tl.int32))
    tl.store(rest_ptr + sequence * padded + rows, (sums - whole).to(tl.float32))


@dataclass(frozen=True)
class SplitSums:
    """G / log 2 = whole + rest, with 0 ≤ rest < 1.

    float64 arithmetic shares a pipe with the tensor cores of Hopper and waits for every product in flight; int32 and
    float32 do not.

    Attributes:
        whole: (b, h_kv, ≥ t) int32, as long as `Gates.to_end`; past the last token its sum is repeated.
        rest: likewise, float32.
    """

    whole: Tensor
    rest: Tensor


@dataclass(frozen=True)
class Gates:
    """What the kernels read of the gates.

    Attributes:
        sums: G, (b, h_kv, t) float64.
        to_end: exp(G_end − G_j) for the tile of `tile` tokens that holds j, (b, h_kv, ≥ t) float32. Its length is a
            multiple of `SCAN_BLOCK`, so that kernels can read past the last token.
        from_start: exp(G_j − G_start), likewise.
        tile: tokens per tile.
    """

    sums: Tensor
    to_end: Tensor
    from_start: Tensor
    tile: int = GATE_TILE

    @cached_property
    def split(self) -> SplitSums:
        """G, split for the kernels on Hopper."""
        batch, heads, padded = self.to_end.shape
        whole = torch.empty_like(self.to_end, dtype=torch.int32)
        rest = torch.empty_like(self.to_end)
        launch(
            _split_kernel, flat_grid(padded // SCAN_BLOCK, batch * heads),
            self.sums, whole, rest, self.sums.shape[-1], padded, BLOCK=SCAN_BLOCK, enable_fp_fusion=True,
        )  # fmt: skip
        return SplitSums(whole, rest)


def gate_sums(log_gamma: Tensor, tile: int = GATE_TILE) -> Gates:
    """G and the decays within tiles, from log γ (b, t, h_kv)."""
    batch, length, heads = log_gamma.shape
    blocks = ceil_div(length, SCAN_BLOCK)
    totals = log_gamma.new_empty(batch, heads, blocks, dtype=torch.float64)
    sums = log_gamma.new_empty(batch, heads, length, dtype=torch.float64)
    to_end = log_gamma.new_empty(batch, heads, blocks * SCAN_BLOCK, dtype=torch.float32)
    from_start = torch.empty_like(to_end)
    grid = flat_grid(blocks, batch * heads)
    if blocks > 1:
        launch(
            _block_totals_kernel,
            grid,
            log_gamma,
            totals,
            length,
            heads,
            blocks,
            *log_gamma.stride(),
            BLOCK=SCAN_BLOCK,
            enable_fp_fusion=True,
        )
    launch(
        _running_sums_kernel, grid,
        log_gamma, totals, sums, to_end, from_start, length, heads, blocks, *log_gamma.stride(),
        BLOCK=SCAN_BLOCK, TILE=tile, enable_fp_fusion=True,
    )  # fmt: skip
    return Gates(sums, to_end, from_start, tile)


def gate_gradient(row_terms: Tensor, column_terms: Tensor, power: int) -> Tensor:
    """d log γ_m = Σ_{i≥m} dG_i with dG_i = (Σ q_i · dq_i − k_i · dk_i) / p, Σ over the query heads of a key head:
    (b, h_kv, t) float64, before its drift is corrected (`correct_drift`).

    Args:
        row_terms: q_i · dq_i, (b, h, t).
        column_terms: k_j · dk_j, (b, h_kv, t).
        power: p.
    """
    batch, heads, length = column_terms.shape
    blocks = ceil_div(length, SCAN_BLOCK)
    totals = column_terms.new_empty(batch, heads, blocks, dtype=torch.float64)
    out = column_terms.new_empty(batch, heads, length, dtype=torch.float64)
    grid = flat_grid(blocks, batch * heads)
    for totals_only in (True, False):
        launch(
            _gate_gradient_kernel, grid,
            row_terms, column_terms, totals, out, length, blocks, GROUP=row_terms.shape[1] // heads, POWER=power,
            BLOCK=SCAN_BLOCK, TOTALS_ONLY=totals_only, enable_fp_fusion=True,
        )  # fmt: skip
    return out


# Drift correction ---------------------------------------------------------------------------------------------------


def drift_spacing(length: int) -> int:
    """Queries between two corrections of the attention form."""
    return max(DRIFT_SPACING, ceil_div(ceil_div(length, MAX_DRIFT_BLOCKS), DRIFT_MULTIPLE) * DRIFT_MULTIPLE)


def exact_sums_at_boundaries(crossing: Tensor, boundaries: tuple[int, int], length: int, chunk: int) -> Tensor:
    """d log γ at every chunk boundary, (b, h, ⌈t / chunk⌉ + 1), from its values at the boundaries that have a state.

    There it is the inner product of the state and its gradient, since every pair (i, j) across a boundary is in both.
    At a boundary without a state it is 0: no pair lies across.

    Args:
        crossing: these inner products, (b, h, boundaries with states) float64.
        boundaries: the first and the last boundary that have a state.
    """
    first, last = boundaries
    missing = (first, -(-length // chunk) - last)
    return pad(crossing, missing) if any(missing) else crossing


def exact_sums_at_blocks(block_terms: Tensor, to_end: Tensor | None, block: int) -> Tensor:
    """d log γ at 0, block, 2 block, … and t: Σ B_ij dB_ij over the pairs across, (b, h, ⌈t / block⌉ + 1) float64.

    Args:
        block_terms: the sums over the queries of each block, key by key, with decays counted from the end of the key's
            tile, (b, h, ⌈t / block⌉, t) float32.
        to_end: decays from a key to the end of its tile, (b, h, ≥ t) float32; None: the sums have them already.
        block: queries per block.
    """
    count, length = block_terms.shape[2:]
    by_key = block_terms if to_end is None else block_terms * to_end[:, :, None, :length]
    padded = pad(by_key, (0, count * block - length)).unflatten(-1, (count, block))
    pairs = padded.sum(-1, dtype=torch.float64)  # (b, h, blocks of queries, blocks of keys)
    later = pad(pairs.flip(2).cumsum(2).flip(2), (0, 0, 0, 1))
    return pad(later.cumsum(3), (1, 0)).diagonal(dim1=2, dim2=3)


@triton.jit
def _corrected(suffix_sums_ptr, exact_ptr, positions, mask, length, spacing):
    """The sums at `positions` without their drift; 0 where `mask` is False."""
    interval = positions // spacing
    left = interval * spacing
    right = tl.minimum(left + spacing, length)
    drift_left = -tl.load(suffix_sums_ptr + left, mask=mask, other=0.0)
    # Past the last token the sum is 0.
    drift_right = -tl.load(suffix_sums_ptr + right, mask=mask & (right < length), other=0.0)
    if exact_ptr is not None:
        drift_left += tl.load(exact_ptr + interval, mask=mask, other=0.0)
        drift_right += tl.load(exact_ptr + interval + 1, mask=mask, other=0.0)
    fraction = (positions - left).to(tl.float64) / tl.maximum(right - left, 1).to(tl.float64)
    correction = drift_left + fraction * (drift_right - drift_left)
    return tl.where(mask, tl.load(suffix_sums_ptr + positions, mask=mask, other=0.0) + correction, 0.0)


@triton.jit
def _correct_drift_kernel(
    suffix_sums_ptr, exact_ptr, document_end_ptr, out_ptr, length, heads, spacing, exact_count,
    DOCUMENTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    block, sequence = split_program_id(tl.cdiv(length, BLOCK))
    positions = block * BLOCK + tl.arange(0, BLOCK)
    mask = positions < length
    suffix_sums_ptr += sequence * length
    if exact_ptr is not None:
        exact_ptr += sequence * exact_count
    value = _corrected(suffix_sums_ptr, exact_ptr, positions, mask, length, spacing)
    if DOCUMENTS:
        end = tl.load(document_end_ptr + positions, mask=mask, other=0)
        value -= _corrected(suffix_sums_ptr, exact_ptr, end, mask & (end < length), length, spacing)
    out = ((sequence // heads) * length + positions) * heads + sequence % heads
    tl.store(out_ptr + out, value.to(out_ptr.dtype.element_ty), mask=mask)


def correct_drift(
    suffix_sums: Tensor,
    exact: Tensor | None,
    spacing: int,
    document_end: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Reverse cumulative sums without the rounding errors they accumulated, time before heads: (b, t, h).

    At every `spacing`-th position the sum is replaced by its exact value; in between, the correction is interpolated.

    Args:
        suffix_sums: Σ_{i≥m}, (b, h, t) float64.
        exact: exact values at the positions 0, spacing, 2 spacing, … and t, (b, h, ⌈t / spacing⌉ + 1) float64; None: 0
            at all of them.
        spacing: distance of these positions.
        document_end: one past the last token of each token's document, (t,): sums then end there; None: one document.
        dtype: of the result.
    """
    batch, heads, length = suffix_sums.shape
    out = suffix_sums.new_empty(batch, length, heads, dtype=dtype)
    exact = None if exact is None else exact.contiguous()
    launch(
        _correct_drift_kernel, flat_grid(ceil_div(length, DRIFT_BLOCK), batch * heads),
        suffix_sums.contiguous(), exact, document_end, out, length, heads, spacing,
        0 if exact is None else exact.shape[-1], DOCUMENTS=document_end is not None, BLOCK=DRIFT_BLOCK,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out
