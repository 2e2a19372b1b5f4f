"""One process or many: where a process runs, how it talks to the others, and how they share a model.

A run has a process group even if it is alone, so that nothing else needs to know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from sympow.data.loader import Batch
from sympow.devices import choose_device
from sympow.invocation import under_torchrun
from sympow.parallel.shards import MESH_DIM, Shards
from sympow.train.objective import Objective
from sympow.train.rendezvous import agree_on_name, connect, kept_by_torchrun


@dataclass(frozen=True)
class Place:
    """Where this process is among all.

    Attributes:
        rank: number of the process.
        world_size: number of processes.
        device: what it computes on.
        attempt: names what the processes are together since they were last started (`sympow.train.rendezvous`).
    """

    rank: int
    world_size: int
    device: torch.device
    attempt: str = "only"

    @property
    def first(self) -> bool:
        """Whether it is the one that prints and writes metrics."""
        return self.rank == 0


@contextmanager
def process_group(device: str | None = None) -> Iterator[Place]:
    """Joins the processes that torchrun started, or none; leaves them at the end.

    Args:
        device: "cpu" or "cuda"; None: a GPU if there is one.
    """
    kind = choose_device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(where)
    # Gloo beside NCCL: checkpoints are exchanged on the CPU, while the GPU goes on.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    attempt = "only"
    if not under_torchrun():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif kept_by_torchrun():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        attempt = agree_on_name(rank, world_size)
        dist.init_process_group(backend, store=connect(attempt, "group"), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), where, attempt)
    finally:
        dist.destroy_process_group()


def share(objective: Objective, place: Place, parallel: str) -> nn.Module:
    """The objective as every process calls it: gradients averaged over all of them."""
    if place.world_size == 1:
        return objective
    if parallel == "ddp":
        on_gpu = place.device.type == "cuda"
        return DistributedDataParallel(
            objective, device_ids=[place.device.index] if on_gpu else None, gradient_as_bucket_view=True
        )
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("dp",))
    for block in objective.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(objective, mesh=mesh)
    return objective


@contextmanager
def last_of_batch(shared: nn.Module, last: bool) -> Iterator[None]:
    """Around each part of a batch: processes exchange gradients with the last one only."""
    if isinstance(shared, DistributedDataParallel) and not last:
        with shared.no_sync():
            yield
        return
    if isinstance(shared, FSDPModule):
        shared.set_requires_gradient_sync(last)
    yield


def mean_over_processes(value: Tensor, place: Place) -> Tensor:
    """The mean of a number over all processes."""
    if place.world_size == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / place.world_size


def any_process(flag: bool, place: Place) -> bool:
    """Whether the flag is set anywhere: all processes learn the same.

    An exchange between hosts: through the device, it would wait for all that the device has still to do.
    """
    if place.world_size == 1:
        return flag
    found = torch.tensor([float(flag)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def from_all_processes(content: Any, place: Place) -> list[Any]:
    """What every process has, in the order of their numbers; all learn the same."""
    if place.world_size == 1:
        return [content]
    gathered: list[Any] = [None] * place.world_size
    dist.all_gather_object(gathered, content)
    return gathered


def check_same(settings: Mapping[str, object], place: Place) -> None:
    """Refuses a run whose processes were started differently: they would train another model each, or wait for ever.

    Args:
        settings: by the names to use in the message.
    """
    of_all = from_all_processes(dict(settings), place)
    for rank, others in enumerate(of_all):
        for name in sorted({*of_all[0], *others}):
            first, other = of_all[0].get(name), others.get(name)
            if first != other:
                raise ValueError(
                    f"{name} must be the same in all processes; rank 0 has {first!r}, rank {rank} {other!r}"
                )


@dataclass(frozen=True)
class Grid:
    """Where this process is in the grid.

    Attributes:
        data_rank: which share of a batch's sequences it has a part in.
        data_size: number of shares.
        sequence_group: the processes that have the same sequences, each some of their tokens; None: it has all.
    """

    data_rank: int
    data_size: int
    sequence_group: dist.ProcessGroup | None

    def shards(self, batch: Batch) -> Shards | None:
        """Which tokens of a batch's sequences are whose; None: all are this process's."""
        if self.sequence_group is None:
            return None
        return Shards.even(batch.inputs.shape[1], self.sequence_group, batch.cu_seqlens)


def make_grid(place: Place, context_parallel: int) -> Grid:
    """The grid in which so many processes share each sequence. All processes call it."""
    if place.world_size % context_parallel:
        raise ValueError(
            f"context_parallel must divide the number of processes, {place.world_size}; got {context_parallel}"
        )
    data_size = place.world_size // context_parallel
    if context_parallel == 1:
        return Grid(place.rank, place.world_size, None)
    # Neighbours share a sequence: within a machine, where links are fast, as far as it goes.
    mesh = init_device_mesh(place.device.type, (data_size, context_parallel), mesh_dim_names=("dp", MESH_DIM))
    return Grid(mesh.get_local_rank("dp"), data_size, mesh.get_group(MESH_DIM))
