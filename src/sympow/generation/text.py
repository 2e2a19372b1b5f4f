"""Text in, text out: a model with its tokenizer, from the folder that training exports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sympow.data.tokenizer import Tokenizer, load_tokenizer
from sympow.generation.cache import Memory
from sympow.generation.prefix import Reading
from sympow.generation.sampling import Sampling, generate
from sympow.model.gpt import GPT, PIECE
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
        """From the `model` folder of a run.

        Args:
            dtype: of the parameters; None: as they were saved.
        """
        model = load_model(folder, device).eval()
        return cls(model if dtype is None else model.to(dtype), load_tokenizer(folder))

    def encode(self, text: str) -> Tensor:
        """Tokens of a text as training saw the beginning of a document: after a boundary, (1, t)."""
        ids = [self.tokenizer.boundary, *self.tokenizer.encode(text).tolist()]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def read(self, text: str, *, piece: int = PIECE, memory: Memory = "auto") -> Reading:
        """Reads a text from its beginning; arguments as in `Reading.start`."""
        return Reading.start(self.model, self.encode(text), piece=piece, memory=memory)

    def read_on(self, reading: Reading, text: str, *, piece: int = PIECE, memory: Memory = "auto") -> Reading:
        """Reads on in the same text; an empty one changes nothing."""
        tokens = self.encode(text)[:, 1:]
        return reading.more(self.model, tokens, piece=piece, memory=memory) if tokens.shape[1] else reading

    def stream(
        self,
        reading: Reading,
        tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
        memory: Memory = "auto",
        report: Callable[[int], None] | None = None,
    ) -> Iterator[str]:
        """Yields what follows one text, piece by piece, whole characters only.

        Args:
            reading: of one text.
            tokens: to generate at most. The end of a document ends it too.
            stop: strings that end it; they are not part of it.
            seed: of the choices.
            memory: what to keep, as in `generate`.
            report: called with the number of tokens so far, at each.
        """
        if reading.batch != 1:
            raise ValueError(f"reading must be of one text, got {reading.batch}; use continue_all for several")
        decoder = TextDecoder(self.tokenizer, stop)
        ids = generate(
            self.model, tokens, sampling, reading=reading, stop=self.tokenizer.boundary, seed=seed, memory=memory
        )
        for number, token in enumerate(ids, 1):
            if report is not None:
                report(number)
            yield from decoder.take(int(token))
            if decoder.stopped:
                return
        yield from decoder.finish()

    def continue_all(
        self,
        readings: Sequence[Reading],
        tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        seed: int | None = None,
        memory: Memory = "auto",
        report: Callable[[int], None] | None = None,
    ) -> list[str]:
        """What follows each of several texts of any lengths, generated together; arguments as in `stream`.

        Ctrl-C ends it; what was generated so far is returned.
        """
        joined = Reading.cat(readings)
        decoders = [TextDecoder(self.tokenizer, stop) for _ in range(joined.batch)]
        texts = [""] * joined.batch
        ids = generate(
            self.model, tokens, sampling, reading=joined, stop=self.tokenizer.boundary, seed=seed, memory=memory
        )
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
