"""What earlier chunks contribute for p = 4: in float32 in Triton's interpreter, in bfloat16 on a GPU."""

import pytest
import torch

from support import interpreted, within

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.states import quartic_op
from sympow.kernels.states.quartic_op import past_attention
from sympow.kernels.states.reference import past_attention_reference

NAMES = ("numerator", "denominator", "dq", "dk", "dv", "d log_gamma")


def make_inputs(length, gate, *, batch=1, heads=1, key_heads=1, dim=16, value_dim=16, seed=0, device="cpu"):
    """Queries of length 1, normal keys and values; gates weak, strong, with some closed, or none."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32)

    log_gamma = None
    if gate != "none":
        shift = {"weak": 6.9, "strong": 0.0, "closed": 4.0}[gate]
        log_gamma = torch.nn.functional.logsigmoid(normal(batch, length, key_heads) + shift)
        if gate == "closed":
            log_gamma[normal(batch, length, key_heads) > 2] = -torch.inf
    q = torch.nn.functional.normalize(normal(batch, length, heads, dim), dim=-1)
    return q, normal(batch, length, key_heads, dim), normal(batch, length, key_heads, value_dim), log_gamma


def results(inputs, call, seed=1):
    """Both sums and the gradients of a random combination of them."""
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    numerator, denominator = call(*inputs)
    generator = torch.Generator(numerator.device).manual_seed(seed)
    weights = [torch.randn(x.shape, generator=generator, device=x.device) for x in (numerator, denominator)]
    tensors = [x for x in inputs if x is not None]
    weights = [w.to(x.dtype) for w, x in zip(weights, (numerator, denominator), strict=True)]
    grads = torch.autograd.grad([numerator, denominator], tensors, weights, materialize_grads=True)
    return [x.detach() for x in (numerator, denominator, *grads)]


def error(x, reference):
    return ((x.double() - reference).norm() / reference.norm().clamp(min=1e-30)).item()


@interpreted
@pytest.mark.parametrize(
    ("gate", "batch", "heads", "key_heads", "dim", "value_dim", "length", "chunk"),
    [
        ("weak", 2, 2, 1, 16, 16, 130, 128),
        pytest.param("strong", 1, 1, 1, 16, 32, 260, 128, marks=pytest.mark.slow),
        pytest.param("closed", 1, 1, 1, 16, 16, 260, 128, marks=pytest.mark.slow),
        pytest.param("none", 1, 1, 1, 16, 64, 270, 256, marks=pytest.mark.slow),
        pytest.param("weak", 1, 1, 1, 32, 32, 140, 128, marks=pytest.mark.slow),
    ],
)
def test_sums_and_gradients(gate, batch, heads, key_heads, dim, value_dim, length, chunk):
    inputs = make_inputs(length, gate, batch=batch, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim)
    exact = [None if x is None else x.double() for x in inputs]
    wanted = results(exact, lambda *x: past_attention_reference(*x, 4, chunk))
    found = results(inputs, lambda *x: past_attention(*x, 4, chunk)[:2])
    for name, got, want in zip(NAMES, found, wanted, strict=False):
        assert got.isfinite().all(), name
        # With strong decay, gradients of gates are small differences of large numbers.
        within(error(got, want), 2e-5 if name == "d log_gamma" else 6e-6, name)


@pytest.mark.slow
@interpreted
def test_blocks_of_heads_change_nothing(monkeypatch):
    inputs = make_inputs(129, "weak", heads=2, key_heads=2)
    whole = results(inputs, lambda *x: past_attention(*x, 4, 128)[:2])
    monkeypatch.setattr(quartic_op, "SCRATCH_BYTES", 1)
    blocks = results(inputs, lambda *x: past_attention(*x, 4, 128)[:2])
    assert all(torch.equal(a, b) for a, b in zip(whole, blocks, strict=True))


@pytest.mark.parametrize("sequences", [0, 1, 2, 3, 6, 100])
def test_blocks_of_heads_cover_every_head_once(monkeypatch, sequences):
    q, k, v, _ = make_inputs(129, "none", batch=5, heads=6, key_heads=3)
    monkeypatch.setattr(quartic_op, "SCRATCH_BYTES", 10**20)
    (whole,) = quartic_op._head_blocks(q, k, v, 128, tensors=1)
    assert whole.queries(q).shape == q.shape
    monkeypatch.setattr(quartic_op, "SCRATCH_BYTES", sequences * quartic_op._sequence_bytes(q, v, 128))
    seen = torch.zeros(5, 3, dtype=torch.int64)
    for block in quartic_op._head_blocks(q, k, v, 128, tensors=1):
        seen[block.batch, block.heads] += 1
        assert block.keys(k).shape[0] * block.kv_heads <= max(1, sequences)
    assert (seen == 1).all()


@interpreted
def test_one_chunk_has_no_past():
    inputs = make_inputs(100, "weak")
    assert not any(x.any() for x in results(inputs, lambda *x: past_attention(*x, 4, 128)[:2]))


@interpreted
def test_any_strides():
    q, k, v, log_gamma = make_inputs(150, "weak", heads=2, key_heads=2)
    expected = past_attention(q, k, v, log_gamma, 4, 128)
    odd = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in (q, k, v)]
    found = past_attention(*odd, log_gamma.transpose(1, 2).contiguous().transpose(1, 2), 4, 128)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("gate", ["weak", "none"])
def test_the_operator_passes_pytorchs_own_checks(gate):
    inputs = [None if x is None else x.requires_grad_() for x in make_inputs(140, gate)]
    torch.library.opcheck(past_attention.op, (*inputs, 4, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"power": 2}, "power must be 4"),
        ({"chunk": 100}, "chunk must be"),
        ({"k": torch.zeros(1, 9, 1, 32)}, "q and k must have"),
        ({"v": torch.zeros(1, 9, 1, 24)}, "v must have heads"),
        ({"v": torch.zeros(1, 9, 2, 16)}, "k and v must have"),
        ({"v": torch.zeros(1, 9, 1, 16, dtype=torch.float64)}, "one dtype"),
    ],
)
def test_what_is_not_served_says_so(change, message):
    q, k, v, log_gamma = make_inputs(9, "none")
    arguments = {"q": q, "k": k, "v": v, "log_gamma": log_gamma, "power": 4, "chunk": 128} | change
    with pytest.raises(ValueError, match=message):
        past_attention(*arguments.values())


GPU_CASES = [
    # gate, batch, heads, key_heads, dim, value_dim, length, chunk
    ("weak", 2, 4, 2, 16, 16, 2000, 512),
    ("strong", 1, 2, 2, 16, 32, 1500, 256),
    ("closed", 1, 2, 1, 16, 64, 1500, 256),
    ("none", 1, 2, 2, 16, 128, 1300, 256),
    ("weak", 1, 2, 2, 32, 32, 2500, 1024),
    ("closed", 1, 4, 2, 32, 64, 1500, 512),
    ("none", 1, 2, 2, 32, 128, 1500, 512),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("gate", "batch", "heads", "key_heads", "dim", "value_dim", "length", "chunk"),
    GPU_CASES,
)
def test_errors_are_within_twice_those_of_plain_pytorch(gate, batch, heads, key_heads, dim, value_dim, length, chunk):
    """Compares with the same sums in bfloat16 throughout."""
    inputs = make_inputs(length, gate, batch=batch, heads=heads, key_heads=key_heads, dim=dim, value_dim=value_dim,
                         device="cuda")  # fmt: skip
    inputs = [*(x.bfloat16() for x in inputs[:3]), inputs[3]]
    exact = [None if x is None else x.double() for x in inputs]
    wanted = results(exact, lambda *x: past_attention_reference(*x, 4, chunk))
    plain = results(inputs, lambda *x: past_attention_reference(*x, 4, chunk))
    found = results(inputs, lambda *x: past_attention(*x, 4, chunk)[:2])
    for name, got, same, want in zip(NAMES, found, plain, wanted, strict=False):
        assert got.isfinite().all(), name
        ours, theirs = error(got, want), error(same, want)
        assert ours <= 2 * theirs, f"{name}: {ours:.2e}, plain PyTorch {theirs:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [16, 32])
def test_a_second_run_is_bitwise_the_same(dim):
    inputs = make_inputs(4096, "weak", heads=4, key_heads=2, dim=dim, value_dim=dim, device="cuda")
    inputs = [*(x.bfloat16() for x in inputs[:3]), inputs[3]]
    first, second = (results(inputs, lambda *x: past_attention(*x, 4, 1024)[:2]) for _ in range(2))
    for name, a, b in zip(NAMES, first, second, strict=True):
        assert torch.equal(a, b), name
