"""What `sympow inspect` writes: a text with each token colored by a head's decay γ and rotation scale β."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sympow.checks import check_at_least
from sympow.data.tokenizer import ByteTokenizer, Tokenizer, beginning_of
from sympow.errors import UserError
from sympow.evaluate.head_statistics import LayerCapture, capture, half_life
from sympow.generation.prefix import Prefix
from sympow.generation.text import TextDecoder, TextModel
from sympow.model.gpt import SEGMENT_SIZE
from sympow.report.html_page import build_page, heat_map, notes_html, options, six_digits
from sympow.settings import TURNING

TOKENS = 8_192
START = "start of document"
# log γ and β are stored as 16-bit codes, a seventh of the size of decimal numbers. Decay is coded as the logarithm of
# −log γ between these two ends: from a half-life of seven billion tokens to γ = exp(−100).
SLOWEST, FASTEST = 1e-10, 1e2
NEVER, CODES = 0, 65_535
# The curve of a head has at most so many points.
PROFILE_POINTS = 160


@dataclass(frozen=True)
class Inspection:
    """Gates and rotations of a model along a text.

    Attributes:
        texts: the text of each token; of the tokens of one character, the last has its text and the others none.
        ids: of the tokens, with those that begin every text (`beginning_of`).
        layers: γ and β of each layer at these tokens.
        left_out: number of tokens of the text after these.
        unit: the name of one token, "byte" or "token".
        hidden_rotation: kind of the rotation if it depends on the text and has no scale β to show; None: there is none.
    """

    texts: list[str]
    ids: list[int]
    layers: list[LayerCapture]
    left_out: int
    unit: str
    hidden_rotation: str | None = None


def inspect_text(
    text_model: TextModel, text: str, *, tokens: int = TOKENS, segment_size: int = SEGMENT_SIZE
) -> Inspection:
    """Prefills a model with a text and captures its gates and rotations.

    Args:
        tokens: maximum number of tokens to read.
        segment_size: tokens prefilled at a time; memory depends on it.

    Raises:
        ValueError: the text is empty, or the model has neither a gate nor a rotation scale that depends on the text.
    """
    check_at_least("tokens", tokens, 1)
    all_ids = text_model.encode(text)
    beginning = len(beginning_of(text_model.tokenizer))
    if all_ids.shape[1] == beginning:
        raise UserError("the text must not be empty")
    # What begins every text is not counted.
    read = all_ids[:, : tokens + beginning]
    layers = capture(text_model.model, lambda: Prefix.prefill(text_model.model, read, segment_size=segment_size))
    config = text_model.model.config
    if all(layer.log_gamma is None and layer.beta is None for layer in layers):
        raise UserError(
            "the model has nothing to show: neither its decay nor a scale of its rotation depends on the text "
            f"(gating={config.gating!r}, rotary={config.rotary!r})"
        )
    ids = read[0].tolist()
    return Inspection(
        token_texts(text_model.tokenizer, ids),
        ids,
        layers,
        left_out=all_ids.shape[1] - read.shape[1],
        unit="byte" if text_model.tokenizer.kind == ByteTokenizer.kind else "token",
        hidden_rotation=config.rotary if config.rotary in TURNING else None,
    )


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds; the first tokens are those that begin a text."""
    decoder = TextDecoder(tokenizer, continues=False)
    beginning = len(beginning_of(tokenizer))
    texts = [*[START] * beginning, *("".join(decoder.take(token)) for token in ids[beginning:])]
    texts[-1] += "".join(decoder.finish())
    return texts


def build_inspection_page(inspection: Inspection, title: str) -> str:
    """The page as HTML."""
    data = inspection_data(inspection)
    layers, unit = data["layers"], inspection.unit
    heads = max(layer["heads"] for layer in layers)
    notes = []
    if inspection.left_out:
        notes.append(
            f"The text continues for {inspection.left_out:,} {unit}s that are not shown; "
            "sympow inspect --tokens shows more."
        )
    if any(x is not None and x.ndim == 3 for layer in inspection.layers for x in (layer.log_gamma, layer.beta)):
        notes.append(
            "Gates or rotations of this model act on pairs of a head's dimensions; the page shows the mean over pairs "
            "of log γ and of β."
        )
    if inspection.hidden_rotation:
        notes.append(
            f'The rotation of this model (rotary="{inspection.hidden_rotation}") turns half of the pairs by angles of '
            "their own and has no scale β to show."
        )
    quantities = {"forgetting": "forgetting, γ", "rotation": "rotation, β"}
    quantities = {name: label for name, label in quantities.items() if name in data["overview"]}
    if len(quantities) == 2:
        quantities = {"both": "forgetting (color) and rotation (underline)", **quantities}
    return build_page(
        "inspect",
        title,
        data,
        summary=f"{len(inspection.ids) - 1:,} {unit}s, {len(layers)} layers of {heads} heads.",
        notes=notes_html(notes),
        unit=unit,
        layers=options((n, str(n)) for n in range(len(layers))),
        quantities=options(quantities.items()),
    )


def inspection_data(inspection: Inspection) -> dict[str, Any]:
    """What the page's script reads. Of a gate or a rotation per pair, the mean over pairs of log γ and of β."""
    # (heads, tokens): the tokens of a head are contiguous.
    rates = [None if layer.log_gamma is None else -_of_heads(layer.log_gamma).double() for layer in inspection.layers]
    betas = [None if layer.beta is None else _of_heads(layer.beta).double() for layer in inspection.layers]
    size = -(-(len(inspection.ids) - 1) // PROFILE_POINTS)
    layers = []
    for rate, beta in zip(rates, betas, strict=True):
        found = rate if rate is not None else beta
        layers.append(
            {
                "heads": 0 if found is None else len(found),
                "forgetting": None if rate is None else _packed(forgetting_codes(-rate)),
                "beta": None if beta is None else _packed(beta_codes(beta)),
                "ends": None if rate is None else [_ends(of_head) for of_head in rate],
                "profiles": {
                    "forgetting": None
                    if rate is None
                    else [[six_digits(half_life(-x)) for x in row] for row in _averages(rate, size)],
                    "rotation": None if beta is None else [list(map(six_digits, row)) for row in _averages(beta, size)],
                },
            }
        )
    return {
        "texts": inspection.texts,
        "ids": inspection.ids,
        "unit": inspection.unit,
        "slowest": SLOWEST,
        "fastest": FASTEST,
        "ends": _ends(torch.cat(known)) if (known := [x for x in rates if x is not None]) else None,
        "layers": layers,
        "overview": _overview(inspection, rates, betas, size),
    }


def _overview(
    inspection: Inspection, rates: Sequence[Tensor | None], betas: Sequence[Tensor | None], size: int
) -> dict[str, Any]:
    """By kind, the map of all heads and the curve of one of them, which the page's script fills in.

    Args:
        size: tokens that a point of the curve is an average over.
    """
    unit, found = inspection.unit, {}
    each = f"each {unit}" if size == 1 else f"every {size} {unit}s"
    starts = range(1, len(inspection.ids), size)
    last = len(inspection.ids) - 1
    ranges = [f"{start:,}" if size == 1 else f"{start:,} to {min(last, start + size - 1):,}" for start in starts]

    def profile(name: str, label: str, ending: str, color: str, axis: dict[str, Any]) -> dict[str, Any]:
        trace = {
            "type": "scatter",
            "mode": "lines",
            "connectgaps": True,
            "visible": True,
            "x": list(starts),
            "line": {"shape": "hv", "width": 2, "color": color},
            "customdata": ranges,
            "hovertemplate": f"{unit} %{{customdata}}: {name} %{{y:,.4~r}}{ending}<extra></extra>",
        }
        x_axis = {"title": {"text": unit}, "showspikes": True, "spikemode": "across", "spikethickness": 1}
        layout = {"hovermode": "x", "showlegend": False, "xaxis": x_axis, "yaxis": axis}
        return {"label": label, "traces": [trace], "layout": layout}

    def of_heads(number: Callable[[Tensor], float | None], layers: Sequence[Tensor | None]) -> list[list[float | None]]:
        # The boundary before the text does not count. A layer without a number has one head without.
        return [[None] if layer is None else [number(of_head[1:]) for of_head in layer] for layer in layers]

    heads = [str(n) for n in range(max(len(x) for x in (*rates, *betas) if x is not None))]
    if any(rate is not None for rate in rates):
        name = f"median half-life ({unit}s)"
        values = of_heads(lambda rate: six_digits(half_life(-rate.median().item())), rates)
        axis: dict[str, Any] = {"type": "log", "autorange": "reversed", "nticks": 5}
        life = "half-life" if size == 1 else "half-life of the mean decay"
        found["forgetting"] = {
            "name": name,
            "map": heat_map(f"{name} by layer and head", values, heads, "head", log=True, missing="never forgets"),
            "profile": profile(life, f"{life} of {each}; up is forgetting more", f" {unit}s", "var(--forget)", axis),
            "note": size > 1,
        }
    if any(beta is not None for beta in betas):
        values = of_heads(lambda beta: beta.mean().item(), betas)
        name = "β" if size == 1 else "mean β"
        found["rotation"] = {
            "name": "mean β",
            "map": heat_map(
                "mean β by layer and head", values, heads, "head", around_one=True, domain=(0, 2), missing="no β"
            ),
            "profile": profile(name, f"{name} of {each}", "", "var(--rotate-more)", {"range": [0, 2], "dtick": 1}),
            "note": False,
        }
    return found


def _averages(x: Tensor, size: int) -> list[list[float]]:
    """Means over so many tokens, the last over what is left; without the boundary before the text."""
    return [[part.mean().item() for part in of_head[1:].split(size)] for of_head in x]


def _ends(rates: Tensor) -> tuple[float, float]:
    """Ends of the color scale of −log γ: its 5th and its 95th percentile, without the boundary before the text."""
    known = rates[..., 1:].flatten()
    known = known[known > 0]
    if not len(known):
        return 1, math.e
    low, high = np.quantile(known.numpy(), (0.05, 0.95), method="nearest").tolist()
    return (low, high) if high > low * (1 + 1e-6) else (low / math.e, high * math.e)


def forgetting_codes(log_gamma: Tensor) -> NDArray[np.uint16]:
    """Codes of decays: 0 for γ = 1; 1 … 65,535 for −log γ between SLOWEST and FASTEST, geometrically spaced."""
    rate = -log_gamma.double()
    low, high = np.log(SLOWEST), np.log(FASTEST)
    places = ((rate.clamp(SLOWEST, FASTEST).log() - low) / (high - low) * (CODES - 1)).round() + 1
    return torch.where(rate > 0, places, NEVER).numpy().astype(np.uint16)


def beta_codes(beta: Tensor) -> NDArray[np.uint16]:
    """Codes of β: 0 … 65,535 for 0 … 2, the range of 1 + tanh."""
    return (beta.double().clamp(0, 2) / 2 * CODES).round().numpy().astype(np.uint16)


def _of_heads(x: Tensor) -> Tensor:
    """(tokens, heads[, pairs]) → (heads, tokens)."""
    return (x.mean(-1) if x.ndim == 3 else x).T


def _packed(codes: NDArray[np.uint16]) -> str:
    return base64.b64encode(codes.astype("<u2").tobytes()).decode("ascii")
