"""What `sympow report` writes: the HTML page, the table of final losses and the figures of a set of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sympow.data.provenance import FILE as TRAINED_ON_FILE
from sympow.data.provenance import TrainedOn
from sympow.errors import UserError
from sympow.evaluate.head_statistics import held_out_rows, measure_heads, write_heads
from sympow.extras import require
from sympow.files import write_atomically
from sympow.model.storage import load_model
from sympow.report.grouping import Group, Spread, group_runs, repeated_seeds
from sympow.report.paper_figures import draw_figures
from sympow.report.run_collection import Collection, Run, collect
from sympow.report.run_page import build_report_page
from sympow.settings import TURNING
from sympow.train.run_folder import EXPORT

PAGE = "index.html"
NUMBERS = "final_losses.csv"


def write_report(
    runs: Collection | Sequence[Path],
    out: Path,
    *,
    title: str = "Training runs",
    heads: bool = True,
    device: str = "cpu",
) -> list[Path]:
    """Writes index.html, final_losses.csv and figures/.

    Args:
        runs: runs, or run folders and folders that contain runs at any depth.
        out: folder to write into; it is created.
        heads: whether to measure what heads learned for runs that have a model and were not measured yet. The result is
            saved in the run folder.
        device: for this measurement.

    Returns:
        paths of the files.

    Raises:
        ValueError: there is no run, or a file of a run is damaged.
        ModuleNotFoundError: plotly is not installed; figures and the table are written before this is raised.
    """
    collection = runs if isinstance(runs, Collection) else collect(runs)
    if heads:
        collection = measure_missing_heads(collection, device)
    groups = group_runs(collection.runs)
    notes = collection.notes + repeated_seeds(groups) + _hidden_rotations(collection.runs)
    with _progress() as progress:
        task = progress.add_task("drawing figures", total=None)
        figures = draw_figures(
            groups, out / "figures", lambda done, total: progress.update(task, completed=done, total=total)
        )
    write_atomically(out / NUMBERS, _table(groups).encode())
    write_atomically(out / PAGE, build_report_page(title, groups, notes).encode())
    return [out / PAGE, out / NUMBERS, *figures]


def measure_missing_heads(collection: Collection, device: str) -> Collection:
    """Measures heads of runs that have a model and were not measured yet, with a progress bar."""
    waiting = [run for run in collection.runs if run.heads is None and _learned_something(run)]
    measured: dict[Path, Run] = {}
    notes: dict[str, list[str]] = {}
    with _progress() as progress:
        task = progress.add_task("measuring heads", total=len(waiting))
        for run in waiting:
            try:
                trained_on = TrainedOn.find(run.folder / EXPORT)
                if trained_on is None:
                    raise UserError(f"its model lacks {TRAINED_ON_FILE}")
                batches = held_out_rows(run.settings | {"data": trained_on.source})
                table = measure_heads(load_model(run.folder / EXPORT, device), batches, run.settings["data"])
            except ValueError as error:
                notes.setdefault(f"not measured: {error}", []).append(run.name)
            else:
                measured[run.folder] = replace(run, heads=table)
                try:
                    write_heads(run.folder, table)
                except OSError as error:
                    notes.setdefault(f"measured, but not saved: {error.strerror}", []).append(run.name)
            progress.advance(task)
    found = [f"The heads of {_some(names)} were {outcome}." for outcome, names in notes.items()]
    return Collection([measured.get(run.folder, run) for run in collection.runs], collection.notes + found)


def _progress() -> Any:
    console = require("rich.console", "cli").Console(stderr=True)
    # Without a terminal it would print blank lines.
    return require("rich.progress", "cli").Progress(console=console, transient=True, disable=not console.is_terminal)


def _learned_something(run: Run) -> bool:
    """Whether the run has a model whose gates or rotations are learned, and have statistics."""
    has_model = (run.folder / EXPORT).is_dir()
    without = ("none", "fixed", *TURNING)
    return has_model and (run.settings["gating"] != "none" or run.settings["rotary"] not in without)


def _hidden_rotations(runs: Sequence[Run]) -> list[str]:
    """A sentence on the runs whose rotations have no statistics, if there are any."""
    names = [run.name for run in runs if run.settings["rotary"] in TURNING]
    if not names:
        return []
    return [f"Rotations of {_some(names)} turn half of the pairs by angles of their own and have no scale β to show."]


def _table(groups: Sequence[Group]) -> str:
    """CSV with a line per group: final losses with their range over seeds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    measures: dict[str, Callable[[Group], Spread | None]] = {
        "final_loss": lambda group: group.final_loss,
        "final_heldout_loss": lambda group: group.final_heldout_loss,
    }
    columns = [f"{name}_{part}" for name in measures for part in ("mean", "low", "high")]
    writer.writerow(["series", "power", "context", "seeds", "finished", *columns])
    for group in groups:
        numbers: list[str] = []
        for measure in measures.values():
            spread = measure(group)
            numbers += ["", "", ""] if spread is None else [f"{x:.6g}" for x in (spread.mean, spread.low, spread.high)]
        seeds = " ".join(map(str, group.seeds))
        finished = sum(run.finished for run in group.runs)
        writer.writerow([group.series, group.power or "", group.context, seeds, finished, *numbers])
    return text.getvalue()


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
