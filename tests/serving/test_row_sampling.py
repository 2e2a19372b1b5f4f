"""Every row of a batch gets the token that `Sampling.choose` gives it alone."""

import pytest
import torch

from support import assert_close
from sympow.generation.sampling import Sampling
from sympow.serving.engine.row_sampling import RowSampler

ROWS, VOCABULARY = 24, 50


def random_sampling(generator: torch.Generator) -> Sampling:
    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    return Sampling(
        temperature=one_of(0.0, 1e-45, 0.3, 1.0, 2.0, 1e30),
        top_k=one_of(0, 0, 1, 7, 1000),
        top_p=one_of(1.0, 1.0, 0.5, 0.9, 1e-9),
        min_p=one_of(0.0, 0.0, 0.1, 1.0),
        repetition_penalty=one_of(1.0, 1.0, 1.7, 0.5, 1e-300, 1e300),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(4))
def test_rows_choose_what_each_chooses_alone(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(ROWS, VOCABULARY, generator=generator, dtype=dtype)
    logits[:, ::5] = logits[:, 1::5]  # ties
    logits[5, 3:] = -torch.inf
    seen = torch.rand(ROWS, VOCABULARY, generator=generator) < 0.4
    tokens = torch.zeros(ROWS, dtype=torch.int64)
    sampler = RowSampler(logits, seen, tokens, top=3, graphs=True)
    samplings = [random_sampling(generator) for _ in range(ROWS)]
    generators = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    for row, sampling in enumerate(samplings):
        if row % 6 != 4:
            sampler.put(row, sampling, row, logprobs=False)
    for _ in range(3):
        chosen = sampler.choose(ROWS, ROWS).wait()
        for row, (sampling, own) in enumerate(zip(samplings, generators, strict=True)):
            if row % 6 != 4:  # the others are free
                expected = sampling.choose(logits[row : row + 1], seen[row : row + 1], own)
                assert chosen[row].token == tokens[row] == expected


def test_a_row_takes_its_generator_along():
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1)).repeat(4, 1)
    sampler = RowSampler(logits, torch.zeros_like(logits, dtype=torch.bool), torch.zeros(4).long(), top=3, graphs=True)
    own = torch.Generator().manual_seed(7)
    sampler.put(3, Sampling(temperature=2.0), 7, logprobs=False)
    sampler.put(1, Sampling(), None, logprobs=False)
    row = 3
    for place in (3, 2, 2, 0, 3):
        if place != row:
            sampler.move(row, place)
            row = place
        assert sampler.choose(4, 4).wait()[row].token == Sampling(temperature=2.0).choose(logits[:1], None, own)


def test_rows_that_are_not_finite_are_told_apart():
    logits = torch.zeros(5, VOCABULARY)
    logits[1, 4], logits[2, 9] = torch.nan, torch.inf
    logits[3] = -torch.inf
    logits[4, 1:] = -torch.inf
    sampler = RowSampler(logits, torch.zeros_like(logits, dtype=torch.bool), torch.zeros(5).long(), top=3, graphs=True)
    for row in range(5):
        sampler.put(row, Sampling(top_p=0.9), row, logprobs=True)
    tokens = [None if choice is None else choice.token for choice in sampler.choose(5, 5).wait()]
    assert tokens == [tokens[0], None, None, None, 0]
    assert 0 <= tokens[0] < VOCABULARY


def test_log_probabilities_are_of_the_untouched_logits():
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    seen = torch.ones_like(logits, dtype=torch.bool)
    sampler = RowSampler(logits, seen, torch.zeros(3).long(), top=4, graphs=True)
    for row in range(3):
        sampler.put(row, Sampling(temperature=3.0, top_k=2, repetition_penalty=4.0), row, logprobs=row == 1)
    chosen = sampler.choose(3, 3).wait()
    expected = logits.log_softmax(-1)
    for row, choice in enumerate(chosen):
        likely = expected[row].topk(4)
        assert [token for token, _ in choice.top] == likely.indices.tolist()
        found = torch.tensor([choice.logprob, *(value for _, value in choice.top)], dtype=torch.float64)
        assert_close(found, torch.cat([expected[row, choice.token][None], likely.values]), 1e-12, "log-probabilities")
