"""Between a state of all d² products, which the chunked kernels compute with, and the D symmetric features that ranks
send each other, p = 2: `sympow.ops.full_state` in one launch each way.

The two maps are each other's inverse on symmetric states and each other's transpose, so that `pack` also takes the
gradient of a full state to that of a packed one, and `unpack` the other way.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.chunk_states import FullState

ROOT_HALF = tl.constexpr(math.sqrt(0.5))


@triton.jit
def _feature(i, a, D: tl.constexpr):
    """Where √2 x_i x_a, or x_i², stands among the features."""
    low, high = tl.minimum(i, a), tl.maximum(i, a)
    return low * D - low * (low - 1) // 2 + high - low


@triton.jit
def pack_kernel(kv_ptr, normalizer_ptr, packed_ptr, packed_normalizer_ptr, D: tl.constexpr, E: tl.constexpr):
    """The features (i, a), a ≥ i, of one i, each the mean of both its places."""
    i, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a, values = tl.arange(0, D), tl.arange(0, E)
    wanted = a >= i
    scale = tl.where(a == i, 0.5, ROOT_HALF)
    here, mirrored = sequence * D * D + i * D + a, sequence * D * D + a * D + i
    both = tl.load(normalizer_ptr + here, mask=wanted) + tl.load(normalizer_ptr + mirrored, mask=wanted)
    target = sequence * (D * (D + 1) // 2) + _feature(i, a, D)
    tl.store(packed_normalizer_ptr + target, both * scale, mask=wanted)
    rows = (sequence * D + i) * E + values
    here = rows[:, None] * D + a[None, :]
    mirrored = ((sequence * D + a[None, :]) * E + values[:, None]) * D + i
    both = tl.load(kv_ptr + here, mask=wanted[None, :]) + tl.load(kv_ptr + mirrored, mask=wanted[None, :])
    tl.store(packed_ptr + target[None, :] * E + values[:, None], both * scale[None, :], mask=wanted[None, :])


@triton.jit
def unpack_kernel(packed_ptr, packed_normalizer_ptr, kv_ptr, normalizer_ptr, D: tl.constexpr, E: tl.constexpr):
    """The products x_i x_a of one i with every a."""
    i, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a, values = tl.arange(0, D), tl.arange(0, E)
    scale = tl.where(a == i, 1.0, ROOT_HALF)
    source = sequence * (D * (D + 1) // 2) + _feature(i, a, D)
    tl.store(normalizer_ptr + (sequence * D + i) * D + a, tl.load(packed_normalizer_ptr + source) * scale)
    kv = tl.load(packed_ptr + source[None, :] * E + values[:, None]) * scale[None, :]
    tl.store(kv_ptr + ((sequence * D + i) * E + values[:, None]) * D + a[None, :], kv)


def pack(state: FullState) -> tuple[Tensor, Tensor]:
    """S (b, h, D, e) and Z (b, h, D) float32, from all products; d and e powers of two."""
    batch, heads, dim, value_dim, _ = state.kv.shape
    features = (batch, heads, dim * (dim + 1) // 2)
    kv = state.kv.new_empty(*features, value_dim)
    normalizer = state.kv.new_empty(features)
    pack_kernel[(dim, batch * heads)](
        state.kv.contiguous(), state.normalizer.contiguous(), kv, normalizer, D=dim, E=value_dim, num_warps=4
    )
    return kv, normalizer


def unpack(kv: Tensor, normalizer: Tensor, dim: int) -> FullState:
    """The inverse of `pack`, for keys of `dim` entries."""
    batch, heads, _, value_dim = kv.shape
    full = kv.new_empty(batch, heads, dim, value_dim, dim, dtype=torch.float32)
    full_normalizer = full.new_empty(batch, heads, dim, dim)
    unpack_kernel[(dim, batch * heads)](
        kv.contiguous(), normalizer.contiguous(), full, full_normalizer, D=dim, E=value_dim, num_warps=4
    )
    return FullState(full, full_normalizer)
