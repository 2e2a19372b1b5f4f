"""Tokens from a model: the prompt is read in pieces, then tokens come one at a time from a memory that never grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sympow.checks import check_at_least, check_finite
from sympow.generation.cache import Memory
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Reading
from sympow.model.gpt import GPT, PIECE


class NonFiniteLogitsError(ArithmeticError):
    """A model gave logits that are not numbers, from which no token can be chosen."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    Attributes:
        temperature: divides the logits; 0: always the likeliest token, and so are temperatures too small for float32.
        top_k: choose among so many of the likeliest tokens; 0: all.
        top_p: choose among the likeliest tokens that together have this probability; 1: all.
        min_p: leave out tokens less likely than this share of the likeliest; 0: none.
        repetition_penalty: divides positive logits of tokens that occurred, in what was read or in what was generated,
            and multiplies negative ones; 1: none.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_finite(name, getattr(self, name))
        check_at_least("top_k", self.top_k, 0)
        if self.temperature < 0:
            raise ValueError(f"temperature must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0, got {self.repetition_penalty}")

    def choose(self, logits: Tensor, seen: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """The next token of each sequence, (b,).

        Args:
            logits: (b, vocabulary).
            seen: whether a token occurred, (b, vocabulary) bool; only for the penalty.
            generator: on the device of the logits; None: torch's own.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.repetition_penalty != 1 and seen is not None:
            logits = torch.where(seen, self._penalised(logits), logits)
        # Below its smallest normal number the dtype may hold a zero instead of the temperature.
        if self.temperature < torch.finfo(logits.dtype).tiny:
            return logits.argmax(-1)
        # Relative to the largest: quotients then overflow to −∞ alone, which is a probability of 0.
        relative = logits - logits.amax(-1, keepdim=True)
        probabilities = self._kept(relative / self.temperature).softmax(-1)
        # The least of exponential waiting times, each with its token's rate, falls to a token with its probability.
        # `torch.multinomial` does the same, but has the host wait for the device to check its argument.
        waiting = torch.empty_like(probabilities).exponential_(generator=generator)
        return (probabilities / waiting).argmax(-1)

    def _penalised(self, logits: Tensor) -> Tensor:
        """Logits of tokens that occurred; the penalty and the products are kept within what the dtype can hold."""
        limits = torch.finfo(logits.dtype)
        penalty = min(max(self.repetition_penalty, limits.tiny), limits.max)
        return torch.where(logits > 0, logits / penalty, logits * penalty).clamp(limits.min, limits.max)

    def _kept(self, logits: Tensor) -> Tensor:
        """Logits with −inf for tokens that are not to be chosen; the likeliest always stays."""
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.min_p:
            probabilities = logits.softmax(-1)
            too_rare = probabilities < self.min_p * probabilities.amax(-1, keepdim=True)
            logits = logits.masked_fill(too_rare, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
            # What comes before a token is enough already.
            enough = ordered.cumsum(-1) - ordered >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -torch.inf)
        return logits


def generate(
    model: GPT,
    tokens: int,
    sampling: Sampling | None = None,
    *,
    prompt: Tensor | None = None,
    reading: Reading | None = None,
    stop: int | None = None,
    seed: int | None = None,
    piece: int = PIECE,
    memory: Memory = "auto",
    graphs: bool = True,
) -> Iterator[Tensor]:
    """Yields the tokens that follow a prompt, (b,) at a time on the CPU, as they come.

    On a GPU the next step runs while the caller looks at a token.

    Args:
        tokens: how many to generate at most.
        sampling: None: as the model has it.
        prompt: (b, t), at least one token; sequences of one length.
        reading: what was read before the prompt; alone, generation goes on right after it.
        stop: the token that ends a sequence; generation ends when all sequences have had it.
        seed: of the choices; None: torch's own generator.
        piece: prompt tokens read at a time.
        memory: what to keep of what was read. "auto": keys and values until they would take more bytes than a state,
            then a state; "state", "keys": the one or the other throughout. All give the same numbers.
        graphs: whether to decode with CUDA graphs, on a GPU.

    Example:
        >>> model = GPT(GPTConfig.preset("byte-400k"))
        >>> prompt = torch.tensor([list(b"def ")])
        >>> tokens = [int(token) for token in generate(model, 8, prompt=prompt, seed=0)]
    """
    sampling = sampling or Sampling()
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, got {tokens}")
    owned = prompt is not None
    if prompt is not None:
        options: Any = {"piece": piece, "memory": memory}
        reading = Reading.start(model, prompt, **options) if reading is None else reading.more(model, prompt, **options)
    if reading is None:
        raise ValueError("prompt or reading must be given: there is nothing to go on from")
    device = reading.logits.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    if sampling.repetition_penalty != 1 and reading.seen is None:
        raise ValueError(
            "repetition_penalty counts the tokens that were read, and this reading does not say which they were: an "
            "earlier version saved it; read the text again"
        )
    decoder = Decoder(model, reading, tokens=tokens, memory=memory, owned=owned, graphs=graphs)
    del reading
    ended = torch.zeros(len(decoder.logits), dtype=torch.bool)
    for number in range(tokens):
        token = sampling.choose(decoder.logits, decoder.seen, generator)
        chosen = _Chosen(token, decoder.logits)
        more = number + 1 < tokens
        if more and device.type == "cuda":
            decoder.step(token)
        known = chosen.wait()
        yield known
        if stop is not None:
            ended |= known == stop
            if bool(ended.all()):
                return
        if more and device.type != "cuda":
            decoder.step(token)


class _Chosen:
    """Tokens on their way to the host.

    Args:
        token: (b,).
        logits: that they were chosen by, (b, vocabulary).
    """

    def __init__(self, token: Tensor, logits: Tensor) -> None:
        # The largest of a row is NaN or infinite where any logit is NaN or +∞, or all are −∞.
        broken = ~logits.amax(-1).isfinite().all()
        self._copy = torch.cat([token, broken.to(token.dtype).unsqueeze(0)]).to("cpu", non_blocking=True)
        self._arrival = torch.cuda.Event() if token.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> Tensor:
        """The tokens, once they are there. What the device was told to do after them may go on."""
        if self._arrival is not None:
            self._arrival.synchronize()
        if self._copy[-1]:
            raise NonFiniteLogitsError(
                "the model's logits are not numbers: its parameters, or its dtype, do not bear this text"
            )
        return self._copy[:-1]
