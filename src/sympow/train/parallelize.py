"""How a model is run: DDP or FSDP2 over several processes, torch.compile, activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sympow.model.gpt import GPT, Block
from sympow.train.objective import ModelWithLoss
from sympow.train.processes import Place


def parallelize(module: ModelWithLoss, place: Place, parallel: str) -> nn.Module:
    """The module wrapped by DDP or sharded by FSDP2, so that gradients are averaged over all processes."""
    if place.world_size == 1:
        return module
    if parallel == "ddp":
        on_gpu = place.device.type == "cuda"
        return DistributedDataParallel(
            module, device_ids=[place.device.index] if on_gpu else None, gradient_as_bucket_view=True
        )
    mesh = init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("dp",))
    for block in module.model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


@contextmanager
def gradient_sync(module: nn.Module, last: bool) -> Iterator[None]:
    """Around each micro-batch of a gradient accumulation: gradients are synchronized with the last one only."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    yield


def compile_blocks(model: GPT, *, sharded: bool = False, packed: bool = False) -> None:
    """Compiles each block in place. All blocks share one compilation, since they have the same code and shapes.

    With sharded sequences, the collectives between processes stay outside the compiled graphs; so do packed documents
    where they are computed one by one, as in plain PyTorch.
    """
    # Blocks of other models that this process has trained count toward torch's limit of recompilations.
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(fullgraph=not (sharded or packed))


def checkpoint_activations(model: GPT) -> None:
    """Makes each block keep only its input for the backward pass and recompute the rest."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.forward = _recomputed(block.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run
