"""The softmax baseline, with the same gates and rotations as the operator it is compared with.

    B_ij = b_ij exp(s · Q_i · R(c_ij θ)ᵀ K_j),    s = 1/√d

A gate multiplies B_ij, so it adds log b_ij to the logit; with one fixed γ per head that is ALiBi (paper app. A.1).
Products are PyTorch's own `scaled_dot_product_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sympow.ops.blocks import recompute
from sympow.ops.documents import run_documents
from sympow.ops.record import TensorRecord, register_as_tree
from sympow.ops.sequence import Sequence
from sympow.ops.turning import turn
from sympow.ops.validation import check_documents, check_tensors, document_offsets

# Rows whose biases are formed at once where gates or a cache ask for an explicit bias.
ROWS = 256
# A decay this strong hides a key altogether, whatever its logit: so γ = 0, or enough smaller gates, erase the past.
CLOSED_GATE = -1e5


@dataclass(frozen=True, eq=False)
class KeyValueState(TensorRecord):
    """The keys and values of all tokens so far: what softmax keeps where sympow keeps a `State`. It grows with time.

    Attributes:
        k: rotated keys, (b, s, h_kv, d).
        v: values, (b, s, h_kv, e).
        decay: running sum of log γ up to each key, (b, s, h_kv) float64; None without gates.
        phase: μ after the last token, (b, h_kv, d/2) float64; None without rotation.
    """

    k: Tensor
    v: Tensor
    decay: Tensor | None
    phase: Tensor | None

    @property
    def length(self) -> int:
        return self.k.shape[1]


register_as_tree(KeyValueState)


@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: KeyValueState | None = None,
    return_state: Literal[False] = False,
) -> Tensor: ...


@overload
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: KeyValueState | None = None,
    *,
    return_state: Literal[True],
) -> tuple[Tensor, KeyValueState]: ...


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    initial_state: KeyValueState | None = None,
    return_state: bool = False,
) -> Tensor | tuple[Tensor, KeyValueState]:
    """Causal softmax attention with gating and rotation; arguments and shapes as in `sympow.attention`.

    A gate per rotated pair has no counterpart here, since there is no finite state to decay pair by pair. It acts by
    its geometric mean over pairs, so that equal entries still give the scalar gate.

    Packed documents leave caches of different lengths, so states do not go together with `cu_seqlens` here.
    """
    check_tensors(q, k, v, log_gamma, beta, theta)
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q)
        offsets = document_offsets(cu_seqlens, q.shape[1])
        if initial_state is not None or return_state:
            raise ValueError(
                "cu_seqlens cannot go with initial_state or return_state in softmax attention: documents of different "
                "lengths leave caches of different lengths"
            )
    if initial_state is not None:
        _check_cache(initial_state, k, v, gated=log_gamma is not None, rotated=theta is not None)
    if log_gamma is not None and log_gamma.ndim == 4:
        log_gamma = log_gamma.mean(-1)
    sequence = Sequence(q, k, v, log_gamma, beta, theta, power=1)
    if cu_seqlens is not None:
        return run_documents(sequence, offsets, None, lambda document, _: (_run(document, None)[0], None))[0]
    y, state = _run(sequence, initial_state)
    return (y, state) if return_state else y


def _run(sequence: Sequence, past: KeyValueState | None) -> tuple[Tensor, KeyValueState]:
    q, k, phase = turn(sequence, None if past is None else past.phase)
    v = sequence.v
    decay = None
    if sequence.log_gamma is not None:
        decay = sequence.log_gamma.to(torch.float64).clamp(min=CLOSED_GATE).cumsum(1)  # (b, t, h_kv)
    if past is not None:
        k, v = torch.cat([past.k, k], dim=1), torch.cat([past.v, v], dim=1)
        if decay is not None and past.decay is not None:
            so_far = past.decay[:, -1:].sum(1, keepdim=True)  # a sum, since the cache may still be empty
            decay = torch.cat([past.decay, so_far + decay], dim=1)
    y = _attend(q, k, v, decay)
    return y, KeyValueState(k, v, decay, phase)


def _attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None) -> Tensor:
    """Queries that stand at the end of the keys: q (b, t, h, d), k and v (b, s, h_kv, ·), decay (b, s, h_kv)."""
    length, total = q.shape[1], k.shape[1]
    heads = partial(torch.transpose, dim0=1, dim1=2)
    if decay is None and length == total:
        return heads(
            scaled_dot_product_attention(
                heads(q), heads(k), heads(v), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
            )
        )
    rows = []
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        seen = total - length + stop
        row_decay = None if decay is None else decay[:, seen - (stop - start) : seen]
        column_decay = None if decay is None else decay[:, :seen]
        rows.append(recompute(_attend_rows, q[:, start:stop], k[:, :seen], v[:, :seen], row_decay, column_decay))
    return torch.cat(rows, dim=1) if rows else q.new_empty(*q.shape[:3], v.shape[3])


def _attend_rows(q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor | None, column_decay: Tensor | None) -> Tensor:
    """The last rows of a causal attention against all keys they see."""
    rows, columns = q.shape[1], k.shape[1]
    future = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    if row_decay is None or column_decay is None:
        bias = torch.zeros(rows, columns, dtype=q.dtype, device=q.device).masked_fill(future, float("-inf"))
    else:
        between = row_decay.mT.unsqueeze(-1) - column_decay.mT.unsqueeze(-2)  # (b, h_kv, rows, columns)
        hidden = future | (between <= CLOSED_GATE)
        bias = between.to(q.dtype).masked_fill(hidden, float("-inf"))
        bias = bias.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
    y = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=bias,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return y.transpose(1, 2)


def _check_cache(state: KeyValueState, k: Tensor, v: Tensor, gated: bool, rotated: bool) -> None:
    if not isinstance(state, KeyValueState):
        raise TypeError(f"initial_state must be a KeyValueState, got {type(state).__name__}")
    for name, cached, new in (("keys", state.k, k), ("values", state.v, v)):
        if cached.shape[0] != new.shape[0] or cached.shape[2:] != new.shape[2:]:
            raise ValueError(
                f"initial_state holds {name} of (batch, heads, dim) {(cached.shape[0], *cached.shape[2:])}, "
                f"but the new ones have {(new.shape[0], *new.shape[2:])}"
            )
        if cached.dtype != new.dtype or cached.device != new.device:
            raise ValueError(
                f"initial_state holds {name} in {cached.dtype} on {cached.device}, but the new ones are in {new.dtype} "
                f"on {new.device}"
            )
    for what, has, wanted in (
        ("gates", state.decay is not None, gated),
        ("rotation", state.phase is not None, rotated),
    ):
        if has != wanted:
            made, used = ("with", "without") if has else ("without", "with")
            raise ValueError(f"initial_state was made {made} {what}, but is used {used}")
