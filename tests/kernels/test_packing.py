"""States of all products and of the symmetric features, one launch each way, against plain PyTorch."""

import pytest
import torch

from support import assert_close, interpreted
from sympow.ops.full_state import from_full, to_full
from sympow.ops.symmetric import symmetric_dim

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.chunk_states import FullState
from sympow.kernels.packing import pack, unpack


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@interpreted
@pytest.mark.parametrize(("dim", "value_dim"), [(32, 32), (16, 32), (64, 16)])
def test_packing_and_unpacking(dim, value_dim):
    # Not symmetric, as states are not to the last bit, nor their gradients.
    full = FullState(random(2, 3, dim, value_dim, dim), random(2, 3, dim, dim))
    for got, expected in zip(pack(full), from_full(*full, dim, value_dim), strict=True):
        assert_close(got, expected, 1e-6, "packed")
    packed = random(2, 3, symmetric_dim(dim, 2), value_dim), random(2, 3, symmetric_dim(dim, 2))
    # Keys and values of one dimension there.
    square = max(dim, value_dim)
    kv, normalizer = to_full(*packed, dim, square)
    found = unpack(*packed, dim)
    assert_close(found.kv, kv[:, :, :dim, :value_dim, :dim], 1e-6, "kv")
    assert_close(found.normalizer, normalizer[:, :, :dim, :dim], 1e-6, "normalizer")


@interpreted
def test_a_state_survives_a_message():
    packed = random(1, 2, symmetric_dim(32, 2), 32), random(1, 2, symmetric_dim(32, 2))
    for got, expected in zip(pack(unpack(*packed, 32)), packed, strict=True):
        assert_close(got, expected, 1e-6, "state")


@interpreted
def test_either_is_the_gradient_of_the_other():
    """Σ pack(S) · g = Σ S · unpack(g), the normaliser included."""
    full = FullState(random(1, 2, 16, 16, 16), random(1, 2, 16, 16))
    gradient = random(1, 2, symmetric_dim(16, 2), 16), random(1, 2, symmetric_dim(16, 2))
    sides = [
        sum((x.double() * y.double()).sum() for x, y in zip(*pair, strict=True))
        for pair in ((pack(full), gradient), (full, unpack(*gradient, 16)))
    ]
    assert_close(sides[0], sides[1], 1e-6, "inner product")
