"""The sums of chunks that their states are made of, on Hopper for heads of 128, p = 2.

    S_iᵀ = Σ (y * x_i)ᵀ x over the tokens of a chunk, for entries i: the same as `states.quadratic.update_kernel`.

A CTA owns as many entries as fit in registers. One warp copies tiles of x and y to shared memory; each of two
warpgroups owns half of the rows e of all entries, so that it reads its half of yᵀ once for several products.
"""

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from sympow.kernels.common import divide_steps
from sympow.kernels.hopper.common import (
    async_load,
    async_store,
    blocks_of,
    free_stage,
    head_major,
    matrix,
    new_barriers,
    thread_barrier,
)
from sympow.kernels.hopper.forward import COPY_REGISTERS, REGISTERS, START_REGISTERS
from sympow.kernels.launch import flat_grid, launch

# Tokens per tile, entries per CTA times columns of each, and tiles of x and of y in shared memory.
TILE, WIDTH, RING = 64, 256, 4


@gluon.jit
def _copy_tokens(
    x_desc, y_desc, batch, head, chunk_start, tiles, first_column, buffers, ready, empty,
    GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TOKENS: gl.constexpr = y_desc.block_type.shape[2]
    x_buffers, y_buffers = buffers
    for step in range(GROUP * tiles):
        member, tile = divide_steps(step, tiles, GROUP)
        stage = step % STAGES
        barrier = ready.index(stage)
        row = chunk_start + tile * TOKENS
        mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
        mbarrier.expect(barrier, x_desc.block_type.nbytes + y_desc.block_type.nbytes)
        async_load(x_desc, [batch, head + member, row, first_column], barrier, x_buffers.index(stage))
        async_load(y_desc, [batch, head + member, row, 0], barrier, y_buffers.index(stage))


@gluon.jit
def _load_entries(pointers, TOKENS: gl.constexpr, ENTRIES: gl.constexpr):
    """Consecutive entries of a tile of tokens."""
    loaded = ()
    for n in gl.static_range(ENTRIES):
        loaded = loaded + (gl.load(pointers + n * TOKENS),)
    return loaded


@gluon.jit
def _update_rows(
    y_desc, out_desc, entries_ptr, place, tiles, tile_stride, head_stride, out_buffers, buffers, ready, empty,
    MEMBER: gl.constexpr, COLUMNS: gl.constexpr, ENTRIES: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Half of the rows of S_iᵀ for ENTRIES entries i."""
    state, out_entry, out_column = place
    TOKENS: gl.constexpr = y_desc.block_type.shape[2]
    ROWS: gl.constexpr = y_desc.block_type.shape[3] // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    x_buffers, y_buffers = buffers
    accs = (gl.zeros((ROWS, COLUMNS), gl.float32, ACC),) * ENTRIES
    pointers = entries_ptr + gl.arange(0, TOKENS, gl.SliceLayout(0, LEFT))
    ahead = _load_entries(pointers, TOKENS, ENTRIES)
    steps = GROUP * tiles
    for step in range(steps):
        stage = step % STAGES
        entries = ahead
        # Loaded a step ahead: they do not pass through shared memory.
        member, tile = divide_steps(gl.minimum(step + 1, steps - 1), tiles, GROUP)
        ahead = _load_entries(pointers + member * head_stride + tile * tile_stride, TOKENS, ENTRIES)
        mbarrier.wait(ready.index(stage), (step // STAGES) & 1)
        y = matrix(y_buffers, stage).slice(MEMBER * ROWS, ROWS, dim=1).permute((1, 0)).load(LEFT)
        x = matrix(x_buffers, stage)
        sums = ()
        for n in gl.static_range(ENTRIES):
            sums = sums + (warpgroup_mma(y * gl.expand_dims(entries[n], 0), x, accs[n], is_async=True),)
        accs = warpgroup_mma_wait(0, deps=sums)
        free_stage(empty, stage)
    buffer = out_buffers.index(MEMBER)
    for n in gl.static_range(ENTRIES):
        buffer.reshape([ROWS, COLUMNS]).store(accs[n].to(out_desc.dtype))
        fence_async_shared()
        thread_barrier()
        async_store(out_desc, [state, out_entry + n, MEMBER * ROWS, out_column], buffer)
        tma.store_wait(0)
        thread_barrier()


@gluon.jit
def update_kernel(
    x_desc, y_desc, out_desc, transposed_ptr, all_tiles, kv_heads, chunk_count, state_count, first_chunk, first_state,
    chunk, first_entry, first_column, out_column, groups,
    GROUP: gl.constexpr, D: gl.constexpr, ENTRIES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """S_iᵀ of a chunk for ENTRIES entries i: (e, COLUMNS) each."""
    dtype: gl.constexpr = x_desc.dtype
    TOKENS: gl.constexpr = y_desc.block_type.shape[2]
    COLUMNS: gl.constexpr = x_desc.block_type.shape[3]
    program = gl.program_id(0)
    group = program % groups
    number = program // groups % chunk_count
    kv_sequence = program // groups // chunk_count
    batch, kv_head = kv_sequence // kv_heads, kv_sequence % kv_heads
    tiles = chunk // TOKENS
    chunk_start = (number + first_chunk) * chunk
    state = kv_sequence * state_count + number + first_state
    tile_stride = D * TOKENS
    head_stride = all_tiles.to(gl.int64) * tile_stride
    entries_ptr = transposed_ptr + kv_sequence.to(gl.int64) * GROUP * head_stride
    entries_ptr += (number + first_chunk).to(gl.int64) * tiles * tile_stride + (first_entry + group * ENTRIES) * TOKENS

    x_buffers = gl.allocate_shared_memory(dtype, [STAGES] + x_desc.block_type.shape, x_desc.layout)
    y_buffers = gl.allocate_shared_memory(dtype, [STAGES] + y_desc.block_type.shape, y_desc.layout)
    out_buffers = gl.allocate_shared_memory(out_desc.dtype, [2] + out_desc.block_type.shape, out_desc.layout)
    ready = new_barriers(STAGES, 1)
    empty = new_barriers(STAGES, 2)
    fence_async_shared()
    thread_barrier()
    buffers = (x_buffers, y_buffers)
    place = (state, group * ENTRIES, out_column)
    gl.warp_specialize([
        (_update_rows, (y_desc, out_desc, entries_ptr, place, tiles, tile_stride, head_stride, out_buffers, buffers,
                        ready, empty, gl.constexpr(0), COLUMNS, ENTRIES, GROUP, STAGES)),
        (_update_rows, (y_desc, out_desc, entries_ptr, place, tiles, tile_stride, head_stride, out_buffers, buffers,
                        ready, empty, gl.constexpr(1), COLUMNS, ENTRIES, GROUP, STAGES)),
        (_copy_tokens, (x_desc, y_desc, batch, kv_head * GROUP, chunk_start, tiles, first_column, buffers, ready, empty,
                        GROUP, STAGES)),
    ], [4, 1], [REGISTERS, COPY_REGISTERS])  # fmt: skip


def update(
    x: Tensor, y: Tensor, transposed: Tensor, out: Tensor, where: tuple[int, ...], first_entry: int, columns: int
) -> None:
    """Writes the last columns of S_i of each chunk for half of the entries i, from `first_entry` on.

    Args:
        x, y: as in `states.quadratic.chunk_sums`.
        transposed: the decayed tokens that `fold_kernel` writes, (b, h, tiles, d, 64).
        out: `low` or `high` of `states.quadratic.ChunkSums`, (b, h_kv, n, ≤ d/2, e, d) or (…, columns).
        where: chunks, states per sequence, first chunk, first state, and tokens per chunk.
        columns: how many of the columns a of S_ia are computed.
    """
    batch, _, heads, dim = x.shape
    kv_heads, value_dim = out.shape[1], out.shape[4]
    entries = WIDTH // columns
    groups = out.shape[3] // entries
    out_desc = blocks_of(out.flatten(0, 2), [1, 1, value_dim // 2, columns])
    launch(
        update_kernel, flat_grid(groups, where[0], batch * kv_heads),
        head_major(x, TILE, columns), head_major(y, TILE), out_desc, transposed, transposed.shape[2], kv_heads, *where,
        first_entry, dim - columns, out.shape[-1] - columns, groups,
        GROUP=heads // kv_heads, D=dim, ENTRIES=entries, STAGES=RING,
        num_warps=4, maxnreg=START_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
