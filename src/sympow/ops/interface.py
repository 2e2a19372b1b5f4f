"""`sympow.attention`: checks its arguments, asks `dispatch` for form and backend, and runs the call."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad

from sympow.checks import check_bool, check_choice
from sympow.errors import ArgumentError
from sympow.ops.compilation import is_known
from sympow.ops.dispatch import (
    backend_for,
    kernel_chunk,
    late_queries_unsupported_reason,
    padded_dim,
    padded_quartic_dims,
    quadratic_segment,
    require_supported,
)
from sympow.ops.inputs import Inputs, divide, run_documents
from sympow.ops.numerics import log_gate_root, without_autocast
from sympow.ops.rotary import phase_after
from sympow.ops.state import State
from sympow.ops.symmetric import feature_indices, multinomial_weights
from sympow.ops.torch.dynamic_length import run_open_length
from sympow.ops.torch.forms import run_late_queries, run_portable
from sympow.ops.torch.products import Sums, query_state, update_state
from sympow.ops.validation import check_documents, check_state, check_tensors, document_offsets
from sympow.settings import BACKENDS, FORMS, Backend, Form, check_chunk_size, check_features, check_power


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
        q: queries (b, t, h, d), float64, float32, bfloat16 or float16. If there are fewer of them than keys, they
            are those of the last tokens, and y has only these.
        k: keys (b, t, h_kv, d); h is a multiple of h_kv, and query head i attends to key head i // (h / h_kv).
        v: values (b, t, h_kv, e).
        power: p: 2, 4, 6 or 8.
        log_gamma: log of the gates γ, none positive, −inf allowed; float32 or float64. (b, t, h_kv), or
            (b, t, h_kv, d/2) for a gate per rotated pair, each scaling its pair of every key by γ^(1/p) per step.
            None: no gating.
        beta: scales of the rotation, (b, t, h_kv) or (b, t, h_kv, d/2), float32 or float64. Needs `theta`.
        theta: rotation rates (d/2,) in radians per token, float32 or float64 (`rotary_rates`). Without beta: RoPE.
            None: no rotation.
        cu_seqlens: offsets of packed documents, (n + 1,) int32 or int64 from 0 to t, for batch 1. Neither attention,
            state nor phase crosses from one document to the next; states then have one batch entry per document.
        initial_state: the state after the tokens before; None: there are none.
        return_state: whether to return (y, state) instead of y.
        form: "attention" (quadratic in t), "chunked" (linear in t), "recurrent" (token by token), or "auto": the
            cheaper of the first two (`sympow.ops.cost`). All give the same numbers.
        backend: "torch" (anywhere), "triton" (fused kernels; raises where they do not support the call), or "auto":
            the kernels on a GPU wherever they support the call.
        chunk_size: tokens per chunk of the chunked form; None: chosen by cost.

    Returns:
        y (b, t, h, e) in the dtype of q; with `return_state` also the `State` after the last token.
        A row whose scores are all zero gives 0. A key or value that is not finite changes no row before it, except in
        the same tile of a kernel (docs/mathematics.md).

    Raises:
        ValueError, TypeError: an argument is invalid; the message names it.

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
    with_states = initial_state is not None or return_state
    # A given state has its features already.
    if initial_state is None and (return_state or chunk_size is not None or form in ("chunked", "recurrent")):
        check_features(k.shape[3], power)
    late_queries = q.shape[1] < k.shape[1]
    if late_queries:
        if cu_seqlens is not None:
            raise ArgumentError(
                "cu_seqlens", "needs a query for every key, since each document has its own last tokens"
            )
        require_supported(late_queries_unsupported_reason(backend, form))
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q)
    if initial_state is not None:
        documents = None if cu_seqlens is None else len(cu_seqlens) - 1
        check_state(initial_state, q, k, v, power, theta is not None, documents)
    inputs = Inputs(q, k, v, log_gamma, beta, theta, power)
    # Autocast would run the products below in half precision, those of states included.
    with without_autocast(q.device):
        run = partial(_run, return_state=return_state, form=form, chunk_size=chunk_size, backend=backend)
        if late_queries:
            by_scores = False if chunk_size is not None else {"auto": None, "attention": True}.get(form, False)
            y, state = run_late_queries(inputs, initial_state, return_state, by_scores, run)
        elif cu_seqlens is None:
            y, state = run(inputs, initial_state)
        elif not with_states and backend_for(inputs, False, form, chunk_size, backend) == "triton":
            y, state = run(inputs, None, cu_seqlens=cu_seqlens)
        else:
            y, state = run_documents(inputs, document_offsets(cu_seqlens, q.shape[1]), initial_state, run)
    if not return_state:
        return y
    assert state is not None
    return y, state


def _run(
    inputs: Inputs,
    initial_state: State | None,
    return_state: bool,
    form: Form,
    chunk_size: int | None,
    backend: Backend,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e) of a batch of sequences, and the state after the last token if asked for.

    The operators of the kernels are called here and not further down, so that a stack trace is short.

    Args:
        cu_seqlens: offsets of packed documents, only on Triton and without a state at either end; or None.
        the rest: as in `attention`.
    """
    if inputs.length == 0:
        return _run_nothing(inputs, initial_state, return_state)
    needs_grad = inputs.needs_grad or (
        torch.is_grad_enabled() and initial_state is not None and initial_state.requires_grad
    )
    step = inputs.length == 1 and initial_state is not None and not needs_grad
    if backend_for(inputs, step, form, chunk_size, backend) == "torch":
        run = run_portable if is_known(inputs.batch) and is_known(inputs.length) else run_open_length
        return run(inputs, initial_state, return_state, form, chunk_size, needs_grad)

    start = None if initial_state is None else initial_state.phase
    if step and initial_state is not None:
        from sympow.kernels.decode.op import fused_decode

        y, kv, normalizer, phase = fused_decode(
            *inputs.one_token(),
            initial_state.kv.to(torch.float32).contiguous(),
            initial_state.normalizer.to(torch.float32).contiguous(),
            None if start is None else start.contiguous(),
            feature_indices(inputs.key_dim, inputs.power, inputs.q.device),
            multinomial_weights(inputs.key_dim, inputs.power, torch.float32, inputs.q.device),
        )
        return y.unsqueeze(1), _state_after(inputs, kv, normalizer, phase) if return_state else None

    from sympow.kernels.attention.op import fused_attention, query_scales
    from sympow.kernels.common import close_gates, locate
    from sympow.kernels.rotary import fused_rotation
    from sympow.kernels.states.full_state import from_full, to_full

    documents = None if cu_seqlens is None else locate(cu_seqlens.to(inputs.q.device), inputs.length)
    with_states = initial_state is not None or return_state
    chunk = kernel_chunk(inputs, form, chunk_size, with_states)
    # With p = 2 the chunked kernels take states in and out. Otherwise `_add_past` adds what states contribute.
    carries_states = chunk > 0 and inputs.power == 2 and not inputs.vector_gate
    if carries_states and not needs_grad and documents is None:
        segment = quadratic_segment(inputs, chunk, return_state)
        if segment < inputs.length:
            return _run_in_segments(inputs, initial_state, return_state, segment, chunk)
    rotated = inputs
    if inputs.theta is not None:
        q, k = fused_rotation(inputs.q, inputs.k, inputs.beta, inputs.theta, start, documents, relative=not with_states)
        rotated = replace(inputs, q=q, k=k)
    log_gamma = None if inputs.log_gamma is None else inputs.log_gamma.to(torch.float32)
    if documents is not None:
        log_gamma = close_gates(log_gamma, documents, inputs.key_heads)
    rotated = replace(rotated, log_gamma=log_gamma)

    dim = padded_dim(inputs)
    full_state: tuple[Tensor | None, Tensor | None] = (None, None)
    if carries_states and initial_state is not None:
        kv, normalizer = initial_state.kv.to(torch.float32), initial_state.normalizer.to(torch.float32)
        full_state = to_full(kv, normalizer, inputs.key_dim, dim)
    padded = (_padded(x, dim) for x in (rotated.q, rotated.k, rotated.v))
    if inputs.vector_gate:
        from sympow.kernels.pair_gates.op import fused_pair_attention

        assert log_gamma is not None
        y, denominator, *_ = fused_pair_attention(
            *padded, log_gamma, *(documents or (None, None)), inputs.power, chunk, needs_grad
        )
        # Between chunks it passes states itself.
        chunk = 0
    else:
        y, denominator, kv, normalizer, *_ = fused_attention(
            *padded,
            log_gamma,
            *(documents or (None, None)),
            *full_state,
            inputs.power,
            chunk,
            inputs.key_dim,
            carries_states,
            needs_grad,
            carries_states and return_state,
        )
    y = y[..., : inputs.value_dim]
    if not carries_states and (chunk or initial_state is not None):
        # The scale of the denominators. It is a constant to autograd, since y does not depend on it.
        scale = query_scales(_padded(rotated.q, dim).detach()).transpose(1, 2).unsqueeze(-1).to(rotated.q.dtype)
        scaled = replace(rotated, q=rotated.q * scale)
        earlier = None
        if chunk:
            from sympow.kernels.states.quartic_op import past_attention

            earlier = past_attention(*_padded_for_states(scaled), log_gamma, inputs.power, chunk)
        y = _add_past(scaled, y, denominator, earlier, initial_state)
    if not return_state:
        return y, None
    if carries_states:
        kv, normalizer = from_full(kv, normalizer, inputs.key_dim, inputs.value_dim)
    else:
        kv, normalizer = _fold(rotated, initial_state)
    phase = None
    if inputs.theta is not None:
        phase = phase_after(inputs.theta, inputs.beta, start, inputs.length, inputs.batch, inputs.key_heads)
    return y, _state_after(inputs, kv, normalizer, phase)


def _run_in_segments(
    inputs: Inputs, initial_state: State | None, return_state: bool, segment: int, chunk: int
) -> tuple[Tensor, State | None]:
    """As `_run` in the chunked form on the kernels, segment by segment, each from the state after the one before."""
    y = inputs.q.new_empty(*inputs.q.shape[:3], inputs.value_dim)
    state = initial_state
    for start in range(0, inputs.length, segment):
        part = inputs[start : start + segment]
        more = start + segment < inputs.length
        y[:, start : start + segment], state = _run(part, state, return_state or more, "chunked", chunk, "triton")
    return y, state


def _state_after(inputs: Inputs, kv: Tensor, normalizer: Tensor, phase: Tensor | None) -> State:
    phase = phase if inputs.rotated else None
    return State(kv, normalizer, phase, power=inputs.power, key_dim=inputs.key_dim)


def _run_nothing(inputs: Inputs, initial_state: State | None, return_state: bool) -> tuple[Tensor, State | None]:
    """An empty output for no tokens, and the unchanged state."""
    # From q, so that the output stays connected to the autograd graph.
    y = inputs.q[..., :1].expand(*inputs.q.shape[:3], inputs.value_dim).clone()
    if not return_state:
        return y, None
    if initial_state is None:
        initial_state = State.zeros(
            inputs.batch,
            inputs.key_heads,
            inputs.key_dim,
            inputs.value_dim,
            inputs.power,
            rotated=inputs.rotated,
            dtype=inputs.compute_dtype,
            device=inputs.q.device,
        )
    return y, initial_state


def _add_past(
    inputs: Inputs,
    y: Tensor,
    denominator: Tensor,
    earlier: tuple[Tensor, Tensor, Tensor] | None,
    state: State | None,
) -> Tensor:
    """y of the attention form (b, t, h, e), with what earlier chunks and a given state add to it.

    Args:
        inputs: with rotated queries and keys, queries scaled by `query_scales`, and gates in float32.
        y: the output of each token from its own chunk alone.
        denominator: Σ_j B_ij of its own chunk, (b, h, t) float32.
        earlier: what `past_attention` returned for earlier chunks (p = 4); None: there is one chunk.
        state: the state before the first token, or None.
    """
    by_group = denominator.unflatten(1, (inputs.key_heads, inputs.group))
    sums = Sums(_by_head(y, inputs) * by_group.unsqueeze(-1), by_group)
    if earlier is not None:
        by_group = earlier[1].unflatten(1, (inputs.key_heads, inputs.group))
        sums = sums.plus(Sums(_by_head(earlier[0][..., : inputs.value_dim], inputs), by_group))
    if state is not None:
        kv, normalizer = state.kv.to(torch.float32), state.normalizer.to(torch.float32)
        queries = _by_head(inputs.q.to(torch.float32), inputs)
        sums = sums.plus(query_state(queries, _decay(inputs), kv, normalizer, inputs.power))
    return divide(sums.numerator, sums.denominator, y.dtype)


def _padded_for_states(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the state kernels of p = 4 take them."""
    dim, value_dim = padded_quartic_dims(inputs)
    return _padded(inputs.q, dim), _padded(inputs.k, dim), _padded(inputs.v, value_dim)


def _fold(inputs: Inputs, state: State | None) -> tuple[Tensor, Tensor]:
    """S and Z after the last token: rotated keys and their values folded into the state in plain PyTorch."""
    keys, values = (x.to(torch.float32).transpose(1, 2) for x in (inputs.k, inputs.v))
    kv = None if state is None else state.kv.to(torch.float32)
    normalizer = None if state is None else state.normalizer.to(torch.float32)
    # Not in place, since the given state belongs to the caller.
    return update_state(keys, values, _decay(inputs), kv, normalizer, inputs.power, in_place=False)


def _decay(inputs: Inputs) -> Tensor:
    """Running sums of log γ^(1/p), zero without gates: (b, h_kv, t, 1) float64."""
    if inputs.log_gamma is None:
        shape = (inputs.batch, inputs.key_heads, inputs.length, 1)
        return torch.zeros(shape, dtype=torch.float64, device=inputs.q.device)
    return log_gate_root(inputs.log_gamma, inputs.power).cumsum(2)


def _by_head(x: Tensor, inputs: Inputs) -> Tensor:
    """(b, t, h, n) → (b, h_kv, g, t, n)."""
    return x.unflatten(2, (inputs.key_heads, inputs.group)).permute(0, 2, 3, 1, 4)


def _padded(x: Tensor, dim: int) -> Tensor:
    """x with zeros up to a head dim, which change neither scores nor outputs."""
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))
