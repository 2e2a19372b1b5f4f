"""`RecallSweep`: models of one shape on multi-query associative recall, trained and evaluated as zoology's are."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sympow.checks import check_at_least, check_at_most, check_finite, check_is_list
from sympow.data.loader import prefetch
from sympow.data.multi_query_recall import VOCABULARY, check_recall, draw_recall
from sympow.experiments.sweep import EVALUATION, TRAINING, VALIDATION, BaseSweep, check_distinct, rounded
from sympow.model.accounting import key_value_elements, state_elements
from sympow.model.config import GPTConfig
from sympow.train.ensemble import StackedTraining, stacked_logits

TASK = "recall"
# Tokens of a batch of evaluation, all models together.
EVALUATED_TOKENS = 2**18
# Rows of a validation, as a part of those of the evaluation.
VALIDATION_PART = 8

# Training rows are drawn as int16: the number of ids and of positions that it holds.
DRAWN_LIMIT = 2**15

# (length, pairs)
Shape = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class RecallSweep(BaseSweep):
    """Models of one variant on multi-query associative recall (`sympow.data.multi_query_recall`).

    The loss is that of the answers alone. Each batch has rows of one shape, chosen by `weights`; rows are drawn anew at
    every step. Training ends early once the models of all seeds have reached `target` at one learning rate. The overall
    accuracy is zoology's: the mean over evaluation rows of the share of right answers, so that all shapes count alike,
    whatever their number of pairs.

    Attributes:
        mixture: shapes of training rows, (length, pairs).
        weights: how often each is drawn, in proportion.
        evaluation: shapes of evaluation rows.
        tokens_known: number of token ids.
        weight_decay: of matrices and embeddings.
        target: accuracy in validation, over all evaluation shapes, that ends training.
    """

    steps: int = 20_000
    rows: int = 256
    evaluation_rows: int = 1_000
    mixture: tuple[Shape, ...] = ((64, 4), (128, 8), (256, 16), (256, 32), (256, 64))
    weights: tuple[int, ...] = (5, 1, 1, 1, 1)
    evaluation: tuple[Shape, ...] = ((64, 4), (64, 8), (64, 16), (128, 32), (256, 64), (512, 128), (1_024, 256))
    tokens_known: int = VOCABULARY
    weight_decay: float = 0.1
    target: float = 0.99

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("weight_decay", "target", *BaseSweep.CHANGEABLE)
    validate_every: ClassVar[int | None] = 500

    def __post_init__(self) -> None:
        for name in ("mixture", "evaluation"):
            check_distinct(name, getattr(self, name))
            for shape in getattr(self, name):
                check_is_list(f"a shape of {name}", shape)
                if len(shape) != 2:
                    raise ValueError(f"a shape of {name} must be a length and a number of pairs, got {shape}")
                length, pairs = shape
                check_recall(length, pairs, self.tokens_known)
        why = "which is what the int16 of training rows holds"
        check_at_most("tokens_known", self.tokens_known, DRAWN_LIMIT, why)
        check_at_most("the length of a shape of mixture", self.longest, DRAWN_LIMIT, why)
        if len(self.weights) != len(self.mixture) or min(self.weights) < 1:
            raise ValueError(f"weights must be a number of at least 1 for each shape of mixture, got {self.weights}")
        check_at_least("evaluation_rows", self.evaluation_rows, VALIDATION_PART)
        check_finite("target", self.target)
        check_finite("weight_decay", self.weight_decay)
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        super().__post_init__()

    @property
    def vocabulary(self) -> int:
        return self.tokens_known

    @property
    def task_names(self) -> tuple[str, ...]:
        return (TASK,)

    @property
    def longest(self) -> int:
        return max(length for length, _ in self.mixture)

    @property
    def tokens(self) -> int:
        """Tokens that all models together are trained on: at most, and as many as can be expected."""
        mean = sum(weight * length for weight, (length, _) in zip(self.weights, self.mixture, strict=True))
        return round(self.members * self.steps * self.rows * mean / sum(self.weights))

    @property
    def training(self) -> dict[str, Any]:
        return {"weight_decay": self.weight_decay, "autocast": True, "compile": True}

    @property
    def state_numbers(self) -> int:
        """Numbers in the state of one sequence, all layers; with softmax, in the keys and values of the longest row."""
        config = GPTConfig(vocab_size=self.tokens_known, **self.model)
        if config.mixer == "softmax":
            return key_value_elements(config, max(length for length, _ in self.evaluation))
        return state_elements(config)

    def batches(self, device: str, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Inputs (members, rows, length), answers and their positions, (members, rows, pairs)."""
        rates = len(self.learning_rates)
        for drawn in prefetch(self._draw(first), 4):
            # Models of one seed have the same rows.
            yield tuple(x.to(device, non_blocking=True).long().repeat(rates, 1, 1) for x in drawn)

    def _draw(self, first: int) -> Iterator[tuple[Tensor, ...]]:
        """The same of each seed, (seeds, …) int16."""
        shares = np.array(self.weights) / sum(self.weights)
        for step in range(first, self.steps):
            # All models have rows of one shape, so that these are one tensor.
            number = np.random.default_rng([TRAINING, step]).choice(len(self.mixture), p=shares)
            length, pairs = self.mixture[number]
            drawn = [
                draw_recall([seed, TRAINING, step], self.rows, length, pairs, self.tokens_known) for seed in self.seeds
            ]
            tokens, positions, answers = (
                torch.from_numpy(np.stack(x)).to(torch.int16) for x in zip(*drawn, strict=True)
            )
            yield tokens, answers, positions

    def validate(self, training: StackedTraining) -> tuple[str, bool]:
        accuracy = _overall(self._right(training, VALIDATION, self.evaluation_rows // VALIDATION_PART))
        by_rate = accuracy.view(len(self.learning_rates), len(self.seeds))
        shown = ", ".join(
            f"{rate:g}: {100 * mean:.1f}"
            for rate, mean in zip(self.learning_rates, by_rate.mean(1).tolist(), strict=True)
        )
        return f"% right by learning rate: {shown}", bool((by_rate >= self.target).all(1).any())

    def evaluate(
        self, task: str, training: StackedTraining, of_task: dict[tuple[float, int], int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        validation = _overall(self._right(training, VALIDATION, self.evaluation_rows // VALIDATION_PART))
        right = self._right(training, EVALUATION, self.evaluation_rows)
        overall = _overall(right)

        def by_rate(accuracy: Tensor) -> list[list[float]]:
            return [
                [rounded(accuracy[of_task[rate, seed]].item()) for seed in self.seeds] for rate in self.learning_rates
            ]

        valid = by_rate(validation)
        best = max(range(len(valid)), key=lambda number: statistics.fmean(valid[number]))
        row = {
            "learning_rates": list(self.learning_rates),
            "seeds": list(self.seeds),
            "best_rate": self.learning_rates[best],
            "validation": valid,
            "overall": by_rate(overall),
            "by_shape": {f"{length}/{pairs}": by_rate(right[length, pairs]) for length, pairs in self.evaluation},
            "state_numbers": self.state_numbers,
            "state_bytes": 4 * self.state_numbers,
        }
        return row, {}

    @torch.no_grad()
    def _right(self, training: StackedTraining, kind: int, rows: int) -> dict[Shape, Tensor]:
        """Share of right answers on rows of each evaluation shape, the same rows for all models: (members,) each."""
        stacked, found = training.stacked, {}
        device, members = stacked.embedding.weight.device, self.members
        stacked.eval()
        for length, pairs in self.evaluation:
            drawn = _evaluation_rows(kind, rows, length, pairs, self.tokens_known)
            tokens, positions, answers = (x.to(device) for x in drawn)
            right = torch.zeros(members, dtype=torch.float64, device=device)
            size = max(1, EVALUATED_TOKENS // (members * length))
            for some in torch.arange(rows, device=device).split(size):
                here = [x[some].expand(members, -1, -1) for x in (tokens, positions, answers)]
                with training.computing():
                    predicted = stacked_logits(stacked, here[0], here[1]).argmax(-1)
                right += (predicted == here[2].flatten(1)).sum(1)
            found[length, pairs] = (right / (rows * pairs)).cpu()
        stacked.train()
        return found


def _overall(right: Mapping[Shape, Tensor]) -> Tensor:
    """Mean over rows of the share of right answers, (members,): there are as many rows of each shape."""
    return torch.stack(list(right.values())).mean(0)


@cache
def _evaluation_rows(kind: int, rows: int, length: int, pairs: int, vocabulary: int) -> tuple[Tensor, ...]:
    """What `draw_recall` draws, once for all validations."""
    return tuple(map(torch.from_numpy, draw_recall([0, kind], rows, length, pairs, vocabulary)))


def best_recall(row: Mapping[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """Accuracies of each seed at the best learning rate: over all rows, and by shape, "length/pairs"."""
    best = row["learning_rates"].index(row["best_rate"])
    return row["overall"][best], {shape: by_rate[best] for shape, by_rate in row["by_shape"].items()}
