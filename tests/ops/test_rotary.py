import math
from fractions import Fraction

import pytest
import torch

import sympow
from support import assert_close
from sympow.ops.reference import rotation_matrix
from sympow.ops.rotary import wrap_angle


def test_rates_follow_the_papers_formula():
    rates = sympow.rotary_rates(8, max_document=10_000)
    assert rates.dtype == torch.float64
    expected = [2 * math.pi / 10_000 ** (2 * (i - 1) / 8) for i in range(1, 5)]
    torch.testing.assert_close(rates, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotate_is_the_block_diagonal_matrix_on_interleaved_pairs(dtype):
    x, angles = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    expected = (rotation_matrix(angles) @ x.unsqueeze(-1)).squeeze(-1)
    rotated = sympow.rotate(x.to(dtype), angles)
    assert rotated.dtype == dtype
    tolerance = 8 * torch.finfo(dtype).eps
    assert_close(rotated, expected, tolerance, "x")


def test_rotations_add_up():
    x, a, b = torch.randn(4, 6, dtype=torch.float64), *torch.randn(2, 4, 3, dtype=torch.float64)
    torch.testing.assert_close(sympow.rotate(sympow.rotate(x, a), b), sympow.rotate(x, a + b))


def test_wrapping_keeps_the_angle_and_its_gradient():
    angle = torch.tensor([0.1, 3.2, -100.0, 1e6], dtype=torch.float64, requires_grad=True)
    wrapped = wrap_angle(angle)
    assert wrapped.abs().max() <= math.pi + 1e-9
    torch.testing.assert_close(wrapped.cos(), angle.cos(), rtol=0, atol=1e-9)
    torch.testing.assert_close(wrapped.sin(), angle.sin(), rtol=0, atol=1e-9)
    wrapped.sum().backward()
    assert torch.equal(angle.grad, torch.ones_like(angle))


# Fine enough for any float32 of these tests.
UNITS = 2**60


def exact_phase(beta: torch.Tensor, theta: float) -> float:
    """Σ β_i θ modulo 2π, in rational arithmetic, as a float in [−π, π]."""
    # 2π to 60 digits: its double is off by 2.4e-16, which a million revolutions would make visible.
    revolution = Fraction("6.28318530717958647692528676655900576839433879875021164194988918461563")
    # As integers in a common unit, which are as exact as fractions and far faster to add.
    scaled = (beta.double() * UNITS).tolist()
    assert all(value.is_integer() for value in scaled)
    phase = Fraction(sum(map(int, scaled)), UNITS) * Fraction(theta)
    return float(phase - revolution * round(phase / revolution))


@pytest.mark.parametrize("chunks", [1, 7])
def test_phase_after_a_million_tokens_is_within_a_ten_thousandth_of_a_radian(chunks):
    length = 1_000_000
    beta = 2 * torch.rand(1, length, 1, generator=torch.Generator().manual_seed(0))
    theta = sympow.rotary_rates(4, max_document=1_000_000, dtype=torch.float32)
    phase = None
    for part in beta.chunk(chunks, dim=1):
        phase = sympow.accumulate_phase(theta, part, phase)[:, -1]
    for pair in range(2):
        error = abs(phase[0, 0, pair].item() - exact_phase(beta.flatten(), theta[pair].item()))
        assert min(error, 2 * math.pi - error) <= 1e-4


@pytest.mark.parametrize("pairs", [False, True])
def test_phases_are_running_sums(pairs):
    theta = torch.tensor([0.3, 0.1], dtype=torch.float64)
    beta = torch.rand(2, 6, 3, *([2] if pairs else []), dtype=torch.float64)
    start = torch.rand(2, 3, 2, dtype=torch.float64)
    expected = start.unsqueeze(1) + (beta if pairs else beta.unsqueeze(-1)).cumsum(1) * theta
    phase = sympow.accumulate_phase(theta, beta, start)
    torch.testing.assert_close(phase.cos(), expected.cos())
    torch.testing.assert_close(phase.sin(), expected.sin())


def test_fixed_rotary_after_a_million_tokens_is_a_whole_number_of_turns():
    theta = sympow.rotary_rates(2, max_document=1_000_000)
    phase = sympow.accumulate_phase(theta, length=1_000_000)[0, -1, 0, 0].item()
    assert abs(phase) <= 1e-4


@pytest.mark.slow
def test_the_operator_keeps_the_phase_bar_through_its_state():
    """A million tokens rotated by an irrational angle, in chunks: the last score still has the right phase."""
    length, theta = 1_000_000, torch.tensor([2.0])
    state = sympow.State.zeros(1, 1, 2, 1, 2, rotated=True)
    chunk = torch.zeros(1, length // 10, 1, 2)
    beta = torch.full((1, length // 10, 1), 1.1)
    for _ in range(10):
        _, state = sympow.attention(
            chunk, chunk, chunk[..., :1], 2, beta=beta, theta=theta, initial_state=state, return_state=True
        )
    expected = exact_phase(beta.flatten().repeat(10), 2.0)
    assert abs(state.phase.item() - expected) <= 1e-4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sympow.rotary_rates(3, 10), "dim"),
        (lambda: sympow.rotary_rates(0, 10), "dim"),
        (lambda: sympow.rotary_rates(4, 0), "max_document"),
        (lambda: sympow.rotary_rates(4, float("nan")), "max_document must be finite, got nan"),
        (lambda: sympow.rotary_rates(4, float("inf")), "max_document must be finite, got inf"),
        (lambda: sympow.rotate(torch.ones(3), torch.ones(1)), "x"),
        (lambda: sympow.rotate(torch.ones(4), torch.ones(3)), "angles"),
        (lambda: sympow.accumulate_phase(torch.ones(2, 2), length=3), "theta"),
        (lambda: sympow.accumulate_phase(torch.ones(2), torch.ones(1, 4, 1), length=3), "beta must have as many"),
        (lambda: sympow.accumulate_phase(torch.ones(2), torch.ones(4)), "beta must be"),
        (lambda: sympow.accumulate_phase(torch.ones(2)), "length must be given"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_rates_are_not_cut_to_integers():
    with pytest.raises(TypeError, match=r"dtype must be a floating-point dtype, got torch\.int64"):
        sympow.rotary_rates(4, 10, dtype=torch.int64)
