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


def test_the_fixed_gate_covers_the_range_asked_for():
    slopes = -FixedGate(4, steepest=1.0, flattest=0.001)(sample())[0, 0]
    torch.testing.assert_close(slopes, torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64))
    with pytest.raises(ValueError, match="steepest"):
        FixedGate(4, steepest=0.1, flattest=0.5)


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
    if kind == "learned":  # a parameter: its precision is the user's choice
        torch.testing.assert_close(theta, sympow.rotary_rates(DIM, 100, dtype=dtype).to(theta.dtype))
    else:
        assert torch.equal(theta, sympow.rotary_rates(DIM, 100)), "constant rates keep all their bits"
    if kind in ("scale", "pairs"):
        assert beta.shape == (2, 5, HEADS, DIM // 2)[: 4 if kind == "pairs" else 3]
        assert torch.equal(beta, torch.ones_like(beta)), "W_β = 0 is fixed rotary"
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


def test_unknown_kinds_are_named():
    with pytest.raises(ValueError, match=r"gating must be one of 'none'.*got 'soft'"):
        make_gate("soft", WIDTH, HEADS, DIM)
    with pytest.raises(ValueError, match=r"rotary must be one of 'none'.*got 'soft'"):
        make_rotation("soft", WIDTH, HEADS, DIM, 100)


def test_half_life_of_a_fresh_gate():
    log_gamma = make_gate("scalar", WIDTH, HEADS, DIM)(sample())
    assert math.log(0.5) / log_gamma[0, 0, 0].item() == pytest.approx(693, rel=0.01)
