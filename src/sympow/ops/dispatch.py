"""Chooses the form and the backend of a call: the only module that knows which calls the Triton kernels support.

Each `..._unsupported_reason` returns None where the kernels support a call, and otherwise a sentence that says why they
do not. Whether a call then runs on the Hopper kernels or on the portable ones, both of them Triton's, is decided by the
table of engines (`sympow.kernels.attention.engines`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from sympow.errors import ArgumentError
from sympow.kernels.device_limits import QUARTIC_DIMS, QUARTIC_VALUE_DIMS
from sympow.ops.compilation import is_known
from sympow.ops.cost import CPU, GPU, Workload, best_chunk_size, cheaper_form, crossover_length
from sympow.settings import Backend, Form

if TYPE_CHECKING:
    from sympow.ops.inputs import Inputs


# The first GPUs whose tensor cores multiply bfloat16: Ampere.
LEAST_CAPABILITY = (8, 0)
# Limits of the attention kernels.
KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
KERNEL_POWERS = (2, 4, 6, 8)
# Smaller heads are padded to this size: the smallest that the kernels are compiled for.
SMALLEST_DIM = 32
LARGEST_DIM = 128
# The same for float32, except on Hopper.
LARGEST_FLOAT32_DIM = 64
# Limits of the chunked kernels: the largest key and value dims, by power.
LARGEST_CHUNKED_DIMS = {2: (LARGEST_DIM, LARGEST_DIM), 4: (QUARTIC_DIMS[-1], QUARTIC_VALUE_DIMS[-1])}
CHUNK_MULTIPLE = 128
# The power of the kernels with a gate per rotated pair.
VECTOR_GATE_POWER = 2
# Limits of the kernels for shards of a sequence (`sympow.parallel`).
SHARD_DIMS = (32, 64)
# Rows up to which the gates of a decoding step are computed by a kernel: it reads all weights for each row.
MOST_GATE_ROWS = 64

# Tokens per chunk on the kernels, p = 2. Larger chunks spend more on scores, smaller ones on states in memory.
CHUNK_SIZE = 1024
# Bytes of chunk states (p = 2) that a call without gradients holds at a time. Longer sequences are computed in
# segments, so that these do not grow with the context. 4 GiB are the states of 43,000 tokens with 8 key heads of 128,
# enough to fill a GPU.
CHUNK_STATE_BYTES = 4 * 2**30
# The kernels compute about d² features, nearly twice the symmetric ones, and reach a smaller MFU with them than with
# scores. The chunked form is faster from so many times the context where the operations balance (for p = 4 and heads of
# 16 from a little more).
CROSSOVER_FACTOR = 1.7

# Evaluated once, since torch.compile cannot trace either.
_TRITON_IS_INSTALLED = find_spec("triton") is not None
_TRITON_IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def triton_available() -> bool:
    """Whether Triton can be imported."""
    return _TRITON_IS_INSTALLED


def triton_interpreted() -> bool:
    """Whether Triton interprets its kernels on the CPU (TRITON_INTERPRET=1 when it was imported): slow, for tests."""
    return _TRITON_IS_INTERPRETED


@dataclass(frozen=True)
class Request:
    """What the choice of a backend depends on.

    Attributes:
        device: type of the device, such as "cuda".
        index: which of them; None: the current one.
        dtype: of queries, keys and values.
        power: p.
        key_dim, value_dim: d and e.
        form, chunk_size: as in `sympow.attention`.
        vector_gate: whether each rotated pair has its own gate.
        step: whether the call is one token after a given state, without gradients.
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
    index: int | None = None


def backend_for(
    inputs: Inputs, step: bool, form: Form, chunk_size: int | None, backend: Backend
) -> Literal["torch", "triton"]:
    """The backend of one call of `sympow.attention`; arguments as there, and `step` as in `Request`."""
    request = Request(
        device=inputs.q.device.type,
        dtype=inputs.q.dtype,
        power=inputs.power,
        key_dim=inputs.key_dim,
        value_dim=inputs.value_dim,
        form=form,
        chunk_size=chunk_size,
        vector_gate=inputs.vector_gate,
        step=step,
        index=inputs.q.device.index,
    )
    return choose_backend(backend, request)


def choose_backend(backend: str, request: Request) -> Literal["torch", "triton"]:
    """The backend of a call.

    Args:
        backend: "torch", "triton" or "auto": Triton on a GPU wherever the kernels support the call.

    Raises:
        ValueError: backend is "triton", and the kernels do not support the call.
    """
    if backend == "torch":
        return "torch"
    if backend == "auto":
        return "torch" if auto_uses_torch_reason(request) else "triton"
    require_supported(unsupported_reason(request))
    return "triton"


def auto_uses_torch_reason(request: Request) -> str | None:
    """Why backend="auto" runs a call in plain PyTorch; None: it runs on Triton."""
    if request.device != "cuda":
        return device_unsupported_reason(request.device, None)
    # Keys far from unit length could leave the range of float32 in the kernels.
    if request.power > 4 and request.power in KERNEL_POWERS:
        return "Powers above 4 run on the kernels only with backend='triton', since they can overflow float32 there."
    return unsupported_reason(request)


def unsupported_reason(request: Request) -> str | None:
    """Why the kernels do not support a call of `sympow.attention` or of `Window`."""
    chunked = (request.form == "chunked" or request.chunk_size is not None) and not request.step
    if reason := device_unsupported_reason(request.device, request.index, interpreted=True):
        return reason
    if request.dtype not in _kernel_dtypes():
        return f"The kernels support {_names(_kernel_dtypes())}, not {request.dtype}."
    if request.power not in KERNEL_POWERS:
        return f"The kernels support powers up to {KERNEL_POWERS[-1]}, not {request.power}."
    if max(request.key_dim, request.value_dim) > LARGEST_DIM:
        return _limit_of_dims(request.key_dim, request.value_dim)
    wide = request.dtype == torch.float32 and max(request.key_dim, request.value_dim) > LARGEST_FLOAT32_DIM
    asks_gpu = wide and request.device == "cuda" and not request.step
    if asks_gpu and (reason := wide_float32_unsupported_reason(request.index)):
        return reason
    if request.vector_gate and (reason := _vector_gate_unsupported_reason(request)):
        return reason
    if request.form == "recurrent" and not request.step:
        return "The recurrent form has a kernel only for one token after a given state, without gradients."
    if chunked:
        if reason := chunked_unsupported_reason(request.power, request.key_dim, request.value_dim, request.dtype):
            return reason
        if request.chunk_size is not None and request.chunk_size % CHUNK_MULTIPLE:
            return f"The chunked kernels support multiples of {CHUNK_MULTIPLE} as chunk_size, not {request.chunk_size}."
    return _triton_missing_reason()


def device_unsupported_reason(device: str, index: int | None, *, interpreted: bool = False) -> str | None:
    """Why no kernel runs on a device: it is no GPU, or the GPU is too old.

    Args:
        device, index: as in `Request`.
        interpreted: whether Triton's interpreter, on a CPU, counts as a GPU.
    """
    if device == "cuda":
        if reason := gpu_unsupported_reason(index):
            return reason
    elif not (interpreted and triton_interpreted()):
        return f"The kernels need a CUDA device, and q is on {device}."
    return None


def _triton_missing_reason() -> str | None:
    """Asked last, since installing Triton would not help where there is another reason."""
    return None if triton_available() else "Triton is not installed (pip install 'conformal-sympow[triton]')."


def gpu_unsupported_reason(index: int | None) -> str | None:
    """Why the kernels do not support a GPU: before Ampere, tensor cores have no bfloat16 or TF32. AMD's GPUs have
    capabilities of their own; without any GPU there is nothing to ask.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return None
    capability = torch.cuda.get_device_capability(index)
    if capability >= LEAST_CAPABILITY:
        return None
    found, least = (f"{major}.{minor}" for major, minor in (capability, LEAST_CAPABILITY))
    return f"The kernels need a GPU of compute capability {least} or higher, and this one has {found}."


def wide_float32_unsupported_reason(index: int | None) -> str | None:
    """Why the kernels do not support float32 with heads above 64 on a GPU: its shared or tensor memory is too small for
    both halves of such operands. Without any GPU there is nothing to ask.
    """
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(index) == (9, 0):
        return None
    return (
        f"The kernels support heads of up to {LARGEST_FLOAT32_DIM} in torch.float32, and of up to {LARGEST_DIM} only "
        "on Hopper GPUs: others have too little memory for them."
    )


# torch.compile calls them once instead of tracing them. This is what torch.compiler.assume_constant_result does, but
# that imports the compiler.
gpu_unsupported_reason.__dict__["_dynamo_marked_constant"] = True
wide_float32_unsupported_reason.__dict__["_dynamo_marked_constant"] = True


def _vector_gate_unsupported_reason(request: Request) -> str | None:
    """Why there are no kernels for a call with a gate per rotated pair."""
    if request.step:
        return "The kernels of a decoding step support one gate per head, not one per rotated pair."
    if request.power != VECTOR_GATE_POWER:
        return f"The kernels support a gate per rotated pair for power {VECTOR_GATE_POWER}, not {request.power}."
    # Triton's interpreter computes bfloat16 incorrectly.
    dtype = torch.float32 if triton_interpreted() else torch.bfloat16
    if request.dtype != dtype:
        return f"The kernels support a gate per rotated pair for {dtype}, not {request.dtype}."
    return None


def chunked_unsupported_reason(power: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why there are no chunked kernels for a power, head dims and a dtype."""
    largest_key, largest_value = LARGEST_CHUNKED_DIMS.get(power, (0, 0))
    if power == 4 and dtype == torch.float16:
        return "The chunked kernels of power 4 do not support torch.float16, whose range its states leave."
    if key_dim <= largest_key and value_dim <= largest_value:
        return None
    limits = (f"power {p} with key dims up to {key}" for p, (key, _) in LARGEST_CHUNKED_DIMS.items())
    return f"The chunked kernels support {' and '.join(limits)}, not power {power} with key dim {key_dim}."


def late_queries_unsupported_reason(backend: Backend, form: Form) -> str | None:
    """Why a call with fewer queries than keys cannot run on a backend in a form."""
    if backend == "triton" and form in ("auto", "attention"):
        return (
            "The kernels of the attention form support as many queries as keys. Pass form='chunked', which folds the "
            "earlier keys into a state first, or backend='auto'."
        )
    return None


def shard_unsupported_reason(inputs: Inputs, form: Form) -> str | None:
    """Why the kernels for shards of a sequence do not support a shard that `backend_for` runs on Triton."""
    if inputs.power != 2 or form not in ("auto", "chunked"):
        return f"The kernels for shards support the chunked form of power 2, not form={form!r} of {inputs.power}."
    if inputs.vector_gate:
        return "The kernels for shards support one gate per head, not one per rotated pair."
    if inputs.key_dim != inputs.value_dim or inputs.key_dim not in SHARD_DIMS:
        dims = " or ".join(map(str, SHARD_DIMS))
        return (
            f"The kernels for shards support keys and values of one head dim, {dims}; got {inputs.key_dim} and "
            f"{inputs.value_dim}."
        )
    if inputs.length == 0:
        return "The kernels for shards need at least one token."
    if inputs.q.dtype == torch.float16:
        return "The kernels for shards support torch.bfloat16 and torch.float32, not torch.float16."
    return chunked_unsupported_reason(inputs.power, inputs.key_dim, inputs.value_dim, inputs.q.dtype)


def softmax_step_backend(backend: str, inputs: Inputs) -> Literal["torch", "triton"]:
    """The backend of a decoding step of softmax attention (`KeyValueCache`); arguments and errors as above."""
    if backend == "torch":
        return "torch"
    reason = softmax_step_unsupported_reason(inputs)
    if backend == "auto":
        return "triton" if reason is None and inputs.q.is_cuda else "torch"
    require_supported(reason)
    return "triton"


def softmax_step_unsupported_reason(inputs: Inputs) -> str | None:
    """Why the kernel of a softmax decoding step does not support its token."""
    if reason := device_unsupported_reason(inputs.q.device.type, inputs.q.device.index, interpreted=True):
        return reason
    if inputs.q.dtype not in _kernel_dtypes():
        return f"The kernel supports {_names(_kernel_dtypes())}, not {inputs.q.dtype}."
    if max(inputs.key_dim, inputs.value_dim) > LARGEST_DIM:
        return _limit_of_dims(inputs.key_dim, inputs.value_dim)
    return _triton_missing_reason()


def rotation_unsupported_reason(q: Tensor) -> str | None:
    """Why the rotary kernel does not support queries (b, t, h, d) outside the fused forms."""
    if q.shape[1] == 0:
        return "The rotary kernel needs at least one token."
    if reason := device_unsupported_reason(q.device.type, q.device.index):
        return reason
    if q.dtype not in KERNEL_DTYPES:
        return f"The rotary kernel supports {_names(KERNEL_DTYPES)}, not {q.dtype}."
    return _triton_missing_reason()


def step_gates_unsupported_reason(x: Tensor, weights: Sequence[Tensor]) -> str | None:
    """Why the kernel for gates and rotation scales of a decoding step does not support x (b, 1, width).

    Args:
        weights: those that project x, one or two.
    """
    if reason := device_unsupported_reason(x.device.type, x.device.index):
        return reason
    if not weights:
        return "There is nothing to project."
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"The kernel supports torch.bfloat16 and torch.float16, not {x.dtype}."
    if not 0 < x.numel() <= MOST_GATE_ROWS * x.shape[-1]:
        return f"The kernel supports from 1 to {MOST_GATE_ROWS} tokens, not {x.numel() // x.shape[-1]}."
    if any(type(weight.data) is not Tensor or weight.dtype == torch.float64 for weight in weights):
        return "The kernel supports plain weights of at most 32 bits, not subclasses of Tensor or torch.float64."
    if torch.is_grad_enabled():
        return "The kernel has no gradients."
    return _triton_missing_reason()


def cross_entropy_unsupported_reason(features: Tensor, dtype: torch.dtype) -> str | None:
    """Why the cross-entropy kernel does not support logits of a dtype, computed from features."""
    if reason := device_unsupported_reason(features.device.type, features.device.index):
        return reason
    if dtype not in KERNEL_DTYPES:
        return f"The cross-entropy kernel supports {_names(KERNEL_DTYPES)}, not {dtype}."
    return _triton_missing_reason()


def kernel_chunk(inputs: Inputs, form: str, chunk_size: int | None, with_states: bool) -> int:
    """Tokens per chunk of a call that runs on the kernels; 0: the attention form.

    Args:
        form: "attention", "chunked" or "auto": the faster one.
        chunk_size: as in `sympow.attention`.
        with_states: whether a state is given or asked for.
    """
    if form == "attention":
        return 0
    if form == "auto" and chunk_size is None and not _chunked_pays(inputs, with_states):
        return 0
    if inputs.power == 2:
        return quadratic_chunk(inputs.length, chunk_size)
    # p = 4: the larger the state, the fewer of them.
    size = chunk_size or (2048 if inputs.key_dim <= 16 else 4096)
    return size if size < inputs.length else 0


def quadratic_chunk(length: int, chunk_size: int | None) -> int:
    """Tokens per chunk on the chunked kernels of p = 2, no more than one chunk needs."""
    return min(chunk_size or CHUNK_SIZE, CHUNK_MULTIPLE * -(-length // CHUNK_MULTIPLE))


def quadratic_segment(inputs: Inputs, chunk: int, return_state: bool) -> int:
    """Tokens that a call without gradients computes at a time, p = 2: all, or a multiple of `chunk` for which the
    states of all chunks take at most CHUNK_STATE_BYTES, if a single chunk does.

    Args:
        chunk: tokens per chunk.
        return_state: whether the state after the last token is asked for. Chunks are then summed in float32.
    """
    if not is_known(inputs.batch) or not is_known(inputs.length):
        return inputs.length
    entries = inputs.batch * inputs.key_heads * padded_dim(inputs) ** 3
    chunks = -(-inputs.length // chunk)
    itemsize = inputs.q.dtype.itemsize
    if chunks * entries * (itemsize + 4 * return_state) <= CHUNK_STATE_BYTES:
        return inputs.length
    # All segments but the last return a state.
    most = max(1, CHUNK_STATE_BYTES // (entries * (itemsize + 4)))
    segments = -(-chunks // most)
    return chunk * -(-chunks // segments)


def padded_dim(inputs: Inputs) -> int:
    """The size to which the kernels pad heads with zeros, keys and values alike."""
    dim = max(inputs.key_dim, inputs.value_dim)
    return max(SMALLEST_DIM, 1 << (dim - 1).bit_length())


def padded_quartic_dims(inputs: Inputs) -> tuple[int, int]:
    """The sizes to which the state kernels of p = 4 pad keys and values with zeros: the next that they have."""
    dim = next(size for size in QUARTIC_DIMS if size >= inputs.key_dim)
    return dim, next(size for size in QUARTIC_VALUE_DIMS if size >= inputs.value_dim)


def _chunked_pays(inputs: Inputs, with_states: bool) -> bool:
    dims = (inputs.key_dim, inputs.value_dim)
    if chunked_unsupported_reason(inputs.power, *dims, inputs.q.dtype) is not None:
        return False
    # With p = 2 the kernels take states in and out; the attention form queries and folds them in plain PyTorch, and so
    # do both forms with a gate per rotated pair.
    if with_states and inputs.power == 2 and not inputs.vector_gate:
        return True
    # The kernels pad heads to a power of two.
    key_dim, value_dim = (1 << (dim - 1).bit_length() for dim in (inputs.key_dim, inputs.value_dim))
    balance = crossover_length(key_dim, value_dim, inputs.power, inputs.group)
    return inputs.length > max(CROSSOVER_FACTOR * balance, 2 * CHUNK_SIZE)


def portable_chunk(
    inputs: Inputs, form: str, chunk_size: int | None, *, initial_state: bool, return_state: bool
) -> int | None:
    """Tokens per chunk of a call in plain PyTorch; None: the attention form. Arguments as in `sympow.attention`."""
    if form == "attention":
        return None
    work = Workload(
        length=inputs.length,
        key_dim=inputs.key_dim,
        value_dim=inputs.value_dim,
        power=inputs.power,
        group=inputs.group,
        parallel=inputs.batch * inputs.key_heads,
        initial_state=initial_state,
        return_state=return_state,
    )
    machine = CPU if inputs.q.device.type == "cpu" else GPU
    if form == "auto" and chunk_size is None and cheaper_form(work, machine) == "attention":
        return None
    return chunk_size or best_chunk_size(work, machine)


def _kernel_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that the kernels support. Triton's interpreter computes bfloat16 incorrectly."""
    return KERNEL_DTYPES[1:] if triton_interpreted() else KERNEL_DTYPES


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return f"{', '.join(map(str, dtypes[:-1]))} and {dtypes[-1]}"


def _limit_of_dims(key_dim: int, value_dim: int) -> str:
    return f"The kernels support head dims up to {LARGEST_DIM}, not {max(key_dim, value_dim)}."


def require_supported(reason: str | None) -> None:
    """Raises a ValueError with the reason why a call with backend="triton" is not supported, if there is one."""
    if reason is not None:
        raise ArgumentError("backend", f"='triton' does not support this call. {reason}")
