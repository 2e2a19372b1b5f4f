"""The stages of a conversion: their order, also for the second student, which skips stage 1, and their training."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from sympow.convert.config import ConvertConfig
from sympow.convert.objectives import StageObjective
from sympow.data.dataset import TokenDataset
from sympow.data.loader import Loader
from sympow.train.config import OptimizerConfig, RunConfig
from sympow.train.loop import NonFiniteLossError, Surroundings, Training
from sympow.train.run_folder import CHECKPOINTS

Kind = Literal["match", "distill", "extend"]
TEACHER, START, WITHOUT_MATCH = "teacher", "start", "without-match"
# Folders of a conversion: of each stage, and of the evaluations.
STAGES, EVALUATIONS = "stages", "evaluations"
# Checkpoints of a stage.
KEEP = 2
# What a stage minimizes, for progress and reports.
LOSSES: dict[Kind, str] = {
    "match": "relative squared error of attention outputs",
    "distill": "KL divergence from the teacher (nats)",
    "extend": "loss (nats)",
}


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: name of its folder and of its evaluation.
        kind: what it minimizes.
        after: name of the stage whose student it continues to train; START: the teacher with attention replaced.
        context: tokens per sequence.
        before: tokens that the student was trained on before this stage.
        optimizer: AdamW and its schedule.
        run: batches and logging; its seed is that of the order of the data.
    """

    name: str
    kind: Kind
    after: str
    context: int
    before: int
    optimizer: OptimizerConfig
    run: RunConfig

    @property
    def seen(self) -> int:
        """Tokens that the student was trained on after this stage."""
        return self.before + self.run.steps * self.run.batch_tokens


def plan(config: ConvertConfig) -> list[Stage]:
    """All stages that have tokens: match, distill and extend, then distill and extend of the student without stage 1.

    The student without stage 1 is distilled for as many tokens as stages 1 and 2 have together.
    """
    recipe = config.recipe
    main = _branch(config, "", recipe.match_tokens, recipe.distill_tokens)
    if not recipe.without_match:
        return main
    both = max(stage.seen for stage in main if stage.kind != "extend")
    return main + _branch(config, f"-{WITHOUT_MATCH}", 0, both)


def _branch(config: ConvertConfig, ending: str, match_tokens: int, distill_tokens: int) -> list[Stage]:
    recipe, execution, context = config.recipe, config.execution, config.text.context
    asked: list[tuple[Kind, int, int, float]] = [
        ("match", match_tokens, context, recipe.match_rate),
        ("distill", distill_tokens, context, recipe.distill_rate),
        ("extend", recipe.extend_tokens, config.extended_context, recipe.extend_rate),
    ]
    stages: list[Stage] = []
    before, after = 0, START
    for number, (kind, tokens, length, rate) in enumerate(asked):
        if not tokens:
            continue
        run = RunConfig(
            steps=max(1, tokens // execution.batch_tokens),
            batch_tokens=execution.batch_tokens,
            micro_batch_tokens=execution.micro_batch_tokens,
            # Stages read the documents in different orders, so that none repeats the batches of another.
            seed=execution.seed * len(asked) + number,
            log_every=execution.log_every,
            save_every=execution.save_every,
            keep=KEEP,
            tensorboard=execution.tensorboard,
        )
        optimizer = OptimizerConfig(
            learning_rate=rate,
            beta2=recipe.beta2,
            weight_decay=recipe.weight_decay,
            clip_norm=recipe.clip_norm,
            warmup_steps=round(recipe.warmup * run.steps),
            schedule="cosine",
            final_rate=recipe.final_rate,
        )
        stages.append(Stage(kind + ending, kind, after, length, before, optimizer, run))
        before, after = stages[-1].seen, stages[-1].name
    return stages


def make_loader(stage: Stage, config: ConvertConfig, dataset: TokenDataset, *, pin_memory: bool = False) -> Loader:
    """The batches of a stage.

    Raises:
        ValueError: the dataset has too little text for one batch.
    """
    return Loader(
        dataset,
        stage.context,
        stage.run.batch_tokens // stage.context,
        short=config.text.short,
        seed=stage.run.seed,
        pin_memory=pin_memory,
    )


def train_stage(
    stage: Stage,
    config: ConvertConfig,
    objective: StageObjective,
    dataset: TokenDataset,
    folder: Path,
    around: Surroundings,
) -> bool:
    """Trains the objective's model; returns whether the stage is complete (not stopped).

    Args:
        stage: the stage.
        config: settings of the conversion.
        objective: the loss; parameters that it does not train are frozen.
        dataset: documents to train on.
        folder: for metrics and checkpoints.
        around: device, folder of the conversion, signals.
    """
    objective.model.requires_grad_(False)
    for parameter in objective.trained:
        parameter.requires_grad_(True)
    training = Training(
        objective,
        make_loader(stage, config, dataset, pin_memory=around.place.device.type == "cuda"),
        stage.optimizer,
        stage.run,
        folder,
        around,
        record={**asdict(config), "model": asdict(config.swap)},
        resume=(folder / CHECKPOINTS).is_dir(),
        # The student is saved instead.
        saves_last=False,
        stage=stage.name,
    )
    try:
        with training.opened():
            complete = training.run()
            if complete:
                training.prepare_to_save()
            return complete
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"{error}. Choose a smaller {stage.kind}_rate in another folder") from error
