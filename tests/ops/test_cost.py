"""The cost model: its counts are those of PyTorch, and its choices are the cheapest by its count."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sympow
from sympow.ops.cost import (
    CPU,
    GPU,
    LARGEST_CHUNK,
    SMALLEST_CHUNK,
    Workload,
    attention_cost,
    best_chunk_size,
    cheaper_form,
    chunked_cost,
    crossover_length,
)
from sympow.ops.torch import forms as portable
from sympow.ops.torch import products as blocks


def counted_operations(work: Workload, form: str, chunk_size: int | None = None) -> int:
    """FLOPs of matrix products in a call, as PyTorch counts them."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, work.length, work.group, work.key_dim, generator=generator)
    k = torch.randn(1, work.length, 1, work.key_dim, generator=generator)
    v = torch.randn(1, work.length, 1, work.value_dim, generator=generator)
    state = None
    if work.initial_state:
        state = sympow.State.zeros(1, 1, work.key_dim, work.value_dim, work.power, rotated=False)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        sympow.attention(q, k, v, work.power, form=form, chunk_size=chunk_size, initial_state=state,
                         return_state=work.return_state)  # fmt: skip
    return counter.get_total_flops()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize(("initial", "returned"), [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("chunk_size", [None, 124, pytest.param(64, marks=pytest.mark.slow)])
def test_operations_are_those_pytorch_counts(group, initial, returned, chunk_size, monkeypatch):
    # Small tiles, so that the half of a diagonal tile that is masked stays small beside the rest.
    monkeypatch.setattr(blocks, "MAX_ROWS", 4)
    monkeypatch.setattr(blocks, "DIAGONAL_ROWS", 4)
    work = Workload(250, 16, 48, 2, group, initial_state=initial, return_state=returned)
    if chunk_size is None:
        expected, counted = attention_cost(work), counted_operations(work, "attention")
    else:
        expected, counted = chunked_cost(work, chunk_size), counted_operations(work, "chunked", chunk_size)
    # The sum of weights is not a matrix product, so PyTorch does not count it: 1 of every e + 1 columns.
    assert counted == pytest.approx(expected.operations, rel=0.08)


@pytest.mark.parametrize("machine", [CPU, GPU])
@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("length", [1, 100, 5_000, 100_000])
def test_the_chosen_chunk_is_the_cheapest(machine, dim, length):
    work = Workload(length, dim, dim, 2, parallel=4)
    chosen = best_chunk_size(work, machine)
    assert SMALLEST_CHUNK <= chosen <= LARGEST_CHUNK
    for other in (64, 128, 256, 512, 1024, 2048, 4096, 65_536):
        assert chunked_cost(work, chosen).on(machine) <= chunked_cost(work, other).on(machine)


def test_the_choice_of_form_follows_the_costs():
    for length in (64, 512, 1_000, 2_000, 4_000, 8_000, 100_000):
        work = Workload(length, 32, 32, 2, parallel=4)
        chunked = chunked_cost(work, best_chunk_size(work, CPU)).on(CPU)
        expected = "chunked" if chunked < attention_cost(work).on(CPU) else "attention"
        assert cheaper_form(work, CPU) == expected
    assert cheaper_form(Workload(64, 32, 32, 2, parallel=4), CPU) == "attention"
    assert cheaper_form(Workload(100_000, 32, 32, 2, parallel=4), CPU) == "chunked"


def test_a_large_state_asks_for_a_longer_context():
    assert cheaper_form(Workload(30_000, 64, 64, 2), CPU) == "chunked"
    assert cheaper_form(Workload(30_000, 64, 64, 4), CPU) == "attention"


def test_crossover_is_where_operations_balance():
    length = crossover_length(64, 64, 2)
    assert length == 4_192
    per_token = 2 * 2 * 2080 * 65
    assert length * 129 == pytest.approx(per_token, rel=1e-3)
    assert crossover_length(64, 64, 2, group=4) < length


@pytest.mark.parametrize(("length", "form"), [(100, "attention"), (20_000, "chunked")])
def test_auto_runs_the_form_the_model_chose(length, form, monkeypatch):
    sizes = []
    original = portable.chunked_form

    def spy(sequence, state, return_state, chunk_size, needs_grad):
        sizes.append(chunk_size)
        return original(sequence, state, return_state, chunk_size, needs_grad)

    monkeypatch.setattr(portable, "chunked_form", spy)
    q, k, v = torch.randn(3, 1, length, 1, 4)
    y = sympow.attention(q, k, v)
    assert (sizes[0] is not None) == (form == "chunked")
    assert torch.equal(y, sympow.attention(q, k, v, form=form))


def test_a_chunk_size_means_chunked(monkeypatch):
    q, k, v = torch.randn(3, 1, 40, 1, 4)
    assert torch.equal(sympow.attention(q, k, v, chunk_size=8), sympow.attention(q, k, v, form="chunked", chunk_size=8))
