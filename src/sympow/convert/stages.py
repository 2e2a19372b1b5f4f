"""The stages of a conversion in order, including those of the second student, which skips stage 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sympow.convert.config import ConvertConfig

Kind = Literal["match", "distill", "extend"]
TEACHER, START, WITHOUT_MATCH = "teacher", "start", "without-match"
# Folders of a conversion: of each stage, and of the evaluations.
STAGES, EVALUATIONS = "stages", "evaluations"
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
