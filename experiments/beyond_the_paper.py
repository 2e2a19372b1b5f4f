"""Experiments on what the paper leaves open: when data-dependent rotation pays, other gates and rotations."""

from __future__ import annotations

from typing import Any

from experiments.grid import Scale
from experiments.text_run import PlannedRun

RATES = (5e-4, 1e-3, 2e-3, 4e-3)
# Variants, and the settings that they change.
Grid = list[tuple[tuple[str, ...], dict[str, Any]]]


def learning_rate(scale: Scale) -> list[PlannedRun]:
    """The learning rate of a scale, chosen once on the softmax baseline; `SMALL_LEARNING_RATE` is the best."""
    return [scale.run("softmax", context=scale.contexts[2][1], learning_rate=rate) for rate in RATES]


def gates(scale: Scale) -> list[PlannedRun]:
    """Gates: none, fixed, learned, data-dependent (the paper's), and one per rotated pair, p = 2."""
    variants = ("sympow", "fixed-gate", "learned-gate", "gating", "vector-gate")
    return [scale.run(variant, context=scale.ablation, seed=seed) for seed in scale.seeds for variant in variants]


def rotations(scale: Scale) -> list[PlannedRun]:
    """Rotations beside the paper's gate: none, fixed, learned rates, data-dependent (the paper's), per pair, p = 2."""
    variants = ("unrotated", "gating", "learned-rates", "conformal", "pair-rotation")
    return [scale.run(variant, context=scale.ablation, seed=seed) for seed in scale.seeds for variant in variants]


def rotation(scale: Scale) -> list[PlannedRun]:
    """Whether and when data-dependent rotation pays: conformal against gating, one setting changed at a time, p = 2.

    At the learning rate of all other parameters, W_β drives β to 0 or 2 for nearly every token within some sixty steps.
    So the grid varies the rate of W_β also with training length and context, and the gradient through β also with
    training length. A hundredth of the gradient with the longer training is ahead of gating on the scale's seeds. That
    was picked out of many comparisons, so these two are also trained on fresh seeds, and gating with half and twice the
    learning rate, which shows whether the rotation was compared with gating at a poor rate.
    """
    # Settings of W_β alone have no effect on gating.
    both, rotating = ("gating", "conformal"), ("conformal",)
    longest, longer = {"context": scale.contexts[2][-1]}, {"tokens": 4 * scale.tokens}
    small_gradient = {"rotation_gradient": 0.01}
    grid: Grid = [
        (both, {}),
        # Learning rate of W_β.
        (rotating, {"rotation_rate": 0.1}),
        (rotating, {"rotation_rate": 0.01}),
        # At the longest context.
        (both, longest),
        (rotating, {**longest, "rotation_rate": 0.1}),
        # Training length.
        (both, longer),
        (("gating",), {**longer, "learning_rate": scale.base.optimizer.learning_rate / 2}),
        (("gating",), {**longer, "learning_rate": scale.base.optimizer.learning_rate * 2}),
        (rotating, {**longer, "rotation_rate": 0.1}),
        # Scale of the gradient through β.
        (rotating, {"rotation_gradient": 0.1}),
        (rotating, small_gradient),
        (rotating, {**longer, **small_gradient}),
        # Initialization of W_β.
        (rotating, {"rotation_init": 0.02}),
        # N, which sets the rate of the slowest pairs; that of the fastest does not depend on it.
        (both, {"max_document": 1_024}),
        (both, {"max_document": 1_048_576}),
        # Other rotations, and none.
        (("unrotated", "learned-rates", "pair-rotation"), {}),
        (("pair-rotation",), {"rotation_rate": 0.1}),
    ]
    confirmed: Grid = [(("gating",), longer), (rotating, {**longer, **small_gradient})]
    return [
        scale.run(variant, seed=seed, **{"context": scale.ablation, **changes})
        for seeds, compared in ((scale.seeds, grid), (scale.fresh_seeds, confirmed))
        for seed in seeds
        for variants, changes in compared
        for variant in variants
    ]
