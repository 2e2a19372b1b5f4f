"""The command `sympow state`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sympow.checks import check_at_least, check_choice
from sympow.cli.common import SEGMENT_SIZE, Device, Dtype, SegmentSize, load_text_model
from sympow.cli.generate import Cache, prefill_before
from sympow.files import check_can_write


def state(
    checkpoint: Annotated[Path, typer.Argument(help="Model folder of a run, or in Hugging Face format.")],
    file: Annotated[Path, typer.Argument(help="Text file to read; - for standard input.")],
    out: Annotated[Path, typer.Option(help="File to write.")],
    after: Annotated[
        Path | None, typer.Option(help="File of this command to continue from.", exists=True, dir_okay=False)
    ] = None,
    segment_size: SegmentSize = SEGMENT_SIZE,
    cache: Cache = "auto",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Prefill a text and save the state to a file.

    `sympow generate --state FILE` continues from it.
    """
    from sympow.data.plain_text import read_text
    from sympow.generation.cache import CACHE_POLICIES
    from sympow.report.generated_text import describe_cache

    check_at_least("segment_size", segment_size, 1)
    check_choice("cache", cache, CACHE_POLICIES)
    check_can_write("out", out, "file")
    text = read_text(file)
    text_model = load_text_model(checkpoint, device, dtype)
    prefix = prefill_before(text_model, text, after, {"segment_size": segment_size, "cache_policy": cache})
    assert prefix is not None
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix.save(out, text_model.model)
    typer.echo(f"{out}: {prefix.tokens:,} tokens in {describe_cache(prefix, cache)}")  # type: ignore[arg-type]
