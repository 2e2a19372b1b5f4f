"""A run of an experiment: a training config with a name, and what is measured when it is trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sympow.checks import check_at_least
from sympow.model.config import EXECUTION_OPTIONS
from sympow.train.config import TrainConfig

# How a run computes and keeps its books. What it learns does not depend on it, but for rounding.
BOOKKEEPING = frozenset(
    {
        "vocab_size",  # the data's, known when it is opened
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
        "tensorboard",
        "wandb",
    }
)


@dataclass(frozen=True)
class Evaluation:
    """What is measured of a trained model.

    Attributes:
        tokens: held-out tokens to read in stretches of the training context, about.
        length: tokens to read of held-out documents for the loss by context and position; 0: not measured.
        documents: how many of these.
        pairs: of the probe of associative recall; none: not probed.
        distances: of the probe of passkeys; none: not probed.
        final_part: the final training loss is the mean over the last steps, one in so many.
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
        # As JSON gives them back.
        for name in ("pairs", "distances"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True)
class Run:
    """One point of an experiment.

    Attributes:
        name: of its folder; the same run has the same name in every experiment.
        variant: one of VARIANTS.
        config: how it is trained.
        evaluation: what is measured then.
        changes: what is particular about it, beside variant, power, context and seed.
    """

    name: str
    variant: str
    config: TrainConfig
    evaluation: Evaluation
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Of its training."""
        return self.config.run.steps * self.config.run.batch_tokens

    @property
    def power(self) -> int | None:
        return None if self.config.model.mixer == "softmax" else self.config.model.power


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """Fields that make a run what it is, by name; no name occurs in two parts. Data may move: its last name counts."""
    parts = asdict(config).values()
    found = {name: value for part in parts for name, value in part.items() if name not in BOOKKEEPING}
    return {**found, "data": found["data"].rstrip("/").rpartition("/")[2]}


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """What two runs differ in, for people."""
    here, there = settings_of(one), settings_of(other)
    return [f"{name} {here[name]!r} and {there[name]!r}" for name in here if here[name] != there[name]]
