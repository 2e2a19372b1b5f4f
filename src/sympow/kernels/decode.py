"""One token for every sequence of a batch: rotate, decay, update, query and normalise in one kernel.

A program owns a slice of the value columns of one key/value head and walks once over the features: it reads each row of
the state, decays it, sums φ(q) S for every query head that reads this state, adds φ(k) v and writes it. Slices of value
columns are independent, so nothing is added up across programs; each sums the normaliser for itself, which is small
beside its slice. What moves is the state, read once and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import even_power, or_one
from sympow.kernels.gates import CLOSED_GATE
from sympow.kernels.rotation import TURN, cos_sin
from sympow.kernels.scaling import power_of_two_scale

EPSILON = tl.constexpr(2.0**-23)


@triton.jit
def _features(x, index_ptr, weight, rows, valid, POWER: tl.constexpr):
    """φ at some rows of the feature list: products of POWER entries of x, times their weights."""
    product = weight
    for slot in tl.static_range(POWER):
        entry = tl.load(index_ptr + rows * POWER + slot, mask=valid, other=0).to(tl.int32)
        product = product * tl.gather(x, entry, axis=0)
    return product


@triton.jit
def _turned(pointer, cos, sin, mask, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """A vector of DIM entries, turned by the phase: float32."""
    x = tl.load(pointer + tl.arange(0, DIM), mask=mask, other=0.0).to(tl.float32)
    if ROTATED:
        even, odd = tl.split(tl.reshape(x, (DIM // 2, 2)))
        x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (DIM,))
    return x


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, log_gamma_ptr, beta_ptr, theta_ptr, phase_ptr, kv_ptr, normalizer_ptr,
    index_ptr, weight_ptr, y_ptr, phase_out_ptr, kv_out_ptr, normalizer_out_ptr,
    heads, features, dim, value_dim, q_batch, q_head, k_batch, k_head, v_batch, v_head,
    GROUP: tl.constexpr, POWER: tl.constexpr, DIM: tl.constexpr, GATED: tl.constexpr, ROTATED: tl.constexpr,
    SCALED: tl.constexpr, PER_PAIR: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    sequence, slice_ = tl.program_id(0).to(tl.int64), tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    columns = slice_ * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < value_dim

    cos, sin = 1.0, 0.0
    if ROTATED:
        pairs = tl.arange(0, DIM // 2)
        known = pairs < dim // 2
        at = sequence * (dim // 2) + pairs
        turns = tl.load(theta_ptr + pairs, mask=known, other=0.0).to(tl.float64) / TURN
        if SCALED:
            if PER_PAIR:
                turns *= tl.load(beta_ptr + at, mask=known, other=0.0).to(tl.float64)
            else:
                turns *= tl.load(beta_ptr + sequence).to(tl.float64)
        turns += tl.load(phase_ptr + at, mask=known, other=0.0) / TURN
        if slice_ == 0:
            tl.store(phase_out_ptr + at, (turns - tl.floor(turns + 0.5)) * TURN, mask=known)
        cos, sin = cos_sin(turns)

    gamma = 1.0
    if GATED:
        gamma = tl.exp(tl.maximum(tl.load(log_gamma_ptr + sequence).to(tl.float32), CLOSED_GATE))

    entries = tl.arange(0, DIM)
    key = _turned(k_ptr + batch * k_batch + head * k_head, cos, sin, entries < dim, DIM, ROTATED)
    value = tl.load(v_ptr + batch * v_batch + head * v_head + columns, mask=inside, other=0.0).to(tl.float32)
    queries = ()
    for member in tl.static_range(GROUP):
        source = q_ptr + batch * q_batch + (head * GROUP + member) * q_head
        query = _turned(source, cos, sin, entries < dim, DIM, ROTATED)
        queries = queries + (query * power_of_two_scale(query[None, :]),)

    accs = (tl.zeros((ROWS, COLUMNS), tl.float32),) * GROUP
    weights = (tl.zeros((ROWS,), tl.float32),) * GROUP
    sizes = (tl.zeros((ROWS,), tl.float32),) * GROUP
    for start in tl.range(0, features, ROWS):
        rows = start + tl.arange(0, ROWS)
        valid = rows < features
        block = (sequence * features + rows)[:, None] * value_dim + columns[None, :]
        mask = valid[:, None] & inside[None, :]
        kv = tl.load(kv_ptr + block, mask=mask, other=0.0) * gamma
        normalizer = tl.load(normalizer_ptr + sequence * features + rows, mask=valid, other=0.0) * gamma
        weight = tl.load(weight_ptr + rows, mask=valid, other=0.0)
        next_accs = ()
        next_weights = ()
        next_sizes = ()
        for member in tl.static_range(GROUP):
            phi_query = _features(queries[member], index_ptr, weight, rows, valid, POWER)
            next_accs = next_accs + (accs[member] + phi_query[:, None] * kv,)
            next_weights = next_weights + (weights[member] + phi_query * normalizer,)
            next_sizes = next_sizes + (sizes[member] + tl.abs(phi_query * normalizer),)
        accs = next_accs
        weights = next_weights
        sizes = next_sizes
        phi_key = _features(key, index_ptr, weight, rows, valid, POWER)
        tl.store(kv_out_ptr + block, kv + phi_key[:, None] * value[None, :], mask=mask)
        if slice_ == 0:
            tl.store(normalizer_out_ptr + sequence * features + rows, normalizer + phi_key, mask=valid)

    for member in tl.static_range(GROUP):
        # The past through its state, unless that is nothing but rounding; the token itself by its score.
        past = tl.sum(weights[member], axis=0)
        rounding = past < EPSILON * tl.sum(sizes[member], axis=0)
        score = even_power(tl.sum(queries[member] * key, axis=0), POWER)
        total = tl.where(rounding, 0.0, past) + score
        sums = tl.where(rounding, 0.0, tl.sum(accs[member], axis=0)) + score * value
        y = tl.where(total == 0, 0.0, sums / or_one(total))
        target = y_ptr + (sequence * GROUP + member) * value_dim + columns
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=inside)


def decode_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor,
    normalizer: Tensor,
    phase: Tensor | None,
    index: Tensor,
    weight: Tensor,
    *,
    kv_out: Tensor | None = None,
    rows: int = 64,
    columns: int = 32,
    warps: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """y (b, h, e), and the state after one token.

    Args:
        q, k, v: (b, h, d), (b, h_kv, d), (b, h_kv, e), last axis contiguous.
        log_gamma: (b, h_kv) contiguous, or None.
        beta: (b, h_kv) or (b, h_kv, d/2) contiguous, or None.
        theta: (d/2,), or None for no rotation.
        kv, normalizer: (b, h_kv, D, e) and (b, h_kv, D), float32, contiguous.
        phase: (b, h_kv, d/2) float64 contiguous, or None without rotation.
        index: which entries each feature multiplies, (D, p) int16.
        weight: √ of the features' multinomial coefficients, (D,) float32.
        kv_out: where to write the new kv; may be kv itself. None: a new tensor. The new normalizer is always a new one,
            since every slice of columns reads the old.
    """
    batch, heads, features, value_dim = kv.shape
    dim = k.shape[-1]
    y = v.new_empty(batch, q.shape[1], value_dim)
    kv_out = torch.empty_like(kv) if kv_out is None else kv_out
    normalizer_out = torch.empty_like(normalizer)
    phase_out = None if phase is None else torch.empty_like(phase)
    columns = min(columns, triton.next_power_of_2(value_dim))
    _decode_kernel[(batch * heads, triton.cdiv(value_dim, columns))](
        q, k, v, log_gamma, beta, theta, phase, kv, normalizer, index, weight, y, phase_out, kv_out, normalizer_out,
        heads, features, dim, value_dim, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        GROUP=q.shape[1] // heads, POWER=index.shape[1], DIM=triton.next_power_of_2(dim), GATED=log_gamma is not None,
        ROTATED=theta is not None, SCALED=beta is not None, PER_PAIR=beta is not None and beta.ndim == 3,
        ROWS=rows, COLUMNS=columns, num_warps=warps,
    )  # fmt: skip
    return y, kv_out, normalizer_out, phase_out
