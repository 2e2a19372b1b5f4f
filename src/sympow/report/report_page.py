"""The report's page: runs and groups as plain data for its scripts to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sympow.evaluate.heads import quantity_labels
from sympow.model.accounting import count_parameters
from sympow.model.config import GPTConfig
from sympow.report.curves import by_layer, curve, median_speed, metric_names, seconds_at
from sympow.report.grouping import Group, by_power, differing, plain_words, shown, unit_of
from sympow.report.page import build_page
from sympow.report.runs import Run, settings_help
from sympow.report.style import Style
from sympow.train.run_folder import CONFIG_FILE

# Metrics with a plainer name than their own.
METRICS = {
    "loss": "training loss (nats per {unit})",
    "heldout_loss": "held-out loss (nats per {unit})",
    "gradient_norm": "length of the gradient",
    "learning_rate": "learning rate",
    "tokens_per_second": "speed ({unit}s per second)",
    "utilisation": "share of the device's peak",
    "memory_gib": "memory (GiB)",
}
SCRIPTS = ("numbers.js", "elements.js", "plot.js", "heatmap.js", "report.js")


def build_report_page(title: str, groups: Sequence[Group], styles: Mapping[str, Style], notes: Sequence[str]) -> str:
    """HTML of the whole report.

    Args:
        styles: by series.
        notes: what the reader should know about what is missing.
    """
    return build_page(title, "report.html", SCRIPTS, report_data(title, groups, styles, notes), series_css(styles))


def report_data(
    title: str, groups: Sequence[Group], styles: Mapping[str, Style], notes: Sequence[str]
) -> dict[str, Any]:
    """What the page's scripts read; numbers rounded to six digits."""
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
    """A custom property for each series' colour, which follows the page from light to dark."""
    colours = "".join(
        f"--series-{place}: light-dark({style.light}, {style.dark}); " for place, style in enumerate(styles.values())
    )
    return f"\n:root {{ {colours}}}\n"


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
    """Of the model; None, if this version does not know such a model."""
    known = {name: run.settings[name] for name in GPTConfig.__dataclass_fields__}
    try:
        return count_parameters(GPTConfig(**known)).total
    except (ValueError, TypeError):
        return None


def _grid(steps: list[int], grids: dict[tuple[int, ...], int]) -> int:
    """Number of a list of steps; most runs share theirs."""
    return grids.setdefault(tuple(steps), len(grids))


def _rounded(numbers: Sequence[float | None]) -> list[float | None]:
    return [_round(number) for number in numbers]


def _round(number: float | None) -> float | None:
    """Six digits; what is not finite becomes None."""
    if number is None or number != number or abs(number) == float("inf"):
        return None
    return float(f"{number:.6g}")
