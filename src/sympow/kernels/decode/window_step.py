"""Decoding with a window: the last tokens as keys and values, folded into the state in blocks.

A step (`state_step.step_kernel`) scores the window's keys and reads the state, which has decayed as a whole since the
last fold; it writes one key and one value. A fold reads and writes the state once for all tokens of the
window: S ← γ S + Σ_j b_j φ(k_j) v_jᵀ is a matrix product for each tile of features, its left operand made from keys.

The number of tokens in the window stands in memory, where a step's last program raises it and a fold's last program
sets it to zero: a captured graph of either may be replayed at any filling.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import settle
from sympow.kernels.decode.state_step import PROGRAMS, TILE, WARPS, Division, divide_state, launch_step, workspace_size

# Keys of a window that one program scores, at least, and how many at once.
LEAST_KEYS_PER_PART = 64
BLOCK_KEYS = 32
# Features and tokens that a fold multiplies at once, and programs that it is divided among.
FOLD_ROWS = 64
FOLD_TOKENS = 32
FOLD_PROGRAMS = 2112


@triton.jit
def _split(x):
    """The leading eight bits of float32 numbers, as bfloat16, and what is left: both exact. Bits are cut off, not
    rounded, which takes no conversion."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), x - (bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def fold_window_kernel(
    kv_ptr, normalizer_ptr, keys_ptr, values_ptr, sums_ptr, count_ptr, arrivals_ptr, pairs_ptr, weight_ptr,
    features_count, dim, value_dim, capacity, parts, rows_per_part,
    POWER: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Program (sequence, part): some rows of a state, in place."""
    sequence, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    inside = columns < value_dim
    count = tl.load(count_ptr + sequence)
    sums_ptr += sequence * capacity
    keys_ptr += sequence * dim * capacity
    values_ptr += sequence * capacity * value_dim
    total = tl.load(sums_ptr + count - 1, mask=count > 0, other=0.0)
    gamma = tl.exp((total * POWER).to(tl.float32))
    first = part * rows_per_part
    for start in tl.range(first, tl.minimum(first + rows_per_part, features_count), ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = rows < features_count
        weight = tl.load(weight_ptr + rows, mask=valid, other=0.0)
        added = tl.zeros((ROWS, COLUMNS), tl.float32)
        added_normalizer = tl.zeros((ROWS,), tl.float32)
        for begin in tl.range(0, count, TOKENS):
            slots = begin + tl.arange(0, TOKENS)
            seen = slots < count
            since = total - tl.load(sums_ptr + slots, mask=seen, other=0.0)
            decay = tl.where(seen, tl.exp((since * POWER).to(tl.float32)), 0.0)
            phi = weight[:, None] * decay[None, :]
            for pair in tl.static_range(POWER // 2):
                entries = tl.load(pairs_ptr + rows * (POWER // 2) + pair, mask=valid, other=0)
                low, high = (entries & 0xFFFF) * capacity, (entries >> 16) * capacity
                low_keys = tl.load(keys_ptr + (low[:, None] + slots[None, :]), mask=seen[None, :], other=0.0)
                high_keys = tl.load(keys_ptr + (high[:, None] + slots[None, :]), mask=seen[None, :], other=0.0)
                phi *= low_keys.to(tl.float32)
                phi *= high_keys.to(tl.float32)
            values = tl.load(values_ptr + slots[:, None] * value_dim + columns[None, :],
                             mask=seen[:, None] & inside[None, :], other=0.0)  # fmt: skip
            added_normalizer += tl.sum(phi, axis=1)
            if values.dtype == tl.bfloat16:
                # Three bfloat16 numbers hold a float32 one, so the products are as exact as float32 makes them.
                most, rest = _split(phi)
                more, rest = _split(rest)
                least, rest = _split(rest)
                added = tl.dot(least, values, added)
                added = tl.dot(more, values, added)
                added = settle(tl.dot(most, values, added))
            else:
                added = tl.dot(phi, values.to(tl.float32), added, input_precision="ieee")
        # Read only now: registers for it all along would leave room for fewer programs.
        block = (sequence * features_count + rows)[:, None] * value_dim + columns[None, :]
        mask = valid[:, None] & inside[None, :]
        kv = tl.load(kv_ptr + block, mask=mask, other=0.0)
        tl.store(kv_ptr + block, kv * gamma + added, mask=mask)
        target = normalizer_ptr + sequence * features_count + rows
        normalizer = tl.load(target, mask=valid, other=0.0)
        tl.store(target, normalizer * gamma + added_normalizer, mask=valid)

    tl.debug_barrier()
    # Everybody has read the count before the last to come sets it back.
    arrived = tl.atomic_add(arrivals_ptr + sequence, 1, sem="acq_rel")
    if arrived == parts - 1:
        tl.store(arrivals_ptr + sequence, 0)
        tl.store(count_ptr + sequence, 0)


def divide_window(
    sequences: int,
    feature_count: int,
    value_dim: int,
    group: int,
    capacity: int,
    *,
    has_state: bool,
    tile: int = TILE,
    programs: int = PROGRAMS,
) -> Division:
    """How a step's work on one head is divided among programs."""
    division = Division(8, 8, 0)
    if has_state:
        division = divide_state(sequences, feature_count, value_dim, group, tile=tile, programs=programs)
    per_part = max(LEAST_KEYS_PER_PART, triton.cdiv(capacity, max(1, programs // sequences)))
    keys = triton.cdiv(per_part, BLOCK_KEYS) * BLOCK_KEYS
    return replace(division, window_parts=triton.cdiv(capacity, keys), keys_per_part=keys)


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
) -> int:
    """How many float32 numbers a step needs to pass between its programs."""
    division = divide_window(batch * heads, feature_count, value_dim, group, capacity, has_state=has_state)
    return workspace_size(batch * heads, division.parts, group, key_dim, value_dim)


def window_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    count: Tensor,
    phase: Tensor | None,
    arrivals: Tensor,
    workspace: Tensor,
    index: Tensor | None,
    weight: Tensor | None,
    power: int,
    *,
    tile: int = TILE,
    programs: int = PROGRAMS,
    warps: int = WARPS,
) -> Tensor:
    """y (b, h, e) of one token, which is put behind the window's keys.

    Args:
        q, k, v, log_gamma, beta, theta: as in `decode_step`.
        kv, normalizer: the state at the last fold, (b, h_kv, D, e) and (b, h_kv, D) float32; None: there is none.
        keys: turned keys, (b, h_kv, d, W).
        values: (b, h_kv, W, e).
        sums: running sums of log γ^(1/p) since the last fold, (b, h_kv, W) float64.
        count: how many tokens stand in the window, (b, h_kv) int32; raised by one.
        phase: μ, (b, h_kv, d/2) float64, moved on by one token; None without rotation.
        arrivals: zeros, (b, h_kv) int32, left as zeros.
        workspace: `window_workspace` numbers of float32, whatever they hold.
        index, weight: the state's features, as in `decode_step`; None without a state.
        power: p.
    """
    batch, heads, _ = k.shape
    group, feature_count = q.shape[1] // heads, 0 if weight is None else weight.shape[0]
    division = divide_window(
        batch * heads,
        feature_count,
        v.shape[-1],
        group,
        keys.shape[-1],
        has_state=kv is not None,
        tile=tile,
        programs=programs,
    )
    return launch_step(
        q, k, v, log_gamma, beta, theta, phase, kv, normalizer, index, weight, arrivals, workspace, division, power,
        keys=keys, values=values, sums=sums, count=count, phase_out=phase, block_keys=BLOCK_KEYS, warps=warps,
    )  # fmt: skip


def window_fold(
    kv: Tensor,
    normalizer: Tensor,
    keys: Tensor,
    values: Tensor,
    sums: Tensor,
    count: Tensor,
    arrivals: Tensor,
    index: Tensor,
    weight: Tensor,
    *,
    rows: int = FOLD_ROWS,
    tokens: int = FOLD_TOKENS,
    programs: int = FOLD_PROGRAMS,
    warps: int = WARPS,
) -> None:
    """Folds the window's tokens into the state, in place, and empties the window; arguments as in `window_step`."""
    batch, heads, feature_count, value_dim = kv.shape
    tiles = triton.cdiv(feature_count, rows)
    rows_per_part = rows * triton.cdiv(tiles, min(tiles, max(1, programs // (batch * heads))))
    parts = triton.cdiv(feature_count, rows_per_part)
    capacity = keys.shape[-1]
    fold_window_kernel[(batch * heads, parts)](
        kv, normalizer, keys, values, sums, count, arrivals, index.view(torch.int32), weight,
        feature_count, keys.shape[2], value_dim, capacity, parts, rows_per_part,
        POWER=index.shape[1], COLUMNS=max(16, triton.next_power_of_2(value_dim)), ROWS=rows,
        TOKENS=min(tokens, max(16, triton.next_power_of_2(capacity))), num_warps=warps, num_stages=1,
        enable_fp_fusion=True,
    )  # fmt: skip
