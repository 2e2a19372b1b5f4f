"""Which backend a call runs on: a pure function of device, dtype and shapes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from sympow.ops.cost import CPU, GPU, Workload, best_chunk_size, cheaper_form
from sympow.ops.rotary import accumulate_phase, last_phase, phase_after, rotate
from sympow.ops.sequence import Sequence
from sympow.ops.state import State
from sympow.ops.torch.forms import chunked_form, recurrent_form

# What the fused kernels are built for.
KERNEL_POWERS = (2, 4, 6, 8)
LARGEST_DIM = 128
# By power: the largest key and value dims.
LARGEST_CHUNKED_DIMS = {2: (128, 128), 4: (32, 128)}
CHUNK_MULTIPLE = 128
# Programs along the second axis of a grid, one for every sequence and query head: CUDA has no more.
MOST_SEQUENCES = 65_535
# Found once: torch.compile could not trace how.
_TRITON_IS_HERE = find_spec("triton") is not None
_TRITON_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True)
class Request:
    """A call as far as the choice of a backend is concerned.

    Attributes:
        device: type of the device, such as "cuda".
        dtype: of queries, keys and values.
        power: p.
        key_dim, value_dim: d and e.
        form: as asked for, "auto" included.
        chunk_size: as asked for, or None.
        vector_gate: whether every rotated pair has its own gate.
        step: whether it is one token from a given state, without gradients.
        sequences: sequences of the batch times query heads.
    """

    device: str
    dtype: torch.dtype
    power: int
    key_dim: int
    value_dim: int
    form: str = "auto"
    chunk_size: int | None = None
    vector_gate: bool = False
    step: bool = False
    sequences: int = 1


def chunked_kernels_serve(power: int, key_dim: int, value_dim: int) -> bool:
    """Whether there are chunked kernels for a power and head dims."""
    largest_key, largest_value = LARGEST_CHUNKED_DIMS.get(power, (0, 0))
    return key_dim <= largest_key and value_dim <= largest_value


def _chunked_limits() -> str:
    limits = (f"power {power} with keys up to {key}" for power, (key, _) in LARGEST_CHUNKED_DIMS.items())
    return " and ".join(limits)


def triton_available() -> bool:
    """Whether Triton can be imported."""
    return _TRITON_IS_HERE


def triton_interpreted() -> bool:
    """Whether Triton runs its kernels on the CPU (TRITON_INTERPRET=1 when it was imported): slow, for tests."""
    return _TRITON_IS_INTERPRETED


def obstacle_to_triton(request: Request, *, interpreted: bool) -> str | None:
    """Why the fused kernels cannot serve a call, as half a sentence; None: they can."""
    dtype = torch.float32 if interpreted else torch.bfloat16  # the interpreter gets bfloat16 wrong
    largest = max(request.key_dim, request.value_dim)
    recurrent = request.form == "recurrent"
    chunked = (request.form == "chunked" or request.chunk_size is not None) and not request.step
    obstacles = {
        _needs_cuda(request): request.device != "cuda" and not interpreted,
        f"kernels take {dtype}, not {request.dtype}": request.dtype != dtype,
        f"kernels take powers up to {KERNEL_POWERS[-1]}, not {request.power}": request.power not in KERNEL_POWERS,
        f"kernels take head dims up to {LARGEST_DIM}": largest > LARGEST_DIM,
        "kernels take one gate per head, not one per rotated pair": request.vector_gate,
        f"kernels take at most {MOST_SEQUENCES:,} sequences times query heads": (
            request.sequences > MOST_SEQUENCES and not request.step
        ),
        "the recurrent form has a kernel for one token from a state, without gradients, only": (
            recurrent and not request.step
        ),
        f"the chunked kernels take {_chunked_limits()}, not power {request.power} and {request.key_dim}": (
            chunked and not chunked_kernels_serve(request.power, request.key_dim, request.value_dim)
        ),
        f"the chunked kernels take chunks that are multiples of {CHUNK_MULTIPLE}, not {request.chunk_size}": (
            chunked and request.chunk_size is not None and request.chunk_size % CHUNK_MULTIPLE != 0
        ),
    }
    return next((reason for reason, present in obstacles.items() if present), None)


def choose_backend(
    backend: str, request: Request, *, available: Callable[[], bool], interpreted: bool
) -> Literal["torch", "triton"]:
    """The backend to use.

    Args:
        backend: "torch", "triton" or "auto": the kernels on a GPU wherever they can serve the call.
        request: the call.
        available: tells whether Triton can be imported; asked only where that matters.
        interpreted: whether Triton runs kernels on the CPU.

    Raises:
        ValueError: "triton" was asked for and cannot serve the call.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        return "torch" if reason_for_torch(request, available=available, interpreted=interpreted) else "triton"
    reason = _reason_against_triton(request, available, interpreted)
    if reason is None:
        return "triton"
    raise ValueError(f"backend='triton' cannot serve this call: {reason}")


def reason_for_torch(request: Request, *, available: Callable[[], bool], interpreted: bool) -> str | None:
    """Why backend="auto" computes a call in plain PyTorch; None: it uses the kernels.

    Args:
        request, available, interpreted: as in `choose_backend`.
    """
    if request.device != "cuda":
        return _needs_cuda(request)
    # Keys far from unit length could leave the range of float32 in the kernels.
    if request.power > 4 and request.power in KERNEL_POWERS:
        return "powers above 4 are for those who ask: backend='triton'"
    return _reason_against_triton(request, available, interpreted)


def _needs_cuda(request: Request) -> str:
    return f"kernels need a CUDA device, and q is on {request.device}"


def _reason_against_triton(request: Request, available: Callable[[], bool], interpreted: bool) -> str | None:
    obstacle = obstacle_to_triton(request, interpreted=interpreted)
    if obstacle is None and not available():
        return "Triton is not installed (pip install 'conformal-sympow[triton]')"
    return obstacle


def run_portable(
    sequence: Sequence,
    initial_state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e) of at least one token, and the state after the last if asked for.

    Args:
        form, chunk_size: as in `sympow.attention`.
        needs_grad: whether the backward pass will be run.
    """
    if form == "recurrent":
        return recurrent_form(sequence, initial_state, return_state, needs_grad)
    if form == "attention":
        return chunked_form(sequence, initial_state, return_state, None, needs_grad)
    work = Workload(
        length=sequence.length,
        key_dim=sequence.key_dim,
        value_dim=sequence.value_dim,
        power=sequence.power,
        group=sequence.group,
        parallel=sequence.batch * sequence.key_heads,
        initial_state=initial_state is not None,
        return_state=return_state,
    )
    machine = CPU if sequence.q.device.type == "cpu" else GPU
    if form == "auto" and chunk_size is None and cheaper_form(work, machine) == "attention":
        return chunked_form(sequence, initial_state, return_state, None, needs_grad)
    size = chunk_size or best_chunk_size(work, machine)
    return chunked_form(sequence, initial_state, return_state, size, needs_grad)


def turn(sequence: Sequence, start: Tensor | None, *, backend: str = "auto") -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k, and the phase after the last token (None without rotation).

    Args:
        sequence: with theta or without.
        start: the phase before the first token, (b, h_kv, d/2); None: zero.
        backend: "torch": no kernel.
    """
    if sequence.theta is None:
        return sequence.q, sequence.k, None
    if backend != "torch" and _kernel_serves(sequence.q):
        from sympow.kernels.rotary import fused_rotation

        q, k = fused_rotation(sequence.q, sequence.k, sequence.beta, sequence.theta, start)
        phase = phase_after(sequence.theta, sequence.beta, start, sequence.length, sequence.batch, sequence.key_heads)
        return q, k, phase
    angles = accumulate_phase(sequence.theta, sequence.beta, start, length=sequence.length)
    grouped = sequence.q.unflatten(2, (sequence.key_heads, sequence.group))
    q, k = rotate(grouped, angles.unsqueeze(3)).flatten(2, 3), rotate(sequence.k, angles)
    return q, k, last_phase(angles, start, sequence.batch, sequence.key_heads)


def _kernel_serves(q: Tensor) -> bool:
    """The kernel is for bfloat16 on a GPU. Elsewhere, and for no tokens, plain PyTorch does."""
    if q.shape[1] == 0 or triton_interpreted():
        return False
    return q.is_cuda and q.dtype == torch.bfloat16 and triton_available()
