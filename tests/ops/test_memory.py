"""Peak memory of the forms: never all scores or all features at once."""

import pytest
import torch
from benchmarks.peak_memory import PeakMemory

import sympow


def inputs(length: int, grad: bool = False):
    q, k, v = (torch.randn(1, length, 2, 16, requires_grad=grad) for _ in range(3))
    log_gamma = torch.full((1, length, 2), -0.01, requires_grad=grad)
    beta = torch.ones(1, length, 2, requires_grad=grad)
    return {"q": q, "k": k, "v": v, "log_gamma": log_gamma, "beta": beta, "theta": sympow.rotary_rates(16, 1000)}


def peak_of_forward(length: int, **options) -> tuple[int, int]:
    arguments = inputs(length)
    with torch.no_grad():
        sympow.attention(**arguments, **options)  # tables that are cached
        with PeakMemory() as memory:
            y = sympow.attention(**arguments, **options)
    return memory.peak - y.nbytes, memory.largest


def test_the_peak_of_the_chunked_form_does_not_grow_with_length():
    options = {"form": "chunked", "chunk_size": 256}
    peaks = [peak_of_forward(length, **options)[0] for length in (1024, 4096, 16_384)]
    assert peaks[1] == peaks[0]
    assert peaks[2] == peaks[0]


def test_the_attention_form_never_holds_all_scores():
    length = 4096
    all_scores = 2 * length * length * 4
    peak, _ = peak_of_forward(length, form="attention")
    assert peak < all_scores / 4


@pytest.mark.parametrize(("form", "chunk_size"), [("attention", None), ("chunked", 256)])
def test_training_memory_grows_linearly(form, chunk_size):
    """Twice the length, about twice the memory: neither scores nor features are kept for the backward pass."""
    peaks = []
    for length in (2048, 4096):
        arguments = inputs(length, grad=True)
        with PeakMemory() as memory:
            sympow.attention(**arguments, form=form, chunk_size=chunk_size).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] <= 2.2 * peaks[0]


def test_peak_memory_counts_what_lives():
    outside = torch.ones(10)
    with PeakMemory() as memory:
        a = torch.ones(1000)
        b = a + 1
        assert (memory.now, memory.peak) == (8000, 8000)
        view = b.view(10, 100)
        del a, b
        assert memory.now == 4000
        del view
        outside.mul_(2)
        assert memory.now == 0
    assert memory.peak == 8000
    assert memory.largest == 4000
