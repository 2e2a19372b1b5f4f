"""The command `sympow inspect`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sympow.cli.common import SEGMENT_SIZE, Device, Dtype, SegmentSize, load_text_model
from sympow.errors import UserError
from sympow.extras import require
from sympow.files import check_can_write, write_atomically


def inspect(
    checkpoint: Annotated[Path, typer.Argument(help="Model folder of a run, or in Hugging Face format.")],
    file: Annotated[Path | None, typer.Argument(help="Text file to read; - for standard input.")] = None,
    text: Annotated[str | None, typer.Option(help="The text itself, instead of a file.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("inspect.html"),
    tokens: Annotated[int, typer.Option(help="Number of tokens to read, at most; the page grows with it.")] = 8_192,
    segment_size: SegmentSize = SEGMENT_SIZE,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Write an HTML page of gates and rotations along a text.

    Each token is colored by how much a head forgets (γ) and rotates (β) at it.
    """
    from sympow.data.plain_text import check_text, read_text
    from sympow.report.inspection import build_inspection_page, inspect_text

    if text is not None and file is None:
        check_text("text", text)
        content = text
    elif file is not None and text is None:
        content = read_text(file)
    else:
        raise UserError("give either a file (- for standard input) or a --text")
    check_can_write("out", out, "file")
    require("plotly", "report")
    text_model = load_text_model(checkpoint, device, dtype)
    inspection = inspect_text(text_model, content, tokens=tokens, segment_size=segment_size)
    named = "a text" if file is None or str(file) == "-" else file.name
    title = f"{named}, as {checkpoint} reads it"
    write_atomically(out, build_inspection_page(inspection, title).encode())
    if inspection.left_out:
        typer.echo(
            f"the text has {tokens + inspection.left_out:,} tokens; the first {tokens:,} are shown (--tokens)", err=True
        )
    typer.echo(f"wrote {out}", err=True)
