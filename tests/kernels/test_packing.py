"""Packing of states (all products of entries) into messages (symmetric features) and back, against plain PyTorch."""

import math

import pytest
import torch

from support import assert_close, interpreted, within
from sympow.settings import symmetric_dim

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.states.full_state import FullState
from sympow.kernels.states.message_packing import pack, pack_nothing, unpack
from sympow.kernels.states.reference import pack_reference, unpack_reference
from sympow.parallel.scan import Carried

pytestmark = interpreted


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def carried(shape, log_decay=None, seed=0):
    """A random state in the layout of `sympow.parallel.scan`."""
    batch, heads, dim, value_dim = shape
    features = (batch, heads, symmetric_dim(dim, 2))
    return Carried(random(*features, value_dim, seed=seed), random(*features, seed=seed), log_decay, 2)


@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (16, 32), pytest.param(64, 16, marks=pytest.mark.slow)])
def test_packing_and_unpacking(dim, value_dim):
    shape = (2, 3, dim, value_dim)
    # Not symmetric: states and their gradients are symmetric only up to rounding.
    full = FullState(random(2, 3, dim, value_dim, dim), random(2, 3, dim, dim))
    packed = carried(shape)
    assert_close(pack(full), pack_reference(*full), 1e-6, "packed")
    found = unpack(packed.pack().unsqueeze(0), shape)
    expected = unpack_reference(packed.pack(), shape)
    assert_close(found.kv, expected[0], 1e-6, "kv")
    assert_close(found.normalizer, expected[1], 1e-6, "normalizer")


def test_a_state_survives_a_message():
    message = carried((1, 2, 32, 32)).pack()
    assert_close(pack(unpack(message.unsqueeze(0), (1, 2, 32, 32))), message, 1e-6, "state")


def test_messages_say_what_passes():
    shape = (2, 3, 16, 16)
    full = FullState(random(2, 3, 16, 16, 16), random(2, 3, 16, 16))
    sums = -random(2, 3, 7).abs().double().cumsum(-1)
    # As `Carried` unpacks messages in PyTorch.
    template = carried(shape, torch.zeros(2, 3, 1, dtype=torch.float64))
    expected = {0.0: torch.zeros(2, 3), -math.inf: torch.full((2, 3), -math.inf), sums: sums[:, :, -1] / 2}
    for decay, log_decay in expected.items():
        got = Carried.unpack(pack(full, decay), template.kv.shape, 2)
        assert torch.equal(got.log_decay, log_decay.double().unsqueeze(-1))
        assert torch.equal(got.pack()[: -2 * 2 * 3], pack(full))
    nothing = Carried.unpack(pack_nothing(full.kv, shape, decays=True), template.kv.shape, 2)
    assert not nothing.kv.any()
    assert not nothing.normalizer.any()
    assert (nothing.log_decay == -math.inf).all()
    assert pack_nothing(full.kv, shape, decays=False).shape == pack(full).shape


@pytest.mark.parametrize("reverse", [False, True], ids=["from earlier ranks", "from later ranks"])
@pytest.mark.parametrize("decays", [False, True], ids=["adding up", "decaying"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_several_messages_leave_what_a_scan_over_them_does(count, decays, reverse):
    ranks, shape = 5, (2, 2, 16, 32)
    log_decays = -random(ranks, 2, 2, 1, seed=count).abs().double()
    # Decays of 0, and decays that underflow in float32.
    log_decays[2, 0, 0], log_decays[1, 1], log_decays[3, 0, 1] = -math.inf, -math.inf, -1000
    states = [carried(shape, log_decays[rank] if decays else None, seed=rank) for rank in range(ranks)]
    messages = torch.stack([state.pack() for state in states])
    nearest = ranks - count if reverse else count - 1
    found = unpack(messages, shape, decays=decays, nearest=nearest, count=count, reverse=reverse)
    # From the farthest rank on, in float64.
    kv, normalizer = 0, 0
    for rank in range(ranks - 1, nearest - 1, -1) if reverse else range(count):
        passing = (2 * log_decays[rank]).exp() if decays else torch.ones(1, dtype=torch.float64)
        kv = states[rank].kv.double() + passing.unsqueeze(-1) * kv
        normalizer = states[rank].normalizer.double() + passing * normalizer
    expected = unpack_reference(torch.cat([kv.flatten(), normalizer.flatten()]), shape)
    assert_close(found.kv, expected[0], 1e-6, "kv")
    assert_close(found.normalizer, expected[1], 1e-6, "normalizer")


def test_nothing_comes_from_behind_a_closed_gate():
    """Not even rounding errors: the state before has the largest numbers of float32, and the one after is zero."""
    shape = (1, 1, 16, 16)
    huge, closed = carried(shape, torch.zeros(1, 1, 1).double()), torch.full((1, 1, 1), -math.inf).double()
    huge = Carried(torch.full_like(huge.kv, 3e38), torch.full_like(huge.normalizer, -3e38), huge.log_decay, 2)
    between = Carried(torch.zeros_like(huge.kv), torch.zeros_like(huge.normalizer), closed, 2)
    found = unpack(torch.stack([huge.pack(), between.pack()]), shape, decays=True, nearest=1, count=2)
    assert not found.kv.any()
    assert not found.normalizer.any()


def test_either_is_the_gradient_of_the_other():
    """Σ pack(S) · g = Σ S · unpack(g), the normalizer included."""
    full, gradient = FullState(random(1, 2, 16, 16, 16), random(1, 2, 16, 16)), carried((1, 2, 16, 16)).pack()
    packed = pack(full).double() * gradient.double()
    found = unpack(gradient.unsqueeze(0), (1, 2, 16, 16))
    unpacked = sum((x.double() * y.double()).sum() for x, y in zip(full, found, strict=True))
    # The terms nearly cancel, so rounding is small relative to the sum of their magnitudes, not to the sum itself.
    within((packed.sum() - unpacked).abs() / packed.abs().sum(), 1e-6, "inner product")
