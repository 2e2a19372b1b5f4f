"""What a curve looks like, the same in every figure and page.

Colours keep apart for eyes with any of the three kinds of colour blindness, and from the paper they stand on
(tests/report/test_style.py measures both); dashes and markers say the same once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Style:
    """One series.

    Attributes:
        light: colour on a light page.
        dark: colour on a dark one.
        dash: lengths of dash and gap in pixels; empty: solid.
        marker: circle, square, diamond, triangle, cross or star.
    """

    light: str
    dark: str
    dash: tuple[int, ...] = ()
    marker: str = "circle"

    @property
    def for_matplotlib(self) -> dict[str, object]:
        """As arguments of `Axes.plot`; the marker apart."""
        return {"color": self.light, "linestyle": (0, tuple(x / 2 for x in self.dash)) if self.dash else "-"}

    @property
    def with_marker(self) -> dict[str, object]:
        """As arguments of `Axes.plot`, for lines of few points."""
        return {**self.for_matplotlib, "marker": MARKERS[self.marker], "markersize": 4}


LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
# The paper's four curves and the ablation of §4.2.1 have a look of their own; what else there is takes from OTHERS.
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
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "x", "star": "*"}

# What `sympow bench` times, by what comes before the backend's name.
METHODS = {
    "softmax": VARIANTS["softmax"],
    "softmax, cuDNN": VARIANTS["softmax"],
    "softmax, flash": VARIANTS["sympow + rotation"],
    "attention form": VARIANTS["sympow"],
    "chunked form": VARIANTS["conformal"],
    "retention": replace(VARIANTS["sympow + gating"], dash=(8, 3, 2, 3)),
    "fla": replace(OTHERS[0], dash=(8, 3, 2, 3, 2, 3)),
}
# A form keeps its colour and marker on every backend.
BACKEND_DASHES = {"auto": (), "triton": (), "torch": (8, 3)}


def method_styles(methods: Iterable[str]) -> dict[str, Style]:
    """A style for everything that `sympow bench` times, by name ("chunked form, triton"); no two share one."""
    styles: dict[str, Style] = {}
    strangers = []
    for method in methods:
        kind, _, backend = method.partition(", ")
        style = METHODS.get(method) or METHODS.get(kind)
        if style is not None and backend in BACKEND_DASHES:
            style = replace(style, dash=BACKEND_DASHES[backend])
        if style is None or style in styles.values():
            strangers.append(method)
        else:
            styles[method] = style
    spare = [
        replace(style, dash=dash)
        for dash in reversed(DASHES)
        for style in (*OTHERS, *VARIANTS.values())
        if replace(style, dash=dash) not in styles.values()
    ]
    styles |= dict(zip(strangers, spare, strict=False))
    return styles


def assign_styles(series: Iterable[tuple[str, str]]) -> dict[str, Style]:
    """A style for every series, by label: its variant's own to the first of a variant, others to the rest.

    Args:
        series: labels and variants, in the order they are shown in.
    """
    styles: dict[str, Style] = {}
    taken: set[str] = set()
    pool = [
        Style(style.light, style.dark, dash, style.marker)
        for dash in DASHES
        for style in (*OTHERS, *VARIANTS.values())
        # Those with a look of their own keep it to themselves.
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
