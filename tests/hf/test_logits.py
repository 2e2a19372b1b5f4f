"""Logits are the same for a text in one call, in several calls, and with padding."""

import pytest
import torch
from torch._dynamo.utils import counters

pytest.importorskip("transformers", reason="needs transformers")

from transformers import DataCollatorWithFlattening

from support import assert_close
from sympow.generation.cache import fold
from sympow.hf import SympowCache, SympowConfig, SympowForCausalLM, SympowForSequenceClassification, from_native

KINDS = [
    pytest.param({"power": 2}, id="p2-conformal"),
    pytest.param({"power": 4}, id="p4-conformal"),
    pytest.param({"power": 2, "gating": "scalar", "rotary": "none"}, id="p2-gated"),
    pytest.param({"power": 4, "gating": "none", "rotary": "fixed"}, id="p4-rotary"),
    pytest.param({"power": 2, "gating": "vector", "rotary": "pairs"}, id="p2-pairs"),
    pytest.param({"mixer": "softmax"}, id="softmax"),
]
PRECISIONS = [
    pytest.param(torch.float64, 1e-9, id="float64"),
    pytest.param(torch.float32, 2e-4, id="float32", marks=pytest.mark.slow),
]


def assert_relative(actual, expected, tolerance, what):
    assert_close(actual, expected, tolerance, what, relative=True)


def read_on(model, ids, mask, start, stop):
    """Prefills up to `start` and decodes token by token up to `stop`; returns the logits from token start − 1 on."""
    out = model(ids[:, :start], attention_mask=mask[:, :start], use_cache=True, logits_to_keep=1)
    logits = [out.logits]
    for now in range(start, stop):
        out = model(
            ids[:, now : now + 1],
            attention_mask=mask[:, : now + 1],
            past_key_values=out.past_key_values,
            use_cache=True,
        )
        logits.append(out.logits)
    assert out.past_key_values.get_seq_length() == stop
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@torch.no_grad()
def test_prefill_then_decode_is_the_forward_at_every_split(make, tokens, kind, dtype, tolerance):
    model, ids = make(**kind).to(dtype), tokens(length=9)
    whole = model(ids, use_cache=False).logits
    for split in range(1, 9):
        assert_relative(
            read_on(model, ids, torch.ones_like(ids), split, 9), whole[:, split - 1 :], tolerance, f"split {split}"
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@torch.no_grad()
def test_the_same_in_left_padded_batches(make, tokens, pad_left, kind, dtype, tolerance):
    model = make(**kind).to(dtype)
    texts = [row[:length] for row, length in zip(tokens(3, 9), (9, 6, 2), strict=True)]
    ids, mask = pad_left(texts, token=49)
    alone = [model(text[None], use_cache=False).logits[0] for text in texts]
    padded = model(ids, attention_mask=mask, use_cache=False).logits
    assert torch.isfinite(padded).all()
    for text, row, expected in zip(texts, padded, alone, strict=True):
        assert_relative(row[-len(text) :], expected, tolerance, "forward")
    for split in range(1, 9):
        logits = read_on(model, ids, mask, split, 9)
        for text, row, expected in zip(texts, logits, alone, strict=True):
            shared = min(len(text), 9 - split + 1)
            assert_relative(row[-shared:], expected[-shared:], tolerance, f"split {split}")


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@torch.no_grad()
def test_a_long_text_splits_at_random_positions(make, tokens, pad_left, power, dtype, tolerance):
    model = make(power=power, num_hidden_layers=1, hidden_size=8, num_attention_heads=2, max_position_embeddings=5_000)
    model = model.to(dtype)
    long, short = tokens(2, 5_000)
    ids, mask = pad_left([long, short[:1_234]])
    whole = model(long[None], use_cache=False).logits[0], model(short[None, :1_234], use_cache=False).logits[0]
    for split in torch.randint(1, 4_998, (5,), generator=torch.Generator().manual_seed(power)).tolist():
        logits = read_on(model, ids, mask, split, split + 2)
        assert_relative(logits[0], whole[0][split - 1 : split + 2], tolerance, f"split {split}")
        first = split - 1 - (5_000 - 1_234)
        if first >= 0:
            assert_relative(logits[1], whole[1][first : first + 3], tolerance, f"split {split}, padded")


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_leaves_no_trace_in_the_state(make, tokens, kind):
    model, ids = make(**kind), tokens(1, 5)
    padded, mask = torch.cat([tokens(1, 3, seed=7), ids], 1), torch.tensor([[0] * 3 + [1] * 5])
    alone = fold(model(ids, use_cache=True).past_key_values.state)
    beside = fold(model(padded, attention_mask=mask, use_cache=True).past_key_values.state)
    for own, other in zip(alone, beside, strict=True):
        if own.phase is not None:
            assert_close(other.phase, own.phase, 1e-12, "phase")
        if kind.get("mixer") != "softmax":
            assert_close(other.kv, own.kv, 1e-12, "state")
            assert_close(other.normalizer, own.normalizer, 1e-12, "normalizer")


@torch.no_grad()
def test_padding_may_stand_on_the_right_and_between(make, tokens):
    model, ids = make(), tokens(1, 6)
    scattered = torch.tensor([[ids[0, 0], 9, ids[0, 1], ids[0, 2], 9, 9, *ids[0, 3:], 9]])
    mask = torch.tensor([[1, 0, 1, 1, 0, 0, 1, 1, 1, 0]])
    out = model(scattered, attention_mask=mask)
    expected = model(ids)
    assert_close(out.logits[mask.bool()], expected.logits[0], 1e-9, "logits")
    now = tokens(1, 1)
    assert_close(
        model(now, past_key_values=out.past_key_values).logits,
        model(now, past_key_values=expected.past_key_values).logits,
        1e-9,
        "next",
    )


@torch.no_grad()
def test_a_padding_id_need_not_be_in_the_vocabulary(make, tokens, pad_left):
    model, text = make(), tokens(1, 4)[0]
    ids, mask = pad_left([text, text[:2]], token=50)
    assert_close(model(ids, attention_mask=mask).logits[1, 2:], model(text[None, :2]).logits[0], 1e-9, "logits")


@torch.no_grad()
def test_logits_and_state_are_the_native_models(tokens):
    from sympow import GPT, GPTConfig

    torch.manual_seed(0)
    native = GPT(GPTConfig(vocab_size=50, layers=2, width=16, heads=4, rotary="scale", max_document=100))
    model, ids = from_native(native), tokens()
    expected, state = native(ids)
    out = model(ids)
    assert torch.equal(out.logits, expected)
    assert torch.equal(out.past_key_values.state[1].kv, state[1].kv)


@torch.no_grad()
def test_embeddings_may_come_in_place_of_ids(make, tokens):
    model, ids = make(), tokens()
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, model(ids).logits)


@torch.no_grad()
def test_embeddings_of_padding_do_not_matter(make, tokens):
    """Not even in the outputs of padding tokens, which some tools compare although they have no meaning."""
    model, ids = make(), tokens()
    mask = torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0], [1] * 12])
    from_ids = model(ids, attention_mask=mask).logits
    embedded = model.get_input_embeddings()(ids)
    assert_close(model(inputs_embeds=embedded, attention_mask=mask).logits, from_ids, 1e-12, "logits")


@torch.no_grad()
def test_some_logits_can_be_left_out(make, tokens):
    model, ids = make(), tokens()
    whole = model(ids).logits
    assert_close(model(ids, logits_to_keep=3).logits, whole[:, -3:], 1e-12, "last")
    assert_close(model(ids, logits_to_keep=torch.tensor([0, 5])).logits, whole[:, [0, 5]], 1e-12, "chosen")


@torch.no_grad()
def test_packed_documents_do_not_see_each_other(make, tokens):
    model, (first, second) = make(), tokens()
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collate([{"input_ids": first[:5].tolist()}, {"input_ids": second.tolist()}])
    packed = model(**batch)
    assert packed.past_key_values is None
    assert_close(packed.logits[:, 5:], model(second[None]).logits, 1e-9, "second document")
    whole = model(**batch, use_cache=False).loss
    alone = [model(text[None], labels=text[None]).loss for text in (first[:5], second)]
    assert_close(whole, (4 * alone[0] + 11 * alone[1]) / 15, 2e-6, "loss")


@torch.no_grad()
def test_outputs_by_name_and_as_tuples(make, tokens):
    model, ids = make(), tokens()
    out = model(ids, labels=ids, output_hidden_states=True, use_cache=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    loss, logits, cache, hidden = model(ids, labels=ids, output_hidden_states=True, use_cache=True, return_dict=False)
    assert torch.equal(loss, out.loss)
    assert torch.equal(logits, out.logits)
    assert isinstance(cache, SympowCache)
    assert len(hidden) == 3
    features = model.model(ids, return_dict=False)
    assert torch.equal(features[0], out.hidden_states[-1])


@torch.no_grad()
def test_states_are_made_only_where_they_are_wanted(make, tokens):
    model, ids = make(), tokens()
    assert model(ids).past_key_values is not None
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None


@torch.no_grad()
def test_a_cache_can_be_read_and_left_as_it_is(make, tokens):
    model, ids = make(), tokens()
    cache = model(ids[:, :8]).past_key_values
    before = cache.state
    out = model(ids[:, 8:], past_key_values=cache, use_cache=False)
    assert_close(out.logits, model(ids).logits[:, 8:], 1e-9, "logits")
    assert cache.state is before
    assert cache.get_seq_length() == 8


@pytest.mark.parametrize("task", ["CausalLM", "SequenceClassification"])
@torch.no_grad()
def test_extra_outputs_that_the_config_asks_for(make, tokens, task):
    config = make(attn_implementation="eager").config
    model = {"CausalLM": SympowForCausalLM, "SequenceClassification": SympowForSequenceClassification}[task](config)
    ids = tokens()
    model.config.output_hidden_states = True
    assert len(model(ids).hidden_states) == 3
    assert model(ids, output_hidden_states=False).hidden_states is None
    model.config.output_attentions = True
    with pytest.raises(ValueError, match="output_attentions must not be set: attention weights are never materialized"):
        model(ids)
    assert model(ids, output_attentions=False).logits.isfinite().all()
    # Numbers of layers, which newer versions of transformers take, are not flags.
    for selection in (1, 0, [0, 2]):
        with pytest.raises(ValueError, match="output_hidden_states must be True or False"):
            model(ids, output_attentions=False, output_hidden_states=selection)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "exactly one of input_ids and inputs_embeds"),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, r"attention_mask must be \(2, 12\).*got \(2, 5\)"),
        ({"attention_mask": torch.ones(2, 1, 12, 12)}, ValueError, "attention_mask must be"),
        ({"output_attentions": True}, ValueError, "output_attentions must not be set"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 12]), "use_cache": True},
            ValueError,
            "are not supported with packed documents; cu_seq_lens_q has some",
        ),
        ({"past_key_values": ()}, TypeError, "past_key_values must be a SympowCache, got tuple"),
    ],
)
def test_mistakes_are_named(make, tokens, arguments, error, message):
    with pytest.raises(error, match=message):
        make()(tokens() if arguments else None, **arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"input_ids": torch.zeros(12, dtype=torch.int64)},
            ValueError,
            r"input_ids must be \(batch, tokens\), got \(12,\)",
        ),
        ({"input_ids": [[1, 2]]}, TypeError, "input_ids must be a tensor, got list"),
        ({"inputs_embeds": torch.zeros(2, 16)}, ValueError, r"must be \(batch, tokens, hidden_size\), got \(2, 16\)"),
    ],
)
def test_inputs_of_another_form_are_refused(make, arguments, error, message):
    with pytest.raises(error, match=message):
        make()(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"power": 3}, ValueError, "power must be even"),
        (
            {"num_attention_heads": 3, "num_key_value_heads": None},
            ValueError,
            "hidden_size must be a multiple of num_att",
        ),
        ({"num_key_value_heads": 3}, ValueError, "num_attention_heads must be a multiple of num_key_value_heads"),
        ({"num_hidden_layers": 0}, ValueError, "num_hidden_layers must be at least 1"),
        ({"intermediate_size": 0}, ValueError, "intermediate_size must be at least 1"),
        ({"hidden_size": 1.5}, TypeError, "hidden_size must be an int"),
        ({"gating": "hard"}, ValueError, "gating must be one of"),
    ],
)
def test_a_config_names_mistakes_as_it_calls_them(make, changes, error, message):
    with pytest.raises(error, match=message):
        make(**changes)


def test_a_fresh_model_starts_as_a_native_one():
    torch.manual_seed(0)
    config = SympowConfig(
        vocab_size=256, hidden_size=128, num_hidden_layers=4, num_attention_heads=4, gating="learned", rotary="learned"
    )
    model = SympowForCausalLM(config).model
    block = model.blocks[0]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mixer.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mixer.out_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert block.mlp.out_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert block.mixer.gate.logit.tolist() == pytest.approx([6.906768] * 4)
    assert torch.equal(
        block.mixer.rotation.theta.double(), block.mixer.rotation.initial(torch.device("cpu")).float().double()
    )
    scalar = SympowForCausalLM(
        SympowConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, rotary="scale")
    ).model.blocks[0]
    assert not scalar.mixer.rotation.beta_proj.weight.any()
    assert scalar.mixer.gate.gamma_proj.bias.tolist() == pytest.approx([6.906768] * 2)


@pytest.mark.slow
def test_padded_batches_of_all_lengths_are_compiled_once(make, tokens):
    model = make()
    torch._dynamo.reset()
    counters.clear()
    call = torch.compile(
        lambda ids, mask: model(ids, attention_mask=mask, use_cache=False).logits,
        backend="aot_eager",
        fullgraph=True,
        dynamic=True,
    )
    with torch.no_grad():
        for length in (5, 9, 40):
            ids, mask = tokens(batch=3, length=length), torch.ones(3, length, dtype=torch.int64)
            mask[1, :2] = 0
            expected = model(ids, attention_mask=mask, use_cache=False).logits
            assert_close(call(ids, mask), expected, 1e-10, f"logits of {length}")
    assert counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()
