"""Printing of generated text as it is produced, with its speed and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from sympow.generation.cache import Memory, state_bytes
from sympow.generation.prefix import Reading
from sympow.generation.text import TextModel
from sympow.ops.window import Window
from sympow.report.model_info import format_bytes


def describe_memory(reading: Reading, memory: Memory = "auto") -> str:
    """What a reading holds, how much it is, and what becomes of it, as part of a sentence."""
    size = format_bytes(reading.nbytes)
    layer = reading.state[0]
    if reading.folded:
        return f"a state of {size}"
    if not isinstance(layer, Window):
        return f"keys and values of {size}, which grow with every token"
    rest = {
        "auto": f"to be folded into one when they outgrow it, beyond {layer.most_tokens:,} tokens",
        "state": "to be folded into one",
        "keys": "kept as they are",
    }
    return f"keys and values of {size} (a state takes {format_bytes(state_bytes(reading.state))}; {rest[memory]})"


def print_stream(
    text_model: TextModel, reading: Reading, prompt: str, tokens: int, *, memory: Memory = "auto", **options: Any
) -> None:
    """Prints a prompt and its continuation piece by piece. Ctrl-C ends it; what was printed stays."""
    clock = Clock(reading, memory)
    print(prompt, end="", flush=True)
    try:
        for text in text_model.stream(reading, tokens, memory=memory, report=clock.count, **options):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        clock.print_summary("stopped: ")
        return
    print()
    clock.print_summary()


def print_continuations(
    text_model: TextModel,
    readings: Sequence[Reading],
    prompts: Sequence[str],
    tokens: int,
    *,
    memory: Memory = "auto",
    **options: Any,
) -> None:
    """Generates for several prompts at once and prints each with its continuation; Ctrl-C ends it earlier."""
    clock = Clock(Reading.cat(readings), memory)
    texts = text_model.continue_all(readings, tokens, memory=memory, report=clock.count, **options)
    for prompt, text in zip(prompts, texts, strict=True):
        print(prompt + text, end="\n\n", flush=True)
    clock.print_summary()


class Clock:
    """Tokens and the time they took.

    Args:
        reading: what generation goes on from.
        memory: as in `generate`.
    """

    def __init__(self, reading: Reading, memory: Memory) -> None:
        self._reading, self._memory = reading, memory
        self._start = time.monotonic()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        self._tokens = tokens

    def print_summary(self, prefix: str = "") -> None:
        """Tokens, seconds, speed, and what was held at the beginning, to standard error."""
        seconds = time.monotonic() - self._start
        texts = self._reading.batch
        total = self._tokens * texts
        of_each = f" ({self._tokens:,} of each of {texts} texts)" if texts > 1 else ""
        print(
            f"{prefix}{total:,} tokens{of_each} in {seconds:.1f} s, {total / max(seconds, 1e-9):,.0f} tokens/s, after "
            f"{self._reading.tokens:,} tokens in {describe_memory(self._reading, self._memory)}",
            file=sys.stderr,
        )
