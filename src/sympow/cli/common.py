"""What the commands share: the base class of commands, the layout of help, common options, and messages about flags.

A command's function raises an exception. `sympow.cli.errors` decides what is printed for it.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from sympow.checks import check_choice, choose_device
from sympow.cli.errors import in_flags, reported
from sympow.errors import UserError

if TYPE_CHECKING:
    from sympow.generation.text import TextModel

# A copy of the library's, so that help does not import torch; a test compares both.
SEGMENT_SIZE = 8_192

# Options of several commands.
SegmentSize = Annotated[int, typer.Option(help="Tokens per prefill segment; memory depends on it.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; by default a GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="bfloat16 or float32; by default bfloat16 on a GPU, float32 on a CPU.")]


class App(typer.Typer):
    """A command, or a group of commands, that prints help and errors as plain text."""

    def __init__(self, **options: Any) -> None:
        super().__init__(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[Any], Any]:
        """As in typer, with `Command` as the default class."""
        return super().command(name, **{"cls": Command, **options})


class Command(TyperCommand):
    """A command that prints its exceptions as messages, and groups its options in help by `rich_help_panel`."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Fills paragraphs, except indented ones, which hold commands to copy."""
        formatter.write_paragraph()
        with formatter.indentation():
            for number, paragraph in enumerate(inspect.cleandoc(self.help or "").split("\n\n")):
                if number:
                    formatter.write_paragraph()
                if not paragraph.startswith(" "):
                    formatter.write_text(paragraph)
                    continue
                for line in paragraph.splitlines():
                    formatter.write(f"{' ' * formatter.current_indent}{line}\n")

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes a plain section for each `rich_help_panel`."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The path of an empty name, as of a shell variable that is not set, would be the working directory.
        if not {("--out", ""), ("-o", "")}.isdisjoint(pairwise(args)) or "--out=" in args:
            raise Mistake("--out must name a file or folder, got ''", ctx=ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        def show_mistake(error: UserError) -> NoReturn:
            raise Mistake(in_flags(error, ctx.command.params), ctx=ctx)

        with reported(ctx.command_path, show_mistake):
            return super().invoke(ctx)


class Mistake(typer.BadParameter):
    """An error in the arguments; typer adds how to get help."""

    def format_message(self) -> str:
        return self.message


def print_json(content: Any) -> None:
    """Prints the result of a command with --json."""
    typer.echo(json.dumps(content, indent=2))


def load_text_model(checkpoint: Path, device: str | None, dtype: str | None) -> TextModel:
    import torch

    from sympow.generation.text import TextModel

    device, dtype = device_and_dtype(device, dtype)
    return TextModel.load(checkpoint, device, getattr(torch, dtype))


def device_and_dtype(device: str | None, dtype: str | None) -> tuple[str, str]:
    """Fills in the defaults: a GPU if there is one, with bfloat16 on a GPU and float32 on a CPU."""
    device = choose_device(device)
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    check_choice("dtype", dtype, ("bfloat16", "float32"))
    return device, dtype


def name_of(folder: Path) -> str:
    """The name of a model folder; of one called `model`, as in a run or a conversion, that of the folder around it."""
    from sympow.train.run_folder import EXPORT

    # Links keep their own names.
    whole = Path(os.path.abspath(folder))
    return whole.parent.name if whole.name == EXPORT and whole.parent.name else whole.name


def counted(number: int, noun: str) -> str:
    """A number of things, such as "1 document" or "2,000 documents"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
