"""Prints generated text as it comes, and on request a summary of speed and memory."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

from sympow.generation.cache import CachePolicy, state_nbytes
from sympow.generation.prefix import Prefix
from sympow.generation.text import TextModel
from sympow.ops.window import Window
from sympow.report.model_info import format_bytes


def describe_cache(prefix: Prefix, cache_policy: CachePolicy = "auto") -> str:
    """A phrase with what a prefix holds, its size, and when it will be folded into a state."""
    size = format_bytes(prefix.nbytes)
    layer = prefix.state[0]
    if prefix.folded:
        return f"a state of {size}"
    if not isinstance(layer, Window):
        return f"keys and values of {size}, which grow with every token"
    rest = {
        "auto": f"to be folded into one when they outgrow it, beyond {layer.break_even_tokens:,} tokens",
        "state": "to be folded into one",
        "keys": "kept as they are",
    }
    return f"keys and values of {size} (a state takes {format_bytes(state_nbytes(prefix.state))}; {rest[cache_policy]})"


def print_stream(
    text_model: TextModel,
    prefix: Prefix,
    prompt: str,
    tokens: int,
    *,
    cache_policy: CachePolicy = "auto",
    summary: bool = False,
    **options: Any,
) -> None:
    """Prints a prompt and its continuation as it is generated; Ctrl-C ends it.

    Args:
        summary: whether to print speed and memory at the end, to standard error.
    """
    clock = Clock(prefix, cache_policy)
    print(prompt, end="", flush=True)
    try:
        for text in text_model.stream(prefix, tokens, cache_policy=cache_policy, report=clock.count, **options):
            print(text, end="", flush=True)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
    else:
        print()
    if summary:
        clock.print_summary()


def print_continuations(
    text_model: TextModel,
    prefixes: Sequence[Prefix],
    prompts: Sequence[str],
    tokens: int,
    *,
    cache_policy: CachePolicy = "auto",
    summary: bool = False,
    **options: Any,
) -> None:
    """Generates for several prompts at once and prints each with its continuation; Ctrl-C ends it earlier.

    Args:
        summary: as in `print_stream`.
    """
    clock = Clock(Prefix.cat(prefixes), cache_policy) if summary else None
    report = None if clock is None else clock.count
    texts = text_model.continue_all(prefixes, tokens, cache_policy=cache_policy, report=report, **options)
    for prompt, text in zip(prompts, texts, strict=True):
        print(prompt + text, end="\n\n", flush=True)
    if clock is not None:
        clock.print_summary()


class Clock:
    """Tokens and the time they took.

    Args:
        prefix: the texts that are continued.
        cache_policy: as in `generate`.
    """

    def __init__(self, prefix: Prefix, cache_policy: CachePolicy) -> None:
        self._prefix, self._cache_policy = prefix, cache_policy
        self._start = time.monotonic()
        self._tokens = 0

    def count(self, tokens: int) -> None:
        self._tokens = tokens

    def print_summary(self) -> None:
        """Prints tokens, seconds, speed, and what the prefix holds, to standard error."""
        seconds = time.monotonic() - self._start
        texts = self._prefix.batch
        total = self._tokens * texts
        of_each = f" ({self._tokens:,} of each of {texts} texts)" if texts > 1 else ""
        print(
            f"{total:,} tokens{of_each} in {seconds:.1f} s, {total / max(seconds, 1e-9):,.0f} tokens/s, after "
            f"{self._prefix.tokens:,} tokens in {describe_cache(self._prefix, self._cache_policy)}",
            file=sys.stderr,
        )
