"""The command `sympow experiment`."""

from __future__ import annotations

import fnmatch
import shlex
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sympow.checks import DEVICES, check_at_least, check_choice, choose_device
from sympow.cli.common import Device
from sympow.files import check_can_write
from sympow.parsing import parse_yaml

if TYPE_CHECKING:
    from sympow.experiments.grid import Run, Scale

OUT = Path("runs/experiments")
RESULTS = Path("experiments/results")
SCALE_NAMES = ("cpu", "small", "paper")


def experiment(
    name: Annotated[str | None, typer.Argument(help="Name of the experiment; without it, all are listed.")] = None,
    scale: Annotated[str, typer.Option(help=f"Scale: {', '.join(SCALE_NAMES)}.")] = "cpu",
    plan: Annotated[bool, typer.Option("--plan", help="Only print the runs and an estimate of their time.")] = False,
    jobs: Annotated[int, typer.Option(help="Number of runs or sweeps at a time, on one GPU or several.")] = 1,
    minutes: Annotated[
        float | None, typer.Option(help="Time limit: start no run that would exceed it; by default none.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Names of runs, with * as a wildcard; repeatable.")] = None,
    data: Annotated[str | None, typer.Option(help="Dataset to train on; by default the scale's.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of every run, such as learning_rate=1e-3; repeatable.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Folder of experiments; by default experiments.")] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Folder for runs, or for unfinished sweeps; by default {OUT}/SCALE.")
    ] = None,
    results: Annotated[Path | None, typer.Option(help=f"Folder for results; by default {RESULTS}/SCALE.")] = None,
    device: Device = None,
) -> None:
    """Run a grid of training runs and summarize their results.

    Runs that are done are skipped, and interrupted runs are resumed.
    """
    from sympow.experiments.console import Display, print_plan, print_rows
    from sympow.experiments.grid import SCALES, describe, find_experiments, find_sweeps, runs_of, sweeps_of
    from sympow.experiments.runner import RunnerConfig, run_all
    from sympow.experiments.store import Store

    check_choice("scale", scale, SCALES)
    check_at_least("jobs", jobs, 1)
    if minutes is not None and minutes <= 0:
        raise ValueError(f"minutes must be above 0, got {minutes:g}")
    if device is not None:
        check_choice("device", device, DEVICES)
    found, sweeps = find_experiments(folder), find_sweeps(folder)
    known: dict[str, Callable[[Any], Any]] = {**found, **sweeps}
    if name is None:
        for one in sorted(known):
            typer.echo(f"{one:18} {describe(known[one])}")
        return
    check_choice("experiment", name, known)
    if name in sweeps:
        if data is not None:
            raise ValueError(f"data is not for {name}, whose models are trained on generated rows")
        chosen = _chosen(sweeps_of(sweeps[name], scale), only)
        extra = _extra_flags(set_, None, folder)
        _run_sweeps(
            name,
            chosen,
            _settings(set_ or [], None),
            plan,
            jobs,
            minutes,
            results or RESULTS / scale,
            out or OUT / scale,
            device,
            lambda one: f"sympow experiment {name} --scale {scale} --only {one}{extra}",
        )
        return
    size = SCALES[scale]()
    if size.processes > 1 and jobs > 1:
        raise ValueError(f"jobs must be 1 at scale {scale!r}, whose runs take {size.processes} GPUs each; got {jobs}")
    changes = _settings(set_ or [], data)
    try:
        size = size.changed(**changes)
    except TypeError as error:
        # The name and type of a --set value come from the user: a TypeError here is an invalid argument, not a bug.
        raise ValueError(str(error)) from error
    out, results = out or OUT / scale, results or RESULTS / scale
    store = Store(results, out)

    def all_runs() -> list[Run]:
        """All runs of the experiment that can be told from the results so far."""
        return runs_of(found[name], replace(size, finished={row["run"]: row for row in store.rows()}))

    def runs_after_writing() -> list[Run]:
        # The table has all finished runs of the experiment, including those that --only excludes.
        runs = all_runs()
        store.write(name, runs)
        return [run for run in runs if _is_chosen(run, only)]

    runs = _chosen(all_runs(), only)
    _check_settings_apply(name, runs, size, changes)
    if plan:
        # Not checked: a plan may be for another machine.
        print_plan(name, runs, size, store, jobs, minutes, device or choose_device(None))
        return
    device = _choose_device(device, size)
    check_can_write("out", out, "folder")
    check_can_write("results", results, "folder")
    extra = _extra_flags(set_, data, folder)
    config = RunnerConfig(
        out,
        jobs,
        None if minutes is None else 60 * minutes,
        device,
        lambda run: f"sympow experiment {name} --scale {scale} --only {run}{extra}",
        runs_after_writing,
    )
    with Display() as display:
        outcome = run_all(runs, size, config, store, display)
    runs = [run for run in all_runs() if _is_chosen(run, only)]
    rows = [outcome.done[run.name] for run in runs if run.name in outcome.done]
    if rows:
        print_rows(rows)
        typer.echo(f"wrote {', '.join(map(str, store.write(name, all_runs())))}", err=True)
    left = len(outcome.stopped) + len(outcome.not_started)
    if left:
        typer.echo(f"{left} of {len(runs)} runs are left; run the same command to resume", err=True)
    for run, log in outcome.failed.items():
        typer.echo(f"{run} failed; see {log}", err=True)
    if outcome.failed or outcome.interrupted:
        raise typer.Exit(130 if outcome.interrupted else 1)


def _choose_device(device: str | None, scale: Scale) -> str:
    """The device of all runs; raises a ValueError if there are not as many GPUs as a run has processes."""
    chosen = choose_device(device)
    if scale.processes > 1 and device != "cpu":
        import torch

        if (gpus := torch.cuda.device_count()) < scale.processes:
            raise ValueError(
                f"scale {scale.name!r} needs a machine with {scale.processes} GPUs, which each of its runs takes; "
                f"torch finds {gpus} here. Choose another scale, or --device cpu for one process"
            )
    return chosen


def _run_sweeps(
    name: str,
    sweeps: Sequence[Any],
    changes: dict[str, Any],
    plan: bool,
    jobs: int,
    minutes: float | None,
    folder: Path,
    out: Path,
    device: str | None,
    command: Callable[[str], str],
) -> None:
    """Runs or plans the sweeps of an experiment.

    Args:
        changes: settings of all sweeps.
        jobs: sweeps at a time.
        folder: of results.
        out: folder for a sweep that a time limit ends.
        command: what repeats one sweep, by its name.
    """
    from sympow.experiments.console import Display, print_sweep_plan, print_sweeps
    from sympow.experiments.sweep import SweepResults, with_changes
    from sympow.experiments.sweep_runner import run_sweeps
    from sympow.train.signals import stop_on_signals

    try:
        sweeps = [with_changes(sweep, changes) for sweep in sweeps]
    except TypeError as error:
        # As for grids: an invalid argument of the user's, not a bug.
        raise ValueError(str(error)) from error
    stored = SweepResults.read(folder, name)
    if plan:
        print_sweep_plan(name, sweeps, stored, out)
        return
    device = choose_device(device)
    check_can_write("results", folder, "folder")
    check_can_write("out", out, "folder")
    with stop_on_signals() as interruption:
        left = run_sweeps(sweeps, stored, device, command, minutes, Display().say, out, interruption, jobs)
    print_sweeps([row for row in stored.rows.values() if row["sweep"] in {sweep.name for sweep in sweeps}])
    if left:
        typer.echo(f"{len(left)} of {len(sweeps)} sweeps are left; run the same command to resume", err=True)
    if interruption:
        raise typer.Exit(130)


def _settings(given: Sequence[str], data: str | None) -> dict[str, Any]:
    """The settings of --set, parsed as YAML; numbers such as 1e-3, which YAML takes for strings, become floats."""
    found: dict[str, Any] = {} if data is None else {"data": data}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"set must be NAME=VALUE, got {text!r}")
        parsed = parse_yaml(value)
        if isinstance(parsed, str):
            with suppress(ValueError):
                parsed = float(parsed)
        found[name.strip().replace("-", "_")] = parsed
    return found


def _check_settings_apply(name: str, runs: Sequence[Run], scale: Scale, changes: Collection[str]) -> None:
    """Raises a ValueError if a run of the experiment has another value of a setting that was given with --set."""
    wanted = scale.base.settings()
    for run in runs:
        found = run.config.settings()
        if own := [setting for setting in changes if found[setting] != wanted[setting]]:
            raise ValueError(
                f"set cannot change {', '.join(own)} in {name}, which chooses it for its runs, such as {run.name}"
            )


def _chosen(runs: list[Any], only: list[str] | None) -> list[Any]:
    chosen = [run for run in runs if _is_chosen(run, only)]
    if not chosen and only:
        raise ValueError(
            f"only must match some of {', '.join(run.name for run in runs)}; got {', '.join(only)}. "
            "Runs that depend on the results of others can be chosen once those have finished"
        )
    return chosen


def _is_chosen(run: Any, only: list[str] | None) -> bool:
    return not only or any(fnmatch.fnmatch(run.name, pattern) for pattern in only)


def _extra_flags(given: Sequence[str] | None, data: str | None, folder: Path | None) -> str:
    flags = [flag for text in given or [] for flag in ("--set", text)]
    flags += ["--data", data] if data is not None else []
    flags += ["--folder", str(folder)] if folder is not None else []
    return "".join(f" {shlex.quote(flag)}" for flag in flags)
