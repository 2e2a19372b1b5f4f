"""Calls in plain PyTorch whose batch or length is symbolic under torch.compile or torch.export.

The tiles, the chunks and the form of a call in plain PyTorch depend on its length, which a compiler that leaves the
length symbolic cannot trace. To torch.compile such a call is therefore one custom operator, which runs as it does
without a compiler, in bounded memory, and is recomputed in the backward pass. torch.export traces the attention form as
one tile, since a graph of PyTorch's own operators is more portable; every other form is the operator there, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sympow.ops.inputs import Inputs
from sympow.ops.numerics import compute_dtype, without_autocast
from sympow.ops.state import State
from sympow.ops.torch.forms import chunked_form, run_portable
from sympow.settings import symmetric_dim


def run_open_length(
    inputs: Inputs,
    initial_state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
) -> tuple[Tensor, State | None]:
    """As `run_portable`, for a batch or length that is symbolic."""
    gate_per_pair = inputs.log_gamma is not None and inputs.log_gamma.ndim == 4
    in_one_tile = chunk_size is None and form in ("auto", "attention") and not gate_per_pair
    if torch.compiler.is_exporting() and in_one_tile:
        return chunked_form(inputs, initial_state, return_state, None, needs_grad)
    state = initial_state
    y, kv, normalizer, phase = _run(
        *(inputs.q, inputs.k, inputs.v, inputs.log_gamma, inputs.beta, inputs.theta),
        *((None, None, None) if state is None else (state.kv, state.normalizer, state.phase)),
        *(inputs.power, return_state, form, chunk_size or 0),
    )
    if not return_state:
        return y, None
    after_phase = phase if inputs.rotated else None
    return y, State(kv, normalizer, after_phase, power=inputs.power, key_dim=inputs.key_dim)


# The nine tensors of a call and of the state before it, and its options.
_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? log_gamma, Tensor? beta, Tensor? theta, "
    "Tensor? kv, Tensor? normalizer, Tensor? phase, "
    "SymInt power, bool return_state, str form, SymInt chunk_size"
)
_TENSORS = 9


def _outcome(
    tensors: list[Tensor | None], power: int, return_state: bool, form: str, chunk_size: int
) -> tuple[Tensor, ...]:
    """y and, where they exist, S, Z and μ after the last token."""
    q, k, v, log_gamma, beta, theta, kv, normalizer, phase = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    inputs = Inputs(q, k, v, log_gamma, beta, theta, power)
    state = None
    if kv is not None and normalizer is not None:
        state = State(kv, normalizer, phase, power=power, key_dim=inputs.key_dim)
    needs_grad = inputs.needs_grad or (torch.is_grad_enabled() and state is not None and state.requires_grad)
    with without_autocast(q.device):
        y, after = run_portable(inputs, state, return_state, form, chunk_size or None, needs_grad)
    if after is None:
        return (y,)
    return (y, after.kv, after.normalizer) if after.phase is None else (y, after.kv, after.normalizer, after.phase)


@torch.library.custom_op(
    "sympow::portable_attention", mutates_args=(), schema=f"({_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def _run(*inputs: Any) -> tuple[Tensor, ...]:
    """y, and S, Z and μ after the last token; an empty tensor in place of each that does not exist."""
    found = _outcome(list(inputs[:_TENSORS]), *inputs[_TENSORS:])
    return (*found, *(inputs[0].new_empty(0) for _ in range(4 - len(found))))


@_run.register_fake
def _(*inputs: Any) -> tuple[Tensor, ...]:
    q, k, v, _, _, theta, _, _, _, power, return_state, _, _ = inputs
    y = q.new_empty(*q.shape[:3], v.shape[3])
    if not return_state:
        return y, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    batch, _, heads, dim = k.shape
    shape, dtype = (batch, heads, symmetric_dim(dim, power)), compute_dtype(q.dtype)
    after_phase = q.new_empty(0) if theta is None else q.new_empty(batch, heads, dim // 2, dtype=torch.float64)
    return y, q.new_empty(*shape, v.shape[3], dtype=dtype), q.new_empty(shape, dtype=dtype), after_phase


@torch.library.custom_op(
    "sympow::portable_attention_backward",
    mutates_args=(),
    schema=f"(Tensor[] gradients, bool[] wanted, {_INPUTS}) -> Tensor[]",
)
def _run_backward(gradients: list[Tensor], wanted: list[bool], *inputs: Any) -> list[Tensor]:
    """Gradients of those of the nine tensors that are wanted, from the gradients of what `_run` returns."""
    with _autograd():
        leaves = [
            None if x is None else x.detach().requires_grad_(want)
            for x, want in zip(inputs[:_TENSORS], wanted, strict=True)
        ]
        found = _outcome(leaves, *inputs[_TENSORS:])
        results = [(y, dy) for y, dy in zip(found, gradients, strict=False) if y.requires_grad]
        outputs, their_gradients = zip(*results, strict=True)
        differentiated = [x for x in leaves if x is not None and x.requires_grad]
        got = torch.autograd.grad(outputs, differentiated, their_gradients, materialize_grads=True)
    # Copies: a gradient that passes through unchanged, as that of a phase does, is no new tensor.
    return [x.clone(memory_format=torch.contiguous_format) for x in got]


@contextmanager
def _autograd() -> Iterator[None]:
    """Enables autograd inside an operator, which runs below autograd's dispatch keys."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


@_run_backward.register_fake
def _(gradients: list[Tensor], wanted: list[bool], *inputs: Any) -> list[Tensor]:
    return [
        torch.empty_like(x, memory_format=torch.contiguous_format)
        for x, want in zip(inputs[:_TENSORS], wanted, strict=True)
        if want and x is not None
    ]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:_TENSORS])
    found = iter(_run_backward(list(gradients), wanted, *ctx.saved_tensors, *ctx.options))
    return (*(next(found) if want else None for want in wanted), *(None for _ in ctx.options))


_run.register_autograd(_differentiate, setup_context=_save_inputs)
