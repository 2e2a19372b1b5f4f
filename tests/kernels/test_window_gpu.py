"""Decoding with a window on a GPU, in bfloat16, against float64 on the same inputs."""

from dataclasses import replace

import pytest
import torch

import sympow
from support import Inputs

pytestmark = pytest.mark.gpu


def make_inputs(length, *, batch=2, heads=2, key_heads=2, dim=64, value_dim=64, seed=0) -> Inputs:
    """Normal queries, keys and values; gates mostly near 1, some of them 0."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    log_gamma = torch.nn.functional.logsigmoid(normal(batch, length, key_heads) + 3)
    log_gamma[normal(batch, length, key_heads) > 2] = -torch.inf
    return Inputs(
        q=normal(batch, length, heads, dim).bfloat16(),
        k=normal(batch, length, key_heads, dim).bfloat16(),
        v=normal(batch, length, key_heads, value_dim).bfloat16(),
        log_gamma=log_gamma,
        beta=2 * torch.rand(batch, length, key_heads, device="cuda", generator=generator),
        theta=sympow.rotary_rates(dim, 65_536, device="cuda"),
    )


def error(x: torch.Tensor, reference: torch.Tensor) -> float:
    return ((x.double() - reference).norm() / reference.norm()).item()


def exact(inputs: Inputs, power: int, stop: int | None = None):
    inputs = inputs.time(0, stop).map(torch.Tensor.double)
    return sympow.attention(**inputs.arguments(), power=power, return_state=True, backend="torch")


@torch.no_grad()
@pytest.mark.parametrize(
    ("power", "heads", "key_heads", "dim", "value_dim", "capacity"),
    [
        (2, 2, 2, 64, 64, 64),
        (2, 8, 2, 64, 64, 32),
        (4, 2, 1, 16, 16, 64),
        (2, 2, 2, 32, 24, 7),
        (2, 1, 1, 64, 128, 200),
    ],
)
def test_steps_and_folds_are_as_good_as_their_dtypes(power, heads, key_heads, dim, value_dim, capacity):
    from sympow.ops.window import Window

    inputs = make_inputs(150, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim)
    expected, after = exact(inputs, power)
    _, state = exact(inputs, power, 20)
    window = Window.open(state, capacity=capacity, dtype=torch.bfloat16)
    tokens = [inputs.time(i, i + 1).arguments() for i in range(150)]
    y = torch.cat([window.step(**token, backend="triton") for token in tokens[20:]], dim=1)
    assert error(y, expected[:, 20:]) <= 2**-8
    found = window.close()
    assert error(found.kv, after.kv) <= 1e-6
    assert error(found.normalizer, after.normalizer) <= 1e-6
    assert torch.allclose(found.phase.cos(), after.phase.cos(), atol=1e-9)
    window = Window.empty(2, key_heads, dim, value_dim, power, rotated=True, capacity=150, dtype=torch.bfloat16,
                          device="cuda")  # fmt: skip
    y = torch.cat([window.step(**token, backend="triton") for token in tokens], dim=1)
    assert error(y, expected) <= 2**-8


@torch.no_grad()
@pytest.mark.parametrize("gate", [6.9, 0.0])
@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "dim"),
    [(16, 12, 12, 64), (32, 4, 1, 64), (32, 2, 2, 128), (8, 8, 2, 128)],
)
def test_outputs_are_as_good_from_the_copy_as_from_the_state_row_by_row(
    batch, heads, key_heads, dim, gate, monkeypatch
):
    from sympow.ops import window as window_module

    inputs = make_inputs(360, batch=batch, heads=heads, key_heads=key_heads, dim=dim, value_dim=dim)
    log_gamma = torch.nn.functional.logsigmoid(torch.randn_like(inputs.log_gamma) + gate)
    inputs = replace(inputs, log_gamma=log_gamma)
    expected = exact(inputs, 2)[0][:, 260:]
    _, state = exact(inputs, 2, 260)
    errors, states = [], []
    for dtypes in ((torch.bfloat16,), ()):
        monkeypatch.setattr(window_module, "COPY_DTYPES", dtypes)
        window = window_module.Window.open(state, capacity=32, dtype=torch.bfloat16)
        tokens = [inputs.time(i, i + 1).arguments() for i in range(260, 360)]
        y = torch.cat([window.step(**token, backend="triton") for token in tokens], dim=1)
        assert (window.kv_half is not None) == bool(dtypes)
        errors.append((y.double() - expected).norm(dim=-1) / expected.norm(dim=-1))
        states.append(window.close().kv)
    assert torch.equal(*states), "folds do not read the copy"
    assert errors[0].norm() <= 1.1 * errors[1].norm()
    # Where gates forget quickly, one row in thousands has a query that is almost orthogonal to all keys that count. It
    # shows the rounding of the copy.
    for part in (0.99, 0.999):
        assert errors[0].flatten().quantile(part) <= 2 * errors[1].flatten().quantile(part)
    assert errors[0].max() <= (2**-7 if gate > 1 else 2**-6)


@torch.no_grad()
def test_one_captured_step_and_one_captured_fold_serve_a_whole_generation():
    from sympow.ops.window import Window

    inputs, capacity, prompt = make_inputs(100, batch=3, heads=4), 16, 20
    expected, after = exact(inputs, 2)
    _, state = exact(inputs, 2, prompt)
    window = Window.open(state, capacity=capacity, dtype=torch.bfloat16)
    outputs = [window.step(**inputs.time(prompt, prompt + 1).arguments())]  # the first call compiles the kernels
    window.fold()
    token = inputs.time(prompt, prompt + 1).map(torch.Tensor.clone)
    torch.cuda.synchronize()
    step, fold = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(step):
        y = window.step(**token.arguments())
    with torch.cuda.graph(fold):
        window.fold()
    assert window.tokens == 0
    for i in range(prompt + 1, 100):
        for new, place in zip(inputs.time(i, i + 1).tensors(), token.tensors(), strict=True):
            place.copy_(new)
        step.replay()
        outputs.append(y.clone())
        if (i - prompt) % capacity == 0:
            fold.replay()
    assert error(torch.cat(outputs, dim=1), expected[:, prompt:]) <= 2**-8
    found = window.close()
    assert error(found.kv, after.kv) <= 1e-6


@torch.no_grad()
def test_a_second_run_is_bitwise_the_same():
    from sympow.ops.window import Window

    inputs = make_inputs(80, batch=4, heads=4)
    results = []
    for _ in range(2):
        window = Window.empty(4, 2, 64, 64, 2, rotated=True, capacity=32, dtype=torch.bfloat16, device="cuda")
        y = torch.cat([window.step(**inputs.time(i, i + 1).arguments()) for i in range(80)], dim=1)
        results.append((y, window.close().kv))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@torch.no_grad()
def test_operators_pass_pytorchs_own_checks():
    from sympow.kernels.decode import op as window_op
    from sympow.ops.window import Window

    inputs = make_inputs(2)
    window = Window.empty(2, 2, 64, 64, 2, rotated=True, capacity=8, dtype=torch.bfloat16, device="cuda")
    window.step(**inputs.time(0, 1).arguments())
    window.fold()
    window.step(**inputs.time(0, 1).arguments())
    token = [t.squeeze(1) for t in inputs.time(1).tensors()[:-1]]
    tables = window._feature_tables()
    held = (window.keys, window.values, window.decay, window.count)
    torch.library.opcheck(
        window_op.fused_window_step.op,
        (*token, inputs.theta, window.kv_half, window.normalizer, window.kv_scale, *held, window.phase, window.arrivals,
         window.workspace, *tables, 2),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    torch.library.opcheck(
        window_op.fused_fold.op,
        (window.kv, window.normalizer, window.kv_half, window.kv_scale, *held, window.arrivals, *tables),
        test_utils=("test_schema", "test_faketensor"),
    )
