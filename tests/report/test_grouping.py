"""Grouping of runs by config, and names that distinguish the groups."""

import pytest
from report.made_up import VARIANTS, groups_of, write_run

from sympow.report.grouping import Spread, by_power, repeated_seeds, variant_of


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (VARIANTS["softmax"], "softmax"),
        (VARIANTS["sympow"], "sympow"),
        (VARIANTS["gating"], "sympow + gating"),
        (VARIANTS["conformal"], "conformal"),
        ({"gating": "none", "rotary": "scale"}, "sympow + rotation"),
        ({"gating": "vector", "rotary": "pairs"}, "sympow, vector gate, per-pair rotation"),
        ({"mixer": "softmax", "gating": "fixed", "rotary": "none"}, "softmax, fixed gate, no rotation"),
    ],
)
def test_variants_have_the_papers_names(tmp_path, changes, name):
    write_run(tmp_path / "run", [3.0], **changes)
    (group,) = groups_of(tmp_path)
    assert group.variant == group.series == name
    assert group.power == (None if changes.get("mixer") == "softmax" else 2)


def test_seeds_are_one_group_with_mean_and_range(tmp_path):
    for seed, loss in ((0, 2.0), (1, 2.5), (2, 3.0)):
        # How a run logs does not make it another config.
        write_run(tmp_path / f"seed{seed}", [9.0, loss], seed=seed, log_every=seed + 1, save_every=seed)
    write_run(tmp_path / "unfinished", [9.0], seed=3, steps=2)
    (group,) = groups_of(tmp_path)
    assert group.seeds == [0, 1, 2, 3]
    found = group.final_loss
    assert (found.mean, found.low, found.high, found.count) == (2.5, 2.0, 3.0, 3)
    assert group.final_heldout_loss is None


def test_what_differs_is_in_the_name_at_every_context(tmp_path):
    write_run(tmp_path / "a", [3.0], learning_rate=1e-3, context=64)
    write_run(tmp_path / "b", [3.0], learning_rate=3e-4, context=64)
    write_run(tmp_path / "c", [3.0], learning_rate=1e-3, context=128)
    write_run(tmp_path / "d", [3.0], learning_rate=1e-3, context=64, **VARIANTS["softmax"])
    named = {(group.series, group.context) for group in groups_of(tmp_path)}
    assert named == {
        ("softmax", 64),
        ("conformal, learning rate 0.001", 64),
        ("conformal, learning rate 0.0003", 64),
        ("conformal, learning rate 0.001", 128),
    }


def test_a_setting_of_a_removed_feature_has_its_default_elsewhere(tmp_path):
    for name, momentum in {"without": None, "with": "0.5", "with null": "null"}.items():
        config = write_run(tmp_path / name, [3.0]) / "config.yaml"
        if momentum is not None:
            config.write_text(config.read_text().replace("optimizer:", f"optimizer:\n  momentum: {momentum}"))
    named = {group.series: len(group.runs) for group in groups_of(tmp_path)}
    assert named == {"conformal, momentum default": 2, "conformal, momentum 0.5": 1}


@pytest.mark.parametrize("loss", [0.1, 3.3, 1 / 3, 2.0517, 5e-324])
@pytest.mark.parametrize("count", [3, 5, 7, 10])
def test_a_mean_lies_within_its_range(loss, count):
    # The mean of equal numbers can round to a number below or above them.
    spread = Spread.of([loss] * count)
    assert spread.low <= spread.mean <= spread.high


def test_rotations_that_only_results_have_are_described():
    settings = {"mixer": "sympow", "gating": "scalar"}
    found = [variant_of({**settings, "rotary": rotary}) for rotary in ("step", "half")]
    assert found == ["sympow, gating, stepped rotation", "sympow, gating, rotation of half of the pairs"]


def test_with_many_differences_the_folder_names_a_group(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "small" / f"seed{seed}", [3.0], seed=seed, layers=1, width=32, heads=2)
        write_run(tmp_path / "large" / f"seed{seed}", [3.0], seed=seed, layers=2, width=64, heads=4, learning_rate=1.0)
    assert [group.series for group in groups_of(tmp_path)] == ["conformal (large)", "conformal (small)"]


def test_panels_are_by_power_with_softmax_where_it_belongs(tmp_path):
    write_run(tmp_path / "p2", [3.0], power=2, context=64)
    write_run(tmp_path / "p4", [3.0], power=4, context=128)
    for context in (64, 128, 32):
        write_run(tmp_path / f"s{context}", [3.0], context=context, **VARIANTS["softmax"])
    panels = by_power(groups_of(tmp_path))
    described = {title: [(g.variant, g.context) for g in members] for title, members in panels.items()}
    assert list(described) == ["p = 4", "p = 2"]
    # No power was trained at context 32: softmax at 32 is in the first panel.
    assert described["p = 4"] == [("softmax", 32), ("softmax", 128), ("conformal", 128)]
    assert described["p = 2"] == [("softmax", 64), ("conformal", 64)]


def test_a_repeated_seed_is_pointed_out(tmp_path):
    write_run(tmp_path / "a", [3.0])
    write_run(tmp_path / "b", [3.0])
    (note,) = repeated_seeds(groups_of(tmp_path))
    assert note == "a and b have the same config and the same seed, 0."
