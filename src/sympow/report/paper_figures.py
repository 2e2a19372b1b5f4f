"""The paper's figures from training runs, drawn with matplotlib as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sympow.evaluate.head_statistics import Matrix, quantity_labels
from sympow.extras import require
from sympow.report.curves import curve, mean_and_range, median_speed, smooth
from sympow.report.grouping import Group, Spread, by_power, styles_of, unit_of
from sympow.report.plotting import (
    Style,
    add_legend,
    drawn_contexts,
    make_panels,
    mark_training_context,
    plain_numbers,
    pyplot,
    save_figure,
    set_context_ticks,
    set_powers_of_two,
    set_title,
    tidy,
)
from sympow.report.run_collection import Run

FORMATS = ("png", "svg")
# Curves are smoothed over 1/20 of their steps; the y range ignores the first 1/10 of them.
SMOOTHED_PART = 20
EARLY_PART = 10
# Color maps of heat maps: a sequential one and a diverging one.
GROWING, AROUND_ONE = "cividis", "PRGn"
MISSING = "#d9d9d9"
# Cells show their values in maps of at most so many columns, where numbers of five digits have room.
MOST_VALUES, VALUE_SIZE = 8, 7


def draw_figures(groups: Sequence[Group], folder: Path, report: Callable[[int, int], None] | None = None) -> list[Path]:
    """Writes every figure for which there is data, as PNG and SVG.

    Args:
        report: called after each figure with the number of figures drawn and their total.

    Returns:
        paths of the files.
    """
    written = []
    # SVG files keep text as text, and the same data gives the same file.
    with pyplot().rc_context({"svg.fonttype": "none", "svg.hashsalt": "sympow", "font.size": 9}):
        figures = list(_figures(groups))
        for number, (name, draw) in enumerate(figures, start=1):
            figure = draw()
            for suffix in FORMATS:
                path = folder / f"{name}.{suffix}"
                save_figure(figure, path, {"Date": None} if suffix == "svg" else None)
                written.append(path)
            pyplot().close(figure)
            if report is not None:
                report(number, len(figures))
    return written


def _figures(groups: Sequence[Group]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Names of figures, and functions that draw them."""
    panels = by_power(groups)
    unit = unit_of(groups)
    how: dict[str, Any] = {"styles": styles_of(groups), "unit": unit}
    against_context = {
        "final_loss_by_training_context": (f"training loss (nats per {unit})", lambda group: group.final_loss, False),
        "throughput_by_training_context": (f"training speed ({unit}s per second)", _speed, True),
    }
    for name, (label, number, from_zero) in against_context.items():
        known = {title: [g for g in members if number(g)] for title, members in panels.items()}
        known = {title: members for title, members in known.items() if members}
        # One training context is no axis: the table of final losses has the numbers.
        if len({g.context for members in known.values() for g in members}) > 1:
            yield name, partial(_against_context, known, number, label, from_zero=from_zero, **how)
    for title, members in panels.items():
        evaluated = [g for g in members if any(run.evaluation for run in g.runs)]
        for context in sorted({g.context for g in evaluated}):
            here = [g for g in evaluated if g.context == context]
            name = f"loss_by_evaluation_context{_slug(title)}_trained_at_{context}"
            yield name, partial(_beyond_training, here, **how)
        yield f"training_curves{_slug(title)}", partial(_training_curves, members, **how)
    for group in groups:
        run = next((run for run in group.runs if run.heads and run.heads.quantities), None)
        if run is not None and run.heads is not None:
            yield f"heads/{run.name.replace('/', '_')}", partial(_heads, group, run, run.heads.quantities)


def _speed(group: Group) -> Spread | None:
    return Spread.of(median_speed(run) for run in group.runs)


def _against_context(
    panels: Mapping[str, Sequence[Group]],
    number: Callable[[Group], Spread | None],
    label: str,
    *,
    from_zero: bool,
    styles: Mapping[str, Style],
    unit: str,
) -> Any:
    """A number against the training context, a panel per power, error bars over the range of seeds (paper Fig. 1)."""
    figure, axes_of_panels = make_panels(len(panels), sharey=True)
    for axes, members in zip(axes_of_panels, panels.values(), strict=True):
        for series in dict.fromkeys(g.series for g in members):
            points = [(g.context, found) for g in members if g.series == series and (found := number(g))]
            points.sort(key=lambda point: point[0])
            contexts, spreads = [x for x, _ in points], [spread for _, spread in points]
            means = [s.mean for s in spreads]
            bars = [[s.mean - s.low for s in spreads], [s.high - s.mean for s in spreads]]
            ranges = bars if any(s.count > 1 for s in spreads) else None
            axes.errorbar(contexts, means, yerr=ranges, label=series, capsize=2, **styles[series].with_marker)
        set_context_ticks(axes, [g.context for g in members])
        axes.set_xlabel(f"training context ({unit}s)")
        if from_zero:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(plain_numbers())
    axes_of_panels[0].set_ylabel(label)
    return _finished(figure, axes_of_panels, list(panels))


def _beyond_training(groups: Sequence[Group], styles: Mapping[str, Style], unit: str) -> Any:
    """Average loss over evaluation contexts, all series on one scale (paper Fig. 2)."""
    figure, (axes,) = make_panels(1, width=7, height=4.2)
    for group in groups:
        found = mean_and_range([run.evaluation.by_context for run in group.runs if run.evaluation])
        _line_with_range(axes, drawn_contexts(found, group.context), group.series, styles[group.series])
    mark_training_context(axes, groups[0].context)
    set_powers_of_two(axes)
    axes.set(xlabel=f"evaluation context ({unit}s)", ylabel=f"average loss (nats per {unit})")
    return _finished(figure, [axes])


def _training_curves(groups: Sequence[Group], styles: Mapping[str, Style], unit: str) -> Any:
    """Loss against steps, a panel per training context, two to a row (paper Figs. 3 and 4)."""
    contexts = sorted({g.context for g in groups})
    figure, panels = make_panels(len(contexts), columns=min(2, len(contexts)))
    for axes, context in zip(panels, contexts, strict=True):
        late = []
        for group in (g for g in groups if g.context == context):
            curves = []
            for run in group.runs:
                found = curve(run, "loss")
                curves.append(dict(zip(found.steps, smooth(found, run.steps / SMOOTHED_PART), strict=True)))
            joined = mean_and_range(curves)
            _line_with_range(axes, joined, group.series, styles[group.series])
            late += [x for step, found in joined.items() if step >= max(joined) / EARLY_PART for x in found]
        # Seeds that log at different steps, or of which one has just begun, may have no step in common.
        if late:
            # The loss falls so far during the first steps that later differences would be invisible.
            room = 0.05 * (max(late) - min(late)) or 0.05
            axes.set_ylim(min(late) - room, max(late) + room)
        axes.set(xlabel="step", ylabel=f"training loss (nats per {unit})")
        axes.xaxis.set_major_locator(_whole_numbers(6))
        axes.xaxis.set_major_formatter(plain_numbers())
    return _finished(figure, panels, [f"training context {context:,}" for context in contexts])


def _finished(figure: Any, panels: Sequence[Any], titles: Sequence[str] = ()) -> Any:
    """The figure with grid lines, a legend, and titles of its panels, which have letters if there are several."""
    for axes in panels:
        tidy(axes)
    for place, (axes, title) in enumerate(zip(panels, titles, strict=False)):
        set_title(axes, f"({chr(ord('a') + place)}) {title}".rstrip() if len(panels) > 1 else title)
    add_legend(figure, panels)
    return figure


def _heads(group: Group, run: Run, quantities: Mapping[str, Matrix]) -> Any:
    """Heat maps of layers against heads."""
    # At most three in a row; four make two rows of two.
    rows = -(-len(quantities) // 3)
    figure, panels = make_panels(len(quantities), columns=-(-len(quantities) // rows), width=3.8)
    colors = require("matplotlib.colors", "report")
    labels = quantity_labels(run.unit)
    for axes, (name, matrix) in zip(panels, quantities.items(), strict=True):
        width = max(map(len, matrix))
        cells = [
            [float("nan") if x is None else x for x in row] + [float("nan")] * (width - len(row)) for row in matrix
        ]
        known = [x for row in cells for x in row if x == x and x > 0]
        norm: Any = None
        if name.startswith("half_life") and known:
            norm = colors.LogNorm(min(known), max(max(known), min(known) * 1.01))
        elif name == "beta_mean":
            norm = colors.Normalize(0, 2)
        image = axes.imshow(cells, aspect="auto", norm=norm, cmap=AROUND_ONE if name == "beta_mean" else GROWING)
        bar = figure.colorbar(image, ax=axes)
        if isinstance(norm, colors.LogNorm):
            # Powers of ten alone would be one tick, or none, if half-lives differ little.
            bar.set_ticks([norm.vmin * (norm.vmax / norm.vmin) ** (n / 4) for n in range(5)])
        bar.ax.yaxis.set_major_formatter(require("matplotlib.ticker", "report").FuncFormatter(lambda x, _: _short(x)))
        bar.ax.minorticks_off()
        if width <= MOST_VALUES:
            _write_values(axes, image, cells)
        columns = "rotated pair" if name == "rate_change" else "head"
        axes.set_facecolor(MISSING)
        if name.startswith("half_life") and any(x is None for row in matrix for x in row):
            columns += " (gray: never forgets)"
        axes.set(xlabel=columns, ylabel="layer")
        axes.xaxis.set_major_locator(_whole_numbers(10))
        axes.yaxis.set_major_locator(_whole_numbers(12))
        set_title(axes, labels.get(name, name))
    figure.suptitle(f"{group.series}, training context {group.context:,}, seed {run.settings['seed']}", wrap=True)
    return figure


def _write_values(axes: Any, image: Any, cells: Sequence[Sequence[float]]) -> None:
    """Writes the numbers of a heat map into its cells."""
    for row, values in enumerate(cells):
        for column, x in enumerate(values):
            if x == x:
                red, green, blue, _ = image.cmap(image.norm(x))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                axes.text(column, row, _short(x), ha="center", va="center", color=ink, fontsize=VALUE_SIZE)


def _short(x: float) -> str:
    """Three digits: 0.0123, 12.3, 12,300."""
    return f"{float(f'{x:.3g}'):,g}"


def _line_with_range(axes: Any, found: Mapping[int, tuple[float, float, float]], label: str, style: Style) -> None:
    xs = sorted(found)
    axes.plot(xs, [found[x][0] for x in xs], label=label, linewidth=1.3, **style.for_matplotlib)
    if any(low < high for _, low, high in found.values()):
        lows, highs = [found[x][1] for x in xs], [found[x][2] for x in xs]
        axes.fill_between(xs, lows, highs, color=style.light, alpha=0.2, linewidth=0)


def _whole_numbers(most: int) -> Any:
    """A locator of at most `most` ticks at integers."""
    return require("matplotlib.ticker", "report").MaxNLocator(most, integer=True)


def _slug(title: str) -> str:
    return "_" + title.replace(" = ", "") if title else ""
