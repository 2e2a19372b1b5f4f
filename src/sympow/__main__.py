"""The command `sympow`, also as `python -m sympow`."""

from __future__ import annotations

import sys

from sympow import __version__
from sympow.cli.errors import reported
from sympow.extras import require
from sympow.invocation import program


def main() -> None:
    """Entry point of the installed command."""
    if sys.argv[1:] == ["--version"]:
        # The command line has this option too, but importing it takes longer.
        print(f"sympow {__version__}")
        return
    with reported("sympow"):
        require("typer", "cli")
        # Imported inside the block, because it takes seconds in which Ctrl-C may be pressed.
        from sympow.cli.app import app

        app(prog_name=program())


if __name__ == "__main__":
    main()
