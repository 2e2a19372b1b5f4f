"""The command `sympow check`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from sympow.check import SIZES
from sympow.checks import choose_device
from sympow.cli.common import Device, print_json
from sympow.extras import require


def check(
    device: Device = None,
    timing: Annotated[bool, typer.Option(help="Benchmark against softmax attention; about half a minute.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Check this installation: versions, accuracy and speed.

    The exit code is 0 if every check passed, and 1 if one failed.
    """
    import torch

    from sympow.check.accuracy import Machine, check_accuracy
    from sympow.check.installation import describe_installation, routes
    from sympow.check.operator import Setting, describe, print_rows, progress_bar, run_bench

    device = choose_device(device)
    machine = Machine.find(device, seed)
    installation, served = describe_installation(device), routes(device)
    if not as_json:
        _print_installation(installation)
        _print_routes(served)
    outcomes = []
    for outcome in check_accuracy(machine):
        outcomes.append(outcome)
        typer.echo(f"{'ok    ' if outcome.passed else 'FAILED'} {outcome.name}", err=True)
    failed = [outcome for outcome in outcomes if not outcome.passed]
    if not as_json:
        what = f"{'Kernels' if machine.on_kernels else 'Plain PyTorch'} in {str(machine.dtype).removeprefix('torch.')}"
        _print_outcomes(outcomes, f"{what} against plain PyTorch in float64, seed {seed}")
    rows = []
    if timing:
        sizes = SIZES[device]
        setting = Setting(sizes.tokens, sizes.heads, dtype=getattr(torch, sizes.dtype), device=device)
        with progress_bar() as on_progress:
            # The contexts of `sympow bench`, without the shortest on a GPU.
            rows = list(run_bench(setting, sizes.contexts[-3:], ["auto"], runs=3, on_progress=on_progress))
        if not as_json:
            print_rows(rows, describe(setting))
    if as_json:
        found: dict[str, Any] = {
            "passed": not failed,
            "installation": installation,
            "served": [asdict(route) for route in served],
            "accuracy": [{**asdict(outcome), "passed": outcome.passed} for outcome in outcomes],
            "timing": [asdict(row) for row in rows],
        }
        print_json(found)
    else:
        typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} checks passed")
    if failed:
        raise typer.Exit(1)


def _print_installation(facts: dict[str, Any]) -> None:
    width = max(map(len, facts))
    for name, fact in facts.items():
        typer.echo(f"{name:{width}}  {fact if fact is not None else 'not installed'}")
    typer.echo("")


def _print_routes(served: list[Any]) -> None:
    reasons = {route.reason for route in served}
    if len(reasons) == 1 and None not in reasons:
        typer.echo(f"Every call runs in plain PyTorch. {reasons.pop()}\n")
        return
    table = require("rich.table", "cli").Table(title='What a call runs on with backend="auto"', title_justify="left")
    for column in ("call", "runs on", "why not on kernels"):
        table.add_column(column)
    for route in served:
        table.add_row(route.call, route.served_by, route.reason or "")
    require("rich.console", "cli").Console().print(table)


def _print_outcomes(outcomes: list[Any], title: str) -> None:
    table = require("rich.table", "cli").Table(title=title, title_justify="left")
    for column in ("checked", "worst tensor", "error", "limit", ""):
        table.add_column(column, justify="right" if column in ("error", "limit") else "left")
    for outcome in outcomes:
        numbers = ("", "", "") if outcome.problem else (outcome.tensor, f"{outcome.error:.1e}", f"{outcome.bar:.1e}")
        table.add_row(outcome.name, *numbers, "ok" if outcome.passed else f"FAILED {outcome.problem or ''}".strip())
    require("rich.console", "cli").Console().print(table)
