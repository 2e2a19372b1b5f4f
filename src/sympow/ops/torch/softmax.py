"""Softmax attention, the baseline, with the same gates and rotations as symmetric power attention.

    B_ij = b_ij exp(s · Q_i · R(c_ij θ)ᵀ K_j),    s = 1/√d

A gate multiplies B_ij, so it adds log b_ij to the logit; with one fixed γ per head that is ALiBi (paper app. A.1).
Products are PyTorch's own `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.ops.compilation import TensorRecord, conv_shape, register_as_pytree, slices
from sympow.ops.inputs import Inputs, run_documents
from sympow.ops.rotation import rotate_inputs
from sympow.ops.torch.products import recompute
from sympow.ops.validation import check_documents, check_tensors, document_offsets

# Rows per call of scaled_dot_product_attention where gates or a cache need an explicit bias.
ROWS = 256
# A key whose log decay reaches this is masked, whatever its logit: so γ = 0, or several small gates, erase the past.
CLOSED_GATE = -1e5


@dataclass(frozen=True, eq=False)
class KeyValueState(TensorRecord):
    """The keys and values of all tokens so far, which softmax attention needs in place of a `State`.

    Attributes:
        k: rotated keys, (b, s, h_kv, d).
        v: values, (b, s, h_kv, e).
        decay: running sum of log γ up to each key, (b, s, h_kv) float64; None without gates.
        phase: μ after the last token, (b, h_kv, d/2) float64; None without rotation.
        conv_state: as in `State`.
    """

    k: Tensor
    v: Tensor
    decay: Tensor | None
    phase: Tensor | None
    conv_state: Tensor | None = field(default=None, kw_only=True)

    @property
    def length(self) -> int:
        return self.k.shape[1]

    @classmethod
    def cat(cls, caches: Sequence[KeyValueState]) -> KeyValueState:
        """Concatenates caches along the batch; shorter ones are padded on the left."""
        if not caches:
            raise ArgumentError("caches", "must hold at least one cache, got none")
        kinds = sorted({(c.decay is not None, c.phase is not None, conv_shape(c)) for c in caches})
        if len(kinds) > 1:
            raise ArgumentError("caches", f"to be joined must agree in (gated, rotated, short_conv); got {kinds}")
        length = max(cache.length for cache in caches)
        members = [cache._filled_up(length) for cache in caches]
        plain = all(type(cache) is KeyValueState and cache.length == length for cache in caches)

        def joined(name: str) -> Any:
            tensors = [getattr(member, name) for member in members]
            return None if tensors[0] is None else torch.cat(tensors)

        result = PaddedKeyValueState(**{field.name: joined(field.name) for field in fields(PaddedKeyValueState)})
        return result.without_mask() if plain else result

    def _filled_up(self, length: int) -> PaddedKeyValueState:
        """The same cache, padded on the left to a length."""
        missing = length - self.length
        mask = (
            self.mask if isinstance(self, PaddedKeyValueState) else self.k.new_ones(self.k.shape[:2], dtype=torch.bool)
        )
        k, v = (pad(x, (0, 0, 0, 0, missing, 0)) for x in (self.k, self.v))
        decay = None if self.decay is None else pad(self.decay, (0, 0, missing, 0))
        return PaddedKeyValueState(k, v, decay, self.phase, pad(mask, (missing, 0)), conv_state=self.conv_state)


@dataclass(frozen=True, eq=False)
class PaddedKeyValueState(KeyValueState):
    """A `KeyValueState` with padding.

    Attributes:
        mask: True for keys of tokens, False for padding, (b, s) bool.
    """

    mask: Tensor

    def without_mask(self) -> KeyValueState:
        """The same without its mask, where nothing is padding."""
        return KeyValueState(self.k, self.v, self.decay, self.phase, conv_state=self.conv_state)


register_as_pytree(KeyValueState)
register_as_pytree(PaddedKeyValueState)


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
    mask: Tensor | None = None,
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
    mask: Tensor | None = None,
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
    mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, KeyValueState]:
    """Causal softmax attention with gating and rotation; arguments and shapes as in `sympow.attention`.

    A gate per rotated pair has no counterpart here, since there is no finite state to decay pair by pair. It acts by
    its geometric mean over pairs, so that equal entries still give the scalar gate.

    Packed documents would return caches of different lengths, so states and `cu_seqlens` cannot be combined here.

    `mask`, (b, t) bool, is True for tokens and False for padding: no token sees padding, now or from the state. A row
    of padding sees itself too, since it may have nothing else to see. The caller sets gates (log γ) and `beta` of
    padding to 0, so that padding has no effect.
    """
    check_tensors(q, k, v, log_gamma, beta, theta)
    if mask is not None and mask.shape != q.shape[:2]:
        raise ArgumentError("mask", f"must be (batch, time), {tuple(q.shape[:2])}; got {tuple(mask.shape)}")
    if cu_seqlens is not None:
        check_documents(cu_seqlens, q)
        offsets = document_offsets(cu_seqlens, q.shape[1])
        if mask is not None:
            raise ArgumentError("mask", "cannot be combined with cu_seqlens: packed documents need no padding")
        if initial_state is not None or return_state:
            given = "a state" if initial_state is not None else "return_state=True (pass return_state=False)"
            raise ArgumentError(
                "cu_seqlens",
                f"cannot be combined with {given} in softmax attention: documents of different lengths have caches of "
                "different lengths",
            )
    if initial_state is not None:
        _check_cache(initial_state, k, v, gated=log_gamma is not None, rotated=theta is not None)
    if log_gamma is not None and log_gamma.ndim == 4:
        log_gamma = log_gamma.mean(-1)
    inputs = Inputs(q, k, v, log_gamma, beta, theta, power=1)
    if cu_seqlens is not None:
        return run_documents(inputs, offsets, None, lambda document, _: (_run(document, None, None)[0], None))[0]
    y, state = _run(inputs, initial_state, mask)
    return (y, state) if return_state else y


def _run(inputs: Inputs, initial_state: KeyValueState | None, mask: Tensor | None) -> tuple[Tensor, KeyValueState]:
    q, k, phase = rotate_inputs(inputs, None if initial_state is None else initial_state.phase)
    v = inputs.v
    decay = None
    if inputs.log_gamma is not None:
        decay = inputs.log_gamma.to(torch.float64).clamp(min=CLOSED_GATE).cumsum(1)  # (b, t, h_kv)
    if initial_state is not None:
        mask = _join_masks(initial_state, mask, k)
        k, v = torch.cat([initial_state.k, k], dim=1), torch.cat([initial_state.v, v], dim=1)
        if decay is not None and initial_state.decay is not None:
            so_far = initial_state.decay[:, -1:].sum(1, keepdim=True)  # a sum, since the cache may still be empty
            decay = torch.cat([initial_state.decay, so_far + decay], dim=1)
    y = _attend(q, k, v, decay, mask)
    return y, KeyValueState(k, v, decay, phase) if mask is None else PaddedKeyValueState(k, v, decay, phase, mask)


def _join_masks(initial_state: KeyValueState, mask: Tensor | None, k: Tensor) -> Tensor | None:
    """The mask of old and new keys together, (b, s + t); None: no padding."""
    if mask is None and not isinstance(initial_state, PaddedKeyValueState):
        return None
    everything = torch.ones((), dtype=torch.bool, device=k.device)
    old = (
        initial_state.mask
        if isinstance(initial_state, PaddedKeyValueState)
        else everything.expand(initial_state.k.shape[:2])
    )
    new = everything.expand(k.shape[:2]) if mask is None else mask
    return torch.cat([old, new], dim=1)


def _attend(q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, mask: Tensor | None) -> Tensor:
    """Attention of queries that belong to the last of the keys.

    q (b, t, h, d), k and v (b, s, h_kv, ·), decay (b, s, h_kv), mask (b, s).
    """
    length, total = q.shape[1], k.shape[1]
    heads = partial(torch.transpose, dim0=1, dim1=2)
    if decay is None and mask is None and length == total:
        return heads(
            scaled_dot_product_attention(
                heads(q), heads(k), heads(v), is_causal=True, enable_gqa=q.shape[2] != k.shape[2]
            )
        )
    rows = []
    for some in slices(length, ROWS):
        start, stop = some.start or 0, length if some.stop is None else min(some.stop, length)
        seen = total - length + stop
        row_decay = None if decay is None else decay[:, seen - (stop - start) : seen]
        column_decay = None if decay is None else decay[:, :seen]
        columns = None if mask is None else mask[:, :seen]
        rows.append(
            recompute(_attend_rows, q[:, start:stop], k[:, :seen], v[:, :seen], row_decay, column_decay, columns)
        )
    return torch.cat(rows, dim=1) if rows else q.new_empty(*q.shape[:3], v.shape[3])


def _attend_rows(
    q: Tensor, k: Tensor, v: Tensor, row_decay: Tensor | None, column_decay: Tensor | None, mask: Tensor | None
) -> Tensor:
    """The last rows of causal attention against all keys that they attend to."""
    rows, columns = q.shape[1], k.shape[1]
    hidden = torch.ones(rows, columns, dtype=torch.bool, device=q.device).triu(columns - rows + 1)
    if mask is not None:
        own = torch.eye(rows, dtype=torch.bool, device=q.device)
        own = pad(own, (columns - rows, 0))
        hidden = hidden | (~mask[:, None, None, :] & ~own)  # (b, 1, rows, columns)
    if row_decay is None or column_decay is None:
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, float("-inf"))
    else:
        between = row_decay.mT.unsqueeze(-1) - column_decay.mT.unsqueeze(-2)  # (b, h_kv, rows, columns)
        hidden = hidden | (between <= CLOSED_GATE)
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
        raise ArgumentTypeError("initial_state", f"must be a KeyValueState, got {type(state).__name__}")
    if state.conv_state is not None:
        raise ArgumentError("initial_state", "was made by a layer with short_conv: pass it to that layer")
    for name, cached, new in (("keys", state.k, k), ("values", state.v, v)):
        if cached.shape[0] != new.shape[0] or cached.shape[2:] != new.shape[2:]:
            raise ArgumentError(
                "initial_state",
                f"holds {name} of (batch, heads, dim) {(cached.shape[0], *cached.shape[2:])}, "
                f"but the new ones have {(new.shape[0], *new.shape[2:])}",
            )
        if cached.dtype != new.dtype or cached.device != new.device:
            raise ArgumentError(
                "initial_state",
                f"holds {name} in {cached.dtype} on {cached.device}, but the new ones are in {new.dtype} "
                f"on {new.device}",
            )
    for what, has, wanted in (
        ("gates", state.decay is not None, gated),
        ("rotation", state.phase is not None, rotated),
    ):
        if has != wanted:
            made, used = ("with", "without") if has else ("without", "with")
            raise ArgumentError("initial_state", f"was made {made} {what}, but is used {used}")
