"""`swap_attention`: weights are kept bit for bit, and the layers compute what a formula from these weights says."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from torch.nn.functional import logsigmoid
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from support import assert_close
from sympow.hf import attention_modules, swap_attention, swapped_layers
from sympow.hf.swap.swapped_attention import SwappedAttention

MODELS = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
VARIANTS = (*MODELS, "llama-biases", "llama3", "linear", "yarn", "mistral-window")


def linear(module, x):
    """x Wᵀ + b; GPT-2 has its weights transposed."""
    weight = module.weight if type(module).__name__ == "Conv1D" else module.weight.mT
    return x @ weight + (0 if module.bias is None else module.bias)


def rms_norm(module, x):
    """As transformers defines it, in float32."""
    single = x.float()
    return module.weight * (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)).to(x)


def rotate_halves(x, rates):
    """x (b, t, h, d) rotated by its position: entries j and j + d/2 by rates[j]."""
    angles = (torch.arange(x.shape[1]).double()[:, None] * rates.double())[:, None]
    first, second = x.chunk(2, dim=-1)
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    return torch.cat(turned, dim=-1)


def formula(layer, x, model, power, gating="scalar"):
    """The output of a swapped layer for its input x (b, t, width), from its weights."""
    config, batch, length = model.config, x.shape[0], x.shape[1]
    if config.sympow_attention["base_model_type"] == "gpt2":
        q, k, v = (y.reshape(batch, length, 4, -1) for y in linear(layer.c_attn, x).chunk(3, dim=-1))
    else:
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        q, k, v = (linear(getattr(layer, f"{n}_proj"), x).unflatten(-1, (-1, dim)) for n in "qkv")
        if hasattr(layer, "q_norm"):
            q, k = rms_norm(layer.q_norm, q), rms_norm(layer.k_norm, k)
        rotary = model.model.rotary_emb
        q, k = (rotate_halves(y, rotary.inv_freq) * rotary.attention_scaling for y in (q, k))
    groups = q.shape[2] // k.shape[2]
    k, v = (y.repeat_interleave(groups, dim=2) for y in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) ** power
    if gating == "scalar":
        logs = logsigmoid(linear(layer.gate.gamma_proj, x)).repeat_interleave(groups, dim=2).mT.cumsum(-1)
        scores = scores * (logs.unsqueeze(-1) - logs.unsqueeze(-2)).exp()
    scores = scores.tril()
    y = torch.einsum("bhij,bjhd->bihd", scores / scores.sum(-1, keepdim=True), v)
    return linear(layer.o_proj if hasattr(layer, "o_proj") else layer.c_proj, y.flatten(2))


@pytest.mark.parametrize("kind", VARIANTS)
def test_every_weight_stays_bit_for_bit_under_its_name(pretrained, kind):
    model = pretrained(kind, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held = dict(model.named_parameters())
    assert swap_attention(model) is model
    after = model.state_dict()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    assert all(dict(model.named_parameters())[name] is parameter for name, parameter in held.items())
    place = "transformer.h.{}.attn" if kind == "gpt2" else "model.layers.{}.self_attn"
    new = {f"{place.format(layer)}.gate.gamma_proj.{name}" for layer in range(3) for name in ("weight", "bias")}
    assert after.keys() - before.keys() == new
    for name in new:
        assert after[name].dtype == torch.float32
    assert all((after[name].sigmoid() - 0.999).abs().max() < 1e-6 for name in new if name.endswith("bias"))
    assert not any(after[name].any() for name in new if name.endswith("weight"))


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in VARIANTS]
    + [
        ("qwen3", {"power": 4}),
        ("llama", {"gating": "none"}),
        ("llama", {"layers": [0, 2]}),
    ],
)
@torch.no_grad()
def test_swapped_layers_compute_the_formula_of_their_weights(swapped, tokens, kind, options):
    model = swapped(kind, **options)
    seen = {}

    def keep(layer, args, kwargs, out):
        seen[layer.layer_idx] = (layer, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0], out[0])

    for index in swapped_layers(model):
        attention_modules(model)[index].register_forward_hook(keep, with_kwargs=True)
    model(tokens(2, 20))
    assert [*seen] == options.get("layers", [0, 1, 2])
    for layer, x, y in seen.values():
        expected = formula(layer, x, model, options.get("power", 2), options.get("gating", "scalar"))
        assert_close(y, expected, 1e-9, kind, relative=True)


@torch.no_grad()
def test_data_dependent_rotations_start_as_the_rotary_embedding(pretrained, tokens):
    ids = tokens(2, 20)
    fixed = swap_attention(pretrained("llama3"))(ids).logits
    for rotary in ("scale", "pairs"):
        model = swap_attention(pretrained("llama3"), rotary=rotary)
        assert_close(model(ids).logits, fixed, 1e-10, rotary)
        for layer in attention_modules(model).values():
            layer.rotation.beta_proj.weight.normal_()
        assert (model(ids).logits - fixed).abs().max() > 1e-3
    assert (swap_attention(pretrained("llama3"), rotary="none")(ids).logits - fixed).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("gating", "rotary"),
    [("learned", "learned"), ("vector", "pairs"), ("fixed", "fixed"), ("none", "none"), ("scalar", "scale")],
)
@torch.no_grad()
def test_all_gates_and_rotations_decode_as_they_prefill(swapped, tokens, gating, rotary):
    model, ids = swapped("qwen3", gating=gating, rotary=rotary), tokens(2, 12)
    expected, past = model(ids, use_cache=False).logits, None
    for place in range(ids.shape[1]):
        out = model(ids[:, place : place + 1], past_key_values=past, use_cache=True)
        past = out.past_key_values
        assert_close(out.logits[:, 0], expected[:, place], 1e-9, f"token {place}")


@torch.no_grad()
def test_layers_left_alone_keep_softmax(pretrained, tokens):
    model, ids = pretrained(), tokens()
    untouched = copy.deepcopy(model)
    swap_attention(model, layers="every-other")
    assert swapped_layers(model) == [1]
    kinds = [type(module).__name__ for module in attention_modules(model).values()]
    assert kinds == ["LlamaAttention", "SwappedAttention", "LlamaAttention"]
    assert swapped_layers(untouched) == []
    assert [*attention_modules(untouched)] == [0, 1, 2]
    first = [m(ids, output_hidden_states=True).hidden_states[1] for m in (model, untouched)]
    assert torch.equal(*first)
    assert (model(ids).logits - untouched(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("asked_before", [False, True])
@torch.no_grad()
def test_hidden_states_and_attentions_are_those_of_the_layers(pretrained, tokens, tmp_path, kind, asked_before):
    """Each hidden state is what a layer reads, whether or not transformers recorded outputs before the swap."""
    model, ids = pretrained(kind, attn_implementation="eager"), tokens(2, 8)
    asked = {"output_hidden_states": True, "output_attentions": True}
    if asked_before:
        model(ids, **asked)
    swap_attention(model, layers=[1])
    read, weights = [], []
    for name, module in [*model.named_modules()]:
        if hasattr(module, "layer_idx"):
            block = model.get_submodule(name.rpartition(".")[0])
            block.register_forward_pre_hook(lambda _, args: read.append(args[0]))
            module.register_forward_hook(lambda _, args, out: weights.append(out[1]))
    out = model(ids, **asked)
    assert len(out.hidden_states) == 4
    for found, expected in zip(out.hidden_states, read, strict=False):
        assert torch.equal(found, expected)
    assert torch.equal(model.get_output_embeddings()(out.hidden_states[-1]), out.logits)
    # As in other hybrid models of transformers: of the layers that have them.
    assert [tuple(found.shape) for found in out.attentions] == [(2, 4, 8, 8)] * 2
    assert weights.pop(1) is None
    for found, expected in zip(out.attentions, weights, strict=True):
        assert torch.equal(found, expected)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype="auto")
    again = loaded.eval()(ids, **asked)
    for name in ("hidden_states", "attentions"):
        for found, expected in zip(again[name], out[name], strict=True):
            assert_close(found, expected, 1e-9, name)
    made = model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0, return_dict_in_generate=True, **asked)
    assert [len(step) for step in made.hidden_states] == [4, 4, 4]
    assert [[tuple(x.shape) for x in step] for step in made.attentions[1:]] == [[(2, 4, 1, 9)] * 2, [(2, 4, 1, 10)] * 2]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_attentions_of_a_model_without_softmax_layers_are_refused(swapped, tokens, kind):
    model, ids = swapped(kind), tokens(1, 4)
    assert len(model(ids, output_hidden_states=True).hidden_states) == 4
    with pytest.raises(ValueError, match=r"output_attentions must not be set: .*and no layer keeps softmax"):
        model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    for other in (model, model.base_model):
        with pytest.raises(ValueError, match="output_attentions must not be set"):
            other(ids)
    assert model(ids, output_attentions=False).logits.isfinite().all()


def test_the_config_of_another_model_is_not_changed(pretrained):
    model = pretrained()
    config, kind = model.config, type(model)
    other = kind(config)
    swap_attention(model)
    assert type(config).__name__ == "LlamaConfig"
    assert not hasattr(config, "sympow_attention")
    assert other.config is config
    assert isinstance(model, kind)
    assert {type(m.config).__name__ for m in model.modules() if hasattr(m, "config")} == {"SympowLlamaConfig"}


@torch.no_grad()
def test_clamped_gates_start_as_none_and_half_of_the_heads_can_have_one(pretrained):
    ids = torch.arange(40).view(1, -1)
    ungated, clamped, half = (
        swap_attention(pretrained().double(), gating=gating)(ids).logits for gating in ("none", "clamped", "half")
    )
    torch.testing.assert_close(clamped, ungated, rtol=0, atol=1e-12)
    assert (half - ungated).abs().max() > 1e-6


def test_what_cannot_be_swapped_is_refused_and_left_as_it_was(pretrained):
    cases = [
        (ValueError, "power", {"power": 3}),
        (ValueError, "layers must be among 0 to 2, got 3", {"layers": [3]}),
        (ValueError, "layers must be 'all'", {"layers": "some"}),
        (ValueError, "each once", {"layers": [1, 1]}),
        (TypeError, "layers must hold integers", {"layers": ["0"]}),
        (ValueError, "gating", {"gating": "soft"}),
        (ValueError, "rotary must be one of 'none', .* 'pairs'; got 'soft'", {"rotary": "soft"}),
        (ValueError, r"rotary must be one of 'none', .*half of the pairs.*got 'signed'", {"rotary": "signed"}),
        (ValueError, r"rotary must be one of 'none', .*half of the pairs.*got 'grid'", {"rotary": "grid"}),
        (ValueError, "initial_gate must lie between 0 and 1", {"initial_gate": 1.0}),
        (ValueError, "initial_gate must lie between 0 and 1", {"initial_gate": 2.0, "gating": "none"}),
        (ValueError, "initial_gate is for gates that are learned", {"initial_gate": 0.9, "gating": "none"}),
        (TypeError, "initial_gate must be a number, got NoneType", {"initial_gate": None}),
        (TypeError, "initial_gate must be a number, got str", {"initial_gate": "a"}),
        (ValueError, "cache_policy", {"cache_policy": "soft"}),
    ]
    for kind, message, options in cases:
        model = pretrained()
        with pytest.raises(kind, match=message):
            swap_attention(model, **options)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert swapped_layers(model) == []
    with pytest.raises(TypeError, match="model must be a model of transformers, got Linear"):
        swap_attention(torch.nn.Linear(2, 2))
    model = swap_attention(pretrained(), layers=[0])
    with pytest.raises(ValueError, match=r"swapped already, in layers \[0\]"):
        swap_attention(model, layers=[1])
    with pytest.raises(ValueError, match="layers='every-other' is for models of at least two layers"):
        swap_attention(pretrained(num_hidden_layers=1), layers="every-other")
    with pytest.raises(ValueError, match="rotary must be 'none' for a model without a rotary embedding"):
        swap_attention(pretrained("gpt2"), rotary="fixed")


@pytest.mark.parametrize("name", ["layer_idx", "cache_policy", "is_causal", "power", "gate"])
def test_no_projection_takes_the_name_of_an_attribute(name):
    q, k, v, o = (torch.nn.Linear(8, 8) for _ in range(4))
    with pytest.raises(ValueError, match=f"names must not be those of the layer's attributes, got '{name}' for o"):
        SwappedAttention.from_projections(q, k, v, o, width=8, heads=2, layer_idx=0, names={"o": name})


def test_attention_dropout_is_said_not_to_be_applied(pretrained):
    with pytest.warns(UserWarning, match=r"attention dropout 0.25"):
        swap_attention(pretrained(attention_dropout=0.25))
    with pytest.warns(UserWarning, match=r"attention dropout 0.1"):
        swap_attention(GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2)))


def test_gpt2_keeps_its_dropout_of_outputs(pretrained, tokens):
    model = swap_attention(pretrained("gpt2", resid_pdrop=0.5, embd_pdrop=0.0)).train()
    ids = tokens()
    assert (model(ids).logits - model(ids).logits).abs().max() > 1e-3
    for layer in attention_modules(model).values():
        assert layer.resid_dropout.p == 0.5


SMALL_OTHERS = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", DYNAMIC, "rope_type of default, linear, llama3, yarn.*got 'dynamic'"),
        ("cohere", {}, "does not make its queries in the way that its submodules suggest"),
        ("phi3", {}, "must have self-attention with .*Phi3Attention has o_proj, qkv_proj"),
        ("olmo2", {}, r"must have a [qk]_norm of each head, of size 8; its is of"),
        ("gpt_oss", {"num_local_experts": 2, "head_dim": 8}, "parameters of its own, sinks"),
        ("stablelm", {"partial_rotary_factor": 0.5}, "by 4 rates for 8 entries; got 2"),
        ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "must have k_proj, o_proj, q_proj, v_proj or c_attn"),
        ("mamba", {}, "must have self-attention"),
        ("olmo", {"clip_qkv": 8.0}, "does not make its queries in the way that its submodules suggest"),
        ("gemma2", {"head_dim": 8}, "passes softcap to its attention function"),
    ],
)
def test_attention_of_another_kind_is_refused_with_what_was_found(model_type, changes, message):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL_OTHERS, **changes}))
    with pytest.raises(ValueError, match=message):
        swap_attention(model)
    assert not any(isinstance(module, SwappedAttention) for module in model.modules())


@pytest.mark.parametrize("model_type", ["gemma", "granite", "ministral3", "olmo", "starcoder2", "qwen3_moe", "mixtral"])
@torch.no_grad()
def test_other_architectures_of_the_same_shape_are_swapped(model_type, tokens):
    changes = {
        "head_dim": 8,
        "num_local_experts": 2,
        "num_experts": 2,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 1,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SMALL_OTHERS, **changes})).eval()
    swap_attention(model)
    assert swapped_layers(model) == [0, 1]
    ids = tokens()
    out = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(out, model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False))


@pytest.mark.parametrize(("model_type", "changes"), [("eurobert", {}), ("llama", {"is_causal": False})])
def test_attention_to_later_tokens_is_refused(model_type, changes):
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **{**SMALL_OTHERS, **changes}))
    with pytest.raises(ValueError, match=r"layer 0 of model .* attends to later tokens too \(is_causal is False\)"):
        swap_attention(model)


def test_cross_attention_is_refused():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, add_cross_attention=True))
    with pytest.raises(ValueError, match=r"two attention modules in layer 0.*crossattention"):
        swap_attention(model)


def test_an_inv_freq_of_another_config_is_refused(pretrained):
    model = pretrained()
    model.model.rotary_emb.inv_freq *= 0.5
    with pytest.raises(ValueError, match="inv_freq that is not that of its config"):
        swap_attention(model)


def test_a_model_rounded_to_half_precision_rotates_by_the_rates_of_its_config(pretrained):
    model = pretrained().to(torch.bfloat16)
    swap_attention(model)
    rates = attention_modules(model)[0].rotation.rates(torch.device("cpu"))
    expected = 1 / 1e4 ** (torch.arange(0, 8, 2).float() / 8)  # as transformers computes them
    assert rates.tolist() == expected.double().tolist()
    assert rates.tolist() != model.model.rotary_emb.inv_freq.tolist(), "nothing was rounded"
