"""The command `sympow report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sympow.checks import choose_device
from sympow.extras import require
from sympow.files import check_can_write


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or folders that contain runs at any depth."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the page, figures and numbers.")],
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Training runs",
    heads: Annotated[
        bool, typer.Option(help="Measure the heads of the trained models, unless the run has the result.")
    ] = True,
    device: Annotated[
        str | None, typer.Option(help="cuda or cpu, for --heads; by default a GPU if there is one.")
    ] = None,
) -> None:
    """Write an HTML report that compares training runs.

    It shows loss curves, throughput and settings, and what gates and rotations learned.
    """
    from sympow.report.run_report import write_report

    device = choose_device(device)
    check_can_write("out", out, "folder")
    require("matplotlib", "report")
    require("plotly", "report")
    written = write_report(runs, out, title=title, heads=heads, device=device)
    typer.echo(f"wrote {written[0]}, {written[1].name} and {len(written) - 2} figures", err=True)
