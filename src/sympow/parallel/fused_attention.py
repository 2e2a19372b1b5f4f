"""A shard on the fused kernels, p = 2: the exchange of states takes place between the kernels of one autograd node.

In plain PyTorch the fold and the attention are two calls, and autograd differentiates each. Here they share the sums
over each chunk's tokens, and so do their backward passes. Where shards are short, launching kernels takes the host as
long as they run, so both halves of the call (`sympow.parallel.overlap`) are in one autograd node: what does not depend
on a message is computed for both at once, and each half writes to its slice of the results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.ops.dispatch import backend_for, quadratic_chunk, shard_unsupported_reason
from sympow.ops.inputs import Inputs
from sympow.parallel.collectives import start_gather
from sympow.parallel.overlap import Half
from sympow.parallel.scan import Carried, RoundsScan, chosen_exchange
from sympow.parallel.shards import Shard, Shards
from sympow.settings import Backend, Form, symmetric_dim

if TYPE_CHECKING:
    from sympow.kernels.attention.shard import Gradients, Outputs, Plan, ShardRows
    from sympow.kernels.running_sums import Gates
    from sympow.kernels.states.full_state import FullState
    from sympow.kernels.states.quadratic import ChunkStates


def runs_fused(inputs: Inputs, own: Shard, form: Form, backend: Backend, chunk_size: int | None) -> bool:
    """Whether the fused kernels compute a shard: it is one slice of one document, and they support the call."""
    if len(own.offsets) != 2 or shard_unsupported_reason(inputs, form) is not None:
        return False
    return backend_for(inputs, False, form, chunk_size, backend) == "triton"


def rotate_shard(inputs: Inputs, phase: Tensor | None) -> Inputs:
    """The sequence with queries and keys rotated, and without beta and theta.

    Args:
        phase: μ before the first token, (b, h_kv, d/2) float64, not wrapped; None without rotation.
    """
    from sympow.kernels.rotary import fused_rotation

    if inputs.theta is None:
        return inputs
    q, k = fused_rotation(inputs.q, inputs.k, inputs.beta, inputs.theta, phase)
    return replace(inputs, q=q, k=k, beta=None, theta=None)


def fused_shard_attention(
    inputs: Inputs, own: Shard, shards: Shards, halves: list[Half], chunk_size: int | None
) -> Tensor:
    """y (b, t, h, e) of this rank's tokens, whose queries and keys are rotated."""
    from sympow.kernels.attention.shard import Plan

    log_gamma = None if inputs.log_gamma is None else inputs.log_gamma.to(torch.float32)
    chunk = quadratic_chunk(inputs.length, chunk_size)
    plan = Plan(chunk, initial=own.continues, return_state=own.continues_later)
    call = _Call(plan, own.passes, shards, halves, inputs.group, inputs.needs_grad)
    return _Attend.apply(call, inputs.q, inputs.k, inputs.v, log_gamma)


@dataclass(frozen=True)
class _Call:
    """The arguments of a call that forward and backward pass have in common.

    Attributes:
        passes: whether the state of earlier ranks passes through this one to later ranks.
        group: query heads per key head.
        needs_grad: whether there will be a backward pass.
    """

    plan: Plan
    passes: bool
    shards: Shards
    halves: list[Half]
    group: int
    needs_grad: bool

    def send(self, end: FullState | None, k: Tensor, v: Tensor, gates: Gates | None, *, reverse: bool) -> _Exchange:
        """Starts the exchange of this rank's state, or in reverse of its gradient; k and v of one half."""
        from sympow.kernels.states.message_packing import pack, pack_nothing

        shape = (k.shape[0], k.shape[2], k.shape[3], v.shape[3])
        decays = gates is not None or self.shards.cu_seqlens is not None
        if end is None:
            message = pack_nothing(v, shape, decays=decays)
        elif not decays:
            message = pack(end)
        elif not self.passes:
            message = pack(end, -math.inf)
        else:
            message = pack(end, 0.0 if gates is None else gates.sums)
        return _Exchange(message, shape, decays, self.shards, reverse)


class _Exchange:
    """The asynchronous scan of one half's states over the ranks (`sympow.parallel.scan`).

    Args:
        message: this rank's state, packed by `sympow.kernels.states.message_packing`.
        shape: b, h_kv, d and e.
        decays: whether messages contain log decays.
    """

    def __init__(
        self, message: Tensor, shape: tuple[int, int, int, int], decays: bool, shards: Shards, reverse: bool
    ) -> None:
        batch, heads, dim, value_dim = shape
        self._message, self._shape, self._decays = message, shape, decays
        self._shards, self._reverse = shards, reverse
        self._rounds: RoundsScan | None = None
        own = Carried.unpack(message, (batch, heads, symmetric_dim(dim, 2), value_dim), 2)
        if chosen_exchange(own, shards) == "gather":
            self._all, self._work = start_gather(message, shards.group)
        else:
            self._rounds = RoundsScan(own, shards, reverse)

    def receive(self, wanted: bool) -> FullState | None:
        """The combined state of the ranks before this one, or in reverse the gradient of those after it, if wanted."""
        from sympow.kernels.states.message_packing import unpack

        if self._rounds is not None:
            before = self._rounds.finish()
            if not wanted:
                return None
            assert before is not None
            return unpack(before.pack().unsqueeze(0), self._shape, decays=self._decays)
        self._work.wait()
        if not wanted:
            return None
        rank, size = self._shards.rank, self._shards.size
        nearest, count = (rank + 1, size - 1 - rank) if self._reverse else (rank - 1, rank)
        return unpack(self._all, self._shape, decays=self._decays, nearest=nearest, count=count, reverse=self._reverse)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None) -> Tensor:
        from sympow.kernels.attention import shard

        plan, gates, out = call.plan, shard.gate_sums(log_gamma), shard.Outputs.new(q, v, call.plan)
        in_flight = []
        for half in call.halves:
            own = half.tokens(k), half.tokens(v), _gates_of(gates, half)
            folded = shard.fold(*own, plan)
            in_flight.append((half, own, folded.chunks, call.send(folded.end, *own, reverse=False)))
        kept = []
        while in_flight:  # popped, since the chunk sums of a half take much memory
            half, own, chunks, exchange = in_flight.pop(0)
            initial = exchange.receive(plan.initial)
            half_out = _outputs_of(out, half, call.group)
            states = shard.attend(half.tokens(q, call.group), *own, chunks, initial, half_out)
            if call.needs_grad:
                kept.append(states)
        if call.needs_grad:
            ctx.call = call
            ctx.save_for_backward(q, k, v, *out, *_tensors_of(gates, kept))
        return out.y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        from sympow.kernels.attention import shard

        call: _Call = ctx.call
        plan, group = call.plan, call.group
        q, k, v, *saved = ctx.saved_tensors
        out = shard.Outputs(*saved[:3])
        gates, states = _from_tensors(saved[3:], plan)
        rows, gradients = shard.prepare_gradient(dy.contiguous(), q, out), shard.Gradients.new(q, k, v)
        in_flight = []
        # The last half first, in the order of autograd on ranks that do not run the fused kernels.
        for half, half_states in reversed(list(zip(call.halves, states, strict=True))):
            own = half.tokens(k), half.tokens(v), _gates_of(gates, half)
            half_rows, state_share = _rows_of(rows, half, group), half.heads(out.state_share, group)
            folded = shard.fold_gradient(half_rows, own[0], own[2], state_share, plan)
            exchange = call.send(folded.end, *own, reverse=True)
            in_flight.append((half, (half_rows, *own, half_states), state_share, folded.chunks, exchange))
        crossings = []
        while in_flight:
            half, known, state_share, chunks, exchange = in_flight.pop(0)
            half_gradients = _gradients_of(gradients, half, group)
            # While messages are in flight.
            shard.query_gradient(*known, state_share, half_gradients)
            d_final = exchange.receive(plan.return_state)
            crossings.append(shard.key_gradient(*known, chunks, d_final, half_gradients))
        d_log_gamma = None
        if gates is not None:
            found = [crossing for crossing in reversed(crossings) if crossing is not None]
            crossing = torch.cat(found, dim=call.halves[0].state_dim) if found else None
            d_log_gamma = shard.gates_gradient(k, gradients, crossing, plan)
        return None, *gradients[:3], d_log_gamma


def _gates_of(gates: Gates | None, half: Half) -> Gates | None:
    if gates is None:
        return None
    return replace(
        gates, sums=half.heads(gates.sums), to_end=half.heads(gates.to_end), from_start=half.heads(gates.from_start)
    )


def _outputs_of(out: Outputs, half: Half, group: int) -> Outputs:
    return type(out)(half.tokens(out.y, group), half.heads(out.denominator, group), half.heads(out.state_share, group))


def _rows_of(rows: ShardRows, half: Half, group: int) -> ShardRows:
    return type(rows)(
        half.tokens(rows.scaled_q, group),
        half.heads(rows.scale, group),
        half.tokens(rows.dy, group),
        half.heads(rows.minus_delta, group),
    )


def _gradients_of(gradients: Gradients, half: Half, group: int) -> Gradients:
    return type(gradients)(
        half.tokens(gradients.dq, group),
        half.tokens(gradients.dk),
        half.tokens(gradients.dv),
        half.heads(gradients.row_terms, group),
        half.heads(gradients.column_terms),
    )


def _tensors_of(gates: Gates | None, states: Sequence[ChunkStates | None]) -> tuple[Tensor | None, ...]:
    """Flattened for save_for_backward: three tensors of the gates, and three of each half's states."""
    none = (None,) * 3
    kept = none if gates is None else (gates.sums, gates.to_end, gates.from_start)
    return sum((none if x is None else (x.first_half, x.second_half, x.normalizer) for x in states), kept)


def _from_tensors(tensors: Sequence[Any], plan: Plan) -> tuple[Gates | None, list[ChunkStates | None]]:
    """The inverse of `_tensors_of`."""
    from sympow.kernels.running_sums import Gates
    from sympow.kernels.states.quadratic import ChunkStates

    kept, *parts = zip(tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    first = 0 if plan.initial else 1
    states = [None if part[0] is None else ChunkStates(*part, plan.chunk, first) for part in parts]
    return None if kept[0] is None else Gates(*kept), states
