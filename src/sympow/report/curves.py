"""Data of the training curves: metrics over steps or training time, smoothed, and downsampled for the HTML page."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sympow.report.run_collection import Run

# Points of a curve on the page: half of them evenly spaced, half of them geometrically, for a logarithmic axis.
POINTS = 600
_PER_LAYER = re.compile(r"(?P<quantity>.+)/layer_(?P<layer>\d+)")


@dataclass(frozen=True)
class Curve:
    """A metric over a run, in points that average several steps.

    Attributes:
        steps: the last step of each point.
        values: the mean over the point's steps.
        counts: logged steps in each point.
    """

    steps: list[int]
    values: list[float]
    counts: list[int]


def metric_names(run: Run) -> list[str]:
    """Names of metrics of a run that are not per layer, in order of first appearance."""
    names = dict.fromkeys(name for line in run.metrics for name in line)
    return [name for name in names if name != "step" and not _PER_LAYER.fullmatch(name)]


def curve(run: Run, name: str, points: int = POINTS) -> Curve:
    """A metric in at most `points` points, each the mean over a range of steps. Values that are not finite are omitted.

    Points end at the same steps in all runs of the same length, so that seeds can be averaged.
    """
    edges = _edges(max(run.settings["steps"], run.steps), points)
    found = Curve([], [], [])
    place = last = -1
    for line in run.metrics:
        value = line.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            continue
        while edges[place] < line["step"] or place < 0:
            place += 1
        if place != last:
            last = place
            for numbers in (found.steps, found.values, found.counts):
                numbers.append(0)
        count = found.counts[-1] + 1
        found.steps[-1], found.counts[-1] = int(line["step"]), count
        found.values[-1] += (value - found.values[-1]) / count
    return found


def seconds_at(run: Run, steps: Sequence[int]) -> list[float] | None:
    """Training time up to each of these steps, from the logged tokens per second; None if there are none.

    Evaluations, checkpoints and interruptions do not count.
    """
    tokens = run.settings["batch_tokens"]
    known = [(0.0, 0.0)]
    for line in run.metrics:
        rate = line.get("tokens_per_second")
        if rate:
            step, seconds = known[-1]
            known.append((line["step"], seconds + (line["step"] - step) * tokens / rate))
    if len(known) == 1:
        return None
    found = []
    place = 1
    for step in steps:
        while place < len(known) - 1 and known[place][0] < step:
            place += 1
        (low, before), (high, after) = known[place - 1 : place + 1]
        # After the last logged speed, extrapolate it.
        found.append(before + (after - before) * (step - low) / (high - low))
    return found


def median_speed(run: Run) -> float | None:
    """Median tokens per second without the first logged value, which includes start-up; None if there are none."""
    rates = [line["tokens_per_second"] for line in run.metrics if line.get("tokens_per_second")]
    return statistics.median(rates[1:] or rates) if rates else None


def by_layer(run: Run) -> dict[str, tuple[list[int], list[list[float | None]]]]:
    """Metrics that are per layer: by quantity, the steps and the values[layer][step], None where one is missing."""
    found: dict[str, dict[int, dict[int, float]]] = {}
    for line in run.metrics:
        for name, value in line.items():
            if match := _PER_LAYER.fullmatch(name):
                found.setdefault(match["quantity"], {}).setdefault(int(line["step"]), {})[int(match["layer"])] = value
    tables = {}
    for quantity, at_steps in found.items():
        # More columns could not be distinguished.
        steps = _every(list(at_steps), 60)
        layers = 1 + max(layer for values in at_steps.values() for layer in values)
        tables[quantity] = (steps, [[at_steps[step].get(layer) for step in steps] for layer in range(layers)])
    return tables


def smooth(found: Curve, window: float) -> list[float]:
    """Moving average over the steps within a window around each point.

    Near the beginning, where curves are steep, the window shrinks so that it stays centred; at the end it is cut off.
    """
    steps = found.steps
    smoothed = []
    low = high = 0
    weight = total = 0.0
    for step in steps:
        reach = min(window / 2, step - steps[0])
        while high < len(steps) and steps[high] <= step + reach:
            weight, total = weight + found.counts[high], total + found.counts[high] * found.values[high]
            high += 1
        while steps[low] < step - reach:
            weight, total = weight - found.counts[low], total - found.counts[low] * found.values[low]
            low += 1
        smoothed.append(total / weight)
    return smoothed


def mean_and_range(curves: Sequence[Mapping[int, float]]) -> dict[int, tuple[float, float, float]]:
    """At every step that all curves have: mean, lowest and highest."""
    shared = [step for step in curves[0] if all(step in other for other in curves[1:])]
    values = {step: [one[step] for one in curves] for step in shared}
    return {step: (sum(x) / len(x), min(x), max(x)) for step, x in values.items()}


def _edges(steps: int, points: int) -> list[int]:
    """Last step of each point; the last point ends at the last step."""
    if steps <= points:
        return list(range(1, steps + 1))
    half = points // 2
    even = {round(steps * (n + 1) / half) for n in range(half)}
    ratios = {round(steps ** ((n + 1) / half)) for n in range(half)}
    return sorted(even | ratios)


def _every(steps: list[int], most: int) -> list[int]:
    if len(steps) <= most:
        return steps
    return [steps[round(n * (len(steps) - 1) / (most - 1))] for n in range(most)]
