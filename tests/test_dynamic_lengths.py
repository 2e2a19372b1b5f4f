"""torch.compile and torch.export with dynamic lengths: one compilation, one program, the same numbers."""

import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from torch.export import Dim

import sympow
from support import FORMS, assert_close, gradients, interpreted, random_inputs, run
from sympow import GPT, GPTConfig

LENGTHS = (5, 9, 33, 300)
SMALL = {"vocab_size": 50, "layers": 1, "width": 16, "heads": 4, "key_value_heads": 2, "rotary": "scale"}


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, backend="aot_eager", fullgraph=True, **options)


def graphs() -> int:
    """The number of graphs compiled in this test."""
    return counters["stats"]["unique_graphs"]


def losses(y, state):
    """A vector of all outputs."""
    parts = [y] if state is None else [y, *state._tensors().values()]
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize(
    ("gate", "form"),
    [
        pytest.param("none", "auto", marks=pytest.mark.slow),
        *itertools.product(["scalar"], ["auto", "chunked"]),
        *(pytest.param("scalar", form, marks=pytest.mark.slow) for form in FORMS if form != "chunked"),
        *(pytest.param("vector", form, marks=pytest.mark.slow) for form in ("auto", "attention", "chunked")),
    ],
)
def test_attention_is_compiled_once_for_all_lengths(gate, form):
    """Outputs and all gradients; in batches of different size, too."""
    call = compiled(lambda inputs: run(inputs, 2, form), dynamic=True)
    for seed, length in enumerate(LENGTHS[:3] if form == "recurrent" else LENGTHS):
        inputs = random_inputs(seed, batch=6 + seed, length=length, heads=4, key_heads=2, gate=gate).requires_grad()
        y, expected = call(inputs), run(inputs, 2, "attention")
        assert_close(y, expected, 1e-9, f"y of {length}")
        for found, wanted in zip(gradients(y, inputs), gradients(expected, inputs), strict=True):
            assert_close(found, wanted, 1e-9, f"gradient of {length}")
    assert graphs() == 1


@pytest.mark.parametrize(
    ("rotation", "form"),
    [("none", "auto"), *(pytest.param("pairs", form, marks=pytest.mark.slow) for form in ("chunked", "recurrent"))],
)
def test_attention_between_states_is_compiled_once_for_all_lengths(rotation, form):
    def continued(inputs, state):
        return run(inputs, 4, form, initial_state=state, return_state=True)

    call = compiled(continued, dynamic=True)
    for seed, length in enumerate(LENGTHS[:3] if form == "recurrent" else LENGTHS):
        inputs = random_inputs(seed, batch=3, length=length + 4, heads=2, rotation=rotation)
        _, state = run(inputs.time(0, 4), 4, "attention", return_state=True)
        inputs, results = inputs.time(4).requires_grad(), []
        for of in (call, continued):
            start = state._map(lambda x: x.detach().clone().requires_grad_())
            y, after = of(inputs, start)
            total = losses(y, after)
            weights = torch.randn(total.shape, generator=torch.Generator().manual_seed(0), dtype=total.dtype)
            leaves = [*inputs.tensors(), *start._tensors().values()]
            results.append([total, *torch.autograd.grad(total, leaves, weights)])
        for found, wanted in zip(*results, strict=True):
            assert_close(found, wanted, 1e-9, f"outputs and gradients of {length}")
    assert graphs() == 1


@pytest.mark.parametrize(
    ("form", "marked"),
    [
        ("chunked", True),
        pytest.param("auto", True, marks=pytest.mark.slow),
        *(pytest.param("attention", marked, marks=pytest.mark.slow) for marked in (True, False)),
    ],
)
@torch.no_grad()
def test_a_model_is_compiled_once_for_all_lengths(form, marked):
    """With lengths marked as dynamic; otherwise torch compiles again at the second length."""
    model = GPT(GPTConfig(**SMALL, form=form)).double()
    call = compiled(lambda tokens: model(tokens, return_state=False)[0])
    for length in LENGTHS:
        tokens = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(length))
        if marked:
            torch._dynamo.mark_dynamic(tokens, 1)
        assert_close(call(tokens), model(tokens, return_state=False)[0], 1e-10, f"logits of {length}")
    assert graphs() == (1 if marked else 2)


@pytest.mark.slow
def test_a_model_trains_at_all_lengths_compiled_once():
    model = GPT(GPTConfig(**SMALL | {"gating": "vector", "rotary": "pairs"})).double()
    call = compiled(lambda tokens: model(tokens, return_state=False)[0], dynamic=True)
    for length in LENGTHS:
        tokens = torch.randint(50, (2, length), generator=torch.Generator().manual_seed(length))
        found, wanted = (
            torch.autograd.grad(of(tokens).square().mean(), list(model.parameters()))
            for of in (call, lambda tokens: model(tokens, return_state=False)[0])
        )
        for mine, theirs in zip(found, wanted, strict=True):
            assert_close(mine, theirs, 1e-9, f"gradient of {length}")
    assert graphs() == 1


@interpreted
@pytest.mark.parametrize("form", [pytest.param("attention", marks=pytest.mark.slow), "chunked"])
@torch.no_grad()
def test_kernels_are_compiled_once_for_all_lengths(form):
    pytest.importorskip("triton", reason="needs Triton")
    layer = sympow.ConformalAttention(64, 2, rotary="scale", form=form, backend="triton")
    call = compiled(lambda x: layer(x, return_state=False)[0], dynamic=True)
    for length in (65, 130, 200):
        x = torch.randn(1, length, 64, generator=torch.Generator().manual_seed(length))
        assert torch.equal(call(x), layer(x, return_state=False)[0])
    assert graphs() == 1


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "backend"), [(torch.float64, "torch"), (torch.bfloat16, "triton")])
def test_training_on_a_gpu_is_compiled_once_for_all_lengths(dtype, backend):
    """With the inductor backend, compared with eager mode in float64."""
    config = GPTConfig(**SMALL | {"width": 128}, form="attention", backend=backend)
    model = GPT(config).to("cuda", dtype)
    plain = lambda tokens: model(tokens, return_state=False)[0]  # noqa: E731
    call = torch.compile(plain, fullgraph=True, dynamic=True)
    for length in (70, 130, 300):
        tokens = torch.randint(50, (3, length), generator=torch.Generator().manual_seed(length)).cuda()
        results = []
        for of in (call, plain):
            logits = of(tokens)
            results.append([logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))])
        for found, wanted in zip(*results, strict=True):
            assert found.isfinite().all()
            if dtype == torch.float64:
                assert_close(found, wanted, 1e-9, f"logits and gradients of {length}")
    assert graphs() == 1


@pytest.mark.parametrize(
    ("form", "strict", "return_state"),
    [("auto", False, True), pytest.param("attention", True, False, marks=pytest.mark.slow)],
)
def test_a_layer_is_exported_for_all_lengths(form, strict, return_state):
    """The program has PyTorch's own operators only, so that it runs where this package is not installed."""
    torch.manual_seed(0)
    layer = sympow.ConformalAttention(16, 4, key_value_heads=2, rotary="scale", form=form).double()
    axes = {"x": {0: Dim("batch"), 1: Dim("t")}, "return_state": None}
    example = {"x": torch.randn(3, 7, 16, dtype=torch.float64), "return_state": return_state}
    program = torch.export.export(layer, (), example, dynamic_shapes=axes, strict=strict)
    operators = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert not [x for x in operators if "sympow" in str(x)]
    again = program.module()
    for length in LENGTHS:
        x = torch.randn(2, length, 16, dtype=torch.float64)
        (y, state), (expected, after) = (of(x=x, return_state=return_state) for of in (again, layer))
        assert_close(y, expected, 1e-10, f"y of {length}")
        if return_state:
            assert_close(state.kv, after.kv, 1e-10, f"state of {length}")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"gating": "vector", "form": "chunked"}, {"mixer": "softmax"}], ids=str)
def test_a_model_is_exported_for_all_lengths(options, tmp_path):
    model = GPT(GPTConfig(**SMALL, **options)).double().eval()
    tokens = torch.randint(50, (1, 7), generator=torch.Generator().manual_seed(0))
    axes = {"tokens": {1: Dim("t")}, "return_state": None}
    program = torch.export.export(model, (), {"tokens": tokens, "return_state": False}, dynamic_shapes=axes)
    torch.export.save(program, tmp_path / "model.pt2")
    again = torch.export.load(tmp_path / "model.pt2").module()
    for length in LENGTHS:
        tokens = torch.randint(50, (1, length), generator=torch.Generator().manual_seed(length))
        logits, _ = again(tokens=tokens, return_state=False)
        assert_close(logits, model(tokens, return_state=False)[0], 1e-10, f"logits of {length}")
