"""Models that are compared with each other, by the fields of a `GPTConfig` that tell them apart."""

from __future__ import annotations

from typing import Any

# The paper's curves (§4).
PAPER_VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"mixer": "softmax", "gating": "none", "rotary": "fixed"},
    "sympow": {"mixer": "sympow", "gating": "none", "rotary": "fixed"},
    "gating": {"mixer": "sympow", "gating": "scalar", "rotary": "fixed"},
    "conformal": {"mixer": "sympow", "gating": "scalar", "rotary": "scale"},
}
# With them the parts of the ablation (§4.2.1), and what the conclusion leaves open.
VARIANTS: dict[str, dict[str, Any]] = {
    **PAPER_VARIANTS,
    "rotation": {"mixer": "sympow", "gating": "none", "rotary": "scale"},
    "fixed-gate": {"mixer": "sympow", "gating": "fixed", "rotary": "fixed"},
    "learned-gate": {"mixer": "sympow", "gating": "learned", "rotary": "fixed"},
    "vector-gate": {"mixer": "sympow", "gating": "vector", "rotary": "fixed"},
    "learned-rates": {"mixer": "sympow", "gating": "scalar", "rotary": "learned"},
    "pair-rotation": {"mixer": "sympow", "gating": "scalar", "rotary": "pairs"},
    "unrotated": {"mixer": "sympow", "gating": "scalar", "rotary": "none"},
}
