"""Generation: tokens agree with the forward pass, and sampling filters keep the right tokens."""

import copy
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from support import flipped
from sympow import GPT, GPTConfig, tensor_file
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import FORMAT, Prefix, fingerprint_of
from sympow.generation.sampling import NonFiniteLogitsError, Sampling, generate

VOCABULARY = 13


KINDS = [("sympow", 2), ("sympow", 4), ("softmax", 2)]


def make(mixer, power):
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(vocab_size=VOCABULARY, layers=2, width=16, heads=2, mixer=mixer, power=power, rotary="scale")
    ).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)  # far from uniform, so that choices differ
    return model


@pytest.fixture(scope="module", params=KINDS, ids=str)
def model(request):
    return make(*request.param)


def prompt(length=9, batch=2):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


def collect(model, prompt, tokens, sampling=None, **options):
    return torch.stack(list(generate(model, tokens, sampling, prompt=prompt, **options)), dim=1)


def test_a_reading_stands_for_what_was_read(model):
    before = Prefix.prefill(model, prompt()[:, :6])
    greedy = Sampling(temperature=0)
    expected = collect(model, prompt(), 5, greedy)
    assert torch.equal(collect(model, prompt()[:, 6:], 5, greedy, prefix=before), expected)
    assert torch.equal(collect(model, None, 5, greedy, prefix=Prefix.prefill(model, prompt())), expected)


def test_a_reading_can_be_forked_and_selected(model):
    prefix = Prefix.prefill(model, prompt())
    forked = prefix.fork(3)
    assert forked.batch == 6
    torch.testing.assert_close(forked.select(slice(3, 4)).logits, prefix.logits[1:])
    again = forked.select(torch.tensor([5, 0])).extend(model, prompt(2).flip(0))
    torch.testing.assert_close(again.logits, prefix.extend(model, prompt(2)).logits.flip(0), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        prefix.fork(0)


def test_a_saved_reading_goes_on_in_another_process(tmp_path):
    """One process for all kinds, since it takes longer to start than to go on."""
    expected = []
    for number, kind in enumerate(KINDS):
        model, folder = make(*kind), tmp_path / str(number)
        folder.mkdir()
        prefix = Prefix.prefill(model, prompt())
        prefix.save(folder / "text.prefix", model)
        loaded = Prefix.load(folder / "text.prefix", model)
        assert loaded.tokens == 9
        assert loaded.nbytes == prefix.nbytes > 0
        expected.append(collect(model, None, 20, prefix=prefix, seed=5))
        assert torch.equal(collect(model, None, 20, prefix=loaded, seed=5), expected[-1])
        torch.save(model, folder / "model.pt")
    code = f"""
import torch
from sympow.generation.sampling import generate
from sympow.generation.prefix import Prefix
found = []
for number in range({len(KINDS)}):
    folder = {str(tmp_path)!r} + f"/{{number}}"
    model = torch.load(folder + "/model.pt", weights_only=False)
    prefix = Prefix.load(folder + "/text.prefix", model)
    found.append([token.tolist() for token in generate(model, 20, prefix=prefix, seed=5)])
print(found)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    for kind, found, wanted in zip(KINDS, json.loads(result.stdout), expected, strict=True):
        assert torch.equal(torch.tensor(found).mT, wanted), kind


def test_files_that_are_no_readings_are_refused(model, tmp_path):
    path = tmp_path / "text.prefix"
    Prefix.prefill(model, prompt()).save(path, model)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is not a prefix file, or is damaged"):
        Prefix.load(path, model)
    path.write_bytes(content)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embedding.weight[0, 0] += 1e-6
    with pytest.raises(ValueError, match="was made by another model: its fingerprint"):
        Prefix.load(path, other)
    with pytest.raises(ValueError, match="was made by a model in float64, and this model is in bfloat16: load the"):
        Prefix.load(path, other.bfloat16())
    safetensors.torch.save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match=r"must have the format 'sympow prefix 1', got None"):
        Prefix.load(path, model)


@pytest.fixture(scope="module")
def small_model():
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=2, layers=1, width=2, heads=1))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("logits", "it lacks logits"),
        ("seen", "it lacks seen"),
        ("fingerprint", "it lacks fingerprint"),
        ("layers", "it lacks layers"),
        ("0.keys", "layer 0 lacks keys"),
        ("conv_state", "layer 0 lacks conv_state"),
        ("checksum", r"text\.prefix lacks its checksum"),
    ],
)
def test_a_part_that_is_missing_in_a_file_is_named(small_model, tmp_path, part, message):
    path = tmp_path / "text.prefix"
    Prefix.prefill(small_model, torch.tensor([[0, 1]]), cache_policy="keys").save(path, small_model)
    tensors, words = tensor_file.load(path, FORMAT)
    words["layers"] = json.dumps(
        [{name: x for name, x in layer.items() if name != part} for layer in json.loads(words["layers"])]
    )
    tensors.pop(part, None)
    words.pop(part, None)
    tensor_file.save(path, FORMAT, tensors, words)
    if part == "checksum":
        safetensors.torch.save_file(tensors, path, metadata={**words, "format": FORMAT})
    with pytest.raises(ValueError, match=rf"text\.prefix is not a prefix file, or is damaged: .*{message}$"):
        Prefix.load(path, small_model)


@pytest.mark.slow
def test_every_flipped_bit_of_a_reading_is_noticed(small_model, tmp_path):
    path = tmp_path / "text.prefix"
    Prefix.prefill(small_model, torch.tensor([[0, 1]])).save(path, small_model)
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(ValueError, match=r"text\.prefix (is not a prefix file|was made by another model)"):
            Prefix.load(path, small_model)


def test_a_failed_save_leaves_the_earlier_reading(model, tmp_path, monkeypatch):
    path = tmp_path / "text.prefix"
    Prefix.prefill(model, prompt(3)).save(path, model)
    before = path.read_bytes()

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        Prefix.prefill(model, prompt()).save(path, model)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_reading_does_not_depend_on_its_file_any_more(tmp_path):
    path = tmp_path / "text.prefix"
    code = f"""
import os, torch
from sympow import GPT, GPTConfig
from sympow.generation.prefix import Prefix
model = GPT(GPTConfig(vocab_size={VOCABULARY}, layers=1, width=64, heads=1))
prefix = Prefix.prefill(model, torch.zeros(1, 1000, dtype=torch.int64))
prefix.save({str(path)!r}, model)
loaded = Prefix.load({str(path)!r}, model)
os.truncate({str(path)!r}, 0)
print(torch.equal(loaded.logits, prefix.logits), loaded.extend(model, torch.ones(1, 1, dtype=torch.int64)).tokens)
"""
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "True 1001\n"), result.stderr


def test_the_fingerprint_is_the_models_and_not_how_it_computes(model):
    same = copy.deepcopy(model)
    assert fingerprint_of(same) == fingerprint_of(model)
    if model.config.mixer == "sympow":
        same.config = replace(same.config, form="chunked", chunk_size=4)
        assert fingerprint_of(same) == fingerprint_of(model)
    same.config = replace(same.config, max_document=7)
    assert fingerprint_of(same) != fingerprint_of(model)


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
        ({"temperature": 1e300}, [0.25, 0.25, 0.25, 0.25]),
    ],
)
def test_tokens_are_chosen_with_the_probabilities_that_are_kept(options, expected):
    found = frequencies(Sampling(**options), LOGITS)
    expected = torch.tensor(expected)
    assert torch.equal(found > 0, expected > 0)
    # Five standard deviations of a count of 4,000.
    assert ((found - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


@pytest.mark.parametrize("kept", [{}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("temperature", [1e-300, 1e-42, 1e-38, 1e-20])
def test_small_temperatures_are_greedy(temperature, kept):
    # The likeliest token is the last, since argmax of NaNs is 0.
    found = frequencies(Sampling(temperature=temperature, **kept), LOGITS.flip(0), draws=100)
    assert found.tolist() == [0, 0, 0, 1]


def test_a_penalty_makes_seen_tokens_rarer():
    logits = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    seen = torch.tensor([[True, True, False, False]])
    choice = Sampling(temperature=0, repetition_penalty=2.0).choose(logits, seen, None)
    assert choice.item() == 2
    # Both are reduced, whatever their sign.
    probabilities = torch.tensor([[0.5, -2.0, 1.0, -1.0]]).softmax(-1)
    generator = torch.Generator().manual_seed(0)
    sampled = Sampling(repetition_penalty=2.0).choose(logits.expand(4000, -1), seen.expand(4000, -1), generator)
    found = torch.bincount(sampled, minlength=4) / 4000
    assert ((found - probabilities[0]).abs() < 0.05).all()


PENALISED = Sampling(temperature=0, repetition_penalty=1.5)


def penalized(model, text, count):
    """Greedy decoding with the repetition penalty, by full forward passes."""
    for _ in range(count):
        logits = model(text)[0][:, -1].detach().clone()
        for row, tokens in zip(logits, text, strict=True):
            for token in set(tokens.tolist()):
                row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
        text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    return text[:, -count:]


def test_the_penalty_counts_all_that_was_read_however_it_was_read(model, tmp_path):
    # Short, so that many tokens of the vocabulary do not occur.
    text = prompt(5)
    expected = penalized(model, text, 8)
    generated_alone = collect(model, text, 8, Sampling(temperature=0))
    assert not torch.equal(expected, generated_alone), "the penalty changes nothing: choose another seed"
    assert torch.equal(collect(model, text, 8, PENALISED), expected)
    first = Prefix.prefill(model, text[:, :3])
    prefix = first.extend(model, text[:, 3:])
    prefix.save(tmp_path / "text.prefix", model)
    ways = {
        "a prefix": {"prefix": prefix},
        "a prefix and a prompt": {"prefix": first, "prompt": text[:, 3:]},
        "a saved prefix": {"prefix": Prefix.load(tmp_path / "text.prefix", model)},
        "forked and selected": {"prefix": prefix.fork(2).select(torch.tensor([1, 2]))},
        "joined": {"prefix": Prefix.cat([prefix.select(slice(0, 1)), prefix.select(slice(1, 2))])},
    }
    for name, way in ways.items():
        assert torch.equal(collect(model, way.pop("prompt", None), 8, PENALISED, **way), expected), name
    decoder = Decoder(model, first)
    for token in text[:, 3:].unbind(1):
        decoder.step(token)
    assert torch.equal(collect(model, None, 8, PENALISED, prefix=decoder.close()), expected)
    assert torch.equal(first.seen, torch.zeros_like(first.seen).scatter(1, text[:, :3], True)), "it was changed"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"top_k": -1}, "top_k must be at least 0, got -1"),
        ({"top_p": 0}, "top_p must be above 0 and at most 1, got 0"),
        ({"min_p": 2}, "min_p must be between 0 and 1, got 2"),
        ({"repetition_penalty": 0}, "repetition_penalty must be above 0, got 0"),
        ({"temperature": math.nan}, "temperature must be finite, got nan"),
        ({"temperature": math.inf}, "temperature must be finite, got inf"),
        ({"top_p": math.nan}, "top_p must be finite, got nan"),
        ({"min_p": math.nan}, "min_p must be finite, got nan"),
        ({"repetition_penalty": math.nan}, "repetition_penalty must be finite, got nan"),
        ({"temperature": 10**400}, "temperature must be finite, got 1000"),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be finite, got inf"),
    ],
)
def test_wrong_sampling_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, got str"),
        ({"repetition_penalty": None}, "repetition_penalty must be a number, got NoneType"),
        ({"top_k": 1.5}, "top_k must be an int, got float"),
        ({"top_k": math.nan}, "top_k must be an int, got float"),
    ],
)
def test_sampling_of_a_wrong_type_is_named(options, message):
    with pytest.raises(TypeError, match=message):
        Sampling(**options)


@pytest.mark.parametrize("temperature", [0, 1e-300, 1.0])
@pytest.mark.parametrize(("penalty", "expected"), [(1e300, 3), (1e-300, 1)])
def test_extreme_penalties_push_seen_tokens_all_the_way(temperature, penalty, expected):
    # A logit of exactly 0 is the hard case: 0 times a factor that float32 rounds to infinity is NaN.
    logits = torch.tensor([[0.0, 2.0, -1.0, 1.0]])
    seen = torch.tensor([[True, True, True, False]])
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    choices = sampling.choose(logits.expand(200, -1), seen, torch.Generator().manual_seed(0))
    if temperature == 1.0 and penalty > 1:
        # The result: 0 for seen tokens with logits of at least 0, −∞ for the one below.
        assert set(choices.tolist()) == {0, 1, 3}
    else:
        assert choices.unique().tolist() == [expected]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_end_the_generation(model, broken):
    prefix = Prefix.prefill(model, prompt())
    logits = prefix.logits.clone()
    logits[1, 3] = broken
    with pytest.raises(NonFiniteLogitsError, match="logits are NaN or infinite"):
        list(generate(model, 1, Sampling(temperature=0), prefix=replace(prefix, logits=logits)))


def test_wrong_arguments_are_named(model):
    with pytest.raises(ValueError, match="tokens must be at least 0, got -1"):
        list(generate(model, -1, prompt=prompt()))
    with pytest.raises(TypeError, match=r"^tokens must be an int, got float"):
        list(generate(model, 1.5, prompt=prompt()))
    with pytest.raises(ValueError, match=r"at least one token, got shape \(2, 0\)"):
        list(generate(model, 1, prompt=prompt(0)))
    with pytest.raises(ValueError, match="prompt or prefix must be given"):
        list(generate(model, 1))
    with pytest.raises(ValueError, match="seed must be at most 18,446,744,073,709,551,615, which is the largest"):
        list(generate(model, 1, prompt=prompt(), seed=2**64))
    with pytest.raises(ValueError, match="seed must be at least -9,223,372,036,854,775,808, the smallest"):
        list(generate(model, 1, prompt=prompt(), seed=-(2**63) - 1))
    with pytest.raises(TypeError, match="sampling must be a Sampling, got float"):
        list(generate(model, 2, 0.5, prompt=prompt()))
    with pytest.raises(TypeError, match="prompt must be a tensor of token ids, got list"):
        list(generate(model, 2, prompt=[[1, 2]]))
    with pytest.raises(TypeError, match="seed must be an int, got float"):
        list(generate(model, 1, prompt=prompt(), seed=0.5))
    for seed in (2**64 - 1, -(2**63)):
        assert len(list(generate(model, 1, prompt=prompt(), seed=seed))) == 1
