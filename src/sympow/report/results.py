"""How benchmarks keep what they measured."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sympow.data.files import write_atomically


def save_results(
    path: Path,
    environment: Mapping[str, Any] | None,
    *,
    command: str | None = None,
    indent: int = 2,
    **content: Any,
) -> None:
    """Writes JSON: the command first, then device and versions, then the rest in the order given.

    Args:
        path: the file; its folder is made.
        environment: as of `sympow.report.timing.environment`; None where nothing was measured.
        command: that makes the file again; by default how this process was started.
        indent: of the JSON.
        content: the setting, rows, and what else there is.
    """
    head: dict[str, Any] = {"command": command or " ".join(["python", *sys.argv])}
    if environment is not None:
        head["environment"] = dict(environment)
    write_atomically(path, (json.dumps({**head, **content}, indent=indent) + "\n").encode())
