"""Experiments as grids of training runs: a run, the three scales that runs start from, and the search for experiments.

An experiment is a function of one argument `scale`, in a folder of Python files, that returns the runs of a grid. It is
called again whenever a run has finished. So a grid can grow: runs can depend on the results of others, such as the best
of several learning rates (`Scale.best`).
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from sympow.checks import check_at_least, check_choice, check_is_list
from sympow.experiments.sweep import BaseSweep
from sympow.model.config import EXECUTION_OPTIONS, VARIANTS, GPTConfig
from sympow.train.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig, paper

FOLDER = Path("experiments")
# The learning rate of scale `small`, chosen once on the softmax baseline: `sympow experiment learning_rate`.
SMALL_LEARNING_RATE = 2e-3
# Settings of execution and logging. What a run learns does not depend on them, except through rounding.
BOOKKEEPING = frozenset(
    {
        "vocab_size",  # set from the data when it is opened
        *EXECUTION_OPTIONS,
        "micro_batch_tokens",
        "compile",
        "recompute",
        "loss_tokens",
        "parallel",
        "context_parallel",
        "log_every",
        "evaluate_every",
        "evaluate_tokens",
        "save",
        "save_every",
        "keep",
        "hang_after",
        "tensorboard",
        "wandb",
    }
)


@dataclass(frozen=True)
class Evaluation:
    """How a trained model is evaluated.

    Attributes:
        tokens: approximate number of held-out tokens for the loss at the training context.
        length: tokens of each held-out document for the loss by context and position; 0 skips this measurement.
        documents: number of these documents.
        pairs: numbers of pairs for the associative recall probe; empty skips the probe.
        distances: distances for the passkey probe; empty skips the probe.
        final_part: the final training loss is the mean over the last `steps // final_part` steps.
    """

    tokens: int = 65_536
    length: int = 0
    documents: int = 16
    pairs: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()
    final_part: int = 10

    def __post_init__(self) -> None:
        for name in ("tokens", "documents", "final_part"):
            check_at_least(name, getattr(self, name), 1)
        check_at_least("length", self.length, 0)
        # JSON returns lists.
        for name in ("pairs", "distances"):
            check_is_list(name, getattr(self, name))
            object.__setattr__(self, name, tuple(getattr(self, name)))
            for number in getattr(self, name):
                check_at_least(name, number, 1)


@dataclass(frozen=True)
class Run:
    """One point of a grid.

    Attributes:
        name: also the name of its folder; the same run has the same name in every experiment.
        variant: one of VARIANTS.
        config: the training config.
        evaluation: how the trained model is evaluated.
        changes: settings that differ from the scale's, besides variant, power, context and seed.
    """

    name: str
    variant: str
    config: TrainConfig
    evaluation: Evaluation
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that it is trained on."""
        return self.config.run.steps * self.config.run.batch_tokens

    @property
    def power(self) -> int | None:
        return None if self.config.model.mixer == "softmax" else self.config.model.power


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """The settings that a run's result depends on, by name.

    No name occurs in two sections of a config. Of the data only the last component of the path counts, since data may
    be moved.
    """
    found = {name: value for name, value in config.settings().items() if name not in BOOKKEEPING}
    return {**found, "data": found["data"].rstrip("/").rpartition("/")[2]}


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """The settings in which two runs differ, as text."""
    here, there = settings_of(one), settings_of(other)
    return [f"{name} {here[name]!r} and {there[name]!r}" for name in here if here[name] != there[name]]


def heldout_loss(row: Mapping[str, Any]) -> float:
    """The held-out loss of a finished run by its row; infinite if it diverged."""
    return float(row["heldout_loss"]) if row["status"] == "done" else math.inf


@dataclass(frozen=True)
class Scale:
    """What all runs of a scale have in common.

    Attributes:
        name: cpu, small or paper.
        base: the config that runs start from.
        contexts: training contexts by power, in ascending order.
        beyond: training context by power for the evaluation beyond it (Fig. 2).
        ablation: training context of the grids that have only one.
        seeds: seeds of points whose differences are small; other points have the first seed only.
        evaluation: how every run is evaluated.
        operations_per_second: floating-point operations per second that a run achieves; for time estimates only.
        startup_seconds: time until the first step of a run; for time estimates only.
        fresh_seeds: seeds on which nothing is chosen, for the comparison of what was chosen on the others.
        processes: processes of a run, one per GPU.
        keep_checkpoints: whether finished runs keep their checkpoints; their exported models are always kept.
        finished: rows of finished runs by their names, for experiments whose runs depend on them.
    """

    name: str
    base: TrainConfig
    contexts: dict[int, tuple[int, ...]]
    beyond: dict[int, int]
    ablation: int
    seeds: tuple[int, ...]
    evaluation: Evaluation
    operations_per_second: float
    startup_seconds: float
    fresh_seeds: tuple[int, ...] = ()
    processes: int = 1
    keep_checkpoints: bool = False
    finished: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens that a run is trained on, unless it changes them."""
        return self.base.run.steps * self.base.run.batch_tokens

    def changed(self, **changes: Any) -> Scale:
        """The scale with another base: fields of a TrainConfig, named without their section."""
        return replace(self, base=self.base.changed(**changes))

    def best(self, runs: Sequence[Run]) -> Run | None:
        """The run with the lowest held-out loss; None: some have not finished."""
        if any(run.name not in self.finished for run in runs):
            return None
        return min(runs, key=lambda run: heldout_loss(self.finished[run.name]))

    def run(
        self,
        variant: str,
        *,
        context: int,
        power: int = 2,
        seed: int = 0,
        evaluation: Evaluation | None = None,
        title: str = "",
        **changes: Any,
    ) -> Run:
        """One run at this scale.

        Args:
            variant: one of VARIANTS.
            context: training context.
            power: p; softmax has none.
            seed: seed of the parameters and of the order of the data.
            evaluation: replaces the scale's.
            title: names the changes in the run's name; by default they are listed there.
            changes: any fields of a TrainConfig, and `tokens` in place of steps: as many whole batches as they hold.
        """
        check_choice("variant", variant, VARIANTS)
        if "tokens" in changes and "steps" in changes:
            raise ValueError(
                f"tokens and steps exclude each other, got tokens={changes['tokens']} and steps={changes['steps']}"
            )
        fields = {**VARIANTS[variant], "context": context, "seed": seed}
        if variant != "softmax":
            fields["power"] = power
        others = {name: value for name, value in changes.items() if name != "tokens"}
        if "tokens" in changes:
            batch = changes.get("batch_tokens", self.base.run.batch_tokens)
            check_at_least("batch_tokens", batch, 1)
            check_at_least("tokens", changes["tokens"], batch)
            others["steps"] = changes["tokens"] // batch
        config = self.base.changed(**{**fields, **others})
        words = [variant, *([] if variant == "softmax" else [f"p{power}"]), f"c{context}"]
        words += [title] if title else [f"{key}-{_shown(value)}" for key, value in changes.items()]
        name = "_".join([*words, f"s{seed}"])
        return Run(_folder_name(name), variant, config, evaluation or self.evaluation, changes)


def cpu() -> Scale:
    """Minutes on two cores, on the standard library's source: a test that everything works, not a measurement."""
    return Scale(
        name="cpu",
        base=TrainConfig(
            model=GPTConfig(vocab_size=257, layers=2, width=64, heads=4, max_document=4_096),
            data=DataConfig(data="stdlib", context=64),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
            run=RunConfig(
                steps=64,
                batch_tokens=2_048,
                micro_batch_tokens=2_048,
                log_every=8,
                evaluate_every=0,
                save_every=32,
                tensorboard=False,
            ),
        ),
        contexts={2: (64, 256), 4: (64, 256)},
        beyond={2: 256, 4: 256},
        ablation=256,
        seeds=(0,),
        fresh_seeds=(1,),
        evaluation=Evaluation(tokens=8_192, length=1_024, documents=4, pairs=(4, 16), distances=(64, 512)),
        operations_per_second=1e10,
        startup_seconds=10,
    )


def small() -> Scale:
    """A model of 12 million parameters on prepared books, 17 million tokens a run: Figs. 1 and 2 on one H200."""
    return Scale(
        name="small",
        base=TrainConfig(
            model=GPTConfig(vocab_size=4_096, layers=6, width=384, heads=6),
            data=DataConfig(data="build/data/books", context=1_024),
            optimizer=OptimizerConfig(learning_rate=SMALL_LEARNING_RATE, warmup_steps=50),
            run=RunConfig(
                steps=512,
                batch_tokens=32_768,
                micro_batch_tokens=32_768,
                precision="bf16",
                compile=True,
                loss_tokens=32_768,
                log_every=32,
                evaluate_every=0,
                save_every=0,
                tensorboard=False,
            ),
        ),
        contexts={2: (256, 1_024, 4_096, 8_192), 4: (1_024, 4_096, 16_384)},
        beyond={2: 4_096, 4: 16_384},
        ablation=4_096,
        seeds=(0, 1, 2),
        fresh_seeds=(3, 4, 5, 6, 7),
        # No probes: models of this size that are trained on books answer none of them. `recall` trains models that do.
        evaluation=Evaluation(tokens=2**20, length=65_536, documents=18, pairs=(), distances=()),
        operations_per_second=1.5e14,
        startup_seconds=30,
    )


def full() -> Scale:
    """The paper's own setting (§4): 124 million parameters, LongCrawl64, 524,288 tokens a batch, eight GPUs a run."""
    return Scale(
        name="paper",
        base=paper().changed(evaluate_every=1_000, evaluate_tokens=2**20, log_every=100),
        contexts={2: (256, 1_024, 4_096, 8_192), 4: (1_024, 4_096, 16_384, 65_536)},
        beyond={4: 16_384},
        ablation=4_096,
        seeds=(0,),
        fresh_seeds=(1, 2),
        evaluation=Evaluation(
            tokens=2**23, length=65_536, documents=128, pairs=(4, 16, 64), distances=(256, 1_024, 4_096, 16_384)
        ),
        operations_per_second=8 * 3e14,
        startup_seconds=120,
        processes=8,
        keep_checkpoints=True,
    )


SCALES: dict[str, Callable[[], Scale]] = {"cpu": cpu, "small": small, "paper": full}
Experiment = Callable[[Scale], list[Run]]


def find_experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """Experiments that are grids of runs by name, in alphabetical order: functions of one argument `scale`.

    Args:
        folder: a folder of Python files; by default `experiments` in the working directory, or that of the checkout
            from which sympow is imported.
    """
    found = _find_functions(folder, "scale")
    if not found and not find_sweeps(folder):
        raise ValueError(
            f"{folder or _default_folder()} has no experiment: a function with the one argument scale or size, "
            "in a Python file"
        )
    return found


def find_sweeps(folder: Path | None = None) -> dict[str, Callable[[str], list[BaseSweep]]]:
    """Experiments that are sweeps, likewise: functions of one argument `size`, the name of a scale."""
    return _find_functions(folder, "size")


def _find_functions(folder: Path | None, argument: str) -> dict[str, Callable[[Any], Any]]:
    if folder is None:
        folder = _default_folder()
    elif not folder.is_dir():
        raise ValueError(f"folder must have Python files with experiments, and {folder} is not a folder")
    found: dict[str, Callable[[Any], Any]] = {}
    names = set()
    for path in sorted(folder.glob("*.py")):
        module = _load(path)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != module.__name__ or name.startswith("_"):
                continue
            parameters = list(inspect.signature(function).parameters)
            if parameters not in (["scale"], ["size"]):
                continue
            # A grid and sweeps of one name would have their results in one file.
            if name in names:
                raise ValueError(f"experiment {name!r} is defined twice in {folder}, the second time in {path.name}")
            names.add(name)
            if parameters == [argument]:
                found[name] = function
    return dict(sorted(found.items()))


def runs_of(experiment: Experiment, scale: Scale) -> list[Run]:
    """The runs of an experiment, each once.

    Raises:
        ValueError: there are none, or two of one name differ in what their results depend on.
    """
    runs: dict[str, Run] = {}
    for run in experiment(scale):
        first = runs.setdefault(run.name, run)
        different = differences(first.config, run.config)
        if first.evaluation != run.evaluation:
            different.append(f"{first.evaluation} and {run.evaluation}")
        if different:
            raise ValueError(
                f"{experiment.__name__} has two runs of the name {run.name}: {'; '.join(different)}. "
                "Give them different titles"
            )
    if not runs:
        raise ValueError(f"{experiment.__name__} has no runs at scale {scale.name!r}")
    return list(runs.values())


def sweeps_of(experiment: Callable[[str], list[BaseSweep]], size: str) -> list[BaseSweep]:
    """The sweeps of an experiment at a scale of this name.

    Raises:
        ValueError: there are none, or two have one name.
    """
    sweeps = experiment(size)
    if not sweeps:
        raise ValueError(f"{experiment.__name__} has no sweeps at scale {size!r}")
    names = [sweep.name for sweep in sweeps]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{experiment.__name__} has two sweeps of the name {twice[0]}. Give them different names")
    return sweeps


def describe(experiment: Callable[..., Any]) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(experiment) or "").partition("\n")[0]


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _folder_name(name: str) -> str:
    return "".join(char if char.isalnum() or char in "-_.+" else "-" for char in name)


def _default_folder() -> Path:
    beside_the_source = Path(__file__).parents[3] / FOLDER
    for folder in (FOLDER, beside_the_source):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"there is no folder {FOLDER}/ here. The paper's experiments are files of sympow's repository, not of the "
        "installed package: clone it and run this command in it, or name a folder of your own with --folder"
    )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"sympow_experiments.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look up their own module in sys.modules.
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
