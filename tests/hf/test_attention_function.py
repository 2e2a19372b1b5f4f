"""`attn_implementation="sympow"`: ungated power attention over the keys that a cache keeps."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import DynamicCache, StaticCache

from support import assert_close
from sympow.hf import swap_attention

GREEDY = {"do_sample": False, "pad_token_id": 49}


@pytest.fixture
def dropped_in(pretrained):
    def make_model(kind="llama", **changes):
        model = pretrained(kind, **changes)
        model.set_attn_implementation("sympow")
        return model

    return make_model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama3", "yarn", "mistral", "qwen2", "qwen3"])
@torch.no_grad()
def test_it_computes_what_swapped_layers_without_gates_do(dropped_in, pretrained, tokens, kind, monkeypatch):
    model, ids = dropped_in(kind), tokens(2, 20)
    if kind != "gpt2":
        rotary = model.model.rotary_emb

        def rotate(x, position_ids):
            """As transformers', which rounds to float32."""
            angles = (position_ids.double().unsqueeze(-1) * rotary.inv_freq).repeat(1, 1, 2)
            return angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling

        monkeypatch.setattr(rotary, "forward", rotate)
    expected = swap_attention(pretrained(kind), gating="none")(ids).logits
    assert_close(model(ids).logits, expected, 1e-9, "logits")


@torch.no_grad()
def test_the_power_is_that_of_the_config(dropped_in, pretrained, tokens):
    model, ids = dropped_in("gpt2"), tokens(2, 20)
    model.config.sympow_power = 4
    expected = swap_attention(pretrained("gpt2"), gating="none", power=4)(ids).logits
    assert_close(model(ids).logits, expected, 1e-9, "logits")


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mistral", "qwen3"])
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_it_decodes_with_keys_and_values_and_padding(dropped_in, tokens, pad_left, kind, beams):
    model = dropped_in(kind)
    texts = [row[:length] for row, length in zip(tokens(3, 8, vocabulary=49), (8, 5, 1), strict=True)]
    ids, mask = pad_left(texts, token=49)
    options = {"max_new_tokens": 6, "num_beams": beams, **GREEDY}
    cache = DynamicCache(config=model.config)
    together = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert cache.layers[0].keys.shape[2] == 13
    for text, row in zip(texts, together, strict=True):
        alone = model.generate(text[None], use_cache=False, **options)[0]
        assert row[8:].tolist() == alone[len(text) :].tolist()


def test_what_it_does_not_do_is_refused(dropped_in, pretrained, tokens):
    ids = tokens(1, 8)
    with pytest.raises(ValueError, match="a sliding window of 4 is too small for 8"):
        dropped_in("mistral-window")(ids)
    packed = {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), "use_cache": False}
    for model in (dropped_in(), dropped_in("mistral-window", sliding_window=64)):
        with pytest.raises(ValueError, match="it takes no packed documents"):
            model(ids, **packed)
    model = dropped_in()
    with pytest.raises(ValueError, match="past_key_values must be a DynamicCache"):
        model(ids, past_key_values=StaticCache(model.config, 16))
    with pytest.raises(ValueError, match="attention dropout must be 0"):
        dropped_in(attention_dropout=0.5).train()(ids)
    with pytest.raises(ValueError, match="attention_mask must be 2-D"):
        dropped_in()(ids, attention_mask=torch.ones(1, 1, 8, 8))
    with pytest.raises(ValueError, match=r"attention_mask must cover all 8 tokens .*got \(1, 4\)"):
        dropped_in()(ids, attention_mask=torch.tensor([[0, 1, 1, 1]]))
    for kind in ("gpt2", "qwen3"):
        model = dropped_in(kind)
        with pytest.raises(ValueError, match="output_attentions must not be set"):
            model(ids, output_attentions=True)
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        model.set_attn_implementation("sympow")
        with pytest.raises(ValueError, match="output_attentions must not be set"):
            model(ids)
        assert model(ids, output_attentions=False).logits.isfinite().all()


@torch.no_grad()
def test_a_mask_may_have_columns_for_tokens_to_come(dropped_in, tokens):
    model, ids = dropped_in(), tokens(2, 12)
    mask = torch.cat([torch.ones(2, 12), torch.zeros(2, 8)], dim=1)
    assert torch.equal(model(ids, attention_mask=mask).logits, model(ids).logits)


@pytest.mark.slow
@torch.no_grad()
def test_it_compiles_without_a_cache(dropped_in, tokens):
    model, ids = dropped_in("mistral-window", sliding_window=64), tokens(2, 8)
    compiled = torch.compile(model, backend="eager")
    assert_close(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits, 1e-9, "logits")
    with pytest.raises((RuntimeError, ValueError), match="it takes no packed documents"):
        compiled(ids, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]), use_cache=False)
