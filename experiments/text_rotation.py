"""Data-dependent rotation on text, in large batches: which way of holding it back makes it pay, if any does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sympow.experiments import Run, Scale
from sympow.experiments.grid import heldout_loss

# Tokens of a batch and steps by scale: all switches, then the best of them in larger batches. At scale small, these are
# 46 and 92 million of the 47.6 million training tokens of the books: one pass over them, and almost two.
SIZES = {
    "cpu": ((4_096, 6), (16_384, 3)),
    "small": ((131_072, 352), (524_288, 176)),
    "paper": ((131_072, 100_000), (524_288, 100_000)),
}
# Learning rates that every switch is trained with; while the best is at an end of these, the next beyond it, too.
RATES = (1e-3, 2e-3, 4e-3)
LOWEST, HIGHEST = 5e-4, 8e-3
# Switches that are trained in the larger batches.
BEST = 3
Settings = dict[str, Any]


def text_rotation(scale: Scale) -> list[Run]:
    """Rotations held back in several ways against gating on text, in large batches, each at its best rate, p = 2.

    The grid grows with its results. Each switch is trained with three learning rates or more, on one seed; at the rate
    of the lowest held-out loss, on all seeds. When all switches have been, the three with the lowest loss, and gating,
    are trained in batches four times as large, at the better of that rate and twice that rate.
    """
    (batch, steps), (larger, fewer) = SIZES[scale.name]
    runs: list[Run] = []
    done: dict[str, list[Run]] = {}
    for name in _switches(scale):
        some, final = _at_best_rate(scale, _maker(scale, name, batch, steps), RATES, further=True)
        runs += some
        if final is not None and scale.best(final) is not None:
            done[name] = final
    if len(done) < len(_switches(scale)):
        return runs
    for name in _best_switches(scale, done):
        rate = done[name][0].config.optimizer.learning_rate
        some, _ = _at_best_rate(scale, _maker(scale, name, larger, fewer), (rate, 2 * rate), further=False)
        runs += some
    return runs


def _switches(scale: Scale) -> dict[str, tuple[str, Settings]]:
    """Variants and the settings that they change, by name: gating, which is the reference, then rotations.

    Gating has rates up to 1 rad as well, since a rotation with such rates is to be compared with that.
    """
    return {
        "gating": ("gating", {}),
        "gating-1rad": ("gating", {"max_rate": 1.0}),
        "paper": ("conformal", {}),
        "1rad": ("conformal", {"max_rate": 1.0}),
        "step": ("conformal", {"rotary": "step"}),
        "pair-step": ("conformal", {"rotary": "pair-step"}),
        "detached": ("conformal", {"rotation_detached": True}),
        # Of six layers, the upper four.
        "upper": ("conformal", {"rotary_from": max(1, scale.base.model.layers // 3)}),
        "half": ("conformal", {"rotary": "half"}),
    }


def _maker(scale: Scale, name: str, batch: int, steps: int) -> Callable[[float, int], Run]:
    """Makes the run of a switch with a learning rate and a seed."""
    variant, changes = _switches(scale)[name]
    size = {"batch_tokens": batch, "steps": steps, "micro_batch_tokens": min(batch, 65_536)}
    # Losses beyond the training context are not asked for here.
    evaluation = replace(scale.evaluation, length=0, pairs=(), distances=())

    def make(rate: float, seed: int) -> Run:
        title = f"{name}_b{batch}_lr{rate:g}"
        what: Settings = {**changes, **size, "learning_rate": rate}
        return scale.run(variant, context=scale.contexts[2][1], seed=seed, evaluation=evaluation, title=title, **what)

    return make


def _at_best_rate(
    scale: Scale, make: Callable[[float, int], Run], rates: Sequence[float], further: bool
) -> tuple[list[Run], list[Run] | None]:
    """All runs of a switch so far, and those with the best rate, one for each seed; None: it is not known yet.

    Args:
        rates: to begin with, ascending, each twice the one before.
        further: whether to go on while the best rate is at an end of those tried.
    """
    first = scale.seeds[0]
    tried = {rate: make(rate, first) for rate in rates}
    while (best := scale.best(list(tried.values()))) is not None:
        rate = next(rate for rate, run in tried.items() if run is best)
        low, high = min(tried), max(tried)
        beyond = [low / 2] * (rate == low and low > LOWEST) + [2 * high] * (rate == high and high < HIGHEST)
        if not further or not beyond:
            final = [make(rate, seed) for seed in scale.seeds]
            return [*tried.values(), *final[1:]], final
        tried[beyond[0]] = make(beyond[0], first)
    return list(tried.values()), None


def _best_switches(scale: Scale, done: dict[str, list[Run]]) -> list[str]:
    """Gating, and the rotations with the lowest held-out loss over seeds, with gating of the same rates."""
    rotations = [name for name, (variant, _) in _switches(scale).items() if variant != "gating"]

    def loss(name: str) -> float:
        return sum(heldout_loss(scale.finished[run.name]) for run in done[name])

    chosen = sorted(rotations, key=loss)[:BEST]
    return ["gating", *(["gating-1rad"] if "1rad" in chosen else []), *chosen]
