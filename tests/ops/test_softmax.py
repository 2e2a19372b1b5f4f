import pytest
import torch
from torch.utils._pytree import tree_map

import sympow
from support import Inputs, assert_close, gradients, random_inputs
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.reference import rotation_matrix
from sympow.ops.torch import softmax
from sympow.ops.torch.softmax import softmax_attention


def expected_softmax(inputs: Inputs) -> torch.Tensor:
    """Softmax attention with decays and rotations from their definitions."""
    inputs = inputs.with_all_heads()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    length = q.shape[2]
    if inputs.theta is not None:
        beta = torch.ones(1, length, 1, 1, dtype=q.dtype) if inputs.beta is None else inputs.beta
        beta = beta.unsqueeze(-1) if beta.ndim == 3 else beta
        matrices = rotation_matrix((beta.cumsum(1) * inputs.theta).transpose(1, 2))
        q, k = (matrices @ q.unsqueeze(-1)).squeeze(-1), (matrices @ k.unsqueeze(-1)).squeeze(-1)
    logits = q @ k.mT / q.shape[-1] ** 0.5
    if inputs.log_gamma is not None:
        log_gamma = inputs.log_gamma if inputs.log_gamma.ndim == 3 else inputs.log_gamma.mean(-1)
        total = log_gamma.cumsum(1).transpose(1, 2)
        logits = logits + total.unsqueeze(-1) - total.unsqueeze(-2)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return (logits.masked_fill(future, float("-inf")).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
@pytest.mark.parametrize("rows", [4, 256])
def test_outputs_and_gradients_follow_the_definition(gate, rotation, rows, monkeypatch):
    monkeypatch.setattr(softmax, "ROWS", rows)
    inputs = random_inputs(0, batch=2, length=11, heads=4, key_heads=2, gate=gate, rotation=rotation).requires_grad()
    actual, expected = softmax_attention(**inputs.arguments()), expected_softmax(inputs)
    assert_close(actual, expected, 1e-12, "y")
    for got, want in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        assert_close(got, want, 1e-11, "gradient")


@pytest.mark.parametrize("gate", ["none", "scalar"])
@pytest.mark.parametrize("cut", [0, 1, 5, 10, 11])
def test_a_split_anywhere_equals_one_pass(gate, cut):
    inputs = random_inputs(1, length=11, heads=4, key_heads=2, gate=gate)
    expected = softmax_attention(**inputs.arguments())
    head, state = softmax_attention(**inputs.time(0, cut).arguments(), return_state=True)
    tail, state = softmax_attention(**inputs.time(cut).arguments(), initial_state=state, return_state=True)
    assert_close(torch.cat([head, tail], dim=1), expected, 1e-12, "y")
    assert state.length == 11
    assert state.nbytes > 0


def test_packed_documents_equal_separate_calls():
    inputs = random_inputs(2, length=11)
    y = softmax_attention(**inputs.arguments(), cu_seqlens=torch.tensor([0, 3, 11]))
    for start, stop in ((0, 3), (3, 11)):
        expected = softmax_attention(**inputs.time(start, stop).arguments())
        assert_close(y[:, start:stop], expected, 1e-12, "document")


def test_a_closed_gate_erases_the_past():
    inputs = random_inputs(3, length=9)
    inputs.log_gamma[:, 5] = -torch.inf
    y = softmax_attention(**inputs.arguments())
    assert_close(y[:, 5:], softmax_attention(**inputs.time(5).arguments()), 1e-12, "y")


def test_a_closed_gate_hides_even_the_largest_logits():
    q = torch.full((1, 4, 1, 4), 60.0)
    k = torch.tensor([60.0, 60.0, 0.1, 0.1]).reshape(1, 4, 1, 1).expand(1, 4, 1, 4)
    v = torch.arange(4.0).reshape(1, 4, 1, 1)
    log_gamma = torch.zeros(1, 4, 1)
    log_gamma[:, 2] = -torch.inf
    y = softmax_attention(q, k, v, log_gamma=log_gamma)
    assert_close(y.flatten(), torch.tensor([0.0, 0.5, 2.0, 2.5]), 1e-6, "y")


def test_a_cache_is_a_record_like_a_state():
    inputs = random_inputs(5, batch=2, length=4)
    _, cache = softmax_attention(**inputs.arguments(), return_state=True)
    swapped = cache.select(torch.tensor([1, 0]))
    assert torch.equal(swapped.k[0], cache.k[1])
    assert torch.equal(swapped.phase[1], cache.phase[0])
    doubled = tree_map(lambda t: 2 * t, cache)
    assert torch.equal(doubled.v, 2 * cache.v)
    assert cache.clone().nbytes == cache.nbytes


def test_equal_vector_gates_are_a_scalar_gate_as_in_sympow():
    inputs = random_inputs(4, length=9)
    vector = inputs.log_gamma.unsqueeze(-1).expand(1, 9, 2, 2)
    for function in (softmax_attention, sympow.attention):
        scalar = function(**inputs.arguments())
        assert_close(function(**{**inputs.arguments(), "log_gamma": vector}), scalar, 1e-12, function.__name__)


def test_sequences_join_a_batch_of_caches():
    """Three of other lengths are put into a batch whose second row held NaN; the first one moves to the last row."""
    inputs = [random_inputs(40 + n, length=3 + n, heads=4, key_heads=2) for n in range(3)]
    states = [softmax_attention(**x.time(0, 2 + n).arguments(), return_state=True)[1] for n, x in enumerate(inputs)]
    expected = [softmax_attention(**x.arguments())[:, -1:] for x in inputs]
    batch = KeyValueCache.open(type(states[0]).cat([states[0]] * 3), capacity=6)
    batch.keys[1], batch.values[1], batch.decay[1] = (torch.nan,) * 3
    for row, state in enumerate([states[0], states[1], states[0]]):
        batch.put(row, state)
    batch.put(0, KeyValueCache.open(states[2], capacity=9))
    batch.put(2, batch._rows(2, 3))
    order = (2, 1, 0)
    for row, n in enumerate(order):
        y = batch._rows(row, row + 1).step(**inputs[n].time(2 + n).arguments())
        assert_close(y, expected[n], 1e-9, f"y of row {row}")
    assert batch.count[:, 0].tolist() == [5, 4, 3]


def test_mistakes_of_putting_a_cache_are_named():
    inputs = random_inputs(45, length=4)
    _, state = softmax_attention(**inputs.arguments(), return_state=True)
    cache = KeyValueCache.open(state, capacity=4)
    with pytest.raises(ValueError, match="row must be between 0 and 0, got 1"):
        cache.put(1, state)
    _, longer = softmax_attention(**random_inputs(46, length=5).arguments(), return_state=True)
    with pytest.raises(ValueError, match="sequence has 5 tokens, more than the capacity of 4"):
        cache.put(0, longer)
    _, other = softmax_attention(**random_inputs(47, length=4, dim=6).arguments(), return_state=True)
    with pytest.raises(ValueError, match="agree with the cache"):
        cache.put(0, other)
    with pytest.raises(TypeError, match="sequence must be a KeyValueState or a KeyValueCache, got dict"):
        cache.put(0, {})


@pytest.mark.parametrize("value_dim", [1, 2])
def test_values_of_another_dimension_are_refused_before_a_cache_changes(value_dim):
    """Values of one entry were repeated over all entries of the cache's."""
    inputs = random_inputs(48, length=4)
    _, state = softmax_attention(**inputs.time(0, 3).arguments(), return_state=True)
    cache = KeyValueCache.open(state, capacity=4)
    token = inputs.time(3).arguments()
    with pytest.raises(ValueError, match=f"v has head dim {value_dim}, but the cache was made for 3"):
        cache.step(**{**token, "v": token["v"][..., :value_dim]})
    assert_close(cache.step(**token), softmax_attention(**inputs.arguments())[:, -1:], 1e-9, "y")
