"""Writes the tables of docs/reproduction_tables.md, between its two marks: our results beside the authors'.

    python -m experiments.reproduction_tables --results experiments/results/small

Numbers are final training losses unless a table says otherwise. A difference is between two runs with the same seed,
which see the same batches, averaged over the seeds that both have, ± the standard error of that mean. An authors'
ordering holds if our difference at the same power and context has the sign of theirs and is more than two standard
errors away from zero; with one seed only the sign is compared. Where their difference is below the precision of numbers
read off their plots, there is no ordering to compare with.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.figures import accuracy_table, recall_table
from experiments.grid import SCALES
from experiments.paper import CURVES
from experiments.store import Store
from experiments.text_run import heldout_loss
from sympow.files import write_atomically

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
# Training loss near step 100,000, LongCrawl64, 124M parameters; read off the authors' published plots.
AUTHORS: dict[tuple[int, int], tuple[float, float, float, float]] = {
    (2, 256): (2.565, 2.581, 2.567, 2.519),
    (2, 1_024): (2.412, 2.494, 2.440, 2.379),
    (2, 4_096): (2.375, 2.458, 2.358, 2.281),
    (2, 8_192): (2.362, 2.480, 2.365, 2.296),
    (4, 1_024): (2.412, 2.412, 2.401, 2.346),
    (4, 4_096): (2.375, 2.320, 2.313, 2.249),
    (4, 16_384): (2.389, 2.345, 2.304, 2.233),
}
# Trained at 16,384, evaluated at 65,536, p = 4.
AUTHORS_BEYOND = (2.79, 7.12, 2.29, 2.18)
# Precision of numbers that are read off a plot: a smaller difference of theirs gives no ordering.
READING_ERROR = 0.005
# An experiment with a table of its own, whose runs are in no other: each switch at its best learning rate.
TEXT_ROTATION = "text_rotation"
# Seeds on which rates and switches were chosen at scale small, whose tables these are; on all others nothing was.
CHOOSING_SEEDS = frozenset(SCALES["small"]().seeds)
# Settings of its runs that are not their switch.
SIZE_AND_RATE = ("batch_tokens", "micro_batch_tokens", "steps", "learning_rate")
Row = dict[str, Any]


@dataclass(frozen=True)
class Difference:
    """A difference between two variants, over seeds.

    Attributes:
        mean: of the first less the second.
        error: standard error; None with one seed.
        seeds: how many.
    """

    mean: float
    error: float | None
    seeds: int

    def __str__(self) -> str:
        spread = "one seed" if self.error is None else f"± {self.error:.3f}, {self.seeds} seeds"
        return f"{self.mean:+.3f} ({spread})"

    def less(self, other: Difference) -> Difference:
        """Subtracts the difference of other runs."""
        known = self.error is not None and other.error is not None
        error = math.hypot(self.error or 0.0, other.error or 0.0) if known else None
        return Difference(self.mean - other.mean, error, min(self.seeds, other.seeds))

    def holds(self, sign: int) -> str:
        """Whether it is above zero (sign 1) or below (−1)."""
        if self.error is None:
            return f"{'yes' if self.mean * sign > 0 else 'no'} (one seed)"
        if abs(self.mean) <= 2 * self.error:
            return "within the noise"
        return "yes" if self.mean * sign > 0 else "no"

    def verdict(self) -> str:
        """Whether the first is ahead of the second, whose loss is then higher, by more than two standard errors."""
        place = "ahead" if self.mean < 0 else "behind"
        if self.error is None:
            return f"{place} (one seed)"
        return place if abs(self.mean) > 2 * self.error else "within two standard errors"


class Results:
    """Rows of finished runs, selected by variant, power, context and changes."""

    def __init__(self, rows: Sequence[Row]) -> None:
        # torch.compile does not change what a run measures.
        self.rows = [
            {**row, "changes": {name: value for name, value in row["changes"].items() if name != "compile"}}
            for row in rows
            if row["status"] == "done"
        ]

    def on_text(self) -> Results:
        """Runs on the scale's own text."""
        return Results([row for row in self.rows if "data" not in row["changes"]])

    def of(self, variant: str, power: int, context: int, changes: dict[str, Any] | None = None) -> dict[int, Row]:
        """By seed."""
        power_of = None if variant == "softmax" else power
        wanted = (variant, power_of, context, changes or {})
        return {
            row["seed"]: row
            for row in self.rows
            if (row["variant"], row["power"], row["context"], row["changes"]) == wanted
        }

    def contexts(self, power: int) -> list[int]:
        return sorted({row["context"] for row in self.rows if row["power"] == power and not row["changes"]})


def final_loss(row: Row) -> float:
    return float(row["final_loss"])


def within(context: int) -> Callable[[Row], float]:
    return lambda row: float(row["by_context"][str(context)])


def paired_difference(
    one: dict[int, Row], other: dict[int, Row], number: Callable[[Row], float] = final_loss
) -> Difference | None:
    """Over the seeds that both have; None: there are none."""
    found = [number(one[seed]) - number(other[seed]) for seed in sorted(one.keys() & other.keys())]
    if not found:
        return None
    error = statistics.stdev(found) / math.sqrt(len(found)) if len(found) > 1 else None
    return Difference(statistics.fmean(found), error, len(found))


def mean(rows: dict[int, Row], number: Callable[[Row], float] = final_loss) -> str:
    found = [number(row) for row in rows.values()]
    if not found:
        return "–"
    return f"{statistics.fmean(found):.3f}" + (f" ± {statistics.stdev(found):.3f}" if len(found) > 1 else "")


def tables(results: Results) -> Iterator[str]:
    """Every table there are results for."""
    if not results.rows:
        yield "No results yet.\n"
        return
    read = results.on_text()
    yield from _losses(read)
    yield from _claims(read)
    yield from _beyond(read)
    yield from _variants(read)
    yield from _rotation(read)
    yield from _learning_rates(read)


def text_rotation_tables(rows: Sequence[Row]) -> Iterator[str]:
    """For each size of batch, how far each rotation is from gating, both at their best rates.

    The best rate of a switch is that of the lowest held-out loss among those trained on most seeds. A rotation with
    other rates θ than the paper's is compared with gating of the same rates as well. The sentence below a table says
    how many comparisons there were, since of three seeds without a difference one in eleven is ahead by two standard
    errors. Seeds on which nothing was chosen have a table of their own.
    """
    for batch in sorted({row["changes"]["batch_tokens"] for row in rows}):
        of_batch = [row for row in rows if row["changes"]["batch_tokens"] == batch]
        found = {switch: _at_best_rate(of_batch, switch) for switch in sorted({_switch(row) for row in of_batch})}
        if not found.get("gating"):
            continue
        tokens, context = of_batch[0]["tokens"], of_batch[0]["context"]
        yield f"### Rotation on text: batches of {batch:,} tokens, {tokens:,} in all, context {context:,}, p = 2\n"
        yield from _switch_table(_of_seeds(found, lambda seed: seed in CHOOSING_SEEDS))
        fresh = _of_seeds(found, lambda seed: seed not in CHOOSING_SEEDS)
        if any(fresh.values()):
            yield "On fresh seeds, on which neither rates nor switches were chosen:\n"
            yield from _switch_table(fresh)


def _of_seeds(found: dict[str, dict[int, Row]], wanted: Callable[[int], bool]) -> dict[str, dict[int, Row]]:
    """Runs of some seeds, by switch."""
    return {switch: {seed: row for seed, row in runs.items() if wanted(seed)} for switch, runs in found.items()}


def _switch_table(found: dict[str, dict[int, Row]]) -> Iterator[str]:
    """Each switch less its references, and how many comparisons there are."""
    yield _table_head(["switch", "best rate", "minus", "its best rate", "train loss", "held out", "held out is"])
    ahead, compared = [], 0
    for switch, reference in _comparisons(found):
        one, other = found[switch], found[reference]
        difference_of_text = paired_difference(one, other, heldout_loss)
        if difference_of_text is None:
            continue
        rates = [f"{next(iter(of.values()))['changes']['learning_rate']:g}" for of in (one, other)]
        numbers = [str(paired_difference(one, other)), str(difference_of_text), difference_of_text.verdict()]
        yield _table_row([switch, rates[0], reference, rates[1], *numbers])
        if switch.startswith("conformal"):
            compared += 1
            ahead += [f"{switch} (of {reference})"] if difference_of_text.verdict() == "ahead" else []
    yield ""
    if compared:
        which = f"are {', '.join(ahead)}" if ahead else "is none"
        yield f"Of {compared} comparisons of rotations, ahead by more than two standard errors {which}.\n"


def _switch(row: Row) -> str:
    """What a run of `text_rotation` changes besides its size and rate, in words."""
    changes = [f"{name} {value}" for name, value in row["changes"].items() if name not in SIZE_AND_RATE]
    return ", ".join([row["variant"], *changes])


def _at_best_rate(rows: Sequence[Row], switch: str) -> dict[int, Row]:
    """The runs of a switch by seed, with the best of its learning rates; none, if each has diverged on some seed.

    Rates are compared that were trained on most of the choosing seeds, by the mean over them: the others were given up
    on fewer.
    """
    by_rate: dict[float, dict[int, Row]] = {}
    for row in rows:
        if _switch(row) == switch:
            by_rate.setdefault(row["changes"]["learning_rate"], {})[row["seed"]] = row
    losses = {
        rate: [heldout_loss(row) for seed, row in runs.items() if seed in CHOOSING_SEEDS]
        for rate, runs in by_rate.items()
    }
    most = max(map(len, losses.values()))
    tried = {rate: statistics.fmean(found) for rate, found in losses.items() if found and len(found) == most}
    best = min(tried, key=tried.__getitem__, default=None)
    if best is None or math.isinf(tried[best]):
        return {}
    return {seed: row for seed, row in by_rate[best].items() if row["status"] == "done"}


def _comparisons(found: dict[str, dict[int, Row]]) -> Iterator[tuple[str, str]]:
    """Switches with their references: gating, and gating of the same rates θ."""
    for switch, runs in found.items():
        if switch != "gating":
            yield switch, "gating"
        rates = {row["changes"].get("max_rate") for row in runs.values()} - {None}
        for rate in rates:
            same = f"gating, max_rate {rate}"
            if same in found and switch != same:
                yield switch, same


# What the parts of the names of these sweeps mean.
REMEDIES = """\
`pairs`: one β per pair; `signed`: signed angles in half of the pairs; `grid`: these rounded. `ungated`, `half-gated`,
`clamped`: no gates, gates in half of the heads, gates that can be exactly 1; else the paper's. `noise`: on keys in
training, of deviation 1 (`less`: 0.5, `more`: 2). `random-lengths`: of training rows. `slow`: RoPE of at most 1e-4 rad
per token. `p4`: p = 4, else 2.
"""

CURRICULUM = """\
`all`: angles on a grid, gates that can be exactly 1, slow RoPE, noise on keys, rows that grow. `softmax`, `gating`,
`pair-rotation`: rows that grow alone. The others are `all` with one or two of these changed.
"""


def sweep_tables(store: Store) -> Iterator[str]:
    """The tables of sweeps, of those experiments that have results."""
    titles = {
        "state_tracking": "State tracking: accuracy in % at 1, 4 and 16 times the training length, mean over seeds",
        "tracking_remedies": "State tracking beyond the training length: likewise",
        "tracking_longer": "State tracking beyond the training length, trained four times as long: likewise",
        "tracking_curriculum": "State tracking with rows that grow to 128 tokens in training: likewise",
        "recall": "Associative recall: right answers in % against the size of the state, by length / pairs",
    }
    notes = {"tracking_remedies": REMEDIES, "tracking_longer": REMEDIES, "tracking_curriculum": CURRICULUM}
    for experiment, title in titles.items():
        rows = [result.row for result in store.tables.get(experiment, {}).values()]
        if not rows:
            continue
        if notes.get(experiment) == REMEDIES:
            # Beside one another in the table: a model with noise and without.
            rows.sort(key=lambda row: str(row["sweep"]))
        yield f"### {title}\n"
        if experiment in notes:
            yield notes[experiment]
        yield from (recall_table if experiment == "recall" else accuracy_table)(rows)
        yield ""


def _losses(results: Results) -> Iterator[str]:
    yield "### Final training loss (Fig. 1)\n\nThe authors' number, ours (mean ± deviation of one run over seeds).\n"
    yield _table_head(["p, context", *CURVES])
    for power in (2, 4):
        for context in results.contexts(power):
            theirs = AUTHORS.get((power, context), ("–",) * 4)
            ours = [mean(results.of(variant, power, context)) for variant in CURVES]
            cells = [f"{one}, {other}" for one, other in zip(theirs, ours, strict=True)]
            yield _table_row([f"{power}, {context:,}", *cells])
    yield ""


def _claims(results: Results) -> Iterator[str]:
    yield "### Orderings\n"
    yield _table_head(["difference", "where", "authors", "ours", "authors' ordering", "holds"])
    for power in (2, 4):
        contexts = results.contexts(power)
        for context in sorted({*contexts[:1], *contexts[-1:]}):
            for one, other in (("sympow", "softmax"), ("gating", "sympow"), ("conformal", "gating")):
                found = paired_difference(results.of(one, power, context), results.of(other, power, context))
                if found is not None:
                    theirs = _authors_difference(one, other, power, context)
                    words = (f"{one} is better", f"{one} is worse")
                    yield _compared(f"{one} − {other}", f"p = {power}, {context:,}", theirs, found, words)
        if len(contexts) > 1:
            yield from _growth(results, power, contexts[0], contexts[-1])
    yield ""


def _growth(results: Results, power: int, shortest: int, longest: int) -> Iterator[str]:
    """How much further behind softmax sympow is at the longest context than at the shortest."""
    gaps = [
        paired_difference(results.of("sympow", power, context), results.of("softmax", power, context))
        for context in (shortest, longest)
    ]
    if gaps[0] is None or gaps[1] is None:
        return
    first, last = (_authors_difference("sympow", "softmax", power, context) for context in (shortest, longest))
    theirs = None if first is None or last is None else last - first
    where = f"p = {power}, {shortest:,} to {longest:,}"
    words = ("the gap shrinks", "the gap grows")
    yield _compared("growth of sympow − softmax", where, theirs, gaps[1].less(gaps[0]), words)


def _compared(name: str, where: str, theirs: float | None, ours: Difference, words: tuple[str, str]) -> str:
    """A row: the authors' difference, ours, and whether ours has the ordering that theirs has.

    Args:
        words: what a difference below zero means, and what one above zero means.
    """
    if theirs is None:
        ordering, holds = "not measured", "–"
    elif abs(theirs) < READING_ERROR:
        ordering, holds = "none", "–"
    else:
        sign = 1 if theirs > 0 else -1
        ordering, holds = words[sign > 0], ours.holds(sign)
    return _table_row([name, where, _signed(theirs), str(ours), ordering, holds])


def _beyond(results: Results) -> Iterator[str]:
    trained = [(power, context) for power in (2, 4) for context in results.contexts(power) if context >= 4_096]
    if not trained:
        return
    yield "### Beyond the training context (Fig. 2)\n\nAverage held-out loss within the training context, and beyond.\n"
    yield _table_head(["p, trained at", "evaluated at", *CURVES])
    for power, context in trained:
        rows = [results.of(variant, power, context) for variant in CURVES]
        known = {int(at) for of in rows for row in of.values() for at in row["by_context"]}
        for at in sorted({context, 4 * context, 65_536}):
            if at in known:
                cells = [mean({s: r for s, r in of.items() if str(at) in r["by_context"]}, within(at)) for of in rows]
                yield _table_row([f"{power}, {context:,}", f"{at:,}", *cells])
    yield _table_row(["authors: 4, 16,384", "65,536", *map(str, AUTHORS_BEYOND)])
    yield ""


def _variants(results: Results) -> Iterator[str]:
    """The ablation and other gates and rotations, without changed settings."""
    paper = set(CURVES)
    others = [row for row in results.rows if row["variant"] not in paper and not row["changes"]]
    if not others:
        return
    yield "### Other gates and rotations, p = 2\n"
    yield _table_head(["context", "variant", "train loss", "held out", "minus gating"])
    for context in sorted({row["context"] for row in others}):
        names = [*CURVES, *sorted({row["variant"] for row in others if row["context"] == context})]
        gated = results.of("gating", 2, context)
        for name in names:
            rows = results.of(name, 2, context)
            if rows:
                held_out = mean(rows, heldout_loss)
                against = paired_difference(rows, gated) if name != "gating" else None
                yield _table_row([f"{context:,}", name, mean(rows), held_out, str(against or "")])
    yield ""


def _rotation(results: Results) -> Iterator[str]:
    """Rotations less gating: on the seeds on which they were chosen, and on fresh ones."""
    title = "### Does rotation pay? Loss minus that of gating with the same settings, p = 2\n"
    for choosing, words in ((True, title), (False, "On fresh seeds, on which nothing was chosen:\n")):
        of_seeds = Results([row for row in results.rows if (row["seed"] in CHOOSING_SEEDS) == choosing])
        lines = list(_rotation_lines(of_seeds))
        if lines:
            yield words
            yield _table_head(["variant", "context", "changed", "train loss", "held out", "better than gating"])
            yield from lines
            yield ""


def _rotation_lines(results: Results) -> Iterator[str]:
    only_of_rotations = ("rotation_rate", "rotation_gradient", "rotation_init")
    kinds = {
        (row["variant"], row["context"], json.dumps(row["changes"], sort_keys=True)): row["changes"]
        for row in results.rows
        if row["variant"] in ("conformal", "learned-rates", "pair-rotation", "unrotated") and row["power"] == 2
    }
    for (variant, context, _), changes in sorted(kinds.items()):
        shared = {name: value for name, value in changes.items() if name not in only_of_rotations}
        one, other = results.of(variant, 2, context, changes), results.of("gating", 2, context, shared)
        found, held_out = paired_difference(one, other), paired_difference(one, other, heldout_loss)
        if found is not None and held_out is not None:
            what = ", ".join(f"{name} {_shown(value)}" for name, value in changes.items()) or "–"
            yield _table_row([variant, f"{context:,}", what, str(found), str(held_out), found.holds(-1)])


def _learning_rates(results: Results) -> Iterator[str]:
    """Losses at each learning rate, where the same model was trained equally long with several; without fresh seeds."""
    found: dict[tuple[str, int, int, int], dict[float, dict[int, Row]]] = {}
    for row in results.rows:
        if row["seed"] in CHOOSING_SEEDS and row["changes"].keys() <= {"learning_rate", "tokens"}:
            rates = found.setdefault((row["variant"], row["power"] or 0, row["context"], row["tokens"]), {})
            rates.setdefault(row["config"]["optimizer"]["learning_rate"], {})[row["seed"]] = row
    compared = {kind: rates for kind, rates in found.items() if len(rates) > 1}
    if not compared:
        return
    yield "### Learning rates\n"
    yield _table_head(["variant", "p", "context", "tokens", "learning rate", "train loss", "held out"])
    for (variant, power, context, tokens), rates in sorted(compared.items()):
        for rate, rows in sorted(rates.items()):
            losses = [mean(rows), mean(rows, heldout_loss)]
            model = [variant, f"{power or '–'}", f"{context:,}", f"{tokens:,}"]
            yield _table_row([*model, f"{rate:g}", *losses])
    yield ""


def _authors_difference(one: str, other: str, power: int, context: int) -> float | None:
    row = AUTHORS.get((power, context))
    return None if row is None else row[CURVES.index(one)] - row[CURVES.index(other)]


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _signed(number: float | None) -> str:
    return "–" if number is None else f"{number:+.3f}"


def _table_head(cells: Sequence[str]) -> str:
    return _table_row(cells) + "\n" + _table_row(["---"] * len(cells))


def _table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=Path("experiments/results/small"))
    parser.add_argument("--page", type=Path, default=Path("docs/reproduction_tables.md"))
    arguments = parser.parse_args(words)
    text = arguments.page.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{arguments.page} must have the marks {BEGIN} and {END}")
    if not any(arguments.results.glob("*.jsonl")):
        raise SystemExit(f"--results must be a folder with the tables of experiments, and {arguments.results} has none")
    store = Store(arguments.results)
    runs, of_text = store.rows(), [result.row for result in store.tables.get(TEXT_ROTATION, {}).values()]
    others = runs.keys() - {row["run"] for row in of_text}
    of_runs = [*tables(Results([runs[name] for name in sorted(others)])), *text_rotation_tables(of_text)]
    written = "\n".join([*of_runs, *sweep_tables(store)])
    write_atomically(arguments.page, f"{before}{BEGIN}\n\n{written}\n{END}{after}".encode())


if __name__ == "__main__":
    main()
