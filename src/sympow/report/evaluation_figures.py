"""Figures of an evaluation: average loss within a context (paper Fig. 2), and probes of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sympow.evaluate import PasskeyPoint, RecallPoint
from sympow.extras import require
from sympow.report.style import VARIANTS


def plot_loss_by_context(curves: Mapping[str, Mapping[int, float]], trained_at: int | None, path: Path) -> None:
    """Average loss of the tokens within each evaluation context, as the paper's Fig. 2 has it.

    Args:
        curves: by model, then by context.
        trained_at: context of training, drawn as a dashed line; None: not known, or not the same for all.
        path: PNG or SVG file to write; its folder is made.
    """
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for name, by_context in curves.items():
        axes.plot(list(by_context), list(by_context.values()), label=name, **_style(name))
    if trained_at is not None:
        axes.axvline(trained_at, color="#c0392b", linestyle="--", linewidth=1, label=f"trained at {trained_at:,}")
    _finish(axes, xlabel="evaluation context (tokens)", ylabel="average loss (nats per token)")
    _save(figure, path)


def plot_probes(
    recall: Mapping[str, Sequence[RecallPoint]], passkey: Mapping[str, Sequence[PasskeyPoint]], path: Path
) -> None:
    """What the state holds: accuracy of recalled pairs, and what is gained on a key by having been told it.

    Args:
        recall, passkey: by model; either may be empty.
        path: PNG or SVG file to write; its folder is made.
    """
    pyplot = _pyplot()
    panels = [kind for kind, content in (("recall", recall), ("passkey", passkey)) if content]
    figure, grid = pyplot.subplots(1, len(panels), figsize=(5.5 * len(panels), 4), layout="constrained", squeeze=False)
    for axes, kind in zip(grid[0], panels, strict=True):
        if kind == "recall":
            _draw_recall(axes, recall)
        else:
            _draw_passkey(axes, passkey)
    _save(figure, path)


def _draw_recall(axes: Any, recall: Mapping[str, Sequence[RecallPoint]]) -> None:
    for name, points in recall.items():
        for number, pairs in enumerate(sorted({point.pairs for point in points})):
            here = [point for point in points if point.pairs == pairs]
            centres = [(point.nearest * point.farthest) ** 0.5 for point in here]
            style = {**_style(name), "alpha": 1 / (1 + number / 2), "marker": "osD^v"[number % 5], "markersize": 4}
            axes.plot(centres, [point.accuracy for point in here], label=f"{name}, {pairs} pairs", **style)
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, xlabel="distance (tokens)", ylabel="accuracy", title="associative recall")


def _draw_passkey(axes: Any, passkey: Mapping[str, Sequence[PasskeyPoint]]) -> None:
    for name, points in passkey.items():
        gained = [point.control - point.loss for point in points]
        axes.plot([point.distance for point in points], gained, label=name, marker="o", markersize=4, **_style(name))
    axes.axhline(0, color="#888888", linewidth=0.8)
    _finish(axes, xlabel="distance (tokens)", ylabel="gained by being told (nats per key)", title="passkey")


def _pyplot() -> Any:
    require("matplotlib", "plot").use("agg")
    return require("matplotlib.pyplot", "plot")


def _style(name: str) -> dict[str, Any]:
    return dict(VARIANTS[name].for_matplotlib) if name in VARIANTS else {}


def _finish(axes: Any, **labels: str) -> None:
    axes.set_xscale("log", base=4)
    axes.xaxis.set_major_formatter(require("matplotlib.ticker", "plot").StrMethodFormatter("{x:,.0f}"))
    axes.minorticks_off()
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize="small")


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)
