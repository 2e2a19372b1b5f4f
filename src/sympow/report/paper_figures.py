"""The paper's figures from runs, with matplotlib: PNG to look at, SVG to print."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sympow.extras import require
from sympow.report.curves import curve, mean_and_range, median_speed, smooth
from sympow.report.grouping import Group, Spread, by_power
from sympow.report.heads import QUANTITIES
from sympow.report.style import MARKERS, Style

FORMATS = ("png", "svg")
# Curves are averaged over this part of their steps, and heights chosen for what comes after that part.
SMOOTHED_PART = 20
EARLY_PART = 10
# Colours of heat maps: one that grows, and one with a middle.
GROWING, AROUND_ONE = "cividis", "PRGn"
PANEL_WIDTH, PANEL_HEIGHT = 4.6, 3.4


def draw_figures(
    groups: Sequence[Group],
    styles: Mapping[str, Style],
    folder: Path,
    report: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Writes every figure there is data for, as PNG and SVG.

    Args:
        styles: by series.
        report: called with how many figures are drawn, and of how many.

    Returns:
        the files.
    """
    require("matplotlib", "plot").use("agg")
    pyplot = require("matplotlib.pyplot", "plot")
    written = []
    # Text stays text in SVG, and the same data gives the same file.
    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "sympow", "font.size": 9}):
        figures = list(_figures(groups, styles))
        for number, (name, draw) in enumerate(figures, start=1):
            figure = draw(pyplot)
            for suffix in FORMATS:
                path = folder / f"{name}.{suffix}"
                path.parent.mkdir(parents=True, exist_ok=True)
                metadata = {"Date": None} if suffix == "svg" else None
                figure.savefig(path, dpi=150, metadata=metadata)
                written.append(path)
            pyplot.close(figure)
            if report is not None:
                report(number, len(figures))
    return written


Draw = Callable[[Any], Any]


def _figures(groups: Sequence[Group], styles: Mapping[str, Style]) -> Iterator[tuple[str, Draw]]:
    """Names and what draws them."""
    panels = by_power(groups)
    against_context = {
        "final_loss_by_training_context": ("training loss (nats per token)", _final_loss, False),
        "throughput_by_training_context": ("training speed (tokens per second)", _speed, True),
    }
    for name, (label, number, from_zero) in against_context.items():
        known = {title: [g for g in members if number(g)] for title, members in panels.items()}
        known = {title: members for title, members in known.items() if members}
        if known:
            how: dict[str, Any] = {"number": number, "label": label, "from_zero": from_zero}
            yield name, partial(_against_context, panels=known, styles=styles, **how)
    for title, members in panels.items():
        evaluated = [g for g in members if any(run.evaluation for run in g.runs)]
        for context in sorted({g.context for g in evaluated}):
            here = [g for g in evaluated if g.context == context]
            name = f"loss_by_evaluation_context{_slug(title)}_trained_at_{context}"
            yield name, partial(_beyond_training, groups=here, styles=styles)
        yield f"training_curves{_slug(title)}", partial(_training_curves, groups=members, styles=styles)
    for group in groups:
        run = next((run for run in group.runs if run.heads and run.heads.quantities), None)
        if run is not None:
            yield f"heads/{run.name.replace('/', '_')}", partial(_heads, group=group, run=run)


def _final_loss(group: Group) -> Spread | None:
    return group.final_loss


def _speed(group: Group) -> Spread | None:
    return Spread.of(median_speed(run) for run in group.runs)


def _against_context(
    plt: Any,
    panels: Mapping[str, Sequence[Group]],
    styles: Mapping[str, Style],
    number: Callable[[Group], Spread | None],
    label: str,
    from_zero: bool,
) -> Any:
    """A number against the training context, a panel per power, bars over the range of seeds (paper Fig. 1)."""
    figure, grid = plt.subplots(
        1,
        len(panels),
        figsize=(PANEL_WIDTH * len(panels), PANEL_HEIGHT),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for place, (axes, (title, members)) in enumerate(zip(grid[0], panels.items(), strict=True)):
        for series in dict.fromkeys(g.series for g in members):
            points = [(g.context, found) for g in members if g.series == series and (found := number(g))]
            points.sort(key=lambda point: point[0])
            contexts, spreads = [x for x, _ in points], [spread for _, spread in points]
            means = [s.mean for s in spreads]
            bars = [[s.mean - s.low for s in spreads], [s.high - s.mean for s in spreads]]
            style = styles[series]
            axes.errorbar(
                contexts,
                means,
                yerr=bars if any(s.count > 1 for s in spreads) else None,
                label=series,
                capsize=2,
                markersize=4,
                marker=MARKERS[style.marker],
                **style.for_matplotlib,
            )
        _context_axis(axes, sorted({g.context for g in members}))
        axes.set(xlabel="training context (tokens)", title=_panel_title(place, len(panels), title))
        if from_zero:
            axes.set_ylim(bottom=0)
    grid[0][0].set_ylabel(label)
    _legend(figure, grid)
    return figure


def _beyond_training(plt: Any, groups: Sequence[Group], styles: Mapping[str, Style]) -> Any:
    """Average loss within evaluation contexts: (a) without a gate, (b) with one (paper Fig. 2)."""
    gated = [g for g in groups if g.runs[0].settings["gating"] != "none"]
    ungated = [g for g in groups if g not in gated]
    panels = {title: members for title, members in (("without a gate", ungated), ("with a gate", gated)) if members}
    figure, grid = plt.subplots(
        1, len(panels), figsize=(PANEL_WIDTH * len(panels), PANEL_HEIGHT), squeeze=False, layout="constrained"
    )
    for place, (axes, (title, members)) in enumerate(zip(grid[0], panels.items(), strict=True)):
        for group in members:
            found = mean_and_range([run.evaluation.by_context for run in group.runs if run.evaluation])
            _line_with_range(axes, found, group.series, styles[group.series])
        axes.axvline(members[0].context, color="#b00020", linestyle="--", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(_powers_of(16))
        axes.xaxis.set_major_formatter(_plain_numbers())
        axes.set(
            xlabel="evaluation context (tokens); dashed: training context",
            title=_panel_title(place, len(panels), title),
        )
        _tidy(axes)
        axes.legend(frameon=False)
    grid[0][0].set_ylabel("average loss (nats per token)")
    return figure


def _training_curves(plt: Any, groups: Sequence[Group], styles: Mapping[str, Style]) -> Any:
    """Loss against steps, a panel per training context, two to a row (paper Figs. 3 and 4)."""
    contexts = sorted({g.context for g in groups})
    columns = min(2, len(contexts))
    rows = -(-len(contexts) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(PANEL_WIDTH * columns, PANEL_HEIGHT * rows), squeeze=False, layout="constrained"
    )
    for place, axes in enumerate(grid.flat):
        if place >= len(contexts):
            axes.set_visible(False)
            continue
        members = [g for g in groups if g.context == contexts[place]]
        late = []
        for group in members:
            curves = []
            for run in group.runs:
                found = curve(run, "loss")
                curves.append(dict(zip(found.steps, smooth(found, run.steps / SMOOTHED_PART), strict=True)))
            joined = mean_and_range(curves)
            _line_with_range(axes, joined, group.series, styles[group.series])
            late += [x for step, found in joined.items() if step >= max(joined) / EARLY_PART for x in found]
        # The fall of the first steps would leave no room for what differs later.
        room = 0.05 * (max(late) - min(late)) or 0.05
        axes.set_ylim(min(late) - room, max(late) + room)
        title = f"training context {contexts[place]:,}"
        axes.set(xlabel="step", ylabel="training loss (nats per token)")
        axes.set_title(_panel_title(place, len(contexts), title))
        _tidy(axes)
    _legend(figure, grid)
    return figure


def _heads(plt: Any, group: Group, run: Any) -> Any:
    """Heat maps of layers against heads."""
    quantities = run.heads.quantities
    figure, grid = plt.subplots(
        1, len(quantities), figsize=(3.8 * len(quantities), 3.2), squeeze=False, layout="constrained"
    )
    colors = require("matplotlib.colors", "plot")
    for axes, (name, matrix) in zip(grid[0], quantities.items(), strict=True):
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
        figure.colorbar(image, ax=axes)
        columns = "rotated pair" if name == "rate_change" else "head"
        axes.set(xlabel=columns, ylabel="layer", title=QUANTITIES.get(name, name))
        axes.set_yticks(range(len(cells)))
        axes.title.set_fontsize(8)
    figure.suptitle(f"{group.series}, training context {group.context:,}, seed {run.settings['seed']}")
    return figure


def _line_with_range(axes: Any, found: Mapping[int, tuple[float, float, float]], label: str, style: Style) -> None:
    xs = sorted(found)
    axes.plot(xs, [found[x][0] for x in xs], label=label, linewidth=1.3, **style.for_matplotlib)
    if any(low < high for _, low, high in found.values()):
        lows, highs = [found[x][1] for x in xs], [found[x][2] for x in xs]
        axes.fill_between(xs, lows, highs, color=style.light, alpha=0.2, linewidth=0)


def _context_axis(axes: Any, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.minorticks_off()
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, grid: Any) -> None:
    """One for all panels, below them."""
    handles: dict[str, Any] = {}
    for axes in grid.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(4, len(handles))
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=columns, frameon=False)


def _powers_of(base: int) -> Any:
    """Ticks so far apart that numbers of five digits stand beside each other."""
    return require("matplotlib.ticker", "plot").LogLocator(base=base)


def _plain_numbers() -> Any:
    return require("matplotlib.ticker", "plot").StrMethodFormatter("{x:,.0f}")


def _panel_title(place: int, panels: int, title: str) -> str:
    letter = f"({chr(ord('a') + place)})" if panels > 1 else ""
    return " ".join(part for part in (letter, title) if part)


def _slug(title: str) -> str:
    return "_" + title.replace(" = ", "") if title else ""
