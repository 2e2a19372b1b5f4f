"""Sweeps: small models of one shape on generated tasks, all tasks, learning rates and seeds trained as one."""

from __future__ import annotations

import json
import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from experiments.stacked import StackedTraining, stack
from experiments.store import StoredResult
from sympow import GPT, GPTConfig, __version__
from sympow.check.timing import environment
from sympow.errors import ArgumentError, UserError
from sympow.files import replacing
from sympow.train.signals import StopRequest, stop_on_signals

CHECKPOINT = "checkpoint.pt"
# First number of every seed after that of the run: rows of one kind are never those of another.
TRAINING, VALIDATION, EVALUATION = range(3)
# Losses over training.
LOGGED = 32
# Least seconds between two lines of progress, and between two checkpoints.
TOLD_SECONDS, SAVED_SECONDS = 15, 300


@dataclass(frozen=True)
class Sweep(ABC):
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

    # Steps between two validations by which training may end early; None: it does not.
    validate_every: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        for name in ("learning_rates", "seeds"):
            values = getattr(self, name)
            # A value that is there twice would be stored once.
            if not values or len(set(values)) < len(values):
                raise ArgumentError(name, f"must be values that differ, at least one; got {values}")

    @property
    @abstractmethod
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    @abstractmethod
    def task_names(self) -> tuple[str, ...]:
        """Tasks, each with models and results of its own."""

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

    def by_rate(self, numbers: Mapping[tuple[float, int], float]) -> list[list[float]]:
        """Numbers of a task's models, given by learning rate and seed, as a row has them: by rate, then seed."""
        return [[as_stored(numbers[rate, seed]) for seed in self.seeds] for rate in self.learning_rates]

    @property
    def training(self) -> dict[str, Any]:
        """Options of `StackedTraining` besides learning rates and the schedule."""
        return {}

    @property
    def places(self) -> list[tuple[str, float, int]]:
        """Task, learning rate and seed of each model, in the order in which they are stacked."""
        return list(product(self.task_names, self.learning_rates, self.seeds))

    @property
    def results(self) -> tuple[str, ...]:
        """Names of its results."""
        return tuple(f"{task}_{self.name}" for task in self.task_names)

    def settings(self) -> dict[str, Any]:
        """What results depend on, besides the task, as JSON has it."""
        named = {name: value for name, value in asdict(self).items() if name not in ("name", "tasks")}
        return json.loads(json.dumps(named))

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """The settings in which a result is not this sweep's, as text."""
        there = row["settings"]
        return [
            f"{name} {there.get(name)!r} and {value!r}"
            for name, value in self.settings().items()
            if there.get(name) != value
        ]

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """The sweep with other numbers of steps, rows and so on: the settings of `--set`."""
        for name, value in changes.items():
            now = getattr(self, name, None)
            if name == "name" or not isinstance(now, int | float | str):
                raise UserError(f"--set cannot change {name} of the sweep {self.name}")
            if type(value) is not type(now) and not (type(now) is float and type(value) is int):
                raise UserError(f"--set {name} must be of type {type(now).__name__}, got {value!r}")
        return replace(self, **changes)

    def folder(self, out: Path, experiment: str) -> Path:
        """Where it is saved while it is unfinished."""
        return out / f"{experiment}_{self.name}"

    def discard(self, folder: Path) -> None:
        """Removes what only a resumption needs."""
        shutil.rmtree(folder, ignore_errors=True)

    def train(self, folder: Path, device: str, command: str, say: Callable[[str], None]) -> list[StoredResult] | None:
        """Trains all models, or continues with those in the folder, and evaluates them.

        They are saved in the folder every few minutes, when a signal stops training, and at its end: until the caller
        has written the results, the folder has all that is left of them if the process dies.

        Returns:
            a result for each task; None: a signal has stopped the training.

        Raises:
            UserError: the folder has another sweep, or one of another device or version.
        """
        config = GPTConfig(vocab_size=self.vocabulary, **self.model)
        models = {}
        for seed in self.seeds:
            torch.manual_seed(seed)
            models[seed] = GPT(config)
        stacked = stack([models[seed] for _, _, seed in self.places]).to(device)
        rates = torch.tensor([rate for _, rate, _ in self.places])
        # At least once before training may end early.
        every = max(1, min(self.steps // LOGGED, self.validate_every or self.steps))
        training = StackedTraining(stacked, rates, self.steps, warmup=self.warmup, log_every=every, **self.training)
        with stop_on_signals() as stop:
            seconds = self._train(training, folder / CHECKPOINT, device, say, stop)
        if seconds is None:
            return None
        logged, losses = training.losses()
        facts = {
            "settings": self.settings(),
            "parameters": models[self.seeds[0]].count_parameters(),
            "steps": training.step,
            "train_seconds": round(seconds, 1),
            "members": len(self.places),
            "environment": {**environment(device), "sympow": __version__},
            "command": command,
        }
        numbers = {place: number for number, place in enumerate(self.places)}
        found = []
        for task, name in zip(self.task_names, self.results, strict=True):
            of_task = {place[1:]: number for place, number in numbers.items() if place[0] == task}
            row, curves = self.evaluate(task, training, of_task)
            best = [losses[of_task[row["best_rate"], seed]].tolist() for seed in self.seeds]
            # A model that diverged has a loss that is no number of JSON.
            values = [[as_stored(x) if math.isfinite(x) else None for x in of_seed] for of_seed in best]
            curves["loss"] = {"step": logged, "value": values}
            found.append(StoredResult({"run": name, "task": task, "sweep": self.name, **row, **facts}, curves))
        say(f"{self.name}: {len(self.places)} models in {seconds:.0f} s")
        return found

    def _train(
        self,
        training: StackedTraining,
        checkpoint: Path,
        device: str,
        say: Callable[[str], None],
        stop: StopRequest,
    ) -> float | None:
        """Trains to the last step; returns the seconds of all processes together. None: a signal stopped it."""
        # What must be the same for training to continue, random numbers included.
        origin = json.dumps([__version__, torch.device(device).type, self.places, self.settings()])
        before, finished = 0.0, False
        if checkpoint.is_file():
            saved = torch.load(checkpoint, map_location=device, weights_only=True)
            if saved["origin"] != origin:
                raise UserError(f"{checkpoint} is of another sweep, device or version: remove it to start anew")
            training.load_state_dict(saved["training"])
            before, finished = saved["seconds"], saved["finished"]
            say(f"{self.name}: continued at step {training.step:,} of {self.steps:,}")
        begin = told = last_saved = time.monotonic()

        def save(seconds: float, finished: bool = False) -> None:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            state = {"origin": origin, "seconds": seconds, "finished": finished, "training": training.state_dict()}
            with replacing(checkpoint) as file:
                torch.save(state, file)

        for batch in () if finished else self.batches(device, training.step):
            now = time.monotonic()
            if stop or now - last_saved > SAVED_SECONDS:
                save(before + now - begin)
                last_saved = now
            if stop:
                say(f"{self.name}: {stop.signal}: saved after step {training.step:,} of {self.steps:,}")
                return None
            training.update(*batch)
            words, enough = "", False
            if self.validate_every and training.step % self.validate_every == 0 and training.step < self.steps:
                words, enough = self.validate(training)
            if enough or ((words or not self.validate_every) and now - told > TOLD_SECONDS):
                told = now
                say(f"{self.name}: step {training.step:,} of {self.steps:,}{words and ', '}{words}")
            if enough:
                break
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = before + time.monotonic() - begin
        if not finished:
            # Evaluation may take long, too.
            save(seconds, finished=True)
        return seconds


def as_stored(number: float) -> float:
    """A result as it is stored."""
    return round(number, 4)
