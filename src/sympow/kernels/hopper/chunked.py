"""The chunked form on Hopper for heads of 128, p = 2: products with the states of chunks, then attention inside chunks.

Each product with states (`state_products`) is a kernel of its own, whose float32 result is where the kernels of
`forward` and `backward` start to add up. Writing and reading it costs a few per cent of a product; in return
each kernel has the registers to itself that its products need.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.attention.forward import query_normalizer
from sympow.kernels.common import scale_queries, split_program_id
from sympow.kernels.hopper import backward, forward
from sympow.kernels.hopper.state_products import gradient_states, query_states
from sympow.kernels.launch import blocks_of, ceil_div, flat_grid, head_major, launch
from sympow.kernels.running_sums import Gates
from sympow.kernels.states.quadratic import ChunkStates


@triton.jit
def query_normalizer_kernel(
    q_desc, normalizer_desc, state_share_ptr, length, heads, tiles, chunk, state_count, first_boundary,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """φ(q) Z for a tile of queries, 0 in rows that see no state."""
    tile, sequence = split_program_id(tiles)
    batch, head = sequence // heads, sequence % heads
    first = tile * ROWS
    rows = first + tl.arange(0, ROWS)
    denominator = tl.zeros((ROWS,), tl.float32)
    boundary = first // chunk
    if boundary >= first_boundary:
        q = q_desc.load([batch.to(tl.int32), head.to(tl.int32), first, 0]).reshape(ROWS, D)
        state = ((batch * heads + head) // GROUP * state_count + boundary - first_boundary).to(tl.int32)
        found, unseen = query_normalizer(q, normalizer_desc.load([state, 0, 0]).reshape(D, D), "tf32")
        denominator = tl.where(unseen, 0.0, found)
    tl.store(state_share_ptr + sequence * length + rows, denominator, mask=rows < length)


def query_normalizers(q: Tensor, states: ChunkStates, rows: int = 128) -> Tensor:
    """φ(q) Z of each query and the state at the start of its chunk, 0 where it sees none: (b, h, t) float32.

    Args:
        q: as scaled by `scale_queries`, (b, t, h, d).
    """
    batch, length, heads, dim = q.shape
    state_share = q.new_empty(batch, heads, length, dtype=torch.float32)
    tiles = ceil_div(length, rows)
    launch(
        query_normalizer_kernel, flat_grid(tiles, batch * heads),
        head_major(q, (rows, dim)), blocks_of(states.normalizer.flatten(0, 2), [1, dim, dim]), state_share,
        length, heads, tiles, states.chunk, states.low.shape[2], states.first,
        GROUP=heads // states.low.shape[1], D=dim, ROWS=rows, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip
    return state_share


def attend(q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, states: ChunkStates) -> tuple[Tensor, Tensor, Tensor]:
    """y (b, t, h, e), the rows' denominators and φ(q) Z, (b, h, t) float32, as `attention.forward.attend` with
    states."""
    q, _ = scale_queries(q)
    state_share = query_normalizers(q, states)
    y, denominator = forward.attend(
        q,
        k,
        v,
        2,
        gates,
        chunk=states.chunk,
        first_boundary=states.first,
        state_share=state_share,
        state=query_states(q, states),
    )
    return y, denominator, state_share


def query_gradient(
    q: Tensor, scale: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor,
    gates: Gates | None, states: ChunkStates, state_share: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dq (b, t, h, d) and q_i · dq_i (b, h, t), as `attention.backward.query_gradient` with states."""
    return backward.query_gradient(
        q, scale, k, v, dy, minus_delta, 2, gates, chunk=states.chunk, first_boundary=states.first,
        state=gradient_states(q, dy, states, minus_delta, state_share),
    )  # fmt: skip


def key_gradient(
    q: Tensor, k: Tensor, v: Tensor, dy: Tensor, minus_delta: Tensor,
    gates: Gates | None, reverse: ChunkStates,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dk (b, t, h_kv, d), dv (b, t, h_kv, e) and k_j · dk_j (b, h_kv, t), as `attention.backward.key_gradient` with
    states.

    Args:
        reverse: the sums over later queries, D, at the chunk boundaries.
    """
    return backward.key_gradient(
        q, k, v, dy, minus_delta, 2, gates, chunk=reverse.chunk,
        last_boundary=reverse.first + reverse.low.shape[2] - 1,
        states=(gradient_states(k, v, reverse, keys=True), query_states(k, reverse, keys=True)),
    )  # fmt: skip
