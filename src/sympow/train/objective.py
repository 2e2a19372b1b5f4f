"""The model together with its loss, as one module: what is compiled, wrapped for several processes, and called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sympow.model.gpt import GPT, Block
from sympow.model.losses import linear_cross_entropy
from sympow.parallel.shards import Shards


class Objective(nn.Module):
    """Mean cross-entropy of the tokens after each input.

    The loss belongs inside: it reads the embedding, which a sharded model has in full only during its forward pass.

    Args:
        model: to train.
        loss_tokens: tokens whose logits exist at once.
        dtype: of products, under autocast; None: no autocast.
    """

    def __init__(self, model: GPT, loss_tokens: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.model = model
        self.loss_tokens = loss_tokens
        self.dtype = dtype

    def forward(
        self, inputs: Tensor, targets: Tensor, cu_seqlens: Tensor | None = None, shards: Shards | None = None
    ) -> Tensor:
        """A scalar, from (b, t) integers; with shards, of this process's tokens."""
        with torch.autocast(inputs.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            features, _ = self.model.features(inputs, return_state=False, cu_seqlens=cu_seqlens, shards=shards)
        weight, backend = self.model.embedding.weight, self.model.config.backend
        return linear_cross_entropy(
            features, weight, targets, tokens=self.loss_tokens, dtype=self.dtype, backend=backend
        )


def compile_blocks(model: GPT, *, sharded: bool = False) -> None:
    """Compiles each block in place. They are alike, so that one compilation serves them all.

    With sequences shared out among processes, what they exchange stays out of what is compiled.
    """
    for block in model.blocks:
        block.compile(fullgraph=not sharded)


def recompute_blocks(model: GPT) -> None:
    """Makes each block keep only its input for the backward pass."""
    for block in model.blocks:
        assert isinstance(block, Block)
        block.forward = _recomputed(block.forward)  # type: ignore[method-assign]


def _recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run
