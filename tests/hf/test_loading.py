"""Saving and loading, through the Auto classes, in other dtypes and processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import direct_transformers_import

from support import assert_close, assert_same_model
from sympow import GPTConfig, hf, rotary_rates
from sympow.hf import SympowConfig, SympowForCausalLM, SympowModel
from sympow.hf.transformers_module import check_version


@pytest.fixture
def folder(make, tmp_path):
    make(gating="scalar", rotary="scale").float().save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_a_saved_model_comes_back(make, tokens, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    for loader in (SympowForCausalLM, AutoModelForCausalLM):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is SympowForCausalLM
        assert loaded.dtype == torch.float64
        assert_same_model(loaded, model, tokens())
        assert loaded.lm_head.weight is loaded.model.embedding.weight
    features = AutoModel.from_pretrained(tmp_path)
    assert type(features) is SympowModel
    assert_same_model(features, model.model, tokens())
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is SympowConfig
    assert config.to_native() == model.config.to_native()


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        "import sympow.hf; from transformers import AutoModelForCausalLM",
        "from transformers import AutoModelForCausalLM; import sympow.hf",
    ],
)
def test_the_auto_classes_know_it_in_a_fresh_process(folder, tokens, order):
    expected = SympowForCausalLM.from_pretrained(folder).generate(tokens(1, 4), max_new_tokens=4, do_sample=False)
    code = f"""
import sys, torch
{order}
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
print(model.generate(torch.tensor({tokens(1, 4).tolist()}), max_new_tokens=4, do_sample=False).tolist())
"""
    command = [sys.executable, "-W", "error::UserWarning:sympow", "-c", code, str(folder)]
    result = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert result.stdout.strip() == str(expected.tolist())


@pytest.mark.parametrize(
    "name", ["SympowConfig", "SympowModel", "SympowForCausalLM", "SympowForSequenceClassification"]
)
def test_classes_are_found_where_tools_look_them_up(name, monkeypatch):
    """trl and `transformers serve` ask transformers for the class that a checkpoint names."""
    assert getattr(transformers, name) is getattr(hf, name)
    # transformers does this when its processors are imported; monkeypatch puts the former module back.
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    again = direct_transformers_import(str(Path(transformers.__file__).parent))
    assert again is not transformers
    assert getattr(again, name) is getattr(hf, name)


def test_transformers_serve_loads_it(folder):
    """Tests the part of `transformers serve` that needs no web server."""
    from transformers.cli.serving.model_manager import ModelManager

    model = ModelManager(device="cpu")._load_model(f"{folder}@main")
    assert type(model) is SympowForCausalLM


@pytest.mark.slow
def test_a_folder_says_where_its_classes_are(folder, tokens):
    """For programs that do not import sympow.hf and use trust_remote_code."""
    expected = SympowForCausalLM.from_pretrained(folder).generate(tokens(1, 4), max_new_tokens=4, do_sample=False)
    code = f"""
import sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(model.generate(torch.tensor({tokens(1, 4).tolist()}), max_new_tokens=4, do_sample=False).tolist())
model.save_pretrained(sys.argv[2])
"""
    command = [sys.executable, "-c", code, str(folder), str(folder / "again")]
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules")}
    result = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True, env=environment)
    assert result.stdout.strip() == str(expected.tolist())
    # The saved folder has no copy of this package's source, and loads in the same way.
    assert sorted(path.name for path in (folder / "again").glob("*.py")) == ["modeling_sympow.py"]
    assert AutoConfig.from_pretrained(folder / "again").auto_map["AutoModelForCausalLM"].startswith("modeling_sympow.")


def test_sympow_does_without_transformers_until_it_is_asked_for():
    code = """
import sys, sympow
assert not {"transformers", "tokenizers"} & sys.modules.keys()
sys.modules["transformers"] = None
import sympow.hf
"""
    result = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert result.returncode == 1
    assert "pip install 'conformal-sympow[hf]'" in result.stderr


def test_an_older_transformers_is_refused():
    with pytest.raises(ImportError, match=r"sympow\.hf needs transformers 5 or newer, found 4\.57\.0"):
        check_version("4.57.0")


def test_a_transformers_that_works_in_part_is_named_in_the_log(caplog):
    check_version("5.17.0")
    check_version("5.18rc1")
    check_version("6.0.0")
    assert not caplog.records
    for version in ("5.0.0rc1", "5.16.2"):
        check_version(version)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "needs transformers 5.17 or newer for assisted generation" in caplog.text
    assert "found 5.16.2" in caplog.text


@torch.no_grad()
def test_in_bfloat16_gates_and_rotations_stay_precise(make, tokens, tmp_path):
    make(rotary="learned").float().save_pretrained(tmp_path)
    whole = SympowForCausalLM.from_pretrained(tmp_path)
    model = SympowForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    mixer = model.model.blocks[0].mixer
    assert mixer.qkv_proj.weight.dtype == torch.bfloat16
    assert mixer.gate.gamma_proj.weight.dtype == torch.float32
    assert torch.equal(mixer.rotation.theta, whole.model.blocks[0].mixer.rotation.theta)
    out = model(tokens())
    assert out.logits.dtype == torch.bfloat16
    assert out.past_key_values.state[0].kv.dtype == torch.float32
    assert (out.logits.float() - whole(tokens()).logits).abs().max() < 0.05
    assert model.generate(tokens(), max_new_tokens=3).shape == (2, 15)


@pytest.mark.parametrize("gating", ["fixed", "scalar"])
@torch.no_grad()
def test_tables_of_constants_survive_the_meta_device(make, tokens, tmp_path, gating):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    model = make(gating=gating).float()
    model.save_pretrained(tmp_path)
    loaded = SympowForCausalLM.from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(loaded.model.blocks[0].mixer.rotation.rates(torch.device("cpu")), rotary_rates(4, 100))
    assert_same_model(loaded, model, tokens())


@torch.no_grad()
def test_missing_weights_start_as_in_a_fresh_model(make, folder):
    config = AutoConfig.from_pretrained(folder)
    config.gating, config.rotary = "learned", "learned"
    model = SympowForCausalLM.from_pretrained(folder, config=config)
    mixer = model.model.blocks[0].mixer
    assert mixer.gate.logit.tolist() == pytest.approx([6.906768] * 2)
    assert torch.equal(mixer.rotation.theta, rotary_rates(4, 100, dtype=torch.float32))
    expected = SympowForCausalLM.from_pretrained(folder).model.blocks[0].mixer.out_proj.weight
    assert torch.equal(mixer.out_proj.weight, expected)


@torch.no_grad()
def test_the_vocabulary_can_grow(make, tokens, tmp_path):
    model = make()
    before = model(tokens()).logits
    model.resize_token_embeddings(53, mean_resizing=False)
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert_close(model(tokens()).logits[..., :50], before, 1e-12, "logits")
    model.save_pretrained(tmp_path)
    assert SympowForCausalLM.from_pretrained(tmp_path).config.to_native().vocab_size == 53


@torch.no_grad()
def test_an_untied_model_keeps_its_own_head(make, tokens, tmp_path):
    model = make(tie_word_embeddings=False)
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    loaded = SympowForCausalLM.from_pretrained(tmp_path)
    assert_same_model(loaded, model, tokens())
    assert not torch.equal(loaded.lm_head.weight, loaded.get_input_embeddings().weight)


def test_a_config_has_the_shape_of_its_heads():
    """Inference servers, quantizers and memory estimators read them from the config."""
    config = SympowConfig(hidden_size=64, num_attention_heads=4)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert config.rotary == GPTConfig().rotary == "fixed"
    grouped = SympowConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=32)
    assert (grouped.num_key_value_heads, grouped.head_dim) == (2, 32)
    assert SympowConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()


@torch.no_grad()
def test_the_mlp_may_have_any_size(make, tokens, tmp_path):
    model = make(intermediate_size=43)
    assert model.model.blocks[0].mlp.up_proj.weight.shape == (43, 16)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.intermediate_size == 43
    assert_same_model(loaded, model, tokens())
