"""Tells sympow's own exceptions, which explain a user's mistake, from those of libraries, which may be a bug."""

from __future__ import annotations


def raised_by_sympow(error: BaseException) -> bool:
    """Whether sympow's own code raised the exception, not a library: only sympow's messages are written for users."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and _in_sympow(trace.tb_frame.f_globals.get("__name__", ""))


def defined_by_sympow(kind: type) -> bool:
    return issubclass(kind, Exception) and _in_sympow(kind.__module__)


def _in_sympow(module: str) -> bool:
    return module.partition(".")[0] == "sympow"
