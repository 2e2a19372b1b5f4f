"""Trains the runs or sweeps of an experiment that have no results yet, one after another.

    python -m experiments                                    list the experiments
    python -m experiments figure1 --scale small              what is done is skipped, what was interrupted is continued
    python -m experiments figure1 --scale small --plan       print a shell command for each run that is left

Several of these commands may run at the same time, on machines that share the folders.
"""

from __future__ import annotations

import argparse
import fnmatch
import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from experiments import beyond_the_paper, paper, recall, state_tracking, text_rotation
from experiments.grid import SCALES, Scale, read_setting
from experiments.runner import Work, is_alone, train_all
from experiments.store import Store
from experiments.sweep import Sweep
from experiments.text_run import PlannedRun, differences
from sympow.errors import UserError
from sympow.invocation import first_process

EXPERIMENTS: dict[str, Callable[[Scale], Sequence[PlannedRun] | Sequence[Sweep]]] = {
    experiment.__name__: experiment
    for experiment in (
        paper.figure1,
        paper.figure2,
        paper.figure3,
        paper.figure4,
        paper.ablation,
        paper.full_size,
        beyond_the_paper.learning_rate,
        beyond_the_paper.gates,
        beyond_the_paper.rotations,
        beyond_the_paper.rotation,
        text_rotation.text_rotation,
        text_rotation.positions,
        recall.recall,
        state_tracking.state_tracking,
        state_tracking.tracking_remedies,
        state_tracking.tracking_longer,
        state_tracking.tracking_curriculum,
    )
}
RESULTS = Path("experiments/results")
OUT = Path("runs/experiments")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", nargs="?", choices=EXPERIMENTS, metavar="NAME", help="without it, all are listed")
    parser.add_argument("--scale", choices=SCALES, default="cpu", help="by default %(default)s")
    parser.add_argument("--plan", action="store_true", help="print a shell command for each run or sweep that is left")
    parser.add_argument("--only", action="append", help="names of runs or sweeps, with * as a wildcard; repeatable")
    parser.add_argument(
        "--set", action="append", default=[], type=read_setting, help="NAME=VALUE of every run or sweep; repeatable"
    )
    parser.add_argument("--results", type=Path, help=f"folder for results; by default {RESULTS}/SCALE")
    parser.add_argument("--out", type=Path, help=f"folder for what is being trained; by default {OUT}/SCALE")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default a GPU if there is one")
    given = parser.parse_args(arguments)
    if given.name is None:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:20} {(inspect.getdoc(experiment) or '').partition(chr(10))[0]}")
        return
    scale = replace(SCALES[given.scale](), changes=dict(given.set))
    results, out = given.results or RESULTS / given.scale, given.out or OUT / given.scale

    def works(store: Store) -> list[Work]:
        return [work for work in works_of(given.name, scale, store) if _is_chosen(work.name, given.only)]

    def command(name: str) -> str:
        flags = ["--scale", given.scale, "--only", name]
        for flag in ("results", "out", "device"):
            flags += [f"--{flag}", str(getattr(given, flag))] if getattr(given, flag) is not None else []
        for key, value in given.set:
            flags += ["--set", f"{key}={json.dumps(value)}"]
        return " ".join([_launcher(scale, given.device), given.name, *map(shlex.quote, flags)])

    try:
        store = Store(results)
        known = works(store)
        left = [work for work in known if store.find(given.name, work) is None]
    except UserError as error:
        # Of a setting, or of results that are there.
        parser.error(str(error))
    if not known:
        parser.error(
            f"--only must match some of {', '.join(work.name for work in works_of(given.name, scale, store))}; those "
            "that depend on the results of others can be chosen once these are there"
        )
    if first_process():
        print(f"{given.name} at scale {given.scale}: {len(left)} of {len(known)} left", file=sys.stderr)
    if given.plan:
        for work in left:
            print(command(work.name))
        return
    if scale.processes > 1 and given.device != "cpu" and (is_alone() or len(known) > 1):
        parser.error(f"at scale {given.scale} torchrun trains one run at a time: --plan prints its commands")
    device = given.device or ("cuda" if torch.cuda.is_available() else "cpu")
    begin = time.monotonic()

    def say(line: str) -> None:
        if not first_process():
            return
        minutes, seconds = divmod(int(time.monotonic() - begin), 60)
        print(f"{minutes:3d}:{seconds:02d}  {line}", file=sys.stderr, flush=True)

    if not train_all(given.name, works, results, out, device, command, say):
        raise SystemExit("stopped: the same command continues")


def works_of(name: str, scale: Scale, store: Store) -> list[Work]:
    """The runs or sweeps of an experiment that can be told from the results so far, each once.

    Raises:
        UserError: two of one name differ, or the scale has no sweeps, or a setting of `scale.changes` does not apply.
    """
    works: dict[str, Work] = {}
    for work in EXPERIMENTS[name](replace(scale, finished=store.rows())):
        if isinstance(work, Sweep):
            if scale.processes > 1:
                raise UserError(f"--scale must be cpu or small for {name}, got {scale.name}")
            work = work.changed(scale.changes)
        first = works.setdefault(work.name, work)
        if isinstance(work, PlannedRun) and isinstance(first, PlannedRun):
            same = not differences(first.config, work.config) and first.evaluation == work.evaluation
        else:
            same = first is work
        if not same:
            raise UserError(f"{name} has two of the name {work.name} that differ: give them different names")
    return list(works.values())


def _launcher(scale: Scale, device: str | None) -> str:
    if scale.processes > 1 and device != "cpu":
        return f"torchrun --standalone --nproc-per-node {scale.processes} -m experiments"
    return "python -m experiments"


def _is_chosen(name: str, only: Sequence[str] | None) -> bool:
    return not only or any(fnmatch.fnmatchcase(name, pattern) for pattern in only)


if __name__ == "__main__":
    main()
