"""Fewer queries than keys give the last rows of what all queries give."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sympow
from support import FORMS, assert_close, assert_states_close, gradients, random_inputs, run

LENGTH = 13


@pytest.mark.parametrize("form", ["auto", *FORMS])
@pytest.mark.parametrize("queries", [1, 5, LENGTH - 1])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_they_are_the_last_rows(form, queries, gate):
    inputs = random_inputs(queries, length=LENGTH, heads=4, key_heads=2, gate=gate).requires_grad()
    whole, whole_state = run(inputs, 2, "attention", return_state=True)
    late = replace(inputs, q=inputs.q[:, -queries:])
    actual, state = run(late, 2, form, return_state=True)
    assert_close(actual, whole[:, -queries:], 1e-9, "y")
    assert_states_close(state, whole_state, 1e-9)
    expected = gradients(whole[:, -queries:], inputs)
    for got, want in zip(gradients(actual, inputs), expected, strict=True):
        assert_close(got, want, 1e-9, "gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
def test_they_come_behind_a_state_too(form, rotation):
    inputs = random_inputs(1, length=LENGTH, rotation=rotation)
    expected, last = run(inputs, 4, "attention", return_state=True)
    _, state = run(inputs.time(0, 4), 4, "chunked", return_state=True)
    rest = inputs.time(4, LENGTH)
    actual, after = run(replace(rest, q=rest.q[:, -3:]), 4, form, initial_state=state, return_state=True)
    assert_close(actual, expected[:, -3:], 1e-9, "y")
    assert_states_close(after, last, 1e-9)


def test_one_query_costs_no_more_than_its_scores():
    """With a KV cache there is one query at a time: neither t × t scores nor a state may be formed."""
    inputs = random_inputs(2, length=4096, heads=1, dim=32, value_dim=32, dtype=torch.float32)
    with FlopCounterMode(display=False) as counter:
        run(replace(inputs, q=inputs.q[:, -1:]), 4, "auto")
    assert 0 < counter.get_total_flops() < 2 * 4096 * 2 * (32 + 32)


def test_no_query_at_all():
    inputs = random_inputs(3, length=LENGTH)
    y, state = run(replace(inputs, q=inputs.q[:, :0]), 2, "auto", return_state=True)
    assert y.shape[1] == 0
    assert_states_close(state, run(inputs, 2, "attention", return_state=True)[1], 1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 13])}, "cu_seqlens needs a query for every key"),
        ({"backend": "triton"}, "support as many queries as keys"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 13, 2, 8)
    with pytest.raises(ValueError, match=message):
        sympow.attention(q, k, k, **options)
    with pytest.raises(ValueError, match="q can be of the last tokens alone"):
        sympow.attention(k, q, q)
    with pytest.raises(ValueError, match="q can be of the last tokens alone"):
        sympow.attention(q, k, k[:, 1:])
