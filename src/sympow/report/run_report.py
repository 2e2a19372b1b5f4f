"""What `sympow report` writes: the HTML page, the table of final losses and the figures of a set of runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sympow.evaluate.head_statistics import held_out_rows, measure_heads, quantity_labels, write_heads
from sympow.extras import require
from sympow.files import write_atomically
from sympow.model.accounting import count_parameters
from sympow.model.config import GPTConfig
from sympow.model.storage import load_model
from sympow.report.curves import by_layer, curve, median_speed, metric_names, seconds_at
from sympow.report.grouping import (
    Group,
    Spread,
    by_power,
    differing,
    group_runs,
    plain_words,
    repeated_seeds,
    shown,
    unit_of,
)
from sympow.report.html_page import build_page
from sympow.report.paper_figures import draw_figures
from sympow.report.plotting import Style, assign_styles
from sympow.report.run_collection import Collection, Run, collect, settings_help
from sympow.settings import TURNING
from sympow.train.provenance import FILE as TRAINED_ON_FILE
from sympow.train.provenance import TrainedOn
from sympow.train.run_folder import CONFIG_FILE, EXPORT

PAGE = "index.html"
NUMBERS = "final_losses.csv"
# Labels of metrics on the page.
METRICS = {
    "loss": "training loss (nats per {unit})",
    "heldout_loss": "held-out loss (nats per {unit})",
    "gradient_norm": "gradient norm",
    "learning_rate": "learning rate",
    "tokens_per_second": "speed ({unit}s per second)",
    "utilisation": "MFU",
    "memory_gib": "memory (GiB)",
}


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
        paths: run folders, or folders that contain runs at any depth.
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
    collection = collect(paths)
    if heads:
        collection = measure_missing_heads(collection, device)
    groups = group_runs(collection.runs)
    notes = collection.notes + repeated_seeds(groups) + _hidden_rotations(collection.runs)
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
                    raise ValueError(f"its model lacks {TRAINED_ON_FILE}")
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


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def build_report_page(title: str, groups: Sequence[Group], styles: Mapping[str, Style], notes: Sequence[str]) -> str:
    """The report as HTML.

    Args:
        styles: by series.
        notes: sentences for the reader, on missing data for example.
    """
    return build_page("report", title, report_data(title, groups, styles, notes), series_css(styles))


def report_data(
    title: str, groups: Sequence[Group], styles: Mapping[str, Style], notes: Sequence[str]
) -> dict[str, Any]:
    """The data of the page, with numbers rounded to six digits."""
    runs = [run for group in groups for run in group.runs]
    grids: dict[tuple[int, ...], int] = {}
    places = {label: place for place, label in enumerate(styles)}
    different = set(differing(runs))
    helps = settings_help()
    unit = unit_of(groups)
    labels = {name: label.format(unit=unit) for name, label in METRICS.items()}
    names = dict.fromkeys(name for run in runs for name in metric_names(run))
    described = [_run(run, number, grids) for number, group in enumerate(groups) for run in group.runs]
    return {
        "title": title,
        "notes": list(notes),
        "series": [{"label": label, **asdict(style)} for label, style in styles.items()],
        "groups": [
            {"series": places[group.series], "power": group.power, "context": group.context} for group in groups
        ],
        "panels": [
            {"title": panel, "groups": [groups.index(group) for group in members]}
            for panel, members in by_power(groups).items()
        ],
        "runs": described,
        "grids": [list(grid) for grid in grids],
        "metrics": {name: labels.get(name, plain_words(name)) for name in (*labels, *names) if name in names},
        "unit": unit,
        "quantities": quantity_labels(unit),
        "settings": [
            {"name": name, "label": plain_words(name), "help": helps.get(name, ""), "differs": name in different}
            for name in dict.fromkeys(name for run in runs for name in run.settings)
        ],
    }


def series_css(styles: Mapping[str, Style]) -> str:
    """CSS with a custom property for the color of each series in the light and the dark theme."""
    colors = "".join(
        f"--series-{place}: light-dark({style.light}, {style.dark}); " for place, style in enumerate(styles.values())
    )
    return f"\n:root {{ {colors}}}\n"


def _run(run: Run, group: int, grids: dict[tuple[int, ...], int]) -> dict[str, Any]:
    curves = {}
    for name in metric_names(run):
        found = curve(run, name)
        if found.steps:
            curves[name] = {
                "grid": _grid(found.steps, grids),
                "values": _rounded(found.values),
                "counts": None if set(found.counts) == {1} else found.counts,
            }
    steps = curve(run, "loss").steps
    seconds = seconds_at(run, steps)
    evaluation = run.evaluation
    speed = median_speed(run)
    return {
        "name": run.name,
        "group": group,
        "seed": run.settings["seed"],
        "steps": run.steps,
        "finished": run.finished,
        "finalLoss": _round(run.final_loss),
        "finalHeldoutLoss": _round(run.final_heldout_loss),
        "speed": _round(speed),
        "memory": _round(max((line["memory_gib"] for line in run.metrics if "memory_gib" in line), default=None)),
        "parameters": _parameters(run),
        "command": run.result.get("command") or f"sympow train --config {run.folder / CONFIG_FILE} --out runs/again",
        "device": run.result.get("device"),
        "batchTokens": run.settings["batch_tokens"],
        "settings": {name: shown(value) for name, value in run.settings.items()},
        "curves": curves,
        "seconds": None if seconds is None else {"grid": _grid(steps, grids), "values": _rounded(seconds)},
        "layers": {
            name: {"steps": at, "values": [_rounded(row) for row in rows]} for name, (at, rows) in by_layer(run).items()
        },
        "evaluation": None
        if evaluation is None
        else {
            "documents": evaluation.documents,
            "data": evaluation.data,
            "byContext": [[c, _round(x)] for c, x in evaluation.by_context.items()],
            "byPosition": [[_round(c), _round(x)] for c, x in evaluation.by_position.items()],
            "recall": evaluation.recall,
            "passkey": evaluation.passkey,
        },
        "heads": None
        if run.heads is None
        else {
            "tokens": run.heads.tokens,
            "data": run.heads.data,
            "quantities": {name: [_rounded(row) for row in rows] for name, rows in run.heads.quantities.items()},
        },
    }


def _parameters(run: Run) -> int | None:
    """Parameters of the run's model; None if this version does not support such a model."""
    known = {name: run.settings[name] for name in GPTConfig.__dataclass_fields__}
    try:
        return count_parameters(GPTConfig(**known)).total
    except (ValueError, TypeError):
        return None


def _grid(steps: list[int], grids: dict[tuple[int, ...], int]) -> int:
    """Index of a list of steps in `grids`; most runs share one list."""
    return grids.setdefault(tuple(steps), len(grids))


def _rounded(numbers: Sequence[float | None]) -> list[float | None]:
    return [_round(number) for number in numbers]


def _round(number: float | None) -> float | None:
    """A number rounded to six digits; None if it is not finite."""
    if number is None or number != number or abs(number) == float("inf"):
        return None
    return float(f"{number:.6g}")
