"""Experiments on state tracking: what rotation is for, and what carries it beyond the training length.

Each is a function of a scale's name that returns sweeps: all tasks, learning rates and seeds of a variant are trained
as one (`sympow.experiments.tracking_sweep`).
"""

from __future__ import annotations

from typing import Any

from sympow.checks import check_choice
from sympow.experiments import VARIANTS, Sweep

TASKS = ("parity", "count3", "count5", "count8", "s3", "d4", "a5", "copy", "induction")
COMPARED = ("softmax", "sympow", "gating", "conformal", "pair-rotation")
# Tasks of which the first is the simplest, and the last needs two layers: which way to turn depends on a parity.
REMEDIED = ("parity", "count3", "count8", "s3")
PAIRS: dict[str, Any] = VARIANTS["pair-rotation"]
UNGATED = {**PAIRS, "gating": "none"}
# RoPE that hardly turns within the rows of an evaluation.
SLOW = {"max_rate": 1e-4}
# What may carry tracking beyond the training length.
MODELS: dict[str, dict[str, Any]] = {
    "pairs": PAIRS,
    # Gates that keep the beginning of a row.
    "pairs-ungated": UNGATED,
    "pairs-half-gated": {**PAIRS, "gating": "half"},
    "pairs-clamped": {**PAIRS, "gating": "clamped"},
    # Angles: signed, beside RoPE in half of the pairs; and these rounded.
    "signed-ungated": {**UNGATED, "rotary": "signed"},
    "grid-ungated": {**UNGATED, "rotary": "grid"},
    "grid-clamped": {**PAIRS, "gating": "clamped", "rotary": "grid"},
    "grid": {**PAIRS, "rotary": "grid"},
    # A power that tells scores apart more sharply.
    "grid-ungated-p4": {**UNGATED, "rotary": "grid", "power": 4},
}


def state_tracking(size: str) -> list[Sweep]:
    """Which variants can track a state: parity, counting, groups; at 1, 4 and 16 times the training length."""
    return [_sweep(size, variant, VARIANTS[variant], TASKS) for variant in COMPARED]


def tracking_remedies(size: str) -> list[Sweep]:
    """What carries tracking beyond the training length: gates that keep, angles that are exact, noise on keys."""
    exact = ("grid-ungated", "grid-clamped")
    noisy = ("grid-ungated", "grid-clamped", "pairs-ungated", "signed-ungated", "grid", "grid-ungated-p4")
    changed: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        *((f"{name}-noise", MODELS[name], {"key_noise": 1.0}) for name in noisy),
        ("grid-ungated-less-noise", MODELS["grid-ungated"], {"key_noise": 0.5}),
        *((name, model, {}) for name, model in MODELS.items()),
        ("pairs-ungated-random-lengths", UNGATED, {"lengths": "random"}),
        # Short rows make learning easier, which noise makes harder.
        *((f"{name}-noise-random-lengths", MODELS[name], {"key_noise": 1.0, "lengths": "random"}) for name in exact),
        # RoPE also turns what a query sees of the first token, in half of the pairs.
        *((f"{name}-slow-noise", {**MODELS[name], **SLOW}, {"key_noise": 1.0}) for name in exact),
    ]
    # As many rows in all as in `state_tracking`, in twice the steps: noise makes learning slower.
    steps = {"steps": 4_000, "rows": 32} if size == "small" else {}
    return [_sweep(size, name, model, REMEDIED, **steps, **changes) for name, model, changes in changed]


def tracking_longer(size: str) -> list[Sweep]:
    """Whether training four times as long, with more noise, carries the harder tasks beyond the training length."""
    changed = {
        "grid-clamped-noise": ("grid-clamped", 1.0),
        "grid-clamped-more-noise": ("grid-clamped", 2.0),
        "grid-ungated-more-noise": ("grid-ungated", 2.0),
    }
    # Rates around the best of `tracking_remedies` for these tasks.
    longer = {"steps": 16_000, "rows": 32, "learning_rates": (5e-4, 1e-3)} if size == "small" else {}
    return [
        _sweep(size, name, MODELS[model], ("count3", "s3"), key_noise=noise, **longer)
        for name, (model, noise) in changed.items()
    ]


def tracking_curriculum(size: str) -> list[Sweep]:
    """What carries tracking to 16 times the training length: rows that grow in training, beside the other remedies."""
    # An angle that is one step of the grid off shows at the end of rows of 128 tokens, and hardly in rows of 64.
    full: dict[str, Any] = {"length": 128, "key_noise": 1.0, "lengths": "growing"}
    model = {**MODELS["grid-clamped"], **SLOW}
    changed: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "all": (model, full),
        # Whether rows that grow are enough.
        **{name: (VARIANTS[name], {**full, "key_noise": 0.0}) for name in ("softmax", "gating", "pair-rotation")},
        # `all` with one remedy changed.
        "fixed-lengths": (model, {**full, "lengths": "fixed"}),
        "random-lengths": (model, {**full, "lengths": "random"}),
        "no-noise": (model, {**full, "key_noise": 0.0}),
        "no-grid": ({**model, "rotary": "signed"}, full),
        "fast-rope": (MODELS["grid-clamped"], full),
        "plain-gates": ({**MODELS["grid"], **SLOW}, full),
        "no-gates": ({**MODELS["grid-ungated"], **SLOW}, full),
        # The two changes that carry modulo 3 furthest, together.
        "random-lengths-no-gates": ({**MODELS["grid-ungated"], **SLOW}, {**full, "lengths": "random"}),
    }
    tasks = ("parity", "count3", "count5", "count8", "s3", "d4")
    steps = {"steps": 4_000, "rows": 16, "learning_rates": (1e-3, 3e-3)} if size == "small" else {"length": 20}
    return [_sweep(size, name, model, tasks, **{**changes, **steps}) for name, (model, changes) in changed.items()]


def _sweep(size: str, name: str, model: dict[str, Any], tasks: tuple[str, ...], **changes: Any) -> Sweep:
    check_choice("scale", size, ("cpu", "small"))
    if size == "cpu":
        # Seconds: a test that everything works, not a measurement.
        return Sweep(
            name,
            {"layers": 2, "width": 32, "heads": 2, **model},
            tasks=tuple(task for task in tasks if task in ("parity", "copy")) or tasks[:1],
            learning_rates=(1e-2,),
            seeds=(0,),
            **{"length": 20, "steps": 12, "rows": 8, "warmup": 4, "evaluation_rows": 8, **changes},
        )
    return Sweep(
        name,
        {"layers": 2, "width": 128, "heads": 4, **model},
        tasks=tasks,
        seeds=(0, 1, 2),
        **{"learning_rates": (1e-3, 3e-3, 1e-2), "length": 64, "steps": 2_000, "rows": 64, **changes},
    )
