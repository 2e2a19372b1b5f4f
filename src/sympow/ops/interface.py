"""`sympow.attention`: the one operator, in every form, on every backend."""

from __future__ import annotations

from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor

from sympow.checks import check_choice
from sympow.ops.compilation import is_known
from sympow.ops.dispatch import Request, choose_backend, run_portable, triton_available, triton_interpreted
from sympow.ops.fused import fused_form, fused_step
from sympow.ops.numerics import without_autocast
from sympow.ops.sequence import Sequence, run_documents
from sympow.ops.state import State
from sympow.ops.torch.dynamic_length import run_open_length
from sympow.ops.torch.late_queries import run_late_queries
from sympow.ops.validation import (
    BACKENDS,
    FORMS,
    check_bool,
    check_chunk_size,
    check_documents,
    check_power,
    check_state,
    check_tensors,
    document_offsets,
)

Form = Literal["auto", "attention", "chunked", "recurrent"]
Backend = Literal["auto", "torch", "triton"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int = 2,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: State | None = None,
    return_state: Literal[False] = False,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int = 2,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: State | None = None,
    *,
    return_state: Literal[True],
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, State]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int = 2,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: State | None = None,
    return_state: bool = False,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, State]:
    """Causal symmetric power attention with gating and rotation (paper §3.3, "conformal-sympow").

        Y_i = Σ_{j≤i} B_ij V_j / Σ_{j≤i} B_ij,    B_ij = b_ij (Q_i · R(c_ij θ)ᵀ K_j)^p,
        b_ij = ∏_{k=j+1..i} γ_k,    c_ij = Σ_{k=j+1..i} β_k.

    A call of any length continues a sequence: passing the state returned by one call as the `initial_state` of the next
    equals one call over both, whatever their forms, gradients included.

    Args:
        q: queries (b, t, h, d), float64, float32, bfloat16 or float16. There may be fewer of them than keys: then they
            are those of the last tokens, and y is of these alone.
        k: keys (b, t, h_kv, d); h is a multiple of h_kv, and query head i reads key head i // (h / h_kv).
        v: values (b, t, h_kv, e).
        power: p, even and at least 2.
        log_gamma: log of the gates γ, none positive, −inf allowed; float32 or float64. (b, t, h_kv), or
            (b, t, h_kv, d/2) for a gate per rotated pair, each scaling its pair of every key by γ^(1/p) a step.
            None: no gating.
        beta: scales of the rotation, (b, t, h_kv) or (b, t, h_kv, d/2), float32 or float64. Needs `theta`.
        theta: rotation rates (d/2,) in radians a token, float32 or float64 (`rotary_rates`). Alone: fixed rotary.
            None: no rotation.
        cu_seqlens: offsets of packed documents, (n + 1,) int32 or int64 from 0 to t, for batch 1. Neither attention,
            state nor phase crosses from one document to the next; states then have one batch entry per document.
        initial_state: what came before; None: nothing.
        return_state: whether to return (y, state) instead of y.
        form: "attention" (quadratic in t), "chunked" (linear in t), "recurrent" (token by token), or "auto": the
            cheaper of the first two (`sympow.ops.cost`). All give the same numbers.
        backend: "torch" (anywhere), "triton" (fused kernels; raises where they cannot serve the call), or "auto": the
            kernels on a GPU wherever they can.
        chunk_size: tokens per chunk of the chunked form; None: chosen by cost.

    Returns:
        y (b, t, h, e) in the dtype of q; with `return_state` also the `State` after the last token.
        A row whose scores are all zero gives 0. A key or value that is not finite changes no row before it, except in
        the same tile of a kernel (docs/mathematics.md).

    Raises:
        ValueError, TypeError: where an argument does not fit; the message names it.

    Example:
        >>> q, k, v = torch.randn(3, 1, 100, 2, 16)
        >>> y = attention(q, k, v, theta=rotary_rates(16, max_document=1024))
        >>> head, state = attention(q[:, :60], k[:, :60], v[:, :60], return_state=True)
        >>> tail = attention(q[:, 60:], k[:, 60:], v[:, 60:], initial_state=state)
    """
    check_power(power)
    check_choice("form", form, FORMS)
    check_choice("backend", backend, BACKENDS)
    check_chunk_size(chunk_size, form)
    check_bool("return_state", return_state)
    check_tensors(q, k, v, log_gamma, beta, theta, late_queries=True)
    late_queries = q.shape[1] < k.shape[1]
    if late_queries:
        _check_late_queries(cu_seqlens, form, backend)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q)
    if initial_state is not None:
        documents = None if cu_seqlens is None else len(cu_seqlens) - 1
        check_state(initial_state, q, k, v, power, theta is not None, documents)
    sequence = Sequence(q, k, v, log_gamma, beta, theta, power)
    # Under autocast the products below would silently run in half precision, states included.
    with without_autocast(q.device):
        run = partial(_run, return_state=return_state, form=form, chunk_size=chunk_size, backend=backend)
        with_states = initial_state is not None or return_state
        if late_queries:
            by_scores = False if chunk_size is not None else {"auto": None, "attention": True}.get(form, False)
            y, state = run_late_queries(sequence, initial_state, return_state, by_scores, run)
        elif cu_seqlens is None:
            y, state = run(sequence, initial_state)
        elif not with_states and backend_for(sequence, False, form, chunk_size, backend) == "triton":
            y, state = fused_form(sequence, None, False, form, chunk_size, sequence.needs_grad, cu_seqlens)
        else:
            y, state = run_documents(sequence, document_offsets(cu_seqlens, q.shape[1]), initial_state, run)
    if not return_state:
        return y
    assert state is not None
    return y, state


def _check_late_queries(cu_seqlens: Tensor | None, form: Form, backend: Backend) -> None:
    if cu_seqlens is not None:
        raise ValueError("cu_seqlens needs a query for every key, since each document has its own last tokens")
    if backend == "triton" and form in ("auto", "attention"):
        raise ValueError(
            "backend='triton' scores no fewer queries than keys; pass form='chunked', which folds the earlier keys "
            "first, or leave the backend to 'auto'"
        )


def _run(
    sequence: Sequence,
    initial_state: State | None,
    return_state: bool,
    form: Form,
    chunk_size: int | None,
    backend: Backend,
) -> tuple[Tensor, State | None]:
    """One batch of sequences, in the form and on the backend asked for."""
    if sequence.length == 0:
        return _run_nothing(sequence, initial_state, return_state)
    needs_grad = sequence.needs_grad or (
        torch.is_grad_enabled() and initial_state is not None and initial_state.requires_grad
    )
    step = sequence.length == 1 and initial_state is not None and not needs_grad
    chosen = backend_for(sequence, step, form, chunk_size, backend)
    if chosen == "triton" and step and initial_state is not None:
        return fused_step(sequence, initial_state, return_state)
    if chosen == "triton":
        return fused_form(sequence, initial_state, return_state, form, chunk_size, needs_grad)
    run = run_portable if is_known(sequence.batch) and is_known(sequence.length) else run_open_length
    return run(sequence, initial_state, return_state, form, chunk_size, needs_grad)


def backend_for(
    sequence: Sequence, step: bool, form: Form, chunk_size: int | None, backend: Backend
) -> Literal["torch", "triton"]:
    """The backend for one call; `step`: it is one token from a state, without gradients."""
    request = Request(
        device=sequence.q.device.type,
        dtype=sequence.q.dtype,
        power=sequence.power,
        key_dim=sequence.key_dim,
        value_dim=sequence.value_dim,
        form=form,
        chunk_size=chunk_size,
        vector_gate=sequence.log_gamma is not None and sequence.log_gamma.ndim == 4,
        step=step,
        sequences=sequence.batch * sequence.q.shape[2],
    )
    return choose_backend(backend, request, available=triton_available, interpreted=triton_interpreted())


def _run_nothing(sequence: Sequence, initial_state: State | None, return_state: bool) -> tuple[Tensor, State | None]:
    """No tokens: an empty output, and the state as it was."""
    # Made from q rather than anew, so that a graph through it does not break.
    y = sequence.q[..., :1].expand(*sequence.q.shape[:3], sequence.value_dim).clone()
    if not return_state:
        return y, None
    if initial_state is None:
        initial_state = State.zeros(
            sequence.batch,
            sequence.key_heads,
            sequence.key_dim,
            sequence.value_dim,
            sequence.power,
            rotated=sequence.rotated,
            dtype=sequence.compute_dtype,
            device=sequence.q.device,
        )
    return y, initial_state
