"""Training runs as a report reads them from their folders."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from sympow.data.associative_recall import RECALL
from sympow.data.tokenizer import ByteTokenizer, token_unit
from sympow.errors import ArgumentError, UserError
from sympow.evaluate.evaluation_file import Evaluation, find_evaluations
from sympow.evaluate.head_statistics import HeadTable, read_heads
from sympow.parsing import read_yaml
from sympow.train.config import SECTIONS, field_help
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import CONFIG_FILE, EXPORT, METRICS_FILE

# The final loss is the mean over the last 1/10 of the steps.
FINAL_PART = 10


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        folder: the run folder, or a path that identifies a run that has none.
        name: the folder's path without what all runs of the report have in common.
        settings: every field of the config by name; no name occurs in two sections.
        metrics: one record per logged step, in order.
        evaluation: on held-out documents; None if there is none.
        heads: statistics of gates and rotations per layer and head; None if they were not measured.
        result: what else is known about the run: its command, device, heldout_loss, and a status of "diverged".
    """

    folder: Path
    name: str
    settings: dict[str, Any]
    metrics: list[dict[str, float]]
    evaluation: Evaluation | None = None
    heads: HeadTable | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Steps trained so far."""
        return int(self.metrics[-1]["step"])

    @property
    def unit(self) -> str:
        """The name of one token, "byte" or "token". With a vocabulary of 257, a token of text is a byte."""
        if (self.folder / EXPORT).is_dir():
            return token_unit(self.folder / EXPORT)
        of_text = self.settings["data"].partition(":")[0] != RECALL
        return "byte" if of_text and self.settings["vocab_size"] == ByteTokenizer.vocab_size else "token"

    @property
    def finished(self) -> bool:
        return self.steps >= self.settings["steps"]

    @property
    def final_loss(self) -> float:
        """Mean training loss over the last tenth of the steps, since the loss of a single batch is noisy."""
        losses = [line["loss"] for line in self.metrics]
        last = losses[-max(1, len(losses) // FINAL_PART) :]
        return sum(last) / len(last)

    @property
    def final_heldout_loss(self) -> float | None:
        """Held-out loss at the training context: as an experiment measured it, or the last one logged, if any."""
        measured = self.result.get("heldout_loss")
        if isinstance(measured, int | float):
            return measured
        found = [line["heldout_loss"] for line in self.metrics if "heldout_loss" in line]
        return found[-1] if found else None


@dataclass(frozen=True)
class Collection:
    """All runs of a report.

    Attributes:
        runs: sorted by name.
        notes: sentences for the reader on files that were found and could not be used.
    """

    runs: list[Run]
    notes: list[str] = field(default_factory=list)


def collect(paths: Sequence[Path]) -> Collection:
    """Reads run folders, and folders that contain these at any depth.

    Raises:
        ValueError: a path does not exist, contains no run, or a file in it is damaged.
    """
    folders = _find_runs(paths)
    notes: list[str] = []
    runs = []
    for folder, name in zip(folders, _short_names(folders), strict=True):
        run = _read_folder(folder, name)
        if run.metrics:
            runs.append(run)
        else:
            notes.append(f"{name} has no logged step yet and is omitted.")
    if not runs:
        raise UserError(f"no run in {_listed(paths)} has a logged step yet")
    evaluations, more_notes = find_evaluations([*paths, *folders], {run.folder: run.name for run in runs})
    runs = [replace(run, evaluation=evaluations.get(run.folder)) for run in runs]
    return collection_of(runs, notes, more_notes)


def collection_of(runs: list[Run], before: Sequence[str] = (), after: Sequence[str] = ()) -> Collection:
    """Runs, with notes on those that are not in final losses between other notes."""
    notes = list(before)
    diverged = [run.name for run in runs if run.result.get("status") == "diverged"]
    if diverged:
        notes.append(f"Diverged (the loss was not finite), and omitted from final losses: {', '.join(diverged)}.")
    unfinished = [run.name for run in runs if not run.finished and run.name not in diverged]
    if unfinished:
        notes.append(f"Unfinished, and omitted from final losses: {', '.join(unfinished)}.")
    return Collection(runs, [*notes, *after])


def settings_help() -> dict[str, str]:
    """Help texts of settings, by name."""
    return {name: text for kind in SECTIONS.values() for name, text in field_help(kind).items()}


def _find_runs(paths: Sequence[Path]) -> list[Path]:
    """Folders of runs, sorted."""
    found: dict[Path, Path] = {}
    for path in paths:
        if not path.is_dir():
            raise ArgumentError("runs", f"must be folders, and {path} is none")
        here = list(_runs_in(path))
        if not here:
            raise UserError(f"there is no run in {path}: a run's folder has a {CONFIG_FILE}")
        for folder in here:
            found.setdefault(folder.resolve(), folder)
    return [found[key] for key in sorted(found)]


def _runs_in(path: Path) -> Iterator[Path]:
    """The folder itself, or the runs below it. Folders inside a run are not searched."""
    for folder, subfolders, files in os.walk(path):
        if CONFIG_FILE in files:
            subfolders.clear()
            yield Path(folder)


def _read_folder(folder: Path, name: str) -> Run:
    metrics = read_metrics(folder / METRICS_FILE) if (folder / METRICS_FILE).is_file() else []
    metrics = [line for line in metrics if "loss" in line]
    settings = _settings(read_yaml(folder / CONFIG_FILE), folder / CONFIG_FILE)
    return Run(folder, name, settings, metrics, heads=read_heads(folder))


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Paths without what all of them have in common."""
    resolved = [folder.resolve() for folder in folders]
    if len(resolved) == 1:
        return [resolved[0].name]
    common = Path(os.path.commonpath(resolved))
    return [folder.relative_to(common).as_posix() for folder in resolved]


def _settings(content: Any, source: object) -> dict[str, Any]:
    """All fields of a config. Those that this version does not know, of results, are kept."""
    if not isinstance(content, dict) or not all(isinstance(content.get(part), dict) for part in SECTIONS):
        raise UserError(f"{source} must map the sections {', '.join(SECTIONS)} to fields")
    if missing := [f.name for part, kind in SECTIONS.items() for f in fields(kind) if f.name not in content[part]]:
        raise UserError(f"{source} lacks {', '.join(missing)}")
    return {name: value for part in SECTIONS for name, value in content[part].items()}


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))
