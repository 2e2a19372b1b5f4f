"""Sends states between ranks: an exclusive scan gives each rank the state before its first token.

In reverse, it gives each rank the gradient of the state after its last token.

    before_r = Σ_{s<r} (∏_{s<u<r} D_u) S_s

S_s is the state of rank s's tokens alone, D_u the decay of a state that passes through rank u. Two algorithms:

gather: one all-gather of all S and D; every rank then sums up those before it. One collective, N − 1 states received.
rounds: a Hillis-Steele scan. In round n every rank sends the combined state of the last 2^n ranks to the rank 2^n
    further on, and adds what it receives. ⌈log₂ N⌉ rounds, one state sent and received in each, two states of memory.

Messages have the dtype of the states, with the bits of the float64 log decays appended. Their size does not depend on
the number of tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.ops.inputs import Inputs
from sympow.ops.numerics import feature_decay, log_gate_root
from sympow.parallel.collectives import start_gather
from sympow.parallel.shards import Shard, Shards

# Memory and time of an all-gather are proportional to the number of ranks: at most one node, and one GiB.
MOST_RANKS_GATHERED = 8
MOST_BYTES_GATHERED = 1 << 30


@dataclass(frozen=True)
class Carried:
    """A state that is carried from rank to rank, with the decay of the tokens that it covers.

    Attributes:
        kv, normalizer: as in `State`, or their gradients: (b, h_kv, D, e) and (b, h_kv, D).
        log_decay: of a state that passes through, (b, h_kv, 1 or d/2) float64, as in `log_gate_root`; None: no decay.
        power: p.
    """

    kv: Tensor
    normalizer: Tensor
    log_decay: Tensor | None
    power: int

    def after(self, before: Carried) -> Carried:
        """The combined state of `before` followed by this: D before + own."""
        if self.log_decay is None or before.log_decay is None:
            return Carried(before.kv + self.kv, before.normalizer + self.normalizer, None, self.power)
        factor = feature_decay(self.log_decay, self.power, self.kv.dtype)
        kv = torch.addcmul(self.kv, before.kv, factor.unsqueeze(-1))
        normalizer = torch.addcmul(self.normalizer, before.normalizer, factor)
        return Carried(kv, normalizer, before.log_decay + self.log_decay, self.power)

    def pack(self) -> Tensor:
        """One message, in the layout that `sympow.kernels.states.message_packing` defines."""
        fields = [self.kv.reshape(-1), self.normalizer.reshape(-1)]
        if self.log_decay is not None:
            fields.append(self.log_decay.contiguous().view(self.kv.dtype).reshape(-1))
        return torch.cat(fields)

    @classmethod
    def unpack(cls, message: Tensor, shape: tuple[int, ...], power: int) -> Carried:
        """The inverse of `pack`; `shape`: that of kv."""
        *heads, features, value_dim = shape
        count = math.prod(heads) * features
        kv, normalizer, rest = message.split([count * value_dim, count, len(message) - count * (value_dim + 1)])
        # The float64 bits may be unaligned in the message.
        bits = rest if rest.storage_offset() * rest.itemsize % 8 == 0 else rest.clone()
        log_decay = bits.view(torch.float64).view(*heads, -1) if len(rest) else None
        return cls(kv.view(shape), normalizer.view(shape[:-1]), log_decay, power)


def passing_decay(inputs: Inputs, shard: Shard, shards: Shards) -> Tensor | None:
    """log D of a rank's tokens, (b, h_kv, 1 or d/2) float64: −inf if a document begins or ends among them.

    None if no rank has any decay: no gates, and one document.
    """
    gates = inputs.log_gamma
    if gates is None and shards.cu_seqlens is None:
        return None
    if gates is not None and shard.passes:
        return log_gate_root(gates, inputs.power).sum(2)
    shape = (inputs.batch, inputs.key_heads, 1 if gates is None or gates.ndim == 3 else gates.shape[-1])
    value = 0.0 if shard.passes else -torch.inf
    return torch.full(shape, value, dtype=torch.float64, device=inputs.k.device)


class Scan(ABC):
    """An asynchronous scan: started by `__init__`, and waited for by `finish`."""

    def __init__(self, own: Carried, shards: Shards, reverse: bool) -> None:
        self.own, self.group, self.size = own, shards.group, shards.size
        self.reverse = reverse
        # Rank in the direction of the scan.
        self.place = self.size - 1 - shards.rank if reverse else shards.rank

    @abstractmethod
    def finish(self) -> Carried | None:
        """The combined state of all ranks before this one; None on the first."""

    def _rank(self, place: int) -> int:
        return self.size - 1 - place if self.reverse else place


class GatherScan(Scan):
    """The scan by one all-gather."""

    def __init__(self, own: Carried, shards: Shards, reverse: bool) -> None:
        super().__init__(own, shards, reverse)
        self._message = own.pack()
        self._all, self._work = start_gather(self._message, self.group)

    def finish(self) -> Carried | None:
        self._work.wait()
        before = None
        for place in range(self.place):
            next_one = Carried.unpack(self._all[self._rank(place)], self.own.kv.shape, self.own.power)
            before = next_one if before is None else next_one.after(before)
        return before


class RoundsScan(Scan):
    """The scan by point-to-point messages, whose distance doubles from round to round."""

    def __init__(self, own: Carried, shards: Shards, reverse: bool) -> None:
        super().__init__(own, shards, reverse)
        self._window = own  # combined state of the last 2^n ranks, this one included
        first, *self._later = rounds_of(self.size)
        self._begin(first)

    def finish(self) -> Carried | None:
        before = self._receive(None)
        for distance in self._later:
            self._begin(distance)
            before = self._receive(before)
        return before

    def _receive(self, before: Carried | None) -> Carried | None:
        """Waits for a round; returns the combined state of the ranks before this one that is known so far."""
        for work in self._works:
            work.wait()
        if self._received is None:
            return before
        received = Carried.unpack(self._received, self.own.kv.shape, self.own.power)
        self._window = self._window.after(received)
        return received if before is None else before.after(received)

    def _begin(self, distance: int) -> None:
        to, source = self.place + distance, self.place - distance
        self._message = self._received = None
        operations = []
        if to < self.size:
            self._message = self._window.pack()
            operations.append(dist.P2POp(dist.isend, self._message, self._global(to), self.group, tag=distance))
        if source >= 0:
            self._received = torch.empty_like(self._message if self._message is not None else self.own.pack())
            operations.append(dist.P2POp(dist.irecv, self._received, self._global(source), self.group, tag=distance))
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def _global(self, place: int) -> int:
        return dist.get_global_rank(self.group, self._rank(place))


def start_scan(own: Carried, shards: Shards, *, reverse: bool = False) -> Scan:
    """Starts a scan; a collective, which every rank calls in the same order.

    Args:
        own: the state of this rank's tokens alone.
        shards: the ranks, and the algorithm.
        reverse: from the last rank to the first.
    """
    kind = {"gather": GatherScan, "rounds": RoundsScan}[chosen_exchange(own, shards)]
    return kind(own, shards, reverse)


def chosen_exchange(own: Carried, shards: Shards) -> str:
    """The algorithm that "auto" selects for states of this size."""
    if shards.exchange != "auto":
        return shards.exchange
    state_bytes = own.kv.nbytes + own.normalizer.nbytes
    small = shards.size <= MOST_RANKS_GATHERED and shards.size * state_bytes <= MOST_BYTES_GATHERED
    return "gather" if small else "rounds"


def rounds_of(size: int) -> list[int]:
    """The distance of each round: 1, 2, 4, … below the number of ranks."""
    return [1 << n for n in range((size - 1).bit_length())]


class StateScan:
    """A differentiable scan: started with this rank's own state, and waited for later.

    In the backward pass gradients are scanned from the last rank to the first: started when the gradient of the
    received state is known, and waited for where the gradient of the rank's own state is needed.

    Args:
        anchor: a tensor that requires a gradient if and only if the other ranks' does, so that all ranks run the
            backward pass of the scan, even if this rank's state has no gradient.
        kv, normalizer: the state of this rank's tokens, (b, h_kv, D, e) and (b, h_kv, D).
        log_decay: of a state that passes through this rank, (b, h_kv, 1 or d/2) float64; None: no decay.
        power: p.
    """

    def __init__(
        self, anchor: Tensor, kv: Tensor, normalizer: Tensor, log_decay: Tensor | None, power: int, shards: Shards
    ) -> None:
        self.shards, self.power = shards, power
        self.scan: Scan | None = None
        self.incoming: tuple[Tensor, Tensor] | None = None
        self._token = _Start.apply(self, anchor, kv, normalizer, log_decay)

    def wait(self) -> tuple[Tensor, Tensor]:
        """kv and normalizer before this rank's first token; zero on the first rank."""
        kv, normalizer = _Finish.apply(self, self._token)
        return kv, normalizer


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, owner: StateScan, anchor: Tensor, kv: Tensor, normalizer: Tensor, log_decay: Tensor | None
    ) -> Tensor:
        owner.scan = start_scan(Carried(kv, normalizer, log_decay, owner.power), owner.shards)
        ctx.owner = owner
        ctx.save_for_backward(log_decay)
        return kv.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        owner: StateScan = ctx.owner
        (log_decay,) = ctx.saved_tensors
        assert owner.scan is not None
        assert owner.incoming is not None
        after, (kv, normalizer) = owner.scan.finish(), owner.incoming
        owner.scan = owner.incoming = None
        if after is None:
            return None, None, torch.zeros_like(kv), torch.zeros_like(normalizer), None
        d_log_decay = None
        if log_decay is not None and ctx.needs_input_grad[4]:
            # The state sent on is D · incoming + own.
            product = (after.kv * kv).sum(-1) + after.normalizer * normalizer
            with torch.enable_grad():
                log_decay = log_decay.detach().requires_grad_()
                factor = feature_decay(log_decay, owner.power, kv.dtype)
            (d_log_decay,) = torch.autograd.grad(factor, log_decay, product.sum_to_size(factor.shape))
        return None, None, after.kv, after.normalizer, d_log_decay


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: StateScan, token: Tensor) -> tuple[Tensor, Tensor]:
        assert owner.scan is not None
        own, before = owner.scan.own, owner.scan.finish()
        owner.scan = None
        if before is None:
            kv, normalizer = torch.zeros_like(own.kv), torch.zeros_like(own.normalizer)
        else:
            kv, normalizer = before.kv.clone(), before.normalizer.clone()
        ctx.owner, ctx.decays = owner, own.log_decay
        ctx.save_for_backward(kv, normalizer)
        ctx.set_materialize_grads(False)
        return kv, normalizer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_kv: Tensor | None, d_normalizer: Tensor | None) -> tuple[None, Tensor]:
        owner: StateScan = ctx.owner
        kv, normalizer = owner.incoming = ctx.saved_tensors
        own = Carried(
            torch.zeros_like(kv) if d_kv is None else d_kv,
            torch.zeros_like(normalizer) if d_normalizer is None else d_normalizer,
            ctx.decays,
            owner.power,
        )
        owner.scan = start_scan(own, owner.shards, reverse=True)
        return None, kv.new_empty(0)
