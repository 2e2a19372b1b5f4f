"""`generate` and `Sampling`: prefills a prompt and samples the tokens that follow it, one at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sympow.checks import check_at_least, check_finite, check_seed
from sympow.errors import ArgumentError, ArgumentTypeError, StoppedError
from sympow.generation.cache import CachePolicy
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.model.gpt import GPT, SEGMENT_SIZE

NOT_FINITE = "the model's logits are NaN or infinite: a parameter is, or the model's dtype overflows on this text"


class NonFiniteLogitsError(StoppedError, ArithmeticError):
    """A model's logits are NaN or infinite, so that no token can be sampled from them."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token.

    Attributes:
        temperature: divides the logits; 0, or a number too small for float32: always the most likely token.
        top_k: sample from the k most likely tokens; 0: from all.
        top_p: sample from the most likely tokens that together have this probability; 1: from all.
        min_p: leave out tokens less likely than this fraction of the most likely one's probability; 0: none.
        repetition_penalty: divides positive logits of tokens that occurred in the prefix or were generated, and
            multiplies negative ones; 1: none.
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
            raise ArgumentError("temperature", f"must be at least 0, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", f"must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ArgumentError("min_p", f"must be between 0 and 1, got {self.min_p}")
        if self.repetition_penalty <= 0:
            raise ArgumentError("repetition_penalty", f"must be above 0, got {self.repetition_penalty}")

    def choose(self, logits: Tensor, seen: Tensor | None, generator: torch.Generator | None) -> Tensor:
        """The next token of each sequence, (b,).

        Args:
            logits: (b, vocabulary).
            seen: whether a token occurred, (b, vocabulary) bool; only for the penalty.
            generator: on the device of the logits; None: torch's default generator.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.repetition_penalty != 1 and seen is not None:
            logits = torch.where(seen, self._penalized(logits), logits)
        # Below the smallest normal number of the dtype, the temperature may be flushed to zero.
        if self.temperature < torch.finfo(logits.dtype).tiny:
            return logits.argmax(-1)
        # Relative to the largest logit, so that quotients can only overflow to −∞, which is a probability of 0.
        relative = logits - logits.amax(-1, keepdim=True)
        probabilities = self._kept(relative / self.temperature).softmax(-1)
        # The smallest of exponential waiting times, each with its token's probability as its rate, is that of a token
        # with its probability. `torch.multinomial` does the same, but synchronizes with the device to check its input.
        waiting = torch.empty_like(probabilities).exponential_(generator=generator)
        return (probabilities / waiting).argmax(-1)

    def _penalized(self, logits: Tensor) -> Tensor:
        """Logits of tokens that occurred; the penalty and the products are clamped to the range of the dtype."""
        limits = torch.finfo(logits.dtype)
        penalty = min(max(self.repetition_penalty, limits.tiny), limits.max)
        return torch.where(logits > 0, logits / penalty, logits * penalty).clamp(limits.min, limits.max)

    def _kept(self, logits: Tensor) -> Tensor:
        """Logits with −inf for tokens that are left out; the most likely one never is."""
        if self.top_k:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.min_p:
            probabilities = logits.softmax(-1)
            too_rare = probabilities < self.min_p * probabilities.amax(-1, keepdim=True)
            logits = logits.masked_fill(too_rare, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
            # The tokens before this one already have the probability.
            enough = ordered.cumsum(-1) - ordered >= self.top_p
            logits = logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -torch.inf)
        return logits


def generate(
    model: GPT,
    tokens: int,
    sampling: Sampling | None = None,
    *,
    prompt: Tensor | None = None,
    prefix: Prefix | None = None,
    stop: int | Collection[int] | None = None,
    seed: int | None = None,
    segment_size: int = SEGMENT_SIZE,
    cache_policy: CachePolicy = "auto",
    graphs: bool = True,
) -> Iterator[Tensor]:
    """Yields the tokens that follow a prompt, (b,) on the CPU for each step.

    On a GPU the next step runs while the caller processes a token.

    Args:
        tokens: the most tokens to generate.
        sampling: None: from the model's distribution, unchanged.
        prompt: (b, t), at least one token; sequences of one length.
        prefix: the text before the prompt; without a prompt, generation continues it.
        stop: the token, or the tokens, that end a sequence; generation ends when all sequences have had one.
        seed: of the generator that the samples of all sequences come from; None: torch's default generator.
        segment_size: tokens of the prompt that are prefilled at a time.
        cache_policy: what decoding holds. "auto": keys and values until they would take more bytes than a state, then
            a state; "state" or "keys": always the one or the other. All give the same numbers.
        graphs: whether to decode with CUDA graphs, on a GPU.

    Example:
        >>> model = GPT(GPTConfig.preset("byte-400k"))
        >>> prompt = torch.tensor([list(b"def ")])
        >>> tokens = [int(token) for token in generate(model, 8, prompt=prompt, seed=0)]
    """
    sampling = Sampling() if sampling is None else sampling
    if not isinstance(sampling, Sampling):
        raise ArgumentTypeError("sampling", f"must be a Sampling, got {type(sampling).__name__}")
    if prompt is not None and not isinstance(prompt, Tensor):
        raise ArgumentTypeError("prompt", f"must be a tensor of token ids, got {type(prompt).__name__}")
    check_at_least("tokens", tokens, 0)
    if seed is not None:
        check_seed(seed)
    owned = prompt is not None
    if prompt is not None:
        options: Any = {"segment_size": segment_size, "cache_policy": cache_policy}
        prefix = Prefix.prefill(model, prompt, **options) if prefix is None else prefix.extend(model, prompt, **options)
    if prefix is None:
        raise ArgumentError("prompt", "or prefix must be given: there is nothing to continue")
    device = prefix.logits.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    decoder = Decoder(model, prefix, tokens=tokens, cache_policy=cache_policy, owned=owned, graphs=graphs)
    del prefix
    ended = torch.zeros(len(decoder.logits), dtype=torch.bool)
    stops = torch.tensor([stop] if isinstance(stop, int) else sorted(stop or ()))
    for number in range(tokens):
        token = sampling.choose(decoder.logits, decoder.seen, generator)
        # The largest logit of a row is NaN or infinite if any is NaN or +∞, or all are −∞.
        copy = HostCopy(torch.stack([token, decoder.logits.amax(-1).isfinite().to(token.dtype)]))
        more = number + 1 < tokens
        if more and device.type == "cuda":
            decoder.step(token)
        known, finite = copy.wait()[0]
        if not finite.all():
            raise NonFiniteLogitsError(NOT_FINITE)
        yield known
        if stop is not None:
            ended |= torch.isin(known, stops)
            if bool(ended.all()):
                return
        if more and device.type != "cuda":
            decoder.step(token)


class HostCopy:
    """An asynchronous copy of tensors to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._arrival = torch.cuda.Event() if tensors[0].is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def wait(self) -> list[Tensor]:
        """The copies, once they are complete. Does not wait for work that was launched after them."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copies
