"""Training of swapped models: gradient checkpointing, peft, the Trainer, torch.compile and autocast."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from support import assert_close, assert_same_model
from sympow.hf import attention_modules, swap_attention, swapped_layers

LAYERS = ("all", "every-other")


def gradients(model, **inputs):
    model.zero_grad()
    model(**inputs).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_gradient(swapped, tokens, kind, reentrant):
    model, ids = swapped(kind, layers=[0, 2]), tokens()
    mask = (torch.arange(12) >= torch.tensor([[3], [0]])).long()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    inputs = {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
    expected = gradients(model.train(), **inputs)
    assert all(f"{name}.bias" in expected for name, _ in model.named_modules() if name.endswith("gamma_proj"))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    attention_modules(model)[0].register_forward_hook(lambda *_: calls.append(1))
    found = gradients(model, **inputs)
    assert len(calls) == 2, "nothing was recomputed"
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("policy", ["auto", "keys"])
def test_a_step_of_training_makes_no_cache(swapped, tokens, kind, policy):
    model, ids = swapped(kind, layers=[0, 2], cache_policy=policy).eval(), tokens()
    with_cache = swapped(kind, layers=[0, 2]).eval()(ids, labels=ids, use_cache=True)
    assert with_cache.past_key_values is not None
    for inputs in ((ids,), ()):
        out = model(*inputs, **({} if inputs else {"input_ids": ids}), labels=ids)
        assert out.past_key_values is None
        assert_close(out.loss, with_cache.loss, 1e-9, "loss")
    assert model.train()(ids).past_key_values is None
    assert model.base_model(ids).past_key_values is None
    with torch.no_grad():
        assert model.eval()(ids, labels=ids).past_key_values is not None
        assert model.train()(ids, use_cache=True).past_key_values is not None


@pytest.mark.parametrize("layers", LAYERS)
def test_padding_learns_nothing(swapped, tokens, pad_left, layers):
    # GPT-2, whose norms do not round to float32.
    model = swapped("gpt2", layers=layers)
    text, short = tokens(2, 8)

    def gradient(ids, **inputs):
        model.zero_grad()
        logs = model(ids, **inputs).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        predicts = inputs["attention_mask"][:, :-1] if inputs else 1
        (logs * predicts).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    ids, mask = pad_left([text, short[:5]], token=49)
    padded = gradient(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    alone, other = gradient(text[None]), gradient(short[None, :5])
    for name, found in padded.items():
        assert_close(found, alone[name] + other[name], 1e-9, name)


def test_lora_on_projections_and_gates(swapped, tokens, tmp_path):
    peft = pytest.importorskip("peft", reason="needs peft")
    ids, model = tokens(), swapped("qwen3", layers=[0, 2])
    expected = model(ids).logits
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "gamma_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    assert swapped_layers(adapted) == [0, 2]
    assert torch.equal(adapted(ids).logits, expected)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    found = gradients(adapted, input_ids=ids, labels=ids)
    of_swapped = [name for name in found if ".layers.0." in name]
    assert {name.split(".")[-4] for name in of_swapped} == {"q_proj", "v_proj", "gamma_proj"}
    assert all(found[name].any() for name in of_swapped)
    with torch.no_grad():
        out = {"max_new_tokens": 5, "do_sample": False}
        generated = adapted.generate(input_ids=ids, **out)
        assert torch.equal(generated, adapted.generate(input_ids=ids, use_cache=False, **out))
        logits = adapted(ids).logits
        assert (logits - expected).abs().max() > 1e-3
        adapted.save_pretrained(tmp_path / "adapter")
        fresh = peft.PeftModel.from_pretrained(
            swapped("qwen3", layers=[0, 2]), tmp_path / "adapter", autocast_adapter_dtype=False
        )
        assert_close(fresh(ids).logits, logits, 1e-9, "logits")
        merged = adapted.merge_and_unload()
        assert type(merged).__name__ == "SympowQwen3ForCausalLM"
        assert_close(merged(ids).logits, logits, 1e-9, "logits")
        merged.save_pretrained(tmp_path / "merged")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert_close(loaded(ids).logits, logits, 1e-9, "logits")


@pytest.mark.parametrize("layers", LAYERS)
def test_the_trainer_trains_and_resumes(pretrained, tokens, tmp_path, layers):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    text = tokens(1, 12)[0].tolist()
    rows = [{"input_ids": text, "labels": text}] * 16
    shared = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_steps": 4,
        "gradient_checkpointing": True,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }

    def train(folder, steps, checkpoint=None):
        model = swap_attention(pretrained("llama", dtype=torch.float32), layers=layers)
        arguments = TrainingArguments(output_dir=str(folder), max_steps=steps, **shared)
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=checkpoint)
        return model, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    model, losses = train(tmp_path / "once", 8)
    assert losses[-1] < losses[0] / 2
    assert attention_modules(model)[1].gate.gamma_proj.weight.any(), "the gates learn"
    again, _ = train(tmp_path / "again", 8, str(tmp_path / "once" / "checkpoint-4"))
    for name, parameter in again.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "once" / "checkpoint-8")
    ids = tokens()
    assert_same_model(loaded, model.eval(), ids)


@pytest.mark.slow
def test_a_compiled_model_computes_the_same(swapped, tokens):
    model, ids = swapped(layers="every-other"), tokens()
    mask = (torch.arange(12) >= torch.tensor([[3], [0]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    real = mask.bool()
    assert_close(compiled(**inputs).logits[real], model(**inputs).logits[real], 1e-9, "logits")
    expected = gradients(model, **inputs, labels=ids)
    for name, gradient in gradients(compiled, **inputs, labels=ids).items():
        assert_close(gradient, expected[name.removeprefix("_orig_mod.")], 1e-9, name)


@torch.no_grad()
def test_autocast_decodes_in_its_dtype(swapped, pretrained, tokens):
    model = swapped(model=pretrained(dtype=torch.float32), layers=[0, 2])
    ids = tokens(1, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cache = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert cache.layers[0].past.values.dtype == torch.bfloat16
