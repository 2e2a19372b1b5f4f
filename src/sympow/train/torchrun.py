"""What torchrun tells the processes it starts, through their environment."""

from __future__ import annotations

import os


def under_torchrun() -> bool:
    """Whether this process is one of those that torchrun started."""
    return "RANK" in os.environ


def first_process() -> bool:
    """Whether this is the first of torchrun's processes, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def may_be_restarted() -> bool:
    """Whether torchrun starts processes again when one dies."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
