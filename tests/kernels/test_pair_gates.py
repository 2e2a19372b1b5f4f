"""A gate per rotated pair on the kernels, against float64: in Triton's interpreter, and in bfloat16 on a GPU."""

import itertools
from dataclasses import replace

import pytest
import torch

import sympow
from support import Inputs, assert_close, float32_tolerance, gradients, interpreted, random_inputs, run

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime.interpreter import GridExecutor

from sympow.kernels import running_sums
from sympow.kernels.attention.op import query_scales
from sympow.kernels.common import close_gates, locate
from sympow.kernels.pair_gates import op as pair_op
from sympow.kernels.pair_gates.gate_gradient import crossing_sums
from sympow.kernels.pair_gates.op import fused_pair_attention
from sympow.kernels.pair_gates.reference import pair_attention_reference

# Factors of log γ, which random inputs have uniform in (−1, 0): over 128 tokens gates from 0.28 to 1e-112.
STRENGTHS = {"weak": 0.02, "strong": 4.0, "closed": 1.0}


def gated_inputs(seed: int, gates: str, **shape) -> Inputs:
    """With "closed" gates one in ten is exactly 0, and so are all gates of one token in twenty."""
    inputs = random_inputs(seed, gate="vector", dtype=torch.float32, **shape)
    log_gamma = STRENGTHS[gates] * inputs.log_gamma
    if gates == "closed":
        generator = torch.Generator().manual_seed(seed)
        closed = torch.rand(log_gamma.shape, generator=generator) < 0.1
        closed |= torch.rand(*log_gamma.shape[:2], 1, 1, generator=generator) < 0.05
        log_gamma = log_gamma.masked_fill(closed, -torch.inf)
    return replace(inputs, log_gamma=log_gamma)


def compare(inputs: Inputs, form: str, *, cu_seqlens=None, **options) -> None:
    """Outputs and gradients of the kernels against float64 in plain PyTorch."""
    exact = inputs.map(lambda t: t.double()).requires_grad()
    inputs = inputs.requires_grad()
    expected = run(exact, 2, "attention", backend="torch", cu_seqlens=cu_seqlens)
    actual = run(inputs, 2, form, backend="triton", cu_seqlens=cu_seqlens, **options)
    names = ["y", *(name for name, value in inputs.arguments().items() if value is not None)]
    longest = inputs.q.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
    results = [[y.detach(), *gradients(y, x)] for y, x in ((actual, inputs), (expected, exact))]
    for name, got, want in zip(names, *results, strict=True):
        assert_close(got, want, float32_tolerance(name, longest), name)


@interpreted
@pytest.mark.parametrize(
    ("gates", "rotation", "group", "dim", "value_dim", "length"),
    [
        ("weak", "scale", 2, 6, 5, 130),
        ("strong", "pairs", 1, 16, 16, 70),
        ("closed", "fixed", 1, 8, 40, 77),
        ("weak", "none", 1, 4, 4, 1),
    ],
)
def test_the_attention_form(gates, rotation, group, dim, value_dim, length):
    inputs = gated_inputs(0, gates, length=length, heads=group, key_heads=1, dim=dim, value_dim=value_dim,
                          rotation=rotation)  # fmt: skip
    compare(inputs, "attention")


@interpreted
def test_the_chunked_form():
    inputs = gated_inputs(10, "closed", length=257, heads=1, dim=32, value_dim=32, rotation="none")
    compare(inputs, "chunked", chunk_size=128)


@interpreted
@pytest.mark.parametrize(
    ("form", "group", "options"),
    [("attention", 1, {}), pytest.param("chunked", 2, {"chunk_size": 128}, marks=pytest.mark.slow)],
)
def test_packed_documents(form, group, options):
    inputs = gated_inputs(1, "weak", length=150, heads=group, key_heads=1, dim=8, value_dim=20)
    compare(inputs, form, cu_seqlens=torch.tensor([0, 20, 140, 150]), **options)


@interpreted
def test_the_twin_computes_outputs_and_weights():
    inputs = gated_inputs(2, "closed", length=100, heads=2, key_heads=1, dim=16, value_dim=16, rotation="none")
    documents = locate(torch.tensor([0, 30, 100]), 100)
    y, weight, *_ = fused_pair_attention(
        inputs.q, inputs.k, inputs.v, close_gates(inputs.log_gamma, documents, 1), *documents, 2, 0, False
    )
    exact = [x.double() for x in (inputs.q, inputs.k, inputs.v, inputs.log_gamma)]
    expected_y, expected_weight = pair_attention_reference(*exact, 2, document_start=documents.start)
    assert_close(y, expected_y, float32_tolerance("y", 100), "y")
    assert_close(weight / query_scales(inputs.q).double() ** 2, expected_weight, 5e-6, "weights")


@interpreted
def test_equal_gates_of_all_pairs_are_one_gate_per_head():
    inputs = gated_inputs(3, "weak", length=140, heads=1, dim=16, value_dim=16)
    one = inputs.log_gamma[..., 0]
    equal = replace(inputs, log_gamma=one.unsqueeze(-1).expand_as(inputs.log_gamma))
    expected = run(replace(inputs, log_gamma=one), 2, "attention", backend="triton")
    assert_close(run(equal, 2, "attention", backend="triton"), expected, 4e-6, "y")


@interpreted
def test_a_token_whose_gates_are_all_closed_sees_only_itself():
    inputs = gated_inputs(4, "weak", length=90, heads=1, dim=32, value_dim=32, rotation="none")
    closed = torch.tensor([0, 15, 16, 40, 63, 64, 89])
    inputs.log_gamma[:, closed] = -torch.inf
    y = run(inputs, 2, "attention", backend="triton")
    assert_close(y[:, closed], inputs.v[:, closed], 1e-6, "y")


@interpreted
def test_a_recent_key_is_exact_however_strong_the_gates_before_it():
    """Each factor of a decay is at most 1, so that none can overflow and no product is 0 · ∞."""
    inputs = gated_inputs(5, "weak", length=90, heads=1, dim=32, value_dim=32, rotation="none")
    log_gamma = torch.full_like(inputs.log_gamma, -80.0)
    log_gamma[:, 3::4] = -0.01  # every fourth token keeps the one before it
    inputs = replace(inputs, log_gamma=log_gamma).requires_grad()
    exact = inputs.map(lambda t: t.detach().double())
    y = run(inputs, 2, "attention", backend="triton")
    assert_close(y.detach(), run(exact, 2, "attention", backend="torch"), float32_tolerance("y", 90), "y")
    assert all(gradient.isfinite().all() for gradient in gradients(y, inputs))


@interpreted
def test_states_at_both_ends():
    inputs = gated_inputs(6, "weak", length=60, heads=2, key_heads=1, dim=4, value_dim=4)
    exact = inputs.map(lambda t: t.double())
    expected, after = run(exact, 2, "attention", backend="torch", return_state=True)
    _, between = run(inputs.time(0, 20), 2, "attention", backend="torch", return_state=True)
    y, found = run(
        inputs.time(20), 2, "attention", backend="triton", initial_state=between, return_state=True
    )  # fmt: skip
    assert_close(y, expected[:, 20:], float32_tolerance("y", 60), "y")
    assert_close(found.kv, after.kv, 1e-5, "kv")


@interpreted
def test_the_exact_sums_that_correct_the_drift_of_the_gates_gradient(monkeypatch):
    monkeypatch.setattr(running_sums, "DRIFT_SPACING", 128)
    found = []

    def spy(terms, spacing):
        found.append(crossing_sums(terms, spacing))
        return found[-1]

    monkeypatch.setattr(pair_op, "crossing_sums", spy)
    inputs = gated_inputs(7, "weak", length=260, heads=1, key_heads=1, dim=16, value_dim=16, rotation="none")
    exact = inputs.map(lambda t: t.double()).requires_grad()
    inputs = inputs.requires_grad()
    y = run(inputs, 2, "attention", backend="triton")
    got = gradients(y, inputs)[-1]
    want = gradients(run(exact, 2, "attention", backend="torch"), exact)[-1]
    assert_close(got, want, float32_tolerance("log_gamma", 260), "log_gamma")
    # The kernel pads heads to 32 entries.
    assert_close(found[0].transpose(1, 2)[..., :8], want[:, [128, 256]], 1e-5, "sums")


@interpreted
def test_kernels_are_launched_along_one_axis(monkeypatch):
    grids = []
    launch = GridExecutor.__call__

    def probe(self, *args, **kwargs):
        if "pair_gates" in self.fn.__module__:
            grids.append(self.grid)
        return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", probe)
    inputs = gated_inputs(8, "weak", length=20, heads=1, dim=8, value_dim=8).requires_grad()
    gradients(run(inputs, 2, "attention", backend="triton"), inputs)
    assert len(grids) >= 10
    assert all(len(grid) == 1 for grid in grids)


@pytest.mark.slow
@interpreted
def test_the_operator_passes_pytorchs_own_checks():
    inputs = gated_inputs(9, "weak", length=20, heads=1, dim=16, value_dim=16).requires_grad()
    documents = tuple(locate(torch.tensor([0, 7, 20]), 20))
    qkv = (inputs.q, inputs.k, inputs.v, inputs.log_gamma)
    torch.library.opcheck(fused_pair_attention.op, (*qkv, None, None, 2, 0, True))
    torch.library.opcheck(
        fused_pair_attention.op, (*qkv, *documents, 2, 128, False), test_utils=("test_schema", "test_faketensor")
    )


# On a GPU ------------------------------------------------------------------------------------------------------------


def gpu_inputs(length, gates, *, heads=2, key_heads=2, dim=64, value_dim=64, seed=0) -> Inputs:
    """Normal queries, keys and values, as in an untrained model; with `gates` "closed", some are 0."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    shift = {"weak": 6.9, "strong": 0.0, "closed": 3.0}[gates]
    log_gamma = torch.nn.functional.logsigmoid(normal(1, length, key_heads, dim // 2) + shift)
    if gates == "closed":
        log_gamma[normal(1, length, key_heads, dim // 2) > 2] = -torch.inf
        log_gamma[(normal(1, length, 1, 1) > 2).expand_as(log_gamma)] = -torch.inf
    return Inputs(
        q=normal(1, length, heads, dim).bfloat16(),
        k=normal(1, length, key_heads, dim).bfloat16(),
        v=normal(1, length, key_heads, value_dim).bfloat16(),
        log_gamma=log_gamma,
        beta=2 * torch.rand(1, length, key_heads, device="cuda", generator=generator),
        theta=sympow.rotary_rates(dim, 65_536, device="cuda"),
    )


def plain(inputs: Inputs) -> torch.Tensor:
    """The attention form in straightforward PyTorch, in the dtype of the inputs; scores are summed in float32."""
    inputs = inputs.with_all_heads()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    phase = (inputs.beta.double().cumsum(1).transpose(1, 2).unsqueeze(-1) * inputs.theta.double()).remainder(
        2 * torch.pi
    )
    q, k = sympow.rotate(q, phase), sympow.rotate(k, phase)
    sums = (inputs.log_gamma.double() / 2).clamp(min=-500.0).cumsum(1).transpose(1, 2)
    scores = torch.zeros((), device=q.device)
    for pair in range(q.shape[-1] // 2):
        both = slice(2 * pair, 2 * pair + 2)
        decay = (sums[..., pair].unsqueeze(-1) - sums[..., pair].unsqueeze(-2)).tril().exp().to(q.dtype)
        scores = scores + (q[..., both] @ k[..., both].mT) * decay
    scores = scores.to(q.dtype).tril() ** 2
    return ((scores / scores.sum(-1, keepdim=True)) @ v).transpose(1, 2)


def results(inputs: Inputs, call) -> dict[str, torch.Tensor]:
    """Output and gradients by name."""
    inputs = inputs.requires_grad()
    y = call(inputs)
    generator = torch.Generator("cuda").manual_seed(1)
    weights = torch.randn(y.shape, device="cuda", generator=generator).bfloat16().to(y.dtype)
    names = [name for name, value in inputs.arguments().items() if value is not None]
    return {"y": y.detach(), **dict(zip(names, torch.autograd.grad(y, inputs.tensors(), weights), strict=True))}


def errors(x: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """The relative error, and for tensors with a time axis that of the worst token, relative to a typical token."""
    difference = x.double() - reference
    if x.ndim < 3:
        return (difference.norm() / reference.norm()).item(), 0.0
    by_token = difference.transpose(0, 1).flatten(1).norm(dim=1)
    typical = reference.norm() / reference.shape[1] ** 0.5
    return (difference.norm() / reference.norm()).item(), (by_token.max() / typical).item()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "length", "gates", "heads", "key_heads", "dim", "value_dim"),
    [
        ("attention", 1500, "weak", 4, 4, 64, 64),
        ("attention", 1500, "strong", 2, 2, 64, 64),
        ("attention", 1000, "closed", 2, 2, 64, 64),
        ("attention", 777, "weak", 4, 2, 32, 32),
        ("attention", 700, "weak", 2, 2, 64, 24),
        ("attention", 700, "weak", 2, 1, 128, 128),
        ("chunked", 3000, "weak", 2, 2, 64, 64),
        ("chunked", 2500, "strong", 4, 2, 64, 64),
        ("chunked", 2500, "closed", 2, 2, 64, 64),
        ("chunked", 2500, "weak", 2, 2, 32, 20),
        ("chunked", 2500, "weak", 2, 1, 128, 128),
    ],
)
def test_errors_are_within_twice_those_of_plain_pytorch(form, length, gates, heads, key_heads, dim, value_dim):
    """Compares with the same formula in bfloat16, as a whole and token by token."""
    inputs = gpu_inputs(length, gates, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim)
    exact = results(
        inputs.map(torch.Tensor.double), lambda x: sympow.attention(**x.arguments(), form="attention", backend="torch")
    )
    simple = results(inputs, plain)
    actual = results(inputs, lambda x: sympow.attention(**x.arguments(), form=form, backend="triton"))
    for name, want in exact.items():
        assert actual[name].isfinite().all(), name
        for kind, ours, theirs in zip(
            ("", " by token"), errors(actual[name], want), errors(simple[name], want), strict=True
        ):
            assert ours <= 2 * theirs, f"{name}{kind}: {ours:.2e}, plain PyTorch {theirs:.2e}"


@pytest.mark.gpu
def test_packed_documents_equal_documents_alone():
    lengths = [1, 300, 64, 700, 3]
    offsets = [0, *itertools.accumulate(lengths)]
    inputs = gpu_inputs(offsets[-1], "weak")
    together = sympow.attention(
        **inputs.arguments(), cu_seqlens=torch.tensor(offsets, device="cuda"), form="attention", backend="triton"
    )
    alone = [
        sympow.attention(**inputs.time(start, stop).arguments(), form="attention", backend="triton")
        for start, stop in itertools.pairwise(offsets)
    ]
    assert errors(together, torch.cat(alone, dim=1).double())[0] <= 2**-7


@pytest.mark.gpu
def test_a_second_run_is_bitwise_the_same():
    inputs = gpu_inputs(4096, "weak", heads=4, key_heads=2)
    first, second = (results(inputs, lambda x: sympow.attention(**x.arguments(), backend="triton")) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
