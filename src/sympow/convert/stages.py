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
        tokens: tokens to train on.
        context: tokens per sequence.
        rate: peak learning rate.
        seed: seed of the order of the data.
        before: tokens that the student was trained on before this stage.
    """

    name: str
    kind: Kind
    after: str
    tokens: int
    context: int
    rate: float
    seed: int
    before: int

    def steps(self, batch_tokens: int) -> int:
        """The number of whole batches in `tokens`, at least 1."""
        return max(1, self.tokens // batch_tokens)

    def seen(self, batch_tokens: int) -> int:
        """Tokens in these batches; they differ from `tokens` by rounding to whole batches."""
        return self.steps(batch_tokens) * batch_tokens


def plan(config: ConvertConfig) -> list[Stage]:
    """All stages that have tokens: match, distill and extend, then distill and extend of the student without stage 1.

    The student without stage 1 is distilled for as many tokens as stages 1 and 2 have together.
    """
    recipe, batch_tokens = config.recipe, config.execution.batch_tokens
    main = _branch(config, "", recipe.match_tokens, recipe.distill_tokens)
    if not recipe.without_match:
        return main
    both = sum(stage.seen(batch_tokens) for stage in main if stage.kind in ("match", "distill"))
    return main + _branch(config, f"-{WITHOUT_MATCH}", 0, both)


def _branch(config: ConvertConfig, ending: str, match_tokens: int, distill_tokens: int) -> list[Stage]:
    recipe, context = config.recipe, config.text.context
    asked: list[tuple[Kind, int, int, float]] = [
        ("match", match_tokens, context, recipe.match_rate),
        ("distill", distill_tokens, context, recipe.distill_rate),
        ("extend", recipe.extend_tokens, config.extended_context, recipe.extend_rate),
    ]
    stages: list[Stage] = []
    before, after = 0, START
    for number, (kind, tokens, length, rate) in enumerate(asked):
        if tokens:
            # Stages read the documents in different orders, so that none repeats the batches of another.
            seed = config.execution.seed * len(asked) + number
            stages.append(Stage(kind + ending, kind, after, tokens, length, rate, seed, before))
            before, after = before + stages[-1].seen(config.execution.batch_tokens), stages[-1].name
    return stages


def make_loader(stage: Stage, config: ConvertConfig, dataset: TokenDataset, *, pin_memory: bool = False) -> Loader:
    """The batches of a stage.

    Raises:
        ValueError: the dataset has too little text for one batch.
    """
    return Loader(
        dataset,
        stage.context,
        config.execution.batch_tokens // stage.context,
        short=config.text.short,
        seed=stage.seed,
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
    recipe, execution = config.recipe, config.execution
    steps = stage.steps(execution.batch_tokens)
    optimizer = OptimizerConfig(
        learning_rate=stage.rate,
        beta2=recipe.beta2,
        weight_decay=recipe.weight_decay,
        clip_norm=recipe.clip_norm,
        warmup_steps=round(recipe.warmup * steps),
        schedule="cosine",
        final_rate=recipe.final_rate,
    )
    run = RunConfig(
        steps=steps,
        batch_tokens=execution.batch_tokens,
        micro_batch_tokens=execution.micro_batch_tokens,
        log_every=execution.log_every,
        save_every=execution.save_every,
        keep=KEEP,
        tensorboard=execution.tensorboard,
    )
    objective.model.requires_grad_(False)
    for parameter in objective.trained:
        parameter.requires_grad_(True)
    training = Training(
        objective,
        make_loader(stage, config, dataset, pin_memory=around.place.device.type == "cuda"),
        optimizer,
        run,
        folder,
        around,
        record={**asdict(config), "model": asdict(config.swap)},
        resume=(folder / CHECKPOINTS).is_dir(),
        # The student is saved instead.
        saves_last=False,
        stage=stage.name,
    )
    try:
        with training:
            complete = training.run()
            if complete:
                training.prepare_to_save()
            return complete
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"{error}. Choose a smaller {stage.kind}_rate in another folder") from error
