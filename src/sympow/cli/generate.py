"""The command `sympow generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sympow.checks import check_choice
from sympow.cli.common import SEGMENT_SIZE, Device, Dtype, SegmentSize, load_text_model

if TYPE_CHECKING:
    from sympow.generation.prefix import Prefix
    from sympow.generation.text import TextModel

Cache = Annotated[
    str,
    typer.Option(help="What to keep of the text: state; keys (and values); or auto: keys until a state takes less."),
]


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="The model folder of a run.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to go on from, printed before what follows; repeat for several.")
    ] = None,
    file: Annotated[
        Path | None, typer.Option(help="A text file to read before the prompt; - for standard input.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="A file of `sympow state` to go on from.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Choose among so many tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Choose among tokens with this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Leave out tokens rarer than this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens that were read or generated become less likely.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None,
        typer.Option(help=r"String that ends the text, with \n, \t, \xNN, \uNNNN and \\ for a backslash; repeatable."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the choices; by default another each time.")] = None,
    segment_size: SegmentSize = SEGMENT_SIZE,
    cache: Cache = "auto",
    device: Device = None,
    dtype: Dtype = None,
) -> None:
    """Continues a text.

    What was read is kept in a state whose size does not depend on how much it was.
    """
    from sympow.data.plain_text import check_text, read_text, unescape
    from sympow.generation.cache import CACHE_POLICIES
    from sympow.generation.sampling import Sampling
    from sympow.report.generated_text import print_continuations, print_stream

    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    check_choice("cache", cache, CACHE_POLICIES)
    if file is None and state is None and not prompt:
        raise ValueError("give a --prompt, a --file or a --state to go on from")
    for text in prompt or ():
        check_text("prompt", text)
    stops = [unescape("stop", text) for text in stop or ()]
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
