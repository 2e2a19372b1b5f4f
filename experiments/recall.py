"""Multi-query associative recall as zoology trains it: accuracy against the size of the state.

All learning rates and seeds of a model are trained as one (`sweep.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from experiments.grid import Scale
from experiments.stacked import StackedTraining, stacked_logits
from experiments.sweep import EVALUATION, TRAINING, VALIDATION, Sweep
from experiments.tasks import RECALL_VOCABULARY, draw_recall
from sympow import GPTConfig
from sympow.data.loader import prefetch
from sympow.model.accounting import key_value_elements, state_elements
from sympow.model.config import VARIANTS

TAPS = 4
# Updates of every model: half as many as zoology's, of rows that are never repeated.
STEPS = 10_000
# A state of 60 kB, slightly less than that of zoology's published points.
KNEE: dict[str, Any] = {"width": 128, "heads": 6, "key_value_heads": 3, "head_dim": 16}
ONE_LAYER: dict[str, Any] = {"width": 128, "heads": 6, "head_dim": 16, "layers": 1}
ONE_HEAD_OF_64: dict[str, Any] = {"width": 128, "heads": 2, "key_value_heads": 1, "layers": 1}
P4: dict[str, Any] = {"width": 64, "heads": 8, "key_value_heads": 2, "power": 4}
# Models, by name: their variant and shape. They are trained in this order, so the most important ones come first.
# Zoology's models have no positional encoding, so `unrotated` is closest to them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gating-w128-3x16": ("gating", KNEE),
    "conformal-w128-3x16": ("conformal", KNEE),
    "unrotated-w128-3x16": ("unrotated", KNEE),
    "gating-w128-1x64-one-layer": ("gating", ONE_HEAD_OF_64),
    "unrotated-w128-1x64-one-layer": ("unrotated", ONE_HEAD_OF_64),
    "gating-w128-6x16-one-layer": ("gating", ONE_LAYER),
    "unrotated-w128-6x16-one-layer": ("unrotated", ONE_LAYER),
    "softmax-w128": ("softmax", {"width": 128, "heads": 8}),
    "unrotated-softmax-w128": ("softmax", {"width": 128, "heads": 8, "rotary": "none"}),
    "gating-w128-1x16": ("gating", {**KNEE, "key_value_heads": 1}),
    "conformal-w128-1x16": ("conformal", {**KNEE, "key_value_heads": 1}),
    "unrotated-w128-1x16": ("unrotated", {**KNEE, "key_value_heads": 1}),
    "conformal-w128-1x64-one-layer": ("conformal", ONE_HEAD_OF_64),
    "gating-w64-2x8-p4": ("gating", P4),
    "unrotated-w64-2x8-p4": ("unrotated", P4),
    "gating-w128-8x16": ("gating", {"width": 128, "heads": 8}),
    "unrotated-w128-8x16": ("unrotated", {"width": 128, "heads": 8}),
    "gating-w128-2x32": ("gating", {"width": 128, "heads": 4, "key_value_heads": 2}),
    "gating-w64-4x16": ("gating", {"width": 64, "heads": 4}),
    "unrotated-w128-3x16-no-conv": ("unrotated", {**KNEE, "short_conv": 0}),
    # Zoology's models have no MLP: one of a single unit is as good as none.
    "unrotated-w128-3x16-no-mlp": ("unrotated", {**KNEE, "mlp_ratio": 1 / 128}),
    "pair-rotation-w128-3x16": ("pair-rotation", KNEE),
    # RoPE in a part of the pairs, the fastest ones.
    **{
        f"{part}-w128-{shape}": ("gating", {**size, "rotary_fraction": fraction})
        for part, fraction in {"half": 0.5, "quarter": 0.25, "eighth": 0.125}.items()
        for shape, size in {
            "3x16": KNEE,
            "1x64-one-layer": ONE_HEAD_OF_64,
            "6x16-one-layer": ONE_LAYER,
            "1x16": {**KNEE, "key_value_heads": 1},
        }.items()
    },
}
# Those that are trained with three seeds.
REPEATED = ("gating-w128-3x16", "conformal-w128-3x16", "unrotated-w128-3x16", "unrotated-w128-6x16-one-layer")
CPU_MODELS = ("gating-w64-4x16", "softmax-w128")
TASK = "recall"
# Tokens of a batch of evaluation, all models together.
EVALUATED_TOKENS = 2**18
# Rows of a validation, as a part of those of the evaluation.
VALIDATION_PART = 8
# (length, pairs)
Shape = tuple[int, int]


def recall(scale: Scale) -> list[RecallSweep]:
    """Multi-query associative recall as zoology trains it: accuracy against the size of the state, p = 2 and 4."""
    if scale.name == "cpu":
        # Seconds: a test that everything works, not a measurement.
        return [
            RecallSweep(
                name,
                {**_model(name), "width": 32, "heads": 2},
                learning_rates=(1e-2,),
                seeds=(0,),
                steps=12,
                rows=8,
                warmup=4,
                evaluation_rows=8,
                mixture=((16, 2), (32, 4)),
                weights=(1, 1),
                evaluation=((16, 2), (32, 4), (64, 8)),
                tokens_known=64,
            )
            for name in CPU_MODELS
        ]
    return [
        RecallSweep(
            name,
            _model(name),
            learning_rates=(1e-3, 3e-3, 1e-2, 3e-2),
            seeds=(0, 1, 2) if name in REPEATED else (0,),
            steps=STEPS,
        )
        for name in MODELS
    ]


def _model(name: str) -> dict[str, Any]:
    variant, shape = MODELS[name]
    return {"layers": 2, "short_conv": TAPS, **VARIANTS[variant], **shape}


@dataclass(frozen=True, kw_only=True)
class RecallSweep(Sweep):
    """Models of one variant on multi-query associative recall (`draw_recall`).

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
    tokens_known: int = RECALL_VOCABULARY
    weight_decay: float = 0.1
    target: float = 0.99

    validate_every: ClassVar[int | None] = 500

    @property
    def vocabulary(self) -> int:
        return self.tokens_known

    @property
    def task_names(self) -> tuple[str, ...]:
        return (TASK,)

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

        def by_rate(accuracy: Tensor) -> list[list[float]]:
            return self.by_rate({place: accuracy[number].item() for place, number in of_task.items()})

        valid = by_rate(validation)
        best = max(range(len(valid)), key=lambda number: statistics.fmean(valid[number]))
        row = {
            "learning_rates": list(self.learning_rates),
            "seeds": list(self.seeds),
            "best_rate": self.learning_rates[best],
            "validation": valid,
            "overall": by_rate(_overall(right)),
            "by_shape": {f"{length}/{pairs}": by_rate(right[length, pairs]) for length, pairs in self.evaluation},
            "state_numbers": self.state_numbers,
            "state_bytes": 4 * self.state_numbers,
        }
        return row, {}

    @torch.no_grad()
    def _right(self, training: StackedTraining, kind: int, rows: int) -> dict[Shape, Tensor]:
        """Share of right answers on rows of each evaluation shape, the same rows for all models: (members,) each."""
        stacked, found = training.stacked, {}
        device, members = stacked.embedding.weight.device, len(self.places)
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
