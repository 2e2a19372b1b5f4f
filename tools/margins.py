"""Measures the float32 tolerances of the suite: how far errors stay below them, and that deliberate mistakes do not.

    python tools/margins.py sweep --seeds 50 --jobs 14 --minutes 8 --out build/sweep
    python tools/margins.py mistakes --jobs 14 --minutes 8 --out build/mistakes
    python tools/margins.py table build/sweep build/mistakes --out tools/margins.tsv

Every such comparison calls `support.within`, which reports its error and tolerance to this script. `sweep` runs the
tests with other seeds and with sums in either order (see arithmetic.py). Half of its processes run with
ATEN_CPU_CAPABILITY=default, and every fourth with two threads. It skips what its folder already contains, so that a
sweep can be resumed. `mistakes` runs the tests with one line of the package broken at a time: a sum leaves out its
first term, or an index is off by one. `table` joins the results of both, and fails if a tolerance is less than four
times the worst error or if no mistake crosses it. docs/testing.md says how tolerances are chosen.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).resolve().parent
TESTS = TOOLS.parent / "tests"
TABLE = TOOLS / "margins.tsv"
# A tolerance is at least four times the worst error over at least 50 seeds, half of them in either order of summation.
LARGEST_RATIO = 0.25
FEWEST_SEEDS = 50
# Seconds between two writes of what a process of the sweep has measured.
WRITE_INTERVAL = 10
# The cases of a parametrized test share its seeds: each seed runs in one of every five cases.
LARGEST_SHARE = 5
# Tests that train in several processes take up to half a minute: they run with fewer seeds and wider tolerances.
TRAINING_PROCESSES = tuple(
    f"tests/train/test_{name}.py" for name in ("context_parallel", "distributed", "lost_process")
)
LARGEST_RATIO_OF_TRAINING = 0.1
FEWEST_SEEDS_OF_TRAINING = 5
# In these, processes that the test starts compute one side of the comparison. Their seeds are shifted by
# `support.seed_shift`.
SEVERAL_PROCESSES = ("tests/parallel/", *TRAINING_PROCESSES)
COLUMNS = ("test", "what", "tolerance", "worst error", "ratio", "seeds", "runs", "mistakes", "crossing", "least", "by")


# What was measured -----------------------------------------------------------------------------------------------


@dataclass
class Margin:
    """The errors that were compared with one tolerance of one test."""

    worst: float = 0.0
    setting: str = ""
    runs: int = 0
    mistakes: int = 0
    crossing: int = 0
    # The smallest error, in units of the tolerance, of a mistake that crosses it.
    least: float = math.inf
    by: str = ""

    def add(self, other: Margin) -> None:
        self.runs += other.runs
        self.mistakes += other.mistakes
        self.crossing += other.crossing
        if not other.worst <= self.worst:
            self.worst, self.setting = other.worst, other.setting
        if other.least < self.least:
            self.least, self.by = other.least, other.by


# Keyed by test, comparison and tolerance.
Margins = dict[tuple[str, str, float], Margin]
# For each test, the seeds that were run, and whether sums were taken backwards.
Settings = dict[str, set[tuple[int, bool]]]


@dataclass
class Measured:
    """The joined results of all processes of `sweep` and `mistakes`."""

    margins: Margins
    settings: Settings
    failures: Counter[str]

    def seeds(self, test: str) -> int:
        """The number of seeds with which some case of a test was run, but at most twice the number in either order."""
        ran = {setting for case, ran in self.settings.items() if function_of(case) == test for setting in ran}
        in_order = [{seed for seed, backwards in ran if backwards == order} for order in (False, True)]
        return min(len(set.union(*in_order)), 2 * min(map(len, in_order)))


def merge(into: Margins, other: Margins) -> None:
    for key, margin in other.items():
        into.setdefault(key, Margin()).add(margin)


def write_measured(path: Path, measured: Measured) -> None:
    lines = [json.dumps([*key, vars(margin)]) for key, margin in measured.margins.items()]
    lines += [json.dumps([test, sorted(ran)]) for test, ran in measured.settings.items()]
    lines += [json.dumps([message, count]) for message, count in measured.failures.items()]
    # Written atomically.
    scratch = path.with_suffix(".part")
    scratch.write_text("\n".join(lines) + "\n")
    scratch.replace(path)


def read_measured(*folders: Path) -> Measured:
    measured = Measured({}, {}, Counter())
    for path in sorted(path for folder in folders for path in folder.rglob("*.jsonl")):
        # A process whose time was up before its first test has written an empty line.
        for line in filter(None, path.read_text().splitlines()):
            match json.loads(line):
                case [test, what, tolerance, values]:
                    merge(measured.margins, {(test, what, tolerance): Margin(**values)})
                case [test, list(ran)]:
                    measured.settings.setdefault(test, set()).update((seed, backwards) for seed, backwards in ran)
                case [message, count]:
                    measured.failures[message] += count
    return measured


# Running tests ---------------------------------------------------------------------------------------------------


@contextmanager
def shifted_seeds(shift: int, *, here: bool = True) -> Iterator[None]:
    """Shifts every seed that a test sets: in this process, or (here=False) only in those that it starts."""
    import torch

    import support

    generator, manual_seed = torch.Generator, torch.manual_seed

    class Shifted(generator):  # type: ignore[misc, valid-type]
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + 1000 * shift)

    if here:
        torch.Generator = Shifted  # type: ignore[misc]
        torch.manual_seed = lambda seed: manual_seed(seed + 1000 * shift)
    support.seed_shift = 1000 * shift
    try:
        yield
    finally:
        support.seed_shift = 0
        torch.Generator = generator  # type: ignore[misc]
        torch.manual_seed = manual_seed


@contextmanager
def pool_with(how: Any) -> Iterator[None]:
    """Applies the arithmetic of a test in the processes of its pool as well."""
    import arithmetic
    from parallel.pool import Pool

    run = Pool.run

    def changed(self: Any, function: Any, ranks: int, **arguments: Any) -> list[Any]:
        answers = run(self, functools.partial(arithmetic.call_with, how, function), ranks, **arguments)
        for _, places in answers:
            how.places.update(places)
        return [answer for answer, _ in answers]

    Pool.run = changed
    try:
        yield
    finally:
        Pool.run = run


class Runner:
    """A pytest plugin that runs tests repeatedly and collects the errors of their comparisons."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.measured = Measured({}, {}, Counter())
        self.errors: dict[tuple[str, float], float] = {}
        self.out = Path(job["out"])

    def observe(self, error: float, tolerance: float, what: str) -> None:
        # Comparisons that differ only in a number, such as a position, count as one.
        key = re.sub(r"\d+", "#", what), tolerance
        error = error if error == error else math.inf
        self.errors[key] = max(error, self.errors.get(key, 0.0))

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        chosen = self.job["functions"]
        if chosen is not None:
            items[:] = [item for item in items if function_of(item.nodeid) in chosen]

    def pytest_runtestloop(self, session: Any) -> bool:
        import arithmetic

        import support

        items = [item for item in session.items if not list(item.iter_markers("skip"))]
        support.observe = self.observe
        with arithmetic.installed():
            self.sweep(items) if self.job["mode"] == "sweep" else self.make_mistakes(items)
        write_measured(self.out, self.measured)
        return True

    def run(self, item: Any, following: Any, shift: int, how: Any) -> dict[tuple[str, float], float]:
        """Runs one test once; returns the errors of its comparisons."""
        import arithmetic
        from _pytest.runner import runtestprotocol

        self.errors = {}
        several = item.nodeid.startswith(SEVERAL_PROCESSES)
        began = time.process_time()
        arithmetic.use(how)
        item._initrequest()
        with shifted_seeds(shift, here=not several), pool_with(how):
            reports = runtestprotocol(item, nextitem=following, log=False)
        arithmetic.use(arithmetic.Arithmetic())
        print(f"{time.process_time() - began:.2f} s: {item.nodeid}", flush=True)
        for report in reports:
            if report.failed and how.mistake is None:
                crash = getattr(report.longrepr, "reprcrash", None)
                message = crash.message.splitlines()[0] if crash else str(report.longrepr).splitlines()[-1]
                self.measured.failures[f"{item.nodeid}: {message}"] += 1
        return self.errors

    def out_of_time(self) -> bool:
        return time.time() > self.job["deadline"]

    def sweep(self, items: list[Any]) -> None:
        from arithmetic import Arithmetic

        # Each process starts at another test, so that all are run by some process before the time is up.
        start = self.job["number"] * len(items) // self.job["jobs"]
        items = items[start:] + items[:start]
        before = read_measured(self.out.parent).settings
        idle = set()
        cases = {test: list(of) for test, of in itertools.groupby(sorted(x.nodeid for x in items), function_of)}

        def due(test: str, seed: int, backwards: bool) -> bool:
            """Whether this case runs this seed, and has not been run with it yet."""
            others = cases[function_of(test)]
            chosen = (others.index(test) + seed) % min(LARGEST_SHARE, len(others)) == 0
            return chosen and test not in idle and (seed, backwards) not in before.get(test, ())

        written = time.time()
        for seed, backwards in self.job["settings"]:
            setting = f"seed {seed}, {'backwards' if backwards else 'forwards'}, {self.job['setting']}"
            left = [item for item in items if due(item.nodeid, seed, backwards)]
            for item, following in itertools.pairwise([*left, None]):
                if self.out_of_time():
                    return
                found = self.run(item, following, seed, Arithmetic(backwards=backwards))
                if not found:
                    # It compares nothing in float32.
                    idle.add(item.nodeid)
                    continue
                self.measured.settings.setdefault(item.nodeid, set()).add((seed, backwards))
                margins = {(item.nodeid, *key): Margin(error, setting, 1) for key, error in found.items()}
                merge(self.measured.margins, margins)
                # Often, so that little is lost if the sweep is killed.
                if time.time() > written + WRITE_INTERVAL:
                    write_measured(self.out, self.measured)
                    written = time.time()
            write_measured(self.out, self.measured)
            print(f"{setting}: done", flush=True)

    def make_mistakes(self, items: list[Any]) -> None:
        from arithmetic import Arithmetic, mistakes_in

        random.Random(0).shuffle(items)
        for item in items[self.job["number"] :: self.job["jobs"]]:
            # Tests that train keep the program that starts processes, which takes longer to start than a test.
            following = item.parent if item.nodeid.startswith(TRAINING_PROCESSES) else None
            right = Arithmetic()
            self.run(item, following, 0, right)
            if self.errors and not right.places:
                # The model is in float64 and only its loss in float32: make mistakes in float64, on one side.
                right = Arithmetic(precisions=frozenset({"float64"}))
                self.run(item, following, 0, right)
            missing = {kind: set(self.errors) for kind in ("term", "index")}
            tries = Counter[tuple[str, bool]]()
            chosen = {place: calls for place, calls in right.places.items() if self.job["at"] in place}
            for mistake in mistakes_in(Counter(chosen)):
                always = mistake.call is None
                # Mistakes in all executions are made only for tolerances that no other mistake crosses.
                needed = set.intersection(*missing.values()) if always else missing[mistake.kind]
                if not needed or (tries[mistake.kind, always] >= self.job["mistakes"] and not always):
                    continue
                if self.out_of_time():
                    return
                tries[mistake.kind, always] += 1
                found = self.run(item, following, 0, Arithmetic(mistake=mistake, precisions=right.precisions))
                for key, error in found.items():
                    ratio = error / key[1]
                    margin = Margin(mistakes=1, crossing=int(ratio > 1))
                    if ratio > 1:
                        missing[mistake.kind].discard(key)
                        margin.least, margin.by = ratio, f"{mistake.kind}, {mistake.place}"
                    merge(self.measured.margins, {(item.nodeid, *key): margin})
            if following is not None:
                item.session._setupstate.teardown_exact(None)
            write_measured(self.out, self.measured)


def function_of(test: str) -> str:
    return test.partition("[")[0]


def work(path: str) -> int:
    """Runs one process of `sweep` or `mistakes`."""
    import pytest

    job = json.loads(Path(path).read_text())
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore::UserWarning"]
    return int(pytest.main([*options, *job["paths"]], plugins=[Runner(job)]))


def measure(arguments: argparse.Namespace) -> int:
    """Starts the processes of `sweep` or `mistakes` and waits for them."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    # Every seed in one of the orders first, then in the other, in case the time is up before all have run.
    settings = [(seed, (seed // 2 + order) % 2 == 1) for order in (0, 1) for seed in seeds]
    functions = None
    if not arguments.only and not arguments.all:
        functions = sorted({row["test"] for row in read_table()})
    processes = []
    for number in range(arguments.jobs):
        plain, threads = number % 2 == 1, 2 if number % 4 == 3 else 1
        name = f"{arguments.command}-{os.getpid()}-{number}"
        job = {
            "mode": arguments.command,
            "number": number,
            "jobs": arguments.jobs,
            "mistakes": arguments.mistakes,
            "at": arguments.at,
            "settings": settings[number :: arguments.jobs],
            "setting": f"{'default' if plain else 'native'} instructions, {threads} thread{'s' * (threads > 1)}",
            "functions": functions,
            "paths": arguments.only or [str(TESTS)],
            "deadline": time.time() + 60 * arguments.minutes,
            "out": str(arguments.out / f"{name}.jsonl"),
        }
        spec = arguments.out / f"{name}.json"
        spec.write_text(json.dumps(job))
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": str(threads)}
        environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({"ATEN_CPU_CAPABILITY": "default"} if plain else {})
        with (arguments.out / f"{name}.log").open("w") as log:
            command = [sys.executable, __file__, "work", str(spec)]
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    codes = [process.wait() for process in processes]
    measured = read_measured(arguments.out)
    runs = sum(margin.runs for margin in measured.margins.values())
    print(f"{len(measured.margins)} comparisons, {runs} runs of them")
    for test in sorted({function_of(case) for case in measured.settings}):
        if measured.seeds(test) < arguments.seeds:
            print(f"{measured.seeds(test)} seeds so far: {test}")
    for message, count in measured.failures.most_common():
        print(f"failed {count} times: {message}")
    return max(codes)


# The table -------------------------------------------------------------------------------------------------------


def read_table(path: Path = TABLE) -> list[dict[str, str]]:
    if not path.exists():
        return []
    header, *rows = (line.split("\t") for line in path.read_text().splitlines())
    return [dict(zip(header, row, strict=True)) for row in rows]


def required(test: str) -> tuple[float, int]:
    """The largest allowed ratio of error to tolerance of a test, and the number of seeds that it needs."""
    if test.startswith(TRAINING_PROCESSES):
        return LARGEST_RATIO_OF_TRAINING, FEWEST_SEEDS_OF_TRAINING
    return LARGEST_RATIO, FEWEST_SEEDS


def problems(measured: Measured) -> list[str]:
    """Messages about tolerances that are too tight or that no mistake crosses, and about tests with too few seeds."""
    found = []
    for (test, what, tolerance), margin in measured.margins.items():
        if not margin.worst <= required(test)[0] * tolerance:
            ratio = f"{margin.worst / tolerance:.2f} of its tolerance {tolerance:.1e}"
            found.append(f"{test}: {what} is off by {margin.worst:.2e}, {ratio} ({margin.setting})")
    # All cases of a test run the same code, so a mistake needs to cross the tolerance in one of them only.
    rows = rows_of(measured.margins)
    for (test, what, tolerance), row in rows.items():
        if not row.crossing:
            found.append(f"{test}: {what}: none of {row.mistakes} mistakes crosses {tolerance:.1e}")
    seeds = {test: measured.seeds(test) for test, *_ in rows}
    found += [
        f"{test}: {number} seeds; needs {required(test)[1]}"
        for test, number in seeds.items()
        if number < required(test)[1]
    ]
    return sorted(found)


def rows_of(margins: Margins) -> Margins:
    """Joins the cases of each test."""
    rows: Margins = {}
    for (test, what, tolerance), margin in margins.items():
        merge(rows, {(function_of(test), what, tolerance): margin})
    return rows


def make_table(arguments: argparse.Namespace) -> int:
    measured = read_measured(*arguments.folders)
    before = read_table(arguments.out)
    earlier = {(row["test"], row["what"], row["tolerance"]): row for row in before}
    for (test, what, tolerance), margin in rows_of(measured.margins).items():
        # If mistakes were not measured again, the earlier counts are kept for an unchanged tolerance.
        row = earlier.get((test, what, f"{tolerance:.3g}"))
        if row is not None and not margin.mistakes:
            kept = Margin(mistakes=int(row["mistakes"]), crossing=int(row["crossing"]))
            kept.least, kept.by = float(row["least"]), row["by"]
            merge(measured.margins, {(test, what, tolerance): kept})
    rows = rows_of(measured.margins)
    lines = []
    if arguments.add:
        tests = {test for test, *_ in rows}
        lines = ["\t".join(row.values()) for row in before if row["test"] not in tests]
    for (test, what, tolerance), margin in rows.items():
        values = [f"{tolerance:.3g}", f"{margin.worst:.2e}", f"{margin.worst / tolerance:.4f}", measured.seeds(test)]
        values += [margin.runs, margin.mistakes, margin.crossing, f"{margin.least:.4g}", margin.by]
        lines.append("\t".join([test, what, *map(str, values)]))
    arguments.out.write_text("\n".join(["\t".join(COLUMNS), *sorted(lines)]) + "\n")
    found = problems(measured)
    print("\n".join([*found, f"{len(rows)} rows in {arguments.out}, {len(found)} problems"]))
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("sweep", "mistakes"):
        command = commands.add_parser(name)
        command.add_argument("--out", type=Path, required=True, help="folder for results; later runs add to it")
        command.add_argument("--only", nargs="+", help="tests as in pytest's arguments (default: those of the table)")
        command.add_argument(
            "--all", action="store_true", help="run all tests, to find comparisons that are not in the table"
        )
        command.add_argument("--seeds", type=int, default=50)
        command.add_argument("--first", type=int, default=0, help="the first seed")
        command.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
        command.add_argument("--minutes", type=float, default=60)
        command.add_argument(
            "--mistakes", type=int, default=6, help="mistakes of a kind to try per test before those in all executions"
        )
        command.add_argument("--at", default="", help="make mistakes only in places whose name contains this")
    table = commands.add_parser("table")
    table.add_argument("folders", type=Path, nargs="+")
    table.add_argument("--out", type=Path, default=TABLE)
    table.add_argument("--add", action="store_true", help="keep the rows of tests that were not measured")
    worker = commands.add_parser("work")
    worker.add_argument("job")
    arguments = parser.parse_args()
    if arguments.command == "work":
        return work(arguments.job)
    return make_table(arguments) if arguments.command == "table" else measure(arguments)


if __name__ == "__main__":
    sys.exit(main())
