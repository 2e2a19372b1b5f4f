"""Generation: tokens follow the model's own forward pass, and sampling keeps what it should."""

import pytest
import torch

from sympow import GPT, GPTConfig
from sympow.generate import Sampling, generate, read

VOCABULARY = 13


@pytest.fixture(scope="module", params=[("sympow", 2), ("sympow", 4), ("softmax", 2)], ids=str)
def model(request):
    torch.manual_seed(0)
    mixer, power = request.param
    model = GPT(GPTConfig(vocab_size=VOCABULARY, layers=2, width=16, heads=2, mixer=mixer, power=power)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)  # far from uniform, so that choices differ
    return model


def prompt(length=9, batch=2):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def collect(*arguments, **options):
    return torch.stack(list(generate(*arguments, **options)), dim=1)


def test_greedy_is_the_argmax_of_the_forward_pass(model):
    found = collect(model, prompt(), 12, Sampling(temperature=0))
    text = prompt()
    for _ in range(12):
        logits, _ = model(text)
        text = torch.cat([text, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, text[:, 9:])


@pytest.mark.parametrize("piece", [1, 4, 100])
def test_reading_in_pieces_gives_the_same_logits_and_state(model, piece):
    expected, _ = model(prompt())
    logits, state = read(model, prompt(), piece=piece)
    torch.testing.assert_close(logits, expected[:, -1], rtol=1e-9, atol=1e-9)
    more = prompt(3)
    whole, _ = model(torch.cat([prompt(), more], dim=1))
    torch.testing.assert_close(read(model, more, state)[0], whole[:, -1], rtol=1e-9, atol=1e-9)


def test_a_state_stands_for_what_was_read(model):
    _, state = read(model, prompt()[:, :6])
    greedy = Sampling(temperature=0)
    assert torch.equal(collect(model, prompt()[:, 6:], 5, greedy, state=state), collect(model, prompt(), 5, greedy))


def test_a_seed_repeats_and_another_does_not(model):
    first, again, other = (collect(model, prompt(), 40, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_generation_ends_when_every_sequence_has_had_the_stop_token(model):
    greedy = collect(model, prompt(batch=1), 12, Sampling(temperature=0))
    stop = greedy[0, 4].item()
    stopped = collect(model, prompt(batch=1), 12, Sampling(temperature=0), stop=stop)
    first = greedy[0].tolist().index(stop)
    assert torch.equal(stopped, greedy[:, : first + 1])


def frequencies(sampling, logits, draws=4000):
    generator = torch.Generator().manual_seed(0)
    tokens = sampling.choose(logits.expand(draws, -1), None, generator)
    return torch.bincount(tokens, minlength=logits.shape[-1]) / draws


LOGITS = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [0.5, 0.25, 0.15, 0.1]),
        ({"temperature": 0.5}, [0.7247, 0.1812, 0.0652, 0.0290]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 9}, [0.5, 0.25, 0.15, 0.1]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.01}, [1, 0, 0, 0]),
        ({"min_p": 0.4}, [2 / 3, 1 / 3, 0, 0]),
        ({"temperature": 0}, [1, 0, 0, 0]),
    ],
)
def test_tokens_are_chosen_with_the_probabilities_that_are_kept(options, expected):
    found = frequencies(Sampling(**options), LOGITS)
    expected = torch.tensor(expected)
    assert torch.equal(found > 0, expected > 0)
    # Five standard deviations of a count of 4,000.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_a_penalty_makes_seen_tokens_rarer():
    logits = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    seen = torch.tensor([[True, True, False, False]])
    choice = Sampling(temperature=0, repetition_penalty=2.0).choose(logits, seen, None)
    assert choice.item() == 2
    # Both are pushed down, whichever their sign.
    probabilities = torch.tensor([[0.5, -2.0, 1.0, -1.0]]).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    sampled = Sampling(repetition_penalty=2.0).choose(logits.expand(4000, -1), seen.expand(4000, -1), generator)
    found = torch.bincount(sampled, minlength=4) / 4000
    assert ((found - probabilities[0]).abs() < 0.05).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"min_p": 2}, "min_p must be between 0 and 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
    ],
)
def test_wrong_sampling_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_wrong_arguments_are_named(model):
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        list(generate(model, prompt(), -1))
    with pytest.raises(ValueError, match=r"at least one token, got shape \(2, 0\)"):
        list(generate(model, prompt(0), 1))
