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
from sympow.train.config import PRESETS, DataConfig, OptimizerConfig, RunConfig, TrainConfig

# Whose values help shows as defaults.
DEFAULT_PRESET = "laptop"
# By title: the config, and its fields that are no flags. The vocabulary is the data's.
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
    defaults = PRESETS[DEFAULT_PRESET]()
    for title, (kind, left_out) in SECTIONS.items():
        hints, helps = get_type_hints(kind), field_help(kind)
        values = _part_of(defaults, kind)
        for part in fields(kind):
            if part.name in left_out:
                continue
            annotation, choices = _plain_type(hints[part.name])
            flag = part.name.replace("_", "-")
            text = _help_of_flag(flag, helps[part.name], choices, getattr(values, part.name))
            names = f"--{flag}/--no-{flag}" if annotation is bool else f"--{flag}"
            option = typer.Option(names, help=text, rich_help_panel=f"{title} options", show_default=False)
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


def _part_of(config: TrainConfig, kind: type) -> Any:
    (part,) = (value for value in vars(config).values() if type(value) is kind)
    return part


def _help_of_flag(flag: str, text: str, choices: tuple[str, ...], default: Any) -> str:
    """A field's line as help of its flag: with all choices, and the default in words where it has no value."""
    text, _, if_none = text.removesuffix(".").partition("; None: ")
    shown = if_none if default is None else str(default) or "none"
    if isinstance(default, bool):
        text, shown = text.removeprefix("whether to "), flag if default else f"no-{flag}"
    if not all(choice in text for choice in choices):
        text += f": {', '.join(choices)}"
    # Fields that the line names are flags, too.
    text = re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda found: f"--{found[0].replace('_', '-')}", text)
    first = text.split()[0]
    # Not a symbol such as p or bf16.
    text = text[0].upper() + text[1:] if first.isalpha() and len(first) > 1 else text
    return f"{text}. [default: {shown}]"


def _plain_type(hint: Any) -> tuple[type, tuple[str, ...]]:
    """What the command line reads for a field, and the choices it has."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    return hint, ()
