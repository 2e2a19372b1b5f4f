"""Command-line flags from the fields of a config: their names, types, defaults and help.

Written out as typer options, the flags of `sympow train` would take hundreds of lines that repeat the config and can
disagree with it.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer

from sympow.train.config import field_help

Function = TypeVar("Function", bound=Callable[..., None])


def flags_of(sections: Mapping[str, Any], without: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Gives a command that takes **changes a flag for every field of a config; those not used are None.

    Args:
        sections: of the config, by their titles in --help; their values are shown as defaults.
        without: fields that have no flag.
    """

    def add(command: Function) -> Function:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        return command

    options = [
        _option(title, field.name, hints[field.name], helps[field.name], getattr(section, field.name))
        for title, section in sections.items()
        for hints, helps in [(get_type_hints(type(section)), field_help(type(section)))]
        for field in fields(section)
        if field.name not in without
    ]
    return add


def _option(title: str, name: str, hint: Any, text: str, default: Any) -> inspect.Parameter:
    annotation, choices = _plain_type(hint)
    flag = name.replace("_", "-")
    names = f"--{flag}/--no-{flag}" if annotation is bool else f"--{flag}"
    text = _help_of_flag(flag, text, choices, default)
    option = typer.Option(names, help=text, rich_help_panel=f"{title} options", show_default=False)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[annotation | None, option]
    )


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
