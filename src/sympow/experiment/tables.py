"""Tables of an experiment: what is planned, and what came out, over seeds."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sympow.experiment.plan import Estimator, pack
from sympow.experiment.results import all_rows
from sympow.experiment.runner import state_of
from sympow.experiment.runs import Run
from sympow.experiment.scales import Scale
from sympow.extras import require


def print_plan(
    name: str,
    runs: Sequence[Run],
    scale: Scale,
    out: Path,
    results: Path,
    jobs: int,
    minutes: float | None,
    device: str | None,
) -> None:
    """The runs, their tokens, how long each may take, and the pieces of time they go into."""
    estimator = Estimator(scale, jobs, all_rows(results))
    seconds = {run.name: estimator.seconds(run, device == "cpu") for run in runs}
    states = {run.name: state_of(run, out, results) for run in runs}
    table = _table(f"{name} at scale {scale.name}, {jobs} at a time", ["run", "tokens", "steps", "about", "state"])
    for run in runs:
        table.add_row(
            run.name, f"{run.tokens:,}", f"{run.config.run.steps:,}", _duration(seconds[run.name]), states[run.name]
        )
    console = _console()
    console.print(table)
    left = [run for run in runs if states[run.name] != "done"]
    pieces = pack(left, seconds, jobs, None if minutes is None else 60 * minutes)
    total = sum(piece.seconds for piece in pieces)
    console.print(
        f"{len(left)} of {len(runs)} runs to do, {sum(run.tokens for run in left):,} tokens, about {_duration(total)}"
    )
    if minutes is not None:
        for number, piece in enumerate(pieces, start=1):
            console.print(f"piece {number}: {len(piece.runs)} runs, about {_duration(piece.seconds)}")


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Means over seeds, with the deviation of one run where there are several."""
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["variant"], row["power"], row["context"], json.dumps(row["changes"], sort_keys=True))
        groups.setdefault(key, []).append(row)
    columns = ["variant", "p", "context", "changes", "seeds", "train loss", "held out", "tokens/s"]
    table = _table("Losses, nats a token: means over seeds ± deviation of one", columns)
    for (variant, power, context, _), members in groups.items():
        changes = ", ".join(f"{name} {value}" for name, value in members[0]["changes"].items())
        speeds = [row["tokens_per_second"] for row in members if row.get("tokens_per_second")]
        table.add_row(
            variant,
            "" if power is None else str(power),
            f"{context:,}",
            changes,
            str(len(members)),
            _mean(members, "final_loss"),
            _mean(members, "heldout_loss"),
            f"{statistics.median(speeds):,.0f}" if speeds else "",
        )
    _console().print(table)


def _mean(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    numbers = [row[name] for row in rows if row.get(name) is not None]
    if not numbers:
        return str(rows[0]["status"])
    text = f"{statistics.fmean(numbers):.4f}"
    return text if len(numbers) == 1 else f"{text} ± {statistics.stdev(numbers):.4f}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _table(title: str, columns: Sequence[str]) -> Any:
    table = require("rich.table", "cli").Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _console() -> Any:
    return require("rich.console", "cli").Console(soft_wrap=True)
