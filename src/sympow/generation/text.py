"""`TextModel`: a model with its tokenizer, which prefills text and streams the text that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sympow.data.tokenizer import Tokenizer, load_tokenizer
from sympow.deprecated import accepts_old_arguments, deprecated_attribute
from sympow.generation.cache import CachePolicy
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.model.gpt import GPT, SEGMENT_SIZE
from sympow.model.storage import load_model

# What a decoder puts in place of bytes that are no character, or not yet.
BROKEN = "\N{REPLACEMENT CHARACTER}"
# Tokens after which decoding starts afresh, so that each new token does not decode all before it.
SETTLED = 64


@dataclass(frozen=True)
class TextModel:
    """A model and the tokenizer it was trained with."""

    model: GPT
    tokenizer: Tokenizer

    @classmethod
    def load(
        cls, folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> TextModel:
        """Loads the `model` folder of a training run.

        Args:
            dtype: of the parameters; None: as they were saved.
        """
        model = load_model(folder, device).eval()
        return cls(model if dtype is None else model.to(dtype), load_tokenizer(folder))

    def encode(self, text: str) -> Tensor:
        """Tokens of a text, (1, t), behind the boundary token that begins every document in training."""
        ids = [self.tokenizer.boundary, *self.tokenizer.encode(text).tolist()]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    @accepts_old_arguments
    def prefill(self, text: str, *, segment_size: int = SEGMENT_SIZE, cache_policy: CachePolicy = "auto") -> Prefix:
        """Prefills a text from its beginning; arguments as in `Prefix.prefill`."""
        return Prefix.prefill(self.model, self.encode(text), segment_size=segment_size, cache_policy=cache_policy)

    @accepts_old_arguments
    def extend(
        self, prefix: Prefix, text: str, *, segment_size: int = SEGMENT_SIZE, cache_policy: CachePolicy = "auto"
    ) -> Prefix:
        """The prefix with more text of the same document behind it; with an empty text, the prefix itself."""
        tokens = self.encode(text)[:, 1:]
        if not tokens.shape[1]:
            return prefix
        return prefix.extend(self.model, tokens, segment_size=segment_size, cache_policy=cache_policy)

    read = deprecated_attribute("prefill")
    read_on = deprecated_attribute("extend")

    @accepts_old_arguments
    def stream(
        self,
        prefix: Prefix,
        tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
        cache_policy: CachePolicy = "auto",
        report: Callable[[int], None] | None = None,
    ) -> Iterator[str]:
        """Yields the text that follows a prefix as it is generated, in whole characters.

        Args:
            prefix: of one text.
            tokens: the most tokens to generate; the boundary token between documents ends the text earlier.
            stop: strings that end the text and are not part of it.
            seed: of the samples.
            cache_policy: as in `generate`.
            report: called after each token with the number of tokens so far.
        """
        if prefix.batch != 1:
            raise ValueError(f"prefix must be of one text, got {prefix.batch}; use continue_all for several")
        decoder = TextDecoder(self.tokenizer, stop)
        boundary = self.tokenizer.boundary
        ids = generate(self.model, tokens, sampling, prefix=prefix, stop=boundary, seed=seed, cache_policy=cache_policy)
        for number, token in enumerate(ids, 1):
            if report is not None:
                report(number)
            yield from decoder.take(int(token))
            if decoder.stopped:
                return
        yield from decoder.finish()

    @accepts_old_arguments
    def continue_all(
        self,
        prefixes: Sequence[Prefix],
        tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
        cache_policy: CachePolicy = "auto",
        report: Callable[[int], None] | None = None,
    ) -> list[str]:
        """The texts that follow several prefixes of any lengths, generated as one batch; arguments as in `stream`.

        Ctrl-C ends the generation, and the text so far is returned.
        """
        joined = Prefix.cat(prefixes)
        decoders = [TextDecoder(self.tokenizer, stop) for _ in range(joined.batch)]
        texts = [""] * joined.batch
        boundary = self.tokenizer.boundary
        ids = generate(self.model, tokens, sampling, prefix=joined, stop=boundary, seed=seed, cache_policy=cache_policy)
        try:
            for count, step in enumerate(ids, 1):
                for number, token in enumerate(step.tolist()):
                    texts[number] += "".join(decoders[number].take(token))
                if report is not None:
                    report(count)
                if all(decoder.stopped for decoder in decoders):
                    break
        except KeyboardInterrupt:
            pass
        return [text + "".join(decoder.finish()) for text, decoder in zip(texts, decoders, strict=True)]


class TextDecoder:
    """Tokens to text as they come: holds back what may yet become a character or a stop string.

    Args:
        stop: strings that end the text.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        if any(not text for text in stop):
            raise ValueError("stop must hold no empty string: it would end every text at once")
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        self._given = 0  # characters of the tokens' text already passed on
        self._held = ""
        self.stopped = False

    def take(self, token: int) -> Iterator[str]:
        """What a token adds that is sure."""
        if self.stopped:
            return
        if token == self._tokenizer.boundary:
            yield from self.finish()
            return
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        sure = text.rstrip(BROKEN)
        new = sure[self._given :]
        self._given = max(self._given, len(sure))
        if len(self._tokens) >= SETTLED and sure == text:
            self._tokens, self._given = [], 0
        yield from self._pass_on(new)

    def finish(self) -> Iterator[str]:
        """What is left when no more tokens come."""
        if self.stopped:
            return
        rest = self._tokenizer.decode(self._tokens)[self._given :] if self._tokens else ""
        self._tokens = []
        yield from self._pass_on(rest)
        if not self.stopped and self._held:
            yield self._held
        self.stopped = True

    def _pass_on(self, new: str) -> Iterator[str]:
        self._held += new
        found = [place for place in (self._held.find(text) for text in self._stop) if place >= 0]
        if found:
            self.stopped = True
            sure = self._held[: min(found)]
        else:
            sure = self._held[: len(self._held) - self._possible_stop()]
        self._held = self._held[len(sure) :]
        if sure:
            yield sure

    def _possible_stop(self) -> int:
        """Length of the longest end of what is held that begins a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0
