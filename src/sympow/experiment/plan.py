"""What is to be done, how long it may take, and how it goes into pieces of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sympow.experiment.runs import Run
from sympow.experiment.scales import Scale
from sympow.train.monitoring import training_flops


@dataclass(frozen=True)
class Piece:
    """Runs that fit into one stretch of time.

    Attributes:
        runs: in the order they start.
        seconds: until the last of them ends.
    """

    runs: list[Run]
    seconds: float


class Estimator:
    """How long runs take: as long as runs of their kind took, or what the scale's speed says.

    Several runs on one GPU share it, so that each takes as much longer; what they win is in the measured times.

    Args:
        scale: for its speed.
        jobs: runs at a time on one device.
        rows: results there are already.
    """

    def __init__(self, scale: Scale, jobs: int, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._scale, self._jobs = scale, jobs
        self._measured: dict[tuple[Any, ...], float] = {}
        for row in rows:
            self.learn(row)

    def learn(self, row: Mapping[str, Any]) -> None:
        """From a run that was trained in one go, as many at a time as here; the slowest of its kind counts."""
        if row.get("jobs") == self._jobs and row.get("sittings") == 1 and row.get("status") == "done":
            key = (row["power"], row["context"], row["tokens"], row["device"] == "cpu")
            self._measured[key] = max(self._measured.get(key, 0.0), row["total_seconds"])

    def seconds(self, run: Run, on_cpu: bool = False) -> float:
        """From start to result."""
        known = self._measured.get((run.power, run.config.data.context, run.tokens, on_cpu))
        return known if known is not None else self._scale.startup_seconds + self._jobs * self._busy_seconds(run)

    def _busy_seconds(self, run: Run) -> float:
        model, evaluation = run.config.model, run.evaluation
        operations = run.tokens * training_flops(model, run.config.data.context)
        # A forward pass is a third of a step.
        operations += evaluation.tokens * training_flops(model, run.config.data.context) / 3
        if evaluation.length:
            read = evaluation.length * evaluation.documents
            operations += read * training_flops(model, evaluation.length) / 3
        return operations / self._scale.operations_per_second


def pack(runs: Sequence[Run], seconds: Mapping[str, float], jobs: int, limit: float | None) -> list[Piece]:
    """Runs in pieces of at most `limit` seconds, `jobs` at a time, in order as far as they fit.

    A run that takes longer than the limit has a piece to itself: it will be stopped and go on in the next.

    Args:
        seconds: estimates, by run.
        limit: None: all in one piece.
    """
    pieces = []
    waiting = list(runs)
    while waiting:
        free = [0.0] * jobs
        taken: list[Run] = []
        left = []
        for run in waiting:
            slot = min(range(jobs), key=free.__getitem__)
            if limit is not None and free[slot] + seconds[run.name] > limit and (taken or seconds[run.name] <= limit):
                left.append(run)
                continue
            free[slot] += seconds[run.name]
            taken.append(run)
        pieces.append(Piece(taken, max(free)))
        waiting = left
    return pieces
