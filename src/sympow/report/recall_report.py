"""Figure and table of recall sweeps: accuracy against the size of the state, beside published models."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sympow.experiments.recall_sweep import best_recall
from sympow.extras import require
from sympow.model.config import VARIANTS
from sympow.report.grouping import LABELS
from sympow.report.plotting import (
    DASHES,
    MARKERS,
    Style,
    add_legend,
    assign_styles,
    make_panels,
    plain_numbers,
    pyplot,
    save_figure,
    tidy,
)
from sympow.report.plotting import VARIANTS as STYLES

# Bytes of state, and accuracies of other models there, as reported for the same task of zoology
# (github.com/HazyResearch/zoology), trained likewise. Its `state_size` counts four bytes for each number.
PUBLISHED_BYTES = 67_000
PUBLISHED = {"Gated DeltaNet": 0.99, "GLA": 0.95, "Based": 0.86, "Mamba-2": 0.83}
PUBLISHED_MARKERS = "D^vX"
SOFTMAX = STYLES["softmax"]


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
    tidy(axes)
    add_legend(figure, [axes])
    save_figure(figure, path)
    pyplot().close(figure)


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
