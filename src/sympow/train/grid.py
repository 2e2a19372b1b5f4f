"""Processes as a grid: along "dp" they share a batch's sequences out, along "cp" each sequence's tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from sympow.data.batch import Batch
from sympow.parallel.shards import MESH_DIM, Shards
from sympow.train.distributed import Place


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
