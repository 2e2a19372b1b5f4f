"""Groups of runs that differ only in their seed, with a name that distinguishes each group from the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sympow.model.config import VARIANTS
from sympow.report.plotting import Style, assign_styles
from sympow.report.run_collection import Run

# Settings in which runs of one group can differ: the seed, and how a run logs and saves.
APART = frozenset(
    {"seed", "log_every", "save", "save_every", "keep", "tensorboard", "wandb", "evaluate_every", "evaluate_tokens"}
)
# Settings that a variant's name, its power and its context already tell.
NAMED = frozenset({"mixer", "gating", "rotary", "power", "context"})
# With more differences than this, a group is named after its folder instead of listing them.
MOST_DIFFERENCES = 3
# Names of variants in figures; other models are described by their gate and rotation.
LABELS = {
    "softmax": "softmax",
    "sympow": "sympow",
    "gating": "sympow + gating",
    "conformal": "conformal",
    "rotation": "sympow + rotation",
}
_GATES = {
    "none": "no gate",
    "scalar": "gating",
    "fixed": "fixed gate",
    "learned": "learned gate",
    "vector": "vector gate",
    "clamped": "clamped gate",
    "half": "half gated",
}
_ROTATIONS = {
    "none": "no rotation",
    "fixed": "fixed rotation",
    "learned": "learned rotation",
    "scale": "scaled rotation",
    "pairs": "per-pair rotation",
    "signed": "signed rotation",
    "grid": "exact rotation",
    # Only in results: models no longer have these.
    "step": "stepped rotation",
    "pair-step": "per-pair stepped rotation",
    "half": "rotation of half of the pairs",
}


@dataclass(frozen=True)
class Spread:
    """Mean and range of a number over seeds."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, numbers: Iterable[float | None]) -> Spread | None:
        """None: there are no numbers."""
        known = [number for number in numbers if number is not None]
        if not known:
            return None
        low, high = min(known), max(known)
        # The rounded mean of equal numbers can lie outside their range.
        return cls(min(max(sum(known) / len(known), low), high), low, high, len(known))


@dataclass(frozen=True)
class Group:
    """Runs of one config.

    Attributes:
        runs: one per seed.
        variant: softmax, sympow, sympow + gating, conformal, sympow + rotation, or a description.
        power: p; None for softmax.
        context: training context.
        series: the variant with the settings that distinguish it from others; the same at every context.
    """

    runs: tuple[Run, ...]
    variant: str
    power: int | None
    context: int
    series: str

    @property
    def seeds(self) -> list[int]:
        return sorted(run.settings["seed"] for run in self.runs)

    @property
    def final_loss(self) -> Spread | None:
        """Final training loss of the finished runs."""
        return Spread.of(run.final_loss for run in self.runs if run.finished)

    @property
    def final_heldout_loss(self) -> Spread | None:
        return Spread.of(run.final_heldout_loss for run in self.runs if run.finished)


def variant_of(settings: dict[str, Any]) -> str:
    """The paper's name of a model, or a description by its mixer, gate and rotation."""
    for name, label in LABELS.items():
        if VARIANTS[name].items() <= settings.items():
            return label
    mixer, gate, rotation = settings["mixer"], settings["gating"], settings["rotary"]
    return f"{mixer}, {_GATES.get(gate, gate)}, {_ROTATIONS.get(rotation, rotation)}"


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups runs by config; sorted by variant in the paper's order, then by series, power and context."""
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(_key(run), []).append(run)
    alike: dict[tuple[str, int | None], list[list[Run]]] = {}
    for group in members.values():
        settings = group[0].settings
        alike.setdefault((variant_of(settings), _power(settings)), []).append(group)
    groups = []
    for (variant, power), candidates in alike.items():
        names = _differences(candidates)
        for group in candidates:
            settings = group[0].settings
            series = variant
            if len(names) > MOST_DIFFERENCES:
                series = f"{variant} ({_folder_of(group)})"
            elif names:
                series = ", ".join([variant, *(f"{plain_words(name)} {shown(settings.get(name))}" for name in names)])
            ordered = tuple(sorted(group, key=lambda run: (run.settings["seed"], run.name)))
            groups.append(Group(ordered, variant, power, settings["context"], series))
    order = {name: place for place, name in enumerate(LABELS.values())}
    return sorted(groups, key=lambda g: (order.get(g.variant, len(order)), g.series, g.power or 0, g.context))


def by_power(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """Panels as in the paper: one per power, highest first, each with softmax at the same contexts.

    Softmax at a context that no power has is in the first panel.
    """
    powers = sorted({group.power for group in groups if group.power is not None}, reverse=True)
    if not powers:
        return {"": list(groups)}
    contexts = {power: {group.context for group in groups if group.power == power} for power in powers}
    anywhere = set().union(*contexts.values())

    def belongs(group: Group, power: int) -> bool:
        if group.power is not None:
            return group.power == power
        return group.context in contexts[power] or (power == powers[0] and group.context not in anywhere)

    return {f"p = {power}": [group for group in groups if belongs(group, power)] for power in powers}


def styles_of(groups: Iterable[Group]) -> dict[str, Style]:
    """The look of each series, by its name."""
    return assign_styles((group.series, group.variant) for group in groups)


def unit_of(groups: Iterable[Group]) -> str:
    """The name of one token of all runs: "byte" if all runs are byte-level, otherwise "token"."""
    units = {run.unit for group in groups for run in group.runs}
    return units.pop() if len(units) == 1 else "token"


def repeated_seeds(groups: Iterable[Group]) -> list[str]:
    """Notes on runs of the same config and seed, which count as two seeds."""
    notes = []
    for group in groups:
        by_seed: dict[int, list[str]] = {}
        for run in group.runs:
            by_seed.setdefault(run.settings["seed"], []).append(run.name)
        notes += [
            f"{' and '.join(names)} have the same config and the same seed, {seed}."
            for seed, names in by_seed.items()
            if len(names) > 1
        ]
    return notes


def differing(runs: Sequence[Run]) -> list[str]:
    """Names of settings that differ between runs, in the order of the config; a missing setting is None."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({json.dumps(run.settings.get(name)) for run in runs}) > 1]


def plain_words(name: str) -> str:
    """batch_tokens → batch tokens."""
    return name.replace("_", " ")


def _key(run: Run) -> str:
    # None means the default, as does a setting that only other configs have: results keep those of removed features.
    kept = {name: value for name, value in run.settings.items() if name not in APART and value is not None}
    return json.dumps(kept, sort_keys=True)


def _power(settings: dict[str, Any]) -> int | None:
    return None if settings["mixer"] == "softmax" else int(settings["power"])


def _differences(groups: Sequence[Sequence[Run]]) -> list[str]:
    """Settings that distinguish groups of one variant, power and context, at any context."""
    by_context: dict[int, list[Run]] = {}
    for group in groups:
        by_context.setdefault(group[0].settings["context"], []).append(group[0])
    found = dict.fromkeys(name for runs in by_context.values() for name in differing(runs))
    return [name for name in found if name not in APART | NAMED]


def _folder_of(group: Sequence[Run]) -> str:
    """The common beginning of the names of a group's runs; the name itself for a single run."""
    parts = [run.name.split("/") for run in group]
    common = []
    for at_place in zip(*parts, strict=False):
        if len(set(at_place)) > 1:
            break
        common.append(at_place[0])
    return "/".join(common) or group[0].name


def shown(value: Any) -> str:
    """A setting's value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "default" if value is None else str(value)
