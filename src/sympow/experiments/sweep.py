"""Sweeps: small models of one shape on generated tasks, all tasks, learning rates and seeds trained as one.

    RESULTS/EXPERIMENT.jsonl             for each task and sweep: accuracies by learning rate and seed
    RESULTS/EXPERIMENT.accuracy.jsonl    of the best learning rate: loss over training, and other curves

A sweep takes seconds to minutes, so that there are no folders of runs: the files of the experiment are written anew
whenever a sweep has finished, and a sweep that is in them is done. One that a time limit or a signal ends is saved, and
the next call continues it. Several commands can run sweeps of one experiment at the same time.
"""

from __future__ import annotations

import json
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sympow import __version__
from sympow.bench.timing import environment
from sympow.checks import check_at_least, check_finite, check_is_list
from sympow.files import replacing, write_atomically
from sympow.locks import locked
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.train.ensemble import StackedTraining, stack
from sympow.train.signals import StopRequest

ACCURACY_ENDING = ".accuracy.jsonl"
# First number of every seed after that of the run: rows of one kind are never those of another.
TRAINING, VALIDATION, EVALUATION = range(3)
# Losses over training.
LOGGED = 32
# Least seconds between two lines of progress, and between two checkpoints.
TOLD_SECONDS, SAVED_SECONDS = 15, 300
_DIGITS = 4


@dataclass(frozen=True)
class BaseSweep(ABC):
    """Models of one shape that are trained as one: every task, learning rate and seed has one.

    Attributes:
        name: of the variant, with what was changed.
        model: fields of a GPTConfig besides the vocabulary.
        learning_rates: of which the best is chosen for each task, by rows that are not those of the results.
        seeds: of parameters and rows.
        steps: updates.
        rows: of a batch.
        warmup: steps over which the learning rate rises.
        evaluation_rows: of each kind that models are evaluated on.
    """

    name: str
    model: dict[str, Any]
    _: KW_ONLY
    learning_rates: tuple[float, ...]
    seeds: tuple[int, ...]
    steps: int = 2_000
    rows: int = 64
    warmup: int = 100
    evaluation_rows: int = 128

    # Fields that --set can change.
    CHANGEABLE: ClassVar[tuple[str, ...]] = ("steps", "rows", "warmup", "evaluation_rows")
    # Steps between two validations by which training may end early; None: it does not.
    validate_every: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "evaluation_rows"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("warmup", self.warmup, 0)
        check_distinct("learning_rates", self.learning_rates)
        for rate in self.learning_rates:
            check_finite("learning_rates", rate)
            if rate <= 0:
                raise ValueError(f"learning_rates must be above 0, got {rate}")
        check_distinct("seeds", self.seeds)
        for seed in self.seeds:
            check_at_least("seeds", seed, 0)
        config = GPTConfig(vocab_size=self.vocabulary, **self.model)
        for name in ("gating", "rotary"):
            # Their parameters are in no module that can be stacked (`sympow.train.ensemble`).
            if getattr(config, name) == "learned":
                raise ValueError(f"model of a sweep must not have {name}='learned', which cannot be stacked")

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def task_names(self) -> tuple[str, ...]:
        """Tasks, each with models and results of its own."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Tokens of the longest training row."""

    @property
    def members(self) -> int:
        """Models that are trained."""
        return len(self.task_names) * len(self.learning_rates) * len(self.seeds)

    @property
    def places(self) -> list[tuple[str, float, int]]:
        """Task, learning rate and seed of each model, in the order in which they are stacked."""
        return list(product(self.task_names, self.learning_rates, self.seeds))

    @property
    def tokens(self) -> int:
        """Tokens that all models together are trained on, at most."""
        return self.members * self.steps * self.rows * self.longest

    @property
    def training(self) -> dict[str, Any]:
        """Options of `StackedTraining` besides learning rates and the schedule."""
        return {}

    def settings(self) -> dict[str, Any]:
        """What results depend on, besides the task, as JSON has it."""
        named = {name: value for name, value in asdict(self).items() if name not in ("name", "tasks")}
        return json.loads(json.dumps(named))

    @abstractmethod
    def batches(self, device: str, first: int = 0) -> Iterator[tuple[Tensor, ...]]:
        """What `StackedTraining.update` takes, from step `first` on."""

    @abstractmethod
    def evaluate(
        self, task: str, training: StackedTraining, of_task: dict[tuple[float, int], int]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Results of a task's models, given by learning rate and seed: a row with `best_rate`, and curves."""

    def validate(self, training: StackedTraining) -> tuple[str, bool]:
        """What is said of the models every `validate_every` steps, and whether they need no more training."""
        return "", False


class StoppedError(Exception):
    """A sweep was stopped before its last step, by a time limit or a signal. The next run of it continues."""


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

    def checkpoint(self, out: Path, sweep: BaseSweep) -> Path:
        """The file in the folder `out` that holds a sweep while it is unfinished."""
        return out / f"{self.experiment}_{sweep.name}.sweep"

    @classmethod
    def read(cls, folder: Path, experiment: str) -> SweepResults:
        """Those in the folder, none if there are no files."""
        found = cls(folder, experiment)
        # A line without `settings` in the table is the result of a grid.
        for path, lines, needed in ((found.table, found.rows, "settings"), (found.accuracies, found.curves, "run")):
            if path.is_file():
                for number, text in enumerate(path.read_text("utf-8").splitlines(), start=1):
                    try:
                        line = json.loads(text)
                        lines[line["run"]] = line
                        if needed not in line:
                            raise KeyError(needed)
                    except (ValueError, KeyError, TypeError) as error:
                        raise ValueError(f"{path}: line {number} is not the result of a sweep") from error
        return found

    def done(self, sweep: BaseSweep) -> bool:
        """Whether all tasks of a sweep have results.

        Raises:
            ValueError: there is a result of that name with other settings.
        """
        for task in sweep.task_names:
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

    def add(self, found: SweepResults) -> None:
        """Adds results and writes both files, with everything that other commands have written to them since."""
        with locked(self.table):
            self.refresh()
            self.rows |= found.rows
            self.curves |= found.curves
            self.write()

    def refresh(self) -> None:
        """Reads both files again: other commands may have written to them."""
        there = SweepResults.read(self.folder, self.experiment)
        self.rows, self.curves = there.rows, there.curves

    def write(self) -> list[Path]:
        """Writes both files, the table last: every run in it has its curves."""
        for path, lines in ((self.accuracies, self.curves), (self.table, self.rows)):
            text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines.values())
            write_atomically(path, text.encode())
        return [self.table, self.accuracies]


def run_name(task: str, sweep: BaseSweep) -> str:
    return f"{task}_{sweep.name}"


def run_sweep(
    sweep: BaseSweep,
    device: str,
    command: str,
    deadline: float | None = None,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    interruption: StopRequest | None = None,
) -> SweepResults:
    """Trains and evaluates all models of a sweep.

    Args:
        device: "cpu" or "cuda".
        command: what repeats it, for the record.
        deadline: of `time.monotonic`; None: none.
        checkpoint: file in which training is saved, every few minutes, when it stops and at its end, and from which it
            continues. It stays until the caller has written the results: until then it is all that is left of them if
            the process dies. None: there is none.
        say: prints a line of progress.
        interruption: whether a signal asks training to stop; None: none does.

    Returns:
        the rows and curves of its tasks, without a folder.

    Raises:
        StoppedError: the deadline or a signal came before the last step.
        ValueError: the checkpoint is damaged, or of another sweep, device or version.
    """
    config = GPTConfig(vocab_size=sweep.vocabulary, **sweep.model)
    models = {}
    for seed in sweep.seeds:
        torch.manual_seed(seed)
        models[seed] = GPT(config)
    stacked = stack([models[seed] for _, _, seed in sweep.places]).to(device)
    rates = torch.tensor([rate for _, rate, _ in sweep.places])
    # At least once before training may end early.
    every = max(1, min(sweep.steps // LOGGED, sweep.validate_every or sweep.steps))
    training = StackedTraining(stacked, rates, sweep.steps, warmup=sweep.warmup, log_every=every, **sweep.training)
    kept = None if checkpoint is None else _Checkpoint(checkpoint, sweep, device)
    trained = _train(sweep, training, device, deadline, kept, say, interruption)
    logged, losses = training.losses()
    facts = {
        "settings": sweep.settings(),
        "parameters": models[sweep.seeds[0]].count_parameters(),
        "steps": training.step,
        "train_seconds": round(trained, 1),
        "members": sweep.members,
        "environment": {**environment(device), "sympow": __version__},
        "command": command,
    }
    found = SweepResults(Path(), sweep.name)
    numbers = {place: number for number, place in enumerate(sweep.places)}
    for task in sweep.task_names:
        of_task = {place[1:]: number for place, number in numbers.items() if place[0] == task}
        row, curves = sweep.evaluate(task, training, of_task)
        name = run_name(task, sweep)
        found.rows[name] = {"run": name, "task": task, "sweep": sweep.name, **row, **facts}
        best = [losses[of_task[row["best_rate"], seed]].tolist() for seed in sweep.seeds]
        curves["loss"] = {"step": logged, "value": [[_loss(x) for x in values] for values in best]}
        found.curves[name] = {"run": name, **curves}
    return found


@dataclass(frozen=True)
class _Checkpoint:
    """The training of a sweep on disk.

    Attributes:
        path: the file.
        sweep, device: what it is of.
    """

    path: Path
    sweep: BaseSweep
    device: str

    @property
    def origin(self) -> str:
        """What must be the same for training to continue, random numbers included."""
        return json.dumps([__version__, torch.device(self.device).type, self.sweep.places, self.sweep.settings()])

    def write(self, training: StackedTraining, seconds: float, finished: bool = False) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {"origin": self.origin, "seconds": seconds, "finished": finished, "training": training.state_dict()}
        with replacing(self.path) as file:
            torch.save(state, file)

    def read(self, training: StackedTraining) -> tuple[float, bool]:
        """Continues training where the file left it; returns the seconds that it took, and whether it was finished."""
        try:
            saved = torch.load(self.path, map_location=self.device, weights_only=True)
        except (EOFError, RuntimeError, pickle.UnpicklingError) as error:
            raise ValueError(f"{self.path} is damaged: remove it to start {self.sweep.name} anew") from error
        if not isinstance(saved, dict) or saved.get("origin") != self.origin:
            raise ValueError(
                f"{self.path} is of another sweep, device or version, or has other settings: remove it to start "
                f"{self.sweep.name} anew"
            )
        training.load_state_dict(saved["training"])
        return saved["seconds"], saved["finished"]


def _train(
    sweep: BaseSweep,
    training: StackedTraining,
    device: str,
    deadline: float | None,
    checkpoint: _Checkpoint | None,
    say: Callable[[str], None],
    interruption: StopRequest | None,
) -> float:
    """Trains from the checkpoint, if there is one, to the last step; returns the seconds of all calls together."""
    before, finished = 0.0, False
    if checkpoint is not None and checkpoint.path.is_file():
        before, finished = checkpoint.read(training)
        say(f"{sweep.name}: continued at step {training.step:,} of {sweep.steps:,}")
    begin = told = saved = time.monotonic()
    for batch in () if finished else sweep.batches(device, training.step):
        now = time.monotonic()
        stopped = bool(interruption) or (deadline is not None and now >= deadline)
        if checkpoint is not None and (stopped or now - saved > SAVED_SECONDS):
            checkpoint.write(training, before + now - begin)
            saved = now
        if stopped:
            raise StoppedError(f"stopped at step {training.step:,} of {sweep.steps:,}")
        training.update(*batch)
        words, enough = "", False
        validated = sweep.validate_every and training.step % sweep.validate_every == 0
        if validated and training.step < sweep.steps:
            words, enough = sweep.validate(training)
        if enough or ((words or not sweep.validate_every) and now - told > TOLD_SECONDS):
            told = now
            say(f"{sweep.name}: step {training.step:,} of {sweep.steps:,}{words and ', '}{words}")
        if enough:
            break
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = before + time.monotonic() - begin
    if checkpoint is not None and not finished:
        # Evaluation may take long, too.
        checkpoint.write(training, seconds, finished=True)
    return seconds


def check_distinct(name: str, values: Sequence[Any]) -> None:
    """Raises for a field that is no tuple or list, is empty, or has a value twice, which would be stored once."""
    check_is_list(name, values)
    if not values:
        raise ValueError(f"{name} must not be empty")
    if any(value in values[:number] for number, value in enumerate(values)):
        raise ValueError(f"{name} must differ from each other, got {', '.join(map(str, values))}")


def rounded(number: float) -> float:
    """A result as it is stored."""
    return round(number, _DIGITS)


def _loss(number: float) -> float | None:
    """Rounded; None, which is null in JSON, for that of a model that diverged."""
    return rounded(number) if math.isfinite(number) else None


def with_changes(sweep: BaseSweep, changes: dict[str, Any]) -> BaseSweep:
    """A sweep with other numbers of steps, rows and so on: the settings of `--set`."""
    for name in changes:
        if name not in sweep.CHANGEABLE:
            raise ValueError(f"set takes {', '.join(sweep.CHANGEABLE)} for {type(sweep).__name__}; got {name!r}")
    return replace(sweep, **changes)
