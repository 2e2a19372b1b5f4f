"""How this process was started: how to call `sympow` here, its command line, and whether torchrun started it."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

# Columns of a narrow terminal.
WIDTH = 80


def program() -> str:
    """How to call sympow in this shell: "sympow" if it is on PATH, else the script's path, else `python -m sympow`."""
    script = _own_script()
    if script is None:
        return f"{_typed(Path(sys.executable))} -m sympow"
    return _typed(script)


def command_line(*words: object, width: int = WIDTH) -> str:
    """A `sympow` command to print, quoted for the shell, with long lines broken before flags.

    Args:
        words: the words after `sympow`: a command, its arguments and its flags.
        width: longest line; a flag stays on one line with its values even if it is longer.
    """
    parts = [program()]
    for word in words:
        text = shlex.quote(str(word))
        if text.startswith("--"):
            parts.append(text)
        else:
            parts[-1] += f" {text}"
    return _wrapped(parts, width)


def recorded_command() -> str:
    """The command line of this process for result files, with plain `sympow` as the program."""
    return shlex.join(["sympow", *sys.argv[1:]])


def _wrapped(parts: Iterable[str], width: int) -> str:
    lines: list[str] = []
    for part in parts:
        # Two more for the backslash that may follow.
        if lines and len(lines[-1]) + 1 + len(part) + 2 <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return " \\\n".join(lines)


def _own_script() -> Path | None:
    """The installed script `sympow` of this Python."""
    called = Path(sys.argv[0])
    if called.name == "sympow" and called.is_file():
        return called
    beside = Path(sys.executable).with_name("sympow")
    return beside if beside.is_file() else None


def _typed(path: Path) -> str:
    """How to call a program in this shell: its name if it is on PATH, else its path, relative if it is below here."""
    found = shutil.which(path.name)
    if found is not None and Path(found).absolute() == path.absolute():
        return path.name
    here = Path.cwd()
    if path.absolute().is_relative_to(here):
        return shlex.quote(str(path.absolute().relative_to(here)))
    return shlex.quote(str(path.absolute()))


def under_torchrun() -> bool:
    """Whether this process is one of those that torchrun started."""
    return "RANK" in os.environ


def first_process() -> bool:
    """Whether this is the first of torchrun's processes, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def may_be_restarted() -> bool:
    """Whether torchrun starts processes again when one dies."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
