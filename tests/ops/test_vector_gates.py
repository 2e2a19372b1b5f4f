"""One gate per rotated pair: correct at all boundaries of tiles, with few operations."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from benchmarks.peak_memory import PeakMemory
from torch.utils._python_dispatch import TorchDispatchMode

import sympow
from support import Inputs, assert_close, gradients, random_inputs, run
from sympow.ops import reference
from sympow.ops.torch import products as blocks


def inputs_with_closed_gates(length: int, seed: int) -> Inputs:
    """Two query heads per key head; one gate in ten is exactly 0, and so are all gates of one token in twenty."""
    inputs = random_inputs(seed, length=length, heads=4, key_heads=2, gate="vector", rotation="none")
    generator = torch.Generator().manual_seed(seed)
    closed = torch.rand(inputs.log_gamma.shape, generator=generator) < 0.1
    closed |= torch.rand(1, length, 1, 1, generator=generator) < 0.05
    return replace(inputs, log_gamma=inputs.log_gamma.masked_fill(closed, -torch.inf))


@pytest.mark.parametrize(
    ("power", "length"),
    [
        *((2, length) for length in (1, 8, 9, 16, 17, 256, 300)),
        *((4, length) for length in (1, 9, 40)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 7), (2, 15), (2, 255), (2, 257), (4, 17))),
    ],
)
def test_outputs_and_gradients_at_the_borders_of_tiles(power, length):
    """Compares with the recurrence of the reference, from a state, with closed gates."""
    inputs = inputs_with_closed_gates(length, seed=length).requires_grad()
    generator = torch.Generator().manual_seed(length)
    # The state of 3 tokens, since not every tensor is a possible state.
    keys = reference.phi(1 + 0.4 * torch.randn(1, 2, 3, 4, generator=generator, dtype=torch.float64), power)
    values = torch.randn(1, 2, 3, 3, generator=generator, dtype=torch.float64)
    kv, normalizer = (x.requires_grad_() for x in (keys.mT @ values, keys.sum(2)))

    repeated = [x.repeat_interleave(2, dim=1) for x in (kv.mT, normalizer)]
    expected, _ = reference.recurrent(
        **inputs.with_all_heads().arguments(), power=power, initial=(*repeated, torch.zeros(()))
    )
    state = sympow.State(kv, normalizer, None, power=power, key_dim=4)
    actual = run(inputs, power, "attention", initial_state=state)
    assert_close(actual, expected, 1e-9, "y")

    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    wanted, got = (torch.autograd.grad(y, [*inputs.tensors(), kv, normalizer], weights) for y in (expected, actual))
    for name, a, b in zip(("q", "k", "v", "log_gamma", "kv", "normalizer"), got, wanted, strict=True):
        assert_close(a, b, 1e-9, f"gradient of {name}")


class CountedOperations(TorchDispatchMode):
    """Counts the operators that PyTorch dispatches while active."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(length: int) -> int:
    inputs = random_inputs(0, length=length, gate="vector", dtype=torch.float32).requires_grad()
    with CountedOperations() as counted:
        gradients(run(inputs, 2, "attention"), inputs)
    return counted.count


def test_operations_grow_with_the_logarithm_of_the_length(monkeypatch):
    monkeypatch.setattr(blocks, "CACHED_SCORES_PER_THREAD", 1 << 24)  # all tiles of a size are one block
    counts = [operations(length) for length in (256, 512, 1024, 2048)]
    steps = [after - before for before, after in pairwise(counts)]
    assert steps[0] < counts[0] / 4
    assert steps == [steps[0]] * 3  # the same number for every doubling


def peak_of_training(length: int) -> PeakMemory:
    inputs = random_inputs(0, length=length, dim=16, gate="vector", dtype=torch.float32).requires_grad()
    with PeakMemory() as memory:
        gradients(run(inputs, 2, "attention"), inputs)
    return memory


def test_no_tensor_outgrows_a_block(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1 << 16)
    whole = 2 * 512 * 512 * 4
    assert peak_of_training(512).largest <= 4 * blocks.BLOCK_ELEMENTS < whole / 4


def test_training_memory_grows_linearly(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_ELEMENTS", 1 << 14)
    assert peak_of_training(1024).peak <= 2.2 * peak_of_training(512).peak
