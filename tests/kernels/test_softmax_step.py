"""A softmax step with a cache of fixed capacity, as a kernel and in plain PyTorch, against the full forward pass."""

import pytest
import torch

from support import assert_close, interpreted, random_inputs
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.torch.softmax import KeyValueState, PaddedKeyValueState, softmax_attention

PROMPT, LENGTH = 6, 17
CASES = [
    pytest.param("scale", "scalar", 1, id="conformal"),
    pytest.param("fixed", "none", 1, id="rotary"),
    pytest.param("none", "none", 3, id="plain-groups"),
    pytest.param("pairs", "scalar", 2, id="pairs-groups"),
    pytest.param("none", "vector", 1, id="vector-gate"),
]
BACKENDS = ["torch", pytest.param("triton", marks=interpreted)]


def inputs_of(rotation, gate, group, dtype, seed=0):
    return random_inputs(seed, batch=2, length=LENGTH, heads=2 * group, key_heads=2, dim=6, value_dim=5, gate=gate,
                         rotation=rotation, dtype=dtype)  # fmt: skip


def cache_of(inputs, prompt, capacity=LENGTH):
    _, state = softmax_attention(**inputs.time(0, prompt).arguments(), return_state=True)
    return KeyValueCache.open(state, capacity=capacity)


def step_through(cache, inputs, start, backend):
    tokens = range(start, inputs.q.shape[1])
    return torch.cat([cache.step(**inputs.time(i, i + 1).arguments(), backend=backend) for i in tokens], dim=1)


@pytest.mark.parametrize(("rotation", "gate", "group"), CASES)
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_steps_equal_the_whole(rotation, gate, group, prompt):
    inputs = inputs_of(rotation, gate, group, torch.float64)
    expected, after = softmax_attention(**inputs.arguments(), return_state=True)
    cache = cache_of(inputs, prompt, LENGTH + 5)
    assert_close(step_through(cache, inputs, prompt, "torch"), expected[:, prompt:], 1e-12, "y")
    found = cache.close()
    assert type(found) is KeyValueState
    for name in ("k", "v", "decay", "phase"):
        if getattr(after, name) is not None:
            assert_close(getattr(found, name), getattr(after, name), 1e-12, name)


@interpreted
@pytest.mark.parametrize(("rotation", "gate", "group"), CASES)
def test_the_kernel_equals_the_whole(rotation, gate, group):
    pytest.importorskip("triton", reason="needs Triton")
    inputs = inputs_of(rotation, gate, group, torch.float32)
    expected, after = softmax_attention(**inputs.map(torch.Tensor.double).arguments(), return_state=True)
    cache = cache_of(inputs, PROMPT, 300)  # two CTAs per head
    assert_close(step_through(cache, inputs, PROMPT, "triton"), expected[:, PROMPT:], 4e-6, "y")
    assert cache.count.eq(LENGTH).all()
    assert not cache.arrivals.any()
    found = cache.close()
    assert_close(found.k, after.k, 4e-6, "keys")
    assert torch.equal(found.v, inputs.v)


@interpreted
def test_the_kernel_across_its_parts_and_closed_gates():
    pytest.importorskip("triton", reason="needs Triton")
    inputs = random_inputs(3, batch=1, length=525, heads=1, dim=4, value_dim=4, dtype=torch.float32)
    inputs.log_gamma[:, [100, 258, 519]] = -torch.inf
    inputs.log_gamma.mul_(0.01)
    inputs.q[:, 510:] *= 30  # logits of several hundred: the maximum must be subtracted
    expected = softmax_attention(**inputs.map(torch.Tensor.double).arguments())
    start = 505
    cache = cache_of(inputs, start, 700)
    assert_close(step_through(cache, inputs, start, "triton"), expected[:, start:], 4e-5, "y")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_without_room_is_not_a_number(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="needs Triton")
    inputs = inputs_of("fixed", "none", 1, torch.float32)
    y = step_through(cache_of(inputs, PROMPT, LENGTH - 1), inputs, PROMPT, backend)
    assert y[:, :-1].isfinite().all()
    assert y[:, -1].isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotation", ["scale", "pairs"])
def test_a_step_without_room_changes_nothing(backend, rotation):
    """The full cache of one sequence stays unchanged, and the other sequence continues."""
    if backend == "triton":
        pytest.importorskip("triton", reason="needs Triton")
    inputs = inputs_of(rotation, "scalar", 1, torch.float32)
    cache = cache_of(inputs, PROMPT, PROMPT + 1)
    cache.count[0] = PROMPT + 1
    before = cache.clone()
    y = cache.step(**inputs.time(PROMPT, PROMPT + 1).arguments(), backend=backend)
    assert y[0].isnan().all()
    assert y[1].isfinite().all()
    for name in ("keys", "values", "decay", "count", "phase"):
        old, new = getattr(before, name), getattr(cache, name)
        assert torch.equal(new[0], old[0]), name
        assert not torch.equal(new[1], old[1]), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_sequences_of_different_lengths(backend):
    if backend == "triton":
        pytest.importorskip("triton", reason="needs Triton")
    dtype = torch.float32 if backend == "triton" else torch.float64
    tolerance = 4e-6 if backend == "triton" else 1e-12
    inputs = inputs_of("scale", "scalar", 1, dtype)
    first, second = (inputs.map(lambda t, i=i: t[i : i + 1] if t.ndim > 1 else t) for i in range(2))
    short = second.time(4)
    states = [
        softmax_attention(**x.time(0, stop).arguments(), return_state=True)[1] for x, stop in ((first, 6), (short, 2))
    ]
    joined = KeyValueState.cat(states)
    assert isinstance(joined, PaddedKeyValueState)
    cache = KeyValueCache.open(joined, capacity=LENGTH)
    y = step_through(cache, inputs, 6, backend)
    for row, x, start in ((0, first, 6), (1, short, 2)):
        expected = softmax_attention(**x.map(torch.Tensor.double).arguments())
        assert_close(y[row : row + 1], expected[:, start:], tolerance, f"sequence {row}")
    again = KeyValueCache.open(cache.close(), capacity=LENGTH)
    assert torch.equal(again.count, cache.count)


def test_mistakes_are_named():
    inputs = inputs_of("fixed", "none", 1, torch.float64)
    cache, token = cache_of(inputs, PROMPT), inputs.time(PROMPT, PROMPT + 1).arguments()
    with pytest.raises(ValueError, match="one token long"):
        cache.step(**inputs.time(0, 2).arguments())
    with pytest.raises(ValueError, match="theta: the cache was made with it, but is used without"):
        cache.step(**{**token, "theta": None})
    with pytest.raises(TypeError, match=r"v is in torch\.float32, but the cache holds torch\.float64"):
        cache.step(**inputs.map(torch.Tensor.float).time(0, 1).arguments())
    with pytest.raises(ValueError, match=r"k must have \(batch, heads, dim\) \(2, 2, 6\)"):
        cache.step(**inputs.map(lambda t: t[:1] if t.ndim > 1 else t).time(0, 1).arguments())
    with pytest.raises(ValueError, match="backend='triton' does not support"):
        cache.step(**token, backend="triton")
    with pytest.raises(ValueError, match="capacity must be at least 6"):
        cache_of(inputs, PROMPT, 5)
    with pytest.raises(TypeError, match="state must be a KeyValueState, got int"):
        KeyValueCache.open(3, capacity=5)
