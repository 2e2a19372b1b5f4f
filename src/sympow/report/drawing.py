"""What all figures share: panels, a legend that fits below them, tick labels that do not collide, files."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sympow.extras import require

PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.2
MOST_COLUMNS = 4
POINTS_PER_INCH = 72
# Width of an average character of matplotlib's default font, in units of the font size.
CHARACTER = 0.62
TITLE_SIZE = 10


def pyplot() -> Any:
    """matplotlib.pyplot with a backend that needs no display."""
    require("matplotlib", "plot").use("agg")
    return require("matplotlib.pyplot", "plot")


def make_panels(
    count: int,
    *,
    columns: int | None = None,
    width: float = PANEL_WIDTH,
    height: float = PANEL_HEIGHT,
    sharey: bool = False,
) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row; places that are left over in the last row stay empty.

    Args:
        columns: panels in a row; None: all of them.
        width, height: inches of one panel. The legend comes on top of the height.
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
    """One legend for all panels, below them, in as many columns as fit. The figure grows to hold it."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    for most in range(min(MOST_COLUMNS, len(handles)), 0, -1):
        # No more columns than the rows need: four entries stand two by two and not three by one.
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
    """A title that is broken into lines where it would be wider than its figure's share for one column of panels."""
    columns = axes.get_gridspec().ncols
    width = axes.figure.get_size_inches()[0] / columns
    characters = int(width * POINTS_PER_INCH / (CHARACTER * TITLE_SIZE))
    axes.set_title(textwrap.fill(title, characters), fontsize=TITLE_SIZE)


def set_context_ticks(axes: Any, contexts: Sequence[int], base: int = 2) -> None:
    """A logarithmic axis with a tick at every context; a label is left out where it would touch the next one."""
    contexts = sorted(set(contexts))
    axes.set_xscale("log", base=base)
    if len(contexts) == 1:
        axes.set_xlim(contexts[0] / 2, contexts[0] * 2)
    low, high = map(math.log, axes.get_xlim())
    columns = axes.get_gridspec().ncols
    # Axis labels and the room between panels take about a fifth.
    points = 0.8 * axes.figure.get_size_inches()[0] / columns * POINTS_PER_INCH
    size = pyplot().rcParams["font.size"]
    labels: dict[int, str] = {}
    edge = math.inf
    # From the longest context down: it is the one that readers look for.
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


def plain_numbers() -> Any:
    """Tick labels like 16,384 instead of 2¹⁴ or 1.6e4."""
    return require("matplotlib.ticker", "plot").StrMethodFormatter("{x:,.0f}")


def tidy(axes: Any) -> None:
    """Grid lines, and no frame at the top and on the right."""
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def save_figure(figure: Any, path: Path, metadata: dict[str, Any] | None = None) -> None:
    """Writes a PNG or an SVG, by the path's ending; its folder is made. The figure stays open."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata=metadata)
