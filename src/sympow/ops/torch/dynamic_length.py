"""Calls in plain PyTorch whose batch or length a compiler leaves open: compiled once for all of them.

How the portable path goes through a call depends on the length: in tiles, in chunks, in the cheaper form. A compiler
that leaves the length open cannot trace that. To torch.compile, such a call is therefore one operator, which runs as
without a compiler, in bounded memory; its backward pass computes it again. In torch.export, where a graph of PyTorch's
own operators is worth more, the attention form is traced as one tile; what cannot be, is the operator there, too.
"""

# No `from __future__ import annotations`: the schemas are read off the annotations.

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sympow.ops.numerics import compute_dtype, without_autocast
from sympow.ops.sequence import Sequence
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_dim
from sympow.ops.torch.forms import chunked_form, run_portable


def run_open_length(
    sequence: Sequence,
    initial_state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
) -> tuple[Tensor, State | None]:
    """As `run_portable`, traced without a look at batch and length."""
    gate_per_pair = sequence.log_gamma is not None and sequence.log_gamma.ndim == 4
    in_one_tile = chunk_size is None and form in ("auto", "attention") and not gate_per_pair
    if torch.compiler.is_exporting() and in_one_tile:
        return chunked_form(sequence, initial_state, return_state, None, needs_grad)
    state = initial_state
    y, kv, normalizer, phase = _run(
        *(sequence.q, sequence.k, sequence.v, sequence.log_gamma, sequence.beta, sequence.theta),
        *((None, None, None) if state is None else (state.kv, state.normalizer, state.phase)),
        *(sequence.power, return_state, form, chunk_size or 0),
    )
    if not return_state:
        return y, None
    after_phase = phase if sequence.rotated else None
    return y, State(kv, normalizer, after_phase, power=sequence.power, key_dim=sequence.key_dim)


def _outcome(
    tensors: list[Tensor | None], power: int, return_state: bool, form: str, chunk_size: int
) -> tuple[Tensor, ...]:
    """y, and S, Z and μ after the last token; those that there are."""
    q, k, v, log_gamma, beta, theta, kv, normalizer, phase = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    sequence = Sequence(q, k, v, log_gamma, beta, theta, power)
    state = None
    if kv is not None and normalizer is not None:
        state = State(kv, normalizer, phase, power=power, key_dim=sequence.key_dim)
    needs_grad = sequence.needs_grad or (torch.is_grad_enabled() and state is not None and state.requires_grad)
    with without_autocast(q.device):
        y, after = run_portable(sequence, state, return_state, form, chunk_size or None, needs_grad)
    if after is None:
        return (y,)
    return (y, after.kv, after.normalizer) if after.phase is None else (y, after.kv, after.normalizer, after.phase)


@torch.library.custom_op("sympow::portable_attention", mutates_args=())
def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    phase: Tensor | None,
    power: int,
    return_state: bool,
    form: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, and S, Z and μ after the last token; empty tensors stand for those that there are not."""
    found = _outcome([q, k, v, log_gamma, beta, theta, kv, normalizer, phase], power, return_state, form, chunk_size)
    y, after_kv, after_normalizer, after_phase = (*found, *(q.new_empty(0) for _ in range(4 - len(found))))
    return y, after_kv, after_normalizer, after_phase


@_run.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    phase: Tensor | None,
    power: int,
    return_state: bool,
    form: str,
    chunk_size: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = q.new_empty(*q.shape[:3], v.shape[3])
    if not return_state:
        return y, q.new_empty(0), q.new_empty(0), q.new_empty(0)
    batch, _, heads, dim = k.shape
    shape, dtype = (batch, heads, symmetric_dim(dim, power)), compute_dtype(q.dtype)
    after_phase = q.new_empty(0) if theta is None else q.new_empty(batch, heads, dim // 2, dtype=torch.float64)
    return y, q.new_empty(*shape, v.shape[3], dtype=dtype), q.new_empty(shape, dtype=dtype), after_phase


@torch.library.custom_op("sympow::portable_attention_backward", mutates_args=())
def _run_backward(
    gradients: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    phase: Tensor | None,
    power: int,
    return_state: bool,
    form: str,
    chunk_size: int,
    wanted: list[bool],
) -> list[Tensor]:
    """Gradients of those of the nine tensors that are wanted, from those of what `_run` returns."""
    tensors = [q, k, v, log_gamma, beta, theta, kv, normalizer, phase]
    with _autograd():
        inputs = [
            None if x is None else x.detach().requires_grad_(want) for x, want in zip(tensors, wanted, strict=True)
        ]
        found = _outcome(inputs, power, return_state, form, chunk_size)
        results = [(y, dy) for y, dy in zip(found, gradients, strict=False) if y.requires_grad]
        leaves = [x for x in inputs if x is not None and x.requires_grad]
        outputs, their_gradients = zip(*results, strict=True)
        got = torch.autograd.grad(outputs, leaves, their_gradients, materialize_grads=True)
    # Copies: a gradient that passes through unchanged, as that of a phase does, is no new tensor.
    return [x.clone(memory_format=torch.contiguous_format) for x in got]


@contextmanager
def _autograd() -> Iterator[None]:
    """Autograd inside an operator, where it is switched off: what runs there lies below it."""
    keys = torch._C.DispatchKey
    with (
        torch._C._SetExcludeDispatchKeyGuard(keys.AutogradFunctionality, False),
        torch._C._SetExcludeDispatchKeyGuard(keys.ADInplaceOrView, False),
        torch.enable_grad(),
    ):
        yield


@_run_backward.register_fake
def _(
    gradients: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None,
    beta: Tensor | None,
    theta: Tensor | None,
    kv: Tensor | None,
    normalizer: Tensor | None,
    phase: Tensor | None,
    power: int,
    return_state: bool,
    form: str,
    chunk_size: int,
    wanted: list[bool],
) -> list[Tensor]:
    tensors = [q, k, v, log_gamma, beta, theta, kv, normalizer, phase]
    contiguous = torch.contiguous_format
    return [
        torch.empty_like(x, memory_format=contiguous)
        for x, want in zip(tensors, wanted, strict=True)
        if want and x is not None
    ]


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9])
    ctx.options = inputs[9:]


def _differentiate(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:9])
    found = iter(_run_backward(list(gradients), *ctx.saved_tensors, *ctx.options, wanted))
    return (*(next(found) if want else None for want in wanted), None, None, None, None)


_run.register_autograd(_differentiate, setup_context=_save_inputs)
