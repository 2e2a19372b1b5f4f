"""States at the boundaries of chunks, p = 2, with a gate per rotated pair.

The state after a chunk that ends at R is computed from keys that have decayed to R, each entry by its own gates,
k'_j = exp((G_R − G_j)/p) k_j:
    S_ia = Σ_{j≤R} k'_ji k'_ja v_j        Z_ia = Σ_{j≤R} k'_ji k'_ja.
`states.quadratic.chunk_sums` computes the sums over each chunk from decayed keys, as it does without gates. From one
boundary to the next, feature (i, a) decays by the product of the decays of entries i and a across the chunk, which
`scan_pairs_kernel` applies. The gradients of the states are the same sums over later queries, decayed from R, and
scanned backwards.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from sympow.kernels.common import split_program_id
from sympow.kernels.launch import launch
from sympow.kernels.pair_gates.decays import TILE, DecayTables
from sympow.kernels.states.quadratic import ChunkStates, ChunkSums


@triton.jit
def _scan_block(
    block, sequence, x_ptr, out_ptr, other_ptr, product_ptr, products, decay_ptr, first_entry, first_column, columns,
    per_entry, size, state_count, chunks,
    D: tl.constexpr, REVERSE: tl.constexpr, MULTIPLIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Scans one block of the states' numbers over the boundaries."""
    offsets = block * BLOCK + tl.arange(0, BLOCK)
    entry = first_entry + offsets // per_entry
    column = first_column + offsets % columns
    base = sequence * state_count * size
    state = tl.zeros((BLOCK,), tl.float32)
    for step in tl.range(0, state_count, num_stages=4):
        index = state_count - 1 - step if REVERSE else step
        # State n lies after chunk n. In reverse, chunk n + 1 lies between state n and the state visited before it.
        decay = decay_ptr + (sequence * chunks + index + REVERSE) * D
        state *= tl.load(decay + entry) * tl.load(decay + column)
        place = base + index.to(tl.int64) * size + offsets
        state += tl.load(x_ptr + place).to(tl.float32)
        tl.store(out_ptr + place, state.to(out_ptr.dtype.element_ty))
        if MULTIPLIED:
            other = tl.load(other_ptr + place).to(tl.float32)
            tl.store(product_ptr + (sequence * state_count + index) * products, tl.sum(state * other, axis=0))


@triton.jit
def scan_pairs_kernel(
    xs, outs, others, product_ptr, decay_ptr, value_dim, state_count, chunks, second_columns,
    D: tl.constexpr, REVERSE: tl.constexpr, MULTIPLIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """state_s = x_s + (d_i d_a) state_{s−1} over the boundaries s, where d is the decay of each entry across the chunk
    between two boundaries. REVERSE: from the last boundary backwards. One launch scans S for the lower and the upper
    half of the entries i, and Z. MULTIPLIED: also partial inner products of S with other states, each over numbers of
    one entry i.
    """
    low_blocks = D // 2 * value_dim * D // BLOCK
    high_blocks = D // 2 * value_dim * second_columns // BLOCK
    program, sequence = split_program_id(low_blocks + high_blocks + D * D // BLOCK)
    products = low_blocks + high_blocks
    if program < low_blocks:
        _scan_block(
            program, sequence, xs[0], outs[0], others[0], product_ptr + program if MULTIPLIED else None, products,
            decay_ptr, 0, 0, D, value_dim * D, D // 2 * value_dim * D, state_count, chunks,
            D, REVERSE, MULTIPLIED, BLOCK,
        )  # fmt: skip
    elif program < low_blocks + high_blocks:
        _scan_block(
            program - low_blocks, sequence, xs[1], outs[1], others[1], product_ptr + program if MULTIPLIED else None,
            products, decay_ptr, D // 2, D - second_columns, second_columns, value_dim * second_columns,
            D // 2 * value_dim * second_columns, state_count, chunks, D, REVERSE, MULTIPLIED, BLOCK,
        )  # fmt: skip
    else:
        _scan_block(
            program - low_blocks - high_blocks, sequence, xs[2], outs[2], None, None, products, decay_ptr, 0, 0, D, D,
            D * D, state_count, chunks, D, REVERSE, False, BLOCK,
        )  # fmt: skip


def chunk_decays(tables: DecayTables, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three decays per entry, float32: across each chunk, (b, h_kv, chunks, d); from the start of a chunk to that of
    each of its tiles, (b, h_kv, tiles, d); and from the end of each tile to that of its chunk, of the same shape."""
    tiles = tables.across_tiles.shape[2]
    per_chunk = chunk // TILE
    chunks = -(-tiles // per_chunk)
    missing = chunks * per_chunk - tiles
    by_chunk = pad(tables.across_tiles, (0, 0, 0, missing), value=1.0).unflatten(2, (chunks, per_chunk))
    products = by_chunk.cumprod(3)
    after = by_chunk.flip(3).cumprod(3).flip(3)
    one = torch.ones_like(products[:, :, :, :1])
    since = torch.cat([one, products[:, :, :, :-1]], dim=3).flatten(2, 3)
    until = torch.cat([after[:, :, :, 1:], one], dim=3).flatten(2, 3)
    return products[:, :, :, -1].contiguous(), since[:, :, :tiles].contiguous(), until[:, :, :tiles].contiguous()


def scan_pairs(
    chunks: ChunkSums, decays: Tensor, other: ChunkStates | None = None
) -> tuple[ChunkStates, Tensor | None]:
    """States at the boundaries between chunks. They overwrite the sums S of `chunks`.

    Args:
        chunks: the sums over each chunk alone, at the boundaries between chunks.
        decays: decays of each entry across each chunk, (b, h_kv, chunks, d) float32.
        other: states at the same boundaries, with all features, for inner products with the result; None: no inner
            products.

    Returns:
        the states; and the inner products by pair, Σ S_ia S'_ia + Z_ia Z'_ia over a and the entries i of the pair,
        (b, h_kv, n, d/2) float64, or None.
    """
    batch, heads, state_count, half, value_dim, dim = chunks.first_half.shape
    assert not chunks.started and chunks.first == 1
    normalizer = torch.empty_like(chunks.normalizer, dtype=chunks.dtype)
    second_columns = chunks.second_half.shape[-1]
    block = min(1024, value_dim * second_columns, dim * dim)
    programs = half * value_dim * (dim + second_columns) // block
    products, others = None, (None, None)
    if other is not None:
        assert second_columns == dim
        products = chunks.first_half.new_empty(batch, heads, state_count, programs, dtype=torch.float32)
        others = (other.first_half, other.second_half)
    launch(
        scan_pairs_kernel, ((programs + dim * dim // block) * batch * heads,),
        (chunks.first_half, chunks.second_half, chunks.normalizer), (chunks.first_half, chunks.second_half,
        normalizer), others, products, decays, value_dim, state_count, decays.shape[2], second_columns,
        D=dim, REVERSE=chunks.reverse, MULTIPLIED=other is not None, BLOCK=block, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    states = ChunkStates(chunks.first_half, chunks.second_half, normalizer, chunks.chunk)
    if other is None or products is None:
        return states, None
    by_entry = products.unflatten(3, (dim, -1)).sum(-1, dtype=torch.float64)
    by_entry += (normalizer.float() * other.normalizer.float()).sum(-1, dtype=torch.float64)
    return states, by_entry.unflatten(3, (-1, 2)).sum(-1)
