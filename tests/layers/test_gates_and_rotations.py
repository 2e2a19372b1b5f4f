import math

import pytest
import torch

import sympow
from support import assert_close
from sympow.layers import GATES, ROTATIONS, make_gate, make_rotation
from sympow.layers.gates import FixedGate

WIDTH, HEADS, DIM = 12, 3, 4


def sample(dtype=torch.float32):
    return torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_gates_give_logs_in_float32_or_better(kind, dtype):
    gate = make_gate(kind, WIDTH, HEADS, DIM).to(dtype)
    log_gamma = gate(sample(dtype))
    if kind == "none":
        assert log_gamma is None
        return
    assert log_gamma.shape == (2, 5, HEADS, DIM // 2)[: 4 if kind == "vector" else 3]
    assert log_gamma.dtype in (torch.float32, torch.float64)
    assert (log_gamma <= 0).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_gate("learned", WIDTH, HEADS, DIM),
        lambda: make_gate("scalar", WIDTH, HEADS, DIM),
        lambda: make_rotation("learned", WIDTH, HEADS, DIM, max_document=100),
        lambda: make_rotation("scale", WIDTH, HEADS, DIM, max_document=100),
        lambda: make_rotation("pairs", WIDTH, HEADS, DIM, max_document=100),
    ],
)
def test_weights_of_gates_and_rotations_are_not_rounded_with_a_model(make):
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.rand_like(parameter))
            parameter.grad = torch.rand_like(parameter)
    held = {name: parameter.clone() for name, parameter in module.named_parameters()}
    grads = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    for cast in (lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to("cpu")):
        cast(torch.nn.Sequential(module))
        for name, parameter in module.named_parameters():
            assert parameter.dtype == parameter.grad.dtype == torch.float32
            assert torch.equal(parameter, held[name])
            assert torch.equal(parameter.grad, grads[name])
    assert {p.dtype for p in module.double().parameters()} == {torch.float64}
    assert {p.dtype for p in module.bfloat16().parameters()} == {torch.float32}
    assert all(p.is_meta and p.dtype == torch.float32 for p in module.to("meta", torch.bfloat16).parameters())
    assert {p.device.type for p in module.to_empty(device="cpu").parameters()} == {"cpu"}
    # Weights that came in half precision, as from a file.
    module.load_state_dict({name: x.bfloat16() for name, x in held.items()}, assign=True)
    assert {p.dtype for p in module.to("cpu").parameters()} == {torch.bfloat16}
    assert {p.dtype for p in module.float().parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", ["learned", "scalar", "vector"])
def test_learned_gates_start_where_the_authors_do(kind):
    gamma = make_gate(kind, WIDTH, HEADS, DIM)(sample()).exp()
    torch.testing.assert_close(gamma, torch.full_like(gamma, 0.999), rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [8, 12])
def test_the_fixed_gate_has_alibis_slopes_whatever_the_dtype(heads):
    gate = FixedGate(heads).to(torch.bfloat16)
    slopes = -gate(sample())[0, 0]
    expected = torch.tensor([2.0 ** (-8 * i / heads) for i in range(1, heads + 1)], dtype=torch.float64)
    torch.testing.assert_close(slopes, expected, rtol=1e-12, atol=0)


def test_the_scalar_gate_is_a_sigmoid_of_a_projection():
    gate = make_gate("scalar", WIDTH, HEADS, DIM)
    torch.nn.init.normal_(gate.gamma_proj.weight)
    x = sample()
    expected = torch.sigmoid(x @ gate.gamma_proj.weight.T + gate.gamma_proj.bias)
    assert_close(gate(x).exp(), expected, 1e-6, "gamma")


def test_gates_are_not_rounded_by_autocast():
    gate = make_gate("scalar", WIDTH, HEADS, DIM)
    torch.nn.init.normal_(gate.gamma_proj.weight)
    expected = gate(sample())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gate(sample()), expected)


@pytest.mark.parametrize("kind", ROTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotations_give_rates_and_scales(kind, dtype):
    theta, beta = make_rotation(kind, WIDTH, HEADS, DIM, max_document=100).to(dtype)(sample(dtype))
    if kind == "none":
        assert theta is None
        assert beta is None
        return
    assert theta.shape == (DIM // 2,)
    if kind in ("signed", "grid"):  # half of the pairs have rotary's rates for so many entries
        assert torch.equal(theta[:1], sympow.rotary_rates(DIM // 2, 100))
        assert torch.equal(beta, torch.tensor([1.0, 0.0], dtype=beta.dtype).expand(2, 5, HEADS, 2))
        return
    if kind == "learned":  # a parameter, in float32 whatever the model is cast to
        torch.testing.assert_close(theta, sympow.rotary_rates(DIM, 100, dtype=torch.float32))
    else:
        assert torch.equal(theta, sympow.rotary_rates(DIM, 100)), "constant rates keep all their bits"
    if kind in ("scale", "pairs"):
        assert beta.shape == (2, 5, HEADS, DIM // 2)[: 3 if kind == "scale" else 4]
        assert torch.equal(beta, torch.ones_like(beta)), "W_β = 0 is RoPE"
    else:
        assert beta is None


@pytest.mark.parametrize("kind", ["scale", "pairs"])
def test_scales_are_one_plus_tanh_of_a_projection(kind):
    rotation = make_rotation(kind, WIDTH, HEADS, DIM, max_document=100)
    torch.nn.init.normal_(rotation.beta_proj.weight)
    _, beta = rotation(sample())
    expected = 1 + torch.tanh(sample() @ rotation.beta_proj.weight.T)
    assert_close(beta.flatten(2), expected, 1e-6, "beta")
    assert ((beta >= 0) & (beta <= 2)).all()


def test_a_clamped_gate_is_exactly_one_from_its_first_value_on_and_still_learns():
    gate = make_gate("clamped", WIDTH, HEADS, DIM)
    assert not gate(sample()).any()
    gate = gate.double()
    torch.nn.init.normal_(gate.gamma_proj.weight)
    x = sample(torch.float64)
    logits = x @ gate.gamma_proj.weight.T + gate.gamma_proj.bias
    ratio = torch.sigmoid(logits) / 0.9989
    log_gamma = gate(x)
    assert torch.equal(log_gamma == 0, ratio >= 1)
    assert (log_gamma == 0).any()
    assert (log_gamma < 0).any()
    torch.testing.assert_close(log_gamma, ratio.clamp(max=1).log(), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(log_gamma.sum(), logits_of(gate), retain_graph=True)
    torch.testing.assert_close(gradient, torch.sigmoid(-logits).sum((0, 1)), rtol=1e-10, atol=0)


@pytest.mark.parametrize("initial_gate", [None, 0.999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_clamped_gate_starts_at_exactly_one_in_every_dtype(dtype, initial_gate):
    gate = make_gate("clamped", WIDTH, HEADS, DIM, initial_gate).to(dtype)
    assert not gate(sample(dtype)).any()


def logits_of(gate):
    """The bias, whose gradient is that of the logits, summed."""
    return gate.gamma_proj.bias


@pytest.mark.parametrize("kind", ROTATIONS)
def test_statistics_are_of_what_scales_the_rates_of_rope(kind):
    rotation = make_rotation(kind, WIDTH, HEADS, DIM, max_document=100)
    _, beta = rotation(sample())
    if kind in ("scale", "pairs"):
        assert torch.equal(rotation.scales_of_rates(beta), beta)
    else:
        assert rotation.scales_of_rates(beta) is None


def test_half_of_the_heads_have_the_papers_gate_and_the_others_none():
    half, all_heads = make_gate("half", WIDTH, HEADS, DIM), make_gate("scalar", WIDTH, HEADS // 2, DIM)
    torch.nn.init.normal_(half.gamma_proj.weight)
    all_heads.load_state_dict(half.state_dict())
    log_gamma = half(sample())
    assert torch.equal(log_gamma[..., : HEADS // 2], all_heads(sample()))
    assert not log_gamma[..., HEADS // 2 :].any()
    with pytest.raises(ValueError, match="key_value_heads must be at least 2 for gating='half', got 1"):
        make_gate("half", WIDTH, 1, DIM)


def turned(kind, dim=12):
    """Angles of the pairs that are turned, (2, 5, heads, pairs), and the projection they come from."""
    rotation = make_rotation(kind, WIDTH, HEADS, dim, max_document=100).double()
    torch.nn.init.normal_(rotation.beta_proj.weight, std=0.2)
    x = sample(torch.float64)
    theta, beta = rotation(x)
    pairs = dim // 4
    assert beta.shape == (2, 5, HEADS, dim // 2)
    assert torch.equal(beta[..., :-pairs], torch.ones_like(beta[..., :-pairs]))
    assert torch.equal(theta[:-pairs], sympow.rotary_rates(2 * (dim // 2 - pairs), 100))
    projected = (x @ rotation.beta_proj.weight.T).unflatten(-1, (HEADS, pairs))
    return (beta * theta)[..., -pairs:], projected, rotation


def test_signed_angles_are_at_most_a_quarter_turn():
    angles, projected, _ = turned("signed")
    torch.testing.assert_close(angles, math.pi / 2 * projected.tanh(), rtol=1e-12, atol=1e-14)


def test_grid_angles_are_multiples_of_a_120th_of_a_half_turn():
    angles, projected, rotation = turned("grid")
    steps = angles * 120 / math.pi
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=1e-12)
    assert ((angles - math.pi / 2 * projected.tanh()).abs() <= math.pi / 240 + 1e-12).all()
    assert len(steps.round().unique()) > 20
    (gradient,) = torch.autograd.grad(angles.sum(), rotation.beta_proj.weight)
    expected = torch.einsum("bto,btw->ow", math.pi / 2 * (1 - projected.tanh() ** 2).flatten(2), sample(torch.float64))
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("modulus", [2, 3, 4, 5, 6, 8])
def test_a_count_on_the_grid_is_exact_at_any_length(modulus):
    """Steps of nearly π / modulus, as a projection learns them, still add up to the count after a million tokens."""
    rotation = make_rotation("grid", 1, 1, 4, max_document=100)
    wanted = math.atanh(min(2 / modulus, 1 - 1e-4))
    with torch.no_grad():
        rotation.beta_proj.weight.fill_(wanted * 1.002)
    theta, beta = rotation(torch.ones(1, 1, 1))
    length = 1_000_001
    phase = sympow.ops.rotary.accumulate_phase(theta, beta.expand(1, length, 1, 2))[0, -1, 0, 1]
    expected = math.pi * (length % modulus) / modulus
    distance = (phase.item() - expected) % math.pi
    assert min(distance, math.pi - distance) < 1e-6


@pytest.mark.parametrize("kind", ["signed", "grid"])
def test_a_head_needs_two_pairs_to_turn_one(kind):
    with pytest.raises(ValueError, match=f"head_dim must be at least 4 for rotary='{kind}', so that .*; got 2"):
        make_rotation(kind, WIDTH, HEADS, 2, 100)


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match=r"gating must be one of 'none'.*got 'soft'"):
        make_gate("soft", WIDTH, HEADS, DIM)
    with pytest.raises(ValueError, match=r"rotary must be one of 'none'.*got 'soft'"):
        make_rotation("soft", WIDTH, HEADS, DIM, 100)


def test_half_life_of_a_fresh_gate():
    log_gamma = make_gate("scalar", WIDTH, HEADS, DIM)(sample())
    assert math.log(0.5) / log_gamma[0, 0, 0].item() == pytest.approx(693, rel=0.01)


@pytest.mark.parametrize("kind", [kind for kind in ROTATIONS if kind != "none"])
def test_the_fastest_rate_is_the_one_asked_for(kind):
    fast, slow = (make_rotation(kind, WIDTH, HEADS, 8, 100, **rate) for rate in ({}, {"max_rate": 1.0}))
    pairs = 2 if kind in ("signed", "grid") else 4  # the others turn by angles of their own
    expected, actual = (rotation(sample())[0][:pairs].double() for rotation in (fast, slow))
    assert actual[0] == 1.0
    torch.testing.assert_close(2 * math.pi * actual, expected, rtol=1e-6 if kind == "learned" else 1e-14, atol=0)


@pytest.mark.parametrize("kind", [kind for kind in ROTATIONS if kind != "none"])
def test_a_fraction_rotates_the_fastest_pairs_as_before_and_leaves_the_others(kind):
    whole, part = (make_rotation(kind, WIDTH, HEADS, 16, 100, fraction=fraction) for fraction in (1.0, 0.5))
    # The same weights wherever both have a pair.
    for parameter in (*whole.parameters(), *part.parameters()):
        torch.nn.init.constant_(parameter, 0.1)
    (all_rates, all_scales), (rates, scales) = whole(sample()), part(sample())
    assert rates.shape == (8,)
    assert torch.equal(rates[4:], torch.zeros_like(rates[4:]))
    if kind in ("signed", "grid"):  # half of the pairs that rotate turn by angles of their own
        assert torch.equal(rates[:2], all_rates[:4:2].new_tensor(sympow.rotary_rates(16, 100)[:4:2].tolist()))
        assert torch.equal(rates[2:4], all_rates[4:6])
    else:
        assert torch.equal(rates[:4], all_rates[:4])
    if kind in ("fixed", "learned"):
        assert scales is None
    elif kind == "scale":
        assert torch.equal(scales, all_scales)
    else:
        assert torch.equal(scales[..., 4:], torch.ones_like(scales[..., 4:]))
        assert scales.requires_grad
        assert part.beta_proj.weight.shape[0] == whole.beta_proj.weight.shape[0] / 2, "no β where it has no effect"
        if kind == "pairs":
            assert torch.equal(part.scales_of_rates(scales), scales[..., :4])


@pytest.mark.parametrize("kind", ["fixed", "pairs"])
def test_pairs_that_do_not_rotate_match_at_every_distance(kind):
    layer = sympow.ConformalAttention(16, 1, rotary=kind, gating="none", rotary_fraction=0.5, max_document=100).double()
    q, k, v = torch.randn(3, 1, 9, 1, 16, dtype=torch.float64)
    q[..., :8] = k[..., :8] = 0  # nothing in the pairs that rotate
    theta, beta = layer.rotation(torch.randn(1, 9, 16, dtype=torch.float64))
    rotated = sympow.attention(q, k, v, beta=beta, theta=theta)
    torch.testing.assert_close(rotated, sympow.attention(q, k, v), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("scale", {"max_rate": 0.0}, "max_rate must be above 0 radians per token, got 0.0"),
        ("fixed", {"max_rate": math.nan}, "max_rate must be finite, got nan"),
        ("none", {"max_rate": 1.0}, "max_rate is for models with a rotation; got 1.0 with rotary='none'"),
        ("fixed", {"fraction": 0.0}, "rotary_fraction must be above 0 and at most 1, got 0.0; rotary='none' is"),
        ("scale", {"fraction": 1.5}, "rotary_fraction must be above 0 and at most 1, got 1.5"),
        ("none", {"fraction": 0.5}, "rotary_fraction is for models with a rotation; got 0.5 with rotary='none'"),
        ("grid", {"fraction": 0.5}, "rotary_fraction must rotate at least two pairs for rotary='grid'.* 0.5 with"),
        (
            "fixed",
            {"fraction": 0.5, "rates": torch.ones(2)},
            "rotary_fraction cannot be combined with rates.*; got 0.5",
        ),
        ("fixed", {"max_rate": 1.0, "rates": torch.ones(2)}, "max_rate cannot be combined with rates.*; got 1.0"),
        ("fixed", {"rates": torch.tensor([1.0, math.nan])}, r"rates must be finite, got \[1.0, nan\]"),
        ("scale", {"rates": torch.tensor([math.inf, 1.0])}, r"rates must be finite, got \[inf, 1.0\]"),
        ("none", {"rates": torch.ones(2)}, "rates are for layers with a rotation; got some with rotary='none'"),
        ("soft", {"rates": torch.ones(2)}, "rotary must be one of 'none', .* 'pairs'; got 'soft'"),
        ("soft", {}, "rotary must be one of 'none', .* 'signed', 'grid'; got 'soft'"),
    ],
)
def test_rates_that_cannot_be_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        make_rotation(kind, WIDTH, HEADS, DIM, 100, **options)
