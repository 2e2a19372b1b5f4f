"""Experiments on state tracking: what rotation is for, and what carries it beyond the training length.

All tasks, learning rates and seeds of a variant are trained as one (`sweep.py`), and evaluated at several times the
length of their training rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.grid import Scale
from experiments.stacked import StackedTraining, member_of
from experiments.sweep import EVALUATION, TRAINING, VALIDATION, Sweep, as_stored
from experiments.tasks import MASKED, TASKS, VOCABULARY, Task
from sympow import GPT
from sympow.checks import check_choice
from sympow.data.loader import prefetch
from sympow.model.config import VARIANTS

COMPARED_TASKS = ("parity", "count3", "count5", "count8", "s3", "d4", "a5", "copy", "induction")
COMPARED = ("softmax", "sympow", "gating", "conformal", "pair-rotation")
# Tasks of which the first is the simplest, and the last needs two layers: which way to turn depends on a parity.
REMEDIED = ("parity", "count3", "count8", "s3")
PAIRS: dict[str, Any] = VARIANTS["pair-rotation"]
UNGATED = {**PAIRS, "gating": "none"}
# RoPE that hardly turns within the rows of an evaluation.
SLOW = {"max_rate": 1e-4}
# What may carry tracking beyond the training length.
MODELS: dict[str, dict[str, Any]] = {
    "pairs": PAIRS,
    # Gates that keep the beginning of a row.
    "pairs-ungated": UNGATED,
    "pairs-half-gated": {**PAIRS, "gating": "half"},
    "pairs-clamped": {**PAIRS, "gating": "clamped"},
    # Angles: signed, beside RoPE in half of the pairs; and these as_stored.
    "signed-ungated": {**UNGATED, "rotary": "signed"},
    "grid-ungated": {**UNGATED, "rotary": "grid"},
    "grid-clamped": {**PAIRS, "gating": "clamped", "rotary": "grid"},
    "grid": {**PAIRS, "rotary": "grid"},
    # A power that tells scores apart more sharply.
    "grid-ungated-p4": {**UNGATED, "rotary": "grid", "power": 4},
}
# Batches that are drawn together: drawing a row takes a loop over its positions.
DRAWN_TOGETHER = 16
LENGTHS = ("fixed", "random", "growing")
# Share of the steps during which growing rows grow.
GROWING_PART = 0.7
# Positions of the accuracy at the greatest length.
BINS = 64
# Tokens read at once in an evaluation.
BATCH_TOKENS = 65_536


def state_tracking(scale: Scale) -> list[TrackingSweep]:
    """Which variants can track a state: parity, counting, groups; at 1, 4 and 16 times the training length."""
    return [_sweep(scale, variant, VARIANTS[variant], COMPARED_TASKS) for variant in COMPARED]


def tracking_remedies(scale: Scale) -> list[TrackingSweep]:
    """What carries tracking beyond the training length: gates that keep, angles that are exact, noise on keys."""
    exact = ("grid-ungated", "grid-clamped")
    noisy = ("grid-ungated", "grid-clamped", "pairs-ungated", "signed-ungated", "grid", "grid-ungated-p4")
    changed: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((f"{name}-noise", MODELS[name], {"key_noise": 1.0}) for name in noisy),
        ("grid-ungated-less-noise", MODELS["grid-ungated"], {"key_noise": 0.5}),
        *((name, model, {}) for name, model in MODELS.items()),
        ("pairs-ungated-random-lengths", UNGATED, {"lengths": "random"}),
        # Short rows make learning easier, which noise makes harder.
        *((f"{name}-noise-random-lengths", MODELS[name], {"key_noise": 1.0, "lengths": "random"}) for name in exact),
        # RoPE also turns what a query sees of the first token, in half of the pairs.
        *((f"{name}-slow-noise", {**MODELS[name], **SLOW}, {"key_noise": 1.0}) for name in exact),
    ]
    # As many rows in all as in `state_tracking`, in twice the steps: noise makes learning slower.
    steps = {"steps": 4_000, "rows": 32} if scale.name == "small" else {}
    return [_sweep(scale, name, model, REMEDIED, **steps, **changes) for name, model, changes in changed]


def tracking_longer(scale: Scale) -> list[TrackingSweep]:
    """Whether training four times as long, with more noise, carries the harder tasks beyond the training length."""
    changed = {
        "grid-clamped-noise": ("grid-clamped", 1.0),
        "grid-clamped-more-noise": ("grid-clamped", 2.0),
        "grid-ungated-more-noise": ("grid-ungated", 2.0),
    }
    # Rates around the best of `tracking_remedies` for these tasks.
    longer = {"steps": 16_000, "rows": 32, "learning_rates": (5e-4, 1e-3)} if scale.name == "small" else {}
    return [
        _sweep(scale, name, MODELS[model], ("count3", "s3"), key_noise=noise, **longer)
        for name, (model, noise) in changed.items()
    ]


def tracking_curriculum(scale: Scale) -> list[TrackingSweep]:
    """What carries tracking to 16 times the training length: rows that grow in training, beside the other remedies."""
    # An angle that is one step of the grid off shows at the end of rows of 128 tokens, and hardly in rows of 64.
    full: dict[str, Any] = {"length": 128, "key_noise": 1.0, "lengths": "growing"}
    model = {**MODELS["grid-clamped"], **SLOW}
    changed: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "all": (model, full),
        # Whether rows that grow are enough.
        **{name: (VARIANTS[name], {**full, "key_noise": 0.0}) for name in ("softmax", "gating", "pair-rotation")},
        # `all` with one remedy changed.
        "fixed-lengths": (model, {**full, "lengths": "fixed"}),
        "random-lengths": (model, {**full, "lengths": "random"}),
        "no-noise": (model, {**full, "key_noise": 0.0}),
        "no-grid": ({**model, "rotary": "signed"}, full),
        "fast-rope": (MODELS["grid-clamped"], full),
        "plain-gates": ({**MODELS["grid"], **SLOW}, full),
        "no-gates": ({**MODELS["grid-ungated"], **SLOW}, full),
        # The two changes that carry modulo 3 furthest, together.
        "random-lengths-no-gates": ({**MODELS["grid-ungated"], **SLOW}, {**full, "lengths": "random"}),
    }
    tasks = ("parity", "count3", "count5", "count8", "s3", "d4")
    steps = {"steps": 4_000, "rows": 16, "learning_rates": (1e-3, 3e-3)} if scale.name == "small" else {"length": 20}
    return [_sweep(scale, name, model, tasks, **{**changes, **steps}) for name, (model, changes) in changed.items()]


def _sweep(scale: Scale, name: str, model: dict[str, Any], tasks: tuple[str, ...], **changes: Any) -> TrackingSweep:
    if scale.name == "cpu":
        # Seconds: a test that everything works, not a measurement.
        return TrackingSweep(
            name,
            {"layers": 2, "width": 32, "heads": 2, **model},
            tasks=tuple(task for task in tasks if task in ("parity", "copy")) or tasks[:1],
            learning_rates=(1e-2,),
            seeds=(0,),
            **{"length": 20, "steps": 12, "rows": 8, "warmup": 4, "evaluation_rows": 8, **changes},
        )
    return TrackingSweep(
        name,
        {"layers": 2, "width": 128, "heads": 4, **model},
        tasks=tasks,
        seeds=(0, 1, 2),
        **{"learning_rates": (1e-3, 3e-3, 1e-2), "length": 64, "steps": 2_000, "rows": 64, **changes},
    )


@dataclass(frozen=True, kw_only=True)
class TrackingSweep(Sweep):
    """Models of one variant on tasks of `tasks.py`.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("lengths", self.lengths, LENGTHS)

    @property
    def vocabulary(self) -> int:
        return VOCABULARY

    @property
    def task_names(self) -> tuple[str, ...]:
        return self.tasks

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
        """Accuracies of a task's models, by learning rate, then seed; curves of the best rate's."""
        kind = TASKS[task]
        lengths = [factor * self.length for factor in self.factors]
        validation = draw_rows(kind, [0, VALIDATION], self.evaluation_rows, self.length)
        sets = {length: draw_rows(kind, [0, EVALUATION, length], self.evaluation_rows, length) for length in lengths}
        valid: dict[tuple[float, int], Score] = {}
        found: dict[int, dict[tuple[float, int], Score]] = {length: {} for length in lengths}
        for place, number in of_task.items():
            member = member_of(training.stacked, number)
            valid[place] = score(member, *validation)
            for length, rows in sets.items():
                found[length][place] = score(member, *rows)
        scores = {rate: [valid[rate, seed] for seed in self.seeds] for rate in self.learning_rates}
        best = max(scores, key=lambda rate: _mean_score([(one.accuracy, one.loss) for one in scores[rate]]))
        row = {
            "length": self.length,
            "chance": as_stored(1 / kind.classes),
            "learning_rates": list(self.learning_rates),
            "seeds": list(self.seeds),
            "best_rate": best,
            "validation": self.by_rate({place: one.accuracy for place, one in valid.items()}),
            "accuracy": {
                str(length): self.by_rate({place: one.accuracy for place, one in of_length.items()})
                for length, of_length in found.items()
            },
        }
        curves = [found[lengths[-1]][best, seed].by_position(BINS) for seed in self.seeds]
        accuracies = [[as_stored(x) for x in of_seed] for _, of_seed in curves]
        return row, {"by_position": {"position": curves[0][0], "accuracy": accuracies}}


def _mean_score(scores: list[tuple[float, float]]) -> tuple[int, float, float]:
    """What the best learning rate has most of: models that did not diverge; then mean accuracy; then minus mean loss.

    Args:
        scores: accuracy and loss of the model of each seed.
    """
    finite = [loss for _, loss in scores if math.isfinite(loss)]
    mean_accuracy = statistics.fmean(accuracy for accuracy, _ in scores)
    return len(finite), mean_accuracy, -statistics.fmean(finite) if finite else -math.inf


def _draw(sweep: TrackingSweep, start: int) -> Iterator[Tensor]:
    """Inputs and labels of some steps at a time, (2, tasks, seeds, steps, rows, length) int16, from a step on."""
    for first, length in _draws(sweep):
        steps = min(DRAWN_TOGETHER, sweep.steps - first)
        if first < start:
            continue
        drawn = [
            torch.stack(draw_rows(TASKS[task], [seed, TRAINING, first], steps * sweep.rows, length))
            for task in sweep.tasks
            for seed in sweep.seeds
        ]
        batches = torch.stack(drawn, dim=1).to(torch.int16)
        yield batches.view(2, len(sweep.tasks), len(sweep.seeds), steps, sweep.rows, length)


def _draws(sweep: TrackingSweep) -> Iterator[tuple[int, int]]:
    """First step and length of the rows of each draw; the same for all models, so that their rows are one tensor."""
    shortest = max(TASKS[task].shortest for task in sweep.tasks)
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


@dataclass(frozen=True)
class Score:
    """Predictions of a model on rows of one length.

    Attributes:
        right: right predictions at each position, (length,) int64.
        counted: labels at each position, (length,) int64.
        loss: mean over all labels, in nats.
    """

    right: Tensor
    counted: Tensor
    loss: float

    @property
    def accuracy(self) -> float:
        """Over the second half of the rows, which shorter rows do not have."""
        half = len(self.right) // 2
        return (self.right[half:].sum() / self.counted[half:].sum()).item()

    def by_position(self, bins: int) -> tuple[list[float], list[float]]:
        """Positions at the middle of each of `bins` ranges that have labels, and the accuracies there."""
        positions, accuracies = [], []
        for right, counted, places in zip(
            self.right.tensor_split(bins),
            self.counted.tensor_split(bins),
            torch.arange(len(self.right)).tensor_split(bins),
            strict=True,
        ):
            if counted.sum():
                positions.append(places.double().mean().item())
                accuracies.append((right.sum() / counted.sum()).item())
        return positions, accuracies


def draw_rows(task: Task, seed: list[int], rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels as tensors, (rows, length) each."""
    inputs, labels = task.batch(seed, rows, length)
    return torch.from_numpy(inputs), torch.from_numpy(labels)


@torch.no_grad()
def score(model: GPT, inputs: Tensor, labels: Tensor) -> Score:
    """Scores a model on rows, (rows, length) each, from `draw_rows`."""
    device = model.embedding.weight.device
    length = inputs.shape[1]
    right = torch.zeros(length, dtype=torch.int64)
    losses = 0.0
    size = max(1, BATCH_TOKENS // length)
    for tokens, wanted in zip(inputs.split(size), labels.split(size), strict=True):
        logits, _ = model(tokens.to(device), return_state=False)
        wanted = wanted.to(device)
        losses += cross_entropy(logits.flatten(0, 1), wanted.flatten(), ignore_index=MASKED, reduction="sum").item()
        right += (logits.argmax(-1) == wanted).sum(0).cpu()
    counted = (labels != MASKED).sum(0)
    return Score(right, counted, losses / int(counted.sum()))
