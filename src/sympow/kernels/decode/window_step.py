"""Decoding with a window: recent tokens are kept as keys and values, and folded into the state in blocks.

A step (`state_step.step_kernel`) scores the window's keys and reads the state, which has decayed as a whole since the
last fold; it writes one key and one value. A fold reads and writes the state once for all tokens of the window: S ← γ S
+ Σ_j b_j φ(k_j) v_jᵀ is a matrix product for each tile of features, its left operand computed from keys.

The number of tokens in the window is in device memory, where the last CTA of a step increments it and the last CTA of a
fold sets it to zero: a captured CUDA graph of either can be replayed at any fill level.

`sympow.kernels.decode.reference` holds the plain PyTorch twins of both.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import wait_for_mma
from sympow.kernels.decode.state_step import (
    PROGRAMS,
    TILE,
    WARPS,
    Outputs,
    RecentTokens,
    Splits,
    StateArguments,
    Token,
    empty_output,
    launch_step,
    split_state,
    workspace_size,
)

# The fewest keys of a window that one CTA scores, and how many it scores at once.
MIN_KEYS_PER_SPLIT = 64
BLOCK_KEYS = 32
# Features and tokens that a fold multiplies at once, and CTAs that it is split among.
FOLD_ROWS = 64
FOLD_TOKENS = 32
FOLD_PROGRAMS = 2112


@triton.jit
def _split(x):
    """The leading eight bits of float32 numbers as bfloat16, and the remainder: both exact. Truncated, not rounded,
    which needs no conversion."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def fold_window_kernel(
    kv_ptr, normalizer_ptr, keys_ptr, values_ptr, sums_ptr, count_ptr, arrivals_ptr, pairs_ptr, weight_ptr,
    features_count, dim, value_dim, capacity, splits, rows_per_split,
    POWER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """CTA (sequence, split): some rows of a state, in place."""
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    inside = columns < value_dim
    count = tl.load(count_ptr + sequence)
    sums_ptr += sequence * capacity
    keys_ptr += sequence * dim * capacity
    values_ptr += sequence * capacity * value_dim
    total = tl.load(sums_ptr + count - 1, mask=count > 0, other=0.0)
    gamma = tl.exp((total * POWER).to(tl.float32))
    first = split * rows_per_split
    # Without tokens to fold, the state stays as it is, and nothing is read or written.
    last = tl.where(count > 0, tl.minimum(first + rows_per_split, features_count), first)
    for start in tl.range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = rows < features_count
        weight = tl.load(weight_ptr + rows, mask=valid, other=0.0)
        added = tl.zeros((ROWS, COLUMNS), tl.float32)
        added_normalizer = tl.zeros((ROWS,), tl.float32)
        for begin in tl.range(0, count, TOKENS):
            positions = begin + tl.arange(0, TOKENS)
            seen = positions < count
            since = total - tl.load(sums_ptr + positions, mask=seen, other=0.0)
            decay = tl.where(seen, tl.exp((since * POWER).to(tl.float32)), 0.0)
            phi = weight[:, None] * decay[None, :]
            for pair in tl.static_range(POWER // 2):
                entries = tl.load(pairs_ptr + rows * (POWER // 2) + pair, mask=valid, other=0)
                low, high = (entries & 0xFFFF) * capacity, (entries >> 16) * capacity
                low_keys = tl.load(keys_ptr + (low[:, None] + positions[None, :]), mask=seen[None, :], other=0.0)
                high_keys = tl.load(keys_ptr + (high[:, None] + positions[None, :]), mask=seen[None, :], other=0.0)
                phi *= low_keys.to(tl.float32)
                phi *= high_keys.to(tl.float32)
            values = tl.load(values_ptr + positions[:, None] * value_dim + columns[None, :],
                             mask=seen[:, None] & inside[None, :], other=0.0)  # fmt: skip
            added_normalizer += tl.sum(phi, axis=1)
            if values.dtype == tl.bfloat16:
                # Three bfloat16 numbers represent a float32 one exactly, so the products are as accurate as in float32.
                high_bits, rest = _split(phi)
                middle_bits, rest = _split(rest)
                low_bits, rest = _split(rest)
                added = tl.dot(low_bits, values, added)
                added = tl.dot(middle_bits, values, added)
                added = wait_for_mma(tl.dot(high_bits, values, added))
            else:
                added = tl.dot(phi, values.to(tl.float32), added, input_precision="ieee")
        # Loaded only now: kept in registers all along, it would let fewer CTAs run at once.
        block = (sequence * features_count + rows)[:, None] * value_dim + columns[None, :]
        mask = valid[:, None] & inside[None, :]
        kv = tl.load(kv_ptr + block, mask=mask, other=0.0)
        tl.store(kv_ptr + block, kv * gamma + added, mask=mask)
        target = normalizer_ptr + sequence * features_count + rows
        normalizer = tl.load(target, mask=valid, other=0.0)
        tl.store(target, normalizer * gamma + added_normalizer, mask=valid)

    tl.debug_barrier()
    # All CTAs have read the count before the last one resets it.
    arrived = tl.atomic_add(arrivals_ptr + sequence, 1, sem="acq_rel")
    if arrived == splits - 1:
        tl.store(arrivals_ptr + sequence, 0)
        tl.store(count_ptr + sequence, 0)


def split_window(
    sequences: int,
    feature_count: int,
    value_dim: int,
    group: int,
    capacity: int,
    *,
    has_state: bool,
    tile: int = TILE,
    programs: int = PROGRAMS,
) -> Splits:
    """How a step's work on one head is split among CTAs."""
    splits = Splits(8, 8, 0)
    if has_state:
        splits = split_state(sequences, feature_count, value_dim, group, tile=tile, programs=programs)
    per_split = max(MIN_KEYS_PER_SPLIT, triton.cdiv(capacity, max(1, programs // sequences)))
    keys = triton.cdiv(per_split, BLOCK_KEYS) * BLOCK_KEYS
    return replace(splits, window_splits=triton.cdiv(capacity, keys), keys_per_split=keys)


def window_workspace(
    batch: int,
    heads: int,
    group: int,
    key_dim: int,
    value_dim: int,
    feature_count: int,
    capacity: int,
    *,
    has_state: bool,
    split_batch: int = 0,
) -> int:
    """How many float32 numbers the CTAs of a step exchange; `split_batch` as in `window_step`."""
    splits = split_window(
        (split_batch or batch) * heads, feature_count, value_dim, group, capacity, has_state=has_state
    )
    return workspace_size(batch * heads, splits.count, group, key_dim, value_dim)


def window_step(
    token: Token,
    state: StateArguments,
    window: RecentTokens,
    arrivals: Tensor,
    workspace: Tensor,
    power: int,
    split_batch: int = 0,
    *,
    tile: int = TILE,
    programs: int = PROGRAMS,
    warps: int = WARPS,
) -> Tensor:
    """y (b, h, e) of one token, which is appended to the window; `token.phase` is updated in place.

    Args:
        state: the state at the last fold, as in `decode_step`; its fields None if there is none.
        window: rotated keys (b, h_kv, d, W); values (b, h_kv, W, e); running sums of log γ^(1/p) since the last fold,
            (b, h_kv, W) float64; and the number of tokens in the window, (b, h_kv) int32, which is incremented.
        arrivals: zeros, (b, h_kv) int32, left as zeros.
        workspace: `window_workspace` numbers of float32, uninitialised.
        power: p.
        split_batch: the batch by whose size sums are split among CTAs, which determines their rounding; 0: this one.
    """
    batch, heads, _ = token.k.shape
    splits = split_window(
        (split_batch or batch) * heads,
        0 if state.weight is None else state.weight.shape[0],
        token.v.shape[-1],
        token.q.shape[1] // heads,
        window.k.shape[-1],
        has_state=state.kv is not None,
        tile=tile,
        programs=programs,
    )
    out = Outputs(empty_output(token), token.phase)
    return launch_step(
        token, state, window, out, arrivals, workspace, splits, power, block_keys=BLOCK_KEYS, warps=warps
    )  # fmt: skip


def window_fold(
    state: StateArguments,
    window: RecentTokens,
    arrivals: Tensor,
    *,
    rows: int = FOLD_ROWS,
    tokens: int = FOLD_TOKENS,
    programs: int = FOLD_PROGRAMS,
    warps: int = WARPS,
) -> None:
    """Folds the window's tokens into the state, in place, and empties the window; arguments as in `window_step`."""
    batch, heads, feature_count, value_dim = state.kv.shape
    tiles = triton.cdiv(feature_count, rows)
    rows_per_split = rows * triton.cdiv(tiles, min(tiles, max(1, programs // (batch * heads))))
    splits = triton.cdiv(feature_count, rows_per_split)
    _, _, dim, capacity = window.k.shape
    fold_window_kernel[(batch * heads, splits)](
        state.kv, state.normalizer, *window, arrivals, state.pairs.view(torch.int32), state.weight,
        feature_count, dim, value_dim, capacity, splits, rows_per_split,
        POWER=state.pairs.shape[1], COLUMNS=max(16, triton.next_power_of_2(value_dim)), ROWS=rows,
        TOKENS=min(tokens, max(16, triton.next_power_of_2(capacity))), num_warps=warps, num_stages=1,
        enable_fp_fusion=True,
    )  # fmt: skip
