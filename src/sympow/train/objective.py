"""What the loop minimizes: what all objectives share, and the cross-entropy of next tokens for `sympow train`."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from sympow.data.loader import Batch, Loader
from sympow.model.gpt import GPT
from sympow.model.losses import linear_cross_entropy
from sympow.parallel.shards import Shards
from sympow.train.config import TrainConfig
from sympow.train.heartbeat import Heartbeat
from sympow.train.monitoring import gate_and_rotation_metrics, training_flops
from sympow.train.processes import Mesh, Place, mean_over_processes

# Tokens for the statistics of gates and rotations.
SAMPLE_TOKENS = 2_048


class Objective:
    """What the loop minimizes, and of which model; a subclass has its loss.

    Args:
        model: the model that learns; messages name its parameters.
        module: the same as DDP or FSDP2 wrap it, whose parameters are updated and saved; None: the model itself.

    Attributes:
        trained: the parameters of the module that are updated.
        evaluates: whether there is a held-out loss.
        flops_per_token: FLOPs of a step per token, for the model FLOPs utilization; None: not known.
    """

    flops_per_token: float | None = None
    evaluates = False

    def __init__(self, model: Any, module: nn.Module | None = None) -> None:
        self.model = model
        self.module: nn.Module = model if module is None else module
        self.trained: list[nn.Parameter] = list(self.module.parameters())

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of a micro-batch; of several processes, a number whose mean over them is that mean."""
        raise NotImplementedError

    def backward(self, batch: Batch, weight: float) -> Tensor:
        """Adds `weight` times the gradient of a micro-batch's mean loss, and returns `weight` times that loss."""
        loss = self.loss(batch) * weight
        loss.backward()
        return loss.detach()

    def details(self, batch: Batch) -> dict[str, float]:
        """Further metrics of a step, by name.

        Args:
            batch: of the step, before it was split into micro-batches.
        """
        return {}

    def evaluate(self) -> float:
        """The held-out loss."""
        raise NotImplementedError


class ModelWithLoss(nn.Module):
    """A model with its loss, the mean cross-entropy of the next tokens.

    The loss is inside the module because it uses the embedding, which FSDP gathers only during the forward pass.

    Args:
        model: to train.
        loss_tokens: tokens whose logits are in memory at once.
        dtype: of matrix products under autocast; None: no autocast.
    """

    def __init__(self, model: GPT, loss_tokens: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.loss_tokens = loss_tokens
        self.dtype = dtype

    def forward(
        self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, shards: Shards | None = None
    ) -> Tensor:
        """A scalar, from (b, t) integers; with shards, the mean over this process's tokens."""
        with torch.autocast(inputs.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            features, _ = self.model.features(inputs, return_state=False, cu_seqlens=cu_seqlens, shards=shards)
        weight, backend = self.model.embedding.weight, self.model.config.backend
        return linear_cross_entropy(
            features, weight, targets, tokens=self.loss_tokens, dtype=self.dtype, backend=backend
        )


class CrossEntropy(Objective):
    """The objective of `sympow train`: the cross-entropy of the next tokens.

    Args:
        module: a `ModelWithLoss` as `parallelize` returns it.
        model: the model in it.
        config: of the run.
        place: of this process.
        mesh: how batches and sequences are shared by the processes.
        heartbeat: of this process.
        heldout: rows of held-out documents, one at a time; None: nothing is evaluated.
    """

    def __init__(
        self,
        module: nn.Module,
        model: GPT,
        config: TrainConfig,
        place: Place,
        mesh: Mesh,
        heartbeat: Heartbeat,
        heldout: Loader | None,
    ) -> None:
        super().__init__(model, module)
        self.flops_per_token = training_flops(model.config, config.data.context)
        self.evaluates = heldout is not None
        self._place, self._mesh, self._heartbeat, self._heldout = place, mesh, heartbeat, heldout
        self._heldout_rows = max(1, config.run.evaluated_tokens // config.data.context)

    def loss(self, batch: Batch) -> Tensor:
        shards = self._mesh.shards(batch)
        if shards is None:
            loss = self._unsharded_loss(batch)
        else:
            loss = self.module(shards.take(batch.inputs), shards.take(batch.targets), shards=shards)
            loss = loss * (shards.length * shards.size / shards.total)
        # Tells a process that hangs in the forward pass from those that wait for it in the backward pass.
        self._heartbeat.report_progress()
        return loss

    def details(self, batch: Batch) -> dict[str, float]:
        """Statistics of gates and rotations."""
        sample = _first_tokens(batch, SAMPLE_TOKENS).to(self._place.device)
        return gate_and_rotation_metrics(self.model, lambda: self._unsharded_loss(sample))

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean loss on held-out documents: the same ones every time, and for any number of processes."""
        assert self._heldout is not None
        self._heldout.load_state_dict({**self._heldout.state_dict(), "epoch": 0, "batch": 0})
        chosen = islice(self._heldout, self._heldout_rows)
        total, count, rank = torch.zeros((), device=self._place.device), 0, self._mesh.data_rank
        while batches := list(islice(chosen, self._mesh.data_size)):
            self._heartbeat.report_progress()
            # Of the last rows some processes have none. They repeat one that does not count: a forward pass of sharded
            # parameters needs all processes.
            counts = rank < len(batches)
            loss = self.loss(batches[rank if counts else 0].to(self._place.device))
            total += loss * counts
            count += len(batches)
        return mean_over_processes(total * self._mesh.data_size / count, self._place).item()

    def _unsharded_loss(self, batch: Batch) -> Tensor:
        """The mean over a batch whose sequences are not sharded."""
        loss: Tensor = self.module(batch.inputs, batch.targets, batch.cu_seqlens)
        return loss


def _first_tokens(batch: Batch, tokens: int) -> Batch:
    """The beginning of a batch's first row."""
    row = batch.split(1)[0]
    tokens = min(tokens, batch.context)
    bounds = row.cu_seqlens
    if bounds is not None:
        bounds = torch.cat([bounds[bounds < tokens], bounds.new_tensor([tokens])])
    return replace(row, inputs=row.inputs[:, :tokens], targets=row.targets[:, :tokens], cu_seqlens=bounds)
