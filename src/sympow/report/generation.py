"""Generated text on a terminal, as it comes, with what it took."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from sympow.reading import Reading
from sympow.report.info import format_bytes
from sympow.text import TextModel


def print_stream(text_model: TextModel, reading: Reading, tokens: int, **options: Any) -> None:
    """Prints a continuation piece by piece. Ctrl-C ends it; what was printed stays."""
    start, characters = time.monotonic(), 0
    try:
        for text in text_model.stream(reading, tokens, **options):
            print(text, end="", flush=True)
            characters += len(text)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        _report(reading, start, characters, "stopped: ")
        return
    print()
    _report(reading, start, characters)


def print_continuations(
    text_model: TextModel, readings: Sequence[Reading], prompts: Sequence[str], tokens: int, **options: Any
) -> None:
    """Generates for several prompts at once and prints each with its continuation."""
    start = time.monotonic()
    texts = text_model.continue_all(readings, tokens, **options)
    for prompt, text in zip(prompts, texts, strict=True):
        print(prompt + text, end="\n\n", flush=True)
    _report(Reading.cat(readings), start, sum(map(len, texts)))


def _report(reading: Reading, start: float, characters: int, prefix: str = "") -> None:
    seconds = time.monotonic() - start
    print(
        f"{prefix}{characters:,} characters in {seconds:.1f} s, after {reading.tokens:,} tokens in a state of "
        f"{format_bytes(reading.nbytes)}",
        file=sys.stderr,
    )
