"""What `sympow report` does: from run folders to figures, a page and a table of numbers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sympow.evaluate.heads import held_out_rows, measure_heads, write_heads
from sympow.extras import require
from sympow.files import write_atomically
from sympow.model.storage import load_model
from sympow.report.grouping import Group, Spread, group_runs, repeated_seeds
from sympow.report.paper_figures import draw_figures
from sympow.report.report_page import build_report_page
from sympow.report.runs import Collection, Run, collect
from sympow.report.style import assign_styles
from sympow.train.provenance import TrainedOn
from sympow.train.run_folder import EXPORT

PAGE = "index.html"
NUMBERS = "final_losses.csv"


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    title: str = "Training runs",
    heads: bool = True,
    device: str = "cpu",
) -> list[Path]:
    """Reads runs and writes index.html, final_losses.csv and figures/.

    Args:
        paths: run folders, or folders of runs however deep.
        out: folder to write into; it is made.
        heads: whether to measure what heads learned, where that is not known yet and the model is there. The result is
            kept in the run's folder.
        device: for that.

    Returns:
        what was written.

    Raises:
        ValueError: there is no run, or a file of one is damaged.
    """
    collection = collect(paths)
    if heads:
        collection = measure_missing_heads(collection, device)
    groups = group_runs(collection.runs)
    notes = collection.notes + repeated_seeds(groups)
    styles = assign_styles((group.series, group.variant) for group in groups)
    with _progress() as progress:
        task = progress.add_task("drawing figures", total=None)
        figures = draw_figures(
            groups, styles, out / "figures", lambda done, total: progress.update(task, completed=done, total=total)
        )
    write_atomically(out / NUMBERS, _table(groups).encode())
    write_atomically(out / PAGE, build_report_page(title, groups, styles, notes).encode())
    return [out / PAGE, out / NUMBERS, *figures]


def measure_missing_heads(collection: Collection, device: str) -> Collection:
    """Measures the heads of runs that have a model and were not measured, with progress on the terminal."""
    waiting = [run for run in collection.runs if run.heads is None and _learned_something(run)]
    measured: dict[Path, Run] = {}
    notes: dict[str, list[str]] = {}
    with _progress() as progress:
        task = progress.add_task("looking at heads", total=len(waiting))
        for run in waiting:
            try:
                trained_on = TrainedOn.find(run.folder / EXPORT)
                assert trained_on is not None, "a run has a config"
                batches = held_out_rows(run.settings | {"data": trained_on.source})
                table = measure_heads(load_model(run.folder / EXPORT, device), batches, run.settings["data"])
            except ValueError as error:
                notes.setdefault(str(error), []).append(run.name)
            else:
                measured[run.folder] = replace(run, heads=table)
                try:
                    write_heads(run.folder, table)
                except OSError as error:
                    notes.setdefault(f"measured, and not kept: {error.strerror}", []).append(run.name)
            progress.advance(task)
    found = [f"What the heads of {_some(names)} do was not measured: {why}." for why, names in notes.items()]
    return Collection([measured.get(run.folder, run) for run in collection.runs], collection.notes + found)


def _progress() -> Any:
    console = require("rich.console", "cli").Console(stderr=True)
    return require("rich.progress", "cli").Progress(console=console, transient=True)


def _learned_something(run: Run) -> bool:
    """Whether its gates or rotations are its own."""
    has_model = (run.folder / EXPORT).is_dir()
    return has_model and (run.settings["gating"] != "none" or run.settings["rotary"] not in ("none", "fixed"))


def _table(groups: Sequence[Group]) -> str:
    """A line per group: final losses with their range over seeds."""
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


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
