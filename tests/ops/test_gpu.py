"""The portable paths on a GPU: the same numbers as on the CPU."""

import pytest
import torch

import sympow
from support import FORMS, assert_close, assert_states_close, random_inputs, run
from sympow.ops.torch.softmax import softmax_attention

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize("gate", ["none", "scalar", "vector"])
@pytest.mark.parametrize("rotation", ["none", "scale", "pairs"])
def test_outputs_states_and_gradients_equal_the_cpus(form, power, gate, rotation):
    inputs = random_inputs(0, batch=2, length=40, heads=4, key_heads=2, gate=gate, rotation=rotation)
    here, there = inputs.requires_grad(), inputs.map(torch.Tensor.cuda).requires_grad()
    expected, expected_state = run(here, power, form, return_state=True)
    actual, state = run(there, power, form, return_state=True)
    assert state.kv.device.type == "cuda"
    assert_close(actual.cpu(), expected, 1e-9, "y")
    assert_states_close(state.to("cpu"), expected_state, 1e-9)
    weights = torch.randn_like(expected)
    got = torch.autograd.grad(actual, there.tensors(), weights.cuda(), materialize_grads=True)
    want = torch.autograd.grad(expected, here.tensors(), weights, materialize_grads=True)
    for a, b in zip(got, want, strict=True):
        assert_close(a.cpu(), b, 1e-9, "gradient")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_as_good_as_rounding_allows(form, dtype):
    exact = random_inputs(1, length=300, heads=4, dim=16).map(torch.Tensor.cuda)
    rounded = exact.rounded(dtype)
    expected = run(rounded.map(torch.Tensor.double), 2, "attention")
    options = {"chunk_size": 64} if form == "chunked" else {}
    tolerance = torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
    assert_close(run(rounded, 2, form, **options), expected, tolerance, "y")


def test_a_long_sequence_continues_across_forms_and_devices():
    inputs = random_inputs(2, length=3000, dim=16, dtype=torch.float32)
    expected = run(inputs.map(torch.Tensor.double), 2, "attention")
    _, state = run(inputs.time(0, 2990).map(torch.Tensor.cuda), 2, "chunked", chunk_size=256, return_state=True)
    tail = run(inputs.time(2990), 2, "recurrent", initial_state=state.to("cpu"))
    assert_close(tail, expected[:, 2990:], 1e-4, "y")


def test_documents_may_be_given_on_either_device():
    inputs = random_inputs(3, length=20).map(torch.Tensor.cuda)
    offsets = torch.tensor([0, 7, 20], dtype=torch.int32)
    expected = run(inputs, 2, "chunked", cu_seqlens=offsets)
    assert_close(run(inputs, 2, "chunked", cu_seqlens=offsets.cuda()), expected, 1e-12, "y")


def test_values_of_gates_are_checked_on_a_gpu_when_asked(monkeypatch):
    inputs = random_inputs(4).map(torch.Tensor.cuda)
    bad = {**inputs.arguments(), "log_gamma": inputs.log_gamma + 2}
    sympow.attention(**bad)
    monkeypatch.setenv("SYMPOW_CHECK_VALUES", "1")
    with pytest.raises(ValueError, match="log_gamma must not be positive"):
        sympow.attention(**bad)


def test_offsets_of_documents_are_always_checked():
    inputs = random_inputs(4).map(torch.Tensor.cuda)
    with pytest.raises(ValueError, match="cu_seqlens must end"):
        sympow.attention(**inputs.arguments(), cu_seqlens=torch.tensor([0, 3]).cuda())


def test_devices_that_do_not_match_are_named():
    inputs = random_inputs(5).map(torch.Tensor.cuda)
    with pytest.raises(ValueError, match=r"share a device; q is on cuda:0, but k is on cpu"):
        sympow.attention(**{**inputs.arguments(), "k": inputs.k.cpu()})


@pytest.mark.parametrize("gate", ["none", "scalar"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_softmax_equals_the_cpus(gate, dtype):
    inputs = random_inputs(6, length=50, heads=4, key_heads=2, dim=16, value_dim=16, gate=gate)
    rounded = inputs.rounded(dtype)
    expected = softmax_attention(**rounded.map(torch.Tensor.double).arguments())
    actual = softmax_attention(**rounded.map(torch.Tensor.cuda).arguments())
    assert_close(actual.cpu(), expected, 4 * torch.finfo(dtype).eps, "y")


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
def test_a_model_trains_under_autocast(mixer):
    torch.manual_seed(0)
    model = sympow.GPT(sympow.GPTConfig.preset("byte-400k", mixer=mixer, rotary="scale")).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits, _ = model(torch.randint(256, (2, 64), device="cuda"))
    logits.float().square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


def test_gradients_are_those_of_a_tiled_plain_path():
    """Long enough for several tiles and blocks, against whole matrices in float64."""
    inputs = random_inputs(7, length=1500, heads=2, dim=8).map(torch.Tensor.cuda).requires_grad()
    expected = run(inputs, 2, "chunked", chunk_size=100)
    actual = run(inputs, 2, "attention")
    assert_close(actual, expected, 1e-9, "y")
    weights = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad(actual, inputs.tensors(), weights),
        torch.autograd.grad(expected, inputs.tensors(), weights),
        strict=True,
    ):
        assert_close(a, b, 1e-8, "gradient")


def test_the_softmax_baseline_turns_queries_and_keys_with_the_kernel():
    """At most twice the error of plain PyTorch."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = torch.randn(3, 2, 300, 4, 64, device="cuda", generator=generator).bfloat16()
    beta = 2 * torch.rand(2, 300, 4, device="cuda", generator=generator)
    theta = sympow.rotary_rates(64, 65_536, device="cuda")

    def plainly(q, k, v, beta):
        angles = sympow.accumulate_phase(theta, beta)
        rotated = (x.transpose(1, 2) for x in (sympow.rotate(q, angles), sympow.rotate(k, angles), v))
        return torch.nn.functional.scaled_dot_product_attention(*rotated, is_causal=True).transpose(1, 2)

    def results(call, dtype):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (q, k, v, beta)]
        y = call(*leaves)
        return y.detach(), *torch.autograd.grad(y.double().square().sum(), leaves)

    fused = results(lambda q, k, v, beta: softmax_attention(q, k, v, beta=beta, theta=theta), None)
    for ours, plain, want in zip(fused, results(plainly, None), results(plainly, torch.float64), strict=True):
        assert (ours.double() - want).norm() <= 2 * (plain.double() - want).norm()
