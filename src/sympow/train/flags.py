"""A flag for every field of a config: names, types, defaults and help are the fields' own."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sympow.extras import require
from sympow.model.config import GPTConfig
from sympow.train.config import DataConfig, OptimizerConfig, RunConfig

# Not a flag: the vocabulary is the data's.
SECTIONS: dict[str, tuple[type, frozenset[str]]] = {
    "Model": (GPTConfig, frozenset({"vocab_size"})),
    "Data": (DataConfig, frozenset()),
    "Optimizer": (OptimizerConfig, frozenset()),
    "Run": (RunConfig, frozenset()),
}


def with_config_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, which takes **changes, a flag for every field of a training config.

    Flags that are not used do not appear among the changes.
    """
    typer = require("typer", "cli")
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    made = []
    for title, (kind, left_out) in SECTIONS.items():
        hints, helps = get_type_hints(kind), field_help(kind)
        for part in fields(kind):
            if part.name in left_out:
                continue
            annotation, choices = _plain_type(hints[part.name])
            text = helps[part.name] + (f" [{' | '.join(choices)}]" if choices else "")
            flag = part.name.replace("_", "-")
            names = f"--{flag}/--no-{flag}" if annotation is bool else f"--{flag}"
            option = typer.Option(names, help=text, rich_help_panel=title, show_default=False)
            made.append(
                inspect.Parameter(
                    part.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[annotation | None, option],
                )
            )

    def run(**values: Any) -> None:
        given = {name: value for name, value in values.items() if value is not None or name in mine}
        command(**given)

    mine = {p.name for p in own}
    hints_of_own = get_type_hints(command, include_extras=True)
    own = [p.replace(annotation=hints_of_own[p.name], kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
    parameters = [*own, *made]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def field_help(kind: type) -> dict[str, str]:
    """The lines under "Attributes" of a docstring, by field."""
    text = inspect.getdoc(kind) or ""
    _, _, attributes = text.partition("Attributes:\n")
    helps: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        entry = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            helps |= dict.fromkeys(names, entry[2])
        elif line.startswith("        ") and names:
            helps |= {name: f"{helps[name]} {line.strip()}" for name in names}
    return helps


def _plain_type(hint: Any) -> tuple[type, tuple[str, ...]]:
    """What the command line reads for a field, and the choices it has."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    return hint, ()
