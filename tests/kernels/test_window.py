"""The window's kernels against float64, in float32 in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from support import Inputs, assert_close, assert_states_close, interpreted, random_inputs, run

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.decode.gate_projection import step_gates
from sympow.kernels.decode.reference import state_copy_reference
from sympow.ops import window as window_module
from sympow.ops.window import Window

pytestmark = interpreted
PROMPT = 6


def step_through(window: Window, inputs: Inputs, start: int, backend: str = "triton") -> torch.Tensor:
    tokens = range(start, inputs.q.shape[1])
    return torch.cat([window.step(**inputs.time(i, i + 1).arguments(), backend=backend) for i in tokens], dim=1)


def exact(inputs: Inputs, power: int):
    return run(inputs.map(torch.Tensor.double), power, "attention", backend="torch", return_state=True)


def open_window(inputs: Inputs, power: int, capacity: int) -> Window:
    _, state = run(inputs.time(0, PROMPT), power, "chunked", backend="torch", return_state=True)
    return Window.open(state, capacity=capacity)


@pytest.mark.parametrize(
    ("power", "rotation", "gate", "group"),
    [
        (2, "scale", "scalar", 1),
        pytest.param(2, "none", "none", 2, marks=pytest.mark.slow),
        (2, "pairs", "scalar", 3),
        (4, "fixed", "scalar", 1),
        pytest.param(4, "scale", "none", 2, marks=pytest.mark.slow),
        pytest.param(4, "none", "scalar", 1, marks=pytest.mark.slow),
    ],
)
def test_steps_and_folds_behind_a_state(power, rotation, gate, group):
    dim = 5 if rotation == "none" else 6
    inputs = random_inputs(0, batch=2, length=15, heads=2 * group, key_heads=2, dim=dim, value_dim=5, gate=gate,
                           rotation=rotation, dtype=torch.float32)  # fmt: skip
    expected, after = exact(inputs, power)
    window = open_window(inputs, power, 4)
    assert_close(step_through(window, inputs, PROMPT), expected[:, PROMPT:], 5e-6, "y")
    assert not window.arrivals.any()
    assert_states_close(window.close("triton"), after, 5e-6)


@pytest.mark.parametrize("power", [2, 6])
def test_steps_without_a_state_until_the_first_fold(power):
    inputs = random_inputs(1, batch=2, length=14, heads=2, dim=4, value_dim=3, dtype=torch.float32)
    expected, after = exact(inputs, power)
    window = Window.empty(2, 2, 4, 3, power, rotated=True, capacity=12)
    y = step_through(window, inputs, 0)
    assert_close(y, expected, 5e-6, "y")
    assert window.kv is not None
    assert_states_close(window.close("triton"), after, 5e-6)


def test_several_programs_share_a_state_and_a_window(monkeypatch):
    from sympow.kernels.decode import window_step as kernels

    monkeypatch.setattr(kernels, "MIN_KEYS_PER_SPLIT", 32)
    splits = kernels.split_window(1, 528, 8, 1, 50, has_state=True)
    assert (splits.state_splits, splits.window_splits) == (9, 2)
    inputs = random_inputs(2, length=50, heads=1, dim=32, value_dim=8, dtype=torch.float32)
    expected, _ = exact(inputs, 2)
    for start, window in (
        (PROMPT, open_window(inputs, 2, 50)),
        (0, Window.empty(1, 1, 32, 8, 2, rotated=True, capacity=50)),
    ):
        middle = inputs.time(start, 45).arguments()
        del middle["q"]
        window.extend(**middle)
        assert_close(step_through(window, inputs, 45), expected[:, 45:], 5e-6, f"from {start}")


def test_rows_split_their_sums_as_the_whole_batch_does(monkeypatch):
    """Bit for bit the outputs of the whole batch, for which fewer CTAs share a head than for two rows alone."""
    from sympow.kernels.decode import window_step as kernels
    from sympow.serving.engine.slots import SlotWindow

    split_window = kernels.split_window
    monkeypatch.setattr(kernels, "split_window", lambda *a, **k: split_window(*a, **(k | {"programs": 8})))
    inputs = random_inputs(22, batch=4, length=PROMPT + 2, heads=1, dim=24, value_dim=24, dtype=torch.float32)
    whole = SlotWindow(**open_window(inputs, 2, 4)._members())
    some = SlotWindow(**whole.clone()._members())._rows(0, 2)
    expected = step_through(whole, inputs, PROMPT)
    rows = inputs.map(lambda t: t if t.ndim == 1 else t[:2])
    splits = [split_window(batch, 300, 24, 1, 4, has_state=True, programs=8).state_splits for batch in (2, 4)]
    assert splits[0] > splits[1] > 1
    assert torch.equal(step_through(some, rows, PROMPT), expected[:2])


def test_rows_share_the_copy_of_the_state_and_whoever_joins_renews_it(monkeypatch):
    monkeypatch.setattr(window_module, "COPY_DTYPES", (torch.float32,))
    inputs = random_inputs(23, batch=3, length=12, heads=2, dim=4, value_dim=3, dtype=torch.float32)
    window = open_window(inputs, 2, 4)
    window._ensure_copy()
    some = window._rows(0, 2)
    step_through(some, inputs.time(0, 10).map(lambda t: t if t.ndim == 1 else t[:2]), PROMPT)
    some.fold("triton", only_full=True)
    window.put(2, window.take(0))
    window.put(1, open_window(random_inputs(24, length=9, heads=2, dim=4, value_dim=3, dtype=torch.float32), 2, 4))
    fresh = replace(window, kv_half=None, kv_scale=None)
    fresh._ensure_copy()
    assert some.kv_half.data_ptr() == window.kv_half.data_ptr()
    assert torch.equal(window.kv_half, fresh.kv_half)
    assert torch.equal(window.kv_scale, fresh.kv_scale)


def test_only_full_sequences_are_folded():
    inputs = random_inputs(21, batch=3, length=10, heads=2, dim=4, value_dim=3, dtype=torch.float32)
    window = open_window(inputs, 2, 4)
    step_through(window, inputs, PROMPT)
    window.count[1] = 2
    before, all_folded = window.clone(), window.clone()
    all_folded.fold("triton")
    window.fold("triton", only_full=True)
    assert window.count.tolist() == [[0, 0], [2, 2], [0, 0]]
    assert not window.arrivals.any()
    for name in ("kv", "normalizer"):
        after, was, folded = (getattr(x, name) for x in (window, before, all_folded))
        assert torch.equal(after[1], was[1])
        assert torch.equal(after[::2], folded[::2])
        assert not torch.equal(after[0], was[0])


def test_closed_gates_zero_queries_and_zero_keys():
    inputs = random_inputs(3, length=20, heads=2, dim=8, value_dim=8, dtype=torch.float32)
    q, k, log_gamma = inputs.q.clone(), inputs.k.clone(), inputs.log_gamma.clone()
    q[:, 9], k[:, :3] = 0, 0
    log_gamma[:, [8, 12, 15]] = -torch.inf
    inputs = replace(inputs, q=q, k=k, log_gamma=log_gamma)
    expected, after = exact(inputs, 2)
    window = open_window(inputs, 2, 5)
    y = step_through(window, inputs, PROMPT)
    assert not y[:, 9 - PROMPT].any()
    assert_close(y, expected[:, PROMPT:], 5e-6, "y")
    assert_states_close(window.close("triton"), after, 5e-6)
    y = step_through(Window.empty(1, 2, 8, 8, 2, rotated=True), inputs, 0)
    assert not y[:, :3].any()
    assert_close(y, expected, 5e-6, "y")


@pytest.mark.parametrize("key_dtype", [torch.float64, torch.bfloat16])
def test_keys_of_other_dtypes(key_dtype):
    inputs = random_inputs(10, length=9, dim=8, value_dim=5, dtype=torch.float32)
    expected, after = exact(inputs, 2)
    window = Window.empty(1, 2, 8, 5, 2, rotated=True, capacity=4, key_dtype=key_dtype)
    tolerance = 5e-6 if key_dtype == torch.float64 else 0.08
    assert_close(step_through(window, inputs, 0), expected, tolerance, "y")
    assert_states_close(window.close("triton"), after, tolerance)


def test_heads_of_one_entry():
    inputs = random_inputs(11, length=9, dim=1, value_dim=1, rotation="none", dtype=torch.float32)
    expected, after = exact(inputs, 2)
    window = Window.empty(1, 2, 1, 1, 2, rotated=False, capacity=4)
    assert_close(step_through(window, inputs, 0), expected, 5e-6, "y")
    assert_states_close(window.close("triton"), after, 5e-6)


def test_portable_and_fused_steps_take_turns():
    inputs = random_inputs(4, length=24, heads=2, key_heads=1, dim=8, dtype=torch.float32)
    expected, after = exact(inputs, 2)
    window = open_window(inputs, 2, 5)
    outputs = [
        window.step(**inputs.time(i, i + 1).arguments(), backend="triton" if i % 2 else "torch")
        for i in range(PROMPT, 24)
    ]
    assert_close(torch.cat(outputs, dim=1), expected[:, PROMPT:], 5e-6, "y")
    assert_states_close(window.close(), after, 5e-6)


def test_a_token_that_nothing_answers_to():
    inputs = random_inputs(5, length=9, dim=4, rotation="none", gate="none", dtype=torch.float32)
    direction, across = torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([1.0, -1.0, 1.0, -1.0])
    inputs = replace(inputs, k=inputs.k[..., :1] * direction, q=inputs.q[..., :1] * across)
    window = open_window(inputs, 2, 4)
    assert step_through(window, inputs, PROMPT).abs().max() <= 2 * inputs.v.abs().max()


def test_a_step_without_room_is_not_a_number(monkeypatch):
    monkeypatch.setattr(window_module, "_on_host", lambda: False)
    inputs = random_inputs(6, length=PROMPT + 6, dtype=torch.float32)
    window = open_window(inputs, 2, 4)
    y = step_through(window, inputs, PROMPT)
    assert y[:, :4].isfinite().all()
    assert y[:, 4:].isnan().all()
    window.fold("triton")
    _, held = exact(inputs.time(0, PROMPT + 4), 2)
    assert_close(window.kv, held.kv, 5e-6, "kv of the tokens that had room")
    assert window.step(**inputs.time(0, 1).arguments(), backend="triton").isfinite().all()
    with pytest.raises(ValueError, match="first state cannot be made"):
        Window.empty(1, 2, 4, 3, 2, rotated=True).fold("triton")


def test_a_gate_per_pair_is_not_for_the_kernels():
    window = Window.empty(1, 2, 4, 3, 2, rotated=True, gate_per_pair=True)
    inputs = random_inputs(7, length=1, gate="vector", dtype=torch.float32)
    with pytest.raises(ValueError, match="one gate per head"):
        window.step(**inputs.arguments(), backend="triton")


def test_operators_pass_pytorchs_own_checks():
    from sympow.kernels.decode import op as window_op

    inputs = random_inputs(8, length=9, heads=2, key_heads=1, dim=4, dtype=torch.float32)
    window = open_window(inputs, 2, 4)
    step_through(window, inputs.time(0, 8), PROMPT)
    token = [t.squeeze(1) for t in inputs.time(8).tensors()[:-1]]
    tables = window._feature_tables()
    held = (window.keys, window.values, window.decay, window.count)
    torch.library.opcheck(
        window_op.fused_window_step.op,
        (*token, inputs.theta, window.kv, window.normalizer, None, *held, window.phase, window.arrivals,
         window.workspace, *tables, 2, 3),
    )  # fmt: skip
    torch.library.opcheck(
        window_op.fused_fold.op, (window.kv, window.normalizer, None, None, *held, window.arrivals, *tables)
    )


def test_compiled_steps_and_folds_are_one_graph_each():
    inputs = random_inputs(9, length=PROMPT + 5, dtype=torch.float32)
    expected, after = exact(inputs, 2)
    window = open_window(inputs, 2, 8)
    first = window.step(**inputs.time(PROMPT, PROMPT + 1).arguments(), backend="triton")
    step = torch.compile(lambda **x: window.step(**x, backend="triton"), fullgraph=True, backend="aot_eager")
    fold = torch.compile(lambda: window.fold("triton"), fullgraph=True, backend="aot_eager")
    rest = [step(**inputs.time(i, i + 1).arguments()) for i in range(PROMPT + 1, PROMPT + 5)]
    assert_close(torch.cat([first, *rest], dim=1), expected[:, PROMPT:], 5e-6, "y")
    fold()
    assert not window.count.any()
    assert_states_close(window.close("triton"), after, 5e-6)


def test_steps_bypass_the_dispatcher_unless_they_are_watched():
    inputs = random_inputs(9, length=PROMPT + 3, dtype=torch.float32)
    window = open_window(inputs, 2, 8)
    graphs = []

    def step(token):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            window.step(**inputs.time(token, token + 1).arguments(), backend="triton")
        return {event.name for event in profiler.events() if event.name.startswith("sympow::")}

    assert not step(PROMPT)
    with FlopCounterMode(display=False):
        assert step(PROMPT + 1) == {"sympow::window_step"}

    def record(graph, _):
        graphs.append(graph)
        return graph

    torch.compile(lambda **x: window.step(**x, backend="triton"), fullgraph=True, backend=record)(
        **inputs.time(PROMPT + 2, PROMPT + 3).arguments()
    )
    assert "sympow.window_step" in graphs[0].code
    with FakeTensorMode():
        x, weight, bias = torch.empty(3, 16), torch.empty(4, 16), torch.empty(4)
        log_gamma, beta = step_gates(x, weight, bias, None)
    assert (log_gamma.shape, beta.shape) == ((3, 4), (3, 0))


# The 16-bit copy of the state -----------------------------------------------------------------------------------------


@pytest.fixture
def copies(monkeypatch):
    """Steps with float32 inputs, which the interpreter is limited to, read a copy of the state, too."""
    monkeypatch.setattr(window_module, "COPY_DTYPES", (torch.float32,))


def assert_copy_of_kv(window: Window) -> None:
    copy, scale = state_copy_reference(window.kv)
    assert copy.any()
    assert torch.equal(window.kv_half.float() * window.kv_scale.unsqueeze(-1), copy.float() * scale.unsqueeze(-1))


def inputs_of_a_copy(seed: int, group: int = 1, **options) -> Inputs:
    return random_inputs(seed, batch=2, length=PROMPT + 9, heads=group, key_heads=1, dim=16, value_dim=8,
                         dtype=torch.float32, **options)  # fmt: skip


@pytest.mark.parametrize("group", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_outputs_in_bfloat16_are_as_good_from_the_copy_as_from_the_state(group, copies, monkeypatch):
    inputs = inputs_of_a_copy(12, group)
    expected, _ = exact(inputs, 2)
    errors, outputs, states = [], [], []
    for dtypes in ((torch.float32,), ()):
        monkeypatch.setattr(window_module, "COPY_DTYPES", dtypes)
        window = open_window(inputs, 2, 4)
        y = step_through(window, inputs, PROMPT)
        assert (window.kv_half is not None) == bool(dtypes)
        errors.append((y.bfloat16().double() - expected[:, PROMPT:]).norm(dim=-1))
        outputs.append(y)
        states.append(window.close("triton").kv)
    assert torch.equal(*states), "folds do not read the copy"
    assert not torch.equal(*outputs)
    assert (errors[0] <= 2 * errors[1]).all()


def test_the_copy_follows_the_state(copies):
    inputs = inputs_of_a_copy(13)
    window = open_window(inputs, 2, 4)
    assert window.kv_half is None
    step_through(window, inputs.time(0, PROMPT + 1), PROMPT)
    assert_copy_of_kv(window)
    before, place = window.kv_half.clone(), window.kv_half.data_ptr()
    step_through(window, inputs.time(0, PROMPT + 5), PROMPT + 1)
    assert not torch.equal(window.kv_half, before), "the fold wrote it"
    assert_copy_of_kv(window)
    window.fold("torch")
    assert_copy_of_kv(window)
    assert window.kv_half.data_ptr() == place, "a captured step would read it there"
    window.kv[1] *= 3e5
    window.refresh_copy(slice(1, 2))
    assert_copy_of_kv(window)
    others = window.select(torch.tensor([1, 0, 1]))
    assert_copy_of_kv(others)
    assert_copy_of_kv(window.clone())
    step_through(window, inputs.time(0, PROMPT + 6), PROMPT + 5)
    held = window.kv_half.clone()
    window.folded("triton")
    assert torch.equal(window.kv_half, held)
    assert_copy_of_kv(window)
    assert window.resized(9).kv_half is None
    joined = Window.cat([window, others.select(slice(0, 1))])
    assert joined.kv_half is joined.kv_scale is None
    tokens = inputs.time(PROMPT + 6, PROMPT + 7).map(lambda t: t[[0, 1, 1]] if t.ndim > 1 else t)
    joined = joined.resized(4)
    joined.step(**tokens.arguments(), backend="triton")
    assert_copy_of_kv(joined)


def test_copies_of_rows_of_any_size(copies):
    inputs = inputs_of_a_copy(14)
    window = open_window(inputs, 2, 4)
    sizes = torch.tensor([0.0, 1e-42, 1e-30, 1e-3, 1.0, 3e4, 7e4, 1e25, 3e38])
    window.kv[..., : len(sizes), :] *= 0.3 * sizes.unsqueeze(-1)
    window.kv[..., : len(sizes), 0] = sizes
    step_through(window, inputs.time(0, PROMPT + 1), PROMPT)
    by_pytorch = window.kv_half.clone(), window.kv_scale.clone()
    assert window.kv_half.isfinite().all()
    assert_copy_of_kv(window)
    # A token that changes nothing; a fold of none would write nothing.
    window.keys.zero_()
    window.decay.zero_()
    window.kv_half.zero_()
    window.fold("triton")
    assert torch.equal(window.kv_half, by_pytorch[0])
    assert torch.equal(window.kv_scale, by_pytorch[1])
    error = (window.kv_half.double() * window.kv_scale.unsqueeze(-1).double() - window.kv.double()).abs()
    largest = window.kv.double().abs().amax(-1, keepdim=True)
    assert (error <= 2**-11 * largest).all()


def test_a_copy_of_a_state_that_nothing_answers_to(copies):
    inputs = inputs_of_a_copy(15, rotation="none", gate="none")
    across = torch.tensor([1.0, -1.0] * 8)
    inputs = replace(inputs, k=inputs.k[..., :1] * torch.ones(16), q=inputs.q[..., :1] * across)
    window = open_window(inputs, 2, 4)
    y = step_through(window, inputs, PROMPT)
    assert window.kv_half is not None
    assert y.abs().max() <= 2 * inputs.v.abs().max()


def test_steps_in_float32_or_plain_pytorch_or_with_higher_powers_read_the_state_itself(monkeypatch):
    inputs = inputs_of_a_copy(16)
    window = open_window(inputs, 2, 4)
    step_through(window, inputs, PROMPT)
    assert window.kv_half is None
    monkeypatch.setattr(window_module, "COPY_DTYPES", (torch.float32,))
    step_through(window, inputs, PROMPT, backend="torch")
    assert window.kv_half is None
    small = inputs.time(0, PROMPT + 1).map(lambda t: t[..., :4] if t.shape[-1] > 4 else t)
    small = replace(small, theta=inputs.theta[:2])
    window = open_window(small, 4, 4)
    step_through(window, small, PROMPT)
    assert window.kv_half is None


def test_a_captured_step_needs_its_copy_before(copies, monkeypatch):
    inputs = inputs_of_a_copy(17)
    window = open_window(inputs, 2, 4)
    monkeypatch.setattr(window_module, "_captured", lambda: True)
    for call in (lambda: step_through(window, inputs, PROMPT), lambda: window.fold("triton")):
        with pytest.raises(ValueError, match="copy of its state cannot be made inside a CUDA graph: call step once"):
            call()


@pytest.mark.slow
def test_a_compiled_step_makes_its_copy(copies):
    inputs = inputs_of_a_copy(18)
    window, eager = open_window(inputs, 2, 4), open_window(inputs, 2, 4)
    step = torch.compile(lambda **x: window.step(**x, backend="triton"), fullgraph=True, backend="aot_eager")
    outputs = [step(**inputs.time(i, i + 1).arguments()) for i in range(PROMPT, PROMPT + 2)]
    assert torch.equal(torch.cat(outputs, dim=1), step_through(eager, inputs.time(0, PROMPT + 2), PROMPT))
    assert_copy_of_kv(window)
