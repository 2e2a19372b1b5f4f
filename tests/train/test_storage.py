"""Saving and loading models, and the errors for malformed folders."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from support import assert_close, assert_same_model
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.model.storage import load_model, save_model

CONFIG = GPTConfig(vocab_size=19, layers=2, width=16, heads=2, rotary="scale", max_document=64)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(CONFIG)


@pytest.fixture
def folder(model, tmp_path):
    save_model(tmp_path / "model", CONFIG, model.state_dict())
    return tmp_path / "model"


def change_config(folder, **changes):
    content = json.loads((folder / "model.json").read_text())
    (folder / "model.json").write_text(json.dumps(content | changes))


def change_weights(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("gating", ["none", "fixed", "learned", "scalar", "vector"])
@pytest.mark.parametrize("rotary", ["none", "learned", "scale", "pairs"])
def test_a_model_comes_back_as_it_was(tmp_path, gating, rotary):
    config = GPTConfig(vocab_size=19, layers=1, width=16, heads=2, gating=gating, rotary=rotary, max_document=64)
    model = GPT(config)
    save_model(tmp_path, config, model.state_dict())
    loaded = load_model(tmp_path)
    assert loaded.config == config
    tokens = torch.randint(19, (2, 11))
    assert_same_model(loaded, model, tokens)
    # States and gradients of the loaded model work.
    model, loaded = model.double(), loaded.double()
    actual, loaded_state = loaded(tokens)
    assert_close(loaded(tokens, loaded_state)[0], model(tokens, model(tokens)[1])[0], 1e-12, "outputs after a state")
    actual.sum().backward()
    assert all(parameter.grad is not None for parameter in loaded.parameters())


def test_views_are_saved_by_their_values(model, tmp_path):
    weights = {
        name: tensor.mT.contiguous().mT if tensor.ndim == 2 else tensor for name, tensor in model.state_dict().items()
    }
    save_model(tmp_path, CONFIG, weights)
    assert torch.equal(load_model(tmp_path).embedding.weight, model.embedding.weight)


def test_a_field_that_is_missing_is_named(folder):
    """With its default, the model would be another one with weights of the same shapes."""
    content = json.loads((folder / "model.json").read_text())
    del content["power"], content["max_rate"]
    (folder / "model.json").write_text(json.dumps(content))
    with pytest.raises(
        ValueError, match=r"model\.json must have all fields of a model's config, and lacks power, max_rate$"
    ):
        load_model(folder)


def test_a_run_folder_is_not_its_model_but_nearly(folder):
    with pytest.raises(ValueError, match=rf"holds no model: model\.json is missing; did you mean {folder}\?"):
        load_model(folder.parent)
    with pytest.raises(ValueError, match=r"nowhere holds no model: model\.json is missing$"):
        load_model(folder / "nowhere")
    (folder / "model.json").rename(folder / "config.json")
    with pytest.raises(ValueError, match=r"model\.json is missing; it has a config\.json, as models in Hugging Face"):
        load_model(folder)


def test_a_device_that_torch_does_not_know_is_named_and_not_the_weights(folder):
    with pytest.raises(ValueError, match="device must be a device of torch, such as 'cpu' or 'cuda:0'; got 'tpu'"):
        load_model(folder, "tpu")


def test_missing_weights_are_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no whole model: model\.safetensors is missing"):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"model\.json is not JSON"),
        ("[]", r"model\.json must map fields to values, got list"),
        ('{"depth": 3, "breadth": 4}', r"model\.json has fields that this version does not know: breadth, depth"),
        ("{}", r"model\.json must have all fields .* and lacks vocab_size, layers, width, heads, "),
        ('{"power": 3}', r"model\.json: power must be even"),
        ('{"layers": "two"}', r"model\.json: layers must be an int, got str"),
    ],
)
def test_a_config_that_is_wrong_is_named(folder, text, message):
    (folder / "model.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_weights_that_do_not_fit_are_named(folder):
    change_config(folder, layers=1)
    with pytest.raises(ValueError, match=r"model\.safetensors has blocks\.1\..*, which model\.json does not describe"):
        load_model(folder)
    change_config(folder, layers=3)
    with pytest.raises(ValueError, match=r"model\.safetensors lacks blocks\.2\..*, which model\.json requires"):
        load_model(folder)
    change_config(folder, layers=2, vocab_size=20)
    with pytest.raises(
        ValueError, match=r"embedding\.weight has shape \(19, 16\), but model\.json requires \(20, 16\)"
    ):
        load_model(folder)
    change_config(folder, vocab_size=19)
    change_weights(folder, lambda weights: weights.pop("final_norm.bias"))
    with pytest.raises(ValueError, match=r"model\.safetensors lacks final_norm\.bias, which"):
        load_model(folder)


def test_weights_that_were_cut_off_are_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        load_model(folder)


def test_an_interrupted_writing_leaves_the_earlier_model(folder, model, monkeypatch):
    def interrupted(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(folder, CONFIG, model.state_dict())
    assert torch.equal(load_model(folder).embedding.weight, model.embedding.weight)
