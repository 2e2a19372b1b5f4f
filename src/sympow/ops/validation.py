"""Checks of the operator's arguments. Their messages name what was expected and what was given.

Shapes, dtypes and devices are always checked. The values of log_gamma are checked on the CPU; on a GPU this would
synchronize with the device, so there it needs the environment variable SYMPOW_CHECK_VALUES=1.
"""

from __future__ import annotations

import os
from itertools import pairwise

import torch
from torch import Tensor

from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.ops.compilation import check_is_tensor
from sympow.ops.state import FLOAT_DTYPES, State


def check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    *,
    late_queries: bool = False,
) -> None:
    """Raises a ValueError or TypeError where tensors do not fit together.

    Args:
        late_queries: whether there may be fewer queries than keys.
    """
    _check_qkv(q, k, v, late_queries)
    batch, length, heads, dim = k.shape
    pairs = dim // 2
    if theta is None and beta is not None:
        raise ArgumentError(
            "beta", "scales the rotation rates theta, but theta is None; pass theta (see rotary_rates) too"
        )
    if theta is not None:
        if dim % 2:
            raise ArgumentError("theta", f"rotates pairs of entries, so q and k need an even head dim; got {dim}")
        _check_side_input("theta", theta, q.device)
        if theta.shape != (pairs,):
            raise ArgumentError(
                "theta", f"must have shape ({pairs},), a rate per pair of entries; got {tuple(theta.shape)}"
            )
    for name, tensor in (("log_gamma", log_gamma), ("beta", beta)):
        if tensor is None:
            continue
        _check_side_input(name, tensor, q.device)
        shapes: list[tuple[int, ...]] = [(batch, length, heads)]
        if dim % 2 == 0:
            shapes.append((batch, length, heads, pairs))
        if tuple(tensor.shape) not in shapes:
            raise ArgumentError(
                name,
                f"must have shape {' or '.join(map(str, shapes))}, like k without or with its last axis in "
                f"pairs; got {tuple(tensor.shape)}",
            )
    if log_gamma is not None and _values_readable(log_gamma) and bool((log_gamma > 0).any()):
        raise ArgumentError(
            "log_gamma",
            "must not be positive: gates lie between 0 and 1, and are given as logarithms; "
            f"got a maximum of {log_gamma.max().item():.6g}",
        )


def check_documents(cu_seqlens: Tensor, q: Tensor) -> None:
    """The offsets of packed documents, as far as that needs no wait for a device."""
    check_is_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError("cu_seqlens", f"must be int32 or int64, got {cu_seqlens.dtype}")
    if cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ArgumentError(
            "cu_seqlens",
            f"must be one axis of at least two offsets, (documents + 1,); got shape {tuple(cu_seqlens.shape)}",
        )
    if q.shape[0] != 1:
        raise ArgumentError("cu_seqlens", f"packs documents into one row, so the batch must be 1; got {q.shape[0]}")
    if cu_seqlens.device.type == "meta":
        raise ArgumentError("cu_seqlens", "is on the meta device, so it has no offsets that documents could be cut at")
    if _values_readable(cu_seqlens):
        document_offsets(cu_seqlens, q.shape[1])


def document_offsets(cu_seqlens: Tensor, length: int) -> list[int]:
    """The offsets of packed documents as numbers, checked."""
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0:
        raise ArgumentError("cu_seqlens", f"must start at 0, got {offsets[0]}")
    if offsets[-1] != length:
        raise ArgumentError("cu_seqlens", f"must end at the length, {length}; got {offsets[-1]}")
    for before, after in pairwise(offsets):
        if after <= before:
            raise ArgumentError(
                "cu_seqlens", f"must increase from each document to the next, got {after} after {before}"
            )
    return offsets


def check_state(
    state: State, q: Tensor, k: Tensor, v: Tensor, power: int, rotated: bool, documents: int | None
) -> None:
    if not isinstance(state, State):
        raise ArgumentTypeError("initial_state", f"must be a sympow.State, got {type(state).__name__}")
    batch = q.shape[0] if documents is None else documents
    counted = "the batch" if documents is None else "the number of documents"
    expectations = (
        ("power", state.power, power, "power"),
        ("key dim", state.key_dim, k.shape[3], "the head dim of k"),
        ("value dim", state.value_dim, v.shape[3], "the head dim of v"),
        ("heads", state.heads, k.shape[2], "the heads of k"),
        ("batch", state.batch, batch, counted),
    )
    for what, came, expected, source in expectations:
        if came != expected:
            raise ArgumentError("initial_state", f"has {what} {came}, but {source} is {expected}")
    if state.kv.device != q.device:
        raise ArgumentError("initial_state", f"is on {state.kv.device}, but q is on {q.device}")
    if state.conv_state is not None:
        raise ArgumentError("initial_state", "was made by a layer with short_conv: pass it to that layer")
    if rotated and state.phase is None:
        raise ArgumentError("initial_state", "has no phase, so it was made without rotation; but theta is given")
    if not rotated and state.phase is not None:
        raise ArgumentError("initial_state", "has a phase, so it was made with rotation; but theta is None")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, late_queries: bool) -> None:
    # Queries last: what only adds keys to a window passes these as queries, too.
    inputs = (("k", k), ("v", v), ("q", q))
    for name, tensor in inputs:
        _check_dense(name, tensor)
        if tensor.ndim != 4:
            raise ArgumentError(name, f"must be (batch, time, heads, dim), got shape {tuple(tensor.shape)}")
        if tensor.dtype not in FLOAT_DTYPES:
            raise ArgumentTypeError(name, f"must be float64, float32, bfloat16 or float16; got {tensor.dtype}")
    for name, tensor in inputs:
        if tensor.dtype != q.dtype:
            raise ArgumentTypeError("q", f", k and v must share a dtype; q is {q.dtype}, but {name} is {tensor.dtype}")
        if tensor.device != q.device:
            raise ArgumentError(
                "q", f", k and v must share a device; q is on {q.device}, but {name} is on {tensor.device}"
            )
        late = late_queries and tensor.shape[0] == q.shape[0] and q.shape[1] < k.shape[1] == v.shape[1]
        if tensor.shape[:2] != q.shape[:2] and not late:
            besides = ", except that q can be of the last tokens alone" if late_queries else ""
            raise ArgumentError(
                "q",
                f", k and v must share batch and time{besides}; q has {tuple(q.shape[:2])}, but {name} has "
                f"{tuple(tensor.shape[:2])}",
            )
        if 0 in (tensor.shape[0], *tensor.shape[2:]):
            raise ArgumentError(name, f"must not be empty in batch, heads or dim; got shape {tuple(tensor.shape)}")
    if k.shape[2] != v.shape[2]:
        raise ArgumentError("k", f"and v must have the same heads; got {k.shape[2]} and {v.shape[2]}")
    if q.shape[3] != k.shape[3]:
        raise ArgumentError("q", f"and k must have the same head dim; got {q.shape[3]} and {k.shape[3]}")
    if q.shape[2] % k.shape[2]:
        raise UserError(
            f"the heads of q must be a multiple of those of k, each key head having as many query heads; "
            f"got {q.shape[2]} and {k.shape[2]}"
        )


def _check_dense(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
        check_is_tensor(name, tensor)
        raise ArgumentTypeError(name, f"must be a dense tensor, got one with layout {tensor.layout}")


def _check_side_input(name: str, tensor: Tensor, device: torch.device) -> None:
    _check_dense(name, tensor)
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ArgumentTypeError(
            name, f"must be float32 or float64, since it is summed over the sequence; got {tensor.dtype}"
        )
    if tensor.device != device:
        raise ArgumentError(name, f"must be on the device of q, {device}; got {tensor.device}")


def _values_readable(tensor: Tensor) -> bool:
    # Under torch.vmap a tensor stands for many, and torch refuses to decide by its values.
    if torch.compiler.is_compiling() or tensor.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.device.type == "cpu" or values_are_checked_on_devices()


def values_are_checked_on_devices() -> bool:
    """Whether SYMPOW_CHECK_VALUES=1 asks for checks of values on a GPU."""
    return os.environ.get("SYMPOW_CHECK_VALUES") == "1"
