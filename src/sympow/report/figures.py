"""Figures, drawn with matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from sympow.extras import require
from sympow.report.evaluations import averages_over_ranges
from sympow.report.style import VARIANTS
from sympow.report.timing import Timing

# One colour per method, the same in every figure; distinguishable without colour vision by lightness and marker too.
STYLES = {
    "softmax": {"color": "#444444", "marker": "s", "linestyle": "--"},
    "attention form": {"color": "#d1752b", "marker": "o", "linestyle": "-"},
    "chunked form": {"color": "#1764ab", "marker": "D", "linestyle": "-"},
    "retention": {"color": "#7a4fa3", "marker": "^", "linestyle": "--"},
    "fla": {"color": "#3d8b4f", "marker": "v", "linestyle": "--"},
}


def plot_loss_by_position(panels: Mapping[str, Mapping[str, Tensor]], path: Path) -> None:
    """Loss against how much was read before, one panel beside the other, averaged over growing ranges of positions.

    Args:
        panels: by title, then by variant: losses at each position, (length,).
        path: PNG or SVG file to write; its folder is made.
    """
    require("matplotlib", "plot").use("agg")
    pyplot = require("matplotlib.pyplot", "plot")
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels), 4), layout="constrained", sharey=True, squeeze=False
    )
    for axes, (title, curves) in zip(grid[0], panels.items(), strict=True):
        for name, losses in curves.items():
            centres, means = averages_over_ranges(losses.tolist())
            axes.plot(centres, means, label=name, **(VARIANTS[name].for_matplotlib if name in VARIANTS else {}))
        axes.set(xscale="log", xlabel="position (tokens)", title=title)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    grid[0][0].set_ylabel("loss (nats per token)")
    grid[0][-1].legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot_time_against_context(timings: Mapping[str, Mapping[int, Timing]], title: str, path: Path) -> None:
    """Milliseconds a call against context, one line per method, bars from the fastest to the slowest run.

    Args:
        timings: by method, then by context.
        title: what was measured, on what.
        path: PNG or SVG file to write; its folder is made.
    """
    require("matplotlib", "plot").use("agg")
    pyplot = require("matplotlib.pyplot", "plot")
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for method, by_context in timings.items():
        contexts = sorted(by_context)
        medians = [1e3 * by_context[c].median for c in contexts]
        below = [1e3 * (by_context[c].median - by_context[c].fastest) for c in contexts]
        above = [1e3 * (by_context[c].slowest - by_context[c].median) for c in contexts]
        style = STYLES.get(method.partition(",")[0], {})
        axes.errorbar(contexts, medians, yerr=(below, above), capsize=2, markersize=4, label=method, **style)
    axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel="time per call (ms)", title=title)
    ticks = sorted({context for by_context in timings.values() for context in by_context})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=30, ha="right")
    axes.minorticks_off()
    ticker = require("matplotlib.ticker", "plot")
    axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
