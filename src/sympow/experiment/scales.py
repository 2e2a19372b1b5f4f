"""How large experiments are: the same grids for a CPU in minutes, for one GPU in an hour, and as in the paper."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from sympow.checks import check_choice
from sympow.experiment.runs import Evaluation, Run
from sympow.model.config import VARIANTS, GPTConfig
from sympow.train.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig, paper

# The learning rate of scale `small`, chosen once on the softmax baseline: `sympow experiment learning_rate`.
SMALL_LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Scale:
    """What all runs of a scale have in common.

    Attributes:
        name: cpu, small or paper.
        base: what runs start from.
        contexts: of training, by power, in ascending order.
        beyond: training context by power for evaluation beyond it (Fig. 2).
        ablation: training context of the grids that have only one.
        seeds: of points whose differences are small; others have the first.
        evaluation: of every run.
        operations_per_second: that a run gets out of the machine, for estimates only.
        startup_seconds: until a run makes its first step, for estimates only.
        processes: of a run, one per GPU.
        keep_checkpoints: of runs that have finished; their models stay in any case.
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
    processes: int = 1
    keep_checkpoints: bool = False

    @property
    def tokens(self) -> int:
        """Of every run that does not say otherwise."""
        return self.base.run.steps * self.base.run.batch_tokens

    def changed(self, **changes: Any) -> Scale:
        """With another base: fields of a TrainConfig, named without their part."""
        return replace(self, base=self.base.changed(**changes))

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
        """One run.

        Args:
            variant: one of VARIANTS.
            context: of training.
            power: p; softmax has none.
            seed: of parameters and of the order of the data.
            evaluation: instead of the scale's.
            title: what to call the changes in the run's name; by default by what they are.
            changes: any fields of a TrainConfig, and `tokens` in place of steps.
        """
        check_choice("variant", variant, VARIANTS)
        fields = {**VARIANTS[variant], "context": context, "seed": seed}
        if variant != "softmax":
            fields["power"] = power
        steps = {"steps": changes["tokens"] // self.base.run.batch_tokens} if "tokens" in changes else {}
        others = {name: value for name, value in changes.items() if name != "tokens"}
        config = self.base.changed(**{**fields, **others, **steps})
        parts = [variant, *([] if variant == "softmax" else [f"p{power}"]), f"c{context}"]
        parts += [title] if title else [f"{key}-{_shown(value)}" for key, value in changes.items()]
        name = "_".join([*parts, f"s{seed}"])
        return Run(_fit_for_a_folder(name), variant, config, evaluation or self.evaluation, changes)


def cpu() -> Scale:
    """Minutes on two cores, on the standard library's source: shows that everything works, and little else."""
    return Scale(
        name="cpu",
        base=TrainConfig(
            model=GPTConfig(vocab_size=257, layers=2, width=64, heads=4, max_document=4_096),
            data=DataConfig(data="stdlib", context=64),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
            run=RunConfig(
                steps=64, batch_tokens=2_048, micro_batch_tokens=2_048, log_every=8, save_every=32, tensorboard=False
            ),
        ),
        contexts={2: (64, 256), 4: (64, 256)},
        beyond={2: 256, 4: 256},
        ablation=256,
        seeds=(0,),
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
                save_every=0,
                tensorboard=False,
            ),
        ),
        contexts={2: (256, 1_024, 4_096, 8_192), 4: (1_024, 4_096, 16_384)},
        beyond={2: 4_096, 4: 16_384},
        ablation=4_096,
        seeds=(0, 1, 2),
        # No probes: models of this size that read books answer none of them. `recall` trains models that do.
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
        evaluation=Evaluation(
            tokens=2**23, length=65_536, documents=128, pairs=(4, 16, 64), distances=(256, 1_024, 4_096, 16_384)
        ),
        operations_per_second=8 * 3e14,
        startup_seconds=120,
        processes=8,
        keep_checkpoints=True,
    )


SCALES: dict[str, Callable[[], Scale]] = {"cpu": cpu, "small": small, "paper": full}


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _fit_for_a_folder(name: str) -> str:
    return "".join(sign if sign.isalnum() or sign in "-_.+" else "-" for sign in name)
