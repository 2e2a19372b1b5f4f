"""Contrast of series colors with the page and with each other, for every kind of color vision."""

from itertools import combinations

import numpy as np
import pytest

from sympow.report.plotting import DARK_PAPER, LIGHT_PAPER, OTHERS, VARIANTS, assign_styles

# Machado, Oliveira and Fernandes (2009), severity 1.
VISIONS = {
    "full": np.eye(3),
    "without red cones": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "without green cones": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "without blue cones": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
STYLES = [*VARIANTS.values(), *OTHERS]


def linear(color):
    channels = np.array([int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    """As WCAG defines it."""
    bright, dark = sorted((linear(c) @ [0.2126, 0.7152, 0.0722] + 0.05 for c in (one, other)), reverse=True)
    return bright / dark


def lab(rgb):
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb.clip(0, 1)
    f = [np.cbrt(x) if x > 0.008856 else 7.787 * x + 16 / 116 for x in xyz / [0.9505, 1, 1.089]]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("theme", "paper"), [("light", LIGHT_PAPER), ("dark", DARK_PAPER)])
def test_lines_stand_out_from_the_page(theme, paper):
    for style in STYLES:
        # The contrast that WCAG requires of graphics.
        assert contrast(getattr(style, theme), paper) >= 3, style


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("vision", VISIONS)
def test_no_two_lines_look_alike(theme, vision):
    colors = [getattr(style, theme) for style in STYLES]
    seen = [lab(np.array(VISIONS[vision]) @ linear(color)) for color in colors]
    for (one, a), (other, b) in combinations(zip(colors, seen, strict=True), 2):
        # A just noticeable difference is about 2.
        assert np.linalg.norm(a - b) > 25, (one, other)


def test_variants_keep_their_look_and_no_two_series_share_one():
    names = [
        ("conformal", "conformal"),
        *((f"conformal, rate {n}", "conformal") for n in range(12)),
        ("sympow", "sympow"),
    ]
    # Repeated for each context.
    styles = assign_styles(names * 2)
    assert list(styles) == [label for label, _ in names]
    assert styles["conformal"] == VARIANTS["conformal"]
    assert styles["sympow"] == VARIANTS["sympow"]
    assert len({(style.light, style.dash) for style in styles.values()}) == len(names)
