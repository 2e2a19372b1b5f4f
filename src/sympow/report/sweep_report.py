"""Figure and table of sweeps: accuracy against position for each task, and accuracies at each length."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sympow.experiments.recall_sweep import TASK as RECALL
from sympow.experiments.sweep import ACCURACY_ENDING, SweepResults
from sympow.experiments.tracking_sweep import best_accuracies
from sympow.files import write_atomically
from sympow.report.grouping import LABELS
from sympow.report.plotting import (
    add_legend,
    assign_styles,
    make_panels,
    mark_training_context,
    pyplot,
    save_figure,
    set_context_ticks,
    set_title,
    tidy,
)
from sympow.report.recall_report import plot_recall, recall_table

COLUMNS = 3
# A task with labels at no more places than this is drawn by length.
FEW_LABELS = 8


def is_sweep_table(path: Path) -> bool:
    """Whether a path is the table of an experiment's sweeps, with its accuracies beside it."""
    return path.suffix == ".jsonl" and path.with_name(path.stem + ACCURACY_ENDING).is_file()


def write_sweep_report(table: Path, out: Path) -> list[Path]:
    """Writes the table as Markdown and the figure into a folder, by the experiment's name, and returns both paths."""
    results = SweepResults.read(table.parent, table.stem)
    if not results.rows:
        raise ValueError(f"{table} has no results")
    rows, page = list(results.rows.values()), out / f"{table.stem}.md"
    if all(row["task"] == RECALL for row in rows):
        lines, figure = recall_table(rows), out / f"{table.stem}_by_state_size.png"
        plot_recall(rows, figure)
    else:
        lines, figure = accuracy_table(rows), out / f"{table.stem}_by_position.png"
        plot_accuracy_by_position(results, figure)
    write_atomically(page, ("\n".join(lines) + "\n").encode())
    return [page, figure]


def accuracy_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown: a row for each sweep, a column for each task, accuracies at each length in percent.

    An accuracy is that of the second half of rows of a length, the mean over seeds of the best learning rate.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    sweeps = list(dict.fromkeys(row["sweep"] for row in rows))
    found = {(row["task"], row["sweep"]): row for row in rows}
    chances = {row["task"]: row["chance"] for row in rows}
    yield f"| | {' | '.join(f'{task} (chance {100 * chances[task]:.0f})' for task in tasks)} |"
    yield "| --- " * (len(tasks) + 1) + "|"
    for sweep in sweeps:
        cells = [_cell(found.get((task, sweep))) for task in tasks]
        yield f"| {sweep} | {' | '.join(cells)} |"


def _cell(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return ", ".join(_percent(statistics.fmean(of_seeds)) for of_seeds in best_accuracies(row).values())


def _percent(share: float) -> str:
    """Not rounded up to 100 unless it is 100."""
    return "100" if share == 1 else f"{min(99.9, 100 * share):.1f}"


def plot_accuracy_by_position(results: SweepResults, path: Path) -> None:
    """A panel for each task, a line for each sweep: the mean over seeds.

    It is the accuracy by position in rows of the greatest length, or, for tasks with few labels, that by length.

    Args:
        path: PNG or SVG file to write; its folder is created.
    """
    rows = list(results.rows.values())
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    styles = assign_styles((row["sweep"], LABELS.get(row["sweep"], row["sweep"])) for row in rows)
    figure, panels = make_panels(len(tasks), columns=min(COLUMNS, len(tasks)), sharey=True)
    for axes, task in zip(panels, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        for row in of_task:
            curve, style = results.curves[row["run"]]["by_position"], styles[row["sweep"]]
            by_length = {length: statistics.fmean(of_seeds) for length, of_seeds in best_accuracies(row).items()}
            if dense := len(curve["position"]) > FEW_LABELS:
                means = [statistics.fmean(of_seeds) for of_seeds in zip(*curve["accuracy"], strict=True)]
                axes.plot(curve["position"], means, label=row["sweep"], **style.for_matplotlib)
            else:
                axes.plot(by_length.keys(), by_length.values(), label=row["sweep"], **style.with_marker)
            axes.set_xlabel(f"{'position' if dense else 'length'} (tokens)")
        axes.axhline(of_task[0]["chance"], color="#8c8c8c", linestyle=":", linewidth=1)
        for length in sorted({row["length"] for row in of_task}):
            mark_training_context(axes, length)
        axes.set(ylim=(0, 1.02))
        set_context_ticks(axes, [length for row in of_task for length in best_accuracies(row)])
        set_title(axes, task)
        tidy(axes)
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("accuracy")
    add_legend(figure, panels)
    save_figure(figure, path)
    pyplot().close(figure)
