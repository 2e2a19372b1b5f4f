"""Conversion of models and tokenizers between native and transformers, in both directions."""

import json
import shutil

import pytest
import safetensors.torch
import torch

pytest.importorskip("transformers", reason="needs transformers")

from tokenizers import Tokenizer, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from support import assert_close, assert_same_model
from sympow import GPT, GPTConfig
from sympow.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe
from sympow.hf import (
    SympowConfig,
    SympowForCausalLM,
    convert_to_native,
    convert_to_transformers,
    from_native,
    to_fast_tokenizer,
    to_native,
)
from sympow.hf.__main__ import main
from sympow.hf.model.conversion import from_fast_tokenizer
from sympow.model.storage import load_model, save_model

TEXTS = ["", "def f(x):\n\treturn x", "héllo  wörld 日本 🎉", "<|endoftext|> means its letters", "\x00\x7f don't  "]
CONFIGS = [
    {},
    {"mixer": "softmax", "gating": "fixed"},
    {"power": 4, "gating": "vector", "rotary": "pairs", "key_value_heads": 2, "bias": False, "mlp_ratio": 2},
    {"mlp_ratio": 43 / 16},
    {"head_dim": 8},
    {"gating": "learned", "rotary": "learned", "head_dim": 6, "form": "chunked", "chunk_size": 8},
    {"rotary": "grid", "max_rate": 1.0},
    {"rotary": "pairs", "rotary_fraction": 0.5},
]


def native(**changes):
    torch.manual_seed(0)
    config = GPTConfig(
        **{"vocab_size": 257, "layers": 2, "width": 16, "heads": 4, "rotary": "scale", "max_document": 100, **changes}
    )
    model = GPT(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("changes", CONFIGS)
@torch.no_grad()
def test_logits_and_weights_survive_the_round_trip(tokens, changes):
    model, ids = native(**changes), tokens()
    there = from_native(model)
    assert_close(there(ids).logits, model(ids)[0], 1e-12, "logits")
    back = to_native(there)
    assert back.config == model.config
    assert_same_model(back, model, ids)
    for name, tensor in model.state_dict().items():
        assert back.state_dict()[name].data_ptr() != tensor.data_ptr(), f"{name} is shared"


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@torch.no_grad()
def test_folders_convert_with_their_tokenizer(tokens, tmp_path, tokenizer):
    model = native(vocab_size=300)
    saved = load_tokenizer("bytes") if tokenizer == "bytes" else train_bpe(TEXTS * 3, 280)
    save_model(tmp_path / "native", model.config, model.state_dict())
    saved.save(tmp_path / "native")
    convert_to_transformers(tmp_path / "native", tmp_path / "there")
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "there")
    assert_close(there(tokens()).logits, model(tokens())[0], 1e-12, "logits")
    assert there.config.eos_token_id == there.generation_config.eos_token_id == saved.boundary
    fast = AutoTokenizer.from_pretrained(tmp_path / "there")
    for text in TEXTS:
        assert fast(text).input_ids == saved.encode(text).tolist()
    convert_to_native(tmp_path / "there", tmp_path / "back")
    assert_same_model(load_model(tmp_path / "back"), model, tokens())
    back = load_tokenizer(tmp_path / "back")
    assert (back.kind, back.boundary, back.vocab_size) == (saved.kind, saved.boundary, saved.vocab_size)
    assert back.encode(TEXTS[2]).tolist() == saved.encode(TEXTS[2]).tolist()


def test_the_command(tmp_path, capsys):
    model = native()
    save_model(tmp_path / "native", model.config, model.state_dict())
    folders = [str(tmp_path / name) for name in ("native", "there", "back")]
    main(["to-transformers", *folders[:2]])
    main(["to-native", *folders[1:]])
    assert torch.equal(load_model(folders[2]).embedding.weight, model.embedding.weight)
    with pytest.raises(SystemExit):
        main(["to-native", folders[0], folders[2]])
    assert "holds no model of transformers, but a native model" in capsys.readouterr().err


@pytest.mark.parametrize("convert", [convert_to_transformers, convert_to_native])
def test_a_model_of_the_other_format_is_not_overwritten(tmp_path, convert):
    model, weights = native(), tmp_path / "kept" / "model.safetensors"
    save_model(tmp_path / "native", model.config, model.state_dict())
    from_native(model).save_pretrained(tmp_path / "there")
    source = tmp_path / ("native" if convert is convert_to_transformers else "there")
    shutil.copytree(source, tmp_path / "kept")
    before = weights.read_bytes()
    with pytest.raises(ValueError, match=r"out must not hold a model of the other format.*kept has \w+\.json"):
        convert(source, tmp_path / "kept")
    assert weights.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "lacks model.blocks.1.mlp.up_proj.weight, which config.json requires"),
        ("unknown", "has model.blocks.1.mlp.side_proj.weight, which config.json does not describe"),
        ("reshaped", "has model.blocks.1.mlp.up_proj.weight of other shapes than config.json requires"),
        ("cut off", "has weights that cannot be read"),
    ],
)
def test_a_folder_with_other_tensors_than_its_config_is_refused(tmp_path, capsys, change, message):
    from_native(native()).save_pretrained(tmp_path / "there")
    path = tmp_path / "there" / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    weight = tensors.pop("model.blocks.1.mlp.up_proj.weight")
    if change == "unknown":
        tensors["model.blocks.1.mlp.up_proj.weight"] = weight
        tensors["model.blocks.1.mlp.side_proj.weight"] = weight.clone()
    if change == "reshaped":
        tensors["model.blocks.1.mlp.up_proj.weight"] = weight[:-1].clone()
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    if change == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SystemExit) as stopped:
        main(["to-native", str(tmp_path / "there"), str(tmp_path / "back")])
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "back" / "model.safetensors").exists()


def test_other_programs_run_knowing_the_models(tmp_path, monkeypatch, capsys):
    (tmp_path / "program_of_others.py").write_text(
        "import sys\nfrom transformers import AutoConfig\nprint(sys.argv, AutoConfig.for_model('sympow').hidden_size)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["before"])
    main(["run", "program_of_others", "--model", "hf"])
    words = capsys.readouterr().out
    assert "'--model', 'hf'] 768" in words


def test_what_cannot_be_converted_is_named(tmp_path):
    model = native()
    save_model(tmp_path, model.config, model.state_dict())
    with pytest.raises(ValueError, match="out must be another folder"):
        convert_to_transformers(tmp_path, tmp_path)
    with pytest.raises(ValueError, match=r"holds no model: model\.json is missing"):
        from_native(tmp_path / "nowhere")
    untied = SympowForCausalLM(SympowConfig(hidden_size=16, num_attention_heads=2, tie_word_embeddings=False))
    with pytest.raises(ValueError, match="lm_head tied to its embedding"):
        to_native(untied)
    with pytest.raises(TypeError, match="source must be a GPT or a folder with one, got SympowForCausalLM"):
        from_native(untied)
    with pytest.raises(TypeError, match="source must be a SympowForCausalLM or a folder with one, got GPT"):
        to_native(model)
    for kind, message in (
        ("llama", "must hold a model of type 'sympow', got 'llama'"),
        ("sympow_swapped", "swapped attention, which has no native counterpart: `sympow generate`"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=message):
            to_native(tmp_path)
    with pytest.raises(TypeError, match=r"must be a tokenizer of sympow\.data, got int"):
        to_fast_tokenizer(3)
    with pytest.raises(TypeError, match=r"with a tokenizer\.json, got int"):
        from_fast_tokenizer(3)


@pytest.mark.parametrize("kind", ["bytes", "gpt2"])
def test_fast_tokenizers_give_the_same_ids(tmp_path, kind):
    tokenizer = load_tokenizer(kind)
    to_fast_tokenizer(tokenizer).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    assert len(fast) == tokenizer.vocab_size
    for text in TEXTS:
        ids = tokenizer.encode(text).tolist()
        assert fast(text).input_ids == ids
        assert fast.decode([tokenizer.boundary, *ids], skip_special_tokens=True) == text
    assert fast("<|endoftext|>", split_special_tokens=False).input_ids == [tokenizer.boundary]
    batch = fast(["abc d", "a"], padding=True)
    assert batch.input_ids[1][:1] == [tokenizer.boundary]
    assert batch.attention_mask[1] == [0] * (len(batch.input_ids[0]) - 1) + [1]


def test_bytes_are_ids():
    fast = to_fast_tokenizer(ByteTokenizer())
    assert fast("az\n é").input_ids == list("az\n é".encode())
    assert sorted(fast.get_vocab().values()) == list(range(257))
    assert (fast.eos_token_id, fast.bos_token_id, fast.pad_token_id, fast.padding_side) == (256, 256, 256, "left")


def test_what_a_file_adds_to_texts_is_left_out():
    model = Tokenizer.from_str(to_fast_tokenizer(ByteTokenizer()).backend_tokenizer.to_str())
    model.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    tokenizer = JsonTokenizer(model, "file")
    assert to_fast_tokenizer(tokenizer)("ab").input_ids == tokenizer.encode("ab").tolist() == [97, 98]


def test_a_pipeline_runs_on_texts_of_different_lengths():
    model, tokenizer = from_native(native()), to_fast_tokenizer(ByteTokenizer())
    write = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
    options = {"max_new_tokens": 5, "do_sample": False, "return_full_text": False}
    together = write(["def f", "a"], batch_size=2, **options)
    alone = [write(text, **options) for text in ("def f", "a")]
    assert together == alone


@torch.no_grad()
def test_rotations_per_pair_start_and_decode_as_natively(tokens):
    ids = tokens()
    model = from_native(native(rotary="pairs", max_rate=1.0).double())
    expected, past = model(ids, use_cache=False).logits, None
    for place in range(ids.shape[1]):
        out = model(ids[:, place : place + 1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        torch.testing.assert_close(out.logits[:, 0], expected[:, place], rtol=0, atol=1e-9)
    fresh = type(model)(model.config)
    rotation = fresh.model.blocks[0].mixer.rotation
    assert not rotation.beta_proj.weight.any()
