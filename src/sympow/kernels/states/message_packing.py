"""Packing of states into the messages that ranks send each other, and unpacking, p = 2, in one launch each way.

Message layout, in one axis of float32: S (b, h, D, e); Z (b, h, D); and, where states decay, the bits of the logarithms
of the square roots of decays, (b, h) float64. `sympow.parallel.scan.Carried` reads and writes this layout in PyTorch.

The chunked kernels compute with states of all d² products, messages hold the D = d(d + 1)/2 symmetric features. The two
maps are each other's inverse on symmetric states and each other's transpose, so that `pack` also maps the gradient of a
full state to that of a packed one, and `unpack` the other way. `sympow.kernels.states.reference` holds the plain
PyTorch references.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import split_program_id
from sympow.kernels.launch import flat_grid, launch
from sympow.kernels.states.full_state import FullState

ROOT_HALF = tl.constexpr(math.sqrt(0.5))


@triton.jit
def _feature(i, a, D: tl.constexpr):
    """The index of the feature √2 x_i x_a, or x_i²."""
    first, second = tl.minimum(i, a), tl.maximum(i, a)
    return first * D - first * (first - 1) // 2 + second - first


@triton.jit
def _decay_of(message_ptr, sequence, sequences, D: tl.constexpr, E: tl.constexpr):
    """Pointer to the logarithm of a sequence's decay in a message: a multiple of 8 bytes, since D(D + 1) / 2 is
    even."""
    offset = sequences * (D * (D + 1) // 2 * (E + 1)) + 2 * sequence
    return (message_ptr + offset).to(tl.pointer_type(tl.float64))


@triton.jit
def pack_kernel(
    kv_ptr, normalizer_ptr, gate_sums_ptr, message_ptr, length,
    DECAYS: tl.constexpr, CLOSED: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The features (i, a), a ≥ i, of one i, each from the mean of its two entries in the full state; and the decay.

    DECAYS: the message holds decays. CLOSED: the decay is 0. Without `gate_sums_ptr` and CLOSED it is 1.
    """
    i, sequence = split_program_id(D)
    sequences = (tl.num_programs(0) // D).to(tl.int64)
    FEATURES: tl.constexpr = D * (D + 1) // 2
    a, values = tl.arange(0, D), tl.arange(0, E)
    wanted = a >= i
    scale = tl.where(a == i, 0.5, ROOT_HALF)
    here, mirrored = sequence * D * D + i * D + a, sequence * D * D + a * D + i
    both = tl.load(normalizer_ptr + here, mask=wanted) + tl.load(normalizer_ptr + mirrored, mask=wanted)
    target = sequence * FEATURES + _feature(i, a, D)
    tl.store(message_ptr + sequences * FEATURES * E + target, both * scale, mask=wanted)
    rows = (sequence * D + i) * E + values
    here = rows[:, None] * D + a[None, :]
    mirrored = ((sequence * D + a[None, :]) * E + values[:, None]) * D + i
    both = tl.load(kv_ptr + here, mask=wanted[None, :]) + tl.load(kv_ptr + mirrored, mask=wanted[None, :])
    tl.store(message_ptr + target[None, :] * E + values[:, None], both * scale[None, :], mask=wanted[None, :])
    if DECAYS:
        log_decay = tl.full((), float("-inf") if CLOSED else 0.0, tl.float64)
        if gate_sums_ptr is not None:
            log_decay = tl.load(gate_sums_ptr + (sequence + 1) * length - 1) / 2
        tl.store(_decay_of(message_ptr, sequence, sequences, D, E), log_decay, mask=i == 0)


@triton.jit(do_not_specialize=("nearest", "count"))
def unpack_kernel(
    messages_ptr, kv_ptr, normalizer_ptr, nearest, count, numbers,
    DECAYS: tl.constexpr, REVERSE: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """The products x_i x_a of one i with every a, of the state that `count` messages add up to.

    Each message is multiplied by the decays of the ranks between it and this one; the nearest counts in full. A message
    has `numbers` float32 numbers.
    """
    i, sequence = split_program_id(D)
    sequences = (tl.num_programs(0) // D).to(tl.int64)
    FEATURES: tl.constexpr = D * (D + 1) // 2
    a, values = tl.arange(0, D), tl.arange(0, E)
    source = sequence * FEATURES + _feature(i, a, D)
    normalizer, kv = tl.zeros((D,), tl.float32), tl.zeros((E, D), tl.float32)
    log_decay = tl.full((), 0.0, tl.float64)
    for n in range(count):
        message = messages_ptr + (nearest + n if REVERSE else nearest - n).to(tl.int64) * numbers
        weight = tl.exp(2 * log_decay).to(tl.float32)
        normalizer += tl.load(message + sequences * FEATURES * E + source) * weight
        kv += tl.load(message + source[None, :] * E + values[:, None]) * weight
        if DECAYS:
            log_decay += tl.load(_decay_of(message, sequence, sequences, D, E))
    scale = tl.where(a == i, 1.0, ROOT_HALF)
    tl.store(normalizer_ptr + (sequence * D + i) * D + a, normalizer * scale)
    tl.store(kv_ptr + ((sequence * D + i) * E + values[:, None]) * D + a[None, :], kv * scale[None, :])


def message_size(batch: int, heads: int, dim: int, value_dim: int, decays: bool) -> int:
    """How many float32 numbers a message has; `decays`: whether it holds decays."""
    return batch * heads * (dim * (dim + 1) // 2 * (value_dim + 1) + (2 if decays else 0))


def pack(state: FullState, log_decay: Tensor | float | None = None) -> Tensor:
    """The message of a state; d and e powers of two, d at least 4.

    Args:
        log_decay: logarithm of the decay of a state that passes through this rank: running sums of log γ, (b, h, t)
            float64 contiguous, of which the last counts; or 0 (no decay) or −inf (nothing passes); None: no decay in
            the message.
    """
    batch, heads, dim, value_dim, _ = state.kv.shape
    sums = log_decay if isinstance(log_decay, Tensor) else None
    message = state.kv.new_empty(message_size(batch, heads, dim, value_dim, log_decay is not None))
    launch(
        pack_kernel, flat_grid(dim, batch * heads),
        state.kv.contiguous(), state.normalizer.contiguous(), sums, message, 0 if sums is None else sums.shape[-1],
        DECAYS=log_decay is not None, CLOSED=sums is None and log_decay == -math.inf, D=dim, E=value_dim, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return message


def pack_nothing(like: Tensor, shape: tuple[int, int, int, int], *, decays: bool) -> Tensor:
    """The message of a rank that adds nothing and lets nothing pass; `shape` and `decays` as in `unpack`."""
    message = like.new_zeros(message_size(*shape, decays), dtype=torch.float32)
    if decays:
        message[-2 * shape[0] * shape[1] :].view(torch.float64).fill_(-math.inf)
    return message


def unpack(
    messages: Tensor,
    shape: tuple[int, int, int, int],
    *,
    decays: bool = False,
    nearest: int = 0,
    count: int = 1,
    reverse: bool = False,
) -> FullState:
    """The state that messages add up to, Σ_n (∏_{m<n} D_m) S_n, n counted from the nearest; for one, the inverse of
    `pack`.

    Args:
        messages: (ranks, numbers of a message) float32 contiguous.
        shape: b, h, d and e.
        decays: whether the messages hold decays.
        nearest: the message that counts in full.
        count: how many messages to add, towards lower ranks; in reverse towards higher ones.
    """
    batch, heads, dim, value_dim = shape
    kv = messages.new_empty(batch, heads, dim, value_dim, dim)
    normalizer = messages.new_empty(batch, heads, dim, dim)
    launch(
        unpack_kernel, flat_grid(dim, batch * heads),
        messages, kv, normalizer, nearest, count, messages.shape[1],
        DECAYS=decays, REVERSE=reverse, D=dim, E=value_dim, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return FullState(kv, normalizer)
