"""`TextModel`: a model with its tokenizer, which prefills text and streams the text that follows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sympow.checks import check_str
from sympow.data.plain_text import check_text
from sympow.data.tokenizer import Tokenizer, beginning_of, encode_continuation, ends_of
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.generation.cache import CachePolicy
from sympow.generation.chat import ChatTemplate
from sympow.generation.load import load
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.model.gpt import GPT, SEGMENT_SIZE

# Decoders insert it for bytes that are not a character, or not yet a complete one.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The most bytes of a character in UTF-8. A token has one byte at least.
LONGEST_CHARACTER = 4
# After this many tokens, decoding starts again, so that the cost of a token does not grow with the text.
RESTART_TOKENS = 16


@dataclass(frozen=True)
class TextModel:
    """A model and the tokenizer it was trained with.

    Attributes:
        chat: the chat template of the tokenizer; None: it has none.
    """

    model: GPT
    tokenizer: Tokenizer
    chat: ChatTemplate | None = None

    @classmethod
    def load(
        cls, folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
    ) -> TextModel:
        """Loads a model folder: the `model` folder of a training run, or one in Hugging Face format.

        Args:
            dtype: of the parameters; None: as they were saved.

        Raises:
            ValueError: the folder has no tokenizer or no model, or one of another kind, or one that is damaged.
        """
        return cls(*load(folder, device, dtype))

    def encode(self, text: str) -> Tensor:
        """Tokens of a text, (1, t), after those that begin a text (`beginning_of`)."""
        check_str("text", text)
        ids = [*beginning_of(self.tokenizer), *self.tokenizer.encode(text).tolist()]
        return torch.tensor([ids], device=self.model.embedding.weight.device)

    def prefill(self, text: str, *, segment_size: int = SEGMENT_SIZE, cache_policy: CachePolicy = "auto") -> Prefix:
        """Prefills a text from its beginning; arguments as in `Prefix.prefill`.

        Raises:
            ValueError: the text has no tokens, and the tokenizer puts none before it.
        """
        tokens = self.encode(text)
        if not tokens.shape[1]:
            raise UserError("the text must not be empty: this model's tokenizer puts no token before a text")
        return Prefix.prefill(self.model, tokens, segment_size=segment_size, cache_policy=cache_policy)

    def extend(
        self, prefix: Prefix, text: str, *, segment_size: int = SEGMENT_SIZE, cache_policy: CachePolicy = "auto"
    ) -> Prefix:
        """The prefix with more text of the same document appended; with an empty text, the prefix itself."""
        check_str("text", text)
        ids = encode_continuation(self.tokenizer, text).tolist()
        if not ids:
            return prefix
        tokens = torch.tensor([ids], device=self.model.embedding.weight.device)
        return prefix.extend(self.model, tokens, segment_size=segment_size, cache_policy=cache_policy)

    def stream(
        self,
        prefix: Prefix,
        tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: str | Iterable[str] = (),
        seed: int | None = None,
        cache_policy: CachePolicy = "auto",
        report: Callable[[int], None] | None = None,
    ) -> Iterator[str]:
        """Yields the text that follows a prefix as it is generated, in whole characters.

        Args:
            prefix: of one text.
            tokens: the most tokens to generate; a token that ends texts (`ends_of`) ends this one earlier.
            stop: a string, or strings, that end the text and are not part of it.
            seed: of the samples.
            cache_policy: as in `generate`.
            report: called after each token with the number of tokens so far.
        """
        if prefix.batch != 1:
            raise ArgumentError("prefix", f"must be of one text, got {prefix.batch}; use continue_all for several")
        decoder = TextDecoder(self.tokenizer, stop)
        stops = ends_of(self.tokenizer)
        ids = generate(self.model, tokens, sampling, prefix=prefix, stop=stops, seed=seed, cache_policy=cache_policy)
        for number, token in enumerate(ids, 1):
            if report is not None:
                report(number)
            yield from decoder.take(int(token))
            if decoder.stopped:
                return
        yield from decoder.finish()

    def continue_all(
        self,
        prefixes: Sequence[Prefix],
        tokens: int,
        sampling: Sampling | None = None,
        *,
        stop: str | Iterable[str] = (),
        seed: int | None = None,
        cache_policy: CachePolicy = "auto",
        report: Callable[[int], None] | None = None,
    ) -> list[str]:
        """The texts that follow several prefixes of any lengths, generated as one batch; arguments as in `stream`.

        Samples of all texts come from one generator, so that they depend on the batch. Ctrl-C ends the generation, and
        the text so far is returned.
        """
        joined = Prefix.cat(prefixes)
        stop = stop_strings(stop)
        decoders = [TextDecoder(self.tokenizer, stop) for _ in range(joined.batch)]
        texts = [""] * joined.batch
        stops = ends_of(self.tokenizer)
        ids = generate(self.model, tokens, sampling, prefix=joined, stop=stops, seed=seed, cache_policy=cache_policy)
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


def stop_strings(stop: str | Iterable[str]) -> tuple[str, ...]:
    """One stop string or several, checked, as a tuple."""
    if not isinstance(stop, Iterable):
        raise ArgumentTypeError("stop", f"must be a string or strings, got {type(stop).__name__}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for text in strings:
        if not isinstance(text, str):
            raise ArgumentTypeError("stop", f"must be a string or strings, got {type(text).__name__} among them")
        if not text:
            raise ArgumentError("stop", "must not contain an empty string: it would end every text at once")
        check_text("stop", text)
    return strings


class TextDecoder:
    """Converts tokens to text as they come. Incomplete characters and possible stop strings are held back.

    Args:
        stop: a string, or strings, that end the text.
        continues: whether the tokens continue a text, and are not its beginning.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str | Iterable[str] = (), *, continues: bool = True) -> None:
        self._ends, self._stop = ends_of(tokenizer), stop_strings(stop)
        stream = _LibraryStream if hasattr(tokenizer, "decode_stream") else _TextStream
        self._stream = stream(tokenizer, continues)
        self._held = ""
        self.stopped = False

    def take(self, token: int) -> Iterator[str]:
        """Yields the text that a token completes."""
        if self.stopped:
            return
        if token in self._ends:
            yield from self.finish()
            return
        yield from self._release(self._stream.step(token))

    def finish(self) -> Iterator[str]:
        """Yields the text that was held back, at the end of the tokens."""
        if self.stopped:
            return
        yield from self._release(self._stream.flush())
        if not self.stopped and self._held:
            yield self._held
        self.stopped = True

    def _release(self, new: str) -> Iterator[str]:
        """Yields the text up to a stop string, or up to what may become one."""
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
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0


class _TextStream:
    """Whole characters from tokens, by any tokenizer's `decode`.

    Args:
        continues: whether the tokens continue a text, and are not its beginning.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        self._decode_inside: Callable[[list[int]], str] = getattr(tokenizer, "decode_continuation", tokenizer.decode)
        self._decode: Callable[[list[int]], str] = self._decode_inside if continues else tokenizer.decode
        self._tokens: list[int] = []
        self._given = 0  # characters of the tokens' text that `step` has returned

    def step(self, token: int) -> str:
        """The whole characters that a token completes."""
        self._tokens.append(token)
        text = self._text(self._tokens)
        # Some decoders replace each byte of an incomplete character, others all of them at once.
        incomplete = min(len(text) - len(text.rstrip(REPLACEMENT)), LONGEST_CHARACTER - 1)
        certain = max(self._given, len(text) - incomplete)
        new = text[self._given : certain]
        self._given = certain
        return new + self._restart() if len(self._tokens) >= RESTART_TOKENS else new

    def flush(self) -> str:
        """The rest, with replacements for incomplete characters."""
        return self._text(self._tokens)[self._given :] if self._tokens else ""

    def _restart(self) -> str:
        """Keeps only the last tokens, from one that begins a character on; returns the text of the others.

        Where the texts of both parts make up the whole text, no character has bytes in both of them, whatever follows.
        """
        whole = self._text(self._tokens)
        for kept in range(1, LONGEST_CHARACTER + 1):
            before, last = self._tokens[:-kept], self._tokens[-kept:]
            text, rest = self._text(before), self._decode_inside(last)
            if rest and text + rest == whole:
                break
        else:
            # The tokens have no text, or the tokenizer decodes no part of them by itself.
            text, last = whole, []
        given = self._given
        self._reset()
        return (text + "".join(map(self.step, last)))[given:]

    def _text(self, tokens: list[int]) -> str:
        return self._decode(tokens)

    def _reset(self) -> None:
        self._tokens, self._given, self._decode = [], 0, self._decode_inside


class _LibraryStream(_TextStream):
    """The same by `tokenizers.decoders.DecodeStream`, which decodes few tokens twice.

    It holds back all text that ends with a replacement character, so that a run of them must be divided here.
    """

    def __init__(self, tokenizer: Tokenizer, continues: bool) -> None:
        super().__init__(tokenizer, continues)
        self._open: Callable[[bool], Callable[[int], str | None]] = tokenizer.decode_stream  # type: ignore[attr-defined]
        self._advance = self._open(continues)
        self._context: list[int] = []  # the tokens of the text that was returned last

    def step(self, token: int) -> str:
        self._tokens.append(token)
        try:
            new = self._advance(token)
        except Exception as error:
            if type(error) is not Exception:
                raise
            # The library raises plain Exception for a token that changes the text of earlier ones, as some decoders do
            # for invalid UTF-8. That text was returned already, so a new stream starts after it.
            new = self.flush()
            self._advance = self._open(True)
        if new is None:
            return self._restart() if len(self._tokens) >= RESTART_TOKENS else ""
        self._context, self._tokens = self._tokens, []
        return new

    def _text(self, tokens: list[int]) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + tokens)[len(before) :]

    def _reset(self) -> None:
        super()._reset()
        self._advance, self._context = self._open(True), []
