"""`from_projections`: a layer around modules that exist computes what a native layer with their weights computes."""

import pytest
import torch
from torch import nn

from support import assert_close
from sympow.layers import ConformalAttention, SoftmaxAttention
from sympow.ops import reference
from sympow.ops.rotary import rotary_rates
from sympow.ops.window import Window

WIDTH, HEADS, KEY_HEADS, DIM = 24, 4, 2, 6


def modules(seed=0):
    torch.manual_seed(seed)
    sizes = (HEADS, KEY_HEADS, KEY_HEADS)
    q, k, v = (nn.Linear(WIDTH, heads * DIM).double() for heads in sizes)
    return q, k, v, nn.Linear(HEADS * DIM, WIDTH, bias=False).double()


def native(q, k, v, o, **options):
    """A native layer with the same weights, for interleaved pairs."""
    layer = ConformalAttention(WIDTH, HEADS, key_value_heads=KEY_HEADS, head_dim=DIM, **options).double()
    with torch.no_grad():
        layer.qkv_proj.weight.copy_(torch.cat([q.weight, k.weight, v.weight]))
        layer.qkv_proj.bias.copy_(torch.cat([q.bias, k.bias, v.bias]))
        layer.out_proj.weight.copy_(o.weight)
        layer.out_proj.bias.zero_()
    return layer


def to_halves(linear):
    """The same map with the entries of every head in the order of half-split pairs."""
    changed = nn.Linear(WIDTH, linear.out_features).double()
    order = torch.cat([torch.arange(0, DIM, 2), torch.arange(1, DIM, 2)])
    with torch.no_grad():
        changed.weight.copy_(linear.weight.unflatten(0, (-1, DIM))[:, order].flatten(0, 1))
        changed.bias.copy_(linear.bias.unflatten(0, (-1, DIM))[:, order].flatten())
    return changed


def around(q, k, v, o, **options):
    sizes = {"width": WIDTH, "heads": HEADS, "key_value_heads": KEY_HEADS, "head_dim": DIM}
    return ConformalAttention.from_projections(q, k, v, o, **{**sizes, **options})


@pytest.mark.parametrize("gating", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotary", ["none", "fixed", "scale", "pairs"])
@pytest.mark.parametrize("pairs", ["interleaved", "half", "fused"])
def test_it_is_the_native_layer_with_these_weights(gating, rotary, pairs):
    q, k, v, o = modules()
    expected = native(q, k, v, o, gating=gating, rotary=rotary, max_document=50)
    with torch.no_grad():
        for parameter in [*expected.gate.parameters(), *expected.rotation.parameters()]:
            parameter += 0.3 * torch.randn_like(parameter)
    rates = None if rotary == "none" else rotary_rates(DIM, 50)
    options = {"gating": gating, "rotary": rotary, "rates": rates, "pairs": pairs}
    if pairs == "half":
        layer = around(to_halves(q), to_halves(k), v, o, **options)
    elif pairs == "fused":
        fused = expected.qkv_proj
        layer = around(fused, None, None, o, **{**options, "pairs": "interleaved"}, names={"q": "qkv"})
        assert layer.qkv is fused
    else:
        layer = around(q, k, v, o, **options)
        assert (layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj) == (q, k, v, o)
    layer.gate.load_state_dict(expected.gate.state_dict())
    layer.rotation.load_state_dict(expected.rotation.state_dict())
    x = torch.randn(2, 15, WIDTH, dtype=torch.float64)
    y, state = layer(x)
    wanted, after = expected(x)
    assert_close(y, wanted, 1e-10, "y")
    if pairs != "half" or rotary != "none" or gating == "vector":
        # Where nothing acts on pairs, entries stay in their order.
        assert_close(state.kv, after.kv, 1e-10, "state")
    window = Window.open(state, dtype=torch.float64, gate_per_pair=gating == "vector")
    with torch.no_grad():
        assert_close(layer.step(x[:, :1], window), expected(x[:, :1], after)[0], 1e-10, "step")


def test_norms_of_queries_and_keys_come_before_the_rotation():
    q, k, v, o = modules()
    q_norm, k_norm = nn.LayerNorm(DIM).double(), nn.LayerNorm(DIM).double()
    with torch.no_grad():
        q_norm.weight.normal_(), k_norm.weight.normal_(), k_norm.bias.normal_()
    rates = rotary_rates(DIM, 50)
    layer = around(q, k, v, o, rates=rates, pairs="interleaved", gating="none", q_norm=q_norm, k_norm=k_norm)
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    queries, keys = q_norm(q(x).unflatten(-1, (-1, DIM))), k_norm(k(x).unflatten(-1, (-1, DIM)))
    keys, values = (z.repeat_interleave(2, dim=2) for z in (keys, v(x).unflatten(-1, (-1, DIM))))
    y = reference.attention(queries, keys, values, theta=rates, power=2)
    assert_close(layer(x, return_state=False)[0], o(y.flatten(2)), 1e-10, "y")


def test_gates_start_open_and_in_float32_or_better():
    q, k, v, o = modules()
    layer = around(q, k, v, o, initial_gate=0.25)
    assert layer.gate.gamma_proj.weight.dtype == torch.float64
    log_gamma = layer.gate(torch.randn(1, 3, WIDTH, dtype=torch.float64))
    assert_close(log_gamma.exp(), torch.full((1, 3, KEY_HEADS), 0.25, dtype=torch.float64), 1e-8, "γ")
    half = around(*(module.to(torch.bfloat16) for module in (q, k, v, o)))
    assert half.gate.gamma_proj.weight.dtype == torch.float32
    # Without rates there is no rotation.
    assert half.rotation(torch.randn(1, 3, WIDTH)) == (None, None)


def test_modules_and_names_that_do_not_fit_are_refused():
    q, k, v, o = modules()
    cases = [
        (ValueError, "k and v must both be modules", (q, k, None, o), {}),
        (TypeError, "v must be a module, got int", (q, k, 3, o), {}),
        (TypeError, "q must be a module, got None", (None, k, v, o), {}),
        (TypeError, "o must be a module, got None", (q, k, v, None), {}),
        (ValueError, "rates must hold one rate per pair", (q, k, v, o), {"rates": torch.ones(2)}),
        (ValueError, "'grid' keeps every other rate", (q, k, v, o), {"rates": torch.ones(3), "rotary": "grid"}),
        (ValueError, "rates or max_document must be given for rotary='fixed'", (q, k, v, o), {"rotary": "fixed"}),
        (ValueError, "pairs must be one of", (q, k, v, o), {"pairs": "thirds"}),
        (ValueError, "names must be for q, k, v, o.*; got w", (q, k, v, o), {"names": {"w": "x"}}),
        (ValueError, "names must differ, got 'k_proj' for both q and k", (q, k, v, o), {"names": {"q": "k_proj"}}),
        (
            ValueError,
            "names must differ, got 'o_proj' for both q and o",
            (q, None, None, o),
            {"names": {"q": "o_proj"}},
        ),
        (ValueError, "names must not be empty or have dots, got 'a.b' for v", (q, k, v, o), {"names": {"v": "a.b"}}),
        (TypeError, "names must hold strings, got 3 for v", (q, k, v, o), {"names": {"v": 3}}),
        (ValueError, "bias must not be given: .*; got False", (q, k, v, o), {"bias": False}),
        (TypeError, "rates must be a tensor, got list", (q, k, v, o), {"rates": [1.0, 0.1, 0.01]}),
        (ValueError, "initial_gate must lie between 0 and 1, got 1.5", (q, k, v, o), {"initial_gate": 1.5}),
        (ValueError, "heads must be a multiple of key_value_heads", (q, k, v, o), {"key_value_heads": 3}),
    ]
    for kind, message, given, options in cases:
        with pytest.raises(kind, match=message):
            around(*given, **options)


@pytest.mark.parametrize("gating", ["none", "scalar"])
def test_projections_of_other_heads_are_refused(gating):
    q, k, v, o = modules()
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"k_proj must project to 24, 4 heads of 6, .* it projects to 12"):
        around(q, k, v, o, gating=gating, key_value_heads=None)(x)
    with pytest.raises(ValueError, match=r"q_proj must project to 12, 2 heads of 6, .* it projects to 24"):
        around(q, k, v, o, gating=gating, heads=2)(x)
    fused = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * DIM).double()
    with pytest.raises(ValueError, match=r"qkv_proj must project to 72, 12 heads of 6, .* it projects to 48"):
        around(fused, None, None, o, gating=gating, key_value_heads=None)(x)


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_no_module_takes_the_name_of_an_attribute(kind):
    q, k, v, o = modules()
    sizes = {"width": WIDTH, "heads": HEADS, "key_value_heads": KEY_HEADS, "head_dim": DIM}
    layer = kind.from_projections(q, k, v, o, **sizes)
    own = {"gate", "rotation", *dir(layer)} - {"q_proj", "k_proj", "v_proj", "o_proj"}
    for name in sorted(own):
        with pytest.raises(ValueError, match=f"names must not be those of the layer's attributes, got '{name}' for v"):
            kind.from_projections(q, k, v, o, names={"v": name}, **sizes)
    # The name of a module that is not there is free.
    fused = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * DIM).double()
    assert kind.from_projections(fused, None, None, o, names={"q": "k_proj"}, **sizes).k_proj is fused


@pytest.mark.parametrize("out", [lambda o: nn.Sequential(o), lambda _: nn.Identity()])
def test_the_output_projection_is_a_module_of_any_class(out):
    q, k, v, o = modules()
    layer = around(q, k, v, out(o), gating="none", rotary="none", width=HEADS * DIM)
    assert layer.device == torch.device("cpu")
    assert layer.to("meta").device == torch.device("meta")


def test_a_rotation_with_rates_of_its_own_needs_max_document():
    layer = around(*modules(), rotary="signed", max_document=50)
    theta, _ = layer.rotation(torch.randn(1, 3, WIDTH, dtype=torch.float64))
    assert torch.equal(theta[:2], rotary_rates(DIM, 50)[::2])
