"""Launches whose number of CTAs grows with batch, heads and pairs stay within the limits of a CUDA grid.

A grid has up to 2³¹ − 1 CTAs along its first axis and 65,535 along the second. Triton's interpreter has no such
limit, so these tests look at the grids.
"""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import sympow
from support import interpreted
from sympow.kernels import rotary as rotation
from sympow.kernels import running_sums
from sympow.kernels.rotary import fused_rotation
from sympow.kernels.running_sums import correct_drift, running_sum
from sympow.ops.rotary import rotary_rates

MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
# The columns of β of 256 sequences with 12 heads of 32 pairs.
BATCH, HEADS, PAIRS = 256, 12, 32


class Recorder:
    """Replaces a kernel: records the grids of its launches, and computes nothing."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(grid)
        return lambda *args, **kwargs: None


@pytest.fixture
def recorders(monkeypatch):
    """All kernels that launch over columns of β, or over sequences and heads without a limit on them."""
    kernels = {
        "scan": (running_sums, "_scan_kernel"),
        "drift": (running_sums, "_correct_drift_kernel"),
        "rotate": (rotation, "_rotate_kernel"),
        "rotate backward": (rotation, "_rotate_backward_kernel"),
    }
    found = {}
    for name, (module, attribute) in kernels.items():
        found[name] = Recorder()
        monkeypatch.setattr(module, attribute, found[name])
    return found


def assert_launchable(grids):
    assert grids
    for grid in grids:
        assert all(axis <= most for axis, most in zip(grid, MOST_PROGRAMS, strict=False)), grid


@pytest.mark.parametrize("reverse", [False, True])
def test_running_sums_of_any_number_of_columns(recorders, reverse):
    running_sum(torch.empty(BATCH, 1, HEADS * PAIRS), reverse=reverse)
    assert_launchable(recorders["scan"].grids)


def test_drift_correction_of_any_number_of_columns(recorders):
    correct_drift(torch.empty(BATCH, HEADS * PAIRS, 1, dtype=torch.float64), None, 1)
    assert_launchable(recorders["drift"].grids)


def test_rotation_of_any_number_of_sequences(recorders):
    q = torch.empty(BATCH * PAIRS, 1, HEADS, 2)
    theta = torch.empty(1, dtype=torch.float64)
    rotation.rotate_forward(q, q, None, theta, None)
    rotation.rotate_backward(q, q, q, q, None, theta, None, want_theta=True)
    assert_launchable(recorders["rotate"].grids)
    assert_launchable(recorders["rotate backward"].grids)


@interpreted
def test_programs_find_their_tokens_and_columns():
    """With several token blocks, columns and sequences, a wrong grid index would mix them up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2050, 3, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(running_sum(x), x.cumsum(1).transpose(1, 2), rtol=0, atol=1e-10)
    later = x.flip(1).cumsum(1).flip(1).transpose(1, 2)
    torch.testing.assert_close(running_sum(x, reverse=True), later, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("per_pair", [True, False])
def test_the_last_of_many_sequences_are_rotated_as_if_alone(per_pair):
    """More columns of β, and more sequences times heads, than CTAs fit along a second axis."""
    batch, heads, dim = (BATCH, HEADS, 2 * PAIRS) if per_pair else (BATCH * PAIRS, HEADS, 2)
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (batch, 3, heads, dim)
    q, k = (torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(2))
    columns = (dim // 2,) if per_pair else ()
    beta = torch.rand(*shape[:3], *columns, device="cuda", generator=generator)
    theta = rotary_rates(dim, 100, device="cuda")

    def rotated(rows):
        scales = beta[rows].clone().requires_grad_()
        rotated_q, rotated_k = fused_rotation(q[rows], k[rows], scales, theta, None, relative=True)
        (rotated_q.float().sum() + rotated_k.float().sum()).backward()
        return rotated_q, rotated_k, scales.grad

    last = slice(batch - 2, batch)
    for together, alone in zip(rotated(slice(None)), rotated(last), strict=True):
        assert torch.equal(together[last], alone)


@pytest.mark.gpu
def test_attention_with_a_rotation_scale_per_pair_takes_many_sequences():
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (BATCH, 4, HEADS, 2 * PAIRS)
    q, k, v = (torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16) for _ in range(3))
    beta = torch.rand(BATCH, 4, HEADS, PAIRS, device="cuda", generator=generator).requires_grad_()
    theta = rotary_rates(2 * PAIRS, 100, device="cuda")
    y = sympow.attention(q, k, v, beta=beta, theta=theta, backend="triton")
    y.float().sum().backward()
    last = slice(BATCH - 2, BATCH)
    alone = sympow.attention(q[last], k[last], v[last], beta=beta[last], theta=theta, backend="triton")
    assert torch.equal(y[last], alone)
    assert beta.grad.isfinite().all()
