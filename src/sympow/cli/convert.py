"""The command `sympow convert`. Its flags are the fields of `ConvertConfig`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from sympow.cli.common import Device
from sympow.cli.errors import INTERRUPTED
from sympow.cli.flags import flags_of
from sympow.convert.config import ConvertConfig

DEFAULT = ConvertConfig()
# By their titles in --help.
SECTIONS = {"Student": DEFAULT.swap, "Data": DEFAULT.text, "Recipe": DEFAULT.recipe, "Run": DEFAULT.execution}


@flags_of(SECTIONS)
def convert(
    teacher: Annotated[str, typer.Argument(help="Model of transformers: a folder, or a name on the Hub.")],
    out: Annotated[Path, typer.Option(help="Folder to write the conversion to; the result is OUT/model.")],
    device: Device = None,
    **changes: Any,
) -> None:
    """Convert a pretrained softmax transformer.

    Replaces self-attention by symmetric power attention and trains the result, the student, in three stages: (1) match
    each converted layer's attention output to the teacher's, (2) distill the teacher's predictions, (3) optionally
    train on longer contexts with the plain loss. A stage with 0 tokens is skipped. The same command resumes an
    interrupted conversion. --data must have the teacher's token ids:

        sympow data prepare TEXTS --tokenizer TEACHER/tokenizer.json --out DATA
        sympow convert TEACHER --data DATA --out converted

    For a name on the Hub: --tokenizer "$(hf download -q TEACHER tokenizer.json)".
    """
    from sympow.convert.conversion import convert as run

    config = DEFAULT.changed(**{name: value for name, value in changes.items() if value is not None})
    if not run(teacher, config, out, device=device):
        typer.echo("stopped; the same command continues", err=True)
        raise typer.Exit(INTERRUPTED)
    typer.echo(f"{out / 'model'}")
