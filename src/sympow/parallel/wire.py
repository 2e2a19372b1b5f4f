"""Collectives of tensors of equal size, under the names that each version of torch has for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor


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
