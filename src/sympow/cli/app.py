"""The command `sympow`: its subcommands, each in a module of its name, and its own options.

No module of this package imports torch at its top level, so that help and `--version` are fast.
"""

from __future__ import annotations

from typing import Annotated

import typer

from sympow import __version__
from sympow.cli.bench import bench
from sympow.cli.check import check
from sympow.cli.common import App
from sympow.cli.convert import convert
from sympow.cli.data import app as data
from sympow.cli.evaluate import evaluate
from sympow.cli.generate import generate
from sympow.cli.info import info
from sympow.cli.inspect import inspect
from sympow.cli.report import report
from sympow.cli.serve import serve
from sympow.cli.state import state
from sympow.cli.train import TrainCommand, train

HELP = """Train, run and measure conformal symmetric power transformers.

The exit code is 0 if the work is done, 1 if it failed, 2 if the arguments are wrong, such as a file that is not there,
and 130 if Ctrl-C ended it.
"""

app = App(help=HELP, no_args_is_help=True)
app.command(cls=TrainCommand)(train)
app.command()(convert)
app.add_typer(data, name="data")
for command in (generate, state, serve, evaluate, report, inspect, info, bench, check):
    app.command()(command)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sympow {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of `sympow` itself."""
