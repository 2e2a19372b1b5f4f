"""The fused kernels on a GPU, in bfloat16, float16 and float32, against float64 on the same inputs."""

import itertools
import math
from dataclasses import replace
from functools import cache

import pytest
import torch

import sympow
from support import Inputs, run_plain, with_orthogonal_rows
from sympow.ops import dispatch

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Half a unit in the last place of float32.
EPS = 2.0**-24


def make_inputs(length, gamma, *, heads=2, key_heads=2, dim=64, value_dim=64, batch=1, seed=0,
                dtype=torch.bfloat16) -> Inputs:  # fmt: skip
    """Normal queries, keys and values, as in an untrained model.

    With `gamma` "closed", some gates are 0, and with "none" there are no gates.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    log_gamma = None
    if gamma != "none":
        shift = {"weak": 6.9, "strong": 0.0, "closed": 3.0}[gamma]
        log_gamma = torch.nn.functional.logsigmoid(normal(batch, length, key_heads) + shift)
    if gamma == "closed":
        log_gamma[normal(batch, length, key_heads) > 2] = -torch.inf
    return Inputs(
        # Of length 1 in float16, where the formula itself would otherwise leave the range. Outputs do not depend on it.
        q=(normal(batch, length, heads, dim) / (dim**0.5 if dtype == torch.float16 else 1)).to(dtype),
        k=normal(batch, length, key_heads, dim).to(dtype),
        v=normal(batch, length, key_heads, value_dim).to(dtype),
        log_gamma=log_gamma,
        beta=2 * torch.rand(batch, length, key_heads, device="cuda", generator=generator),
        theta=sympow.rotary_rates(dim, 65_536, device="cuda"),
    )


def results(inputs: Inputs, call) -> dict[str, torch.Tensor]:
    """Output and gradients by name."""
    inputs = inputs.requires_grad()
    y = call(inputs)
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(y.shape, device="cuda", generator=generator).bfloat16().to(y.dtype)
    names = [name for name, value in inputs.arguments().items() if value is not None]
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, inputs.tensors(), weights), strict=True))}


def error(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "power", "length", "gamma", "heads", "key_heads", "dim", "value_dim"),
    [
        ("attention", 2, 2000, "weak", 2, 2, 64, 64),
        ("attention", 4, 2000, "weak", 4, 2, 64, 64),
        ("attention", 2, 1500, "strong", 2, 2, 64, 64),
        ("attention", 2, 1000, "closed", 2, 2, 64, 64),
        ("attention", 2, 777, "weak", 2, 1, 32, 32),
        ("attention", 2, 700, "weak", 2, 2, 64, 24),
        ("attention", 2, 1500, "none", 2, 2, 64, 64),
        ("attention", 4, 1500, "none", 4, 2, 64, 64),
        ("attention", 2, 700, "weak", 2, 2, 128, 128),
        ("attention", 2, 5000, "weak", 8, 2, 128, 128),
        ("attention", 2, 1500, "strong", 2, 2, 128, 128),
        ("attention", 2, 1000, "closed", 4, 1, 128, 128),
        ("attention", 2, 1500, "none", 4, 2, 128, 128),
        ("attention", 4, 2000, "weak", 4, 2, 128, 128),
        ("attention", 2, 1500, "weak", 4, 2, 80, 80),
        ("attention", 2, 1100, "strong", 2, 1, 96, 112),
        ("chunked", 2, 5000, "weak", 2, 2, 64, 64),
        ("chunked", 2, 3000, "strong", 4, 2, 64, 64),
        ("chunked", 2, 3000, "closed", 2, 2, 64, 64),
        ("chunked", 2, 3000, "weak", 2, 2, 32, 20),
        ("chunked", 2, 2500, "weak", 2, 1, 16, 16),
        ("chunked", 2, 2500, "none", 2, 2, 64, 64),
        ("chunked", 2, 2500, "weak", 2, 2, 128, 128),
        ("chunked", 2, 3000, "strong", 8, 2, 128, 128),
        ("chunked", 2, 3000, "closed", 2, 2, 128, 128),
        ("chunked", 2, 2500, "none", 3, 1, 128, 128),
        ("chunked", 2, 2500, "weak", 2, 2, 80, 80),
        ("chunked", 2, 2500, "strong", 2, 1, 128, 64),
    ],
)
def test_errors_are_within_twice_those_of_plain_pytorch(
    form, power, length, gamma, heads, key_heads, dim, value_dim, dtype
):
    """Compares with the same formula in the dtype of the inputs throughout."""
    inputs = make_inputs(length, gamma, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim, dtype=dtype)

    def plain(x):
        # In float32 the rounding of states is seen, in either backend; in the others that of the inputs to products.
        if dtype == torch.float32 and form == "chunked":
            return sympow.attention(**x.arguments(), power=power, form=form, backend="torch")
        return run_plain(x, power)

    compare(
        inputs,
        wanted=lambda x: sympow.attention(**x.arguments(), power=power, form="attention", backend="torch"),
        plain=plain,
        fused=lambda x: sympow.attention(**x.arguments(), power=power, form=form, backend="triton"),
    )


def row_error(x: torch.Tensor, reference: torch.Tensor, quantile: float = 1.0) -> float:
    """A quantile of the rows' errors, by default the largest, in units of the rows' mean norm."""
    errors = (x.double() - reference).norm(dim=-1).flatten()
    return (errors.kthvalue(math.ceil(quantile * errors.numel())).values / reference.norm(dim=-1).mean()).item()


def in_bfloat16(inputs: Inputs) -> Inputs:
    """The same with queries, keys and values in bfloat16."""
    return replace(inputs, q=inputs.q.bfloat16(), k=inputs.k.bfloat16(), v=inputs.v.bfloat16())


def with_rounded_operands(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """The same with queries and keys rotated, and then rounded to `dtype` as operands of products are.

    Gradients pass through the rounding.
    """
    rotated = inputs.with_all_heads().rotated()
    q, k = (x + (x.to(dtype).to(x.dtype) - x).detach() for x in (rotated.q, rotated.k))
    return replace(rotated, q=q, k=k)


def compare(*inputs: Inputs, wanted, plain, fused, rows=True) -> None:
    """Errors of `fused` against `wanted` in float64, outputs and gradients, as a whole and row by row: at most twice
    those of `plain`, over all inputs together.

    In float32 the 90 % quantile of the rows' errors takes the place of the largest, and of the whole, which a few rows
    dominate. A row that sees one key, or little else, has a gradient of (dy · v − dy · y) 2 / s, in exact arithmetic 0:
    a rounding error over a score that may be near 0. `plain` normalizes weights before it multiplies with values, and
    gets exactly 0 there. In float16, where `plain` divides by zero if gates are closed, or leaves the range, its error
    in bfloat16, which has three bits less, is the yardstick for quantiles of the rows. One early row whose scores are
    all near 0 can dominate a gradient as a whole, and its error then is that of the scores: the rounding of rotated
    queries and keys, which the bfloat16 inputs with their other scores do not show. So for the whole, `wanted` with
    these operands rounded to float16 is a yardstick as well.

    rows: whether single rows are compared.
    """

    def joined(call, precision=lambda x: x):
        found = [results(precision(one), call) for one in inputs]
        return {name: torch.stack([result[name] for result in found]) for name in found[0]}

    def in_float64(one):
        return one.map(torch.Tensor.double)

    @cache
    def in_place_of_plain():
        """Results of `plain` in bfloat16, of `wanted` on its inputs, and of `wanted` with operands in float16."""
        return (
            joined(plain, in_bfloat16),
            joined(wanted, lambda one: in_float64(in_bfloat16(one))),
            joined(lambda one: wanted(with_rounded_operands(one, torch.float16)), in_float64),
        )

    expected = joined(wanted, in_float64)
    simple, actual = joined(plain), joined(fused)
    for name, want in expected.items():
        assert actual[name].isfinite().all(), name
        ours, theirs = error(actual[name], want), error(simple[name], want)
        if theirs != theirs:
            assert actual["y"].dtype == torch.float16
            coarse, coarse_want, rounded = (found[name] for found in in_place_of_plain())
            for share in (0.9, 0.99) if want.ndim == 5 else ():
                some, few = row_error(actual[name], want, share), row_error(coarse, coarse_want, share) / 8
                assert some <= 2 * few, f"{name}, {share:.0%} of rows: {some:.2e}, plain PyTorch {few:.2e}"
            theirs = max(error(coarse, coarse_want) / 8, error(rounded, want))
            assert ours <= 2 * theirs, f"{name}: {ours:.2e}, plain PyTorch in float16 about {theirs:.2e}"
            continue
        if actual["y"].dtype == torch.float32 and want.ndim == 5:
            ours, theirs = row_error(actual[name], want, 0.9), row_error(simple[name], want, 0.9)
            assert ours <= 2 * theirs, f"{name}, 90 % of rows: {ours:.2e}, plain PyTorch {theirs:.2e}"
            worst = row_error(actual[name], want)
            assert worst <= 0.02, f"{name}, worst row: {worst:.2e}"
            continue
        # Reverse cumulative sums of t terms with rounding errors of float32; plain PyTorch sums them in float64.
        length = want.shape[2] if want.ndim > 2 else 0
        floor = 4 * EPS * length**0.5 if actual["y"].dtype == torch.float32 else 0.0
        assert ours <= max(2 * theirs, floor), f"{name}: {ours:.2e}, plain PyTorch {theirs:.2e}"
        if rows and want.ndim == 5:
            ours, theirs = row_error(actual[name], want), row_error(simple[name], want)
            assert ours <= 2 * theirs, f"{name}, worst row: {ours:.2e}, plain PyTorch {theirs:.2e}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "power"), [("attention", 2), ("attention", 4), ("chunked", 2)])
@pytest.mark.parametrize(
    ("key_length", "value", "gradient"), [(1e-3, 1.0, 1e-3), (1e3, 1.0, 1.0), (8.0, 1.5e4, 1e-3), (8.0, 1e-3, 1.0)]
)
def test_keys_and_values_far_from_one(form, power, dtype, key_length, value, gradient):
    """Scores to the p-th power, states and gradients would leave the range of float16."""
    inputs = make_inputs(1500, "weak", dtype=torch.float32)
    inputs = replace(inputs, k=inputs.k * (key_length / 8), v=inputs.v.clamp(-4, 4) * value).rounded(dtype)

    def call(x, form, backend):
        return gradient * sympow.attention(**x.arguments(), power=power, form=form, backend=backend)

    expected = results(inputs.map(torch.Tensor.double), lambda x: call(x, "attention", "torch"))
    actual = results(inputs, lambda x: call(x, form, "triton"))
    for name, want in expected.items():
        assert actual[name].isfinite().all(), name
        assert error(actual[name], want) <= (1e-2 if dtype == torch.float16 else 1e-5), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "power"), [("attention", 2), ("attention", 4), ("chunked", 2)])
def test_zero_queries_keys_and_closed_gates(form, power, dtype):
    inputs = make_inputs(700, "closed", dtype=dtype)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[:, ::7], k[:, ::5], k[:, :3] = 0, 0, 0
    inputs = replace(inputs, q=q, k=k)
    actual = results(inputs, lambda x: sympow.attention(**x.arguments(), power=power, form=form, backend="triton"))
    assert not actual["y"][:, ::7].any()
    assert not actual["y"][:, :3].any()
    assert all(x.isfinite().all() for x in actual.values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("length", [700, 9000])
@pytest.mark.parametrize(("power", "dim"), [(2, 64), (4, 64), (4, 128), (4, 32)])
def test_rows_nearly_orthogonal_to_their_only_key(power, dim, length, dtype):
    inputs = make_inputs(length, "weak", dim=dim, value_dim=dim, dtype=torch.float16)
    inputs, cosines = with_orthogonal_rows(replace(inputs, beta=None, theta=None))
    inputs = inputs.rounded(dtype)
    expected = results(
        inputs.map(torch.Tensor.double),
        lambda x: sympow.attention(**x.arguments(), power=power, form="attention", backend="torch"),
    )
    actual = results(
        inputs, lambda x: sympow.attention(**x.arguments(), power=power, form="attention", backend="triton")
    )
    alone = cosines < 1
    tolerance = 1e-2 if dtype == torch.float16 else 4e-5
    for name in ("y", "q", "k"):
        want = expected[name][:, alone]
        mean = expected[name].norm(dim=-1).mean()
        errors = (actual[name][:, alone].double() - want).norm(dim=-1) / mean
        # The exact gradient of such a score is 0, and what kernels compute is a rounding error divided by the score.
        rounding = 0.0 if name == "y" else 4e-4 / cosines[alone][:, None]
        if name == "k" and dtype == torch.float16:
            # Later rows read these keys, too, with gradients up to 60 times the mean. Theirs is (dy · v − dy · y) p / s
            # times a weight: the rounding of y counts far more than usual where s is near 0.
            errors /= 4 * (1 + want.norm(dim=-1) / mean)
        assert (errors <= tolerance + rounding).all(), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", ["none", "weak", "strong"])
@pytest.mark.parametrize(
    ("form", "power", "dim"),
    [("attention", 2, 64), ("attention", 4, 64), ("chunked", 2, 64), ("attention", 2, 128), ("chunked", 2, 128)],
)
def test_long_contexts(form, power, dim, gamma, dtype):
    # Several sequences, as in `test_gradients_through_states`; one at a time, since the reference has whole matrices.
    shape = {"heads": 1, "key_heads": 1, "dim": dim, "value_dim": dim, "dtype": dtype}
    compare(
        *(make_inputs(65_536, gamma, **shape, seed=seed) for seed in range(3)),
        wanted=lambda x: sympow.attention(**x.arguments(), power=power, form="attention", backend="torch"),
        plain=lambda x: run_plain(x, power, rows=2048),
        fused=lambda x: sympow.attention(**x.arguments(), power=power, form=form, backend="triton"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gamma", ["weak", "strong"])
@pytest.mark.parametrize(("form", "power"), [("attention", 2), ("attention", 4), ("chunked", 2)])
def test_packed_documents(form, power, gamma, dtype):
    lengths = [1, 700, 64, 2000, 3, 1280, 300]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    inputs = make_inputs(sum(lengths), gamma, heads=2, key_heads=1, dtype=dtype)

    def attend(x, form, backend):
        return sympow.attention(**x.arguments(), power=power, cu_seqlens=offsets, form=form, backend=backend)

    def plain(x):
        documents = itertools.pairwise(offsets.tolist())
        return torch.cat([run_plain(x.time(start, stop), power) for start, stop in documents], dim=1)

    compare(
        inputs,
        wanted=lambda x: attend(x, "attention", "torch"),
        plain=plain,
        fused=lambda x: attend(x, form, "triton"),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("form", "power", "dim", "value_dim"), [("chunked", 2, 64, 32), ("chunked", 2, 128, 128), ("attention", 4, 16, 32)]
)
def test_gradients_through_states(form, power, dim, value_dim, dtype):
    """Two calls with a state between them, compared with one call in plain PyTorch."""
    # Several sequences: in one, the errors of β's gradient are a random walk that may end anywhere.
    inputs = make_inputs(2500, "weak", heads=2, key_heads=1, dim=dim, value_dim=value_dim, batch=4, dtype=dtype)

    def in_two(x, backend):
        head, state = sympow.attention(
            **x.time(0, 1100).arguments(), power=power, form=form, backend=backend, return_state=True
        )
        tail = sympow.attention(
            **x.time(1100).arguments(), power=power, form=form, backend=backend, initial_state=state
        )
        return torch.cat([head, tail], dim=1)

    compare(
        inputs,
        wanted=lambda x: sympow.attention(**x.arguments(), power=power, form="attention", backend="torch"),
        # In float32 the rounding of states is seen, in either backend.
        plain=lambda x: in_two(x, "torch") if dtype == torch.float32 else run_plain(x, power),
        fused=lambda x: in_two(x, "triton"),
    )


def test_operators_pass_pytorchs_own_checks():
    from sympow.kernels import rotary as rotation_op
    from sympow.kernels.attention import op as attention_op

    state = (torch.randn(1, 2, 64, 64, 64, device="cuda"), torch.randn(1, 2, 64, 64, device="cuda"))
    for dtype in DTYPES:
        inputs = make_inputs(200, "weak", dtype=dtype).requires_grad()
        qkv = (inputs.q, inputs.k, inputs.v, inputs.log_gamma)
        torch.library.opcheck(
            attention_op.fused_attention.op, (*qkv, None, None, None, None, 2, 0, 64, False, True, False)
        )
        torch.library.opcheck(attention_op.fused_attention.op, (*qkv, None, None, *state, 2, 128, 64, True, True, True))
    rotation = (inputs.q, inputs.k, inputs.beta, inputs.theta.detach(), None, None, None, True)
    torch.library.opcheck(rotation_op._rotate.op, rotation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("form", ["attention", "chunked"])
def test_a_second_run_is_bitwise_the_same(form, dim, dtype):
    inputs = make_inputs(4096, "weak", heads=4, key_heads=2, dim=dim, value_dim=dim, dtype=dtype)
    first, second = (
        results(inputs, lambda x: sympow.attention(**x.arguments(), form=form, backend="triton")) for _ in range(2)
    )
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_auto_trains_on_the_kernels_and_agrees_with_the_portable_path():
    inputs = make_inputs(512, "weak")
    auto, kernels = (
        results(inputs, lambda x, b=backend: sympow.attention(**x.arguments(), backend=b))
        for backend in ("auto", "triton")
    )
    assert torch.equal(auto["y"], kernels["y"])


@pytest.mark.parametrize(("power", "dim"), [(2, 64), (4, 16)])
def test_a_decoding_step_can_be_captured_and_replayed(power, dim):
    inputs = make_inputs(65, "weak", batch=3, heads=4, key_heads=2, dim=dim, value_dim=dim)
    _, state = sympow.attention(**inputs.time(0, 64).arguments(), power=power, return_state=True, backend="torch")
    token = inputs.time(64).arguments()
    expected, after = sympow.attention(
        **token, power=power, initial_state=state, return_state=True, form="recurrent", backend="torch"
    )
    with torch.no_grad():
        sympow.attention(**token, power=power, initial_state=state, return_state=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, found = sympow.attention(**token, power=power, initial_state=state, return_state=True)
        graph.replay()
    assert error(y, expected.double()) <= 2**-8
    assert error(found.kv, after.kv.double()) <= 1e-5
    assert error(found.normalizer, after.normalizer.double()) <= 1e-5


@torch.no_grad()
def test_reading_in_pieces_equals_reading_at_once():
    inputs = make_inputs(3000, "weak", heads=4, key_heads=2)
    exact = inputs.map(torch.Tensor.double)
    wanted, after = sympow.attention(**exact.arguments(), return_state=True, backend="torch")
    outputs, state = [], None
    for start, stop in ((0, 1000), (1000, 2999), (2999, 3000)):
        y, state = sympow.attention(
            **inputs.time(start, stop).arguments(), initial_state=state, return_state=True, backend="triton"
        )
        outputs.append(y)
    assert error(torch.cat(outputs, dim=1), wanted) <= 2**-7
    assert error(state.kv, after.kv) <= 2**-7
    assert error(state.normalizer, after.normalizer) <= 2**-7
    assert torch.allclose(state.phase.cos(), after.phase.cos(), atol=1e-9)


def test_a_compiled_training_step_is_one_graph():
    inputs = make_inputs(256, "weak")

    def call(q, k, v, log_gamma, beta, theta):
        return sympow.attention(q, k, v, 2, log_gamma, beta, theta, backend="triton")

    compiled = torch.compile(call, fullgraph=True)
    eager = results(inputs, lambda x: call(*x.tensors()))
    graph = results(inputs, lambda x: compiled(*x.tensors()))
    for name, value in eager.items():
        assert error(graph[name], value.double()) <= 1e-2, name


@torch.no_grad()
@pytest.mark.parametrize("return_state", [False, True])
def test_memory_without_gradients_does_not_grow_with_the_context(monkeypatch, return_state):
    """Beside inputs and outputs. The states of all chunks of 262,144 tokens take 8 GiB, or 24 if one is returned."""
    budget = 5 * 2**30

    def call(length):
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = torch.randn(3, 1, length, 8, 128, device="cuda", generator=generator).bfloat16()
        log_gamma = -0.01 * torch.rand(1, length, 8, device="cuda", generator=generator)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = sympow.attention(q, k, v, 2, log_gamma, form="chunked", backend="triton", return_state=return_state)
        y = result[0] if return_state else result
        return y, torch.cuda.max_memory_allocated() - before - y.nbytes

    y, extra = call(262_144)
    assert extra <= budget
    assert call(524_288)[1] <= budget
    monkeypatch.setattr(dispatch, "CHUNK_STATE_BYTES", 2**60)
    at_once, extra = call(262_144)
    assert extra > 8 * 2**30
    # Both are within the rounding of bfloat16 of the exact values.
    assert (y.double() - at_once.double()).norm() <= 5e-3 * at_once.double().norm()
