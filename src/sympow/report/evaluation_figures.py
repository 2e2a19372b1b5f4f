"""Figures of an evaluation: average loss within a context (paper Fig. 2), and probes of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sympow.evaluate import PasskeyPoint, RecallPoint
from sympow.report.drawing import add_legend, make_panels, plain_numbers, pyplot, save_figure, set_title, tidy
from sympow.report.style import Style, assign_styles

# A model has one colour in both panels; the marker says which probe, and with how many pairs.
PAIR_MARKERS, PASSKEY_MARKER = "osD^vX*<>", "P"


def plot_loss_by_context(
    curves: Mapping[str, Mapping[int, float]], trained_at: int | None, path: Path, unit: str = "token"
) -> None:
    """Average loss of the tokens within each evaluation context, as the paper's Fig. 2 has it.

    Args:
        curves: by model, then by context.
        trained_at: context of training, drawn as a dashed line; None: not known, or not the same for all.
        path: PNG or SVG file to write; its folder is made.
        unit: what a token is: "token" or "byte".
    """
    styles = assign_styles((name, name) for name in curves)
    figure, (axes,) = make_panels(1, width=6, height=3.7)
    for name, by_context in curves.items():
        axes.plot(list(by_context), list(by_context.values()), label=name, **styles[name].with_marker)
    if trained_at is not None:
        axes.axvline(trained_at, color="#b00020", linestyle="--", linewidth=1, label=f"trained at {trained_at:,}")
    _finish(axes, xlabel=f"evaluation context ({unit}s)", ylabel=f"average loss (nats per {unit})")
    add_legend(figure, [axes])
    save_figure(figure, path)
    pyplot().close(figure)


def plot_probes(
    recall: Mapping[str, Sequence[RecallPoint]],
    passkey: Mapping[str, Sequence[PasskeyPoint]],
    path: Path,
    unit: str = "token",
) -> None:
    """What the state holds: accuracy of recalled pairs, and what is gained on a key by having been told it.

    Args:
        recall, passkey: by model; either may be empty.
        path: PNG or SVG file to write; its folder is made.
        unit: what a token is: "token" or "byte".
    """
    styles = assign_styles((name, name) for name in [*recall, *passkey])
    kinds = [kind for kind, content in (("recall", recall), ("passkey", passkey)) if content]
    figure, panels = make_panels(len(kinds), width=5.5, height=3.7)
    for axes, kind in zip(panels, kinds, strict=True):
        if kind == "recall":
            _draw_recall(axes, recall, styles)
        else:
            _draw_passkey(axes, passkey, styles)
        axes.set_xlabel(f"distance ({unit}s)")
    add_legend(figure, panels)
    save_figure(figure, path)
    pyplot().close(figure)


def _draw_recall(axes: Any, recall: Mapping[str, Sequence[RecallPoint]], styles: Mapping[str, Style]) -> None:
    for name, points in recall.items():
        for number, pairs in enumerate(sorted({point.pairs for point in points})):
            here = [point for point in points if point.pairs == pairs]
            centres = [(point.nearest * point.farthest) ** 0.5 for point in here]
            look = {**styles[name].with_marker, "marker": PAIR_MARKERS[number % len(PAIR_MARKERS)]}
            axes.plot(centres, [point.accuracy for point in here], label=f"{name}, {pairs} pairs", **look)
    axes.set_ylim(-0.02, 1.02)
    _finish(axes, ylabel="accuracy")
    set_title(axes, "associative recall")


def _draw_passkey(axes: Any, passkey: Mapping[str, Sequence[PasskeyPoint]], styles: Mapping[str, Style]) -> None:
    for name, points in passkey.items():
        gained = [point.control - point.loss for point in points]
        look = {**styles[name].with_marker, "marker": PASSKEY_MARKER}
        axes.plot([point.distance for point in points], gained, label=f"{name}, passkey", **look)
    axes.axhline(0, color="#888888", linewidth=0.8)
    _finish(axes, ylabel="gained by being told (nats per key)")
    set_title(axes, "passkey")


def _finish(axes: Any, **labels: str) -> None:
    axes.set_xscale("log", base=4)
    axes.xaxis.set_major_formatter(plain_numbers())
    axes.minorticks_off()
    axes.set(**labels)
    tidy(axes)
