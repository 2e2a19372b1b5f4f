"""A shard on the fused kernels, p = 2: states pass between ranks in the middle of the kernels' work.

The portable way folds in one call and attends in another, and autograd differentiates both. Here the gradient of the
fold comes out of the backward pass of the attention, as that of a state it leaves: two sums over the tokens fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.ops.backend import CHUNK_MULTIPLE, chunked_kernels_serve
from sympow.ops.full_state import from_full, to_full
from sympow.ops.fused import CHUNK_SIZE
from sympow.ops.operator import Backend, Form, backend_for
from sympow.ops.sequence import Sequence
from sympow.ops.symmetric import symmetric_dim
from sympow.parallel.scan import Carried, Scan, passing_decay, start_scan
from sympow.parallel.shards import Portion, Shards

# Head dims that the kernels take as they are.
DIMS = (32, 64)


def fused_shard_serves(
    sequence: Sequence, portion: Portion, form: Form, backend: Backend, chunk_size: int | None
) -> bool:
    """Whether a shard can be computed here: one piece of one document, for which "auto" would take the kernels."""
    if sequence.power != 2 or form not in ("auto", "chunked") or len(portion.offsets) != 2 or sequence.length == 0:
        return False
    if sequence.key_dim != sequence.value_dim or sequence.key_dim not in DIMS:
        return False
    if not chunked_kernels_serve(sequence.power, sequence.key_dim, sequence.value_dim):
        return False
    return backend_for(sequence, False, form, chunk_size, backend) == "triton"


class FusedShard:
    """One shard's way through fold, exchange and attention, begun when it is made.

    Args:
        sequence: this rank's tokens.
        phase: μ before the first, (b, h_kv, d/2) float64; None without rotation.
        anchor: as in `StateScan`.
    """

    def __init__(
        self,
        sequence: Sequence,
        phase: Tensor | None,
        anchor: Tensor,
        portion: Portion,
        shards: Shards,
        chunk_size: int | None,
    ) -> None:
        from sympow.kernels.rotation_op import fused_rotation

        q, k = sequence.q, sequence.k
        if sequence.theta is not None:
            q, k = fused_rotation(q, k, sequence.beta, sequence.theta, phase)
        log_gamma = None if sequence.log_gamma is None else sequence.log_gamma.to(torch.float32)
        self.shards, self.portion = shards, portion
        self.needs_grad = torch.is_grad_enabled() and anchor.requires_grad
        self.chunk = min(chunk_size or CHUNK_SIZE, CHUNK_MULTIPLE * -(-sequence.length // CHUNK_MULTIPLE))
        self.scan: Scan | None = None
        with torch.no_grad():
            # Its gradient comes with that of the gates, from the kernels.
            self.log_decay = passing_decay(sequence, portion, shards)
        self.known: tuple[Tensor, ...] = ()
        self._tensors = (q, k, sequence.v, log_gamma)
        self._token = _Start.apply(self, anchor, *self._tensors)

    def wait(self) -> Tensor:
        """y (b, t, h, e)."""
        return _Finish.apply(self, self._token, *self._tensors)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: FusedShard, anchor: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None
    ) -> Tensor:
        from sympow.kernels import shard

        batch, _, heads, dim = k.shape
        features = (batch, heads, symmetric_dim(dim, 2))
        if owner.portion.goes_on:
            state = from_full(*shard.fold(k, v, log_gamma, owner.chunk), dim, dim)
        else:
            state = k.new_zeros(*features, dim, dtype=torch.float32), k.new_zeros(features, dtype=torch.float32)
        owner.scan = start_scan(Carried(*state, owner.log_decay, 2), owner.shards)
        ctx.owner = owner
        return k.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        from sympow.kernels import shard
        from sympow.kernels.chunk_states import FullState

        owner: FusedShard = ctx.owner
        assert owner.scan is not None
        own, after = owner.scan.own, owner.scan.finish()
        dy, q, k, v, y, *saved = owner.known
        owner.scan, owner.known = None, ()
        d_final = None
        if owner.portion.goes_on:
            dim = k.shape[-1]
            d_state = (torch.zeros_like(own.kv), torch.zeros_like(own.normalizer))
            if after is not None:
                d_state = after.kv, after.normalizer
            shape = (*k.shape[:1], k.shape[2], dim)
            full = (own.kv.new_zeros(*shape, dim, dim), own.kv.new_zeros(*shape, dim))
            d_final = FullState(*_pull_back(lambda kv, z: from_full(kv, z, dim, dim), full, d_state))
        dq, dk, dv, d_log_gamma = shard.attend_backward(
            dy, d_final, q, k, v, y, saved, owner.chunk, initial=owner.portion.continues
        )
        return None, None, dq, dk, dv, d_log_gamma if d_log_gamma.numel() else None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: FusedShard, token: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None
    ) -> Tensor:
        from sympow.kernels import shard
        from sympow.kernels.chunk_states import FullState

        assert owner.scan is not None
        before = owner.scan.finish()
        owner.scan = None
        initial = None
        if owner.portion.continues:
            assert before is not None
            initial = FullState(*to_full(before.kv, before.normalizer, k.shape[-1], k.shape[-1]))
        final = owner.portion.goes_on and owner.needs_grad
        y, saved = shard.attend(q, k, v, log_gamma, owner.chunk, initial, final=final)
        ctx.owner = owner
        ctx.save_for_backward(q, k, v, y, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from sympow.kernels import shard

        owner: FusedShard = ctx.owner
        q, k, v, y, *saved = ctx.saved_tensors
        dy = dy.contiguous()
        owner.known = (dy, q, k, v, y, *saved)
        dim = k.shape[-1]
        features = (*k.shape[:1], k.shape[2], symmetric_dim(dim, 2))
        kv = k.new_zeros(*features, dim, dtype=torch.float32)
        d_state = (kv, kv.new_zeros(features))
        if owner.portion.continues:
            own = shard.fold_gradient(dy, q, k, y, saved, owner.chunk)
            d_state = _pull_back(lambda kv, z: to_full(kv, z, dim, dim), d_state, tuple(own))
        owner.scan = start_scan(Carried(*d_state, owner.log_decay, 2), owner.shards, reverse=True)
        return None, k.new_empty(0), None, None, None, None


def _pull_back(
    function: Callable[..., tuple[Tensor, Tensor]], arguments: tuple[Tensor, Tensor], gradients: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Gradients of the arguments of a linear function, of which only the shapes count."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in arguments]
        outputs = function(*leaves)
    kv, normalizer = torch.autograd.grad(outputs, leaves, gradients)
    return kv, normalizer
