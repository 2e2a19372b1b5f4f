"""Sweeps: small models of one variant on generated tasks, all tasks, learning rates and seeds trained as one.

    RESULTS/EXPERIMENT.jsonl             for each task and sweep: accuracies by learning rate, seed and length
    RESULTS/EXPERIMENT.accuracy.jsonl    of the best learning rate: accuracy by position, loss over training

A sweep takes seconds to minutes and is done all at once, so that there are no folders of runs: the files of the
experiment are written anew whenever a sweep has finished, and a sweep that is in them is done.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sympow import __version__
from sympow.bench.timing import environment
from sympow.checks import check_at_least, check_finite
from sympow.data.loader import prefetch
from sympow.data.state_tracking import VOCABULARY, find_task
from sympow.evaluate.state_tracking import draw_rows, score
from sympow.files import write_atomically
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.train.ensemble import member_of, stack, train_stacked

ACCURACY_ENDING = ".accuracy.jsonl"
# First number of every seed after that of the run: rows of one kind are never those of another.
TRAINING, VALIDATION, EVALUATION = range(3)
# Batches that are drawn together: drawing a row takes a loop over its positions.
DRAWN_TOGETHER = 16
# Positions of the accuracy at the greatest length, and losses over training.
BINS, LOGGED = 64, 32
# Steps after which the time of all steps is estimated.
TIMED_STEPS = 50
_DIGITS = 4


@dataclass(frozen=True)
class Sweep:
    """Models of one variant.

    Attributes:
        name: of the variant, with what was changed.
        model: fields of a GPTConfig besides the vocabulary.
        tasks: names of tasks.
        learning_rates: of which the best is chosen for each task, by the accuracy on other rows of the same length. One
            at which fewer models diverged is better than any other.
        seeds: of parameters and rows.
        length: tokens of a training row.
        key_noise: deviation of the noise on keys in training (`KeyNoise`); 0: none.
        random_lengths: whether each batch has a random length, a multiple of an eighth of `length` up to it.
        steps: updates.
        rows: of a batch.
        warmup: steps over which the learning rate rises.
        factors: evaluation lengths, as multiples of `length`.
        evaluation_rows: at each length.
    """

    name: str
    model: dict[str, Any]
    tasks: tuple[str, ...]
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    length: int = 64
    key_noise: float = 0.0
    random_lengths: bool = False
    steps: int = 2_000
    rows: int = 64
    warmup: int = 100
    factors: tuple[int, ...] = (1, 4, 16)
    evaluation_rows: int = 128

    def __post_init__(self) -> None:
        for name in ("length", "steps", "rows", "evaluation_rows"):
            check_at_least(name, getattr(self, name), 1)
        shortest = max(find_task(task).shortest for task in self.tasks)
        check_at_least("length", self.length, max(8, shortest))
        check_finite("key_noise", self.key_noise)
        if self.key_noise < 0:
            raise ValueError(f"key_noise must be at least 0, got {self.key_noise}")
        GPTConfig(vocab_size=VOCABULARY, **self.model)

    @property
    def members(self) -> int:
        """Models that are trained."""
        return len(self.tasks) * len(self.learning_rates) * len(self.seeds)

    @property
    def tokens(self) -> int:
        """Tokens that all models together are trained on, at most."""
        return self.members * self.steps * self.rows * self.length

    def settings(self) -> dict[str, Any]:
        """What results depend on, besides the task, as JSON has it."""
        named = {name: value for name, value in asdict(self).items() if name not in ("name", "tasks")}
        return json.loads(json.dumps(named))


class OutOfTimeError(Exception):
    """A sweep would not finish within the time limit."""


@dataclass
class SweepResults:
    """Results of an experiment's sweeps on disk.

    Attributes:
        folder: of results.
        experiment: its name.
        rows: lines of the table, by run.
        curves: lines of the file of accuracies, by run.
    """

    folder: Path
    experiment: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def table(self) -> Path:
        return self.folder / f"{self.experiment}.jsonl"

    @property
    def accuracies(self) -> Path:
        return self.folder / f"{self.experiment}{ACCURACY_ENDING}"

    @classmethod
    def read(cls, folder: Path, experiment: str) -> SweepResults:
        """Those in the folder, none if there are no files."""
        found = cls(folder, experiment)
        for path, lines in ((found.table, found.rows), (found.accuracies, found.curves)):
            if path.is_file():
                for number, text in enumerate(path.read_text("utf-8").splitlines(), start=1):
                    try:
                        # Earlier versions wrote losses that are not finite as NaN, which is not JSON.
                        line = json.loads(text, parse_constant=lambda _: None)
                        lines[line["run"]] = line
                    except (ValueError, KeyError, TypeError) as error:
                        raise ValueError(f"{path}: line {number} is not the result of a sweep") from error
        return found

    def done(self, sweep: Sweep) -> bool:
        """Whether all tasks of a sweep have results.

        Raises:
            ValueError: there is a result of that name with other settings.
        """
        for task in sweep.tasks:
            row = self.rows.get(run_name(task, sweep))
            if row is None or run_name(task, sweep) not in self.curves:
                return False
            different = [name for name, value in sweep.settings().items() if row["settings"].get(name) != value]
            if different:
                raise ValueError(
                    f"{row['run']} in {self.table} has other settings: {', '.join(different)}. "
                    "Choose another folder for results, or remove it there"
                )
        return True

    def write(self) -> list[Path]:
        """Writes both files, the table last: every run in it has its curves."""
        for path, lines in ((self.accuracies, self.curves), (self.table, self.rows)):
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines.values())
            write_atomically(path, text.encode())
        return [self.table, self.accuracies]


def run_name(task: str, sweep: Sweep) -> str:
    return f"{task}_{sweep.name}"


def run_sweep(sweep: Sweep, device: str, command: str, deadline: float | None = None) -> SweepResults:
    """Trains and evaluates all models of a sweep.

    Args:
        device: "cpu" or "cuda".
        command: what repeats it, for the record.
        deadline: of `time.monotonic`; None: none.

    Returns:
        the rows and curves of its tasks, without a folder.

    Raises:
        OutOfTimeError: soon after the start, if it would not finish in time.
    """
    begin = time.monotonic()
    config = GPTConfig(vocab_size=VOCABULARY, **sweep.model)
    models = {}
    for seed in sweep.seeds:
        torch.manual_seed(seed)
        models[seed] = GPT(config)
    places = [(task, rate, seed) for task in sweep.tasks for rate in sweep.learning_rates for seed in sweep.seeds]
    stacked = stack([models[seed] for _, _, seed in places]).to(device)
    rates = torch.tensor([rate for _, rate, _ in places])
    batches = _timed(_batches(sweep, device), sweep.steps, begin, deadline)
    every = max(1, sweep.steps // LOGGED)
    logged, losses = train_stacked(
        stacked, batches, rates, sweep.steps, warmup=sweep.warmup, key_noise=sweep.key_noise, log_every=every
    )
    trained = time.monotonic() - begin
    facts = {
        "settings": sweep.settings(),
        "parameters": models[sweep.seeds[0]].count_parameters(),
        "train_seconds": round(trained, 1),
        "members": sweep.members,
        "environment": {**environment(device), "sympow": __version__},
        "command": command,
    }
    found = SweepResults(Path(), sweep.name)
    numbers = {place: number for number, place in enumerate(places)}
    for task in sweep.tasks:
        of_task = {place[1:]: number for place, number in numbers.items() if place[0] == task}
        row, curves = _evaluate(sweep, task, stacked, of_task)
        name = run_name(task, sweep)
        found.rows[name] = {"run": name, "task": task, "sweep": sweep.name, **row, **facts}
        best = [losses[of_task[row["best_rate"], seed]].tolist() for seed in sweep.seeds]
        curves["loss"] = {"step": logged, "value": [[_loss(x) for x in values] for values in best]}
        found.curves[name] = {"run": name, **curves}
    return found


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
            accuracy[length].append([_rounded(one.accuracy) for one in scores])
        curves = [one.by_position(BINS) for one in scores]
        places, positions[rate] = curves[0][0], [[_rounded(x) for x in of_seed] for _, of_seed in curves]
    best = max(sweep.learning_rates, key=lambda rate: _mean_score(valid[rate]))
    row = {
        "length": sweep.length,
        "chance": _rounded(1 / kind.classes),
        "learning_rates": list(sweep.learning_rates),
        "seeds": list(sweep.seeds),
        "best_rate": best,
        "validation": [[_rounded(accuracy) for accuracy, _ in valid[rate]] for rate in sweep.learning_rates],
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


def _batches(sweep: Sweep, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and labels of all models, (members, rows, length): models with the same task and seed have the same."""
    rates = len(sweep.learning_rates)
    for drawn in prefetch(_draw(sweep), 2):
        on_device = drawn.to(device, non_blocking=True)
        # (2, tasks, seeds, steps, rows, length)
        for step in range(on_device.shape[3]):
            batch = on_device[:, :, None, :, step].long().expand(-1, -1, rates, -1, -1, -1).flatten(1, 3)
            yield batch[0], batch[1]


def _draw(sweep: Sweep) -> Iterator[Tensor]:
    """Inputs and labels of some steps at a time, (2, tasks, seeds, steps, rows, length) int16."""
    lengths = _lengths(sweep)
    for first in range(0, sweep.steps, DRAWN_TOGETHER):
        length, steps = next(lengths), min(DRAWN_TOGETHER, sweep.steps - first)
        drawn = [
            torch.stack(draw_rows(find_task(task), [seed, TRAINING, first], steps * sweep.rows, length))
            for task in sweep.tasks
            for seed in sweep.seeds
        ]
        batches = torch.stack(drawn, dim=1).to(torch.int16)
        yield batches.view(2, len(sweep.tasks), len(sweep.seeds), steps, sweep.rows, length)


def _lengths(sweep: Sweep) -> Iterator[int]:
    """Of each draw; the same for all models, so that their rows are one tensor."""
    shortest = max(find_task(task).shortest for task in sweep.tasks)
    choose = torch.Generator().manual_seed(0)
    while True:
        eighths = int(torch.randint(1, 9, (), generator=choose)) if sweep.random_lengths else 8
        yield max(shortest, eighths * sweep.length // 8)


def _timed(
    batches: Iterator[tuple[Tensor, Tensor]], steps: int, begin: float, deadline: float | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches, unless the first of them take so long that all would not be done before the deadline."""
    start = begin
    for number, batch in enumerate(batches):
        # The first steps also compile kernels.
        if number == TIMED_STEPS // 5:
            start = time.monotonic()
        if number == TIMED_STEPS and deadline is not None:
            now = time.monotonic()
            left = (now - start) / (number - TIMED_STEPS // 5) * (steps - number)
            if now + left > deadline:
                raise OutOfTimeError(f"{left:.0f} s are needed, {max(0.0, deadline - now):.0f} s are left")
        yield batch


def _rounded(number: float) -> float:
    return round(number, _DIGITS)


def _loss(number: float) -> float | None:
    """Rounded; None, which is null in JSON, for that of a model that diverged."""
    return _rounded(number) if math.isfinite(number) else None


def run_sweeps(
    sweeps: Sequence[Sweep],
    results: SweepResults,
    device: str,
    command: Callable[[str], str],
    minutes: float | None,
    say: Callable[[str], None],
) -> list[str]:
    """Runs those sweeps that are not done, writes results after each, and returns the names of those left.

    Args:
        command: what repeats one sweep, by its name.
        minutes: time limit: a sweep that would exceed it is left.
        say: prints a line of progress.
    """
    begin = time.monotonic()
    deadline = None if minutes is None else begin + 60 * minutes
    left = []
    for sweep in sweeps:
        if results.done(sweep):
            say(f"{sweep.name}: done before")
            continue
        if deadline is not None and time.monotonic() >= deadline:
            left.append(sweep.name)
            continue
        start = time.monotonic()
        try:
            found = run_sweep(sweep, device, command(sweep.name), deadline)
        except OutOfTimeError as error:
            say(f"{sweep.name}: not trained, {error}")
            left.append(sweep.name)
            continue
        results.rows |= found.rows
        results.curves |= found.curves
        results.write()
        say(f"{sweep.name}: {sweep.members} models in {time.monotonic() - start:.0f} s")
    return left


def best_accuracies(row: Mapping[str, Any]) -> dict[int, list[float]]:
    """By length, then seed, of the best learning rate."""
    best = row["learning_rates"].index(row["best_rate"])
    return {int(length): by_rate[best] for length, by_rate in row["accuracy"].items()}


def with_changes(sweep: Sweep, changes: dict[str, Any]) -> Sweep:
    """A sweep with other numbers of steps, rows and so on: the settings of `--set`."""
    allowed = ("length", "key_noise", "random_lengths", "steps", "rows", "warmup", "evaluation_rows")
    for name in changes:
        if name not in allowed:
            raise ValueError(f"set takes {', '.join(allowed)} for sweeps; got {name!r}")
    return replace(sweep, **changes)
