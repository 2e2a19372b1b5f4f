"""Scores of tokens within one block of 16, and their gradients, for a gate per rotated pair.

Within a block, decays cannot be split between queries and keys without positive exponents. So they are applied step by
step: a query visits the keys of its block from its own position backwards, and is multiplied by one more gate before
each earlier key,
    s_ij = Σ_m q_im γ_im^(1/p) ⋯ γ_{j+1,m}^(1/p) k_jm.
A product of gates is as accurate as its factors, and exactly 0 if it contains a closed gate. Gradients are computed by
Horner's scheme along the block: dq_i visits the keys of its block from the first one on,
    dq_i ← γ_j^(1/p) dq_i + W_ij k_j,    j = first of the block, …, i,
and dk_j visits its queries from the last one backwards. Both start from the contributions of all other blocks
(`backward`), so the kernels here return the complete gradients.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import power_of_two_scale, split_program_id
from sympow.kernels.launch import ceil_div, empty_aligned, launch, rows_contiguous
from sympow.kernels.pair_gates.decays import BLOCK, LARGEST_TILE, TILE, log_roots


@triton.jit
def neighbour_scores_kernel(
    q_ptr, q_stride_b, q_stride_t, q_stride_h, k_ptr, k_stride_b, k_stride_t, k_stride_h, log_gamma_ptr, scores_ptr,
    near_ptr, near_stride_b, near_stride_t, near_stride_h, length, padded, heads, pairs, tiles,
    GROUP: tl.constexpr, D: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The scores s_ij within each block of a tile, 0 for j > i, as (BLOCK, TILE): the key's position in its block, then
    the query. Also the scaled queries, decayed from the start of their block."""
    tile, sequence = split_program_id(tiles)
    batch, head = (sequence // heads).to(tl.int32), (sequence % heads).to(tl.int32)
    kv_head = head // GROUP
    first = tile * TILE
    entries = tl.arange(0, D)
    tokens = first + tl.arange(0, TILE)
    q_ptr += batch.to(tl.int64) * q_stride_b + head.to(tl.int64) * q_stride_h
    k_ptr += batch.to(tl.int64) * k_stride_b + kv_head.to(tl.int64) * k_stride_h
    pointers = q_ptr + tokens.to(tl.int64)[:, None] * q_stride_t + entries[None, :]
    q = tl.load(pointers, mask=(tokens < length)[:, None], other=0.0).to(tl.float32)
    decayed = tl.reshape(q * power_of_two_scale(q)[:, None], (TILE // BLOCK, BLOCK, D))
    starts = first + tl.arange(0, TILE // BLOCK) * BLOCK
    rows = tl.arange(0, BLOCK)[None, :]
    target = scores_ptr + sequence * BLOCK * padded + starts[:, None] + rows
    for step in tl.static_range(BLOCK):
        j = BLOCK - 1 - step
        keys = (starts + j)[:, None, None]
        k = tl.load(k_ptr + keys.to(tl.int64) * k_stride_t + entries[None, None, :], mask=keys < length, other=0.0)
        scores = tl.sum(decayed * k.to(tl.float32), axis=2)
        tl.store(target + j * padded, tl.where(rows >= j, scores, 0.0))
        roots = log_roots(
            log_gamma_ptr, batch, kv_head, keys, entries[None, None, :], length, heads // GROUP, pairs, POWER
        )
        decayed *= tl.where((rows >= j)[:, :, None], tl.exp(roots), 1.0)
    near = near_ptr + batch.to(tl.int64) * near_stride_b + head.to(tl.int64) * near_stride_h
    near += tokens.to(tl.int64)[:, None] * near_stride_t + entries[None, :]
    decayed = tl.reshape(decayed, (TILE, D)).to(near_ptr.dtype.element_ty)
    tl.store(near, decayed, mask=(tokens < length)[:, None])


@triton.jit
def finish_gradients_kernel(
    q_ptr, q_stride_b, q_stride_t, q_stride_h, k_ptr, k_stride_b, k_stride_t, k_stride_h, log_gamma_ptr, scale_ptr,
    neighbours_ptr, query_part_ptr, key_part_ptr, dq_ptr, dq_stride_b, dq_stride_t, dq_stride_h,
    dk_ptr, dk_stride_b, dk_stride_t, dk_stride_h, terms_ptr, totals_ptr, length, padded, kv_heads, pairs, tiles,
    GROUP: tl.constexpr, D: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """dq and dk of a tile of tokens; the terms of the gates' gradient, Σ (q_im dq_im) − k_im dk_im over the query heads
    and the two entries of each pair; and the sums of these terms over the tile."""
    tile, kv_sequence = split_program_id(tiles)
    batch, kv_head = (kv_sequence // kv_heads).to(tl.int32), (kv_sequence % kv_heads).to(tl.int32)
    first = tile * TILE
    entries = tl.arange(0, D)[None, None, :]
    rows = tl.arange(0, BLOCK)[None, :]
    starts = first + tl.arange(0, TILE // BLOCK) * BLOCK
    tokens = starts[:, None] + rows
    inside = (tokens < length)[:, :, None]
    places = tokens.to(tl.int64)[:, :, None]
    k_ptr += batch.to(tl.int64) * k_stride_b + kv_head.to(tl.int64) * k_stride_h
    dk_ptr += batch.to(tl.int64) * dk_stride_b + kv_head.to(tl.int64) * dk_stride_h
    dk = tl.load(key_part_ptr + (kv_sequence * length + places) * D + entries, mask=inside, other=0.0)
    terms = tl.zeros((TILE // BLOCK, BLOCK, D), tl.float32)
    for member in range(GROUP):
        sequence = kv_sequence * GROUP + member
        head = (kv_head * GROUP + member).to(tl.int64)
        weights_ptr = neighbours_ptr + sequence * BLOCK * padded
        dq = tl.load(query_part_ptr + (sequence * length + places) * D + entries, mask=inside, other=0.0)
        for j in tl.range(0, BLOCK):
            keys = (starts + j)[:, None, None]
            k = tl.load(k_ptr + keys.to(tl.int64) * k_stride_t + entries, mask=keys < length, other=0.0)
            weight = tl.load(weights_ptr + j * padded + tokens)[:, :, None]
            roots = log_roots(log_gamma_ptr, batch, kv_head, keys, entries, length, kv_heads, pairs, POWER)
            dq = dq * tl.where((rows >= j)[:, :, None], tl.exp(roots), 1.0) + weight * k.to(tl.float32)
        scale = tl.load(scale_ptr + sequence * length + tokens, mask=tokens < length, other=0.0)[:, :, None]
        source = q_ptr + batch.to(tl.int64) * q_stride_b + head * q_stride_h + places * q_stride_t
        q = tl.load(source + entries, mask=inside, other=0.0).to(tl.float32)
        dq *= POWER * scale
        terms += q * dq
        target = dq_ptr + batch.to(tl.int64) * dq_stride_b + head * dq_stride_h + places * dq_stride_t
        tl.store(target + entries, dq.to(dq_ptr.dtype.element_ty), mask=inside)
    for step in tl.range(0, BLOCK):
        i = BLOCK - 1 - step
        queries = (starts + i)[:, None, None]
        present = queries < length
        for member in range(GROUP):
            sequence = kv_sequence * GROUP + member
            head = (kv_head * GROUP + member).to(tl.int64)
            source = q_ptr + batch.to(tl.int64) * q_stride_b + head * q_stride_h + queries.to(tl.int64) * q_stride_t
            q = tl.load(source + entries, mask=present, other=0.0).to(tl.float32)
            q *= tl.load(scale_ptr + sequence * length + queries, mask=present, other=0.0)
            weights_ptr = neighbours_ptr + sequence * BLOCK * padded
            dk += tl.load(weights_ptr + rows * padded + (starts + i)[:, None])[:, :, None] * q
        # The contribution of a query to dk decays by the gates after the key, up to the query.
        roots = log_roots(log_gamma_ptr, batch, kv_head, queries, entries, length, kv_heads, pairs, POWER)
        dk *= tl.where((rows < i)[:, :, None], tl.exp(roots), 1.0)
    dk *= POWER
    k = tl.load(k_ptr + places * k_stride_t + entries, mask=inside, other=0.0).to(tl.float32)
    terms -= k * dk
    tl.store(dk_ptr + places * dk_stride_t + entries, dk.to(dk_ptr.dtype.element_ty), mask=inside)
    by_pair = tl.sum(tl.reshape(terms, (TILE, D // 2, 2)), axis=2)
    places = first + tl.arange(0, TILE)
    pair = tl.arange(0, D // 2)
    target = terms_ptr + (kv_sequence * length + places.to(tl.int64)[:, None]) * (D // 2) + pair[None, :]
    tl.store(target, by_pair, mask=(places < length)[:, None])
    total = tl.sum(by_pair.to(tl.float64), axis=0)
    tl.store(totals_ptr + (kv_sequence * tiles + tile) * (D // 2) + pair, total)


def neighbour_scores(q: Tensor, k: Tensor, log_gamma: Tensor, power: int, *, warps: int = 2) -> tuple[Tensor, Tensor]:
    """Scores of scaled queries with the keys of their block; and the scaled queries, decayed from the start of their
    block (the same as from `decays.decay_queries`).

    The scores are (b, h, BLOCK, ≥ t) float32, indexed by the key's position in its block, then by the query. They are 0
    for keys after the query and past the last token.
    """
    batch, length, heads, dim = q.shape
    padded = ceil_div(length, LARGEST_TILE) * LARGEST_TILE
    scores = q.new_empty(batch, heads, BLOCK, padded, dtype=torch.float32)
    near = empty_aligned(q, *q.shape)
    q, k = rows_contiguous(q), rows_contiguous(k)
    tiles = padded // TILE
    launch(
        neighbour_scores_kernel, (tiles * batch * heads,),
        q, *q.stride()[:3], k, *k.stride()[:3], log_gamma, scores, near, *near.stride()[:3], length,
        padded, heads, log_gamma.shape[-1], tiles,
        GROUP=heads // k.shape[2], D=dim, POWER=power, BLOCK=BLOCK, TILE=TILE, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    return scores, near


def finish_gradients(
    q: Tensor, k: Tensor, log_gamma: Tensor, scale: Tensor, neighbours: Tensor, query_part: Tensor, key_part: Tensor,
    power: int, *, warps: int = 8,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq (b, t, h, d), dk (b, t, h_kv, d), and the terms of the gates' gradient: p dG_i by pair, (b, h_kv, t, d/2)
    float32, and their sums over tiles, (b, h_kv, tiles, d/2) float64.

    Args:
        q, k, log_gamma: the inputs.
        scale: the queries' scales, (b, h, t) float32.
        neighbours: W_ij (see `backward`) within blocks, indexed as the scores of `neighbour_scores`.
        query_part: Σ_j W_ij k_j over keys of earlier blocks, decayed to the start of the query's block, (b, h, t, d)
            float32.
        key_part: Σ_i W_ij q_i over queries of later blocks, decayed from the end of the key's block, (b, h_kv, t, d)
            float32.
    """
    batch, length, kv_heads, dim = k.shape
    dq, dk = empty_aligned(q, *q.shape), empty_aligned(k, *k.shape)
    tiles = ceil_div(length, TILE)
    terms = q.new_empty(batch, kv_heads, length, dim // 2, dtype=torch.float32)
    totals = q.new_empty(batch, kv_heads, tiles, dim // 2, dtype=torch.float64)
    q, k = rows_contiguous(q), rows_contiguous(k)
    launch(
        finish_gradients_kernel, (tiles * batch * kv_heads,),
        q, *q.stride()[:3], k, *k.stride()[:3], log_gamma, scale, neighbours, query_part, key_part,
        dq, *dq.stride()[:3], dk, *dk.stride()[:3], terms, totals, length, neighbours.shape[-1], kv_heads,
        log_gamma.shape[-1], tiles,
        GROUP=q.shape[2] // kv_heads, D=dim, POWER=power, BLOCK=BLOCK, TILE=TILE, num_warps=warps,
        enable_fp_fusion=True,
    )  # fmt: skip
    return dq, dk, terms, totals
