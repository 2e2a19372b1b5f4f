"""Tables and figures of `sympow evaluate`: loss within each context, and probes of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sympow.check.timing import environment
from sympow.evaluate.evaluation_file import FILE, ModelEvaluation, contexts_up_to, write_evaluations
from sympow.extras import require
from sympow.report.figure_files import plot_loss_by_context, plot_loss_by_position, plot_probes


def print_evaluations(found: Mapping[str, ModelEvaluation], length: int, size: str) -> None:
    """Prints the average loss within each context, with a column for each model, and a table for each probe.

    Args:
        found: evaluations by the models' names.
        length: tokens of a sequence.
        size: numbers of sequences and documents, in words.
    """
    unit = common_unit(found)
    rows = [
        (f"{context:,}", [f"{one.losses.average(0, context):.4f}" for one in found.values()])
        for context in contexts_up_to(length)
    ]
    last = max(1, length // 8)
    rows.append((f"last {last:,}", [f"{one.losses.average(length - last):.4f}" for one in found.values()]))
    title = f"Average loss within a context ({unit}s), nats per {unit}, over {size}"
    _print_table(title, "context", list(found), rows)
    recalls = {name: one.recall for name, one in found.items() if one.recall}
    if recalls:
        points = next(iter(recalls.values()))
        rows = [
            (
                f"{point.pairs} pairs, {point.nearest} to {point.farthest} {unit}s ago",
                [f"{100 * one[n].accuracy:.0f} %  {one[n].loss:.2f}" for one in recalls.values()],
            )
            for n, point in enumerate(points)
        ]
        title = f"Associative recall: accuracy and loss (a random guess among the values has {points[0].guess:.2f})"
        _print_table(title, "", list(recalls), rows)
    keys = {name: one.passkey for name, one in found.items() if one.passkey}
    if keys:
        rows = [
            (
                f"{point.distance:,}",
                [f"{100 * one[n].accuracy:.0f} %  {one[n].loss:.2f}, {one[n].control:.2f}" for one in keys.values()],
            )
            for n, point in enumerate(next(iter(keys.values())))
        ]
        _print_table(
            "Passkey: accuracy, loss of the key, loss of a key that the text does not contain",
            f"{unit}s ago",
            list(keys),
            rows,
        )


def save_evaluations(found: Mapping[str, ModelEvaluation], facts: dict[str, Any], folder: Path) -> list[Path]:
    """Writes evaluation.json and the figures, and returns their paths."""
    unit = common_unit(found)
    write_evaluations(folder / FILE, found, {**facts, "environment": environment(facts["device"])})
    written = [folder / FILE, folder / "loss_by_context.png", folder / "loss_by_position.png"]
    contexts = {one.trained_at for one in found.values()}
    trained_at = contexts.pop() if len(contexts) == 1 else None
    plot_loss_by_context(
        {name: one.losses.by_context(contexts_up_to(len(one.losses.mean), 2)) for name, one in found.items()},
        trained_at,
        written[1],
        unit,
    )
    losses = {name: one.losses.mean for name, one in found.items()}
    plot_loss_by_position(losses, trained_at, written[2], unit)
    if any(one.recall or one.passkey for one in found.values()):
        written.append(folder / "probes.png")
        plot_probes(
            {name: one.recall for name, one in found.items() if one.recall},
            {name: one.passkey for name, one in found.items() if one.passkey},
            written[-1],
            unit,
        )
    return written


def common_unit(found: Mapping[str, ModelEvaluation]) -> str:
    """What a token is called: "byte" if it is one for every model, otherwise "token"."""
    units = {one.unit for one in found.values()}
    return units.pop() if len(units) == 1 else "token"


def _print_table(title: str, first: str, names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> None:
    console = require("rich.console", "cli").Console()
    table = require("rich.table", "cli").Table(title=title, title_justify="left")
    table.add_column(first, justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for label, cells in rows:
        table.add_row(label, *cells)
    console.print(table)
