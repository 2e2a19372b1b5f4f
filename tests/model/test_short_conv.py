"""Models with a short convolution: decoding, saved prefixes, transformers, accounting and training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support import decode
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.model.accounting import count_parameters, key_value_elements, other_operations, state_elements
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.train.config import OptimizerConfig, TrainConfig
from sympow.train.optimizer import make_optimizer

SHAPE = {"layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "max_document": 100}
CONFIG = GPTConfig(vocab_size=50, **SHAPE, rotary="scale", short_conv=4)
KINDS = [{}, {"gating": "none", "rotary": "none"}, {"mixer": "softmax"}]


def make(**changes: object) -> GPT:
    torch.manual_seed(0)
    model = GPT(replace(CONFIG, **changes)).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def some_tokens(batch: int, length: int) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(1))


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.no_grad()
def test_prefill_and_decoding_are_the_forward_pass(kind, tmp_path):
    model, tokens = make(**kind), some_tokens(2, 14)
    expected, _ = model(tokens, return_state=False)
    for policy in ("auto",) if kind.get("mixer") else ("auto", "state", "keys"):
        prefix = Prefix.prefill(model, tokens[:, :7], segment_size=3, cache_policy=policy)
        same(prefix.logits, expected[:, 6])
        prefix.save(tmp_path / policy, model)
        loaded = Prefix.load(tmp_path / policy, model)
        # One text of each, joined again; what they share is not written to.
        joined = Prefix.cat([loaded.select(slice(0, 1)), prefix.select(slice(1, 2))])
        for start in (prefix, loaded, joined, prefix.fork(2).select(torch.tensor([0, 2]))):
            logits, after = decode(model, start, tokens[:, 7:12], cache_policy=policy)
            same(logits, expected[:, 7:12])
            same(after.extend(model, tokens[:, 12:]).logits, expected[:, -1])


@torch.no_grad()
def test_generation_of_transformers_is_native_generation(tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    from sympow.hf import SympowForCausalLM, from_native, to_native

    model, tokens = make(), some_tokens(2, 6)
    theirs = from_native(model).eval()
    out = theirs.generate(tokens, max_new_tokens=8, do_sample=False, pad_token_id=0)
    ours = torch.stack(list(generate(model, 8, Sampling(temperature=0), prompt=tokens)), dim=1)
    assert torch.equal(out[:, 6:], ours)
    same(theirs(tokens, use_cache=False).logits, model(tokens)[0])
    # A padded batch, and beams, which reorder the cache.
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 5, "do_sample": False, "num_beams": 2, "pad_token_id": 0}
    padded = theirs.generate(tokens, attention_mask=mask, **options)
    assert torch.equal(padded[:1, 6:], theirs.generate(tokens[:1, 2:], **options)[:, 4:])
    theirs.save_pretrained(tmp_path)
    loaded = SympowForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.short_conv == 4
    for name, parameter in to_native(loaded).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


def test_a_new_model_of_transformers_starts_as_the_identity():
    pytest.importorskip("transformers", reason="needs transformers")
    from sympow.hf import SympowConfig, SympowForCausalLM

    model = SympowForCausalLM(SympowConfig.from_native(CONFIG))
    weight = model.model.blocks[0].mixer.short_conv.weight
    assert torch.equal(weight, torch.tensor([1.0, 0, 0, 0])[:, None].expand_as(weight))


def test_parameters_states_and_operations_are_counted():
    plain, channels = replace(CONFIG, short_conv=0), 8 * 4
    assert count_parameters(CONFIG).total - count_parameters(plain).total == 2 * 4 * channels
    assert count_parameters(CONFIG).base - count_parameters(plain).base == 2 * 4 * channels
    assert state_elements(CONFIG) - state_elements(plain) == 2 * 3 * channels
    assert key_value_elements(CONFIG, 10) - key_value_elements(plain, 10) == 2 * 3 * channels
    assert other_operations(CONFIG) - other_operations(plain) == 2 * 2 * 4 * channels
    with torch.no_grad():
        _, state = GPT(CONFIG)(some_tokens(1, 5))
    held = sum(x.numel() for layer in state for name, x in layer._tensors().items() if name != "phase")
    assert held == state_elements(CONFIG)


def test_taps_are_not_decayed_and_not_sharded_over_processes():
    groups = make_optimizer(GPT(CONFIG), OptimizerConfig(weight_decay=0.1)).param_groups
    decayed = [parameter.shape for group in groups if group["weight_decay"] for parameter in group["params"]]
    assert torch.Size([4, 32]) not in decayed
    with pytest.raises(ValueError, match="short_conv"):
        TrainConfig().changed(short_conv=4, context_parallel=2)


@pytest.mark.slow
def test_a_compiled_model_is_the_same_at_other_lengths():
    model = make()
    compiled = torch.compile(model, backend="aot_eager", dynamic=True)
    for length in (6, 9):
        tokens = some_tokens(1, length)
        same(compiled(tokens, return_state=False)[0], model(tokens, return_state=False)[0])
