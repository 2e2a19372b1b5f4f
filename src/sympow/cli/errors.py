"""Exceptions of a command as messages and exit codes.

Exit code 2 means that the arguments are wrong, among them a file that is not there or is something else; 1 that the
work failed, with arguments that are right.

==================================================  =========================================  =========
exception                                           what is printed                            exit code
==================================================  =========================================  =========
`UserError`                                         the message, and where to find help        2
OSError, out of memory, a missing module            the message                                1
`StoppedError`                                      why it stopped                             1
KeyboardInterrupt                                   "interrupted"                              130
anything else                                       a traceback, with a note that it is a bug  1
==================================================  =========================================  =========
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from sympow.errors import ArgumentError, StoppedError, UserError

BUG = "sympow did not expect this. If it is a bug in sympow, please report it with the lines above."
INTERRUPTED = 130
# Arguments of the library whose option has another name.
ALIASES = {"source": "data", "cache_policy": "cache"}


class Reported:
    """Context manager around a command that converts exceptions into messages and exit codes.

    Args:
        program: the command as it was called; each message begins with it.
        on_mistake: called with a user's mistake; does not return. By default its message is printed like any other.
    """

    def __init__(self, program: str, on_mistake: Callable[[UserError], NoReturn] | None = None) -> None:
        self.program, self.on_mistake = program, on_mistake

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._stop("interrupted", INTERRUPTED, on_every_process=False)
        if isinstance(error, UserError):
            # All processes of torchrun have the same arguments, and so the same mistake.
            if self.on_mistake is not None and _first_on_machine():
                self.on_mistake(error)
            self._stop(f"error: {error}", 2, on_every_process=False)
        if _is_failure(error):
            # Other processes may not have failed, so each prints its own.
            self._stop(f"error: {_describe(error)}", 1, on_every_process=True)
        if isinstance(error, StoppedError):
            print(f"stopped: {error}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        if isinstance(error, Exception) and not _is_for_typer(error) and BUG not in getattr(error, "__notes__", ()):
            error.add_note(BUG)

    def _stop(self, message: str, code: int, *, on_every_process: bool) -> NoReturn:
        if on_every_process or _first_on_machine():
            rank = os.environ.get("RANK")
            where = f" (process {rank})" if on_every_process and rank is not None else ""
            print(f"{self.program}{where}: {message}", file=sys.stderr, flush=True)
        # `from None`: the message replaces the traceback.
        raise SystemExit(code) from None


def _is_failure(error: BaseException | None) -> bool:
    """Whether the error is neither an invalid argument nor a bug, such as a full disk or a missing package."""
    if isinstance(error, BrokenPipeError):
        # The reader of the output, such as `head`, has exited; typer ends the command quietly.
        return False
    if isinstance(error, ModuleNotFoundError):
        return (error.name or "").partition(".")[0] != "sympow"
    if isinstance(error, OSError | MemoryError):
        return True
    torch = sys.modules.get("torch")
    # The attributes are missing while torch is being imported.
    kinds = tuple(getattr(torch, name) for name in ("OutOfMemoryError", "AcceleratorError") if hasattr(torch, name))
    return isinstance(error, kinds)


def _describe(error: BaseException | None) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    # Only the first line: torch adds advice on debugging kernels.
    text = str(error).strip().partition("\n")[0]
    return text or type(error).__name__


def _is_for_typer(error: Exception) -> bool:
    """Whether the exception is one of typer's, which typer handles, as for an unknown option."""
    return any(kind.__module__.partition(".")[0] in ("typer", "click") for kind in type(error).__mro__)


def _first_on_machine() -> bool:
    """Whether this is the only process, or the first of those that torchrun started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def in_flags(error: UserError, parameters: list[Any]) -> str:
    """The message of an error with a flag in place of the argument's name, if one of a command's options sets it."""
    if isinstance(error, ArgumentError):
        option = ALIASES.get(error.name, error.name).replace("_", "-")
        for parameter in parameters:
            # An option that can be given several times has a name in the singular.
            for flag in {f"--{option}", f"--{option.removesuffix('s')}" if parameter.multiple else ""}:
                if flag in parameter.opts:
                    return error.about(flag)
    return str(error)
