"""Import of optional dependencies, with an error that names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(module: str, extra: str) -> Any:
    """Imports an optional module, or raises an error that names the extra which installs it.

    Args:
        module: what to import, such as "matplotlib.pyplot".
        extra: the extra of this package that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise ModuleNotFoundError(
            f"{error.name} is not installed; it comes with: pip install 'conformal-sympow[{extra}]'", name=error.name
        ) from error
