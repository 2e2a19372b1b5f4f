"""`Request`: what is asked of the engine, one object from the body of an HTTP request to the slot."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sympow.generation.sampling import Sampling
from sympow.generation.text import TextDecoder
from sympow.serving.engine.completion import Completion, Event, FinishReason, Prefilling, TokenLogprob, Usage
from sympow.serving.engine.prefill import Prefill
from sympow.serving.engine.row_sampling import Choice


@dataclass(eq=False, kw_only=True)
class Request(Prefill):
    """A prompt and how to continue it; `Engine.request` makes it, and `Engine.submit` queues it.

    The fields up to `decoder` are what is asked. `dataclasses.replace(request, seed=…)` asks for the same prompt again,
    whose tokens both share. The other fields are the worker's.

    Attributes:
        sampling, seed, max_tokens, stop, logprobs: as in `Engine.request`.
        echo: the prompt's text, if the first event is to have it; else None.
        ends: the tokens that end a text.
        ignore_boundary: whether to continue after one of these.
        decoder: turns generated tokens into text; there once the request is submitted, as is `handle`.
        handle: the completion that the caller holds.
        generated: number of generated tokens.
    """

    sampling: Sampling
    max_tokens: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: int | None
    echo: str | None
    ends: frozenset[int]
    ignore_boundary: bool
    decoder: TextDecoder = field(init=False)
    handle: Completion = field(init=False)
    generated: int = field(default=0, init=False)

    @property
    def submitted(self) -> bool:
        return "handle" in vars(self)

    def take(self, choice: Choice) -> Event:
        """The event of the next token; the last one has a finish_reason."""
        self.generated += 1
        token = choice.token
        reason: FinishReason | None = None
        text = "" if self.ignore_boundary and token in self.ends else "".join(self.decoder.take(token))
        if self.decoder.stopped:
            reason = "stop"
        elif self.generated == self.max_tokens:
            reason = "length"
            text += "".join(self.decoder.finish())
        logprobs = None
        if self.logprobs is not None:
            logprobs = (TokenLogprob(token, choice.logprob, choice.top[: self.logprobs]),)
        return Event(text, (token,), logprobs, finish_reason=reason)

    def end(self, event: Event) -> None:
        """Appends the last event to the completion, with the usage."""
        self.handle.append(replace(event, usage=Usage(len(self.tokens), self.generated, self.cached)))


@dataclass(eq=False, kw_only=True)
class ContextPrefill(Prefill):
    """A context, which is prefilled and not continued.

    Attributes:
        handle: what the caller holds.
    """

    handle: Prefilling
