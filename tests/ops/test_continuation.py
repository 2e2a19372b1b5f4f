"""Sequences cut anywhere, documents packed in any way and forms mixed in any order give the same result."""

from itertools import pairwise

import pytest
import torch

import sympow
from support import FORMS, Inputs, assert_close, assert_states_close, gradients, random_inputs, run

LENGTH = 11


def run_in_parts(inputs: Inputs, power: int, cuts: list[int], forms: list[str], initial_state=None):
    """One call per segment, with the state passed on."""
    outputs, state = [], initial_state
    for start, stop, form in zip([0, *cuts], [*cuts, inputs.q.shape[1]], forms, strict=True):
        y, state = run(inputs.time(start, stop), power, form, initial_state=state, return_state=True)
        outputs.append(y)
    return torch.cat(outputs, dim=1), state


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", range(LENGTH + 1))
def test_a_split_anywhere_equals_one_pass(form, cut):
    inputs = random_inputs(cut, length=LENGTH, heads=2, key_heads=1).requires_grad()
    expected, expected_state = run(inputs, 2, form, return_state=True)
    actual, state = run_in_parts(inputs, 2, [cut], [form, form])
    assert_close(actual, expected, 1e-9, "y")
    assert_states_close(state, expected_state, 1e-9)
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-9, "gradient")


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
def test_prefill_chunked_then_decode_recurrent_has_no_seam(gate, rotation):
    inputs = random_inputs(0, length=LENGTH, gate=gate, rotation=rotation)
    expected = run(inputs, 4, "attention")
    decode = list(range(7, LENGTH))
    actual, _ = run_in_parts(inputs, 4, decode, ["chunked"] + ["recurrent"] * len(decode))
    assert_close(actual, expected, 1e-9, "y")


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_a_state_of_one_form_serves_every_other(first, second):
    inputs = random_inputs(1, length=LENGTH).requires_grad()
    expected = run(inputs, 2, "attention")
    actual, _ = run_in_parts(inputs, 2, [6], [first, second])
    assert_close(actual, expected, 1e-9, "y")
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-9, "gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_packed_documents_equal_separate_calls(form, gate):
    inputs = random_inputs(2, length=LENGTH, gate=gate).requires_grad()
    offsets = [0, 1, 5, 6, LENGTH]
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
    actual, states = run(inputs, 2, form, cu_seqlens=cu_seqlens, return_state=True)
    separate = [run(inputs.time(start, stop), 2, form, return_state=True) for start, stop in pairwise(offsets)]
    expected = torch.cat([y for y, _ in separate], dim=1)
    assert_close(actual, expected, 1e-12, "y")
    assert states.batch == 4
    for document, (_, state) in enumerate(separate):
        assert_states_close(states.select(slice(document, document + 1)), state, 1e-12)
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-12, "gradient")


@pytest.mark.parametrize("form", FORMS)
def test_packed_documents_continue_from_their_own_states(form):
    inputs = random_inputs(3, length=LENGTH)
    first, second = inputs.time(0, 6), inputs.time(6)
    _, states = run(first, 2, form, cu_seqlens=torch.tensor([0, 4, 6]), return_state=True)
    y = run(second, 2, form, cu_seqlens=torch.tensor([0, 2, 5]), initial_state=states)
    for document, (head, tail) in enumerate((((0, 4), (0, 2)), ((4, 6), (2, 5)))):
        whole = [
            torch.cat([getattr(first.time(*head), name), getattr(second.time(*tail), name)], dim=1)
            for name in ("q", "k", "v", "log_gamma", "beta")
        ]
        expected = run(Inputs(*whole, inputs.theta), 2, "attention")
        assert_close(y[:, slice(*tail)], expected[:, head[1] - head[0] :], 1e-9, f"document {document}")


def test_auto_takes_any_documents():
    inputs = random_inputs(4, length=300, dim=2, value_dim=2)
    cu_seqlens = torch.tensor([0, 290, 300])
    y = sympow.attention(**inputs.arguments(), cu_seqlens=cu_seqlens)
    assert_close(y[:, 290:], sympow.attention(**inputs.time(290).arguments()), 1e-9, "y")


def test_continuing_in_lower_precision_keeps_the_state_in_float32():
    inputs = random_inputs(5, length=LENGTH)
    half = inputs.rounded(torch.bfloat16)
    _, state = run(half, 2, "chunked", return_state=True)
    assert state.kv.dtype == state.normalizer.dtype == torch.float32
    assert state.phase.dtype == torch.float64
    y = run(half, 2, "recurrent", initial_state=state.to(dtype=torch.bfloat16))
    assert y.dtype == torch.bfloat16
