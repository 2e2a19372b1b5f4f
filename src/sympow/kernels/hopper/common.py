"""What the Hopper kernels share: TMA descriptors, circular buffers, and names that Triton changed."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sympow.kernels.device_limits import HOPPER_WIDTHS
from sympow.kernels.float16_range import WEIGHT_LIMIT, exponent_to_limit, power_of_two
from sympow.kernels.launch import aligned, new_descriptor

# Gluon renamed the barrier in Triton 3.7 and the copies in 3.8; the old names are gone in 3.7 and 3.9.
thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def gluon_head_major(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """A descriptor of x (b, t, h, d) as (b, h, t, d), read in tiles of `rows` tokens and `columns` entries (None: all);
    out of bounds reads are 0."""
    return gluon_blocks_of(aligned(x).transpose(1, 2), [1, 1, rows, columns or x.shape[-1]])


def padded_width(q: Tensor, v: Tensor) -> int:
    """Entries of a head in shared memory: TMA pads smaller heads with zeros, and does not write them back."""
    return next(width for width in HOPPER_WIDTHS if width >= max(q.shape[-1], v.shape[-1]))


def gluon_blocks_of(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A descriptor of x, read and written in blocks of that shape."""
    return new_descriptor(TensorDescriptor, x, block, layout=_layout(tuple(block), x.dtype))


# Cached: computing it takes the host as long as the rest of a descriptor.
@cache
def _layout(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout of a block in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(block), GLUON_DTYPES[dtype])


@gluon.jit
def matrix(buffers, stage):
    """The tile of a stage in a circular buffer, as a matrix."""
    buffer = buffers.index(stage)
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def new_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """`count` barriers in shared memory, each of which completes a phase after so many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(count):
        mbarrier.init(barriers.index(n), count=arrivals)
    return barriers


@gluon.jit
def free_stage(empty, stage):
    """Tells the warp that copies that this partition no longer reads a stage of a circular buffer."""
    # A warp waits for its own part of a product only, and one thread arrives for all.
    thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def sums_since(whole_ptr, rest_ptr, positions, reference_whole, reference_rest):
    """G at some positions less the reference, split: both parts float32."""
    whole = (gl.load(whole_ptr + positions) - reference_whole).to(gl.float32)
    return whole, gl.load(rest_ptr + positions) - reference_rest


@gluon.jit
def pairwise_decay(row_whole, row_rest, column_whole, column_rest, causal, ROWS_LATER: gl.constexpr = True):
    """The decay between each row and each column of a tile on the diagonal, 0 where not `causal`, from their
    `sums_since`. ROWS_LATER: rows are queries; otherwise keys."""
    row_whole, row_rest = gl.expand_dims(row_whole, 1), gl.expand_dims(row_rest, 1)
    column_whole, column_rest = gl.expand_dims(column_whole, 0), gl.expand_dims(column_rest, 0)
    if ROWS_LATER:
        log_decay = (row_whole - column_whole) + (row_rest - column_rest)
    else:
        log_decay = (column_whole - row_whole) + (column_rest - row_rest)
    return gl.exp2(gl.where(causal, log_decay, float("-inf")))


@gluon.jit
def sums_before_chunk(whole_ptr, rest_ptr, boundary, chunk):
    """G at the last token before a chunk, split; 0 before the first."""
    index = gl.maximum(boundary * chunk, 1) - 1
    inside = boundary > 0
    return gl.load(whole_ptr + index, mask=inside, other=0), gl.load(rest_ptr + index, mask=inside, other=0.0)


@gluon.jit
def load_rows(pointer, sequence, rows, length, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Rows of a contiguous float32 tensor (sequences, length, COLUMNS); 0 past the last one."""
    columns = gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    offsets = (sequence.to(gl.int64) * length + gl.expand_dims(rows, 1)) * COLUMNS + gl.expand_dims(columns, 0)
    return gl.load(pointer + offsets, mask=gl.expand_dims(rows < length, 1), other=0.0)


@gluon.jit
def lift_weights(scores, acc, denominator, rounding, lift, SUMS_BY_ROW: gl.constexpr):
    """Scales the weights of a tile on the diagonal, and what has been summed before, so that float16 keeps the weights
    of rows whose queries are nearly orthogonal to all keys so far.

    Args:
        scores: weights of the tile, not scaled by 2^lift.
        acc, denominator, rounding: Σ_j B_ij v_j, Σ_j B_ij as rounded, and the sum of what rounding removed, times
            2^lift.

    Returns:
        scores, times the new 2^lift; the sums, times the same; and the new lift.
    """
    total = (denominator + rounding) * power_of_two(-lift) + gl.sum(scores, axis=1)
    raised = exponent_to_limit(total, WEIGHT_LIMIT)
    change = power_of_two(raised - lift)
    acc *= gl.expand_dims(gl.convert_layout(change, SUMS_BY_ROW), 1)
    return scores * gl.expand_dims(power_of_two(raised), 1), acc, denominator * change, rounding * change, raised


@gluon.jit
def prefetch(pointers):
    """Loads what the next step reads into the L1 cache: no registers are free for it."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )
