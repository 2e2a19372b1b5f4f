"""Rotation on text, in large batches: does it pay to let the data choose the angles, or to rotate fewer pairs?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from experiments.grid import Scale
from experiments.text_run import EvaluationPlan, PlannedRun, heldout_loss

# Tokens of a batch and steps by scale: all switches, then some of them in larger batches. At scale small these are one
# pass over the books' 47.6 million training tokens, and four. Half as many steps of the larger batches are too few: the
# loss falls slowly until a model has learned to attend, and after 176 steps two runs of a variant differ by 0.1,
# depending on when each got past that.
SIZES = {
    "cpu": ((4_096, 6), (16_384, 3)),
    "small": ((131_072, 352), (524_288, 352)),
    "paper": ((131_072, 100_000), (524_288, 100_000)),
}
# Learning rates that every switch is trained with; while the best is at an end of these, the next beyond it, too.
RATES = (1e-3, 2e-3, 4e-3)
LOWEST, HIGHEST = 5e-4, 8e-3
Runs = list[PlannedRun]
Settings = dict[str, Any]
Switches = dict[str, tuple[str, Settings]]
# Of a switch's name, a learning rate and a seed.
Maker = Callable[[str, float, int], PlannedRun]
# Variants and the settings that they change, by name: gating, which is the reference, then rotations. Gating has rates
# up to 1 rad as well, since a rotation with such rates is to be compared with that.
SWITCHES: Switches = {
    "gating": ("gating", {}),
    "gating-1rad": ("gating", {"max_rate": 1.0}),
    "paper": ("conformal", {}),
    "1rad": ("conformal", {"max_rate": 1.0}),
    "gradient-0.01": ("conformal", {"rotation_gradient": 0.01}),
}
# Which pairs rotate: all of them, as in RoPE, a part of them, or none. A part are the fastest pairs, with the rates
# that they have in RoPE. With the square of RoPE's longest document they have the rates of every other pair instead.
POSITIONS: Switches = {
    "gating": ("gating", {}),
    "half": ("gating", {"rotary_fraction": 0.5}),
    "quarter": ("gating", {"rotary_fraction": 0.25}),
    "eighth": ("gating", {"rotary_fraction": 0.125}),
    "every-other": ("gating", {"rotary_fraction": 0.5, "max_document": 65_536**2}),
    "unrotated": ("unrotated", {}),
}


def text_rotation(scale: Scale) -> Runs:
    """The paper's rotation, also with slower rates or a small gradient, against gating in large batches, on text.

    The grid grows with its results. Each switch is trained with three learning rates or more, on one seed; at the rate
    of the lowest held-out loss, on all seeds. When all switches have been, the rotation with the lowest loss is trained
    on fresh seeds, on which nothing was chosen, if it is ahead of gating; so is gating. The best rotation, the paper's
    and gating are also trained in batches four times as large, at that rate and twice that rate, on all seeds.
    """
    (batch, steps), (larger, larger_steps) = SIZES[scale.name]
    # Losses beyond the training context are not asked for here.
    evaluation = replace(scale.evaluation, length=0, pairs=(), distances=())
    make = _maker(scale, SWITCHES, evaluation, batch, steps)
    runs, done = _repeated_at_best_rate(scale, SWITCHES, make)
    if len(done) < len(SWITCHES):
        return runs
    losses = _losses(scale, done)
    best = min((name for name, (variant, _) in SWITCHES.items() if variant != "gating"), key=losses.__getitem__)
    if losses[best] < losses["gating"]:
        runs += _on_fresh_seeds(scale, make, done, _compared(best))
    make = _maker(scale, SWITCHES, evaluation, larger, larger_steps)
    for name in _compared(best, "paper"):
        runs += [make(name, faster * _rate_of(done[name]), seed) for seed in scale.seeds for faster in (1, 2)]
    return runs


def positions(scale: Scale) -> Runs:
    """RoPE in all pairs, in a part of them, or in none, with gates, in large batches, on text.

    The grid grows as that of `text_rotation` does. RoPE, and the part of the pairs with the lowest loss, are trained on
    fresh seeds as well.
    """
    batch, steps = SIZES[scale.name][0]
    evaluation = replace(scale.evaluation, length=16 * scale.contexts[2][1], pairs=(), distances=())
    make = _maker(scale, POSITIONS, evaluation, batch, steps)
    runs, done = _repeated_at_best_rate(scale, POSITIONS, make)
    if len(done) == len(POSITIONS):
        losses = _losses(scale, done)
        best = min((name for name, (_, changes) in POSITIONS.items() if changes), key=losses.__getitem__)
        runs += _on_fresh_seeds(scale, make, done, ["gating", best])
    return runs


def _maker(scale: Scale, switches: Switches, evaluation: EvaluationPlan, batch: int, steps: int) -> Maker:
    """Makes the run of a switch with a learning rate and a seed."""
    size = {"batch_tokens": batch, "steps": steps, "micro_batch_tokens": min(batch, 65_536)}

    def make(name: str, rate: float, seed: int) -> PlannedRun:
        variant, changes = switches[name]
        title = f"{name}_b{batch}_lr{rate:g}"
        what: Settings = {**changes, **size, "learning_rate": rate}
        return scale.run(variant, context=scale.contexts[2][1], seed=seed, evaluation=evaluation, title=title, **what)

    return make


def _repeated_at_best_rate(scale: Scale, switches: Switches, make: Maker) -> tuple[Runs, dict[str, Runs]]:
    """All runs of switches so far, and of each that is finished those with the best rate, one for each seed."""
    runs: Runs = []
    done: dict[str, Runs] = {}
    for name in switches:
        some, final = _at_best_rate(scale, partial(make, name))
        runs += some
        if final is not None and scale.best(final) is not None:
            done[name] = final
    return runs, done


def _on_fresh_seeds(scale: Scale, make: Maker, done: Mapping[str, Runs], names: Iterable[str]) -> Runs:
    """Runs on seeds on which nothing was chosen."""
    return [make(name, _rate_of(done[name]), seed) for name in names for seed in scale.fresh_seeds]


def _losses(scale: Scale, done: Mapping[str, Runs]) -> dict[str, float]:
    """Held-out losses by switch, summed over seeds."""
    return {name: sum(heldout_loss(scale.finished[run.name]) for run in final) for name, final in done.items()}


def _at_best_rate(scale: Scale, make: Callable[[float, int], PlannedRun]) -> tuple[Runs, Runs | None]:
    """All runs of a switch so far, and those with the best rate, one for each seed; None: it is not known yet."""
    first = scale.seeds[0]
    tried = {rate: make(rate, first) for rate in RATES}
    while (best := scale.best(list(tried.values()))) is not None:
        rate = next(rate for rate, run in tried.items() if run is best)
        low, high = min(tried), max(tried)
        beyond = [low / 2] * (rate == low and low > LOWEST) + [2 * high] * (rate == high and high < HIGHEST)
        if not beyond:
            final = [make(rate, seed) for seed in scale.seeds]
            return [*tried.values(), *final[1:]], final
        tried[beyond[0]] = make(beyond[0], first)
    return list(tried.values()), None


def _rate_of(runs: Runs) -> float:
    return runs[0].config.optimizer.learning_rate


def _compared(*rotations: str) -> list[str]:
    """Gating, rotations, and gating with the rates of those whose rates are not the paper's; each once."""
    same_rates = [f"gating-{name}" for name in rotations if f"gating-{name}" in SWITCHES]
    return list(dict.fromkeys(["gating", *same_rates, *rotations]))
