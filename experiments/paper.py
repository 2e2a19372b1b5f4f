"""The paper's experiments: the grids of runs behind its figures and its ablation (§4 and appendix)."""

from __future__ import annotations

from typing import Any

from experiments.grid import Scale
from experiments.text_run import PlannedRun

CURVES = ("softmax", "sympow", "gating", "conformal")


def figure1(scale: Scale) -> list[PlannedRun]:
    """Fig. 1: final training loss against training context, p = 2 and p = 4."""
    return _in_order_of_seeds([run for power in scale.contexts for run in _panel(scale, power)])


def figure2(scale: Scale) -> list[PlannedRun]:
    """Fig. 2: held-out loss by evaluation context, beyond the training context. A subset of Fig. 1's runs."""
    return _in_order_of_seeds(
        [
            run
            for power, context in scale.beyond.items()
            for run in _panel(scale, power)
            if run.config.data.context == context
        ]
    )


def figure3(scale: Scale) -> list[PlannedRun]:
    """Fig. 3: training curves, p = 4. A subset of Fig. 1's runs."""
    return _in_order_of_seeds(_panel(scale, 4))


def figure4(scale: Scale) -> list[PlannedRun]:
    """Fig. 4: training curves, p = 2. A subset of Fig. 1's runs."""
    return _in_order_of_seeds(_panel(scale, 2))


def ablation(scale: Scale) -> list[PlannedRun]:
    """§4.2.1: data-dependent rotation alone, gating alone, both, and neither, p = 2."""
    variants = ("sympow", "rotation", "gating", "conformal")
    return [scale.run(variant, context=scale.ablation, seed=seed) for seed in scale.seeds for variant in variants]


def full_size(scale: Scale) -> list[PlannedRun]:
    """Softmax, gating and conformal at twice the layers, width and heads and eight times the tokens, p = 2.

    At scale `small` this is the paper's model (12 layers, 12 heads of 64) with its learning rate, trained and evaluated
    at the paper's longest context for p = 2. Batches are four times those of the scale. Conformal is trained once more
    with a hundredth of the gradient through β, and gating with RoPE in the faster half of the pairs alone. Softmax and
    gating, with RoPE in all pairs and in half of them, have a second seed.
    """
    model, run = scale.base.model, scale.base.run
    changes: dict[str, Any] = {
        "layers": 2 * model.layers,
        "width": 2 * model.width,
        "heads": 2 * model.heads,
        "batch_tokens": 4 * run.batch_tokens,
        "micro_batch_tokens": 2 * run.micro_batch_tokens,
        "steps": 2 * run.steps,
        "learning_rate": 6e-4,
    }
    context, title = scale.contexts[2][-1], "full-size"
    runs = [
        scale.run(variant, context=context, title=title, **changes) for variant in ("softmax", "gating", "conformal")
    ]
    runs.append(
        scale.run("conformal", context=context, title=f"{title}_gradient-0.01", rotation_gradient=0.01, **changes)
    )
    for seed in scale.seeds[:2]:
        half = {"title": f"{title}_half", "rotary_fraction": 0.5, **changes}
        runs.append(scale.run("gating", context=context, seed=seed, **half))
    return runs + [
        scale.run(variant, context=context, seed=seed, title=title, **changes)
        for seed in scale.seeds[1:2]
        for variant in ("gating", "softmax")
    ]


def _panel(scale: Scale, power: int) -> list[PlannedRun]:
    """Every variant at every context of a power.

    At p = 2 there are several seeds where differences are small: gating and conformal, and all variants at the two
    longest contexts.
    """
    contexts = scale.contexts[power]
    runs = []
    for context in contexts:
        for variant in CURVES:
            close = variant in ("gating", "conformal") or context in contexts[-2:]
            seeds = scale.seeds if power == 2 and close else scale.seeds[:1]
            runs += [scale.run(variant, context=context, power=power, seed=seed) for seed in seeds]
    return runs


def _in_order_of_seeds(runs: list[PlannedRun]) -> list[PlannedRun]:
    """All points with the first seed come first, so that a grid that is cut short has as many points as possible."""
    return sorted(runs, key=lambda run: run.config.run.seed)
