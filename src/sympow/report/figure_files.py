"""Figures of `sympow evaluate` and `sympow bench`, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sympow.check.operator import Row, Setting, describe
from sympow.check.timing import Timing
from sympow.evaluate import PasskeyPoint, RecallPoint
from sympow.evaluate.evaluation_file import averages_over_ranges
from sympow.extras import require
from sympow.report.plotting import (
    Style,
    assign_styles,
    drawn_contexts,
    finish,
    make_panels,
    mark_training_context,
    method_styles,
    set_context_ticks,
    set_powers_of_two,
    set_title,
)

# A model has one color in both panels; the marker tells the probe and its number of pairs.
PAIR_MARKERS, PASSKEY_MARKER = "osD^vX*<>", "P"


def plot_time_against_context(timings: Mapping[str, Mapping[int, Timing]], title: str, path: Path) -> None:
    """Milliseconds per call against context, one line per method, error bars from the fastest to the slowest run.

    Args:
        timings: by method, then by context.
        title: what was measured, and on which device.
        path: PNG or SVG file to write; its folder is created.
    """
    styles = method_styles(timings)
    figure, (axes,) = make_panels(1, width=7, height=4.2)
    for method, by_context in timings.items():
        contexts = sorted(by_context)
        medians = [1e3 * by_context[c].median for c in contexts]
        below = [1e3 * (by_context[c].median - by_context[c].fastest) for c in contexts]
        above = [1e3 * (by_context[c].slowest - by_context[c].median) for c in contexts]
        axes.errorbar(contexts, medians, yerr=(below, above), capsize=2, label=method, **styles[method].with_marker)
    axes.set(yscale="log", xlabel="context (tokens)", ylabel="time per call (ms)")
    set_title(axes, title)
    set_context_ticks(axes, [context for by_context in timings.values() for context in by_context])
    ticker = require("matplotlib.ticker", "report")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    finish(figure, [axes], path)


def plot_bench_rows(rows: Sequence[Row], setting: Setting, path: Path) -> None:
    """Time against context: of forward and backward together where that was timed, otherwise of forward.

    Args:
        path: PNG or SVG file to write; its folder is created.
    """
    backward = any(row.forward_and_backward for row in rows)
    timings: dict[str, dict[int, Timing]] = {}
    for row in rows:
        timings.setdefault(row.method, {})[row.context] = row.forward_and_backward or row.forward
    title = f"{'forward and backward' if backward else 'forward'}, {describe(setting)}"
    plot_time_against_context(timings, title, path)


def plot_loss_by_position(
    losses: Mapping[str, Tensor], trained_at: int | None, path: Path, unit: str = "token"
) -> None:
    """Loss against position, averaged over growing ranges of positions.

    Args:
        losses: by model: at each position, (length,).
        trained_at: training context, drawn as a dashed line; None if it is unknown or differs between models.
        path: PNG or SVG file to write; its folder is created.
        unit: the name of one token, "token" or "byte".
    """
    curves = {name: dict(zip(*averages_over_ranges(mean.tolist()), strict=True)) for name, mean in losses.items()}
    figure, (axes,) = make_panels(1, width=5, height=3.7)
    _draw_losses(axes, curves, trained_at, markers=False)
    axes.set(xlabel=f"position ({unit}s)", ylabel=f"loss (nats per {unit})")
    set_title(axes, "held-out documents")
    finish(figure, [axes], path)


def plot_loss_by_context(
    curves: Mapping[str, Mapping[int, float]], trained_at: int | None, path: Path, unit: str = "token"
) -> None:
    """Average loss over each evaluation context (paper Fig. 2).

    Args:
        curves: by model, then by context.
        trained_at, path, unit: as in `plot_loss_by_position`.
    """
    figure, (axes,) = make_panels(1, width=6, height=3.7)
    drawn = {name: drawn_contexts(by_context, trained_at or 1) for name, by_context in curves.items()}
    _draw_losses(axes, drawn, trained_at, markers=True)
    axes.set(xlabel=f"evaluation context ({unit}s)", ylabel=f"average loss (nats per {unit})")
    finish(figure, [axes], path)


def _draw_losses(
    axes: Any, curves: Mapping[str, Mapping[Any, float]], trained_at: int | None, *, markers: bool
) -> None:
    for name, style in assign_styles((name, name) for name in curves).items():
        look = style.with_marker if markers else style.for_matplotlib
        axes.plot(list(curves[name]), list(curves[name].values()), label=name, **look)
    if trained_at is not None:
        mark_training_context(axes, trained_at)
    set_powers_of_two(axes)


def plot_probes(
    recall: Mapping[str, Sequence[RecallPoint]],
    passkey: Mapping[str, Sequence[PasskeyPoint]],
    path: Path,
    unit: str = "token",
) -> None:
    """Probes of the state: accuracy of associative recall, and how much a passkey that was stated lowers its loss.

    Args:
        recall, passkey: by model; either can be empty.
        path: PNG or SVG file to write; its folder is created.
        unit: the name of one token, "token" or "byte".
    """
    styles = assign_styles((name, name) for name in [*recall, *passkey])
    kinds: list[tuple[Callable[..., None], Mapping[str, Any]]] = [(_draw_recall, recall), (_draw_passkey, passkey)]
    drawn = [(draw, points) for draw, points in kinds if points]
    figure, panels = make_panels(len(drawn), width=5.5, height=3.7)
    for axes, (draw, points) in zip(panels, drawn, strict=True):
        draw(axes, points, styles)
        set_powers_of_two(axes)
        axes.set_xlabel(f"distance ({unit}s)")
    finish(figure, panels, path)


def _draw_recall(axes: Any, recall: Mapping[str, Sequence[RecallPoint]], styles: Mapping[str, Style]) -> None:
    for name, points in recall.items():
        for number, pairs in enumerate(sorted({point.pairs for point in points})):
            here = [point for point in points if point.pairs == pairs]
            centres = [(point.nearest * point.farthest) ** 0.5 for point in here]
            look = {**styles[name].with_marker, "marker": PAIR_MARKERS[number % len(PAIR_MARKERS)]}
            axes.plot(centres, [point.accuracy for point in here], label=f"{name}, {pairs} pairs", **look)
    axes.set(ylim=(-0.02, 1.02), ylabel="accuracy")
    set_title(axes, "associative recall")


def _draw_passkey(axes: Any, passkey: Mapping[str, Sequence[PasskeyPoint]], styles: Mapping[str, Style]) -> None:
    for name, points in passkey.items():
        gained = [point.control - point.loss for point in points]
        look = {**styles[name].with_marker, "marker": PASSKEY_MARKER}
        axes.plot([point.distance for point in points], gained, label=f"{name}, passkey", **look)
    axes.axhline(0, color="#888888", linewidth=0.8)
    axes.set_ylabel("loss reduction (nats per key)")
    set_title(axes, "passkey")
