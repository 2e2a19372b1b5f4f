"""What `sympow experiment` prints: the plan, the progress of runs while they are trained, and the table of losses."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sympow.experiments.grid import Run, Scale
from sympow.experiments.recall_sweep import TASK as RECALL
from sympow.experiments.recall_sweep import best_recall
from sympow.experiments.runner import Estimator, pack
from sympow.experiments.store import Store
from sympow.experiments.sweep import BaseSweep, SweepResults
from sympow.experiments.tracking_sweep import best_accuracies
from sympow.extras import require
from sympow.train.run_folder import METRICS_FILE

# Columns of a file or a pipe.
UNLIMITED_WIDTH = 1_000


class Display:
    """A progress bar for every run in training and one for all runs on a terminal, plain lines elsewhere.

    Used as a context manager around the runs.
    """

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._steps: dict[str, int] = {}
        self._tasks: dict[str, Any] = {}
        self._done = self._total = 0
        self._bars: Any = None
        if sys.stderr.isatty():
            rich = require("rich.progress", "cli")
            self._bars = rich.Progress(
                rich.TextColumn("{task.description}"),
                rich.BarColumn(),
                rich.MofNCompleteColumn(),
                rich.TextColumn("{task.fields[numbers]}"),
                rich.TimeElapsedColumn(),
                console=require("rich.console", "cli").Console(stderr=True),
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def begin(self, names: Sequence[str], done: int) -> None:
        """Called before the first run; `done` runs have been finished earlier."""
        self._total, self._done = len(names), done
        if self._bars is not None:
            self._all = self._bars.add_task("all runs", total=self._total, completed=done, numbers="")
        self.say(f"{self._total} runs, {done} of them done")

    def added(self, runs: int, done: int) -> None:
        """Called when the results so far have added runs, some of which have been finished earlier."""
        if not runs:
            return
        self._total, self._done = self._total + runs, self._done + done
        if self._bars is not None:
            self._bars.update(self._all, total=self._total, completed=self._done)
        self.say(f"{runs} runs more, {done} of them done")

    def started(self, run: Run, seconds: float, resumed: bool) -> None:
        self._steps[run.name] = run.config.run.steps
        if self._bars is not None:
            self._tasks[run.name] = self._bars.add_task(run.name, total=run.config.run.steps, numbers="starting")
        self.say(f"{run.name}: {'resumed' if resumed else 'started'}, about {seconds:.0f} s")

    def update(self, running: Mapping[str, Path]) -> None:
        """Moves the bars of running runs, given with their folders, from the metrics that they have written."""
        if self._bars is None:
            return
        for name in [name for name in self._tasks if name not in running]:
            self._bars.remove_task(self._tasks.pop(name))
        for name, folder in running.items():
            if (line := _last_line(folder / METRICS_FILE)) is not None:
                numbers = f"loss {line['loss']:.4f}" + ("  evaluating" if line["step"] >= self._steps[name] else "")
                self._bars.update(self._tasks[name], completed=line["step"], numbers=numbers)

    def finished(self, name: str, row: Mapping[str, Any]) -> None:
        self._done += 1
        if self._bars is not None:
            self._bars.update(self._all, completed=self._done)
        what = (
            f"loss {row['final_loss']:.4f}, held out {row['heldout_loss']:.4f}"
            if row["status"] == "done"
            else row["status"]
        )
        self.say(f"{name}: {what}, {row['total_seconds']:.0f} s ({self._done} of {self._total})")

    def say(self, line: str) -> None:
        """Prints a line that stays, with the time since the start."""
        minutes, seconds = divmod(int(time.monotonic() - self._begin), 60)
        line = f"{minutes:3d}:{seconds:02d}  {line}"
        if self._bars is not None:
            self._bars.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


def print_plan(
    name: str,
    runs: Sequence[Run],
    scale: Scale,
    store: Store,
    jobs: int,
    minutes: float | None,
    device: str,
) -> None:
    """Prints the runs, their tokens, how long each may take, and how they fit into commands of `minutes` each."""
    estimator = Estimator(scale, jobs, store.rows())
    seconds = {run.name: estimator.seconds(run, device == "cpu") for run in runs}
    states = {run.name: store.state(run) for run in runs}
    table = _table(f"{name} at scale {scale.name}, {jobs} at a time", ["run", "tokens", "steps", "about", "state"])
    for run in runs:
        table.add_row(
            run.name, f"{run.tokens:,}", f"{run.config.run.steps:,}", _duration(seconds[run.name]), states[run.name]
        )
    console = _console()
    console.print(table)
    left = [run for run in runs if states[run.name] != "done"]
    begun = {run.name for run in left if states[run.name] == "begun"}
    allocations = pack(left, seconds, jobs, None if minutes is None else 60 * minutes, begun)
    total = sum(allocation.commands * allocation.seconds for allocation in allocations)
    console.print(
        f"{len(left)} of {len(runs)} runs to do, {sum(run.tokens for run in left):,} tokens, about {_duration(total)}"
    )
    if minutes is not None:
        number = 1
        for allocation in allocations:
            last = number + allocation.commands - 1
            which = f"command {number:,}" if last == number else f"commands {number:,} to {last:,}, each"
            console.print(f"{which}: {len(allocation.runs)} runs, about {_duration(allocation.seconds)}")
            number = last + 1


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints means over seeds, with the standard deviation of one run where there are several.

    Runs that diverged have no loss: the column of seeds has how many are in the means, and of how many.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        key = (row["variant"], row["power"], row["context"], json.dumps(row["changes"], sort_keys=True))
        groups.setdefault(key, []).append(row)
    columns = ["variant", "p", "context", "changes", "seeds", "train loss", "held out", "tokens/s"]
    table = _table("Losses in nats per token: mean over seeds ± standard deviation", columns)
    for (variant, power, context, _), members in groups.items():
        changes = ", ".join(f"{name} {value}" for name, value in members[0]["changes"].items())
        speeds = [row["tokens_per_second"] for row in members if row.get("tokens_per_second")]
        finished = sum(row["status"] == "done" for row in members)
        table.add_row(
            variant,
            "" if power is None else str(power),
            f"{context:,}",
            changes,
            str(finished) if finished == len(members) else f"{finished} of {len(members)}",
            _mean(members, "final_loss"),
            _mean(members, "heldout_loss"),
            f"{statistics.median(speeds):,.0f}" if speeds else "",
        )
    _console().print(table)


def print_sweep_plan(name: str, sweeps: Sequence[BaseSweep], results: SweepResults, out: Path) -> None:
    """Prints the sweeps, their models and tokens, and whether they are done, or begun in the folder `out`."""
    table = _table(name, ["sweep", "models", "tokens", "steps", "length", "state"])
    for sweep in sweeps:
        state = "done" if results.done(sweep) else "begun" if results.checkpoint(out, sweep).is_file() else "new"
        table.add_row(
            sweep.name, str(sweep.members), f"{sweep.tokens:,}", f"{sweep.steps:,}", f"{sweep.longest:,}", state
        )
    _console().print(table)


def print_sweeps(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints accuracies at each length, the mean over seeds and the least, of the best learning rate."""
    recalled = [row for row in rows if row["task"] == RECALL]
    if recalled:
        _print_recall(recalled)
    rows = [row for row in rows if row["task"] != RECALL]
    if not rows:
        return
    lengths = sorted({length for row in rows for length in best_accuracies(row)})
    columns = ["task", "sweep", "best rate", *(f"at {length:,}" for length in lengths)]
    table = _table("Accuracy in the second half of rows, %: mean over seeds (least)", columns)
    for row in sorted(rows, key=lambda row: (row["task"], row["run"])):
        found = best_accuracies(row)
        cells = [
            f"{100 * statistics.fmean(found[length]):.1f} ({100 * min(found[length]):.1f})" if length in found else ""
            for length in lengths
        ]
        table.add_row(row["task"], row["sweep"], f"{row['best_rate']:g}", *cells)
    _console().print(table)


def _print_recall(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints accuracies of recall, the smallest state first."""
    shapes = list(dict.fromkeys(shape for row in rows for shape in row["by_shape"]))
    table = _table(
        "Right answers, %, by length / pairs: mean over seeds (least) of the best learning rate",
        ["sweep", "bytes of state", "best rate", "steps", "all", *shapes],
    )
    for row in sorted(rows, key=lambda row: (row["state_numbers"], row["run"])):
        overall, by_shape = best_recall(row)
        cells = [
            f"{100 * statistics.fmean(found):.1f} ({100 * min(found):.1f})" if found else ""
            for found in (overall, *(by_shape.get(shape, []) for shape in shapes))
        ]
        table.add_row(row["sweep"], f"{row['state_bytes']:,}", f"{row['best_rate']:g}", f"{row['steps']:,}", *cells)
    _console().print(table)


def _last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a metrics file, without reading all of it."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 8_192))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    # After the last newline there is nothing, or a line that is being written.
    for line in reversed(lines[:-1]):
        if line:
            try:
                content: dict[str, Any] = json.loads(line)
            except ValueError:
                return None
            return content
    return None


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
        table.add_column(column, justify="right" if number else "left", no_wrap=number == 0, overflow="fold")
    return table


def _console() -> Any:
    console = require("rich.console", "cli").Console(soft_wrap=True)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        # A file or a pipe has no width; rich would assume 80 columns, which is less than the tables have.
        console.width = UNLIMITED_WIDTH
    return console
