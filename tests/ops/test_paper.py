"""The paper's propositions, one test for each, and its numbers."""

import pytest
import torch

import sympow
from support import random_inputs
from sympow.ops import reference
from sympow.ops.torch.softmax import softmax_attention

POWERS = (2, 4, 6)


def random_rotation(dim: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))
    q[:, 0] *= torch.linalg.det(q)
    return q


@pytest.mark.parametrize("power", POWERS)
def test_proposition_1_rotary_attention_equals_its_recurrence(power):
    inputs = random_inputs(power, gate="none", rotation="fixed")
    expected = reference.attention(**inputs.arguments(), power=power)
    actual, _ = reference.recurrent(**inputs.arguments(), power=power)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for form in ("attention", "recurrent"):
        y = sympow.attention(**inputs.arguments(), power=power, form=form)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("power", POWERS)
def test_proposition_2_gated_attention_equals_its_recurrence(power):
    inputs = random_inputs(power, gate="scalar", rotation="fixed")
    expected = reference.attention(**inputs.arguments(), power=power)
    actual, _ = reference.recurrent(**inputs.arguments(), power=power)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)
    for form in ("attention", "recurrent"):
        y = sympow.attention(**inputs.arguments(), power=power, form=form)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("dim", "power"), [(2, 2), (2, 6), (3, 4), (4, 2), (4, 4)])
def test_proposition_3_a_rotation_of_keys_is_a_rotation_of_features(dim, power):
    rotation = random_rotation(dim, seed=dim + power)
    bar = sympow.symmetric_power_of_matrix(rotation, power)
    k = torch.randn(20, dim, dtype=torch.float64)
    rotated = sympow.symmetric_power(k @ rotation.T, power)
    torch.testing.assert_close(rotated, sympow.symmetric_power(k, power) @ bar.T, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(bar.T @ bar, torch.eye(len(bar), dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(torch.linalg.det(bar), torch.ones((), dtype=torch.float64), rtol=0, atol=1e-10)


def test_proposition_of_the_appendix_powers_of_a_rotation_multiply_its_angles():
    angles = torch.randn(3, dtype=torch.float64)
    power = torch.linalg.matrix_power(reference.rotation_matrix(angles), 5)
    torch.testing.assert_close(power, reference.rotation_matrix(5 * angles), rtol=0, atol=1e-12)


def test_appendix_a1_softmax_with_a_fixed_gate_is_alibi():
    inputs = random_inputs(0, length=20, heads=3, gate="none", rotation="none")
    slopes = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    log_gamma = (-slopes).expand(1, 20, 3)
    y = softmax_attention(inputs.q, inputs.k, inputs.v, log_gamma=log_gamma)

    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    distance = torch.arange(20)[None, :] - torch.arange(20)[:, None]  # j − i
    logits = q @ k.mT / q.shape[-1] ** 0.5 + slopes[:, None, None] * distance
    alibi = logits.masked_fill(distance > 0, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(y, alibi.transpose(1, 2), rtol=0, atol=1e-12)


def test_even_powers_make_outputs_convex_combinations_of_values():
    inputs = random_inputs(3, length=50)
    y = sympow.attention(**{**inputs.arguments(), "v": torch.ones_like(inputs.v)}, power=4)
    torch.testing.assert_close(y, torch.ones_like(y), rtol=0, atol=1e-12)
    y = sympow.attention(**inputs.arguments(), power=4)
    running_max = inputs.v.cummax(dim=1).values
    running_min = inputs.v.cummin(dim=1).values
    assert ((y <= running_max + 1e-12) & (y >= running_min - 1e-12)).all()
