"""Command-line flags generated from the fields of a config: names, types, defaults and help.

Written out as typer options, the flags of `sympow train` would take hundreds of lines that repeat the config and can
disagree with it.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from sympow.extras import require
from sympow.model.config import GPTConfig
from sympow.train.config import PRESETS, DataConfig, OptimizerConfig, RunConfig, field_help

# The preset whose values --help shows as defaults.
DEFAULT_PRESET = "laptop"
# By title: a section of the config, and its fields without a flag.
Sections = dict[str, tuple[type, frozenset[str]]]
# The data determine the vocabulary size.
SECTIONS: Sections = {
    "Model": (GPTConfig, frozenset({"vocab_size"})),
    "Data": (DataConfig, frozenset()),
    "Optimizer": (OptimizerConfig, frozenset()),
    "Run": (RunConfig, frozenset()),
}


def with_config_flags(
    command: Callable[..., None], sections: Sections | None = None, defaults: Any = None
) -> Callable[..., None]:
    """Gives a command that takes **changes a flag for every field of a config.

    Only flags that were used appear among the changes.

    Args:
        sections: of the config; None: those of a training config.
        defaults: config whose values --help shows; None: that of the training preset.
    """
    typer = require("typer", "cli")
    own = [p for p in inspect.signature(command).parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    made = []
    if defaults is None:
        defaults = PRESETS[DEFAULT_PRESET]()
    for title, (kind, without_flag) in (sections or SECTIONS).items():
        hints, helps = get_type_hints(kind), field_help(kind)
        values = _section(defaults, kind)
        for field in fields(kind):
            if field.name in without_flag:
                continue
            annotation, choices = _plain_type(hints[field.name])
            flag = field.name.replace("_", "-")
            text = _help_of_flag(flag, helps[field.name], choices, getattr(values, field.name))
            names = f"--{flag}/--no-{flag}" if annotation is bool else f"--{flag}"
            option = typer.Option(names, help=text, rich_help_panel=f"{title} options", show_default=False)
            made.append(
                inspect.Parameter(
                    field.name,
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


def _section(config: Any, kind: type) -> Any:
    (section,) = (value for value in vars(config).values() if type(value) is kind)
    return section


def _help_of_flag(flag: str, text: str, choices: tuple[str, ...], default: Any) -> str:
    """A field's docstring as help of its flag, with its choices and its default; a default of None in words."""
    text, _, if_none = text.removesuffix(".").partition("; None: ")
    shown = if_none if default is None else str(default) or "none"
    if isinstance(default, bool):
        text, shown = text.removeprefix("whether to "), flag if default else f"no-{flag}"
    if not all(choice in text for choice in choices):
        text += f": {', '.join(choices)}"
    # Other fields that the docstring names, as flags.
    text = re.sub(r"\b[a-z]+(_[a-z]+)+\b", lambda found: f"--{found[0].replace('_', '-')}", text)
    first = text.split()[0]
    # Unless the first word is a symbol such as p or bf16.
    text = text[0].upper() + text[1:] if first.isalpha() and len(first) > 1 else text
    return f"{text}. [default: {shown}]"


def _plain_type(hint: Any) -> tuple[type, tuple[str, ...]]:
    """The type that typer parses for a field, and its choices."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (kind for kind in get_args(hint) if kind is not type(None))
    if get_origin(hint) is Literal:
        return str, get_args(hint)
    return hint, ()
