"""Launching kernels: grids, TMA descriptors, and what Triton decides of a launch, decided once.

The host prepares a launch while the device computes the ones before. With short sequences the device would wait for it.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from sympow.errors import UserError

# How many CTAs CUDA launches along the first axis of a grid.
MOST_PROGRAMS = 2**31 - 1
# How many along the second.
MOST_ON_SECOND_AXIS = 65_535
# Kernels as compiled for the kinds of arguments that they were launched with, and the values of their constants.
_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
# Kinds of descriptors that Triton has checked. Its checks take the host as long as the rest of a launch.
_CHECKED: set[tuple[Any, ...]] = set()


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """kernel[grid](*arguments, **constants), which finds the compiled kernel faster than Triton.

    Triton compiles a kernel for each combination of constants, dtypes and properties of numbers and addresses, and
    works them out at every launch. Here a launch that is like an earlier one in all of them runs what that one ran,
    whatever has happened since to Triton's settings; its hooks around launches are called.
    """
    if not isinstance(kernel, JITFunction):  # but in Triton's interpreter
        kernel[grid](*arguments, **constants)
        return
    key = (kernel.fn, torch.cuda.current_device(), _kinds(arguments), *constants.items())
    found = _COMPILED.get(key)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        if compiled is None:  # a hook of Triton's has declined to compile it
            return
        defaults = {name: p.default for name, p in inspect.signature(kernel.fn).parameters.items()}
        rest = list(defaults)[len(arguments) :]
        _COMPILED[key] = compiled, tuple(constants.get(name, defaults[name]) for name in rest)
        return
    compiled, rest_values = found
    compiled[(*grid, 1, 1)[:3]](*arguments, *rest_values)


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """What Triton compiles a kernel for, argument by argument."""
    kinds: list[Any] = []
    for x in arguments:
        kind = type(x)
        if isinstance(x, Tensor):
            # For AMD's GPUs Triton also looks at the size of the memory.
            small = torch.version.hip is None or x.untyped_storage().size() < 2**31
            kinds.append((x.dtype, x.data_ptr() % 16 == 0, small))
        elif kind is int:
            # 1 is a constant to Triton; of others it sees multiples of 16 and those that take 64 bits.
            kinds.append(1 if x == 1 else (x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63))
        elif x is None or kind is bool or kind is float:
            kinds.append(kind)
        elif isinstance(x, tuple):
            kinds.append((kind, _kinds(x)))
        elif hasattr(x, "block_shape"):
            kinds.append((kind, x.base.dtype, *x.block_shape, getattr(x, "layout", None)))
        else:
            raise TypeError(f"a kernel cannot be launched with {x!r}")
    return tuple(kinds)


def flat_grid(*axes: int) -> tuple[int]:
    """The grid of a launch over logical axes, the innermost first, as one axis: CTAs start in the same order.

    A CUDA grid has up to 2³¹ − 1 CTAs along its first axis but only 65,535 along the others: too few for an axis that
    grows with sequences, heads, pairs or chunks. The kernel finds its indices with `split_program_id`.
    """
    programs = math.prod(axes)
    if programs > MOST_PROGRAMS:
        sizes = " × ".join(f"{axis:,}" for axis in axes)
        raise UserError(
            f"a kernel of this call needs {sizes} = {programs:,} CTAs, and CUDA launches at most {MOST_PROGRAMS:,}: "
            "split the batch"
        )
    return (programs,)


def two_axis_grid(inner: int, outer: int) -> tuple[int, ...]:
    """`flat_grid`, but on two axes if the outer one fits on the second.

    For kernels whose first copy waits for the indices: with many short CTAs the division of `split_program_id` shows.
    """
    flat = flat_grid(inner, outer)
    return (inner, outer) if outer <= MOST_ON_SECOND_AXIS else flat


def head_major(x: Tensor, block: tuple[int, int]) -> TensorDescriptor:
    """A TMA descriptor of x (b, t, h, d) as (b, h, t, d), read in blocks of (rows, columns); out of bounds reads are
    0."""
    return blocks_of(aligned(x).transpose(1, 2), [1, 1, *block])


def blocks_of(x: Tensor, block: list[int]) -> TensorDescriptor:
    """A TMA descriptor of x, which is `aligned` or contiguous, read and written in blocks of that shape."""
    return new_descriptor(TensorDescriptor, x, block)


def new_descriptor(kind: type[Any], base: Tensor, block: list[int], **layout: Any) -> Any:
    """A descriptor of one of Triton's classes, which checks each dtype and block once. What else it would check,
    addresses and strides, is as `aligned` makes it, and the driver refuses others.

    Args:
        layout: what Gluon's class takes besides.
    """
    key = (kind, base.dtype, *block)
    if key not in _CHECKED:
        checked = kind(base, list(base.shape), list(base.stride()), block, **layout)
        _CHECKED.add(key)
        return checked
    found = object.__new__(kind)
    found.base, found.shape, found.strides, found.block_shape = base, list(base.shape), list(base.stride()), block
    for name, value in layout.items():
        setattr(found, name, value)
    return found


def aligned(x: Tensor) -> Tensor:
    """x, or a copy of it where TMA could not read x: it needs a base and strides that are multiples of 16 bytes."""
    unit = 16 // x.element_size()
    *outer, last = x.stride()
    if last != 1 or x.data_ptr() % 16 or any(stride % unit for stride in outer):
        return empty_aligned(x, *x.shape).copy_(x)
    return x


def empty_aligned(like: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialized tensor whose rows start at multiples of 16 bytes, as TMA requires."""
    dtype = dtype or like.dtype
    unit = 16 // dtype.itemsize
    columns = ceil_div(shape[-1], unit) * unit
    found = like.new_empty(*shape[:-1], columns, dtype=dtype)
    return found if columns == shape[-1] else found[..., : shape[-1]]


def block_dim(dim: int) -> int:
    """The head dimension rounded up to a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def ceil_div(size: int, part: int) -> int:
    """⌈size / part⌉. Triton's own function takes the host some µs, since kernels can call it, too."""
    return -(-size // part)


def rows_contiguous(x: Tensor) -> Tensor:
    """x, or a copy of it whose last axis is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()
