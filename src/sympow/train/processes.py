"""The processes of a run: rendezvous, process group, device mesh, and exchanges of values between hosts.

A run of one process has a process group of one, so that no other module treats it differently.

Rendezvous: when torchrun restarts its workers it keeps the TCPStore, with all keys of the failed attempt, addresses at
which nobody listens any more among them. Its restart count does not identify an attempt, since each node counts its own
restarts. So rank 0 draws a random id for the attempt. Each rank requests it under a random id of the request, and rank
0 replies. All later keys are prefixed by the attempt's id.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import init_device_mesh

from sympow.checks import choose_device
from sympow.data.loader import Batch
from sympow.errors import ArgumentError
from sympow.invocation import under_torchrun
from sympow.parallel.shards import MESH_DIM, Shards

POLL_INTERVAL = 0.02


@dataclass(frozen=True)
class Place:
    """Where this process is among all.

    Attributes:
        rank: number of the process.
        world_size: number of processes.
        device: of its tensors.
        attempt: id of the attempt, which all processes share since torchrun last started them.
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
    """Initializes the process group, of torchrun's processes or of this one alone, and destroys it at the end.

    Args:
        device: "cpu" or "cuda"; None: a GPU if there is one.
    """
    kind = choose_device(device)
    local = int(os.environ.get("LOCAL_RANK", "0"))
    where = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(where)
    # Gloo beside NCCL: checkpoints and host values are exchanged on the CPU, without waiting for the GPU.
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    attempt = "only"
    if not under_torchrun():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    elif torchrun_hosts_store():
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        attempt = agree_on_attempt(rank, world_size)
        dist.init_process_group(backend, store=connect_store(attempt, "group"), rank=rank, world_size=world_size)
    else:
        dist.init_process_group(backend)
    try:
        yield Place(dist.get_rank(), dist.get_world_size(), where, attempt)
    finally:
        dist.destroy_process_group()


def torchrun_hosts_store() -> bool:
    """Whether torchrun's agent hosts the TCPStore; otherwise rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect_store(attempt: str, purpose: str, timeout: timedelta = default_pg_timeout) -> Store:
    """A new connection to the TCPStore, its keys prefixed by attempt and purpose."""
    return PrefixStore(f"sympow/{attempt}/{purpose}", _connect(timeout))


def agree_on_attempt(rank: int, world_size: int, timeout: timedelta = default_pg_timeout) -> str:
    """The rendezvous: an id of this attempt that all its processes agree on."""
    store = PrefixStore("sympow/rendezvous", _connect(timeout))
    if rank == 0:
        return _reply_to_all(store, world_size, timeout)
    request = uuid.uuid4().hex
    store.set(f"request/{rank}", request)
    attempt = store.get(f"reply/{request}").decode()  # blocks until it is there
    store.set(f"acknowledgement/{attempt}/{rank}", "")
    return attempt


def _reply_to_all(store: Store, world_size: int, timeout: timedelta) -> str:
    """Replies to requests, stale ones of earlier attempts included, until every rank has acknowledged a reply."""
    attempt = uuid.uuid4().hex
    missing = set(range(1, world_size))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"acknowledgement/{attempt}/{other}"]):
                missing.discard(other)
            elif store.check([f"request/{other}"]):
                store.set(f"reply/{store.get(f'request/{other}').decode()}", attempt)
        if missing and time.monotonic() > end:
            raise TimeoutError(f"ranks {', '.join(map(str, sorted(missing)))} did not join within {timeout}")
        time.sleep(POLL_INTERVAL)
    return attempt


def _connect(timeout: timedelta) -> Store:
    return TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=timeout)


def mean_over_processes(value: Tensor, place: Place) -> Tensor:
    """The mean of a number over all processes."""
    if place.world_size == 1:
        return value
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / place.world_size


def any_process(flag: bool, place: Place) -> bool:
    """Whether the flag is set in any process, the same in all.

    Exchanged through Gloo: a collective on the GPU would wait for all kernels queued before it.
    """
    if place.world_size == 1:
        return flag
    found = torch.tensor([float(flag)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return bool(found.item())


def from_all_processes(content: Any, place: Place) -> list[Any]:
    """All-gathers an object, in order of rank."""
    if place.world_size == 1:
        return [content]
    gathered: list[Any] = [None] * place.world_size
    dist.all_gather_object(gathered, content)
    return gathered


def check_same(settings: Mapping[str, object], place: Place) -> None:
    """Refuses a run whose processes have different settings: they would train different models, or deadlock.

    Args:
        settings: by the names to use in the message.
    """
    of_all = from_all_processes(dict(settings), place)
    for rank, others in enumerate(of_all):
        for name in sorted({*of_all[0], *others}):
            first, other = of_all[0].get(name), others.get(name)
            if first != other:
                raise ArgumentError(
                    name, f"must be the same in all processes; rank 0 has {first!r}, rank {rank} {other!r}"
                )


@dataclass(frozen=True)
class Mesh:
    """Where this process is in the mesh of data parallelism × context parallelism.

    Attributes:
        data_rank: which share of a batch's sequences it works on.
        data_size: number of shares.
        sequence_group: the processes that work on the same sequences, each on a shard of their tokens; None: sequences
            are not sharded.
    """

    data_rank: int
    data_size: int
    sequence_group: dist.ProcessGroup | None

    def shards(self, batch: Batch) -> Shards | None:
        """How a batch's sequences are sharded; None: not at all."""
        if self.sequence_group is None:
            return None
        return Shards.even(batch.inputs.shape[1], self.sequence_group, batch.cu_seqlens)


def make_mesh(place: Place, context_parallel: int) -> Mesh:
    """The mesh in which `context_parallel` processes shard each sequence. All processes call it."""
    if place.world_size % context_parallel:
        raise ArgumentError(
            "context_parallel", f"must divide the number of processes, {place.world_size}; got {context_parallel}"
        )
    data_size = place.world_size // context_parallel
    if context_parallel == 1:
        return Mesh(place.rank, place.world_size, None)
    # Context parallelism is the inner dimension: its processes are neighbours, on one node where they fit.
    mesh = init_device_mesh(place.device.type, (data_size, context_parallel), mesh_dim_names=("dp", MESH_DIM))
    return Mesh(mesh.get_local_rank("dp"), data_size, mesh.get_group(MESH_DIM))
