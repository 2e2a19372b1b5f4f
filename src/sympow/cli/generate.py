"""The command `sympow generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sympow.checks import check_at_least, check_choice, check_seed
from sympow.cli.common import SEGMENT_SIZE, Device, Dtype, SegmentSize, load_text_model
from sympow.errors import UserError

if TYPE_CHECKING:
    from sympow.generation.prefix import Prefix
    from sympow.generation.text import TextModel

Cache = Annotated[
    str,
    typer.Option(help="Cache policy: state; keys (a KV cache); or auto: keys until a state is smaller."),
]


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="Model folder of a run, or in Hugging Face format.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; repeatable, for several continuations.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="Text file to read before the prompt; - for standard input.")
    ] = None,
    state: Annotated[
        Path | None, typer.Option(help="File of `sympow state` to continue from.", exists=True, dir_okay=False)
    ] = None,
    tokens: Annotated[int, typer.Option(help="Number of tokens to generate, at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0: greedy decoding.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from the k most likely tokens; 0: from all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample from the most likely tokens with this total probability.")] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="Exclude tokens less likely than this fraction of the most likely one.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: make tokens that have occurred less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help=r"String that ends generation, with \n, \t, \xNN, \uNNNN and \\ for a backslash; repeatable."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Random seed; by default a new one each time.")] = None,
    segment_size: SegmentSize = SEGMENT_SIZE,
    cache: Cache = "auto",
    stats: Annotated[bool, typer.Option("--stats", help="Print speed and memory after the text.")] = False,
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Generate text from a model.

    The text before is kept in a state whose size does not depend on the length of the text.
    """
    from sympow.data.plain_text import check_text, read_text, unescape
    from sympow.generation.cache import CACHE_POLICIES
    from sympow.generation.sampling import Sampling
    from sympow.generation.text import stop_strings
    from sympow.report.generated_text import print_continuations, print_stream

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    check_at_least("tokens", tokens, 0)
    check_at_least("segment_size", segment_size, 1)
    if seed is not None:
        check_seed(seed)
    check_choice("cache", cache, CACHE_POLICIES)
    if file is None and state is None and not prompt:
        raise UserError("give a --prompt, a --file or a --state to continue from")
    for text in prompt or ():
        check_text("prompt", text)
    stops = stop_strings([unescape("stop", text) for text in stop or ()])
    text_before = None if file is None else read_text(file)
    text_model = load_text_model(checkpoint, device, dtype)
    how: dict[str, Any] = {"segment_size": segment_size, "cache_policy": cache}
    before = prefill_before(text_model, text_before, state, how)
    prefixes = [
        text_model.prefill(text, **how) if before is None else text_model.extend(before, text, **how)
        for text in prompt or [""]
    ]
    options: dict[str, Any] = {
        "tokens": tokens,
        "sampling": sampling,
        "stop": stops,
        "seed": seed,
        "cache_policy": cache,
        "summary": stats,
    }
    if len(prefixes) == 1:
        print_stream(text_model, prefixes[0], "".join(prompt or ()), **options)
    else:
        print_continuations(text_model, prefixes, prompt or [], **options)


def prefill_before(text_model: TextModel, text: str | None, state: Path | None, how: dict[str, Any]) -> Prefix | None:
    """The prefix of a prompt: a file of `sympow state`, then a text."""
    from sympow.generation.prefix import Prefix

    prefix = None if state is None else Prefix.load(state, text_model.model)
    if text is None:
        return prefix
    return text_model.prefill(text, **how) if prefix is None else text_model.extend(prefix, text, **how)
