"""Swapped models through disk: `save_pretrained`, the Auto classes, device maps and dtypes."""

import json
import pickle
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from support import assert_close, assert_same_model
from sympow.hf import attention_modules, swap_attention, swapped_layers

MODELS = ("llama", "llama3", "yarn", "mistral-window", "qwen2", "qwen3", "gpt2")
ALL = {"power": 4, "gating": "vector", "initial_gate": 0.9, "form": "attention", "cache_policy": "state"}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layers", ["all", "every-other"])
@torch.no_grad()
def test_a_saved_model_comes_back_the_same(swapped, tokens, tmp_path, kind, layers):
    model, ids = swapped(kind, layers=layers), tokens()
    model.save_pretrained(tmp_path)
    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto"}):
        loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert not any(told[f"{name}_keys"] for name in ("missing", "unexpected", "mismatched"))
        assert type(loaded) is type(model)
        assert swapped_layers(loaded) == swapped_layers(model)
        assert loaded.config.sympow_attention == model.config.sympow_attention
        assert_same_model(loaded, model, ids)
    out = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **out), model.generate(ids, **out))


@torch.no_grad()
def test_all_settings_of_a_swap_are_saved(swapped, tmp_path):
    model = swapped("qwen3", layers=[0, 2], rotary="pairs", **ALL)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "sympow_swapped"
    assert saved["architectures"] == ["SympowQwen3ForCausalLM"]
    settings = {"base_model_type": "qwen3", "layers": [0, 2], "rotary": "pairs", "backend": "auto", "chunk_size": None}
    assert saved["sympow_attention"] == settings | ALL
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, transformers.Qwen3Config)
    fresh = AutoModelForCausalLM.from_config(config)
    assert swapped_layers(fresh) == [0, 2]
    for module in attention_modules(fresh).values():
        if module.layer_idx == 1:
            continue
        assert (module.power, module.form, module.cache_policy) == (4, "attention", "state")
        assert not module.rotation.beta_proj.weight.any()
        assert not module.gate.gamma_proj.weight.any()
        assert (module.gate.gamma_proj.bias.sigmoid() - 0.9).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gates_stay_in_float32_in_a_model_of_half_precision(swapped, tmp_path, dtype):
    swapped(rotary="scale").save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    for name, parameter in loaded.named_parameters():
        small = "gamma_proj" in name or "beta_proj" in name
        assert parameter.dtype == (torch.float32 if small else dtype), name


@pytest.mark.parametrize("cast", ["bfloat16", "half", "to"])
@pytest.mark.parametrize(("gating", "rotary"), [("scalar", "pairs"), ("learned", "learned")])
def test_gates_stay_in_float32_when_a_model_is_cast(swapped, pretrained, tmp_path, cast, gating, rotary):
    model = swapped(model=pretrained(dtype=torch.float32), gating=gating, rotary=rotary)
    held = {name: p.clone() for name, p in model.named_parameters() if ".gate." in name or ".rotation." in name}
    assert len(held) == 3 * (3 if gating == "scalar" else 2)
    dtype = torch.float16 if cast == "half" else torch.bfloat16
    model = model.to(dtype) if cast == "to" else getattr(model, cast)()
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        for tensor in (parameter, saved[name], loaded[name]):
            assert tensor.dtype == (torch.float32 if name in held else dtype), name
            assert name not in held or torch.equal(tensor, held[name]), name


@torch.no_grad()
def test_layers_on_disk_are_loaded_where_they_are_used(swapped, tokens, tmp_path):
    model, ids = swapped("qwen3", layers=[1]), tokens()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "cpu"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert attention_modules(loaded)[1].q_proj.weight.is_meta
    assert_close(loaded(ids).logits, model(ids).logits, 1e-12, "logits")
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(loaded.generate(ids, **options), model.generate(ids, **options))


@torch.no_grad()
def test_other_auto_classes_load_a_swapped_model(swapped, tokens, tmp_path):
    model, ids = swapped(layers=[0]), tokens()
    model.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base).__name__ == "SympowLlamaModel"
    assert_same_model(base, model.model, ids)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    assert type(classifier).__name__ == "SympowLlamaForSequenceClassification"
    assert swapped_layers(classifier) == [0]


def test_a_base_model_is_swapped_as_well(pretrained, tokens):
    base = swap_attention(pretrained("qwen2").model, layers=[2])
    assert type(base).__name__ == "SympowQwen2Model"
    assert base(tokens()).last_hidden_state.isfinite().all()


def test_a_model_with_offloaded_weights_is_refused(pretrained, tmp_path):
    pretrained().save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk", "model.layers.2": "disk"}
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    for layers in ("all", [2]):
        with pytest.raises(ValueError, match=r"meta device.*swap first, save, then load with device_map"):
            swap_attention(loaded, layers=layers)
        assert swapped_layers(loaded) == []
    swap_attention(loaded, layers=[0])


def test_a_swapped_model_is_pickled(swapped, tokens):
    model, ids = swapped(layers=[0]), tokens()
    again = pickle.loads(pickle.dumps(model))
    assert_same_model(again, model, ids)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0
    found, expected = (either(ids, attention_mask=mask).logits for either in (again, model))
    assert_close(found, expected, 1e-12, "logits")


def test_transformers_finds_the_class_by_its_name(swapped):
    kind = type(swapped())
    assert transformers.SympowLlamaForCausalLM is kind
    from sympow.hf.swap.classes import SympowLlamaConfig, SympowLlamaForCausalLM

    assert SympowLlamaForCausalLM is kind
    assert kind.config_class is SympowLlamaConfig


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (None, "base_model_type the model was; got None"),
        ({"base_model_type": "sympow_swapped"}, "got 'sympow_swapped'"),
        ({"base_model_type": "llama", "layers": [0]}, "sympow_attention in the config must have"),
    ],
)
def test_a_damaged_record_is_refused(swapped, tmp_path, record, message):
    swapped().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    file.write_text(json.dumps({**saved, "sympow_attention": record}))
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_record_of_layers_that_are_not_there_is_refused(swapped, tmp_path):
    swapped().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    saved["sympow_attention"]["layers"] = [0, 7]
    file.write_text(json.dumps(saved))
    with pytest.raises(ValueError, match=r"must name layers of the model, 0 to 2; got \[7\]"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.slow
def test_without_sympow_a_swapped_model_is_refused(swapped, tmp_path):
    swapped().save_pretrained(tmp_path)
    code = f"import transformers; transformers.AutoConfig.from_pretrained({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "model type `sympow_swapped`" in done.stderr


@pytest.mark.slow
def test_in_another_process_a_swapped_model_is_loaded(swapped, tokens, tmp_path):
    model = swapped("qwen3")
    model.save_pretrained(tmp_path)
    code = (
        "import sympow.hf, torch, transformers; "
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}); "
        "print(type(model).__name__, model(torch.arange(8)[None]).logits.sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    name, total = done.stdout.split()
    assert name == "SympowQwen3ForCausalLM"
    assert float(total) == pytest.approx(model(torch.arange(8)[None]).logits.sum().item(), rel=1e-9)
