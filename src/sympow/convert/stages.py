"""The stages of a conversion, in order, with those of the second conversion that leaves out stage 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sympow.convert.config import ConvertConfig

Kind = Literal["match", "distill", "extend"]
TEACHER, START, WITHOUT_MATCH = "teacher", "start", "without-match"
# What a stage minimizes, for progress and reports.
LOSSES: dict[Kind, str] = {
    "match": "share of attention outputs not reproduced",
    "distill": "KL divergence from the teacher (nats)",
    "extend": "loss (nats)",
}


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        name: of its files.
        kind: what it minimizes.
        after: name of the stage whose student it continues with; START: the teacher with attention replaced.
        tokens: to train on.
        context: tokens of a sequence.
        rate: peak learning rate.
        seed: of the order of the data.
        before: tokens that the stages before it see.
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
        """As many batches as fit into the tokens, at least one."""
        return max(1, self.tokens // batch_tokens)

    def seen(self, batch_tokens: int) -> int:
        """Tokens of its batches, which may be fewer than asked for."""
        return self.steps(batch_tokens) * batch_tokens


def plan(config: ConvertConfig) -> list[Stage]:
    """All stages: match, distill, extend as far as they have tokens, and then those without stage 1.

    Without it, stage 2 has the steps of both.
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
