"""The grids of the paper at every scale: they have the points of its figures, and compare like with like."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from experiment_settings import TINY

from experiments import __main__ as laboratory
from experiments import beyond_the_paper, paper, text_rotation
from experiments.grid import SCALES
from experiments.store import Store
from experiments.text_run import EvaluationPlan, differences, settings_of
from sympow.model.config import VARIANTS
from sympow.train.config import TrainConfig
from sympow.train.config import paper as paper_config

EXPERIMENTS = {
    name: experiment
    for name, experiment in laboratory.EXPERIMENTS.items()
    if experiment.__module__ in {module.__name__ for module in (paper, beyond_the_paper, text_rotation)}
}
CURVES = {"softmax", "sympow", "gating", "conformal"}
ALL = [(scale, name) for scale in SCALES for name in EXPERIMENTS]


def runs(name, scale):
    return laboratory.works_of(name, SCALES[scale](), Store(Path("nowhere")))


@pytest.mark.parametrize(("scale", "name"), ALL)
def test_a_name_is_of_one_config(scale, name):
    """A name has the same config in all experiments of a scale, so that a run is trained once for all of them."""
    named = {}
    for other in EXPERIMENTS:
        for run in runs(other, scale):
            assert named.setdefault(run.name, asdict(run.config)) == asdict(run.config)
    configs = [settings_of(run.config) for run in runs(name, scale)]
    assert all(configs.count(config) == 1 for config in configs)
    assert EXPERIMENTS[name].__doc__


@pytest.mark.parametrize("scale", SCALES)
def test_figure_1_has_every_curve_at_every_context(scale):
    size = SCALES[scale]()
    found = {(run.power, run.variant, run.config.data.context) for run in runs("figure1", scale)}
    for power, contexts in size.contexts.items():
        for context in contexts:
            assert (None, "softmax", context) in found
            assert {(power, variant, context) for variant in CURVES - {"softmax"}} <= found


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", ["figure1", "ablation", "gates", "rotations"])
def test_runs_differ_in_what_is_compared_and_nothing_else(scale, name):
    compared = {"mixer", "gating", "rotary", "power", "context", "seed"}
    rest = {str({k: v for k, v in settings_of(run.config).items() if k not in compared}) for run in runs(name, scale)}
    assert len(rest) == 1
    assert len({run.tokens for run in runs(name, scale)}) == 1


@pytest.mark.parametrize("scale", SCALES)
def test_other_figures_are_parts_of_the_first(scale):
    first = {run.name for run in runs("figure1", scale)}
    for name in ("figure2", "figure3", "figure4"):
        assert {run.name for run in runs(name, scale)} < first
    beyond = {(run.power, run.config.data.context) for run in runs("figure2", scale)} - {(None, None)}
    for power, context in SCALES[scale]().beyond.items():
        assert (power, context) in beyond
    assert {run.power for run in runs("figure3", scale)} == {4, None}
    assert {run.power for run in runs("figure4", scale)} == {2, None}


def test_evaluation_goes_four_times_beyond_training():
    for scale in SCALES:
        size = SCALES[scale]()
        assert size.evaluation.length >= 4 * max(size.beyond.values())


def test_the_ablation_takes_both_parts_apart():
    parts = {(run.config.model.gating, run.config.model.rotary) for run in runs("ablation", "small")}
    assert parts == {("none", "fixed"), ("none", "scale"), ("scalar", "fixed"), ("scalar", "scale")}


def test_the_question_of_rotation_has_seeds_and_a_gated_run_with_the_same_settings():
    found = runs("rotation", "small")
    assert {run.config.run.seed for run in found} == {*range(8)}
    # What was picked out of all comparisons is compared once more on seeds on which it was not picked.
    fresh = {(run.variant, run.changes.get("rotation_gradient")) for run in found if run.config.run.seed > 2}
    assert fresh == {("gating", None), ("conformal", 0.01)}
    # Gating has a choice of rates at the length at which that was found.
    rates = {run.config.optimizer.learning_rate for run in found if run.variant == "gating" and "tokens" in run.changes}
    assert rates == {1e-3, 2e-3, 4e-3}
    changed = {key for run in found for key in run.changes}
    assert changed >= {"tokens", "rotation_rate", "rotation_gradient", "rotation_init", "max_document"}
    only_of_rotations = {"rotation_rate", "rotation_gradient", "rotation_init"}
    gated = [(run.config.run.seed, run.config.data.context, run.changes) for run in found if run.variant == "gating"]
    for run in found:
        shared = {key: value for key, value in run.changes.items() if key not in only_of_rotations}
        assert (run.config.run.seed, run.config.data.context, shared) in gated


def test_the_papers_scale_is_the_papers():
    size = SCALES["paper"]()
    assert size.contexts == {2: (256, 1_024, 4_096, 8_192), 4: (1_024, 4_096, 16_384, 65_536)}
    assert size.processes == 8
    run = size.run("conformal", context=4_096, power=4)
    recipe = paper_config().changed(power=4)
    assert settings_of(run.config) == settings_of(recipe)
    assert run.config.run.batch_tokens == 524_288


def test_variants_are_models():
    for name, fields in VARIANTS.items():
        found = settings_of(TrainConfig().changed(**fields))
        assert {key: found[key] for key in fields} == fields, name


def test_two_runs_of_one_name_are_refused_unless_they_are_the_same(scale, define, tmp_path):
    def same(scale):
        return [scale.run("gating", context=32, title="x"), scale.run("gating", context=32, title="x")]

    def rates(scale):
        return [scale.run("gating", context=32, title="x", learning_rate=rate) for rate in (1e-3, 2e-3)]

    def evaluations(scale):
        return [scale.run("gating", context=32, evaluation=EvaluationPlan(documents=count)) for count in (2, 3)]

    for experiment in (same, rates, evaluations):
        define(experiment)
    store = Store(tmp_path)
    assert len(laboratory.works_of("same", scale, store)) == 1
    for name, run in (("rates", "gating_p2_c32_x_s0"), ("evaluations", "gating_p2_c32_s0")):
        with pytest.raises(ValueError, match=f"^{name} has two of the name {run} that differ"):
            laboratory.works_of(name, scale, store)


def test_tokens_are_counted_in_the_batches_of_the_run(scale):
    scale = replace(scale, start=scale.base, changes={})
    run = scale.run("gating", context=32, tokens=6_400, batch_tokens=128)
    assert (run.tokens, run.config.run.steps) == (6_400, 50)
    assert scale.run("gating", context=32, tokens=6_400).config.run.steps == 100


def test_what_the_experiment_chooses_cannot_be_set(scale):
    message = "^--set cannot change steps: the experiment chooses it for gating_p2_c32_tokens-6400_s0$"
    with pytest.raises(ValueError, match=message):
        scale.run("gating", context=32, tokens=6_400)


def test_what_a_run_learns_does_not_depend_on_when_it_counts_as_hanging(scale):
    runs = [replace(scale, changes={**TINY, "hang_after": seconds}).run("gating", context=32) for seconds in (0, 600)]
    assert differences(runs[0].config, runs[1].config) == []


def grown(scale, loss):
    """All runs of `text_rotation` and their rows, with a made-up loss of the switch, batch, rate and seed."""
    rows, runs = {}, []
    while True:
        found = text_rotation.text_rotation(replace(scale, finished=rows))
        assert {run.name for run in runs} <= {run.name for run in found}
        runs = found
        new = [run for run in found if run.name not in rows]
        if not new:
            return runs
        # Some at a time, as they finish.
        for run in new[::2]:
            switch = re.search(r"c\d+_(.+)_b\d+_lr", run.name)[1]
            setting = run.config
            value = loss(switch, setting.run.batch_tokens, setting.optimizer.learning_rate, setting.run.seed)
            rows[run.name] = {"status": "done" if value else "diverged", "heldout_loss": value}


def seeds_of(runs):
    """Seeds by batch and switch, then by learning rate."""
    found = {}
    for run in runs:
        switch = re.search(r"c\d+_(.+)_b\d+_lr", run.name)[1]
        rates = found.setdefault((run.config.run.batch_tokens, switch), {})
        rates.setdefault(run.config.optimizer.learning_rate, []).append(run.config.run.seed)
    return found


def test_rotation_on_text_grows_by_its_results():
    """The best rate has all seeds, a best rate at an end is followed beyond it, and the best rotation goes on."""
    order = ["paper", "gating", "1rad", "gating-1rad", "gradient-0.01"]

    def loss(switch, batch, rate, seed):
        if switch == "gating" and rate > 2e-3:
            return None
        # The best rates, of which one is beyond those at the start and one beyond all.
        best = {"paper": 5e-4, "1rad": 1.0}.get(switch, 2e-3)
        return 4 + order.index(switch) / 10 + abs(math.log(rate / best)) / 100 + seed / 1000

    all_seeds, fresh, first = [0, 1, 2], [3, 4, 5, 6, 7], [0]
    usual = {1e-3: first, 2e-3: all_seeds, 4e-3: first}
    assert seeds_of(grown(SCALES["small"](), loss)) == {
        (131_072, "gating"): {**usual, 2e-3: all_seeds + fresh},
        (131_072, "gating-1rad"): usual,
        (131_072, "paper"): {**usual, 2e-3: first, 5e-4: all_seeds + fresh},
        (131_072, "1rad"): {**usual, 2e-3: first, 8e-3: all_seeds},
        (131_072, "gradient-0.01"): usual,
        # Twice the best rate of gating diverges.
        (524_288, "gating"): {2e-3: all_seeds, 4e-3: all_seeds},
        (524_288, "paper"): {5e-4: all_seeds, 1e-3: all_seeds},
    }


def test_a_rotation_that_is_behind_gating_is_not_trained_on_fresh_seeds():
    found = seeds_of(grown(SCALES["small"](), lambda switch, *_: 3.0 if switch == "gating" else 4.0))
    assert {seed for rates in found.values() for seeds in rates.values() for seed in seeds} == {0, 1, 2}
    assert {switch for batch, switch in found if batch == 524_288} == {"gating", "paper"}


def test_a_rotation_with_slower_rates_goes_on_with_gating_of_these_rates():
    found = seeds_of(grown(SCALES["small"](), lambda switch, *_: {"1rad": 3.0, "paper": 3.5}.get(switch, 4.0)))
    assert {switch for batch, switch in found if batch == 524_288} == {"gating", "gating-1rad", "1rad", "paper"}
    with_fresh = {switch for (batch, switch), rates in found.items() for seeds in rates.values() if 3 in seeds}
    assert with_fresh == {"gating", "gating-1rad", "1rad"}


def test_rotation_on_text_compares_equal_tokens():
    runs = grown(SCALES["small"](), lambda switch, batch, rate, seed: len(switch) + seed)
    assert {run.tokens for run in runs if run.config.run.batch_tokens == 131_072} == {46_137_344}
    assert {run.tokens for run in runs if run.config.run.batch_tokens == 524_288} == {184_549_376}
    assert {run.config.data.context for run in runs} == {1_024}
    assert all(run.config.model.gating == "scalar" for run in runs)
