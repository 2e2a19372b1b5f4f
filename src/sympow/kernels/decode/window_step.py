"""Decoding with a window: recent tokens are kept as keys and values, and folded into the state in blocks.

A step (`state_step.step_kernel`) scores the window's keys and reads the state, which has decayed as a whole since the
last fold; it writes one key and one value. A fold reads and writes the state once for all tokens of the window: S ← γ S
+ Σ_j b_j φ(k_j) v_jᵀ is a matrix product for each tile of features, its left operand computed from keys.

Steps can read a copy of S in 16 bits, which is half the traffic: float16 numbers, each row of S (one feature) scaled by
a power of two so that its largest entry lies between 2^14 and 2^15. A fold, which reads and writes S in float32 anyway,
writes the copy, too. Of two 16-bit formats with equal traffic this one rounds eight times finer than bfloat16, and
entries down to 2^-28 of the largest in their row keep all digits. Z stays in float32.

The number of tokens in the window is in device memory, where the last CTA of a step increments it and the last CTA of a
fold sets it to zero: a captured CUDA graph of either can be replayed at any fill level.

`sympow.kernels.decode.reference` holds the plain PyTorch references of both.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import wait_for_mma
from sympow.kernels.decode.state_step import (
    FEW_SEQUENCES,
    READ_PROGRAMS,
    READ_PROGRAMS_OF_FEW,
    READ_STAGES,
    READ_TILE,
    WARPS,
    WIDE_GROUP,
    WIDE_GROUP_PROGRAMS,
    Outputs,
    RecentTokens,
    Splits,
    StateArguments,
    Token,
    empty_output,
    launch_step,
    split_state,
    workspace_sizes,
)
from sympow.kernels.device_limits import register_limit
from sympow.kernels.launch import ceil_div, launch

# The fewest keys of a window that one CTA scores, and how many it scores at once. Beside a state they are fewer: all
# CTAs of a launch have the registers of the most demanding part, and with fewer registers more of them run at once.
MIN_KEYS_PER_SPLIT = 64
BLOCK_KEYS = 32
BLOCK_KEYS_BESIDE_STATE = 16
# Features and tokens that a fold multiplies at once, and CTAs that it is split among.
FOLD_ROWS = 64
FOLD_TOKENS = 32
FOLD_PROGRAMS = 2112
# Of a thread in a fold of values up to 64 wide: a fourth CTA on a multiprocessor, without spills.
FOLD_REGISTERS = 128


@triton.jit
def _split(x):
    """The leading eight bits of float32 numbers as bfloat16, and the remainder: both exact. Truncated, not rounded,
    which needs no conversion."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _row_scales(kv):
    """Powers of two that bring the largest entry of each row to at least 2^14 and below 2^15, and their inverses."""
    exponent = tl.maximum((tl.max(tl.abs(kv), axis=1).to(tl.int32, bitcast=True) >> 23) - 14, 1)
    return ((254 - exponent) << 23).to(tl.float32, bitcast=True), (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def fold_window_kernel(
    kv_ptr, normalizer_ptr, copy_ptr, scale_ptr, keys_ptr, values_ptr, held_decay_ptr, count_ptr, arrivals_ptr,
    pairs_ptr, feature_weights_ptr, features_count, dim, value_dim, capacity, splits, rows_per_split,
    POWER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """CTA (sequence, split): some rows of a state, in place. COPY: write the 16-bit copy, too."""
    sequence, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    inside = columns < value_dim
    count = tl.load(count_ptr + sequence)
    held_decay_ptr += sequence * capacity
    keys_ptr += sequence * dim * capacity
    values_ptr += sequence * capacity * value_dim
    total = tl.load(held_decay_ptr + count - 1, mask=count > 0, other=0.0)
    gamma = tl.exp((total * POWER).to(tl.float32))
    first = split * rows_per_split
    # Without tokens to fold, the state stays as it is, and nothing is read or written.
    last = tl.where(count > 0, tl.minimum(first + rows_per_split, features_count), first)
    for start in tl.range(first, last, ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = rows < features_count
        feature_weights = tl.load(feature_weights_ptr + rows, mask=valid, other=0.0)
        added = tl.zeros((ROWS, COLUMNS), tl.float32)
        added_normalizer = tl.zeros((ROWS,), tl.float32)
        for begin in tl.range(0, count, TOKENS):
            positions = begin + tl.arange(0, TOKENS)
            seen = positions < count
            since = total - tl.load(held_decay_ptr + positions, mask=seen, other=0.0)
            decay = tl.where(seen, tl.exp((since * POWER).to(tl.float32)), 0.0)
            phi = feature_weights[:, None] * decay[None, :]
            for pair in tl.static_range(POWER // 2):
                entries = tl.load(pairs_ptr + rows * (POWER // 2) + pair, mask=valid, other=0)
                one, other = (entries & 0xFFFF) * capacity, (entries >> 16) * capacity
                one_keys = tl.load(keys_ptr + (one[:, None] + positions[None, :]), mask=seen[None, :], other=0.0)
                other_keys = tl.load(keys_ptr + (other[:, None] + positions[None, :]), mask=seen[None, :], other=0.0)
                phi *= one_keys.to(tl.float32)
                phi *= other_keys.to(tl.float32)
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
        kv = tl.load(kv_ptr + block, mask=mask, other=0.0) * gamma + added
        tl.store(kv_ptr + block, kv, mask=mask)
        target = sequence * features_count + rows
        if COPY:
            factor, scale = _row_scales(kv)
            tl.store(copy_ptr + block, (kv * factor[:, None]).to(tl.float16), mask=mask)
            tl.store(scale_ptr + target, scale, mask=valid)
        normalizer = tl.load(normalizer_ptr + target, mask=valid, other=0.0)
        tl.store(normalizer_ptr + target, normalizer * gamma + added_normalizer, mask=valid)

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
    copied: bool = False,
    tile: int | None = None,
    programs: int | None = None,
) -> Splits:
    """How a step's work on one head is split among CTAs; `copied`: the state is read as a 16-bit copy."""
    tile = tile or (READ_TILE if copied else READ_TILE // 2)
    if programs is None:
        programs = READ_PROGRAMS_OF_FEW if sequences < FEW_SEQUENCES else READ_PROGRAMS
        if group * triton.next_power_of_2(value_dim) > WIDE_GROUP:
            programs = WIDE_GROUP_PROGRAMS
    splits = Splits(8, 8, 0)
    if has_state:
        # Tiles are small: four query heads have registers for their partial sums.
        splits = split_state(
            sequences, feature_count, value_dim, ceil_div(group, 4), tile=tile, programs=programs
        )  # fmt: skip
    per_split = max(MIN_KEYS_PER_SPLIT, ceil_div(capacity, max(1, programs // sequences)))
    keys = ceil_div(per_split, BLOCK_KEYS) * BLOCK_KEYS
    return replace(splits, window_splits=ceil_div(capacity, keys), keys_per_split=keys)


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
    copied: bool = False,
    split_batch: int = 0,
) -> int:
    """How many float32 numbers the CTAs of a step exchange; `split_batch` as in `window_step`."""
    sequences = (split_batch or batch) * heads
    splits = split_window(sequences, feature_count, value_dim, group, capacity, has_state=has_state, copied=copied)
    return sum(workspace_sizes(batch * heads, splits, group, key_dim, value_dim, update=False))


def window_step(
    token: Token,
    state: StateArguments,
    window: RecentTokens,
    arrivals: Tensor,
    workspace: Tensor,
    power: int,
    split_batch: int = 0,
    *,
    tile: int | None = None,
    programs: int | None = None,
    warps: int = WARPS,
    stages: int | None = None,
) -> Tensor:
    """y (b, h, e) of one token, which is appended to the window; `token.phase` is updated in place.

    Args:
        state: the state at the last fold, as in `decode_step`, or with `scale` its 16-bit copy as `kv`; its fields None
            if there is none.
        window: rotated keys (b, h_kv, d, W); values (b, h_kv, W, e); running sums of log γ^(1/p) since the last fold,
            (b, h_kv, W) float64; and the number of tokens in the window, (b, h_kv) int32, which is incremented.
        arrivals: zeros, (b, h_kv) int32, left as zeros.
        workspace: `window_workspace` numbers of float32, uninitialized.
        power: p.
        split_batch: the batch by whose size sums are split among CTAs, which determines their rounding; 0: this one.
        tile, programs, warps, stages: how the state is split, and how many tiles are loaded ahead; None: as measured
            best.
    """
    batch, heads, _ = token.k.shape
    copied = state.scale is not None
    splits = split_window(
        (split_batch or batch) * heads,
        0 if state.feature_weights is None else state.feature_weights.shape[0],
        token.v.shape[-1],
        token.q.shape[1] // heads,
        window.k.shape[-1],
        has_state=state.kv is not None,
        copied=copied,
        tile=tile,
        programs=programs,
    )
    out = Outputs(empty_output(token), token.phase)
    block_keys = BLOCK_KEYS
    if state.kv is not None:
        sums = token.q.shape[1] // heads * triton.next_power_of_2(token.v.shape[-1])  # for each key of a block
        block_keys = max(8, BLOCK_KEYS_BESIDE_STATE // ceil_div(sums, 256))
    return launch_step(
        token, state, window, out, arrivals, workspace, splits, power, block_keys=block_keys, warps=warps,
        stages=stages or READ_STAGES,
    )  # fmt: skip


def window_fold(
    state: StateArguments,
    window: RecentTokens,
    arrivals: Tensor,
    copy: Tensor | None = None,
    *,
    rows: int = FOLD_ROWS,
    tokens: int = FOLD_TOKENS,
    programs: int = FOLD_PROGRAMS,
    warps: int = WARPS,
) -> None:
    """Folds the window's tokens into the state, in place, and empties the window.

    Args:
        state: as in `decode_step`; with `copy`, `scale` is written, too.
        window, arrivals: as in `window_step`.
        copy: where to write the state in 16 bits, (b, h_kv, D, e) float16; None: nowhere.
    """
    batch, heads, feature_count, value_dim = state.kv.shape
    tiles = ceil_div(feature_count, rows)
    rows_per_split = rows * ceil_div(tiles, min(tiles, max(1, programs // (batch * heads))))
    splits = ceil_div(feature_count, rows_per_split)
    _, _, dim, capacity = window.k.shape
    launch(
        fold_window_kernel, (batch * heads, splits),
        state.kv, state.normalizer, copy, state.scale, *window, arrivals, state.pairs.view(torch.int32),
        state.feature_weights, feature_count, dim, value_dim, capacity, splits, rows_per_split,
        POWER=state.pairs.shape[1], COLUMNS=max(16, triton.next_power_of_2(value_dim)), ROWS=rows,
        TOKENS=min(tokens, max(16, triton.next_power_of_2(capacity))), COPY=copy is not None, num_warps=warps,
        num_stages=1, **register_limit(FOLD_REGISTERS if value_dim <= 64 else None), enable_fp_fusion=True,
    )  # fmt: skip
