"""The fused kernels against float64: in float32 in Triton's interpreter, in bfloat16 on a GPU."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import sympow
from support import Inputs, assert_close, float32_tolerance, gradients, interpreted, random_inputs, run

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl

from sympow.kernels.attention import op as attention_op
from sympow.kernels.common import round_to
from sympow.ops import dispatch


def compare(inputs: Inputs, power: int, form: str, *, cu_seqlens=None, **options) -> None:
    """Outputs and gradients of the kernels against float64."""
    exact = inputs.map(lambda t: t.double()).requires_grad()
    inputs = inputs.requires_grad()
    expected = run(exact, power, "attention", backend="torch", cu_seqlens=cu_seqlens)
    actual = run(inputs, power, form, backend="triton", cu_seqlens=cu_seqlens, **options)
    names = ["y", *(name for name, value in inputs.arguments().items() if value is not None)]
    longest = inputs.q.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    results = [[y.detach(), *gradients(y, x)] for y, x in ((actual, inputs), (expected, exact))]
    for name, got, want in zip(names, *results, strict=True):
        assert_close(got, want, float32_tolerance(name, longest), name)


@interpreted
@pytest.mark.parametrize(
    ("power", "gate", "rotation", "group", "dim", "value_dim", "length"),
    [
        (2, "scalar", "scale", 2, 8, 5, 70),
        (2, "none", "none", 1, 16, 16, 64),
        (4, "scalar", "fixed", 1, 6, 3, 33),
        (4, "none", "pairs", 3, 4, 20, 1),
        (6, "scalar", "none", 1, 5, 7, 40),
        (8, "scalar", "scale", 1, 32, 16, 130),
    ],
)
def test_the_attention_form(power, gate, rotation, group, dim, value_dim, length):
    inputs = random_inputs(0, batch=2, length=length, heads=2 * group, key_heads=2, dim=dim, value_dim=value_dim,
                           gate=gate, rotation=rotation, dtype=torch.float32)  # fmt: skip
    compare(inputs, power, "attention")


@interpreted
@pytest.mark.parametrize(
    ("gate", "rotation", "group", "dim", "value_dim", "length"),
    [
        ("scalar", "scale", 2, 16, 16, 300),
        ("none", "fixed", 1, 12, 20, 257),
        ("scalar", "scale", 1, 38, 33, 257),  # padded keys, whose last entries have no slices of the state
        pytest.param("scalar", "none", 1, 32, 32, 128, marks=pytest.mark.slow),
    ],
)
def test_the_chunked_form(gate, rotation, group, dim, value_dim, length):
    inputs = random_inputs(1, batch=1, length=length, heads=group, key_heads=1, dim=dim, value_dim=value_dim,
                           gate=gate, rotation=rotation, dtype=torch.float32)  # fmt: skip
    compare(inputs, 2, "chunked", chunk_size=128)


@interpreted
@pytest.mark.parametrize(
    ("gate", "group", "dim", "value_dim", "packed"),
    [("scalar", 2, 6, 5, True), pytest.param("none", 1, 16, 20, False, marks=pytest.mark.slow)],
)
def test_the_chunked_form_of_power_four(gate, group, dim, value_dim, packed):
    inputs = random_inputs(13, batch=1, length=200, heads=group, key_heads=1, dim=dim, value_dim=value_dim, gate=gate,
                           dtype=torch.float32)  # fmt: skip
    offsets = torch.tensor([0, 50, 190, 200]) if packed else None
    compare(inputs, 4, "chunked", cu_seqlens=offsets, chunk_size=128)


@interpreted
@pytest.mark.parametrize(("form", "options"), [("attention", {}), ("chunked", {"chunk_size": 128})])
def test_closed_gates_zero_queries_and_zero_keys(form, options):
    inputs = random_inputs(2, length=150, heads=2, dim=16, value_dim=16, dtype=torch.float32)
    q, k, log_gamma = inputs.q.clone(), inputs.k.clone(), inputs.log_gamma.clone()
    q[:, 5], k[:, :3] = 0, 0
    log_gamma[:, [20, 128, 140]] = -torch.inf
    inputs = replace(inputs, q=q, k=k, log_gamma=log_gamma).requires_grad()
    y = run(inputs, 2, form, backend="triton", **options)
    assert not y[:, 5].any()
    assert not y[:, :3].any()
    assert all(g.isfinite().all() for g in gradients(y, inputs))
    expected = run(inputs.map(lambda t: t.detach().double()), 2, "attention", backend="torch")
    assert_close(y.detach(), expected, 2e-6, "y")


@interpreted
@pytest.mark.parametrize(
    ("power", "gate"),
    [
        (2, "scalar"),
        (4, "none"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, "none"), (4, "scalar"))),
    ],
)
def test_queries_that_no_earlier_chunk_answers_to(power, gate):
    """The state's contribution to them is rounding error, and must be treated as zero, in gradients too."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.nn.functional.normalize(torch.randn(16, generator=generator), dim=0)
    inputs = random_inputs(14, length=256, heads=1, dim=16, value_dim=16, gate=gate, rotation="none",
                           dtype=torch.float32)  # fmt: skip
    across = inputs.q - (inputs.q @ direction).unsqueeze(-1) * direction
    k = inputs.k[..., :1] * direction
    k[:, 128:] = inputs.k[:, 128:]  # their scores with keys of their own chunk are not zero
    inputs = replace(inputs, q=across, k=k).requires_grad()
    y = run(inputs, power, "chunked", backend="triton", chunk_size=128)
    expected = run(inputs, power, "chunked", backend="torch", chunk_size=128)
    later = slice(128, None)
    assert_close(y[:, later].detach(), expected[:, later].detach(), 2e-5, "y")
    assert y[:, later].abs().max() <= 1.01 * inputs.v.abs().max()
    dk, dv = torch.autograd.grad(y[:, later].sum(), (inputs.k, inputs.v))
    assert not dv[:, :128].any()
    assert not dk[:, :128].any()


@interpreted
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("rotation", ["none", "fixed", "scale", "pairs"])
@pytest.mark.parametrize("gate", ["none", "scalar"])
@pytest.mark.parametrize("group", [1, 2])
def test_one_token_from_a_state(power, rotation, gate, group):
    dim = 5 if rotation == "none" else 6
    inputs = random_inputs(3, batch=2, length=9, heads=2 * group, key_heads=2, dim=dim, value_dim=5, gate=gate,
                           rotation=rotation, dtype=torch.float32)  # fmt: skip
    _, state = run(inputs.time(0, 8), power, "chunked", backend="torch", return_state=True)
    expected, after = run(inputs.time(8), power, "recurrent", backend="torch", initial_state=state, return_state=True)
    actual, found = run(inputs.time(8), power, "recurrent", backend="triton", initial_state=state, return_state=True)
    assert_close(actual, expected, float32_tolerance("y", 9), "y")
    assert_close(found.kv, after.kv, 3e-6, "kv")
    assert_close(found.normalizer, after.normalizer, 3e-6, "normalizer")
    if rotation != "none":
        assert_close(found.phase, after.phase, 1e-12, "phase")


@interpreted
@pytest.mark.parametrize(("power", "key_scale"), [(2, 1e9), (4, 1e5), (4, 1e-5)])
@pytest.mark.parametrize("length", [1, 20])
def test_states_of_long_and_short_keys(power, key_scale, length):
    inputs = random_inputs(10, length=20 + length, dim=8, dtype=torch.float32)
    inputs = replace(inputs, k=inputs.k * key_scale)
    expected = run(inputs.map(lambda t: t.double()), power, "attention", backend="torch")
    _, state = run(inputs.time(0, 20), power, "attention", backend="triton", return_state=True)
    y = run(inputs.time(20), power, "attention", backend="triton", initial_state=state)
    assert_close(y, expected[:, 20:], 1e-5, "y")


@interpreted
def test_one_token_that_nothing_answers_to():
    inputs = random_inputs(9, length=9, dim=4, rotation="none", gate="none", dtype=torch.float32)
    direction = torch.tensor([1.0, 1.0, 1.0, 1.0])
    across = torch.tensor([1.0, -1.0, 1.0, -1.0])
    inputs = replace(inputs, k=inputs.k[..., :1] * direction, q=inputs.q[..., :1] * across)
    _, state = run(inputs.time(0, 8), 2, "attention", backend="torch", return_state=True)
    token = inputs.time(8)
    y = run(token, 2, "recurrent", backend="triton", initial_state=state)
    assert y.abs().max() <= 2 * inputs.v.abs().max()
    q = token.q.clone()
    q[..., 0] = torch.nan
    bad = replace(token, q=q)
    assert run(bad, 2, "recurrent", backend="triton", initial_state=state).isnan().all()


@interpreted
@pytest.mark.parametrize(("form", "options"), [("attention", {}), ("chunked", {"chunk_size": 128})])
@pytest.mark.parametrize(
    ("gate", "rotation"),
    [
        ("scalar", "scale"),
        ("none", "pairs"),
        pytest.param("scalar", "none", marks=pytest.mark.slow),
        pytest.param("none", "fixed", marks=pytest.mark.slow),
    ],
)
def test_states_at_both_ends(form, options, rotation, gate):
    inputs = random_inputs(7, batch=1, length=230, heads=4, key_heads=2, dim=8, value_dim=5, gate=gate,
                           rotation=rotation, dtype=torch.float32)  # fmt: skip
    expected, after = run(inputs.map(lambda t: t.double()), 2, "attention", backend="torch", return_state=True)
    head, state = run(inputs.time(0, 50), 2, "attention", backend="triton", return_state=True)
    tail, state = run(inputs.time(50), 2, form, backend="triton", initial_state=state, return_state=True, **options)
    assert_close(torch.cat([head, tail], dim=1), expected, 5e-6, "y")
    assert_close(state.kv, after.kv, 5e-6, "kv")
    assert_close(state.normalizer, after.normalizer, 5e-6, "normalizer")
    if rotation != "none":
        assert_close(state.phase.cos(), after.phase.cos(), 1e-12, "phase")
        assert_close(state.phase.sin(), after.phase.sin(), 1e-12, "phase")


@interpreted
@torch.no_grad()
@pytest.mark.parametrize(
    ("lengths", "given", "returned", "rotation", "gate"),
    [
        ([256, 256, 138], False, False, "scale", "scalar"),
        ([256, 256, 1], True, True, "fixed", "none"),
        pytest.param([256, 244], False, True, "pairs", "scalar", marks=pytest.mark.slow),
    ],
)
def test_without_gradients_long_sequences_run_in_segments(monkeypatch, lengths, given, returned, rotation, gate):
    """Each segment of at most two chunks continues from the state after the one before."""
    inputs = random_inputs(9, batch=2, length=sum(lengths), heads=2, key_heads=1, dim=8, value_dim=5, gate=gate,
                           rotation=rotation, dtype=torch.float32)  # fmt: skip
    exact, options, exact_options = inputs.map(lambda t: t.double()), {}, {}
    if given:
        _, exact_options["initial_state"] = run(exact, 2, "attention", backend="torch", return_state=True)
        options["initial_state"] = exact_options["initial_state"].to(dtype=torch.float32)
    expected, after = run(exact, 2, "attention", backend="torch", return_state=True, **exact_options)
    # Two sequences of one key head, padded to 32 entries, in float32, and summed in float32.
    monkeypatch.setattr(dispatch, "CHUNK_STATE_BYTES", 2 * 2 * 32**3 * 8)
    found, attend = [], attention_op.fused_attention
    monkeypatch.setattr(attention_op, "fused_attention", lambda q, *rest: found.append(q.shape[1]) or attend(q, *rest))
    y = run(inputs, 2, "chunked", backend="triton", chunk_size=128, return_state=returned, **options)
    if returned:
        y, state = y
        assert_close(state.kv, after.kv, 5e-6, "kv")
        assert_close(state.normalizer, after.normalizer, 5e-6, "normalizer")
        assert_close(state.phase.cos(), after.phase.cos(), 1e-12, "phase")
    assert_close(y, expected, 5e-6, "y")
    # One token after a state is decoded.
    assert found == [length for length in lengths if length > 1]


@interpreted
@pytest.mark.parametrize(
    ("power", "form", "options", "gate"),
    [
        (2, "chunked", {"chunk_size": 128}, "scalar"),
        (2, "attention", {}, "scalar"),
        pytest.param(4, "chunked", {"chunk_size": 128}, "scalar", marks=pytest.mark.slow),
        pytest.param(2, "chunked", {"chunk_size": 128}, "none", marks=pytest.mark.slow),
        pytest.param(4, "attention", {}, "scalar", marks=pytest.mark.slow),
    ],
)
def test_states_at_both_ends_are_differentiable(power, form, options, gate):
    """Gradients of the inputs and of the initial state, for losses that use only some of the outputs."""
    inputs = random_inputs(8, length=170, heads=2, key_heads=1, dim=6, value_dim=5, gate=gate, dtype=torch.float32)
    if inputs.log_gamma is not None:
        # Gates near 1, so that the initial state still matters in the final one.
        inputs = replace(inputs, log_gamma=0.01 * inputs.log_gamma)
    _, past = run(inputs.time(0, 30), power, "attention", backend="torch", return_state=True)
    losses = [("y",), ("kv",), ("normalizer",), ("y", "kv", "normalizer")]
    results = []
    for backend, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        now = inputs.time(30).map(lambda t, dtype=dtype: t.to(dtype)).requires_grad()
        state = replace(
            past, kv=past.kv.to(dtype).requires_grad_(), normalizer=past.normalizer.to(dtype).requires_grad_()
        )
        extra = options if backend == "triton" else {}
        chosen = form if backend == "triton" else "attention"
        y, after = run(now, power, chosen, backend=backend, initial_state=state, return_state=True, **extra)
        found = {"y": y, "kv": after.kv, "normalizer": after.normalizer}
        leaves = [*now.tensors(), state.kv, state.normalizer]
        names = [*(name for name, value in now.arguments().items() if value is not None), "kv", "normalizer"]
        totals = [sum((found[part] * weights_like(found[part])).sum() for part in parts) for parts in losses]
        results.append(
            [torch.autograd.grad(total, leaves, retain_graph=True, materialize_grads=True) for total in totals]
        )
    for parts, *both in zip(losses, *results, strict=True):
        for name, expected, actual in zip(names, *both, strict=True):
            if not expected.any():
                assert not actual.any(), f"{name} has no part in {', '.join(parts)}"
                continue
            tolerance = float32_tolerance("theta", 170) if name == "theta" else 2e-5
            assert_close(actual, expected, tolerance, f"gradient of {name}, of a loss that reads {', '.join(parts)}")


def weights_like(x: torch.Tensor) -> torch.Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(3)).to(x.dtype)


@interpreted
@pytest.mark.parametrize(
    ("power", "form", "options"),
    [
        (2, "attention", {}),
        pytest.param(4, "attention", {}, marks=pytest.mark.slow),
        (2, "chunked", {"chunk_size": 128}),
    ],
)
@pytest.mark.parametrize(
    ("gate", "rotation"),
    [
        ("scalar", "scale"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("none", "fixed"), ("scalar", "pairs"))),
    ],
)
def test_packed_documents_in_one_call(power, form, options, gate, rotation):
    """Documents within one tile, across several, and ending at a boundary of tiles or chunks."""
    lengths = [1, 40, 87, 200, 56, 16]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    inputs = random_inputs(11, length=sum(lengths), heads=2, key_heads=1, dim=8, value_dim=5, gate=gate,
                           rotation=rotation, dtype=torch.float32)  # fmt: skip
    compare(inputs, power, form, cu_seqlens=offsets, **options)


@interpreted
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_gates_far_from_the_end(monkeypatch, group, packed):
    """Drift correction of the gate gradient after every block of queries, with short blocks."""
    from sympow.kernels import running_sums

    monkeypatch.setattr(running_sums, "DRIFT_SPACING", 128)
    inputs = random_inputs(12, length=460, heads=group, key_heads=1, dim=8, value_dim=8, rotation="none",
                           dtype=torch.float32)  # fmt: skip
    offsets = torch.tensor([0, 100, 110, 400, 460]) if packed else None
    compare(inputs, 2, "attention", cu_seqlens=offsets)


@interpreted
@pytest.mark.parametrize(
    ("power", "form", "options"),
    [(2, "attention", {}), (2, "chunked", {"chunk_size": 128}), (4, "chunked", {"chunk_size": 128})],
)
def test_no_kernel_reads_what_none_has_written(power, form, options):
    """Uninitialized memory: with deterministic algorithms, PyTorch fills new tensors with NaN."""
    inputs = random_inputs(4, length=140, heads=2, key_heads=1, dim=16, dtype=torch.float32)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        compare(inputs, power, form, **options)
    finally:
        torch.use_deterministic_algorithms(False)


@interpreted
@pytest.mark.parametrize(("form", "options"), [("attention", {}), ("chunked", {"chunk_size": 128}), ("recurrent", {})])
def test_rates_and_states_of_any_strides(form, options):
    """A state expanded over several sequences, and rates that are a column of a matrix."""
    inputs = random_inputs(14, length=11, dim=8, dtype=torch.float32)
    _, state = run(inputs.time(0, 10), 2, "attention", backend="torch", return_state=True)
    several = replace(
        state,
        kv=state.kv.expand(3, -1, -1, -1),
        normalizer=state.normalizer.expand(3, -1, -1),
        phase=state.phase.expand(3, -1, -1),
    )
    tokens = inputs.time(10).map(lambda t: t.repeat(3, *[1] * (t.ndim - 1)))
    column = torch.stack([inputs.theta, inputs.theta + 1], dim=1)[:, 0]
    expected = run(inputs.time(10), 2, "attention", backend="torch", initial_state=state)
    y = run(replace(tokens, theta=column), 2, form, backend="triton", initial_state=several, **options)
    assert_close(y, expected.expand(3, -1, -1, -1), 2e-6, "y")


@interpreted
def test_a_chunk_longer_than_the_sequence_costs_no_more_than_the_sequence():
    inputs = random_inputs(15, length=20, dtype=torch.float32)
    expected, after = run(inputs, 2, "attention", backend="torch", return_state=True)
    y, state = run(inputs, 2, "chunked", backend="triton", chunk_size=1 << 40, return_state=True)
    assert_close(y, expected, 2e-6, "y")
    assert_close(state.kv, after.kv, 2e-6, "kv")


@interpreted
@pytest.mark.parametrize("power", [2, 4])
def test_one_token_of_heads_with_one_entry(power):
    inputs = random_inputs(16, length=6, dim=1, value_dim=1, rotation="none", dtype=torch.float32)
    expected = run(inputs, power, "attention", backend="torch")
    _, state = run(inputs.time(0, 5), power, "attention", backend="torch", return_state=True)
    y = run(inputs.time(5), power, "recurrent", backend="triton", initial_state=state)
    assert_close(y, expected[:, 5:], 2e-6, "y")


@triton.jit
def round_kernel(x_ptr, out_ptr, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(out_ptr + places, round_to(tl.load(x_ptr + places), tl.bfloat16))


@interpreted
def test_rounding_to_bfloat16_keeps_infinities_and_what_is_not_a_number():
    # The NaN of a GPU's arithmetic has all bits set but the sign.
    numbers = torch.tensor([0.0, 1.0, 1.005, 3e38, torch.inf, torch.nan, 0, 0])
    numbers.view(torch.int32)[6] = 0x7FFFFFFF
    out = torch.empty_like(numbers)
    round_kernel[(1,)](numbers, out, size=8)
    assert torch.equal(out.nan_to_num(-1), numbers.bfloat16().float().nan_to_num(-1))


@interpreted
@pytest.mark.slow
def test_operators_pass_pytorchs_own_checks():
    from sympow.kernels import rotary as rotation_op
    from sympow.kernels.common import locate
    from sympow.kernels.decode import op as decode_op
    from sympow.ops.symmetric import feature_indices, multinomial_weights

    inputs = random_inputs(5, length=20, heads=2, key_heads=1, dim=16, value_dim=16, dtype=torch.float32)
    inputs = inputs.requires_grad()
    qkv = (inputs.q, inputs.k, inputs.v, inputs.log_gamma)
    documents = tuple(locate(torch.tensor([0, 7, 20]), 20))
    state = (torch.randn(1, 1, 16, 16, 16, requires_grad=True), torch.randn(1, 1, 16, 16, requires_grad=True))
    torch.library.opcheck(attention_op.fused_attention.op, (*qkv, None, None, None, None, 2, 0, 16, False, True, False))
    torch.library.opcheck(attention_op.fused_attention.op, (*qkv, *documents, None, None, 4, 0, 16, False, True, False))
    torch.library.opcheck(attention_op.fused_attention.op, (*qkv, None, None, *state, 2, 128, 16, True, True, True))
    rotation = (inputs.q, inputs.k, inputs.beta, inputs.theta.detach(), None)
    torch.library.opcheck(rotation_op._rotate.op, (*rotation, None, None, True))
    torch.library.opcheck(rotation_op._rotate.op, (*rotation, *documents, False))
    torch.library.opcheck(attention_op.query_scales.op, (inputs.q.detach(),))
    _, state = run(inputs, 2, "attention", backend="torch", return_state=True)
    token = [t[:, 0].detach() if t.ndim > 1 else t.detach() for t in inputs.tensors()]
    tables = (feature_indices(16, 2, inputs.q.device), multinomial_weights(16, 2, torch.float32, inputs.q.device))
    before = state.detach()
    torch.library.opcheck(decode_op.fused_decode.op, (*token, before.kv, before.normalizer, before.phase, *tables))


@interpreted
@pytest.mark.parametrize(
    ("power", "form", "gate", "rotation"),
    [
        (2, "attention", "scalar", "scale"),
        (2, "chunked", "scalar", "fixed"),
        pytest.param(2, "attention", "vector", "pairs", marks=pytest.mark.slow),
        pytest.param(4, "chunked", "scalar", "none", marks=pytest.mark.slow),
    ],
)
def test_gradient_checkpointing_changes_no_bit(power, form, gate, rotation):
    """PyTorch frees a tensor that it computed again when the backward pass has read it once."""
    inputs = random_inputs(7, length=140, heads=2, key_heads=1, dim=4, value_dim=4, gate=gate, rotation=rotation,
                           dtype=torch.float32).requires_grad()  # fmt: skip

    def call(*arguments):
        return run(
            replace(inputs, **dict(zip(names, arguments, strict=True))), power, form, backend="triton", **options
        )

    options = {"chunk_size": 128} if form == "chunked" else {}
    names = [name for name, value in inputs.arguments().items() if value is not None]
    tensors = inputs.tensors()
    recomputed = checkpoint(call, *tensors, use_reentrant=False)
    for got, want in zip(gradients(recomputed, inputs), gradients(call(*tensors), inputs), strict=True):
        assert torch.equal(got, want)


@interpreted
def test_a_compiled_call_is_one_graph():
    inputs = random_inputs(6, length=40, heads=2, dim=16, value_dim=16, dtype=torch.float32)

    def call(q, k, v, log_gamma, beta, theta):
        return sympow.attention(q, k, v, 2, log_gamma, beta, theta, backend="triton")

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_close(compiled(*inputs.tensors()), call(*inputs.tensors()), 1e-6, "y")


@pytest.mark.slow
@interpreted
def test_a_compiled_call_with_states_is_one_graph():
    inputs = random_inputs(6, length=40, heads=2, dim=16, value_dim=16, dtype=torch.float32)
    _, state = run(inputs, 2, "attention", backend="torch", return_state=True)

    def call(kv, normalizer, phase, q, k, v, log_gamma, beta, theta):
        before = sympow.State(kv, normalizer, phase, power=2, key_dim=16)
        y, after = sympow.attention(
            q, k, v, 2, log_gamma, beta, theta, initial_state=before, return_state=True, backend="triton"
        )
        return y, after.kv

    arguments = (state.kv, state.normalizer, state.phase, *inputs.tensors())
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(*arguments), call(*arguments), strict=True):
        assert_close(got, want, 1e-6, "output")


@interpreted
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("share", "counts"), [(1.5, True), (0.5, False)])
def test_one_bound_tells_what_a_state_returns_from_rounding(backend, tokens, share, counts):
    """φ(q) Z below eps Σ |φ(q)_i Z_i| is treated as zero in every form, also in the kernel of one token."""
    q = torch.ones(1, tokens, 1, 2)
    k, v = torch.zeros_like(q), torch.zeros_like(q)
    # φ(q) Z = 1 − 1 + rest, where Σ |φ(q)_i Z_i| is about 2.
    rest = 2 * share * torch.finfo(torch.float32).eps
    normalizer = torch.tensor([1.0, 0.0, rest - 1.0]).reshape(1, 1, 3)
    state = sympow.State(normalizer.new_ones(1, 1, 3, 2), normalizer, None, power=2, key_dim=2)
    y = sympow.attention(q, k, v, initial_state=state, form="auto", backend=backend)
    assert bool((y != 0).all()) == counts
    assert bool((y == 0).all()) != counts
