"""What `sympow evaluate` wrote, found again and told which run it belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from sympow.parsing import read_json

FILE = "evaluation.json"
# Ranges of positions to an octave, where losses are averaged over ranges.
RANGES_PER_OCTAVE = 4
FIRST_RANGE = 8


@dataclass(frozen=True)
class Evaluation:
    """Losses of one model on held-out documents.

    Attributes:
        documents: how many.
        by_context: average loss of the tokens within each context (paper Fig. 2).
        by_position: average loss over ranges of positions, by the ranges' centres; empty if it was not kept.
        data: what the documents are of.
        recall: associative recall, a record for every number of pairs and range of distances.
        passkey: passkey retrieval, a record for every distance.
    """

    documents: int
    by_context: dict[int, float]
    by_position: dict[float, float]
    data: str
    recall: list[dict[str, Any]] = field(default_factory=list)
    passkey: list[dict[str, Any]] = field(default_factory=list)

    @property
    def length(self) -> int:
        return max(self.by_context)

    @classmethod
    def of_file(cls, content: Mapping[str, Any], facts: Mapping[str, Any]) -> Evaluation:
        """From a model's entry in evaluation.json: every power of two, if losses by position are there."""
        mean = [float(x) for x in content.get("mean") or []]
        by_context = {int(context): float(loss) for context, loss in (content.get("by_context") or {}).items()}
        by_position = {float(place): float(loss) for place, loss in (content.get("by_position") or {}).items()}
        if mean:
            sums = list(accumulate(mean))
            contexts = {2**n for n in range(64) if 2**n < len(mean)} | {len(mean)} | by_context.keys()
            by_position = dict(zip(*averages_over_ranges(mean), strict=True))
            by_context = {c: sums[c - 1] / c for c in sorted(contexts) if c <= len(mean)}
        if not by_context:
            raise ValueError("it has neither 'by_context' nor 'mean'")
        return cls(
            int(content.get("documents") or 0),
            dict(sorted(by_context.items())),
            dict(sorted(by_position.items())),
            str(facts.get("data", "")),
            list(content.get("recall") or []),
            list(content.get("passkey") or []),
        )


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
    """Evaluations of runs, by run folder.

    A file within a run's folder is of that run. Elsewhere it is of the runs whose folders have its models' names.

    Args:
        paths: where to look, however deep.
        runs: names by folder.

    Returns:
        of several evaluations of a run the longest; and notes on files that could not be used.
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
        raise ValueError("it has no 'models'")
    return {name: Evaluation.of_file(entry, content) for name, entry in models.items()}
