"""`Request`: what is asked of the engine and how far it is, one object from the body of an HTTP request to the slot.

A `Request` is a `Prefill`, a text that the worker prefills segment by segment from the longest prefix in the prefix
cache. The other kind of it is a `ContextPrefill`, which nothing follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import linear

from sympow.generation.cache import CachePolicy, prefill_state
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import NOT_FINITE, Sampling
from sympow.generation.text import TextDecoder
from sympow.model.gpt import GPT, ModelState
from sympow.serving.engine.completion import Completion, Event, FinishReason, Prefilling, TokenLogprob, Usage
from sympow.serving.engine.prefill_graphs import PrefillGraphs
from sympow.serving.engine.prefix_cache import PrefixCache, TokenChain

# Positions of a prompt whose logits are in memory at once.
SCORED_POSITIONS = 128


@dataclass(eq=False)
class Prefill:
    """A text in prefill: the prompt of a `Request`, or a context.

    Segments end at multiples of `segment_size`, wherever the prefill started.

    Attributes:
        tokens: tokens of the text, without those of a given prefix.
        segment_size: the most tokens of a segment.
        prefix: the state of everything prefilled so far; at first the given prefix before the text, or None.
        scored: how many of the most likely tokens to report for each token of the text; None: no log-probabilities.
        position: how many tokens of the text are prefilled.
        cached: how many of these came from the prefix cache.
        begun: whether the text is one of those of several segments in prefill, which hold a state between segments.
        scores: log-probabilities of the tokens up to `position`, if scored.
    """

    tokens: Sequence[int]
    segment_size: int
    prefix: Prefix | None = None
    scored: int | None = None
    position: int = field(default=0, init=False)
    cached: int = field(default=0, init=False)
    begun: bool = field(default=False, init=False)
    scores: list[TokenLogprob] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # The cache holds states of texts from their first token on, so it cannot hold those after a given prefix.
        self._cacheable = self.prefix is None
        self._looked_up = False
        # Whether everything so far was prefilled in whole segments, as without a cache.
        self._whole = True

    @cached_property
    def _chain(self) -> TokenChain:
        """The tokens as the cache knows them, which only texts in prefill need: others may wait for long."""
        return TokenChain.of(self.tokens, self.segment_size)

    @property
    def finished(self) -> bool:
        return self.position == len(self.tokens)

    @property
    def in_one_segment(self) -> bool:
        """Whether the next segment is the last."""
        return self.position + self.next_length == len(self.tokens)

    @property
    def next_length(self) -> int:
        """Tokens of the next segment."""
        return min(len(self.tokens) - self.position, self.segment_size - self.position % self.segment_size)

    def look_up(self, cache: PrefixCache) -> None:
        """Continues from the longest prefix in the cache if it is longer: another prompt may have added it since."""
        if not self._cacheable or self.scored is not None:
            return
        found = cache.longest(self._chain, beyond=self.position)
        if not self._looked_up:
            cache.count(found)
            self._looked_up = True
        if found is not None:
            self.cached += found.tokens - self.position
            self.prefix, self.position = found, found.tokens
            self._whole = found.tokens % self.segment_size == 0

    def put_off(self) -> None:
        """Forgets the prefix that `look_up` found, so that the cache can free it; for texts that have not begun."""
        if self._cacheable:
            self.prefix, self.position, self.cached, self._whole = None, 0, 0, True

    def advance(self, model: GPT, cache: PrefixCache, graphs: PrefillGraphs | None = None) -> None:
        """Prefills the next segment, and adds the state after it to the cache.

        Args:
            graphs: graphs of the model for segments of `segment_size`, the same for all segments of a text; None:
                kernels are launched eagerly.
        """
        segment, before = self.next_length, self.prefix
        weight = model.output_weight
        ids = list(self.tokens[self.position : self.position + segment])
        policy: CachePolicy = "auto" if model.config.mixer == "softmax" else "state"
        state = prefill_state(model, None if before is None else before.state, 1, segment, policy)
        after: ModelState | None
        if graphs is None:
            tokens = torch.tensor([ids], device=weight.device)
            features, after = model.features(tokens, state)
        else:
            tokens, features, after = graphs.prefill(ids, state)
        assert after is not None
        logits = linear(features[:, -1], weight)
        if self.scored is not None:
            self._score(features[0], weight)
        seen = torch.zeros_like(logits, dtype=torch.bool) if before is None else before.seen
        read = (0 if before is None else before.tokens) + segment
        self.prefix = Prefix(logits, after, read, seen.scatter(1, tokens, True))
        self.position += segment
        # A cached state at a segment boundary must be rounded as if the text was prefilled from its beginning. A text
        # that started from the end of another prompt, inside a segment, was not: its states at segment boundaries are
        # not cached.
        if self._cacheable and (self._whole or self.position % self.segment_size):
            cache.add(self._chain, self.prefix)

    def _score(self, features: Tensor, weight: Tensor) -> None:
        """Log-probabilities of the tokens after each position of a segment, features (t, width)."""
        if self.position == 0:
            if self.prefix is None:
                self.scores.append(TokenLogprob(self.tokens[0], None))
            else:
                self._score_targets(self.prefix.logits, [self.tokens[0]])
        targets = list(self.tokens[self.position + 1 : self.position + len(features) + 1])
        for start in range(0, len(targets), SCORED_POSITIONS):
            some = targets[start : start + SCORED_POSITIONS]
            self._score_targets(linear(features[start : start + len(some)], weight), some)

    def _score_targets(self, logits: Tensor, targets: list[int]) -> None:
        assert self.scored is not None
        logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(targets, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
        likely = logprobs.topk(min(self.scored, logprobs.shape[1]), dim=-1)
        rows = zip(targets, own, likely.indices.tolist(), likely.values.tolist(), strict=True)
        self.scores += [
            TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True))) for token, logprob, ids, values in rows
        ]


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

    def take(self, choice: TokenLogprob | None) -> Event:
        """The event of the next token; the last one has a finish_reason.

        Args:
            choice: the token; None: the logits were not finite.
        """
        if choice is None:
            return Event(finish_reason="error", error=NOT_FINITE)
        self.generated += 1
        token = choice.token
        reason: FinishReason | None = None
        text = "" if self.ignore_boundary and token in self.ends else "".join(self.decoder.take(token))
        if self.decoder.stopped:
            reason = "stop"
        elif self.generated == self.max_tokens:
            reason = "length"
            text += "".join(self.decoder.finish())
        logprobs = None if self.logprobs is None else (replace(choice, top=choice.top[: self.logprobs]),)
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
