"""What `sympow inspect` writes: a text with each token colored by a head's decay γ and rotation scale β."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sympow.checks import check_at_least
from sympow.data.tokenizer import ByteTokenizer, Tokenizer, beginning_of
from sympow.evaluate.head_statistics import LayerCapture, capture
from sympow.generation.prefix import Prefix
from sympow.generation.text import TextDecoder, TextModel
from sympow.model.gpt import SEGMENT_SIZE
from sympow.report.html_page import build_page
from sympow.settings import TURNING

TOKENS = 8_192
START = "start of document"
# log γ and β are stored as 16-bit codes, a seventh of the size of decimal numbers. Decay is coded as the logarithm of
# −log γ between these two ends: from a half-life of seven billion tokens to γ = exp(−100).
SLOWEST, FASTEST = 1e-10, 1e2
NEVER, CODES = 0, 65_535


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
        raise ValueError("the text must not be empty")
    # What begins every text is not counted.
    read = all_ids[:, : tokens + beginning]
    layers = capture(text_model.model, lambda: Prefix.prefill(text_model.model, read, segment_size=segment_size))
    config = text_model.model.config
    if all(layer.log_gamma is None and layer.beta is None for layer in layers):
        raise ValueError(
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
    return build_page("inspect", title, inspection_data(inspection, title))


def inspection_data(inspection: Inspection, title: str) -> dict[str, Any]:
    """The data of the page. Of a gate or a rotation per pair, the mean over pairs of log γ and of β."""
    return {
        "title": title,
        "texts": inspection.texts,
        "ids": inspection.ids,
        "leftOut": inspection.left_out,
        "unit": inspection.unit,
        "hiddenRotation": inspection.hidden_rotation,
        "slowest": SLOWEST,
        "fastest": FASTEST,
        "layers": [
            {
                "heads": _heads(layer),
                "pairs": any(x is not None and x.ndim == 3 for x in (layer.log_gamma, layer.beta)),
                # (heads, tokens): the tokens of a head are contiguous.
                "forgetting": None
                if layer.log_gamma is None
                else _packed(forgetting_codes(_of_heads(layer.log_gamma))),
                "beta": None if layer.beta is None else _packed(beta_codes(_of_heads(layer.beta))),
            }
            for layer in inspection.layers
        ],
    }


def forgetting_codes(log_gamma: Tensor) -> NDArray[np.uint16]:
    """Codes of decays: 0 for γ = 1; 1 … 65,535 for −log γ between SLOWEST and FASTEST, geometrically spaced."""
    rate = -log_gamma.double()
    low, high = np.log(SLOWEST), np.log(FASTEST)
    places = ((rate.clamp(SLOWEST, FASTEST).log() - low) / (high - low) * (CODES - 1)).round() + 1
    return torch.where(rate > 0, places, NEVER).numpy().astype(np.uint16)


def beta_codes(beta: Tensor) -> NDArray[np.uint16]:
    """Codes of β: 0 … 65,535 for 0 … 2, the range of 1 + tanh."""
    return (beta.double().clamp(0, 2) / 2 * CODES).round().numpy().astype(np.uint16)


def _heads(layer: LayerCapture) -> int:
    found = layer.log_gamma if layer.log_gamma is not None else layer.beta
    return 0 if found is None else found.shape[1]


def _of_heads(x: Tensor) -> Tensor:
    """(tokens, heads[, pairs]) → (heads, tokens)."""
    return (x.mean(-1) if x.ndim == 3 else x).T


def _packed(codes: NDArray[np.uint16]) -> str:
    return base64.b64encode(codes.astype("<u2").tobytes()).decode("ascii")
