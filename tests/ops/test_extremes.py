"""Inputs near overflow and underflow: outputs agree with float64, and gradients are finite."""

from dataclasses import replace

import pytest
import torch

import sympow
from support import FORMS, Inputs, assert_close, float32_tolerance, gradients, random_inputs, run, run_plain
from sympow.convert.config import SwapConfig
from sympow.errors import ArgumentError
from sympow.ops.window import Window

LENGTH = 37  # odd, and not a multiple of the chunk size


def float_inputs(length: int = LENGTH, dim: int = 8, seed: int = 0, gamma: float = 0.9, heads: int = 2) -> Inputs:
    inputs = random_inputs(seed, length=length, heads=heads, dim=dim, value_dim=dim, dtype=torch.float32)
    return replace(inputs, log_gamma=torch.full((1, length, heads), gamma).log())


def nearly_parallel(inputs: Inputs) -> Inputs:
    """Queries and keys with positive entries that hardly rotate.

    All terms of φ(q)·φ(k) are then positive. Otherwise a score may be a small difference of large terms, more so for
    higher powers, and a state in float32 has no correct digit of it.
    """
    return replace(inputs, q=inputs.q.abs(), k=inputs.k.abs(), theta=0.02 * inputs.theta)


def check(inputs: Inputs, power: int, form: str, tolerance: float = 1e-4, **options) -> torch.Tensor:
    """Output and gradients in float32 against the attention form in float64.

    Gradients are compared relative to their size, but at least to the effect of a change of the whole input.
    """
    exact = inputs.map(lambda t: t.double()).requires_grad()
    expected = run(exact, power, "attention")
    inputs = inputs.requires_grad()
    actual = run(inputs, power, form, **options)
    assert_close(actual, expected, tolerance, "y")
    for x, got, want in zip(inputs.tensors(), gradients(actual, inputs), gradients(expected, exact), strict=True):
        unit = x.detach().double().nan_to_num(neginf=0).square().mean().sqrt().clamp(1e-30, 1e30)
        assert_close(got * unit, want * unit, tolerance, "gradient")
    return actual.detach()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [1, 2, 3, 5, 16, 17])
def test_short_and_odd_lengths(form, length):
    check(float_inputs(length), 2, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("query_scale", [1e-15, 1e15])
@pytest.mark.parametrize("key_scale", [1e-4, 1e4])
def test_scaled_queries_and_keys(form, power, query_scale, key_scale):
    inputs = float_inputs()
    scaled = replace(inputs, q=inputs.q * query_scale, k=inputs.k * key_scale)
    unscaled = run(inputs, power, form)
    actual = check(scaled, power, form)
    # Invariance, up to float32 rounding of the scale factors themselves.
    assert_close(actual, unscaled, 1e-4, "y")


@pytest.mark.parametrize("power", [6, 8])
@pytest.mark.parametrize("key_scale", [1e-4, 1e4])
def test_scaled_keys_at_high_powers(power, key_scale):
    inputs = float_inputs(dim=4)
    scaled = replace(inputs, k=inputs.k * key_scale)
    check(scaled, power, "attention")


@pytest.mark.parametrize("power", [2, 4, 6, 8])
@pytest.mark.parametrize("key_scale", [1e-4, 1e4])
def test_scaled_keys_through_a_state(power, key_scale):
    inputs = float_inputs(dim=4)
    scaled = replace(inputs, k=inputs.k * key_scale)
    expected = run(scaled.map(lambda t: t.double()), power, "attention")
    head, state = run(scaled.time(0, 20), power, "chunked", return_state=True)
    tail = run(scaled.time(20), power, "recurrent", initial_state=state)
    assert_close(torch.cat([head, tail], dim=1), expected, 1e-4, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [6, 8])
@pytest.mark.parametrize("scales", [(1e-4, 1e4), (1e4, 1e-4), (1e-10, 1.0)])
def test_keys_of_very_different_length_in_one_call(form, power, scales):
    """Long keys later in the sequence do not change earlier outputs, not even by underflow."""
    inputs = nearly_parallel(float_inputs(dim=4))
    k = inputs.k.clone()
    k[:, :18] *= scales[0]
    k[:, 18:] *= scales[1]
    inputs = replace(inputs, k=k)
    y = run(inputs, power, form)
    assert_close(y, run(inputs.map(lambda t: t.double()), power, form), 1e-4, "y")
    assert_close(y[:, :18], run(inputs.time(0, 18), power, form), 2e-6, "rows before the change")


# Scores of 1e-5 and less, whose eighth powers float32 cannot tell from zero.
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [6, 8])
@pytest.mark.parametrize("score", [1e-2, 1e-4, 1e-5, 1e-6])
def test_rows_of_tiny_weights_have_right_gradients(form, power, score):
    length = 9
    inputs = float_inputs(length, dim=2, heads=1)
    q, k = torch.tensor([1.0, score]), torch.tensor([0.0, 1.0])
    small = replace(
        inputs, q=q.expand(1, length, 1, 2).clone(), k=k.expand(1, length, 1, 2).clone(), beta=None, theta=None
    )
    exact = small.map(lambda t: t.double()).requires_grad()
    expected = run(exact, power, "attention")
    small = small.requires_grad()
    actual = run(small, power, form, **({"chunk_size": 4} if form == "chunked" else {}))
    assert_close(actual, expected, 1e-5, "y")
    got, want = gradients(actual, small), gradients(expected, exact)
    for name, mine, right in zip(("q", "k", "v", "log_gamma"), got, want, strict=True):
        # A query's own gradient is zero where all keys are parallel: what is left is rounding of p / score.
        scale = power / score if name == "q" else right.abs().max()
        assert ((mine.double() - right).abs().max() <= 1e-5 * scale).item(), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [6, 8])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("packed", [False, True])
def test_high_powers_agree_with_float64(form, power, gate, packed):
    inputs = random_inputs(7, length=LENGTH, heads=2, key_heads=1, dim=4, value_dim=3, gate=gate, dtype=torch.float32)
    inputs = nearly_parallel(inputs)
    documents = torch.tensor([0, 9, 26, LENGTH]) if packed else None
    exact = inputs.map(lambda t: t.double()).requires_grad()
    expected = run(exact, power, "attention", cu_seqlens=documents)
    inputs = inputs.requires_grad()
    chunks = {"chunk_size": 8} if form == "chunked" else {}
    actual = run(inputs, power, form, cu_seqlens=documents, **chunks)
    assert_close(actual, expected, 1e-4, "y")
    for got, want in zip(gradients(actual, inputs), gradients(expected, exact), strict=True):
        assert_close(got / want.abs().max(), want / want.abs().max(), 2e-4, "gradient")


@pytest.mark.parametrize("power", [6, 8])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_a_row_of_tiny_weights_in_every_tile(power, gate):
    """Rows of several tiles and halves, each nearly orthogonal to the keys of some of them."""
    inputs = random_inputs(5, length=600, heads=2, key_heads=1, dim=4, gate=gate, dtype=torch.float32, rotation="none")
    k = inputs.k.clone()
    k[:, :300, :, 1:] *= 1e-6
    k[:, 300:, :, 0] *= 1e-6
    q = inputs.q.clone()
    q[:, ::2, :, 0] = 0
    inputs = replace(inputs, q=q, k=k)
    exact = inputs.map(lambda t: t.double()).requires_grad()
    expected = run(exact, power, "attention")
    inputs = inputs.requires_grad()
    actual = run(inputs, power, "attention")
    assert_close(actual, expected, 1e-4, "y")
    for x, got, want in zip(inputs.tensors(), gradients(actual, inputs), gradients(expected, exact), strict=True):
        assert got.isfinite().all()
        # The largest gradients are of scores of rounding alone: compared where all digits are right.
        unit = x.detach().double().square()
        assert_close(got * unit, want * unit, 1e-3, "gradient")


@pytest.mark.parametrize("power", [6, 8])
def test_steps_of_a_window_have_rows_of_tiny_weights(power):
    q, k = torch.tensor([1.0, 1e-6]), torch.tensor([0.0, 1.0])
    v = torch.randn(11, 1, 1, 1, 3, generator=torch.Generator().manual_seed(0))
    window = Window.empty(1, 1, 2, 3, power, rotated=False, capacity=4)
    for token in v:
        y = window.step(q.reshape(1, 1, 1, 2), k.reshape(1, 1, 1, 2), token)
    assert_close(y.flatten(), v.mean(0).flatten(), 1e-5, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [6, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_high_powers_are_finite_whatever_the_range(form, power, dtype):
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        shape = (1, 31, 2, 2 + seed % 3)

        def wide(shape=shape, generator=generator):
            sizes = 10 ** (4 * torch.randn(shape, generator=generator).clamp(-3, 3))
            present = torch.rand(shape, generator=generator) < 0.7
            return (torch.randn(shape, generator=generator) * sizes * present).to(dtype)

        v = torch.randn(1, 31, 2, 3, generator=generator).to(dtype)
        log_gamma = None if seed % 2 else -3 * torch.rand(1, 31, 2, generator=generator)
        inputs = Inputs(wide(), wide(), v, log_gamma).requires_grad()
        y = run(inputs, power, form, **({"chunk_size": 5} if form == "chunked" else {}))
        assert y.isfinite().all()
        assert not any(gradient.isnan().any() for gradient in gradients(y, inputs))


@pytest.mark.parametrize("power", [10, 64])
def test_powers_above_8_are_refused_everywhere(power):
    message = f"power must be at most 8, since powers 2, 4, 6 and 8 are supported; got {power}"
    q = torch.ones(1, 1, 1, 2)
    with pytest.raises(ArgumentError, match=message):
        sympow.attention(q, q, q, power)
    with pytest.raises(ArgumentError, match=message):
        sympow.ConformalAttention(width=8, heads=2, power=power)
    with pytest.raises(ArgumentError, match=message):
        sympow.GPTConfig(power=power)
    with pytest.raises(ArgumentError, match=message):
        SwapConfig(power=power)
    with pytest.raises(ArgumentError, match=message):
        Window.empty(1, 1, 2, 2, power, rotated=False)
    with pytest.raises(ArgumentError, match=message):
        sympow.State.zeros(1, 1, 2, 2, power, rotated=False)
    with pytest.raises(ArgumentError, match=f"power must be at most 8, since powers from 1 to 8 .*; got {power}"):
        sympow.symmetric_power(torch.ones(2), power)


@pytest.mark.parametrize(
    "options",
    [{"return_state": True}, {"form": "chunked"}, {"form": "recurrent"}, {"chunk_size": 4}],
    ids=["state", "chunked", "recurrent", "chunk size"],
)
def test_too_many_features_are_refused_before_they_are_allocated(options):
    q = torch.ones(1, 2, 1, 64)
    assert sympow.attention(q, q, q, 8).isfinite().all()
    with pytest.raises(ArgumentError, match="number of features of dim 64 and power 8 must be at most 2,147,483,647"):
        sympow.attention(q, q, q, 8, **options)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["q", "k", "v", "log_gamma"])
def test_nan_is_not_hidden(form, name):
    inputs = float_inputs()
    tensor = getattr(inputs, name).clone()
    tensor[:, 20] = torch.nan
    y = run(replace(inputs, **{name: tensor}), 2, form)
    assert y[:, 20].isnan().all()


NOT_FINITE = [
    (gate, name, value)
    for gate in ("none", "scalar", "vector")
    for name in ("q", "k", "v", "log_gamma", "beta")
    for value in (torch.nan, torch.inf, -torch.inf)
    if not (name == "log_gamma" and (gate == "none" or value == torch.inf))  # there is no such gate
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("gate", "name", "value"), NOT_FINITE)
def test_what_is_not_finite_changes_no_earlier_row(form, gate, name, value):
    inputs = random_inputs(2, length=LENGTH, heads=2, key_heads=1, gate=gate)
    at = 22
    tensor = getattr(inputs, name).clone()
    tensor[:, at] = value
    y = run(replace(inputs, **{name: tensor}), 2, form)
    assert_close(y[:, :at], run(inputs, 2, form)[:, :at], 1e-12, "rows before")
    if name != "log_gamma":  # of which −inf is a number
        assert not y[:, at].isfinite().any()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["scalar", "vector"])
@pytest.mark.parametrize(("power", "log_gamma"), [(2, -torch.inf), (4, -torch.inf), (8, -torch.inf), (2, -600.0)])
def test_gates_that_close_hide_long_keys(form, gate, power, log_gamma):
    """Long keys that have decayed to nothing do not make later, shorter keys underflow."""
    inputs = random_inputs(3, length=LENGTH, gate=gate)
    before, closing, after = slice(0, 18), slice(18, 24), slice(24, None)
    inputs.k[:, before] *= 1e150
    inputs.k[:, closing] = 0
    inputs.k[:, after] *= 1e-150
    inputs.log_gamma[:, closing] = log_gamma
    y = run(inputs, power, form)
    assert_close(y[:, after], run(inputs.time(24), power, form), 1e-9, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("power", "longest"), [(4, 1e6), (2, 1e15), (8, 1e4)])
def test_gates_that_close_hide_long_keys_in_float32(form, power, longest):
    length = 6
    q, k, v = torch.ones(length, 2), torch.full((length, 2), 1 / longest), torch.ones(length, 1)
    k[0], v[0] = longest, 5.0
    log_gamma = torch.zeros(1, length, 1)
    log_gamma[:, 1] = -torch.inf
    inputs = Inputs(*(x.reshape(1, length, 1, -1) for x in (q, k, v)), log_gamma)
    assert run(inputs, power, form).flatten().round().tolist() == [5, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("folded", [False, True])
def test_gates_that_close_hide_long_keys_of_a_window(power, folded):
    """The same, with the long keys in the state of a window."""
    inputs = random_inputs(4, length=8, rotation="none")
    inputs.k[:, :4] *= 1e35  # whose p-th power a state can hold
    inputs.k[:, 4:] *= 1e-80
    inputs.log_gamma[:, 4] = -torch.inf
    prefix = inputs.time(0, 3)
    _, state = run(prefix, power, "attention", return_state=True)
    window = Window.open(state, capacity=8, dtype=torch.float64)
    for token in range(3, 8):
        y = window.step(**inputs.time(token, token + 1).arguments(), backend="torch")
        if folded and token == 3:
            window.fold("torch")
    assert_close(y, run(inputs.time(4), power, "attention")[:, -1:], 1e-9, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("power", "ratio"), [(2, 3000.0), (4, 1e5), (8, 1e3)])
def test_a_long_key_that_does_not_answer_hides_no_other(form, power, ratio):
    q = torch.tensor([[0.0, 1.0], [0.0, 1.0]]).reshape(1, 2, 1, 2)
    k = torch.tensor([[0.0, 1.0], [ratio, 0.0]]).reshape(1, 2, 1, 2)
    v = torch.tensor([1.0, 2.0]).reshape(1, 2, 1, 1)
    y = run(Inputs(q, k, v), power, form, **({"chunk_size": 1} if form == "chunked" else {}))
    assert_close(y.flatten(), torch.tensor([1.0, 1.0]), 1e-6, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("power", "dim"), [(2, 64), (4, 16), (8, 4)])
def test_a_first_token_gives_its_own_value(form, power, dim):
    q, k, v = torch.randn(3, 200, 1, 1, dim, generator=torch.Generator().manual_seed(0))
    assert_close(run(Inputs(q, k, v), power, form), v, 1e-5, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("power", "key_scale", "dtype"),
    [(8, 1e-80, torch.float64), (4, 1e-150, torch.float64), (2, 1e38, torch.float32), (8, 1e-36, torch.float32)],
)
def test_keys_at_the_ends_of_the_range(form, power, key_scale, dtype):
    inputs = float_inputs(dim=4).map(lambda t: t.to(dtype))
    scaled = replace(inputs, k=inputs.k * key_scale)
    assert_close(run(scaled, power, form), run(inputs, power, form), 1e-4, "y")


@pytest.mark.parametrize("form", FORMS)
def test_queries_orthogonal_to_all_keys_stay_near_the_range_of_the_values(form):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(2, 1, 40, 1, 1, generator=generator) + 0.5
    q, k = lengths[0] * torch.tensor([1.0, -1.0]), lengths[1] * torch.tensor([1.0, 1.0])
    v = torch.randn(1, 40, 1, 3, generator=generator)
    y = run(Inputs(q / 3, k / 3, v), 2, form)
    assert y.abs().max() <= 2 * v.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_a_state_of_large_keys_meets_small_ones_and_the_other_way_round(form):
    first, second = float_inputs(seed=1), float_inputs(seed=2)
    for scales in ((1e4, 1e-4), (1e-4, 1e4)):
        inputs = Inputs(
            *(torch.cat(pair, dim=1) for pair in (
                (first.q, second.q), (first.k * scales[0], second.k * scales[1]), (first.v, second.v),
                (first.log_gamma, second.log_gamma), (first.beta, second.beta),
            )), first.theta,
        )  # fmt: skip
        expected = run(inputs.map(lambda t: t.double()), 2, "attention")
        head, state = run(inputs.time(0, LENGTH), 2, form, return_state=True)
        tail = run(inputs.time(LENGTH), 2, form, initial_state=state)
        assert_close(torch.cat([head, tail], dim=1), expected, 1e-4, "y")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vector", [False, True])
def test_a_gate_of_exactly_zero_erases_the_past(form, vector):
    inputs = float_inputs()
    log_gamma = inputs.log_gamma.clone()
    log_gamma[:, 10] = -torch.inf
    log_gamma[:, 20:22] = -torch.inf
    if vector:
        log_gamma = log_gamma.unsqueeze(-1).expand(*log_gamma.shape, 4).clone()
    closed = replace(inputs, log_gamma=log_gamma)
    y = check(closed, 2, form)
    for start, stop in ((0, 10), (10, 20), (20, 21), (21, LENGTH)):
        assert_close(y[:, start:stop], run(closed.time(start, stop), 2, "attention"), 1e-4, "y after a closed gate")
    assert_close(y[:, 20], inputs.v[:, 20], 1e-6, "the closed gate's own token, which sees only itself")


@pytest.mark.parametrize("form", FORMS)
def test_a_gate_of_exactly_one_is_no_gate(form):
    inputs = float_inputs(gamma=1.0)
    open_gate = check(inputs, 2, form)
    without = replace(inputs, log_gamma=None)
    assert_close(open_gate, run(without, 2, form), 1e-6, "y")


@pytest.mark.slow
def test_a_gate_of_one_half_held_for_4096_tokens():
    inputs = float_inputs(4096, gamma=0.5, heads=1)
    exact = inputs.map(lambda t: t.double()).requires_grad()
    expected = run_plain(exact, 2)
    wanted = gradients(expected, exact)
    inputs = inputs.requires_grad()
    # Both in one test, since their reference takes longer than they do.
    for form, options in (("attention", {}), ("chunked", {"chunk_size": 256})):
        actual = run(inputs, 2, form, **options)
        assert_close(actual, expected, float32_tolerance("y", 4096), f"y, {form}")
        for name, got, want in zip(inputs.arguments(), gradients(actual, inputs), wanted, strict=True):
            assert_close(got, want, float32_tolerance(name, 4096), f"{name}, {form}")


@pytest.mark.parametrize("form", FORMS)
def test_zero_queries_give_zero(form):
    inputs = float_inputs()
    q = inputs.q.clone()
    q[:, ::3] = 0
    inputs = replace(inputs, q=q).requires_grad()
    y = run(inputs, 2, form)
    assert torch.equal(y[:, ::3], torch.zeros_like(y[:, ::3]))
    assert all(torch.isfinite(g).all() for g in gradients(y, inputs))


@pytest.mark.parametrize("form", FORMS)
def test_zero_keys_are_not_attended_to(form):
    inputs = float_inputs()
    k = inputs.k.clone()
    k[:, :5] = 0
    k[:, 30:] = 0
    inputs = replace(inputs, k=k).requires_grad()
    y = run(inputs, 2, form)
    assert torch.equal(y[:, :5], torch.zeros_like(y[:, :5]))
    assert all(torch.isfinite(g).all() for g in gradients(y, inputs))
    expected = run(inputs.map(lambda t: t.detach().double()), 2, "attention")
    assert_close(y.detach(), expected, 1e-4, "y")


@pytest.mark.parametrize("form", FORMS)
def test_all_keys_zero(form):
    inputs = float_inputs()
    inputs = replace(inputs, k=torch.zeros_like(inputs.k)).requires_grad()
    y, state = run(inputs, 4, form, return_state=True)
    assert not y.any()
    assert not state.kv.any()
    assert all(torch.isfinite(g).all() for g in gradients(y, inputs))


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens_at_all(form):
    inputs = float_inputs()
    y, state = run(inputs.time(0, 0), 2, form, return_state=True)
    assert y.shape == (1, 0, 2, 8)
    assert_close(run(inputs, 2, form, initial_state=state), run(inputs, 2, form), 1e-6, "y")
    tracked = inputs.time(0, 0).requires_grad()
    run(tracked, 2, form).sum().backward()
    assert tracked.q.grad.shape == (1, 0, 2, 8)
    _, after = run(inputs, 2, form, return_state=True)
    _, same = run(inputs.time(0, 0), 2, form, initial_state=after, return_state=True)
    assert torch.equal(same.kv, after.kv)
