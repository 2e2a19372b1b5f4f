"""With backend="torch", no layer, cache or loss launches a Triton kernel.

Without a GPU, the tests use tensors that report a CUDA device.
"""

from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton

import sympow
from support import random_inputs
from sympow.kernels import cross_entropy
from sympow.kernels import rotary as rotation_op
from sympow.kernels.decode import gate_projection
from sympow.layers import ConformalAttention
from sympow.model.losses import linear_cross_entropy
from sympow.ops import dispatch
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.torch.softmax import softmax_attention
from sympow.ops.window import Window
from sympow.train.objective import ModelWithLoss


class KernelLaunchedError(Exception):
    """A Triton kernel was about to be launched."""


@pytest.fixture
def claimed_gpu(monkeypatch):
    """All tensors report a CUDA device; the kernels of layers, caches and losses raise."""

    def launch(*args, **kwargs):
        raise KernelLaunchedError

    monkeypatch.setattr(gate_projection, "step_gates", launch)
    monkeypatch.setattr(cross_entropy, "cross_entropy_in_place", launch)
    monkeypatch.setattr(rotation_op, "fused_rotation", launch)
    # As on a GPU, where kernels are not interpreted.
    monkeypatch.setattr(dispatch, "triton_interpreted", lambda: False)
    monkeypatch.setattr(dispatch, "device_unsupported_reason", lambda *_, **__: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@contextmanager
def kernel_expected(backend):
    """Asserts that a kernel is launched, unless backend is "torch"."""
    if backend == "torch":
        yield
    else:
        with pytest.raises(KernelLaunchedError):
            yield


BACKENDS = ["torch", "auto"]


class Nothing:
    """A state from which every query returns zero."""

    values = torch.zeros(0, dtype=torch.bfloat16)
    conv_state = None

    def step(self, q, k, v, log_gamma, beta, theta, backend):
        assert log_gamma.shape == beta.shape == (2, 1, 4)
        return torch.zeros_like(q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gates_of_a_step(claimed_gpu, backend):
    layer = ConformalAttention(64, 4, rotary="scale", backend=backend).to(torch.bfloat16)
    x = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    with torch.no_grad(), kernel_expected(backend):
        assert layer.step(x, Nothing()).shape == x.shape


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss(claimed_gpu, backend):
    features = torch.zeros(6, 8, requires_grad=True)
    weight, targets = torch.zeros(16, 8), torch.zeros(6, dtype=torch.int64)
    with kernel_expected(backend):
        assert linear_cross_entropy(features, weight, targets, backend=backend).shape == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_loss_of_a_model(claimed_gpu, backend):
    """Training passes the model's backend on to its loss."""
    model = sympow.GPT(sympow.GPTConfig(vocab_size=13, layers=1, width=8, heads=2, rotary="scale", backend="torch"))
    object.__setattr__(model.config, "backend", backend)  # of the loss alone
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with kernel_expected(backend):
        assert ModelWithLoss(model, 8, None)(tokens, tokens).shape == ()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rotation_of_a_cache(claimed_gpu, backend):
    # With heads too wide for the kernel of a whole step, the rotation may still have one.
    inputs = random_inputs(0, length=1, dim=130, gate="none", rotation="fixed").rounded(torch.bfloat16)
    nothing = inputs.time(0, 0)
    cache = KeyValueCache.open(softmax_attention(**nothing.arguments(), return_state=True)[1], capacity=4)
    with kernel_expected(backend):
        assert cache.step(**inputs.arguments(), backend=backend).shape == (1, 1, 2, 3)


@pytest.mark.gpu
def test_no_kernel_is_launched_on_a_gpu():
    """In a training step, a prefill and decoding steps."""
    launched = []
    config = sympow.GPTConfig(vocab_size=300, layers=2, width=64, heads=2, backend="torch")
    model = sympow.GPT(config).cuda()
    tokens = torch.randint(300, (2, 40), device="cuda")
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(launched.append)
    try:
        ModelWithLoss(model, 64, torch.bfloat16)(tokens, tokens).backward()
        model.bfloat16()
        with torch.no_grad():
            _, state = model(tokens)
            memories = [Window.open(layer, capacity=8, dtype=torch.bfloat16) for layer in state]
            for _ in range(12):
                model.step(tokens[:, 0], memories)
        assert launched == []
        # The hook does see launches.
        sympow.attention(*torch.randn(3, 1, 64, 2, 32, device="cuda", dtype=torch.bfloat16), backend="triton")
        assert launched
    finally:
        hook.remove(launched.append)
