"""Data-dependent rotation on text, in large batches, where its gradients are less noisy: does it pay?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sympow.experiments import Run, Scale
from sympow.experiments.grid import heldout_loss

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
Settings = dict[str, Any]
# Variants and the settings that they change, by name: gating, which is the reference, then rotations. Gating has rates
# up to 1 rad as well, since a rotation with such rates is to be compared with that.
SWITCHES: dict[str, tuple[str, Settings]] = {
    "gating": ("gating", {}),
    "gating-1rad": ("gating", {"max_rate": 1.0}),
    "paper": ("conformal", {}),
    "1rad": ("conformal", {"max_rate": 1.0}),
    "gradient-0.01": ("conformal", {"rotation_gradient": 0.01}),
}


def text_rotation(scale: Scale) -> list[Run]:
    """The paper's rotation, also with slower rates or a small gradient, against gating in large batches, on text.

    The grid grows with its results. Each switch is trained with three learning rates or more, on one seed; at the rate
    of the lowest held-out loss, on all seeds. When all switches have been, the rotation with the lowest loss is trained
    on fresh seeds, on which nothing was chosen, if it is ahead of gating; so is gating. The best rotation, the paper's
    and gating are also trained in batches four times as large, at that rate and twice that rate, on all seeds.
    """
    (batch, steps), (larger, larger_steps) = SIZES[scale.name]
    runs: list[Run] = []
    done: dict[str, list[Run]] = {}
    for name in SWITCHES:
        some, final = _at_best_rate(scale, _maker(scale, name, batch, steps))
        runs += some
        if final is not None and scale.best(final) is not None:
            done[name] = final
    if len(done) < len(SWITCHES):
        return runs
    losses = {name: sum(heldout_loss(scale.finished[run.name]) for run in final) for name, final in done.items()}
    best = min((name for name, (variant, _) in SWITCHES.items() if variant != "gating"), key=losses.__getitem__)
    if losses[best] < losses["gating"]:
        for name in _compared(best):
            rate = _rate_of(done[name])
            runs += [_maker(scale, name, batch, steps)(rate, seed) for seed in scale.fresh_seeds]
    for name in _compared(best, "paper"):
        rate, make = _rate_of(done[name]), _maker(scale, name, larger, larger_steps)
        runs += [make(faster * rate, seed) for seed in scale.seeds for faster in (1, 2)]
    return runs


def _maker(scale: Scale, name: str, batch: int, steps: int) -> Callable[[float, int], Run]:
    """Makes the run of a switch with a learning rate and a seed."""
    variant, changes = SWITCHES[name]
    size = {"batch_tokens": batch, "steps": steps, "micro_batch_tokens": min(batch, 65_536)}
    # Losses beyond the training context are not asked for here.
    evaluation = replace(scale.evaluation, length=0, pairs=(), distances=())

    def make(rate: float, seed: int) -> Run:
        title = f"{name}_b{batch}_lr{rate:g}"
        what: Settings = {**changes, **size, "learning_rate": rate}
        return scale.run(variant, context=scale.contexts[2][1], seed=seed, evaluation=evaluation, title=title, **what)

    return make


def _at_best_rate(scale: Scale, make: Callable[[float, int], Run]) -> tuple[list[Run], list[Run] | None]:
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


def _rate_of(runs: list[Run]) -> float:
    return runs[0].config.optimizer.learning_rate


def _compared(*rotations: str) -> list[str]:
    """Gating, rotations, and gating with the rates of those whose rates are not the paper's; each once."""
    same_rates = [f"gating-{name}" for name in rotations if f"gating-{name}" in SWITCHES]
    return list(dict.fromkeys(["gating", *same_rates, *rotations]))
