"""LoRA adapters (peft) on all linear layers, including those of gates and rotations."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("peft", reason="needs peft")

import peft

from support import assert_close
from sympow.hf import SympowForCausalLM

SMALL_MAPS = ("gamma_proj", "beta_proj")


@pytest.fixture
def adapted(make):
    """A model with adapters whose weights are not zero."""
    config = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(make(), config, autocast_adapter_dtype=False)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    return model


def adapters(model, of):
    return {name: p for name, p in model.named_parameters() if "lora_" in name and of in name}


@pytest.mark.parametrize("of", SMALL_MAPS)
def test_gates_and_rotations_have_adapters_that_count_and_learn(adapted, tokens, of):
    ids = tokens()
    assert len(adapters(adapted, of)) == 4  # two matrices in each of two layers
    logits = adapted(ids).logits
    adapted(ids, labels=ids).loss.backward()
    for name, parameter in adapters(adapted, of).items():
        assert parameter.grad.any(), name
    with torch.no_grad():
        for parameter in adapters(adapted, of).values():
            parameter.zero_()
    assert (adapted(ids).logits - logits).abs().max() > 1e-6


@torch.no_grad()
def test_merging_changes_nothing(adapted, tokens):
    ids = tokens()
    logits = adapted(ids).logits
    merged = adapted.merge_and_unload()
    assert type(merged) is SympowForCausalLM
    assert_close(merged(ids).logits, logits, 1e-9, "logits")


@torch.no_grad()
def test_generation_goes_through_the_adapters(adapted, tokens):
    ids = tokens(1, 6)
    generated = adapted.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
    logits = adapted(generated).logits
    assert torch.equal(generated[:, 6:], logits[:, 5:-1].argmax(-1))


@torch.no_grad()
def test_adapters_are_saved_and_loaded(adapted, make, tokens, tmp_path):
    adapted.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path, autocast_adapter_dtype=False)
    assert_close(loaded(tokens()).logits, adapted(tokens()).logits, 1e-12, "logits")
