"""Property tests (hypothesis) with random shapes, powers, heads, splits and documents."""

from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import sympow
from support import FORMS, assert_close, assert_states_close, gradients, random_inputs, run, run_reference

settings.register_profile(
    "sympow", deadline=None, max_examples=40, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("sympow")


@st.composite
def problems(draw, *, max_length=12):
    """Inputs of any shape and kind, and a power that keeps them small."""
    power = draw(st.sampled_from([2, 4, 6, 8]))
    gate = draw(st.sampled_from(["none", "scalar", "vector"]))
    rotation = draw(st.sampled_from(["none", "fixed", "scale", "pairs"]))
    pairwise = gate == "vector" or rotation != "none"
    dims = {2: 7, 4: 4, 6: 3, 8: 2}[power]
    dim = draw(st.integers(1, dims))
    dim += dim % 2 if pairwise else 0
    key_heads = draw(st.integers(1, 2))
    inputs = random_inputs(
        draw(st.integers(0, 2**31)),
        batch=draw(st.integers(1, 2)),
        length=draw(st.integers(1, max_length)),
        heads=key_heads * draw(st.integers(1, 3)),
        key_heads=key_heads,
        dim=dim,
        value_dim=draw(st.integers(1, 5)),
        gate=gate,
        rotation=rotation,
    )
    return inputs, power


@given(problems(), st.sampled_from(FORMS), st.integers(1, 14))
def test_every_form_equals_the_reference(problem, form, chunk_size):
    inputs, power = problem
    inputs = inputs.requires_grad()
    expected = run_reference(inputs, power)
    actual = run(inputs, power, form, **({"chunk_size": chunk_size} if form == "chunked" else {}))
    assert_close(actual, expected, 1e-9, "y")
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-8, "gradient")


@given(problems(), st.data())
def test_any_split_in_any_forms_equals_one_pass(problem, data):
    inputs, power = problem
    length = inputs.q.shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=4), label="cuts"))
    expected, expected_state = run(inputs, power, "attention", return_state=True)
    outputs, state = [], None
    for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
        form = data.draw(st.sampled_from(FORMS), label="form")
        y, state = run(inputs.time(start, stop), power, form, initial_state=state, return_state=True)
        outputs.append(y)
    assert_close(torch.cat(outputs, dim=1), expected, 1e-9, "y")
    assert_states_close(state, expected_state, 1e-9)


@given(problems(), st.data())
def test_any_packing_equals_separate_calls(problem, data):
    inputs, power = problem
    inputs = inputs.map(lambda t: t[:1] if t.ndim > 1 else t)
    length = inputs.q.shape[1]
    inner = data.draw(st.sets(st.integers(1, length), max_size=5), label="boundaries")
    offsets = sorted({0, length, *inner})
    form = data.draw(st.sampled_from(FORMS), label="form")
    packed = run(inputs, power, form, cu_seqlens=torch.tensor(offsets))
    for start, stop in pairwise(offsets):
        assert_close(packed[:, start:stop], run(inputs.time(start, stop), power, form), 1e-12, "document")


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**31))
def test_features_reproduce_the_kernel(dim, power, seed):
    x, y = torch.randn(2, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    inner = sympow.symmetric_power(x, power) @ sympow.symmetric_power(y, power)
    assert_close(inner, (x @ y) ** power, 1e-10, "inner product")


@given(problems(), st.floats(-10, 10), st.floats(-10, 10))
def test_scaling_queries_or_all_keys_changes_nothing(problem, query_log, key_log):
    inputs, power = problem
    scaled = {**inputs.arguments(), "q": inputs.q * 10**query_log, "k": inputs.k * 10**key_log}
    expected = sympow.attention(**inputs.arguments(), power=power)
    assert_close(sympow.attention(**scaled, power=power), expected, 1e-9, "y")


@given(problems(max_length=10), st.integers(0, 8))
def test_the_future_is_not_seen(problem, position):
    inputs, power = problem
    position = min(position, inputs.q.shape[1] - 1)
    for form in FORMS:
        whole = run(inputs, power, form)
        past = run(inputs.time(0, position + 1), power, form)
        assert_close(past, whole[:, : position + 1], 1e-12, "past")
