"""`RowSampler`: samples the next token of every row of a batch, each with its own settings and generator.

Each row gets the token that `Sampling.choose` gives for the row alone with the same generator. Settings are tensors, so
that one captured CUDA graph works for all settings. There is one graph for each combination of parts that any row needs
(penalties, sampling, truncation, log-probabilities).
"""

from __future__ import annotations

from dataclasses import astuple, fields
from typing import NamedTuple

import torch
from torch import Tensor

from sympow.generation.sampling import HostCopy, Sampling
from sympow.serving.engine.captured import CapturedCalls
from sympow.serving.engine.completion import TokenLogprob


class Needs(NamedTuple):
    """The parts of sampling that at least one row needs; they do not change the results of the other rows."""

    penalty: bool
    sampling: bool
    truncation: bool
    logprobs: bool


def choose_rows(logits: Tensor, seen: Tensor, noise: Tensor, settings: Tensor, needs: Needs) -> Tensor:
    """The next token of each row, (b,).

    Args:
        logits: (b, vocabulary), float32 or better.
        seen: which tokens occurred in prompt and completion, (b, vocabulary) bool.
        noise: samples of an exponential distribution, (b, vocabulary), for rows that sample: argmax of probability /
            noise is a sample.
        settings: the fields of `Sampling` in their order, one number per row, (5, b), in the dtype of the logits.
    """
    limits = torch.finfo(logits.dtype)
    temperature, top_k, top_p, min_p, penalty = settings.unsqueeze(-1)
    if needs.penalty:
        penalty = penalty.clamp(limits.tiny, limits.max)
        penalized = torch.where(logits > 0, logits / penalty, logits * penalty).clamp(limits.min, limits.max)
        logits = torch.where(seen & (penalty != 1), penalized, logits)
    best = logits.argmax(-1)
    if not needs.sampling:
        return best
    greedy = temperature < limits.tiny
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature.masked_fill(greedy, 1.0)
    if needs.truncation:
        scaled = _truncated(scaled, top_k, top_p, min_p)
    sampled = (scaled.softmax(-1) / noise).argmax(-1)
    return torch.where(greedy.squeeze(1), best, sampled)


def _truncated(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits with −∞ for the tokens that a row's top_k, min_p and top_p leave out, in this order."""
    vocabulary = logits.shape[-1]
    last = torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary).long() - 1
    least = logits.sort(dim=-1, descending=True).values.gather(-1, last)
    logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = logits.softmax(-1)
    too_rare = probabilities < min_p * probabilities.amax(-1, keepdim=True)
    logits = logits.masked_fill(too_rare, -torch.inf)
    ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
    # The more likely tokens already have a total probability of top_p.
    enough = (ordered.cumsum(-1) - ordered >= top_p) & (top_p < 1)
    return logits.masked_fill(torch.zeros_like(enough).scatter(-1, order, enough), -torch.inf)


class RowSampler:
    """Chooses tokens for the rows of a batch.

    Args:
        logits, seen: buffers of all rows, as in `choose_rows`, whose contents are read at every call.
        tokens: buffer that the chosen tokens are written to, (b,) int64.
        top: the largest number of most likely tokens that a row may ask for.
        graphs: whether to capture CUDA graphs, on a GPU.

    Attributes:
        calls: the graphs.
    """

    def __init__(self, logits: Tensor, seen: Tensor, tokens: Tensor, *, top: int, graphs: bool) -> None:
        self._logits, self._seen, self._tokens = logits, seen, tokens
        slots, vocabulary = logits.shape
        self._top = min(top, vocabulary)
        self.calls = CapturedCalls(capture=graphs and logits.is_cuda, optional=False)
        self._settings = logits.new_ones(len(fields(Sampling)), slots)
        self._noise = torch.ones_like(logits)
        self._of_all = torch.Generator(logits.device)
        self._of_all.seed()
        self._rows: list[tuple[Sampling, torch.Generator | None, bool] | None] = [None] * slots
        # Results that the host reads: tokens and whether logits were finite; log-probabilities; the most likely tokens.
        self._chosen = torch.zeros(slots, 2, dtype=torch.int64, device=logits.device)
        self._logprobs = torch.zeros(slots, 1 + self._top, dtype=logits.dtype, device=logits.device)
        self._likely = torch.zeros(slots, self._top, dtype=torch.int64, device=logits.device)

    def put(self, row: int, sampling: Sampling, seed: int | None, *, logprobs: bool) -> None:
        """Gives a row its settings, and a generator if it has a seed."""
        device = self._logits.device
        generator = None if seed is None else torch.Generator(device).manual_seed(seed)
        self._rows[row] = (sampling, generator, logprobs)
        numbers = [float(number) for number in astuple(sampling)]
        # Settings beyond the range of the dtype become its largest number, not infinity.
        limits = torch.finfo(self._settings.dtype)
        settings = torch.tensor(numbers, dtype=torch.float64).clamp(max=limits.max)
        if self._settings.is_cuda:
            # Pinned memory, so that the copy does not wait for kernels launched before.
            settings = settings.pin_memory()
        self._settings[:, row] = settings.to(device, non_blocking=True)

    def move(self, source: int, target: int) -> None:
        """Gives a row the settings and the generator of another one, which is then free."""
        self._rows[target] = self._rows[source]
        self._settings[:, target] = self._settings[:, source]
        self._rows[source] = None

    def clear(self, row: int) -> None:
        self._rows[row] = None

    def choose(self, rows: int, batch_rows: int) -> Transfer:
        """Launches sampling for the first `rows` rows; `batch_rows` as returned by `Slots.batch_rows`."""
        present = [entry for entry in self._rows[:rows] if entry is not None]
        tiny = torch.finfo(self._logits.dtype).tiny
        needs = Needs(
            penalty=any(s.repetition_penalty != 1 for s, _, _ in present),
            sampling=any(s.temperature >= tiny for s, _, _ in present),
            truncation=any(s.temperature >= tiny and (s.top_k or s.min_p or s.top_p < 1) for s, _, _ in present),
            logprobs=any(logprobs for _, _, logprobs in present),
        )
        if needs.sampling:
            self._draw(rows, tiny)
        self.calls(self._choose, batch_rows, needs)
        chosen = self._chosen[:rows]
        return Transfer(chosen, self._logprobs[:rows], self._likely[:rows]) if needs.logprobs else Transfer(chosen)

    def _draw(self, rows: int, tiny: float) -> None:
        """Draws new noise for the rows that sample, from their own generators if they have a seed."""
        generators = [
            (row, entry[1])
            for row, entry in enumerate(self._rows[:rows])
            if entry is not None and entry[0].temperature >= tiny
        ]
        if self._noise.is_cuda and any(generator is None for _, generator in generators):
            # One launch for all rows; those with a seed are drawn again below.
            self._noise[:rows].exponential_(generator=self._of_all)
            generators = [(row, generator) for row, generator in generators if generator is not None]
        for row, generator in generators:
            self._noise[row].exponential_(generator=generator or self._of_all)

    @torch.no_grad()
    def _choose(self, rows: int, needs: Needs) -> None:
        logits, seen, noise = self._logits[:rows], self._seen[:rows], self._noise[:rows]
        token = choose_rows(logits, seen, noise, self._settings[:, :rows], needs)
        self._tokens[:rows] = token
        self._chosen[:rows, 0] = token
        # The largest logit of a row is NaN or infinite if any is NaN or +∞, or all are −∞.
        self._chosen[:rows, 1] = logits.amax(-1).isfinite()
        if needs.logprobs:
            logprobs = logits.log_softmax(-1)
            likely = logprobs.topk(self._top, dim=-1)
            self._logprobs[:rows, :1] = logprobs.gather(-1, token.unsqueeze(-1))
            self._logprobs[:rows, 1:] = likely.values
            self._likely[:rows] = likely.indices


class Transfer:
    """Sampled tokens, and log-probabilities if a row asked for them, on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copy = HostCopy(*tensors)

    def wait(self) -> list[TokenLogprob | None]:
        """Waits for the copy, and not for kernels launched after it.

        Returns:
            the token of each row, without log-probabilities if no row asked for them; None: the row's logits were not
            finite, so that no token means anything.
        """
        chosen, *known = (copy.tolist() for copy in self._copy.wait())
        logprobs, likely = known or ([(None,)] * len(chosen), [()] * len(chosen))
        rows = zip(chosen, logprobs, likely, strict=True)
        return [
            TokenLogprob(token, own, tuple(zip(top, values, strict=True))) if finite else None
            for (token, finite), (own, *values), top in rows
        ]
