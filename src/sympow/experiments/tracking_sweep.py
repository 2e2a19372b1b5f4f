"""`Sweep`: models of one variant on the tasks of state tracking, evaluated beyond the length of their training rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sympow.checks import check_at_least, check_choice, check_finite
from sympow.data.loader import prefetch
from sympow.data.state_tracking import VOCABULARY, find_task
from sympow.evaluate.state_tracking import draw_rows, score
from sympow.experiments.sweep import EVALUATION, TRAINING, VALIDATION, BaseSweep, check_distinct, rounded
from sympow.model.gpt import GPT
from sympow.train.ensemble import StackedTraining, member_of

# Batches that are drawn together: drawing a row takes a loop over its positions.
DRAWN_TOGETHER = 16
LENGTHS = ("fixed", "random", "growing")
# Share of the steps during which growing rows grow.
GROWING_PART = 0.7
# Positions of the accuracy at the greatest length.
BINS = 64


@dataclass(frozen=True, kw_only=True)
class Sweep(BaseSweep):
    """Models of one variant on tasks of `sympow.data.state_tracking`.

    One learning rate at which fewer models diverged is better than any other; then the accuracy on other rows of the
    same length decides.

    Attributes:
        tasks: names of tasks.
        length: tokens of a training row.
        key_noise: deviation of the noise on keys in training (`KeyNoise`); 0: none.
        lengths: of training rows. "fixed": all have `length`. "random": each batch has a multiple of an eighth of it.
            "growing": a length curriculum, from a sixteenth of `length` to all of it in the first 70 % of the steps.
        factors: evaluation lengths, as multiples of `length`, in ascending order: curves are those of the last.
    """

    tasks: tuple[str, ...]
    length: int = 64
    key_noise: float = 0.0
    lengths: Literal["fixed", "random", "growing"] = "fixed"
    factors: tuple[int, ...] = (1, 4, 16)

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("length", "key_noise", "lengths", *BaseSweep.CHANGEABLE)

    def __post_init__(self) -> None:
        check_at_least("length", self.length, 1)
        check_distinct("tasks", self.tasks)
        check_distinct("factors", self.factors)
        for factor in self.factors:
            check_at_least("factors", factor, 1)
        if list(self.factors) != sorted(self.factors):
            raise ValueError(f"factors must be in ascending order, got {', '.join(map(str, self.factors))}")
        check_choice("lengths", self.lengths, LENGTHS)
        shortest = max(find_task(task).shortest for task in self.tasks)
        check_at_least("length", self.length, max(8, shortest))
        check_finite("key_noise", self.key_noise)
        if self.key_noise < 0:
            raise ValueError(f"key_noise must be at least 0, got {self.key_noise}")
        super().__post_init__()

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def task_names(self) -> tuple[str, ...]:
        return self.tasks

    @property
    def longest(self) -> int:
        return self.length

    @property
    def training(self) -> dict[str, Any]:
        return {"key_noise": self.key_noise}

    def batches(self, device: str, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """Inputs and labels, (members, rows, length): models with the same task and seed have the same."""
        rates, step = len(self.learning_rates), first - first % DRAWN_TOGETHER
        for drawn in prefetch(_draw(self, step), 2):
            on_device = drawn.to(device, non_blocking=True)
            # (2, tasks, seeds, steps, rows, length)
            for number in range(on_device.shape[3]):
                step += 1
                if step > first:
                    batch = on_device[:, :, None, :, number].long().expand(-1, -1, rates, -1, -1, -1).flatten(1, 3)
                    yield batch[0], batch[1]

    def evaluate(
        self, task: str, training: StackedTraining, of_task: dict[tuple[float, int], int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        return _evaluate(self, task, training.stacked, of_task)


def _evaluate(
    sweep: Sweep, task: str, stacked: GPT, of_task: dict[tuple[float, int], int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Accuracies of a task's models, by learning rate, then seed; curves of the best rate's."""
    kind = find_task(task)
    validation = draw_rows(kind, [0, VALIDATION], sweep.evaluation_rows, sweep.length)
    lengths = [factor * sweep.length for factor in sweep.factors]
    sets = {length: draw_rows(kind, [0, EVALUATION, length], sweep.evaluation_rows, length) for length in lengths}
    valid: dict[float, list[tuple[float, float]]] = {}
    accuracy: dict[int, list[list[float]]] = {length: [] for length in lengths}
    positions: dict[float, list[list[float]]] = {}
    places: list[float] = []
    for rate in sweep.learning_rates:
        members = [member_of(stacked, of_task[rate, seed]) for seed in sweep.seeds]
        scores = [score(member, *validation) for member in members]
        valid[rate] = [(one.accuracy, one.loss) for one in scores]
        for length, rows in sets.items():
            scores = [score(member, *rows) for member in members]
            accuracy[length].append([rounded(one.accuracy) for one in scores])
        curves = [one.by_position(BINS) for one in scores]
        places, positions[rate] = curves[0][0], [[rounded(x) for x in of_seed] for _, of_seed in curves]
    best = max(sweep.learning_rates, key=lambda rate: _mean_score(valid[rate]))
    row = {
        "length": sweep.length,
        "chance": rounded(1 / kind.classes),
        "learning_rates": list(sweep.learning_rates),
        "seeds": list(sweep.seeds),
        "best_rate": best,
        "validation": [[rounded(accuracy) for accuracy, _ in valid[rate]] for rate in sweep.learning_rates],
        "accuracy": {str(length): by_rate for length, by_rate in accuracy.items()},
    }
    return row, {"by_position": {"position": places, "accuracy": positions[best]}}


def _mean_score(scores: list[tuple[float, float]]) -> tuple[int, float, float]:
    """What the best learning rate has most of: models that did not diverge; then mean accuracy; then minus mean loss.

    Args:
        scores: accuracy and loss of the model of each seed.
    """
    finite = [loss for _, loss in scores if math.isfinite(loss)]
    mean_accuracy = statistics.fmean(accuracy for accuracy, _ in scores)
    return len(finite), mean_accuracy, -statistics.fmean(finite) if finite else -math.inf


def _draw(sweep: Sweep, start: int) -> Iterator[Tensor]:
    """Inputs and labels of some steps at a time, (2, tasks, seeds, steps, rows, length) int16, from a step on."""
    for first, length in _draws(sweep):
        steps = min(DRAWN_TOGETHER, sweep.steps - first)
        if first < start:
            continue
        drawn = [
            torch.stack(draw_rows(find_task(task), [seed, TRAINING, first], steps * sweep.rows, length))
            for task in sweep.tasks
            for seed in sweep.seeds
        ]
        batches = torch.stack(drawn, dim=1).to(torch.int16)
        yield batches.view(2, len(sweep.tasks), len(sweep.seeds), steps, sweep.rows, length)


def _draws(sweep: Sweep) -> Iterator[tuple[int, int]]:
    """First step and length of the rows of each draw; the same for all models, so that their rows are one tensor."""
    shortest = max(find_task(task).shortest for task in sweep.tasks)
    choose = torch.Generator().manual_seed(0)
    for first in range(0, sweep.steps, DRAWN_TOGETHER):
        sixteenths = 16
        if sweep.lengths == "random":
            sixteenths = 2 * int(torch.randint(1, 9, (), generator=choose))
        elif sweep.lengths == "growing":
            sixteenths = min(16, 1 + int(16 * first / (GROWING_PART * sweep.steps)))
        yield first, max(shortest, sixteenths * sweep.length // 16)


def best_accuracies(row: Mapping[str, Any]) -> dict[int, list[float]]:
    """By length, then seed, of the best learning rate."""
    best = row["learning_rates"].index(row["best_rate"])
    return {int(length): by_rate[best] for length, by_rate in row["accuracy"].items()}
