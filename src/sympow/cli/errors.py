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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from sympow.errors import ArgumentError, StoppedError, UserError
from sympow.invocation import under_torchrun

BUG = "sympow did not expect this. If it is a bug in sympow, please report it with the lines above."
INTERRUPTED = 130
# Arguments of the library whose option has another name.
ALIASES = {"source": "data", "cache_policy": "cache"}


@contextmanager
def reported(program: str, on_mistake: Callable[[UserError], NoReturn] | None = None) -> Iterator[None]:
    """Converts the exceptions of a command, which is the block, into messages and exit codes.

    Args:
        program: the command as it was called; each message begins with it.
        on_mistake: called with a user's mistake; does not return. By default its message is printed like any other.
    """
    # `from None`: the message replaces the traceback.
    try:
        yield
    except KeyboardInterrupt:
        if _first_on_machine():
            print(f"{program}: interrupted", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
    except UserError as error:
        # All processes of torchrun have the same arguments, and so the same mistake.
        if _first_on_machine():
            if on_mistake is not None:
                on_mistake(error)
            print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except StoppedError as error:
        print(f"stopped: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    except Exception as error:
        if _is_failure(error):
            # Other processes may not have failed, so each prints its own.
            where = f" (process {os.environ['RANK']})" if under_torchrun() else ""
            print(f"{program}{where}: error: {_describe(error)}", file=sys.stderr, flush=True)
            raise SystemExit(1) from None
        if not _is_for_typer(error) and BUG not in getattr(error, "__notes__", ()):
            error.add_note(BUG)
        raise


def _is_failure(error: Exception) -> bool:
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


def _describe(error: Exception) -> str:
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
