"""Writes an HTML page as one file, with plotly.js inlined. `assets/report.js` draws the curves of `sympow report`."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from sympow.extras import require

# A page loads nothing but what is in it. Plotly draws heat maps and exports pictures as data and blobs.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def build_page(name: str, title: str, data: dict[str, Any], style: str = "") -> str:
    """A page of this package's assets, with plotly.js and its data inlined.

    Args:
        name: of the page's content, `assets/{name}.html`, and script, `assets/{name}.js`.
        data: what the script reads; numbers must be finite.
        style: CSS to add to `assets/page.css`.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=escape(POLICY),
        style=_asset("page.css") + style,
        body=_asset(f"{name}.html"),
        plotly=require("plotly.offline", "report").get_plotlyjs(),
        # "<" could end the script element.
        data=json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        scripts=_asset("page.js") + _asset(f"{name}.js"),
    )


def _asset(name: str) -> str:
    return files("sympow.report").joinpath("assets", name).read_text("utf-8")
