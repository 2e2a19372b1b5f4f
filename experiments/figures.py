"""Figures and tables of experiments from their results, into a folder.

python -m experiments.figures figure1 --scale small -o DIR     a report of the runs, as `sympow report` writes it
python -m experiments.figures recall --scale small -o DIR      of sweeps, a figure and a table in Markdown
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.recall import TASK as RECALL
from experiments.recall import best_recall
from experiments.state_tracking import best_accuracies
from experiments.store import StoredResult, read_table
from sympow.errors import UserError
from sympow.evaluate.evaluation_file import Evaluation
from sympow.evaluate.head_statistics import HeadTable
from sympow.extras import require
from sympow.files import write_atomically
from sympow.model.config import VARIANTS
from sympow.report.grouping import LABELS
from sympow.report.plotting import (
    DASHES,
    MARKERS,
    Style,
    assign_styles,
    finish,
    make_panels,
    mark_training_context,
    plain_numbers,
    set_context_ticks,
    set_title,
)
from sympow.report.plotting import VARIANTS as STYLES
from sympow.report.run_collection import Run, collection_of
from sympow.report.run_report import write_report

COLUMNS = 3
# A task with labels at no more places than this is drawn by length.
FEW_LABELS = 8
# Bytes of state, and accuracies of other models there, as reported for the same task of zoology
# (github.com/HazyResearch/zoology), trained likewise. Its `state_size` counts four bytes for each number.
PUBLISHED_BYTES = 67_000
PUBLISHED = {"Gated DeltaNet": 0.99, "GLA": 0.95, "Based": 0.86, "Mamba-2": 0.83}
PUBLISHED_MARKERS = "D^vX"
SOFTMAX = STYLES["softmax"]


def draw(experiments: Sequence[str], results: Path, out: Path) -> list[Path]:
    """Writes the report of runs of one or more experiments, or the figure and the table of sweeps of one.

    Args:
        experiments: their names.
        results: folder of their tables.
        out: folder to write into.
    """
    tables = {name: list(read_table(results, name).values()) for name in experiments}
    if missing := [name for name, found in tables.items() if not found]:
        raise UserError(f"{results} has no results of {', '.join(missing)}")
    found = tables[experiments[0]]
    if not any("task" in results_of[0].row for results_of in tables.values()):
        runs = {result.name: report_run(result) for results_of in tables.values() for result in results_of}
        ordered = [runs[name] for name in sorted(runs)]
        without = [f"{run.name} has no logged step and is omitted." for run in ordered if not run.metrics]
        return write_report(collection_of([run for run in ordered if run.metrics], without), out, heads=False)
    if len(experiments) > 1:
        raise UserError(f"an experiment of sweeps has a figure of its own: name it alone, got {', '.join(experiments)}")
    rows, page = [result.row for result in found], out / f"{experiments[0]}.md"
    if all(row["task"] == RECALL for row in rows):
        lines, figure = recall_table(rows), out / f"{experiments[0]}_by_state_size.png"
        plot_recall(rows, figure)
    else:
        lines, figure = accuracy_table(rows), out / f"{experiments[0]}_by_position.png"
        plot_accuracy_by_position(found, figure)
    write_atomically(page, ("\n".join(lines) + "\n").encode())
    return [page, figure]


def report_run(result: StoredResult) -> Run:
    """A run as a report has it."""
    row, curves = result.row, result.curves
    lines: dict[int, dict[str, float]] = {}
    for name, curve in curves["metrics"].items():
        for step, value in zip(curve["step"], curve["value"], strict=True):
            lines.setdefault(step, {"step": step})[name] = value
    # A run that diverged was not evaluated.
    facts, heads = row.get("evaluation"), curves.get("heads")
    return Run(
        Path(result.name),
        result.name,
        {name: value for section in row["config"].values() for name, value in section.items()},
        [lines[step] for step in sorted(lines) if "loss" in lines[step]],
        None if facts is None else Evaluation.of_file({**facts, **row, **curves}),
        None if heads is None else HeadTable(heads["quantities"], heads["tokens"], heads["data"]),
        row,
    )


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
        cells = [_accuracies(found.get((task, sweep))) for task in tasks]
        yield f"| {sweep} | {' | '.join(cells)} |"


def _accuracies(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "–"
    return ", ".join(_share(statistics.fmean(of_seeds)) for of_seeds in best_accuracies(row).values())


def _share(share: float) -> str:
    """Not rounded up to 100 unless it is 100."""
    return "100" if share == 1 else f"{min(99.9, 100 * share):.1f}"


def plot_accuracy_by_position(results: Sequence[StoredResult], path: Path) -> None:
    """A panel for each task, a line for each sweep: the mean over seeds.

    It is the accuracy by position in rows of the greatest length, or, for tasks with few labels, that by length.

    Args:
        path: PNG or SVG file to write; its folder is created.
    """
    rows = [result.row for result in results]
    curves = {result.name: result.curves for result in results}
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    styles = assign_styles((row["sweep"], LABELS.get(row["sweep"], row["sweep"])) for row in rows)
    figure, panels = make_panels(len(tasks), columns=min(COLUMNS, len(tasks)), sharey=True)
    for axes, task in zip(panels, tasks, strict=True):
        of_task = [row for row in rows if row["task"] == task]
        for row in of_task:
            curve, style = curves[row["run"]]["by_position"], styles[row["sweep"]]
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
    for axes in panels[::COLUMNS]:
        axes.set_ylabel("accuracy")
    finish(figure, panels, path)


def recall_table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of Markdown, the smallest state first: accuracies in percent, the mean over seeds ± their deviation."""
    shapes = list(dict.fromkeys(shape for row in rows for shape in row["by_shape"]))
    heads = ["model", "numbers of state", "bytes", "learning rate", "steps", "all rows", *shapes]
    yield f"| {' | '.join(heads)} |"
    yield "| --- " * len(heads) + "|"
    for row in sorted(rows, key=lambda row: (row["state_numbers"], row["run"])):
        overall, by_shape = best_recall(row)
        cells = [
            row["sweep"],
            f"{row['state_numbers']:,}",
            f"{row['state_bytes']:,}",
            f"{row['best_rate']:g}",
            f"{row['steps']:,}",
            _percent(overall),
            *(_percent(by_shape.get(shape, [])) for shape in shapes),
        ]
        yield f"| {' | '.join(cells)} |"
    for name, accuracy in PUBLISHED.items():
        blank = " |" * len(shapes)
        yield f"| {name} (published) | | about {PUBLISHED_BYTES:,} | | | {100 * accuracy:.0f} |{blank}"


def _percent(found: Sequence[float]) -> str:
    if not found:
        return "–"
    spread = f" ± {100 * statistics.stdev(found):.1f}" if len(found) > 1 else ""
    return f"{100 * statistics.fmean(found):.1f}{spread}"


def plot_recall(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Accuracy over all rows against bytes of state, a line for each kind of model.

    Softmax, whose state grows, is a horizontal line. Bars are the range over seeds.

    Args:
        path: PNG or SVG file to write; its folder is created.
    """
    series: dict[tuple[str, str], list[tuple[int, list[float]]]] = {}
    for row in rows:
        overall, _ = best_recall(row)
        series.setdefault(_kind(row), []).append((row["state_bytes"], overall))
    styles = recall_styles(series)
    figure, (axes,) = make_panels(1, width=7, height=4.4)
    for (variant, other), points in sorted(series.items()):
        points.sort()
        means = [statistics.fmean(found) for _, found in points]
        if not other:
            axes.axhline(max(means), linewidth=1, label=variant, **styles[variant, other].for_matplotlib)
            continue
        below = [mean - min(found) for mean, (_, found) in zip(means, points, strict=True)]
        above = [max(found) - mean for mean, (_, found) in zip(means, points, strict=True)]
        sizes, look = [size for size, _ in points], styles[variant, other].with_marker
        axes.errorbar(sizes, means, yerr=(below, above), capsize=2, label=f"{variant}, {other}", **look)
    for marker, (name, accuracy) in zip(PUBLISHED_MARKERS, PUBLISHED.items(), strict=True):
        look = {"marker": marker, "linestyle": "none", "markerfacecolor": "none", "color": "#777777"}
        axes.plot([PUBLISHED_BYTES], [accuracy], label=f"{name} (published: zoology)", **look)
    axes.set(xscale="log", xlabel="bytes of state in float32, all layers", ylabel="right answers", ylim=(-0.02, 1.02))
    axes.xaxis.set_major_locator(require("matplotlib.ticker", "report").LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(plain_numbers())
    axes.minorticks_off()
    finish(figure, [axes], path)


def recall_styles(kinds: Collection[tuple[str, str]]) -> dict[tuple[str, str], Style]:
    """The look of each kind of model (`_kind`): variants differ in color, all else in marker and dashes.

    Softmax models have the color of softmax, and differ in dashes alone.
    """
    softmax = sorted(variant for variant, other in kinds if not other)
    styles = {
        (variant, ""): replace(SOFTMAX, dash=dash) for variant, dash in zip(softmax, (SOFTMAX.dash, ()), strict=False)
    }
    variants = assign_styles((variant, LABELS.get(variant, variant)) for variant, other in kinds if other)
    # The shortest description is the usual model, which gets a solid line.
    others = sorted({other for _, other in kinds if other}, key=lambda other: (len(other), other))
    for variant, other in kinds:
        if other:
            number = others.index(other)
            dash, marker = DASHES[number % len(DASHES)], list(MARKERS)[number % len(MARKERS)]
            styles[variant, other] = replace(variants[variant], dash=dash, marker=marker)
    return styles


def _kind(row: Mapping[str, Any]) -> tuple[str, str]:
    """What kind of model it is, apart from its size: its variant, and what else tells it from others.

    For softmax the second is empty.
    """
    model = row["settings"]["model"]
    kind = {name: model.get(name) for name in ("mixer", "gating", "rotary")}
    if kind["mixer"] == "softmax":
        return ("softmax, unrotated" if kind["rotary"] == "none" else "softmax"), ""
    variant = next((name for name, fields in VARIANTS.items() if fields == kind), row["sweep"])
    others = [f"p = {model.get('power', 2)}"]
    if model.get("layers") == 1:
        others.append("one layer")
    if not model.get("short_conv"):
        others.append("no convolution")
    if "mlp_ratio" in model:
        units = round(model["mlp_ratio"] * model["width"])
        others.append("no MLP" if units <= 1 else f"MLP of {units}")
    return variant, ", ".join(others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", metavar="NAME", help="experiments, by name")
    parser.add_argument("--scale", default="small", help="by default %(default)s")
    parser.add_argument("--results", type=Path, help="folder of results; by default experiments/results/SCALE")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder for what is drawn")
    given = parser.parse_args()
    try:
        written = draw(given.names, given.results or Path("experiments/results") / given.scale, given.out)
    except UserError as error:
        parser.error(str(error))
    print(f"wrote {written[0]} and {len(written) - 1} more in {given.out}")


if __name__ == "__main__":
    main()
