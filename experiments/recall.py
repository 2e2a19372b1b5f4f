"""Multi-query associative recall as zoology trains it: accuracy against the size of the state.

A function of a scale's name that returns sweeps: all learning rates and seeds of a model are trained as one
(`sympow.experiments.recall_sweep`).
"""

from __future__ import annotations

from typing import Any

from sympow.checks import check_choice
from sympow.experiments import VARIANTS, RecallSweep

TAPS = 4
# Updates of every model: half as many as zoology's, of rows that are never repeated.
STEPS = 10_000
# A state of 60 kB, slightly less than that of zoology's published points.
KNEE: dict[str, Any] = {"width": 128, "heads": 6, "key_value_heads": 3, "head_dim": 16}
ONE_LAYER: dict[str, Any] = {"width": 128, "heads": 6, "head_dim": 16, "layers": 1}
ONE_HEAD_OF_64: dict[str, Any] = {"width": 128, "heads": 2, "key_value_heads": 1, "layers": 1}
P4: dict[str, Any] = {"width": 64, "heads": 8, "key_value_heads": 2, "power": 4}
# Models, by name: their variant and shape. They are trained in this order, so the most important ones come first.
# Zoology's models have no positional encoding, so `unrotated` is closest to them.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gating-w128-3x16": ("gating", KNEE),
    "conformal-w128-3x16": ("conformal", KNEE),
    "unrotated-w128-3x16": ("unrotated", KNEE),
    "gating-w128-1x64-one-layer": ("gating", ONE_HEAD_OF_64),
    "unrotated-w128-1x64-one-layer": ("unrotated", ONE_HEAD_OF_64),
    "gating-w128-6x16-one-layer": ("gating", ONE_LAYER),
    "unrotated-w128-6x16-one-layer": ("unrotated", ONE_LAYER),
    "softmax-w128": ("softmax", {"width": 128, "heads": 8}),
    "unrotated-softmax-w128": ("softmax", {"width": 128, "heads": 8, "rotary": "none"}),
    "gating-w128-1x16": ("gating", {**KNEE, "key_value_heads": 1}),
    "conformal-w128-1x16": ("conformal", {**KNEE, "key_value_heads": 1}),
    "unrotated-w128-1x16": ("unrotated", {**KNEE, "key_value_heads": 1}),
    "conformal-w128-1x64-one-layer": ("conformal", ONE_HEAD_OF_64),
    "gating-w64-2x8-p4": ("gating", P4),
    "unrotated-w64-2x8-p4": ("unrotated", P4),
    "gating-w128-8x16": ("gating", {"width": 128, "heads": 8}),
    "unrotated-w128-8x16": ("unrotated", {"width": 128, "heads": 8}),
    "gating-w128-2x32": ("gating", {"width": 128, "heads": 4, "key_value_heads": 2}),
    "gating-w64-4x16": ("gating", {"width": 64, "heads": 4}),
    "unrotated-w128-3x16-no-conv": ("unrotated", {**KNEE, "short_conv": 0}),
    # Zoology's models have no MLP: one of a single unit is as good as none.
    "unrotated-w128-3x16-no-mlp": ("unrotated", {**KNEE, "mlp_ratio": 1 / 128}),
    "pair-rotation-w128-3x16": ("pair-rotation", KNEE),
    # RoPE in a part of the pairs, the fastest ones.
    **{
        f"{part}-w128-{shape}": ("gating", {**size, "rotary_fraction": fraction})
        for part, fraction in {"half": 0.5, "quarter": 0.25, "eighth": 0.125}.items()
        for shape, size in {
            "3x16": KNEE,
            "1x64-one-layer": ONE_HEAD_OF_64,
            "6x16-one-layer": ONE_LAYER,
            "1x16": {**KNEE, "key_value_heads": 1},
        }.items()
    },
}
# Those that are trained with three seeds.
REPEATED = ("gating-w128-3x16", "conformal-w128-3x16", "unrotated-w128-3x16", "unrotated-w128-6x16-one-layer")
CPU_MODELS = ("gating-w64-4x16", "softmax-w128")


def recall(size: str) -> list[RecallSweep]:
    """Multi-query associative recall as zoology trains it: accuracy against the size of the state, p = 2 and 4."""
    check_choice("scale", size, ("cpu", "small"))
    if size == "cpu":
        # Seconds: a test that everything works, not a measurement.
        return [
            RecallSweep(
                name,
                {**_model(name), "width": 32, "heads": 2},
                learning_rates=(1e-2,),
                seeds=(0,),
                steps=12,
                rows=8,
                warmup=4,
                evaluation_rows=8,
                mixture=((16, 2), (32, 4)),
                weights=(1, 1),
                evaluation=((16, 2), (32, 4), (64, 8)),
                tokens_known=64,
            )
            for name in CPU_MODELS
        ]
    return [
        RecallSweep(
            name,
            _model(name),
            learning_rates=(1e-3, 3e-3, 1e-2, 3e-2),
            seeds=(0, 1, 2) if name in REPEATED else (0,),
            steps=STEPS,
        )
        for name in MODELS
    ]


def _model(name: str) -> dict[str, Any]:
    variant, shape = MODELS[name]
    return {"layers": 2, "short_conv": TAPS, **VARIANTS[variant], **shape}
