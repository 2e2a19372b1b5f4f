"""The format of `evaluation.json`: what is measured of a model, how the file is written, read and matched with runs.

    {"command": …, "data": …, "device": …, "dtype": …, "environment": {…},
     "models": {NAME: {"documents": 16, "trained_at": 1024, "unit": "token",
                       "by_context": {CONTEXT: LOSS}, "by_position": {POSITION: LOSS},
                       "recall": [{…}], "passkey": [{…}], "mean": [LOSS, …], "error": [LOSS, …]}}}

Losses are in nats. `mean` and `error` have an entry for each position; they may be left out. A number that is NaN, such
as the control of a single passkey or a loss of a model that diverged, is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from sympow.errors import UserError
from sympow.evaluate.held_out_loss import PositionLosses
from sympow.evaluate.probes import PasskeyPoint, RecallPoint
from sympow.files import write_atomically
from sympow.parsing import read_json

FILE = "evaluation.json"
# Ranges of positions in an octave, over which losses are averaged.
RANGES_PER_OCTAVE = 4
FIRST_RANGE = 8


@dataclass(frozen=True)
class ModelEvaluation:
    """The evaluation of one model, as measured.

    Attributes:
        losses: loss by position.
        trained_at: context of the training; None if the model's folder does not say it.
        recall, passkey: results of the probes that were run.
        unit: what a token is called, "token" or "byte".
    """

    losses: PositionLosses
    trained_at: int | None = None
    recall: list[RecallPoint] = field(default_factory=list)
    passkey: list[PasskeyPoint] = field(default_factory=list)
    unit: str = "token"

    def as_json(self, *, positions: bool) -> dict[str, Any]:
        """The model's entry in the file, with or without the loss at every position."""
        mean = self.losses.mean.tolist()
        content: dict[str, Any] = {
            "documents": self.losses.documents,
            "trained_at": self.trained_at,
            "unit": self.unit,
            "by_context": rounded(self.losses.by_context(contexts_up_to(len(mean), 2))),
            "by_position": rounded({round(at, 1): x for at, x in zip(*averages_over_ranges(mean), strict=True)}),
            "recall": [rounded(asdict(point)) for point in self.recall],
            "passkey": [rounded(asdict(point)) for point in self.passkey],
        }
        if positions:
            content["mean"] = [_rounded(x) for x in mean]
            content["error"] = [_rounded(x) for x in self.losses.error.tolist()]
        return content


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one model, as read from a file.

    Attributes:
        documents: number of documents.
        by_context: average loss over the first tokens, by their number (paper Fig. 2).
        by_position: average loss over ranges of positions, by the ranges' centres; empty if the file has none.
        recall: associative recall, an entry for every number of pairs and range of distances.
        passkey: passkey retrieval, an entry for every distance.
    """

    documents: int
    by_context: dict[int, float]
    by_position: dict[float, float]
    recall: list[dict[str, Any]]
    passkey: list[dict[str, Any]]

    @property
    def length(self) -> int:
        return max(self.by_context)

    @classmethod
    def of_file(cls, content: Mapping[str, Any]) -> Evaluation:
        """From a model's entry in the file. With the loss at every position, its averages are computed again."""
        if mean := [_number(x) for x in content.get("mean") or []]:
            sums = list(accumulate(mean))
            by_context = {context: sums[context - 1] / context for context in contexts_up_to(len(mean), 2)}
            by_position = dict(zip(*averages_over_ranges(mean), strict=True))
        else:
            by_context = {int(context): _number(loss) for context, loss in (content.get("by_context") or {}).items()}
            by_position = {float(place): _number(loss) for place, loss in (content.get("by_position") or {}).items()}
        if not by_context:
            raise UserError("it has neither 'by_context' nor 'mean'")
        return cls(
            int(content.get("documents") or 0),
            dict(sorted(by_context.items())),
            dict(sorted(by_position.items())),
            [dict(point) for point in content.get("recall") or []],
            [dict(point) for point in content.get("passkey") or []],
        )


def write_evaluations(path: Path, models: Mapping[str, ModelEvaluation], facts: Mapping[str, Any]) -> None:
    """Writes the file.

    Args:
        path: the file; its folder is made.
        models: evaluations by the models' names.
        facts: what was evaluated where: command, data, device, dtype, environment.
    """
    content = {**facts, "models": {name: one.as_json(positions=True) for name, one in models.items()}}
    write_atomically(path, (json.dumps(content) + "\n").encode())


def contexts_up_to(length: int, ratio: int = 4) -> list[int]:
    """Powers of `ratio` below `length`, and `length` itself."""
    contexts = [1]
    while contexts[-1] * ratio < length:
        contexts.append(contexts[-1] * ratio)
    return [*contexts, length] if length > 1 else contexts


def averages_over_ranges(losses: Sequence[float]) -> tuple[list[float], list[float]]:
    """Means over ranges four to an octave, from position 8 on, and the ranges' geometric centres."""
    centres, means = [], []
    edge = float(FIRST_RANGE)
    while round(edge) < len(losses):
        after = min(edge * 2 ** (1 / RANGES_PER_OCTAVE), len(losses))
        start, stop = round(edge), round(after)
        if stop > start:
            centres.append(math.sqrt(edge * after))
            means.append(sum(losses[start:stop]) / (stop - start))
        edge *= 2 ** (1 / RANGES_PER_OCTAVE)
    return centres, means


def find_evaluations(paths: Sequence[Path], runs: Mapping[Path, str]) -> tuple[dict[Path, Evaluation], list[str]]:
    """Finds the evaluations of runs.

    A file within a run's folder belongs to that run. A file elsewhere belongs to the runs whose folders have the names
    of its models.

    Args:
        paths: folders to search, with all folders below them.
        runs: the runs' names by folder.

    Returns:
        the evaluation of each run by folder, the longest if there are several; and notes on files that are not used.
    """
    by_folder = {folder.resolve(): folder for folder in runs}
    by_name: dict[str, list[Path]] = {}
    for folder in runs:
        by_name.setdefault(folder.resolve().name, []).append(folder)
    found: dict[Path, Evaluation] = {}
    notes: list[str] = []
    for path in sorted({file.resolve() for folder in paths for file in folder.rglob(FILE)}):
        owner = next((by_folder[parent] for parent in path.parents if parent in by_folder), None)
        try:
            models = _read_models(path)
        except ValueError as error:
            notes.append(f"{path.name} in {path.parent.name} is not shown: {error}.")
            continue
        for name, evaluation in models.items():
            owners = by_name.get(name, []) if owner is None or len(models) > 1 else [owner]
            if owner is not None and len(owners) > 1:
                owners = [owner] if owner in owners else owners
            if len(owners) != 1:
                why = "no run has that name" if not owners else "several runs have that name"
                notes.append(f"The evaluation of {name} in {path.parent.name}/{path.name} is not shown: {why}.")
            elif owners[0] not in found or evaluation.length > found[owners[0]].length:
                found[owners[0]] = evaluation
    return found, notes


def _read_models(path: Path) -> dict[str, Evaluation]:
    content = read_json(path)
    models = content.get("models") if isinstance(content, dict) else None
    if not isinstance(models, dict):
        raise UserError("it has no 'models'")
    try:
        return {name: Evaluation.of_file(entry) for name, entry in models.items()}
    except (AttributeError, TypeError) as error:
        raise UserError(f"an entry has another form than `sympow evaluate` writes ({error})") from error


def rounded(numbers: Mapping[Any, Any]) -> dict[Any, Any]:
    """Rounds floats to five digits after the point, to keep files small, and replaces NaN by None."""
    return {key: _rounded(value) if isinstance(value, float) else value for key, value in numbers.items()}


def _rounded(number: float) -> float | None:
    return None if math.isnan(number) else round(number, 5)


def _number(value: float | None) -> float:
    """A number of the file, where null is NaN."""
    return math.nan if value is None else float(value)
