"""Decoding with a window gives the result of every other form, for any capacity and number of tokens in it."""

from dataclasses import replace

import pytest
import torch
from torch.utils._pytree import tree_map

import sympow
from support import Inputs, assert_close, assert_states_close, random_inputs, run, run_reference
from sympow.ops import window as window_module
from sympow.ops.window import Window

PROMPT, LENGTH = 5, 16


def step_through(window: Window, inputs: Inputs, start: int, stop: int | None = None, **options) -> torch.Tensor:
    """Outputs of the tokens from `start` on, one step each."""
    stop = inputs.q.shape[1] if stop is None else stop
    return torch.cat([window.step(**inputs.time(i, i + 1).arguments(), **options) for i in range(start, stop)], dim=1)


def empty_window(inputs: Inputs, power: int, **options) -> Window:
    batch, _, heads, dim = inputs.k.shape
    options.setdefault("gate_per_pair", inputs.log_gamma is not None and inputs.log_gamma.ndim == 4)
    options.setdefault("dtype", inputs.q.dtype)
    rotated = inputs.theta is not None
    return Window.empty(batch, heads, dim, inputs.v.shape[3], power, rotated=rotated, **options)


def open_window(inputs: Inputs, power: int, prompt: int = PROMPT, **options) -> Window:
    """A window that starts from the state of the first tokens."""
    _, state = run(inputs.time(0, prompt), power, "chunked", return_state=True)
    options.setdefault("gate_per_pair", inputs.log_gamma is not None and inputs.log_gamma.ndim == 4)
    return Window.open(state, dtype=inputs.q.dtype, **options)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
@pytest.mark.parametrize("power", [2, 4])
def test_steps_behind_a_state_equal_the_reference(gate, rotation, power):
    inputs = random_inputs(0, batch=2, length=LENGTH, heads=4, key_heads=2, gate=gate, rotation=rotation)
    expected, after = run(inputs, power, "attention", return_state=True)
    assert_close(expected, run_reference(inputs, power), 1e-9, "reference")
    window = open_window(inputs, power, capacity=4)
    assert_close(step_through(window, inputs, PROMPT), expected[:, PROMPT:], 1e-9, "y")
    assert_states_close(window.close(), after, 1e-9)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("capacity", [1, 3, 64])
def test_steps_without_a_state_equal_the_reference(gate, capacity):
    inputs = random_inputs(1, length=LENGTH, heads=4, key_heads=2, gate=gate)
    expected, after = run(inputs, 4, "attention", return_state=True)
    window = empty_window(inputs, 4, capacity=capacity)
    assert_close(step_through(window, inputs, 0), expected, 1e-9, "y")
    assert (window.kv is None) == (capacity >= LENGTH)
    assert_states_close(window.close(), after, 1e-9)


def test_a_gate_per_pair_where_there_is_one_pair():
    inputs = random_inputs(18, length=LENGTH, dim=2, gate="vector")
    window = empty_window(inputs, 2, capacity=4)
    assert_close(step_through(window, inputs, 0), run(inputs, 2, "attention"), 1e-9, "y")


def test_a_prompt_can_be_kept_as_keys_and_values():
    inputs = random_inputs(2, length=LENGTH, heads=4, key_heads=2)
    expected = run(inputs, 4, "attention")
    window = empty_window(inputs, 4, capacity=PROMPT + 3)
    prompt = inputs.time(0, PROMPT).arguments()
    del prompt["q"]
    window.extend(**prompt)
    assert window.tokens == PROMPT
    assert_close(step_through(window, inputs, PROMPT), expected[:, PROMPT:], 1e-9, "y")
    with pytest.raises(ValueError, match="k holds 5 tokens, but the window has room for"):
        window.extend(**prompt)


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
@pytest.mark.parametrize("stop", [PROMPT, PROMPT + 2, PROMPT + 4, PROMPT + 7])
def test_a_window_closed_anywhere_is_a_state_like_any_other(form, stop):
    inputs = random_inputs(3, length=LENGTH)
    expected = run(inputs, 2, "attention")
    window = open_window(inputs, 2, capacity=4)
    if stop > PROMPT:
        step_through(window, inputs, PROMPT, stop)
    y = run(inputs.time(stop), 2, form, initial_state=window.close())
    assert_close(y, expected[:, stop:], 1e-9, "y")


def test_folds_may_come_at_any_moment():
    inputs = random_inputs(4, length=LENGTH)
    expected = run(inputs, 2, "attention")
    window = open_window(inputs, 2, capacity=8)
    window.fold()
    outputs = []
    for i in range(PROMPT, LENGTH):
        outputs.append(window.step(**inputs.time(i, i + 1).arguments()))
        if i % 3 == 0:
            window.fold()
            assert not window.count.any()
    assert_close(torch.cat(outputs, dim=1), expected[:, PROMPT:], 1e-9, "y")


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_closed_gates_zero_queries_and_zero_keys(gate):
    inputs = random_inputs(5, length=LENGTH, gate=gate)
    q, k, log_gamma = inputs.q.clone(), inputs.k.clone(), inputs.log_gamma.clone()
    q[:, 7], k[:, :3] = 0, 0
    log_gamma[:, [6, 9, 11]] = -torch.inf
    inputs = replace(inputs, q=q, k=k, log_gamma=log_gamma)
    expected, after = run(inputs, 2, "attention", return_state=True)
    window = open_window(inputs, 2, capacity=4)
    y = step_through(window, inputs, PROMPT)
    assert not y[:, 7 - PROMPT].any()
    assert_close(y, expected[:, PROMPT:], 1e-9, "y")
    assert_states_close(window.close(), after, 1e-9)
    window = empty_window(inputs, 2, capacity=64)
    y = step_through(window, inputs, 0)
    assert not y[:, :3].any()
    assert_close(y, expected, 1e-9, "y")


def test_a_query_across_all_keys_of_the_state_gets_the_window_alone():
    inputs = random_inputs(6, length=9, dim=4, rotation="none", gate="none", dtype=torch.float32)
    direction, across = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    inputs = replace(inputs, k=inputs.k[..., :1] * direction, q=inputs.q[..., :1] * across)
    window = open_window(inputs, 2, prompt=7)
    assert step_through(window, inputs, 7).abs().max() <= 2 * inputs.v.abs().max()


@pytest.mark.parametrize(("power", "key_scale"), [(2, 1e9), (4, 1e5), (4, 1e-5)])
def test_states_of_long_and_short_keys(power, key_scale):
    inputs = random_inputs(7, length=LENGTH, dim=8, dtype=torch.float32)
    inputs = replace(inputs, k=inputs.k * key_scale)
    expected = run(inputs.map(torch.Tensor.double), power, "attention")
    window = open_window(inputs, power, capacity=4)
    assert_close(step_through(window, inputs, PROMPT), expected[:, PROMPT:], 1e-5, "y")


@pytest.mark.parametrize("key_scale", [1e25, 1e-25])
def test_without_a_state_keys_may_have_any_length(key_scale):
    inputs = random_inputs(8, length=LENGTH, dim=8, dtype=torch.float32)
    inputs = replace(inputs, k=inputs.k * key_scale)
    expected = run(inputs.map(torch.Tensor.double), 4, "attention")
    window = empty_window(inputs, 4, capacity=64)
    assert_close(step_through(window, inputs, 0), expected, 1e-5, "y")


def test_what_is_given_is_copied_unless_asked_otherwise():
    inputs = random_inputs(9, length=LENGTH)
    _, state = run(inputs.time(0, PROMPT), 2, "chunked", return_state=True)
    before = state.clone()
    window = Window.open(state, capacity=4, dtype=torch.float64)
    step_through(window, inputs, PROMPT)
    window.close()
    assert torch.equal(state.kv, before.kv)
    assert torch.equal(state.phase, before.phase)
    window = Window.open(state, capacity=4, dtype=torch.float64, copy=False)
    step_through(window, inputs, PROMPT)
    assert window.close().kv.data_ptr() == state.kv.data_ptr()


def test_memory_stays_what_it_was():
    inputs = random_inputs(10, length=LENGTH)
    window = open_window(inputs, 2, capacity=4)
    tensors, size = window._tensors(), window.nbytes
    step_through(window, inputs, PROMPT)
    assert window.nbytes == size
    assert all(window._tensors()[name].data_ptr() == tensor.data_ptr() for name, tensor in tensors.items())


def test_copies_and_selections_go_their_own_ways():
    inputs = random_inputs(11, batch=2, length=LENGTH)
    expected = run(inputs, 2, "attention")
    window = open_window(inputs, 2, capacity=8)
    step_through(window, inputs, PROMPT, PROMPT + 3)
    swapped, copy = window.select(torch.tensor([1, 0])), window.clone()
    tail = expected[:, PROMPT + 3 :]
    assert_close(step_through(window, inputs, PROMPT + 3), tail, 1e-9, "y")
    assert_close(step_through(copy, inputs, PROMPT + 3), tail, 1e-9, "copy")
    flipped = replace(inputs.map(lambda t: t.flip(0) if t.ndim > 1 else t), theta=inputs.theta)
    assert_close(step_through(swapped, flipped, PROMPT + 3), tail.flip(0), 1e-9, "swapped")
    first = window.select(slice(0, 1))
    assert first.values.data_ptr() != window.values.data_ptr()
    assert tree_map(lambda t: t, window).tokens == window.tokens


def test_keys_in_half_precision():
    inputs = random_inputs(12, length=LENGTH).rounded(torch.bfloat16)
    expected = run(inputs.map(torch.Tensor.double), 2, "attention")
    window = empty_window(inputs, 2, capacity=64, key_dtype=torch.bfloat16)
    assert window.keys.dtype == window.values.dtype == torch.bfloat16
    assert_close(step_through(window, inputs, 0), expected, 0.05, "y")
    assert window.close().kv.dtype == torch.float32


def test_a_step_without_room_is_not_a_number(monkeypatch):
    monkeypatch.setattr(window_module, "_on_host", lambda: False)
    inputs = random_inputs(13, length=LENGTH)
    window = open_window(inputs, 2, capacity=4)
    y = step_through(window, inputs, PROMPT, PROMPT + 5)
    assert y[:, :4].isfinite().all()
    assert y[:, 4].isnan().all()
    window.fold()
    _, held = run(inputs.time(0, PROMPT + 4), 2, "attention", return_state=True)
    assert_close(window.kv, held.kv, 1e-9, "kv of the tokens that had room")
    assert step_through(window, inputs, PROMPT + 5, PROMPT + 6).isfinite().all()


def test_autocast_leaves_a_step_alone():
    inputs = random_inputs(14, length=LENGTH, dtype=torch.float32)
    window = open_window(inputs, 2, capacity=4)
    expected = step_through(window.clone(), inputs, PROMPT)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = step_through(window, inputs, PROMPT)
    assert torch.equal(actual, expected)


def test_a_compiled_step_is_one_graph():
    inputs = random_inputs(15, length=LENGTH)
    window = open_window(inputs, 2, capacity=4)
    expected = step_through(window.clone(), inputs, PROMPT, PROMPT + 3)
    compiled = torch.compile(lambda **token: window.step(**token), fullgraph=True, backend="aot_eager")
    actual = [compiled(**inputs.time(i, i + 1).arguments()) for i in range(PROMPT, PROMPT + 3)]
    assert_close(torch.cat(actual, dim=1), expected, 1e-12, "y")
    assert window.count.eq(3).all()


def test_mistakes_are_named():
    inputs = random_inputs(16, length=LENGTH, heads=2, key_heads=1)
    window = open_window(inputs, 2, capacity=4)
    token = inputs.time(PROMPT, PROMPT + 1)
    with pytest.raises(ValueError, match="one token long"):
        window.step(**inputs.time(PROMPT, PROMPT + 2).arguments())
    with pytest.raises(ValueError, match="theta: the window was made with rotation, but is used without"):
        window.step(**replace(token, theta=None, beta=None).arguments())
    with pytest.raises(ValueError, match="k has batch 2, but the window was made for 1"):
        window.step(**token.map(lambda t: torch.cat([t, t]) if t.ndim > 1 else t).arguments())
    with pytest.raises(ValueError, match="v has head dim"):
        window.step(**replace(token, v=token.v[..., :2]).arguments())
    with pytest.raises(TypeError, match=r"v is in torch\.float32"):
        window.step(**token.map(torch.Tensor.float).arguments())
    with pytest.raises(ValueError, match="log_gamma has a gate per rotated pair"):
        window.step(**replace(token, log_gamma=token.log_gamma.unsqueeze(-1).expand(1, 1, 1, 2)).arguments())
    with pytest.raises(ValueError, match="must not require gradients"):
        window.step(**token.requires_grad().arguments())
    with pytest.raises(ValueError, match="backend must be one of"):
        window.step(**token.arguments(), backend="cuda")
    with pytest.raises(TypeError, match=r"state must be a sympow\.State"):
        Window.open(window)
    with pytest.raises(ValueError, match="capacity must be at least 1"):
        empty_window(inputs, 2, capacity=0)
    with pytest.raises(ValueError, match="key_dim must be even"):
        Window.empty(1, 1, 3, 3, 2, rotated=True)
    with pytest.raises(TypeError, match="key_dtype must be one of"):
        empty_window(inputs, 2, key_dtype=torch.int32)
    assert window.count.eq(0).all()


def test_a_long_generation_reads_naturally():
    inputs = random_inputs(17, length=150, heads=2, key_heads=1, dim=4)
    expected, after = run(inputs, 2, "attention", return_state=True)
    y, state = sympow.attention(**inputs.time(0, 20).arguments(), return_state=True)
    window = Window.open(state, dtype=torch.float64)
    rest = step_through(window, inputs, 20)
    assert_close(torch.cat([y, rest], dim=1), expected, 1e-9, "y")
    assert_states_close(window.close(), after, 1e-9)


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("prompt", [0, PROMPT])
def test_many_tokens_are_read_at_once(gate, power, prompt):
    inputs = random_inputs(19, batch=2, length=LENGTH, heads=4, key_heads=2, gate=gate)
    expected, after = run(inputs, power, "attention", return_state=True)
    window = open_window(inputs, power, prompt, capacity=64) if prompt else empty_window(inputs, power, capacity=64)
    segments = [window.read(**inputs.time(i, i + 4).arguments()) for i in range(prompt, LENGTH, 4)]
    assert_close(torch.cat(segments, dim=1), expected[:, prompt:], 1e-9, "y")
    assert window.tokens == LENGTH - prompt
    before = window.clone()
    assert_states_close(window.folded(), after, 1e-9)
    assert torch.equal(window.count, before.count)
    with pytest.raises(ValueError, match="k holds 60 tokens, but the window has room for"):
        window.read(**random_inputs(0, batch=2, length=60, heads=4, key_heads=2, gate=gate).arguments())


def test_windows_of_different_fillings_stand_side_by_side():
    inputs = random_inputs(20, batch=2, length=LENGTH)
    expected, after = run(inputs, 2, "attention", return_state=True)
    parts = [inputs.map(lambda t, i=i: t[i : i + 1] if t.ndim > 1 else t) for i in range(2)]
    windows = [empty_window(part, 2, capacity=LENGTH) for part in parts]
    step_through(windows[0], parts[0], 0, 9)
    # The second starts in the middle of the sequence, so that it is another text.
    step_through(windows[1], parts[1], 6, 9)
    joined = Window.cat(windows).resized(LENGTH)
    assert joined.tokens == 9
    assert joined.count.tolist() == [[9, 9], [3, 3]]
    y = step_through(joined, inputs, 9)
    assert_close(y[:1], expected[:1, 9:], 1e-9, "first")
    later = run(parts[1].time(6), 2, "attention")
    assert_close(y[1:], later[:, 3:], 1e-9, "second")
    assert_close(joined.close().kv[:1], after.kv[:1], 1e-9, "kv")
    with pytest.raises(ValueError, match="capacity must be at least 9"):
        windows[0].resized(8)
    with pytest.raises(ValueError, match="windows to be joined must agree"):
        Window.cat([windows[0], open_window(parts[0], 2)])


@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
def test_sequences_join_and_leave_a_batch(gate):
    """Three sequences, put into rows of one batch at different moments; each is folded when it is full."""
    inputs = random_inputs(31, batch=3, length=LENGTH, heads=4, key_heads=2, gate=gate)
    expected = run(inputs, 2, "attention")
    alone = [inputs.map(lambda t, row=row: t if t.ndim == 1 else t[row : row + 1]) for row in range(3)]
    joins = (0, 2, 5)
    batch = open_window(inputs, 2, capacity=4)
    outputs: list[list[torch.Tensor]] = [[], [], []]
    for moment in range(LENGTH - PROMPT):
        for row, join in enumerate(joins):
            if moment == join:
                _, state = run(alone[row].time(0, PROMPT), 2, "chunked", return_state=True)
                batch.put(row, state)
        places = [PROMPT + moment - join if moment >= join else 0 for join in joins]
        batch.tokens = 0  # as after steps in a graph: who steps decides when to fold
        batch.fold(only_full=True)
        token = [one.time(place, place + 1) for one, place in zip(alone, places, strict=True)]
        arguments = {
            name: value if name == "theta" or value is None else torch.cat([getattr(t, name) for t in token])
            for name, value in inputs.arguments().items()
        }
        y = batch.step(**arguments)
        for row, join in enumerate(joins):
            if moment >= join:
                outputs[row].append(y[row])
    for row, join in enumerate(joins):
        stop = LENGTH - join
        assert_close(torch.cat(outputs[row]), expected[row, PROMPT:stop], 1e-9, f"y of row {row}")
        _, after = run(alone[row].time(0, stop), 2, "attention", return_state=True)
        assert_states_close(batch.take(row).close(), after, 1e-9)


def test_what_is_taken_is_put_back_bit_for_bit():
    inputs = random_inputs(32, batch=3, length=LENGTH, heads=4, key_heads=2)
    batch = open_window(inputs, 2, capacity=64)
    step_through(batch, inputs, PROMPT)
    before = batch.clone()
    taken = batch.take(1)
    batch.put(1, batch.take(2))
    assert not torch.equal(batch.kv[1], before.kv[1])
    batch.put(1, taken)
    for name, tensor in before._tensors().items():
        assert torch.equal(getattr(batch, name), tensor), name
    batch._rows(0, 1).fold()
    assert batch.count.tolist() == [[0, 0], [11, 11], [11, 11]]
    assert not torch.equal(batch.kv[0], before.kv[0])
    assert torch.equal(batch.kv[1:], before.kv[1:])


def test_a_row_after_one_that_was_not_finite():
    inputs = random_inputs(33, batch=2, length=LENGTH, heads=4, key_heads=2)
    batch = open_window(inputs, 2, capacity=64)
    expected = step_through(batch.clone(), inputs, PROMPT)
    fresh = batch.take(0)
    for tensor in (batch.keys, batch.values, batch.kv, batch.normalizer, batch.phase):
        tensor[0] = torch.nan
    batch.put(0, fresh)
    assert_close(step_through(batch, inputs, PROMPT), expected, 1e-12, "y")


def test_keys_and_values_alone_join_a_batch_with_states():
    inputs = random_inputs(34, batch=2, length=LENGTH, heads=4, key_heads=2)
    prompt = inputs.time(0, PROMPT).arguments()
    del prompt["q"]
    keys = empty_window(inputs, 2, capacity=PROMPT)
    keys.extend(**prompt)
    batch = open_window(inputs, 2, capacity=8)
    for row in range(2):
        batch.put(row, keys.take(row))
    assert_close(step_through(batch, inputs, PROMPT), run(inputs, 2, "attention")[:, PROMPT:], 1e-9, "y")


def test_mistakes_of_put_are_named():
    inputs = random_inputs(35, batch=2, length=LENGTH)
    batch = open_window(inputs, 2, capacity=8)
    with pytest.raises(ValueError, match="row must be between 0 and 1, got 2"):
        batch.put(2, batch.take(0))
    with pytest.raises(TypeError, match=r"sequence must be a sympow\.State or a Window, got Tensor"):
        batch.put(0, batch.keys)
    with pytest.raises(ValueError, match="got 2 of"):
        batch.put(0, batch.clone())
    with pytest.raises(ValueError, match="expected 1 of"):
        batch.put(0, open_window(random_inputs(36, length=LENGTH, dim=6), 2, capacity=8))
    with pytest.raises(ValueError, match="have no state where the window has none"):
        empty_window(inputs, 2, capacity=8).put(0, batch.take(0))
