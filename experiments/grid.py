"""The three scales of experiments, and the runs of a grid that start from them.

An experiment that is a grid is a function of a `Scale` that returns runs. It is called again whenever a run has
finished. So a grid can grow: runs can depend on the results of others, such as the best of several learning rates
(`Scale.best`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from experiments.text_run import EvaluationPlan, PlannedRun, heldout_loss
from sympow import GPTConfig
from sympow.errors import UserError
from sympow.model.config import VARIANTS
from sympow.train import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from sympow.train.config import paper

# The learning rate of scale `small`, chosen once on the softmax baseline: `python -m experiments learning_rate`.
SMALL_LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Scale:
    """What all runs of a scale have in common.

    Attributes:
        name: cpu, small or paper.
        start: the config that runs start from, before `changes`.
        contexts: training contexts by power, in ascending order.
        beyond: training context by power for the evaluation beyond it (Fig. 2).
        ablation: training context of the grids that have only one.
        seeds: seeds of points whose differences are small; other points have the first seed only.
        evaluation: how every run is evaluated.
        fresh_seeds: seeds on which nothing is chosen, for the comparison of what was chosen on the others.
        processes: processes of a run, one per GPU.
        keep_checkpoints: whether finished runs keep their checkpoints; their exported models are always kept.
        changes: settings of all runs or sweeps that `--set` changes.
        finished: rows of finished runs by their names, for experiments whose runs depend on them.
    """

    name: str
    start: TrainConfig
    contexts: dict[int, tuple[int, ...]]
    beyond: dict[int, int]
    ablation: int
    seeds: tuple[int, ...]
    evaluation: EvaluationPlan
    fresh_seeds: tuple[int, ...] = ()
    processes: int = 1
    keep_checkpoints: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    finished: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def base(self) -> TrainConfig:
        """The config that runs start from."""
        return self.start.changed(**self.changes)

    @property
    def tokens(self) -> int:
        """Tokens that a run is trained on, unless it changes them."""
        return self.base.run.steps * self.base.run.batch_tokens

    def best(self, runs: Sequence[PlannedRun]) -> PlannedRun | None:
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
        evaluation: EvaluationPlan | None = None,
        title: str = "",
        **changes: Any,
    ) -> PlannedRun:
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
        base = self.base
        fields = {**VARIANTS[variant], "context": context, "seed": seed}
        if variant != "softmax":
            fields["power"] = power
        fields |= {name: value for name, value in changes.items() if name != "tokens"}
        if "tokens" in changes:
            fields["steps"] = changes["tokens"] // changes.get("batch_tokens", base.run.batch_tokens)
        words = [variant, *([] if variant == "softmax" else [f"p{power}"]), f"c{context}"]
        words += [title] if title else [f"{key}-{_shown(value)}" for key, value in changes.items()]
        name = "".join(c if c.isalnum() or c in "-_.+" else "-" for c in "_".join([*words, f"s{seed}"]))
        if own := [key for key, value in self.changes.items() if fields.get(key, value) != value]:
            raise UserError(f"--set cannot change {', '.join(own)}: the experiment chooses it for {name}")
        return PlannedRun(
            name,
            variant,
            base.changed(**fields),
            evaluation or self.evaluation,
            changes,
            self.keep_checkpoints,
        )


def cpu() -> Scale:
    """Minutes on two cores, on the standard library's source: a test that everything works, not a measurement."""
    return Scale(
        name="cpu",
        start=TrainConfig(
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
        evaluation=EvaluationPlan(tokens=8_192, length=1_024, documents=4, pairs=(4, 16), distances=(64, 512)),
    )


def small() -> Scale:
    """A model of 12 million parameters on prepared books, 17 million tokens a run: Figs. 1 and 2 on one H200."""
    return Scale(
        name="small",
        start=TrainConfig(
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
        evaluation=EvaluationPlan(tokens=2**20, length=65_536, documents=18, pairs=(), distances=()),
    )


def full() -> Scale:
    """The paper's own setting (§4): 124 million parameters, LongCrawl64, 524,288 tokens a batch, eight GPUs a run."""
    return Scale(
        name="paper",
        start=paper().changed(evaluate_every=1_000, evaluate_tokens=2**20, log_every=100),
        contexts={2: (256, 1_024, 4_096, 8_192), 4: (1_024, 4_096, 16_384, 65_536)},
        beyond={4: 16_384},
        ablation=4_096,
        seeds=(0,),
        fresh_seeds=(1, 2),
        evaluation=EvaluationPlan(
            tokens=2**23, length=65_536, documents=128, pairs=(4, 16, 64), distances=(256, 1_024, 4_096, 16_384)
        ),
        processes=8,
        keep_checkpoints=True,
    )


def read_setting(text: str) -> tuple[str, Any]:
    """The name and the value of NAME=VALUE on the command line; a value that is no JSON is a string."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    try:
        return name.replace("-", "_"), json.loads(value)
    except json.JSONDecodeError:
        return name.replace("-", "_"), value


SCALES: dict[str, Callable[[], Scale]] = {"cpu": cpu, "small": small, "paper": full}


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
