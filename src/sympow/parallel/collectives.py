"""Collectives on tensors of equal size, and differentiable ones along the sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.parallel.shards import Shards


def start_gather(x: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Any]:
    """Starts an all-gather; returns (ranks, *x.shape) and a handle, whose `wait()` must come before reading it.

    x must stay alive and unchanged until then.
    """
    gathered = x.new_empty(group.size() * x.numel())
    # torch 2.13 renamed it, and warns about the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(gathered, x.reshape(-1), group=group, async_op=True)
    return gathered.view(group.size(), *x.shape), work


def gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-gathers: (ranks, *x.shape)."""
    x = x.contiguous()
    gathered, work = start_gather(x, group)
    work.wait()
    return gathered


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Reduce-scatters: (ranks, …) → (…), the sum over ranks of their entries for this rank."""
    own = x.new_empty(x[0].numel())
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    scatter(own, x.reshape(-1), group=group)
    return own.view(x.shape[1:])


class _Attach(torch.autograd.Function):
    """y unchanged, with other tensors as inputs in its graph, so that their backward pass runs on every rank."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *others: Tensor) -> Tensor:
        ctx.others = len(others)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (dy, *[None] * ctx.others)


def attach(y: Tensor, *others: Tensor) -> Tensor:
    """y, with others added as inputs to its graph; their gradients through y are zero."""
    return _Attach.apply(y, *others)


def sum_before(anchor: Tensor, x: Tensor, shards: Shards, *, preceded: bool) -> Tensor:
    """Σ x over the ranks with earlier tokens of the document of this rank's first token; zero if there are none.

    Args:
        anchor: as in `StateScan`.
        x: the same shape on every rank.
        preceded: as in `Shards.shard`.
    """
    return _SumBefore.apply(anchor, x, shards, preceded)


class _SumBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, shards: Shards, preceded: bool) -> Tensor:
        ctx.shards, ctx.preceded = shards, preceded
        sources = shards.shard(preceded=preceded).sources
        return gather(x, shards.group)[sources.start : sources.stop].sum(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor | None, ...]:
        shards: Shards = ctx.shards
        first = shards.rank + 1
        later = (shards.shard(rank, preceded=ctx.preceded) for rank in range(first, shards.size))
        # The ranks that use x are consecutive. A slice, since indexing by a list would synchronize with the device.
        readers = sum(shards.rank in shard.sources for shard in later)
        return None, gather(d_sum, shards.group)[first : first + readers].sum(0), None, None


def from_last(x: Tensor, shards: Shards) -> Tensor:
    """Broadcasts the last rank's tensor."""
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
    """All-gathers a sequence along its second axis from the shards of all ranks: (b, t, …)."""
    return _AlongTime.apply(x, shards)


class _AlongTime(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        longest = max(shards.lengths)
        # Shorter shards are padded to equal size, and the padding is removed again.
        gathered = gather(_padded(x, longest), shards.group).unbind(0)
        return torch.cat([shard[:, :length] for shard, length in zip(gathered, shards.lengths, strict=True)], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None]:
        shards: Shards = ctx.shards
        longest = max(shards.lengths)
        padded = torch.stack([_padded(shard, longest) for shard in d_x.split(shards.lengths, dim=1)])
        return reduce_scatter(padded, shards.group)[:, : shards.length], None


def _padded(x: Tensor, length: int) -> Tensor:
    """Pads the second axis with zeros."""
    padded = x.new_zeros(x.shape[0], length, *x.shape[2:])
    padded[:, : x.shape[1]] = x
    return padded


def _last_of(shards: Shards) -> int:
    return dist.get_global_rank(shards.group, shards.size - 1)
