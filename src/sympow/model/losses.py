"""Cross-entropy over a vocabulary without materializing the logits of all tokens.

The loss of a block of rows is computed together with its gradients while its logits are in memory: three matrix
products, none of them recomputed, and memory for `tokens` rows of logits instead of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from sympow.checks import check_choice
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.ops.dispatch import cross_entropy_unsupported_reason
from sympow.settings import BACKENDS, Backend

# Tensor cores need the number of columns to be a multiple of this; GPT-2's 50,257 is not.
ALIGNMENT = 64


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    tokens: int = 8_192,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Mean of −log softmax(features weightᵀ)[target]: a scalar, float32 or better.

    Args:
        features: (…, width).
        weight: (vocabulary, width).
        targets: (…,) integers below the vocabulary.
        tokens: rows of logits in memory at a time.
        dtype: of the products; None: that of the weight.
        backend: "torch": plain PyTorch; "auto" and "triton": a Triton kernel for the gradient of the logits on a GPU.
    """
    _check(features, weight, targets, tokens)
    check_choice("backend", backend, BACKENDS)
    rows = features.reshape(-1, features.shape[-1])
    if torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad):
        return _LinearCrossEntropy.apply(rows, weight, targets.reshape(-1), tokens, dtype or weight.dtype, backend)
    return token_losses(rows, weight, targets.reshape(-1), tokens=tokens, dtype=dtype).mean()


def token_losses(
    features: Tensor, weight: Tensor, targets: Tensor, *, tokens: int = 8_192, dtype: torch.dtype | None = None
) -> Tensor:
    """−log softmax(features weightᵀ)[target] of every token, without gradients: the shape of targets."""
    _check(features, weight, targets, tokens)
    with torch.no_grad():
        rows = features.reshape(-1, features.shape[-1])
        table = _aligned(weight, dtype or weight.dtype)
        losses = [
            _losses(block.to(table.dtype), table, of, weight.shape[0])
            for block, of, _ in _row_blocks(rows, targets.reshape(-1), tokens)
        ]
        return torch.cat(losses).view(targets.shape)


def _check(features: Tensor, weight: Tensor, targets: Tensor, tokens: int) -> None:
    if features.shape[:-1] != targets.shape or features.shape[-1] != weight.shape[-1]:
        raise ArgumentError(
            "features",
            "must be (…, width) with weight (vocabulary, width) and targets (…,); "
            f"got {tuple(features.shape)}, {tuple(weight.shape)} and {tuple(targets.shape)}",
        )
    if targets.dtype not in (torch.int32, torch.int64):
        raise ArgumentTypeError("targets", f"must be int32 or int64, got {targets.dtype}")
    if targets.numel() == 0:
        raise ArgumentError("targets", "must not be empty: the mean over no tokens is not defined")
    if tokens < 1:
        raise ArgumentError("tokens", f"must be at least 1, got {tokens}")
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (x.item() for x in targets.aminmax())
        if low < 0 or high >= weight.shape[0]:
            raise ArgumentError(
                "targets", f"must lie between 0 and {weight.shape[0] - 1}; got {low if low < 0 else high}"
            )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        targets: Tensor,
        tokens: int,
        dtype: torch.dtype,
        backend: Backend,
    ) -> Tensor:
        table = _aligned(weight, dtype)
        d_features = torch.empty_like(features)
        d_table = torch.zeros_like(table, dtype=weight.dtype)
        total = features.new_zeros((), dtype=torch.promote_types(features.dtype, torch.float32))
        fused = backend != "torch" and cross_entropy_unsupported_reason(features, table.dtype) is None
        step = _fused_step if fused else _step
        for block, of, rows in _row_blocks(features, targets, tokens):
            operand = block.to(dtype)
            loss, d_logits = step(operand @ table.mT, of, weight.shape[0], 1 / len(targets))
            total += loss
            d_features[rows] = d_logits @ table
            d_table += d_logits.mT @ operand
        ctx.save_for_backward(d_features, d_table[: weight.shape[0]])
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_features, d_weight = ctx.saved_tensors
        return d_features * d_loss, d_weight * d_loss, None, None, None, None


def _step(logits: Tensor, targets: Tensor, vocabulary: int, scale: float) -> tuple[Tensor, Tensor]:
    """scale · Σ loss, and its gradient with respect to the logits, in their dtype."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    column = torch.arange(logits.shape[1], device=logits.device)
    precise = precise.masked_fill(column >= vocabulary, -torch.inf)
    normalizer = precise.logsumexp(dim=1, keepdim=True)
    chosen = precise.gather(1, targets.unsqueeze(1))
    gradient = (precise - normalizer).exp() - (column == targets.unsqueeze(1)).to(precise.dtype)
    return (normalizer - chosen).sum() * scale, (gradient * scale).to(logits.dtype)


def _fused_step(logits: Tensor, targets: Tensor, vocabulary: int, scale: float) -> tuple[Tensor, Tensor]:
    """As `_step`, in one kernel, which overwrites the logits by their gradient."""
    from sympow.kernels.cross_entropy import cross_entropy_in_place

    return cross_entropy_in_place(logits, targets, vocabulary, scale).sum() * scale, logits


def _losses(features: Tensor, table: Tensor, targets: Tensor, vocabulary: int) -> Tensor:
    logits = (features @ table.mT)[:, :vocabulary]
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(precise, targets.long(), reduction="none")


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in a dtype; on a GPU padded by rows of zeros to a multiple of ALIGNMENT."""
    weight = weight.detach().to(dtype)
    padding = -weight.shape[0] % ALIGNMENT
    return pad(weight, (0, 0, 0, padding)) if weight.is_cuda and padding else weight


def _row_blocks(features: Tensor, targets: Tensor, tokens: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """Blocks of `tokens` rows: features, targets and which rows they are."""
    for start in range(0, len(targets), tokens):
        rows = slice(start, start + tokens)
        yield features[rows], targets[rows], rows
