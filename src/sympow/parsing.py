"""Parsers for untrusted JSON and YAML: malformed input raises ValueError within bounded time and memory.

The standard parsers accept input that exhausts stack or memory: deep nesting, and nine lines of YAML aliases that
expand to a billion entries. No file of sympow needs either.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sympow.checks import check_regular_file
from sympow.errors import UserError
from sympow.extras import require

# A manifest has a few hundred bytes per shard of 8 MiB, so this limit allows for terabytes of text.
LARGEST_JSON = 2**28
# Configs have a hundred short lines.
LARGEST_YAML = 2**20
DEEPEST_YAML = 32


def read_json(path: Path) -> Any:
    """The parsed content of a file.

    Raises:
        ValueError: it is not a file, too large, or not JSON.
    """
    text = _read(path, LARGEST_JSON)
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UserError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error


def read_yaml(path: Path) -> Any:
    """The parsed content of a file.

    Raises:
        ValueError: it is not a file, too large, not YAML, has aliases or a key twice, or is nested deeply.
    """
    text = _read(path, LARGEST_YAML)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def parse_yaml(text: str) -> Any:
    """The parsed content of a text.

    Raises:
        ValueError: it is too long, not YAML, has aliases or a key twice, or is nested deeply.
    """
    yaml = require("yaml", "train")
    if len(text) > LARGEST_YAML:
        raise UserError(f"YAML must have at most {LARGEST_YAML:,} characters, got {len(text):,}")
    try:
        # Checked event by event before any object is built.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise UserError(f"YAML must not have aliases, but line {event.start_mark.line + 1} has *{event.anchor}")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST_YAML:
                raise UserError(
                    f"YAML must be nested at most {DEEPEST_YAML} deep; line {event.start_mark.line + 1} is deeper"
                )
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_keys(node)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UserError(f"not YAML: {error}") from error


def _check_keys(node: Any) -> None:
    """Raises a ValueError if a mapping at or below a node of YAML has a key twice, of which the last would count."""
    lines: dict[str, int] = {}
    for entry in node.value if node is not None and node.id in ("mapping", "sequence") else ():
        key, value = entry if node.id == "mapping" else (None, entry)
        _check_keys(value)
        if key is None or key.id != "scalar":
            continue
        line = key.start_mark.line + 1
        if key.value in lines:
            raise UserError(
                f"YAML must have each key once, but line {line} has {key.value!r} again, after line {lines[key.value]}"
            )
        lines[key.value] = line


def _read(path: Path, largest: int) -> str:
    check_regular_file(path)
    size = path.stat().st_size
    if size > largest:
        raise UserError(f"{path} must have at most {largest:,} bytes, got {size:,}")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
