"""float16 on the kernels, and float32 in float16 pieces, against float64 in Triton's interpreter.

The interpreter multiplies float16 matrices in float32, as tensor cores do.
"""

from dataclasses import replace

import pytest
import torch

from support import (
    Inputs,
    assert_close,
    float32_tolerance,
    gradients,
    interpreted,
    random_inputs,
    run,
    with_orthogonal_rows,
)

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels import running_sums
from sympow.kernels.attention import op, split_float32, tiles
from sympow.kernels.float16_range import (
    FACTORED_VALUE_FACTOR,
    GRADIENT_FACTOR,
    KEY_UNIT,
    measure_keys,
    prepare_float16,
)
from sympow.kernels.hopper.decayed import multiply_factors
from sympow.kernels.running_sums import gate_sums

pytestmark = interpreted
FORMS = [("attention", 2, {}), ("attention", 4, {}), ("chunked", 2, {"chunk_size": 128})]
# For tests that make several calls; p = 4 is left to the slow tests.
FORMS_OF_LONG_TESTS = [FORMS[0], pytest.param(*FORMS[1], marks=pytest.mark.slow), FORMS[2]]
# Relative errors of outputs and gradients: a few roundings to float16, whose eps is 1e-3. Gates sum many of them.
TOLERANCES = {"y": 1e-3, "q": 2e-3, "k": 2e-3, "v": 2e-3, "log_gamma": 6e-3}


def make(seed: int = 0, length: int = 150, **options) -> Inputs:
    made = random_inputs(seed, length=length, dim=32, value_dim=32, rotation="none", **options)
    return made.rounded(torch.float16)


def results(inputs: Inputs, power: int, form: str, scale: float, **options) -> dict[str, torch.Tensor]:
    inputs = inputs.requires_grad()
    y = run(inputs, power, form, **options)
    names = [name for name, value in inputs.arguments().items() if value is not None]
    return {"y": y.detach(), **dict(zip(names, gradients(y * scale, inputs), strict=True))}


def compare(inputs: Inputs, power: int, form: str, *, scale: float = 1.0, loss=1.0, **options) -> None:
    """Outputs and gradients in float16; `scale`: of the outputs' gradients, `loss`: how many times the tolerances."""
    expected = results(inputs.map(torch.Tensor.double), power, "attention", scale, backend="torch")
    actual = results(inputs, power, form, scale, backend="triton", **options)
    for name, want in expected.items():
        assert actual[name].isfinite().all(), name
        error = (actual[name].double() - want).norm() / want.norm()
        assert error <= loss * TOLERANCES[name], f"{name}: {error:.1e}"


@pytest.mark.parametrize(("form", "power", "options"), FORMS)
@pytest.mark.parametrize("gate", ["scalar", pytest.param("none", marks=pytest.mark.slow)])
def test_float16(form, power, options, gate):
    compare(make(length=200, heads=4, key_heads=2, gate=gate), power, form, **options)


@pytest.mark.parametrize(("form", "power", "options"), FORMS_OF_LONG_TESTS)
@pytest.mark.parametrize(
    ("key", "value", "scale"),
    [
        (200.0, 1.0, 1.0),
        (1.0, 1e-3, 30.0),
        pytest.param(2e-4, 1.0, 1e-2, marks=pytest.mark.slow),
        pytest.param(1.0, 1e4, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_keys_and_values_far_from_one(form, power, options, key, value, scale):
    """The weights of these keys would leave the range of float16 at either end, and so would values of 4e4 in sums."""
    inputs = make(1)
    k, v = (inputs.k.float() * key).half(), (inputs.v.float() * value).half()
    compare(replace(inputs, k=k, v=v), power, form, scale=scale, **options)


@pytest.mark.parametrize(("form", "power", "options"), FORMS_OF_LONG_TESTS)
def test_keys_of_many_lengths(form, power, options):
    """No row depends on later, longer keys, nor on those that gates have erased."""
    inputs = make(2)
    lengths = torch.exp2(torch.linspace(-5, 5, 150)).half()[None, :, None, None]
    compare(replace(inputs, k=inputs.k * lengths), power, form, scale=0.1, **options)
    closed = inputs.log_gamma.clone()
    closed[:, [40, 41, 100]] = -torch.inf
    falling = replace(inputs, k=inputs.k * lengths.flip(1), log_gamma=closed)
    compare(falling, power, form, scale=0.1, loss=4.0, **options)


@pytest.mark.parametrize(("form", "power", "options"), FORMS_OF_LONG_TESTS)
def test_strong_gates(form, power, options):
    inputs = make(3)
    compare(replace(inputs, log_gamma=inputs.log_gamma * 20), power, form, loss=4.0, **options)


@pytest.mark.parametrize(("form", "power", "options"), FORMS_OF_LONG_TESTS)
def test_zero_queries_keys_and_gradients(form, power, options):
    inputs = make(4)
    q, k = inputs.q.clone(), inputs.k.clone()
    q[:, ::7], k[:, ::5], k[:, :3] = 0, 0, 0
    inputs = replace(inputs, q=q, k=k)
    compare(inputs, power, form, **options)
    inputs = inputs.requires_grad()
    y = run(inputs, power, form, backend="triton", **options)
    assert not y[:, ::7].any()
    assert not y[:, :3].any()
    assert not any(g.any() for g in torch.autograd.grad(y, inputs.tensors(), torch.zeros_like(y)))
    nothing = replace(inputs, k=torch.zeros_like(k)).requires_grad()
    y = run(nothing, power, form, backend="triton", **options)
    assert not y.any()
    assert all(g.isfinite().all() for g in gradients(y, nothing))


@pytest.mark.parametrize(("form", "power", "options"), FORMS_OF_LONG_TESTS)
def test_packed_documents(form, power, options):
    offsets = torch.tensor([0, 50, 51, 140, 200])
    inputs = make(5, length=200, heads=2, key_heads=1)
    options = {**options, "cu_seqlens": offsets}
    expected = results(inputs.map(torch.Tensor.double), power, "attention", 1.0, backend="torch", cu_seqlens=offsets)
    actual = results(inputs, power, form, 1.0, backend="triton", **options)
    for name, want in expected.items():
        assert (actual[name].double() - want).norm() <= TOLERANCES[name] * want.norm(), name


@pytest.mark.parametrize(("form", "power", "options"), FORMS_OF_LONG_TESTS)
def test_states_at_both_ends(form, power, options):
    inputs = make(6, length=200, heads=2, key_heads=1)

    def in_two(inputs, form, **options):
        inputs = inputs.requires_grad()
        head, state = run(inputs.time(0, 90), power, form, return_state=True, **options)
        tail, state = run(inputs.time(90), power, form, initial_state=state, return_state=True, **options)
        y = torch.cat([head, tail], dim=1)
        weights = torch.randn(state.kv.shape, generator=torch.Generator().manual_seed(1)).to(state.kv.dtype)
        loss = y.sum().double() + 1e-3 * (state.kv * weights).sum().double()
        return [y.detach(), state.kv.detach(), state.normalizer.detach(), *torch.autograd.grad(loss, inputs.tensors())]

    expected = in_two(inputs.map(torch.Tensor.double), "attention", backend="torch")
    for got, want in zip(in_two(inputs, form, backend="triton", **options), expected, strict=True):
        assert (got.double() - want).norm() <= 4e-3 * want.norm()


def test_gates_far_from_the_end(monkeypatch):
    """The drift of their gradient is corrected between blocks of queries."""
    monkeypatch.setattr(running_sums, "DRIFT_SPACING", 64)
    compare(make(7, length=300, heads=2, key_heads=1), 2, "attention")


@pytest.mark.parametrize("gate", ["scalar", "none"])
@pytest.mark.parametrize("power", [2, 4])
def test_bounds_of_keys(gate, power):
    """The running maximum of decayed lengths, over more than one block of tokens."""
    inputs = make(8, length=1100, gate=gate)
    k = inputs.k * torch.exp2(torch.randn(1, 1100, 1, 1, generator=torch.Generator().manual_seed(0)) * 3).half()
    gates = None if inputs.log_gamma is None else gate_sums(inputs.log_gamma.float())
    found = measure_keys(k, inputs.v, power, gates).bound
    lengths = k.double().norm(dim=-1).log2().transpose(1, 2)
    sums = torch.zeros_like(lengths) if gates is None else gates.sums / torch.log(torch.tensor(2.0)).double() / power
    torch.testing.assert_close(found.double(), (lengths - sums).cummax(-1).values + sums, rtol=0, atol=1e-4)


def key_gradients_of_factored_rows(inputs: Inputs, power: int, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv of a head as the warp-specialized kernel computes them from `FactoredRows`, rounded to float16 where it
    rounds: Gluon has no interpreter.
    """
    q, k, v, log_gamma = inputs.q, inputs.k, inputs.v, inputs.log_gamma
    y, weight, *_ = op.fused_attention(
        q, k, v, log_gamma, None, None, None, None, power, 0, q.shape[-1], False, True, False
    )
    gates = None if log_gamma is None else gate_sums(log_gamma)
    ranges = measure_keys(k, v, power, gates)
    rows = prepare_float16(q, y, dy, weight, None, ranges, power)
    factored = multiply_factors(rows, None if gates is None else gates.split, power, 1)
    unit, value_factor, factor = (
        rows.scales[0, 0, x.value].double() for x in (KEY_UNIT, FACTORED_VALUE_FACTOR, GRADIENT_FACTOR)
    )
    length = q.shape[1]
    sums = torch.zeros(length).double() if gates is None else gates.sums[0, 0]
    block = torch.arange(length) // 128
    ends = sums[(block * 128 + 127).clamp(max=length - 1)]
    keys = (k[0, :, 0].double() * unit).half().double()
    later = block[None, :] < block[:, None]
    scores = torch.where(later, factored.decayed[0, :, 0].double() @ keys.mT, factored.q[0, :, 0].double() @ keys.mT)
    log_decay = torch.where(later, sums[block * 128][:, None] - ends[None] + (ends - sums)[None], sums[:, None] - sums)
    decay = log_decay.tril().exp().tril()
    dp = rows.dy[0, :, 0].double() @ v[0, :, 0].double().mT * value_factor + factored.minus_delta[0, 0, :length, None]
    weights, grads = ((scores ** (power - 1) * decay * x).half().double() for x in (scores, dp))
    own = torch.where(later, 0.0, grads).mT @ factored.q[0, :, 0].double()
    dk = (own + torch.where(later, grads, 0.0).mT @ factored.decayed[0, :, 0].double()) * unit * power / factor
    return dk / value_factor, weights.mT @ rows.dy[0, :, 0].double() / factor


@pytest.mark.parametrize(("gate", "power"), [("none", 2), ("weak", 4), ("strong", 2), ("closed", 4)])
@pytest.mark.parametrize(
    ("key", "value", "scale", "spread"), [(1.0, 1.0, 1.0, 0.0), (2e-4, 1.0, 1e-2, 0.0), (200.0, 1e4, 1e-3, 3.0)]
)
def test_factors_multiplied_into_queries(gate, power, key, value, scale, spread):
    inputs = make(13, length=300, heads=1, key_heads=1, gate="none" if gate == "none" else "scalar")
    lengths = torch.exp2(torch.randn(1, 300, 1, 1, generator=torch.Generator().manual_seed(0)) * spread).clamp(max=8)
    k, v = ((x.float() * size).half() for x, size in ((inputs.k, key * lengths), (inputs.v, value)))
    inputs = replace(inputs, k=k, v=v)
    if inputs.log_gamma is not None:
        log_gamma = inputs.log_gamma.float() * (20 if gate == "strong" else 1)
        log_gamma[:, [100, 126, 130, 255]] = -torch.inf if gate == "closed" else log_gamma[:, [100, 126, 130, 255]]
        inputs = replace(inputs, log_gamma=log_gamma)
    dy = (torch.randn(inputs.v.shape, generator=torch.Generator().manual_seed(1)) * scale).half()
    exact = inputs.map(torch.Tensor.double).requires_grad()
    expected = torch.autograd.grad(run(exact, power, "attention", backend="torch"), (exact.k, exact.v), dy.double())
    for found, want in zip(key_gradients_of_factored_rows(inputs, power, dy), expected, strict=True):
        assert (found - want[0, :, 0]).norm() <= 2e-3 * want.norm()


@pytest.fixture
def pieces(monkeypatch):
    monkeypatch.setattr(split_float32, "ON_CPU", True)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(
    ("power", "key", "value", "gate"),
    [(2, 1.0, 1.0, "scalar"), (4, 1.0, 1.0, "none"), (2, 1e-12, 1e12, "none"), (4, 1e4, 1e-4, "scalar")],
)
def test_float32_in_pieces(power, key, value, gate):
    """Errors are those of float32 arithmetic."""
    inputs = random_inputs(9, length=200, heads=2, key_heads=1, dim=32, value_dim=20, gate=gate, dtype=torch.float32)
    inputs = replace(inputs, k=inputs.k * key, v=inputs.v * value)
    exact = inputs.map(torch.Tensor.double).requires_grad()
    inputs = inputs.requires_grad()
    expected = run(exact, power, "attention", backend="torch")
    actual = run(inputs, power, "attention", backend="triton")
    names = ["y", *(name for name, x in inputs.arguments().items() if x is not None)]
    pairs = ([y.detach(), *gradients(y, x)] for y, x in ((actual, inputs), (expected, exact)))
    for name, got, want in zip(names, *pairs, strict=True):
        assert_close(got, want, 2 * float32_tolerance(name, 200), name, relative=True)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize(("power", "gate"), [(2, "none"), (4, "scalar")])
def test_float32_gradients_of_keys_keep_their_precision_beside_a_large_output_gradient(power, gate):
    """One scale for all queries bounds the weights that the gradients of keys sum. Those far below it, as after many
    keys, would lose the lower of their two pieces.
    """
    inputs = random_inputs(17, length=200, heads=2, key_heads=1, dim=32, value_dim=20, gate=gate, dtype=torch.float32)
    exact = inputs.map(torch.Tensor.double).requires_grad()
    inputs = inputs.requires_grad()
    dy = torch.randn(1, 200, 2, 20, generator=torch.Generator().manual_seed(2))
    dy[:, 0] *= 2.0**16  # of a query that sees only the first key
    found = []
    for x, backend in ((inputs, "triton"), (exact, "torch")):
        y = run(x, power, "attention", backend=backend)
        found.append(torch.autograd.grad(y, (x.k, x.v), dy.to(y.dtype)))
    for name, got, want in zip("kv", *found, strict=True):
        assert_close(got[:, 1:], want[:, 1:], 2 * float32_tolerance(name, 200), name, relative=True)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("power", [2, 4])
def test_rows_nearly_orthogonal_to_their_only_key(power, dtype):
    """Their weights are as little as 2^-48 of the bound that scales them."""
    inputs = random_inputs(14, length=150, heads=1, dim=32, value_dim=32, rotation="none").rounded(torch.float16)
    inputs, cosines = with_orthogonal_rows(inputs)
    inputs = inputs.rounded(dtype)
    expected = results(inputs.map(torch.Tensor.double), power, "attention", 1.0, backend="torch")
    actual = results(inputs, power, "attention", 1.0, backend="triton")

    def errors(name):
        want = expected[name][0, :, 0]
        return (actual[name][0, :, 0].double() - want).norm(dim=-1) / want.norm(dim=-1).mean()

    tolerance = 1e-2 if dtype == torch.float16 else 4e-5
    assert (errors("y") <= tolerance).all()
    assert (errors("v") <= tolerance).all()
    # The exact gradient of such a score is 0, and what kernels compute is a rounding error divided by the score.
    alone = cosines < 1
    for name in ("q", "k"):
        assert (errors(name)[alone] <= tolerance + 4e-4 / cosines[alone]).all(), name


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_a_key_of_zeros_after_a_closed_gate_sees_nothing(power, dtype, packed):
    """Nothing of what the gate has closed off is scaled up to the row's weight."""
    starts = [40, 41, 100, 128]
    inputs = random_inputs(15, length=150, heads=2, key_heads=1, dim=32, value_dim=32, rotation="none")
    k, log_gamma = inputs.k.clone(), inputs.log_gamma.clone()
    k[:, starts] = 0
    options = {}
    if packed:
        options["cu_seqlens"] = torch.tensor([0, *starts, 150])
    else:
        log_gamma[:, starts] = -torch.inf
    inputs = replace(inputs, k=k, log_gamma=log_gamma).rounded(dtype)
    expected = results(inputs.map(torch.Tensor.double), power, "attention", 1.0, backend="torch", **options)
    actual = results(inputs, power, "attention", 1.0, backend="triton", **options)
    assert not actual["y"][:, starts].any()
    for name in ("y", "q", "k", "v"):
        error = (actual[name].double() - expected[name]).norm() / expected[name].norm()
        assert error <= (1e-2 if dtype == torch.float16 else 1e-4), name


def test_a_row_whose_weights_are_lost_has_no_gradients():
    """In float16 with p = 4, if the keys that it sees are before its tile and all nearly orthogonal to its query."""
    inputs = random_inputs(16, length=150, heads=1, dim=32, value_dim=32, rotation="none").rounded(torch.float16)
    q, k, log_gamma = inputs.q.clone(), inputs.k.clone(), inputs.log_gamma.clone()
    log_gamma[:, 126] = -torch.inf
    k[:, 126:129, :, 0] = 2.0**-11
    q[:, 128] = 0
    q[:, 128, :, 0] = 1
    inputs = replace(inputs, q=q, k=k, log_gamma=log_gamma)
    actual = results(inputs, 4, "attention", 1.0, backend="triton")
    without = inputs.q.clone()
    without[:, 128] = 0
    exact = replace(inputs, q=without).map(torch.Tensor.double)
    expected = results(exact, 4, "attention", 1.0, backend="torch")
    assert not actual["y"][:, 128].any()
    assert not actual["q"][:, 128].any()
    for name in ("y", "q", "k", "v"):
        assert (actual[name].double() - expected[name]).norm() <= 1e-2 * expected[name].norm(), name


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("rows", [64, 128])
def test_tiles_of_float32_in_pieces(monkeypatch, rows):
    """Tiles of any shape give the same numbers, with the gates' drift corrected between blocks of queries."""
    monkeypatch.setattr(running_sums, "DRIFT_SPACING", 128)
    monkeypatch.setitem(tiles._PIECES, "rows", rows)
    inputs = random_inputs(10, length=300, heads=2, key_heads=1, dim=16, value_dim=16, dtype=torch.float32)
    exact = inputs.map(torch.Tensor.double).requires_grad()
    inputs = inputs.requires_grad()
    y, expected = run(inputs, 2, "attention", backend="triton"), run(exact, 2, "attention", backend="torch")
    assert_close(y.detach(), expected.detach(), float32_tolerance("y", 300))
    names = [name for name, x in inputs.arguments().items() if x is not None]
    for name, got, want in zip(names, gradients(y, inputs), gradients(expected, exact), strict=True):
        assert_close(got, want, float32_tolerance(name, 300), name)


@pytest.mark.usefixtures("pieces")
def test_operators_pass_pytorchs_own_checks():
    for dtype in (torch.float16, torch.float32):
        inputs = random_inputs(11, length=70, dim=32, value_dim=32, rotation="none", dtype=torch.float32)
        inputs = inputs.rounded(dtype).requires_grad()
        qkv = (inputs.q, inputs.k, inputs.v, inputs.log_gamma)
        checks = ("test_schema", "test_faketensor", "test_autograd_registration")
        options = (None, None, None, None, 2, 0, 32, False, True, False)
        torch.library.opcheck(op.fused_attention.op, (*qkv, *options), test_utils=checks)


@pytest.mark.parametrize("power", [2, 4])
def test_one_token_from_a_state(power):
    # A state of p = 4 with heads of 32 has 52,360 rows.
    dim = 8 if power == 4 else 32
    inputs = random_inputs(12, length=40, dim=dim, value_dim=32, rotation="none").rounded(torch.float16)
    _, state = run(inputs.time(0, 39), power, "attention", backend="torch", return_state=True)
    token = inputs.time(39)
    expected = run(token, power, "recurrent", backend="torch", initial_state=state)
    y = run(token, power, "recurrent", backend="triton", initial_state=state)
    assert y.dtype == torch.float16
    assert (y.double() - expected.double()).norm() <= TOLERANCES["y"] * expected.double().norm()
