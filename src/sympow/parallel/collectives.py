"""Collectives of tensors of equal size, under the names that each version of torch has for them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.ops.numerics import feature_decay
from sympow.parallel.scan import Carried, Scan, start_scan
from sympow.parallel.shards import Shards


def start_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Begins to collect everyone's tensor: (ranks, *x.shape), to be read after the second value's `wait()`.

    x must stay alive and unchanged until then.
    """
    everyone = x.new_empty(group.size() * x.numel())
    # torch 2.13 renamed it, and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(everyone, x.reshape(-1), group=group, async_op=True)
    return everyone.view(group.size(), *x.shape), work


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Everyone's tensor: (ranks, *x.shape)."""
    x = x.contiguous()
    everyone, work = start_gather(x, group)
    work.wait()
    return everyone


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over ranks of their entries for this one: (ranks, …) → (…)."""
    own = x.new_empty(x[0].numel())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, x.reshape(-1), group=group)
    return own.view(x.shape[1:])


class StateScan:
    """The states that ranks before this one leave behind: begun with this rank's own, and waited for later.

    In the backward pass the same with gradients, from the last rank to the first: they set out when the gradient of
    what was waited for is known, and are waited for where that of the rank's own state is.

    Args:
        anchor: requires a gradient if and only if tensors of the other ranks do, whatever this rank's state comes from.
        kv, normalizer: what this rank leaves, (b, h_kv, D, e) and (b, h_kv, D).
        log_decay: of what passes through, (b, h_kv, 1 or d/2) float64; None: no decay.
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
            # What left this rank was D · incoming + own.
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


class _Attach(torch.autograd.Function):
    """y as it is, but seen to depend on other tensors: so that their backward pass takes place on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *[None] * ctx.others)


def attach(y: Tensor, *others: Tensor) -> Tensor:
    """y, with others in its graph that it does not depend on."""
    return _Attach.apply(y, *others)


def sum_before(anchor: Tensor, x: Tensor, shards: Shards, *, preceded: bool) -> Tensor:
    """Σ x over the ranks that have earlier tokens of the document at this rank's first one; zero if none do.

    Args:
        anchor: as in `StateScan`.
        x: the same shape on every rank.
        preceded: as in `Shards.portion`.
    """
    return _SumBefore.apply(anchor, x, shards, preceded)


class _SumBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, shards: Shards, preceded: bool) -> Tensor:
        ctx.shards, ctx.preceded = shards, preceded
        sources = shards.portion(preceded=preceded).sources
        return gather(x, shards.group)[sources.start : sources.stop].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, ...]:
        shards: Shards = ctx.shards
        first = shards.rank + 1
        portions = (shards.portion(rank, preceded=ctx.preceded) for rank in range(first, shards.size))
        # Readers are the next ranks up to some one. A slice: a list of them would have the host wait for the device.
        readers = sum(shards.rank in portion.sources for portion in portions)
        return None, gather(d_sum, shards.group)[first : first + readers].sum(0), None, None


def from_last(x: Tensor, shards: Shards) -> Tensor:
    """The last rank's tensor, on every rank."""
    return _FromLast.apply(x, shards)


class _FromLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        x = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(x, _last_of(shards), group=shards.group)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        shards: Shards = ctx.shards
        total = d_x.clone(memory_format=torch.contiguous_format)
        dist.reduce(total, _last_of(shards), group=shards.group)
        return total if shards.rank == shards.size - 1 else torch.zeros_like(total), None


def along_time(x: Tensor, shards: Shards) -> Tensor:
    """The whole sequence along the second axis, from every rank's part: (b, t, …)."""
    return _AlongTime.apply(x, shards)


class _AlongTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        longest = max(shards.lengths)
        # Ranks send equally much; what pads the shorter ones is cut off again.
        parts = gather(_padded(x, longest), shards.group).unbind(0)
        return torch.cat([part[:, :length] for part, length in zip(parts, shards.lengths, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        shards: Shards = ctx.shards
        longest = max(shards.lengths)
        parts = torch.stack([_padded(part, longest) for part in d_x.split(shards.lengths, dim=1)])
        return reduce_scatter(parts, shards.group)[:, : shards.length], None


def _padded(x: Tensor, length: int) -> Tensor:
    """With zeros up to a length along the second axis."""
    padded = x.new_zeros(x.shape[0], length, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    return padded


def _last_of(shards: Shards) -> int:
    return dist.get_global_rank(shards.group, shards.size - 1)
