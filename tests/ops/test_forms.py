"""Every form of the fast operator against the reference, forward and backward."""

from dataclasses import replace

import pytest
import torch

import sympow
from support import FORMS, Inputs, assert_close, gradients, random_inputs, run, run_reference
from sympow.ops import reference
from sympow.ops.torch import products as blocks


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [2, 4, 6])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
def test_outputs_and_gradients_equal_the_reference(form, power, gate, rotation):
    inputs = random_inputs(power, batch=2, key_heads=1, gate=gate, rotation=rotation).requires_grad()
    expected = run_reference(inputs, power)
    actual = run(inputs, power, form)
    assert_close(actual, expected, 1e-9, "y")
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-9, "gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [2, 8])
def test_odd_head_dims_work_without_rotation(form, power):
    inputs = random_inputs(0, dim=3, value_dim=5, gate="scalar", rotation="none").requires_grad()
    expected = run_reference(inputs, power)
    actual = run(inputs, power, form)
    assert_close(actual, expected, 1e-9, "y")
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-9, "gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["scalar", pytest.param("vector", marks=pytest.mark.slow)])
def test_gradcheck_with_states_at_both_ends(form, gate):
    inputs = random_inputs(1, length=5, heads=2, key_heads=1, dim=2, value_dim=2, gate=gate).requires_grad()
    _, state = run(
        random_inputs(2, length=4, key_heads=1, dim=2, value_dim=2, gate=gate), 2, "attention", return_state=True
    )
    ends = [t.detach().clone().requires_grad_() for t in (state.kv, state.normalizer, state.phase)]

    def function(q, k, v, log_gamma, beta, theta, kv, normalizer, phase):
        before = sympow.State(kv, normalizer, phase, power=2, key_dim=2)
        y, after = run(Inputs(q, k, v, log_gamma, beta, theta), 2, form, chunk_size=2 if form == "chunked" else None,
                       initial_state=before, return_state=True)  # fmt: skip
        return y, after.kv, after.normalizer, after.phase

    assert torch.autograd.gradcheck(function, (*inputs.tensors(), *ends))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["q", "k", "v", "log_gamma", "beta", "theta"])
def test_one_input_alone_may_need_a_gradient(form, name):
    inputs = random_inputs(3, length=10)
    _, state = run(inputs, 2, "attention", return_state=True)
    all_of_them = inputs.requires_grad()
    y, after = run(all_of_them, 2, form, initial_state=state, return_state=True)
    expected = torch.autograd.grad(y.sum() + after.kv.sum(), getattr(all_of_them, name))[0]
    alone = getattr(inputs, name).clone().requires_grad_()
    y, after = run(replace(inputs, **{name: alone}), 2, form, initial_state=state, return_state=True)
    actual = torch.autograd.grad(y.sum() + after.kv.sum(), alone)[0]
    assert_close(actual, expected, 1e-12, "gradient")


@pytest.mark.parametrize("form", FORMS)
def test_states_equal_the_references(form):
    first, second = random_inputs(1, length=6), random_inputs(2, length=5)
    second = Inputs(second.q, second.k, second.v, second.log_gamma, second.beta, first.theta)
    _, middle = reference.recurrent(**first.arguments(), power=4)
    expected, (s, z, mu) = reference.recurrent(**second.arguments(), power=4, initial=middle)
    _, state = run(first, 4, form, return_state=True)
    actual, state = run(second, 4, form, initial_state=state, return_state=True)
    assert_close(actual, expected, 1e-9, "y")
    assert_close(state.kv, s.mT, 1e-9, "kv")
    assert_close(state.normalizer, z, 1e-9, "normalizer")
    assert_close(state.phase.cos(), mu.cos(), 1e-9, "phase")
    assert_close(state.phase.sin(), mu.sin(), 1e-9, "phase")


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_tiles_smaller_than_the_sequence_change_nothing(gate, monkeypatch):
    inputs = random_inputs(0, length=70, heads=2, key_heads=1, gate=gate).requires_grad()
    whole = run(inputs, 4, "attention")
    expected = gradients(whole, inputs)
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 64)
    monkeypatch.setattr(blocks, "MIN_ROWS", 3)
    monkeypatch.setattr(blocks, "PAIRWISE_ROWS", 5)
    for form in ("attention", "chunked"):
        y = run(inputs, 4, form, **({"chunk_size": 13} if form == "chunked" else {}))
        assert_close(y, whole, 1e-12, "y")
        for got, want in zip(gradients(y, inputs), expected, strict=True):
            assert_close(got, want, 1e-10, "gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_as_good_as_rounding_allows(form, dtype):
    """Half precision is computed in float32 internally, so the error is the rounding of outputs and gradients.

    For float32 itself it is that of sums over tokens: about one rounding per token at most.
    """
    exact = random_inputs(4, length=40, heads=4, key_heads=2, dim=8)
    rounded = exact.rounded(dtype)
    expected_inputs = rounded.map(lambda t: t.double()).requires_grad()
    expected = run(expected_inputs, 2, form, **({"chunk_size": 16} if form == "chunked" else {}))
    rounded = rounded.requires_grad()
    actual = run(rounded, 2, form, **({"chunk_size": 16} if form == "chunked" else {}))
    assert actual.dtype == dtype
    # Rounding to nearest is off by half of eps at most.
    tolerance = torch.finfo(dtype).eps * (256 if dtype == torch.float32 else 3)
    assert_close(actual, expected, tolerance, "y")
    for got, want in zip(gradients(actual, rounded), gradients(expected, expected_inputs), strict=True):
        # The incoming gradient is rounded as well.
        assert_close(got, want, 2 * tolerance, "gradient")


def test_without_gradients_the_recurrence_leaves_the_given_state_alone():
    first, second = random_inputs(1, length=5), random_inputs(1, length=5)
    _, state = run(first, 2, "recurrent", return_state=True)
    before = state.clone()
    run(second, 2, "recurrent", initial_state=state)
    assert torch.equal(state.kv, before.kv)
    assert torch.equal(state.normalizer, before.normalizer)
    assert torch.equal(state.phase, before.phase)


@pytest.mark.parametrize("form", FORMS)
def test_gradient_mode_does_not_change_the_output(form):
    inputs = random_inputs(6, length=11, gate="vector").requires_grad()
    with torch.no_grad():
        quiet = run(inputs, 4, form)
    assert_close(run(inputs, 4, form), quiet, 1e-14, "y")


def test_autocast_does_not_reach_inside():
    inputs = random_inputs(0, length=32, dim=8, dtype=torch.float32)
    expected = run(inputs, 2, "chunked")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = run(inputs, 2, "chunked")
    assert torch.equal(actual, expected)


def test_strided_inputs_are_taken_as_they_are():
    packed = torch.randn(1, 20, 3, 2, 4, dtype=torch.float64) * 0.4 + 1
    q, k, v = packed.unbind(2)
    expected = sympow.attention(q.contiguous(), k.contiguous(), v.contiguous())
    assert_close(sympow.attention(q, k, v), expected, 1e-14, "y")
