"""A shard on the fused kernels, p = 2: states pass between ranks in the middle of the kernels' work.

The portable way folds in one call and attends in another, and autograd differentiates both. Here the sums over each
chunk's tokens serve the fold and the attention alike, and those of the backward pass likewise.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.ops.backend import CHUNK_MULTIPLE, chunked_kernels_serve
from sympow.ops.fused import CHUNK_SIZE
from sympow.ops.operator import Backend, Form, backend_for
from sympow.ops.sequence import Sequence
from sympow.ops.symmetric import symmetric_dim
from sympow.parallel.scan import Carried, Scan, passing_decay, start_scan
from sympow.parallel.shards import Portion, Shards

if TYPE_CHECKING:
    from sympow.kernels.shard import Folded, FoldedGradient

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


def turn(sequence: Sequence, phase: Tensor | None) -> Sequence:
    """With queries and keys turned, and no rotation left.

    Args:
        phase: μ before the first token, (b, h_kv, d/2) float64; None without rotation.
    """
    from sympow.kernels.rotation_op import fused_rotation

    if sequence.theta is None:
        return sequence
    q, k = fused_rotation(sequence.q, sequence.k, sequence.beta, sequence.theta, phase)
    return replace(sequence, q=q, k=k, beta=None, theta=None)


class FusedShard:
    """One shard's way through fold, exchange and attention, begun when it is made.

    Args:
        sequence: this rank's tokens, turned.
        anchor: as in `StateScan`.
    """

    def __init__(
        self, sequence: Sequence, anchor: Tensor, portion: Portion, shards: Shards, chunk_size: int | None
    ) -> None:
        from sympow.kernels.shard import Plan

        log_gamma = None if sequence.log_gamma is None else sequence.log_gamma.to(torch.float32)
        chunk = min(chunk_size or CHUNK_SIZE, CHUNK_MULTIPLE * -(-sequence.length // CHUNK_MULTIPLE))
        self.shards, self.plan = shards, Plan(chunk, initial=portion.continues, final=portion.goes_on)
        self.features = (sequence.batch, sequence.key_heads, symmetric_dim(sequence.key_dim, 2))
        self.scan: Scan | None = None
        self.folded: Folded | None = None
        self.folded_gradient: FoldedGradient | None = None
        self.known: tuple[Any, ...] = ()
        with torch.no_grad():
            # Its gradient comes with that of the gates, from the kernels.
            self.log_decay = passing_decay(sequence, portion, shards)
        self._tensors: tuple[Tensor | None, ...] = (sequence.q, sequence.k, sequence.v, log_gamma)
        self._token = _Start.apply(self, anchor, *self._tensors)

    def wait(self) -> Tensor:
        """y (b, t, h, e)."""
        # Not to keep alive for the backward pass what that does not read.
        tensors, self._tensors = self._tensors, ()
        return _Finish.apply(self, self._token, *tensors)

    def send(self, state: tuple[Tensor, Tensor], *, reverse: bool = False) -> None:
        """Passes on what this rank leaves, or in reverse wants."""
        self.scan = start_scan(Carried(*state, self.log_decay, 2), self.shards, reverse=reverse)

    def receive(self) -> Carried | None:
        """What ranks before this one leave, or in reverse those after it want; None if there are none."""
        assert self.scan is not None
        scan, self.scan = self.scan, None
        return scan.finish()

    def nothing(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """A state of nothing."""
        kv = like.new_zeros(*self.features, like.shape[-1], dtype=torch.float32)
        return kv, kv.new_zeros(self.features)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: FusedShard, anchor: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None
    ) -> Tensor:
        from sympow.kernels import shard
        from sympow.kernels.packing import pack

        owner.folded = shard.fold(k, v, log_gamma, owner.plan)
        owner.send(owner.nothing(v) if owner.folded.end is None else pack(owner.folded.end))
        ctx.owner = owner
        return k.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        from sympow.kernels import shard
        from sympow.kernels.packing import unpack

        owner: FusedShard = ctx.owner
        gradient, (k, v, attended) = owner.folded_gradient, owner.known
        owner.folded_gradient, owner.known = None, ()
        assert gradient is not None
        # While messages are on their way.
        dq, rows = shard.query_gradient(k, v, attended, gradient)
        after, d_final = owner.receive(), None
        if owner.plan.final:
            assert after is not None
            d_final = unpack(after.kv, after.normalizer, k.shape[-1])
        dk, dv, d_log_gamma = shard.key_gradient(d_final, rows, k, v, attended, gradient, owner.plan)
        return None, None, dq, dk, dv, d_log_gamma


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: FusedShard, token: Tensor, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None
    ) -> Tensor:
        from sympow.kernels import shard
        from sympow.kernels.packing import unpack

        before, initial = owner.receive(), None
        if owner.plan.initial:
            assert before is not None
            initial = unpack(before.kv, before.normalizer, k.shape[-1])
        folded, owner.folded = owner.folded, None
        assert folded is not None
        y, attended = shard.attend(q, k, v, folded, initial)
        ctx.owner = owner
        ctx.save_for_backward(q, k, v, y, *attended.tensors())
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from sympow.kernels import shard
        from sympow.kernels.packing import pack

        owner: FusedShard = ctx.owner
        q, k, v, y, *saved = ctx.saved_tensors
        attended = shard.Attended.of(saved, owner.plan)
        gradient = shard.fold_gradient(dy.contiguous(), q, k, y, attended, owner.plan)
        owner.folded_gradient, owner.known = gradient, (k, v, attended)
        owner.send(owner.nothing(v) if gradient.end is None else pack(gradient.end), reverse=True)
        return None, k.new_empty(0), None, None, None, None
