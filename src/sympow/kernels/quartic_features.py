"""Products of two entries of queries and keys, and the way back from their gradients.

Tokens of both kinds are counted within the chunks that take part: queries from the second chunk on, keys up to the last
but one. A key of the s-th chunk and a query of the s-th chunk after the first then share the boundary s, the end of
chunk s, and both are decayed to it: by exp(G_R − G_j) and exp(G_i − G_R).

The token axis is padded with zeros to a multiple of `ROWS`, so that no kernel needs a mask to read features.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import dot_precision
from sympow.kernels.quartic_layout import PairLists

# Tokens in a tile of the kernels that query.
ROWS = 128
FEATURE_TOKENS = 64
FEATURE_COLUMNS = 64


@dataclass(frozen=True)
class PairFeatures:
    """What products read of queries or keys.

    Attributes:
        inner: x_a x_b times the token's decay, (b, h, ≥ t, inner columns).
        outer: x_i x_j, (b, h, outer columns, ≥ t).
    """

    inner: Tensor
    outer: Tensor


@dataclass(frozen=True)
class PairGradients:
    """Gradients of `PairFeatures`: inner (b, h, inner columns, ≥ t) and outer (b, h, outer columns, ≥ t)."""

    inner: Tensor
    outer: Tensor


@triton.jit
def _boundary_decay(sums_ptr, sequence, tokens, first_token, length, time, chunk, GATED: tl.constexpr):
    """exp(−|G_i − G_R|) with R the end of chunk s; tokens are counted from `first_token` on, `time` in the whole."""
    decay = tl.full(tokens.shape, 1.0, tl.float32)
    if GATED:
        sums_ptr += sequence.to(tl.int64) * time
        boundary = (tokens // chunk + 1) * chunk - 1
        mask = tokens < length
        own = tl.load(sums_ptr + first_token + tokens, mask=mask, other=0.0)
        reference = tl.load(sums_ptr + boundary, mask=mask, other=0.0)
        # In units of 1 before the conversion: sums grow with the length, their differences matter.
        decay = tl.exp(-tl.abs((own - reference).to(tl.float32)))
    return decay


@triton.jit
def _products(x, index_ptr, columns, COUNT: tl.constexpr, D: tl.constexpr, PRECISION: tl.constexpr):
    """x_i x_j for a tile of tokens and columns, in float32; 0 for padding.

    Entries are picked by products with unit vectors, which is exact: gathers were four times slower.
    """
    inside = columns < COUNT
    first = tl.load(index_ptr + columns, mask=inside, other=-1)
    second = tl.load(index_ptr + COUNT + columns, mask=inside, other=-1)
    dims = tl.arange(0, D)[:, None]
    first_entry = tl.dot(x, (dims == first[None, :]).to(x.dtype), input_precision=PRECISION)
    return first_entry * tl.dot(x, (dims == second[None, :]).to(x.dtype), input_precision=PRECISION)


@triton.jit
def features_kernel(
    x_ptr, sums_ptr, inner_index_ptr, outer_index_ptr, inner_ptr, outer_ptr, stride_b, stride_t, stride_h,
    length, padded, time, first_token, heads, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, GATED: tl.constexpr,
    PRECISION: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Both lists of products for a tile of tokens."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    sequence = tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = batch * (heads // GROUP) + head // GROUP
    rows = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    rows += tokens.to(tl.int64)[:, None] * stride_t
    x = tl.load(rows + tl.arange(0, D)[None, :], mask=(tokens < length)[:, None], other=0.0)
    decay = _boundary_decay(sums_ptr, kv_sequence, tokens, first_token, length, time, chunk, GATED)
    inner_ptr += sequence.to(tl.int64) * padded * INNER
    outer_ptr += sequence.to(tl.int64) * padded * OUTER
    for start in range(0, INNER, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        product = _products(x, inner_index_ptr, columns, INNER, D, PRECISION) * decay[:, None]
        out = inner_ptr + tokens.to(tl.int64)[:, None] * INNER + columns[None, :]
        tl.store(out, product.to(inner_ptr.dtype.element_ty), mask=(columns < INNER)[None, :])
    for start in range(0, OUTER, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        product = _products(x, outer_index_ptr, columns, OUTER, D, PRECISION)
        out = outer_ptr + columns.to(tl.int64)[None, :] * padded + tokens[:, None]
        tl.store(out, product.to(outer_ptr.dtype.element_ty))


@triton.jit
def pull_back_kernel(
    x_ptr, sums_ptr, inner_column_ptr, outer_column_ptr, d_inner_ptr, d_outer_ptr, dx_ptr, term_ptr,
    stride_b, stride_t, stride_h, dx_stride_b, dx_stride_t, dx_stride_h, term_stride_b, term_stride_h,
    length, padded, time, first_token, heads, chunk,
    GROUP: tl.constexpr, D: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr, GATED: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """dx_a = Σ_b (1 + [a = b]) d_ab x_b from the gradients d of the products, and x · dx."""
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    sequence = tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = batch * (heads // GROUP) + head // GROUP
    dims = tl.arange(0, D)
    present = tokens < length
    rows = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h + tokens.to(tl.int64) * stride_t
    decay = _boundary_decay(sums_ptr, kv_sequence, tokens, first_token, length, time, chunk, GATED)
    d_inner_ptr += sequence.to(tl.int64) * padded * INNER
    d_outer_ptr += sequence.to(tl.int64) * padded * OUTER
    dx = tl.zeros((D, TOKENS), tl.float32)
    for b in range(D):
        inner = tl.load(inner_column_ptr + b * D + dims).to(tl.int64)[:, None] * padded
        outer = tl.load(outer_column_ptr + b * D + dims).to(tl.int64)[:, None] * padded
        d_inner = tl.load(d_inner_ptr + inner + tokens[None, :]).to(tl.float32)
        d_outer = tl.load(d_outer_ptr + outer + tokens[None, :]).to(tl.float32)
        twice = tl.where(dims == b, 2.0, 1.0)[:, None]
        entry = tl.load(rows + b, mask=present, other=0.0).to(tl.float32)
        dx += (d_inner * decay[None, :] + d_outer) * (entry[None, :] * twice)
    mask = present[None, :]
    x = tl.load(rows[None, :] + dims[:, None], mask=mask, other=0.0).to(tl.float32)
    out = dx_ptr + batch.to(tl.int64) * dx_stride_b + head * dx_stride_h + tokens.to(tl.int64) * dx_stride_t
    tl.store(out[None, :] + dims[:, None], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    terms = term_ptr + batch.to(tl.int64) * term_stride_b + head.to(tl.int64) * term_stride_h + tokens
    tl.store(terms, tl.sum(x * dx, axis=0), mask=present)


def pair_features(
    x: Tensor, sums: Tensor | None, first_token: int, kv_heads: int, chunk: int, lists: PairLists
) -> PairFeatures:
    """Products of two entries of x (b, t, h, d), whose first token is token `first_token` of the sequence.

    Args:
        sums: G of the whole sequence, (b, h_kv, time) float64, or None without gates.
    """
    batch, length, heads, dim = x.shape
    padded = triton.cdiv(length, ROWS) * ROWS
    inner = x.new_empty(batch, heads, padded, lists.inner.shape[1])
    outer = x.new_empty(batch, heads, lists.outer.shape[1], padded)
    features_kernel[(padded // FEATURE_TOKENS, batch * heads)](
        x, sums, lists.inner, lists.outer, inner, outer, *x.stride()[:3],
        length, padded, 0 if sums is None else sums.shape[-1], first_token, heads, chunk,
        GROUP=heads // kv_heads, D=dim, INNER=inner.shape[-1], OUTER=outer.shape[2], GATED=sums is not None,
        PRECISION=dot_precision(x.dtype), TOKENS=FEATURE_TOKENS, COLUMNS=FEATURE_COLUMNS, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return PairFeatures(inner, outer)


def pull_back(
    x: Tensor,
    gradient: PairGradients,
    sums: Tensor | None,
    first_token: int,
    kv_heads: int,
    chunk: int,
    lists: PairLists,
    dx: Tensor,
    terms: Tensor,
) -> None:
    """Writes dx (b, t, h, d) and x · dx (b, h, t) from the gradients of the products that `pair_features` made of x."""
    batch, length, heads, dim = x.shape
    padded = gradient.inner.shape[-1]
    assert terms.stride(-1) == 1 and dx.stride(-1) == 1
    pull_back_kernel[(padded // FEATURE_TOKENS, batch * heads)](
        x, sums, lists.inner_column, lists.outer_column, gradient.inner, gradient.outer, dx, terms,
        *x.stride()[:3], *dx.stride()[:3], *terms.stride()[:2],
        length, padded, 0 if sums is None else sums.shape[-1], first_token, heads, chunk,
        GROUP=heads // kv_heads, D=dim, INNER=gradient.inner.shape[2], OUTER=gradient.outer.shape[2],
        GATED=sums is not None, TOKENS=FEATURE_TOKENS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
