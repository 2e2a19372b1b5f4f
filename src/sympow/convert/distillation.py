"""The distillation loss: the KL divergence between two models' predictions, without storing the logits of all tokens.

As in `sympow.model.losses`, the loss of a block of rows and its gradients are computed together while the logits of the
block are in memory, so that neither long contexts nor large vocabularies need more memory than one block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sympow.checks import check_positive
from sympow.errors import ArgumentError

# Logits per model in memory at a time; a few float32 copies of them exist.
MOST_LOGITS = 2**25
FEWEST_ROWS = 64


def rows_in_memory(weight: Tensor) -> int:
    """Rows of logits that losses compute at a time, for an output embedding (vocabulary, width)."""
    return max(FEWEST_ROWS, MOST_LOGITS // weight.shape[0])


def linear_kl_divergence(
    features: Tensor,
    weight: Tensor,
    teacher_features: Tensor,
    teacher_weight: Tensor,
    *,
    tokens: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Mean over tokens of KL(teacher ‖ student), Σ p_T (log p_T − log p_S): a scalar, float32 or better.

    The logits are features weightᵀ of each model. Gradients go to the student's features and weight.

    Args:
        features: the student's last hidden states, (…, width).
        weight: the student's output embedding, (vocabulary, width).
        teacher_features: the teacher's last hidden states, (…, teacher's width).
        teacher_weight: the teacher's output embedding, (vocabulary, teacher's width).
        tokens: rows of logits in memory at a time; None: `rows_in_memory`.
        dtype: dtype of the matrix products; None: that of the student's weight.
    """
    if features.shape[:-1] != teacher_features.shape[:-1] or weight.shape[0] != teacher_weight.shape[0]:
        raise ArgumentError(
            "features",
            "and weight must be for the same tokens and vocabulary as the teacher's; "
            f"got {tuple(features.shape)} and {tuple(weight.shape)}, "
            f"and of the teacher {tuple(teacher_features.shape)} and {tuple(teacher_weight.shape)}",
        )
    rows = features.reshape(-1, features.shape[-1])
    if not rows.shape[0]:
        raise ArgumentError("features", "must not be empty: the mean over no tokens is not defined")
    if tokens is not None:
        check_positive("tokens", tokens)
    else:
        tokens = rows_in_memory(weight)
    taught = teacher_features.detach().reshape(-1, teacher_features.shape[-1])
    return _LinearKL.apply(rows, weight, taught, teacher_weight.detach(), tokens, dtype or weight.dtype)


class _LinearKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        taught: Tensor,
        teacher_weight: Tensor,
        tokens: int,
        dtype: torch.dtype,
    ) -> Tensor:
        table, teacher_table = weight.to(dtype), teacher_weight.to(dtype)
        d_features = torch.empty_like(features)
        # LoRA freezes the output embedding, whose gradient is as large as itself.
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = features.new_zeros((), dtype=torch.promote_types(features.dtype, torch.float32))
        for start in range(0, len(features), tokens):
            rows = slice(start, start + tokens)
            operand = features[rows].to(dtype)
            log_p = _log_softmax(operand @ table.mT)
            log_taught = _log_softmax(taught[rows].to(dtype) @ teacher_table.mT)
            p_taught = log_taught.exp()
            # A product of 0 and −inf would be NaN; its limit is 0.
            total += torch.where(p_taught > 0, p_taught * (log_taught - log_p), 0).sum() / len(features)
            d_logits = (log_p.exp_().sub_(p_taught).div_(len(features))).to(dtype)
            d_features[rows] = d_logits @ table
            if d_weight is not None:
                d_weight += d_logits.mT @ operand
        ctx.save_for_backward(d_features, d_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_features, d_weight = ctx.saved_tensors
        return d_features * d_loss, None if d_weight is None else d_weight * d_loss, None, None, None, None


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
