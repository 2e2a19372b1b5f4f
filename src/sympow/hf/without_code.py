"""`load_without_code`: the only way in which this package loads a folder or a repository of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sympow.errors import UserError


def load_without_code(kind: Any, source: Path | str, **options: Any) -> Any:
    """`kind.from_pretrained(source, **options)`, without running code that comes with the source, or asking whether to.

    Args:
        kind: an Auto class or a model class.

    Raises:
        ValueError: the source cannot be loaded without its own code.
    """
    try:
        return kind.from_pretrained(str(source), trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserError(f"{source} has code of its own (auto_map), which sympow never runs") from error
