"""Absurdly large numbers are refused where they are parsed, before they cost memory or time."""

import json
import os

import pytest
import torch

import sympow
from sympow import GPTConfig
from sympow.data.provenance import TrainedOn
from sympow.model.storage import load_model
from sympow.parsing import parse_yaml, read_json, read_yaml
from sympow.train import TrainConfig, train

# Nine levels of nine aliases: a billion entries when expanded.
LAUGHS = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 10**6}, "layers must be at most 4,096, since each is built and launched by Python; got 1,000,000"),
        ({"power": 10**7}, "power must be at most 8, since powers 2, 4, 6 and 8 are supported; got 10,000,000"),
        ({"width": 10**8, "heads": 10**6}, "the number of weights must be at most 1,000,000,000,000, which is 4 TB"),
        ({"vocab_size": 10**12}, "the number of weights must be at most"),
        ({"mlp_ratio": 10**9}, "the number of weights must be at most"),
        ({"heads": 10**9, "head_dim": 64}, "the number of weights must be at most"),
        ({"max_document": 10**17}, "max_document must be at most 9,007,199,254,740,992, the most positions"),
        ({"max_document": 10**400}, "max_document must be at most .*; got a number of 1,329 bits"),
        ({"layers": 10**5000}, "layers must be at most .*; got a number of 16,610 bits"),
        (
            {"form": "chunked", "power": 8},
            "the number of features of dim 64 and power 8 must be at most 2,147,483,647",
        ),
    ],
)
def test_absurd_models_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "data: {context: 5000000000}",
            "context must be at most 2,147,483,647, since positions in a batch are",
        ),
        ("run: {batch_tokens: 1099511627776}", "batch_tokens must be at most 2,147,483,647"),
        ("run: {seed: 99999999999999999999}", "seed must be at most 9,223,372,036,854,775,807"),
        (f"run: {{steps: {10**400}}}", "steps must be at most .* got a number of 1,329 bits"),
        ("optimizer: {learning_rate: " + "9" * 400 + "}", "learning_rate must be finite"),
        (LAUGHS, r"YAML must not have aliases, but line 2 has \*a0"),
        (MERGES, r"YAML must not have aliases, but line 2 has \*a0"),
        ("run: " + "[" * 100_000, "YAML must be nested at most 32 deep; line 1 is deeper"),
        ("# " + "x" * 2**20, "YAML must have at most 1,048,576 characters"),
        (
            "run:\n  steps: 5\n  seed: 1\n  steps: 7",
            "YAML must have each key once, but line 4 has 'steps' again, after line 2",
        ),
        (
            "run: {seed: 1}\ndata: {}\n'run': {seed: 2}",
            "YAML must have each key once, but line 3 has 'run' again, after line 1",
        ),
    ],
    ids=["context", "batch", "seed", "steps", "rate", "aliases", "merges", "depth", "length", "field", "section"],
)
def test_absurd_training_configs_are_refused(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"config\.yaml: {message}"):
        TrainConfig.read(tmp_path / "config.yaml")


def test_what_is_saved_is_read():
    config = TrainConfig()
    assert TrainConfig.from_yaml(config.to_yaml()) == config
    assert parse_yaml("a: &name [1, {b: 2}]") == {"a": [1, {"b": 2}]}
    assert parse_yaml("[{a: 1, b: {a: 2}}, {a: 3}]") == [{"a": 1, "b": {"a": 2}}, {"a": 3}]
    assert parse_yaml("") is None


@pytest.mark.parametrize("read", [read_json, read_yaml])
def test_what_is_no_file_of_text_is_refused(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder"):
        with pytest.raises(ValueError, match=f"{name} is not a file"):
            read(tmp_path / name)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="bytes is not UTF-8 text"):
        read(tmp_path / "bytes")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"large must have at most [\d,]+ bytes, got 1,099,511,627,776"):
        read(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, r"model\.json is not JSON that can be read: it is nested too deeply"),
        ('{"layers": ' + "9" * 5000 + "}", r"model\.json is not JSON: Exceeds the limit"),
        ('{"layers": 1000000}', r"model\.json: layers must be at most 4,096"),
        ('{"power": 10000000}', r"model\.json: power must be at most 8"),
        ('{"width": 1e9}', r"model\.json: width must be an int, got float"),
    ],
)
def test_a_model_with_an_absurd_config_is_refused(tmp_path, text, message):
    (tmp_path / "model.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_model_larger_than_the_machine_is_refused_before_it_is_built(tmp_path):
    config = TrainConfig().changed(layers=32, width=2**15, heads=64)
    with pytest.raises(ValueError, match=r"a model of 412,325,281,792 weights takes [\d,]+ GB to (build|train), and"):
        train(config, tmp_path / "run", device="cpu")


def test_what_a_model_was_trained_on_is_read_with_the_same_care(tmp_path):
    (tmp_path / "model").mkdir()
    for content, message in (
        ([1, 2], "must say what a model was trained on, by data, folder, context,"),
        ({"data": "stdlib", "more": 1}, "must say what a model was trained on, by data, folder, context,"),
        ({"data": "stdlib", "folder": None, "context": 8, "short": "join"}, "lacks tokenizer, fingerprint, name$"),
    ):
        (tmp_path / "model" / "training_data.json").write_text(json.dumps(content))
        with pytest.raises(ValueError, match=rf"training_data\.json {message}"):
            TrainedOn.find(tmp_path / "model")


def test_absurd_powers_of_vectors_are_refused():
    with pytest.raises(ValueError, match="power must be at most 8"):
        sympow.symmetric_power(torch.ones(4), 10**7)
    with pytest.raises(ValueError, match="the number of features of dim 64 and power 8 must be at most 2,147,483,647"):
        sympow.symmetric_power(torch.ones(64), 8)
    q = torch.ones(1, 2, 1, 4)
    with pytest.raises(ValueError, match="power must be at most 8"):
        sympow.attention(q, q, q, power=10**7)
