"""Writes an HTML page as one file with plotly.js inlined, and describes plots for it.

Python writes the HTML and describes the plots; `assets/page.js` draws them, and the script of a page does what depends
on its reader's choices. Colors of plots are names of the style sheet, `var(--name)`, which follow the theme.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from sympow.extras import require

# A page loads nothing but what is in it. Plotly draws heat maps and exports pictures as data and blobs.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
THEME_CHOICE = """<label>Theme
    <select id="theme"><option value="auto">system</option><option value="light">light</option><option value="dark">dark</option></select>
  </label>"""  # noqa: E501
_CLEAR = "rgba(0,0,0,0)"
_AXIS = {
    "automargin": True,
    "gridcolor": "var(--grid)",
    "linecolor": "var(--line)",
    "showline": True,
    "zeroline": False,
    "tickfont": {"color": "var(--muted)"},
    "title": {"standoff": 8, "font": {"color": "var(--muted)", "size": 12}},
    "separatethousands": True,
    "exponentformat": "B",
    "minexponent": 6,
}
# Defaults of every plot, as a Plotly template. The font is that of page.css.
TEMPLATE = {
    "layout": {
        "margin": {"l": 4, "r": 28, "t": 8, "b": 4},
        "paper_bgcolor": _CLEAR,
        "plot_bgcolor": _CLEAR,
        "font": {
            "family": 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif',
            "size": 12,
            "color": "var(--ink)",
        },
        "hoverlabel": {
            "bgcolor": "var(--card)",
            "bordercolor": "var(--line)",
            "font": {"color": "var(--ink)"},
            "namelength": -1,
        },
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "groupclick": "togglegroup"},
        "modebar": {"bgcolor": _CLEAR, "color": "var(--muted)", "activecolor": "var(--accent)", "orientation": "v"},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
}
# Of Plotly's buttons, those that stay within the page: some versions also offer to upload the plot.
CONFIG = {"displaylogo": False, "modeBarButtons": [["toImage", "zoom2d", "pan2d", "resetScale2d"]]}
# A scale that diverges from 1, purple to green, whose lightness alone tells how far.
AROUND_ONE = ("#40004b", "#762a83", "#9970ab", "#c2a5cf", "#f7f7f7", "#a6dba0", "#5aae61", "#1b7837", "#00441b")
# Cells show their values in heat maps of at most so many columns.
MOST_VALUES = 16


def build_page(name: str, title: str, data: dict[str, Any], style: str = "", **content: str) -> str:
    """A page of this package's assets, with plotly.js and its data inlined.

    Args:
        name: of the page's content, `assets/{name}.html`, and script, `assets/{name}.js`.
        data: what the script reads; numbers must be finite.
        style: CSS to add to `assets/page.css`.
        content: HTML for the places `$name` of `assets/{name}.html`.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    # "<" could end the script element.
    everything = {**data, "template": TEMPLATE, "config": CONFIG}
    text = json.dumps(everything, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=escape(POLICY),
        style=_asset("page.css") + style,
        body=Template(_asset(f"{name}.html")).substitute(content, title=escape(title), theme=THEME_CHOICE),
        plotly=require("plotly.offline", "report").get_plotlyjs(),
        data=text.replace("<", "\\u003c"),
        scripts=_asset("page.js") + _asset(f"{name}.js"),
    )


def options(choices: Iterable[tuple[object, str]]) -> str:
    """HTML of the options of a select element, from values and labels."""
    return "".join(f'<option value="{escape(str(value))}">{escape(label)}</option>' for value, label in choices)


def notes_html(notes: Sequence[str]) -> str:
    """Sentences for the reader, at the top of a page."""
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<div id="notes" class="notes"><ul>{items}</ul></div>' if notes else ""


def plain(text: str) -> str:
    """Text that Plotly shows as it is: in its labels, a few HTML tags have a meaning."""
    return escape(text, quote=False)


def format_number(x: float | None, digits: int = 4) -> str:
    """So many significant digits, or all digits before the point."""
    if x is None:
        return "–"
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.{digits}g}"


def six_digits(number: float | None) -> float | None:
    """A number rounded to six digits; None if it is not finite."""
    return None if number is None or not math.isfinite(number) else float(f"{number:.6g}")


def heat_map(
    label: str,
    values: Sequence[Sequence[float | None]],
    columns: Sequence[str],
    column_title: str,
    *,
    log: bool = False,
    around_one: bool = False,
    domain: tuple[float, float] | None = None,
    missing: str = "no number",
    note: str = "",
) -> dict[str, Any]:
    """A plot of layers against heads, or of another table with a row for each layer.

    Args:
        label: what it shows, for screen readers.
        values: numbers by row and column; None: there is none.
        columns: their labels.
        log: whether colors tell logarithms.
        around_one: whether colors tell how far from 1, in which direction.
        domain: ends of the color scale; None: the lowest and the highest value.
        missing: what the hover label says where there is no number.
        note: its end.
    """

    def place(x: float | None) -> float | None:
        if x is None or not log:
            return x
        return math.log10(x) if x > 0 else None

    known = [z for row in values for x in row if (z := place(x)) is not None]
    low, high = domain or ((min(known), max(known)) if known else (0, 1))
    if low == high:
        low, high = low - 0.05, high + 0.05
    ticks = [low, (low + high) / 2, high]
    axis = {"type": "category", "showgrid": False, "fixedrange": True}
    trace = {
        "type": "heatmap",
        "z": [[six_digits(place(x)) for x in row] for row in values],
        "x": list(columns),
        "y": list(range(len(values))),
        "zmin": low,
        "zmax": high,
        "text": [[format_number(x, 3) for x in row] for row in values],
        "texttemplate": "" if len(columns) > MOST_VALUES else "%{text}",
        "customdata": [[missing if x is None else format_number(x) for x in row] for row in values],
        "hovertemplate": f"layer %{{y}}, {column_title} %{{x}}: %{{customdata}}{note}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
        "colorscale": [[n / 8, color] for n, color in enumerate(AROUND_ONE)] if around_one else "Cividis",
        "colorbar": {
            "thickness": 10,
            "outlinewidth": 0,
            "tickvals": ticks,
            "ticktext": [format_number(10**x if log else x, 3) for x in ticks],
        },
    }
    return {
        "label": label,
        "height": max(160, 70 + len(values) * min(34, max(18, 340 / len(values)))),
        "traces": [trace],
        "layout": {
            "xaxis": axis | {"title": {"text": column_title}},
            "yaxis": axis | {"title": {"text": "layer"}, "autorange": "reversed"},
            "plot_bgcolor": "var(--grid)",
        },
    }


def _asset(name: str) -> str:
    return files("sympow.report").joinpath("assets", name).read_text("utf-8")
