"""Two figures that stand by themselves: loss by position, and time against context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from sympow.bench.operator import Row, Setting, describe
from sympow.bench.timing import Timing
from sympow.evaluate.results import averages_over_ranges
from sympow.extras import require
from sympow.report.drawing import (
    add_legend,
    make_panels,
    plain_numbers,
    pyplot,
    save_figure,
    set_context_ticks,
    set_title,
    tidy,
)
from sympow.report.style import assign_styles, method_styles


def plot_loss_by_position(panels: Mapping[str, Mapping[str, Tensor]], path: Path, unit: str = "token") -> None:
    """Loss against how much was read before, one panel beside the other, averaged over growing ranges of positions.

    Args:
        panels: by title, then by variant: losses at each position, (length,).
        path: PNG or SVG file to write; its folder is made.
        unit: what a token is: "token" or "byte".
    """
    styles = assign_styles((name, name) for curves in panels.values() for name in curves)
    figure, axes_of_panels = make_panels(len(panels), width=5, height=3.7, sharey=True)
    for axes, (title, curves) in zip(axes_of_panels, panels.items(), strict=True):
        for name, losses in curves.items():
            centres, means = averages_over_ranges(losses.tolist())
            axes.plot(centres, means, label=name, **styles[name].for_matplotlib)
        axes.set(xscale="log", xlabel=f"position ({unit}s)")
        axes.xaxis.set_major_formatter(plain_numbers())
        set_title(axes, title)
        tidy(axes)
    axes_of_panels[0].set_ylabel(f"loss (nats per {unit})")
    add_legend(figure, axes_of_panels)
    save_figure(figure, path)
    pyplot().close(figure)


def plot_time_against_context(timings: Mapping[str, Mapping[int, Timing]], title: str, path: Path) -> None:
    """Milliseconds a call against context, one line per method, bars from the fastest to the slowest run.

    Args:
        timings: by method, then by context.
        title: what was measured, on what.
        path: PNG or SVG file to write; its folder is made.
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
    ticker = require("matplotlib.ticker", "plot")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_locator(ticker.NullLocator())
    tidy(axes)
    add_legend(figure, [axes])
    save_figure(figure, path)
    pyplot().close(figure)


def plot_bench_rows(rows: Sequence[Row], setting: Setting, path: Path) -> None:
    """Writes a figure of time against context: of forward and backward together where that was timed.

    Args:
        path: PNG or SVG file to write; its folder is made.
    """
    backward = any(row.forward_and_backward for row in rows)
    timings: dict[str, dict[int, Timing]] = {}
    for row in rows:
        timings.setdefault(row.method, {})[row.context] = row.forward_and_backward or row.forward
    title = f"{'forward and backward' if backward else 'forward'}, {describe(setting)}"
    plot_time_against_context(timings, title, path)
