"""What a curve looks like, the same in every figure and page.

Colours keep apart for eyes with any of the three kinds of colour blindness, and from the paper they stand on
(tests/report/test_style.py measures both); dashes and markers say the same once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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


LIGHT_PAPER, DARK_PAPER = "#ffffff", "#14171c"
# The paper's four curves and the ablation of §4.2.1 have a look of their own; what else there is takes from OTHERS.
VARIANTS = {
    "softmax": Style("#8c8c8c", "#8b858c", (6, 4), "square"),
    "sympow": Style("#c48a13", "#f4ab09", marker="triangle"),
    "sympow + gating": Style("#8e2c0b", "#e3543c", marker="diamond"),
    "conformal": Style("#0d8ee3", "#99b7f7", marker="circle"),
    "sympow + rotation": Style("#5b0681", "#c046f2", (2, 3), "cross"),
}
OTHERS = (Style("#0a332d", "#55fc9a", marker="star"), Style("#2a22e0", "#eed4dd", marker="square"))
DASHES: tuple[tuple[int, ...], ...] = ((), (8, 3), (2, 3), (8, 3, 2, 3), (12, 4))
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle": "^", "cross": "x", "star": "*"}


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
