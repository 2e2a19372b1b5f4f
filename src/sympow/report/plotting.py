"""What all plots share: the look of each series, and matplotlib panels, legends, ticks and files.

Series colors can be told apart under each of the three kinds of color blindness and stand out from the page
(tests/report/test_plotting.py measures both); dash patterns and markers repeat the distinction.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from sympow.extras import require
from sympow.files import naming

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.2
MOST_COLUMNS = 4
POINTS_PER_INCH = 72
# Average width of a character of matplotlib's default font, in units of the font size.
CHARACTER = 0.62
TITLE_SIZE = 10
TRAINING_CONTEXT = "#b00020"
SHORT_PART = 16
T = TypeVar("T")


@dataclass(frozen=True)
class Style:
    """The look of one series.

    Attributes:
        light: color on a light page.
        dark: color on a dark page.
        dash: lengths of dashes and gaps in pixels; empty for a solid line.
        marker: circle, square, diamond, triangle, cross or star.
    """

    light: str
    dark: str
    dash: tuple[int, ...] = ()
    marker: str = "circle"

    @property
    def for_matplotlib(self) -> dict[str, object]:
        """Arguments of `Axes.plot`, without the marker."""
        return {"color": self.light, "linestyle": (0, tuple(x / 2 for x in self.dash)) if self.dash else "-"}

    @property
    def with_marker(self) -> dict[str, object]:
        """Arguments of `Axes.plot` for lines of few points, with the marker."""
        return {**self.for_matplotlib, "marker": MARKERS[self.marker][0], "markersize": 4}


LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
# The paper's four variants and the ablation of §4.2.1 have fixed styles; all other series take theirs from OTHERS.
VARIANTS = {
    "softmax": Style("#8c8c8c", "#8b858c", (8, 3), "square"),
    "sympow": Style("#c48a13", "#f4ab09", marker="triangle"),
    "sympow + gating": Style("#8e2c0b", "#e3543c", marker="diamond"),
    "conformal": Style("#0d8ee3", "#99b7f7", marker="circle"),
    "sympow + rotation": Style("#5b0681", "#c046f2", (2, 3), "cross"),
}
OTHERS = (Style("#0a332d", "#55fc9a", marker="star"), Style("#2a22e0", "#eed4dd", marker="square"))
# Patterns that differ in kind and not just in length: solid, dashes, dots, dash-dot, dash-dot-dot.
DASHES: tuple[tuple[int, ...], ...] = ((), (8, 3), (2, 3), (8, 3, 2, 3), (8, 3, 2, 3, 2, 3))
# By the names of styles: what matplotlib and what Plotly calls them.
MARKERS = {
    "circle": ("o", "circle"),
    "square": ("s", "square"),
    "diamond": ("D", "diamond"),
    "triangle": ("^", "triangle-up"),
    "cross": ("x", "x"),
    "star": ("*", "star"),
}

# Methods that `sympow bench` times, without the name of the backend.
METHODS = {
    "softmax": VARIANTS["softmax"],
    "softmax, cuDNN": VARIANTS["softmax"],
    "softmax, flash": VARIANTS["sympow + rotation"],
    "attention form": VARIANTS["sympow"],
    "chunked form": VARIANTS["conformal"],
    "retention": replace(VARIANTS["sympow + gating"], dash=(8, 3, 2, 3)),
    "fla": replace(OTHERS[0], dash=(8, 3, 2, 3, 2, 3)),
}
# A form keeps its color and marker on every backend.
BACKEND_DASHES = {"auto": (), "triton": (), "torch": (8, 3)}


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A distinct style for each method that `sympow bench` times, by name ("chunked form, triton")."""
    styles: dict[str, Style] = {}
    others = []
    for method in methods:
        kind, _, backend = method.partition(", ")
        style = METHODS.get(method) or METHODS.get(kind)
        if style is not None and backend in BACKEND_DASHES:
            style = replace(style, dash=BACKEND_DASHES[backend])
        if style is None or style in styles.values():
            others.append(method)
        else:
            styles[method] = style
    spare = [
        replace(style, dash=dash)
        for dash in reversed(DASHES)
        for style in (*OTHERS, *VARIANTS.values())
        if replace(style, dash=dash) not in styles.values()
    ]
    styles |= dict(zip(others, spare, strict=False))
    return styles


def assign_styles(series: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """A style for every series, by label. The first series of a variant gets the variant's style.

    Args:
        series: labels and variants, in display order.
    """
    styles: dict[str, Style] = {}
    taken: set[str] = set()
    pool = [
        Style(style.light, style.dark, dash, style.marker)
        for dash in DASHES
        for style in (*OTHERS, *VARIANTS.values())
        # Styles of variants are reserved for them.
        if (style in OTHERS or dash) and (style.light, dash) not in {(s.light, s.dash) for s in VARIANTS.values()}
    ]
    spare = 0
    for label, variant in dict.fromkeys(series):
        if variant in VARIANTS and variant not in taken:
            taken.add(variant)
            styles[label] = VARIANTS[variant]
        else:
            styles[label] = pool[spare % len(pool)]
            spare += 1
    return styles


def pyplot() -> Any:
    """matplotlib.pyplot with a backend that needs no display."""
    require("matplotlib", "report").use("agg")
    return require("matplotlib.pyplot", "report")


def make_panels(
    count: int,
    *,
    columns: int | None = None,
    width: float = PANEL_WIDTH,
    height: float = PANEL_HEIGHT,
    sharey: bool = False,
) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row; the last row may be incomplete.

    Args:
        columns: panels in a row; None puts all panels in one row.
        width, height: inches of one panel, without the legend.
    """
    columns = columns or count
    rows = -(-count // columns)
    figure, grid = pyplot().subplots(
        rows, columns, figsize=(width * columns, height * rows), sharey=sharey, squeeze=False, layout="constrained"
    )
    panels = list(grid.flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def add_legend(figure: Any, panels: Iterable[Any]) -> None:
    """Adds one legend for all panels below them, in as many columns as fit, and enlarges the figure by its height."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    for most in range(min(MOST_COLUMNS, len(handles)), 0, -1):
        # No more columns than the rows need: four entries make two rows of two, not of three and one.
        columns = -(-len(handles) // -(-len(handles) // most))
        legend = figure.legend(
            handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False
        )
        box = legend.get_window_extent(figure.canvas.get_renderer())
        if box.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, box.width / figure.dpi), height + box.height / figure.dpi)


def set_title(axes: Any, title: str) -> None:
    """Sets a title and wraps it to the width of one column of panels."""
    columns = axes.get_gridspec().ncols
    width = axes.figure.get_size_inches()[0] / columns
    characters = int(width * POINTS_PER_INCH / (CHARACTER * TITLE_SIZE))
    axes.set_title(textwrap.fill(title, characters), fontsize=TITLE_SIZE)


def set_context_ticks(axes: Any, contexts: Sequence[int]) -> None:
    """Makes the x axis logarithmic with a tick at every context; labels that would overlap are omitted."""
    contexts = sorted(set(contexts))
    axes.set_xscale("log", base=2)
    if len(contexts) == 1:
        axes.set_xlim(contexts[0] / 2, contexts[0] * 2)
    low, high = map(math.log, axes.get_xlim())
    points = _points_across(axes)
    size = pyplot().rcParams["font.size"]
    labels: dict[int, str] = {}
    edge = math.inf
    # From the longest context down, so that its label is always there.
    for context in reversed(contexts):
        text = f"{context:,}"
        middle = (math.log(context) - low) / (high - low) * points
        half = CHARACTER * size * len(text) / 2
        fits = middle + half <= edge
        labels[context] = text if fits else ""
        if fits:
            edge = middle - half - size / 2
    axes.set_xticks(contexts, [labels[context] for context in contexts])
    axes.minorticks_off()


def set_powers_of_two(axes: Any) -> None:
    """Makes the x axis logarithmic with ticks at powers of two around the lines drawn, as many as have room."""
    axes.set_xscale("log", base=2)
    low, high = axes.dataLim.intervalx
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    widest = CHARACTER * pyplot().rcParams["font.size"] * len(f"{2**last:,}  ")
    stride = max(1, math.ceil(widest * (last - first) / _points_across(axes)))
    # From the highest down, so that its label is always there.
    ticks = [2**n for n in range(last, first - 1, -stride)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()


def _points_across(axes: Any) -> float:
    """Width of a panel in points: axis labels and the space between panels take about a fifth of its column."""
    return 0.8 * axes.figure.get_size_inches()[0] / axes.get_gridspec().ncols * POINTS_PER_INCH


def drawn_contexts(by_context: Mapping[int, T], trained_at: int) -> Mapping[int, T]:
    """Leaves out contexts shorter than 1/16 of the training context, whose averages are noise, if there are others."""
    return {context: x for context, x in by_context.items() if context * SHORT_PART >= trained_at} or by_context


def mark_training_context(axes: Any, context: int) -> None:
    """Draws the training context as a line, for losses that go beyond it."""
    axes.axvline(context, color=TRAINING_CONTEXT, linestyle="--", linewidth=1, label=f"trained at {context:,}")


def plain_numbers() -> Any:
    """A formatter of tick labels such as 16,384 instead of 2¹⁴ or 1.6e4."""
    return require("matplotlib.ticker", "report").StrMethodFormatter("{x:,.0f}")


def tidy(axes: Any) -> None:
    """Adds grid lines and removes the top and the right spine."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def finish(figure: Any, panels: Sequence[Any], path: Path) -> None:
    """Tidies the panels, adds their legend, writes the file and closes the figure.

    Args:
        path: PNG or SVG file to write; its folder is created.
    """
    for axes in panels:
        tidy(axes)
    add_legend(figure, panels)
    save_figure(figure, path)
    pyplot().close(figure)


def save_figure(figure: Any, path: Path, metadata: dict[str, Any] | None = None) -> None:
    """Writes a PNG or an SVG, by the path's suffix, and creates its folder. The figure stays open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path):
        figure.savefig(path, dpi=150, metadata=metadata)
