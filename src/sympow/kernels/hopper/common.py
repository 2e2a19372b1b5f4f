"""What the Hopper kernels share: powers, rings of tiles in shared memory, and which calls they serve."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sympow.kernels.common import empty_aligned

HEAD_DIM = 64
# Gluon may change from one release to the next; these are the ones that the kernels were compared with float64 on.
RELEASES = ("3.6.",)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these queries, keys and values; otherwise the portable kernels do."""
    return (
        triton.__version__.startswith(RELEASES)
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape[-1] == v.shape[-1] == HEAD_DIM
    )


def head_major(x: Tensor, rows: int) -> TensorDescriptor:
    """A descriptor of x (b, t, h, d) as (b, h, t, d), read in tiles of `rows` tokens; what lies outside reads as 0.

    The copy engine needs strides and base in units of 16 bytes; other tensors are copied first.
    """
    item = x.element_size()
    if x.stride(-1) != 1 or x.data_ptr() % 16 or any(s * item % 16 for s in x.stride()[:-1]):
        x = empty_aligned(x, *x.shape).copy_(x)
    view = x.transpose(1, 2)
    block = [1, 1, rows, x.shape[-1]]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)
    return TensorDescriptor(view, list(view.shape), list(view.stride()), block, layout)


@gluon.jit
def even_power(s, POWER: gl.constexpr):
    """s^POWER for POWER in 2, 4, 6, 8."""
    square = s * s
    if POWER == 2:
        return square
    elif POWER == 4:
        return square * square
    elif POWER == 6:
        return square * square * square
    else:
        fourth = square * square
        return fourth * fourth


@gluon.jit
def odd_power(s, EXPONENT: gl.constexpr):
    """s^EXPONENT for EXPONENT in 1, 3, 5, 7."""
    if EXPONENT == 1:
        return s
    else:
        return even_power(s, EXPONENT - 1) * s


@gluon.jit
def matrix(buffers, slot):
    """The tile in a slot of a ring of buffers."""
    buffer = buffers.index(slot)
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def prefetch(pointers):
    """Brings what the next step reads into the first-level cache: no register is free to hold it until then."""
    gl.inline_asm_elementwise(
        "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )
