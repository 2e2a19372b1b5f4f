"""One HTML file with everything in it: it opens from a disk, without a network."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

# What a page may load: nothing but what is in it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def build_page(title: str, body: str, scripts: Sequence[str], data: dict[str, Any], style: str = "") -> str:
    """A page of assets of this package.

    Args:
        body: name of an HTML file with the page's content.
        scripts: names of JavaScript files, in order; they see each other's functions.
        data: what they read with `pageData()`; numbers must be finite.
        style: CSS to add to the package's own.
    """
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        policy=escape(POLICY),
        style=_asset("page.css") + style,
        body=_asset(body),
        # In a script, "<" could end it.
        data=json.dumps(data, allow_nan=False, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c"),
        scripts="\n".join(_asset(name) for name in scripts),
    )


def _asset(name: str) -> str:
    return files("sympow.report").joinpath("assets", name).read_text("utf-8")
