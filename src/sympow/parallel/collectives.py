"""Collectives of tensors of equal size, and those that gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

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
