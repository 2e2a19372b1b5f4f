"""Chunked cross-entropy against PyTorch's, and its peak memory."""

import pytest
import torch
from benchmarks.peak_memory import PeakMemory
from torch.nn.functional import cross_entropy, linear

from support import assert_close, interpreted
from sympow.model import losses
from sympow.model.losses import linear_cross_entropy, token_losses

TOKENS, WIDTH, VOCABULARY = 37, 8, 29


def problem(dtype=torch.float64, shape=(TOKENS,)):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(VOCABULARY, shape, generator=generator)
    return features, weight, targets


def full(features, weight, targets, reduction="mean"):
    return cross_entropy(linear(features, weight).flatten(0, -2), targets.flatten(), reduction=reduction)


@pytest.mark.parametrize("shape", [(TOKENS,), (1, TOKENS), (3, 4, 5), (1,)])
@pytest.mark.parametrize("tokens", [1, 5, 36, 37, 1_000])
def test_value_and_gradients_are_those_of_all_logits(shape, tokens):
    features, weight, targets = problem(shape=shape)
    # The loss is one of several terms, so that its gradients are scaled.
    loss = linear_cross_entropy(features, weight, targets, tokens=tokens)
    actual = torch.autograd.grad(0.3 * loss, (features, weight))
    reference = full(features, weight, targets)
    expected = torch.autograd.grad(0.3 * reference, (features, weight))
    assert_close(loss, reference, 1e-12, "loss")
    assert_close(actual[0], expected[0], 1e-12, "gradient of features")
    assert_close(actual[1], expected[1], 1e-12, "gradient of weight")


@pytest.mark.parametrize("tokens", [1, 5, 37, 64])
def test_losses_of_tokens_are_those_of_all_logits(tokens):
    features, weight, targets = problem(shape=(1, TOKENS))
    actual = token_losses(features, weight, targets, tokens=tokens)
    assert actual.shape == targets.shape
    assert not actual.requires_grad
    assert_close(actual.flatten(), full(features, weight, targets, "none"), 1e-12, "losses")
    with torch.no_grad():
        assert_close(linear_cross_entropy(features, weight, targets, tokens=tokens), actual.mean(), 1e-12, "mean")


def test_only_one_of_the_two_needs_a_gradient():
    features, weight, targets = problem()
    expected = torch.autograd.grad(full(features, weight, targets), (features, weight))
    loss = linear_cross_entropy(features.detach(), weight, targets, tokens=5)
    assert_close(torch.autograd.grad(loss, weight)[0], expected[1], 1e-12, "gradient of weight")
    loss = linear_cross_entropy(features, weight.detach(), targets, tokens=5)
    assert_close(torch.autograd.grad(loss, features)[0], expected[0], 1e-12, "gradient of features")


def test_products_in_bfloat16_are_as_good_as_pytorchs():
    features, weight, targets = problem(torch.float32)
    exact = torch.autograd.grad(full(features.double(), weight.double(), targets), (features, weight))
    plain = torch.autograd.grad(full(features.bfloat16(), weight.bfloat16(), targets), (features, weight))
    loss = linear_cross_entropy(features, weight, targets, tokens=5, dtype=torch.bfloat16)
    assert loss.dtype == torch.float32
    actual = torch.autograd.grad(loss, (features, weight))
    for mine, theirs, truth in zip(actual, plain, exact, strict=True):
        assert mine.dtype == torch.float32
        assert (mine - truth).abs().max() <= 2 * (theirs - truth).abs().max()


def test_large_logits_overflow_nowhere():
    features, weight, targets = problem(torch.float32)
    loss = linear_cross_entropy(features * 1e4, weight, targets, tokens=5)
    assert_close(loss, full(features * 1e4, weight, targets), 1e-6, "loss")
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (features, weight)))


@pytest.mark.parametrize("with_gradients", [True, False])
def test_the_logits_of_all_tokens_never_exist_at_once(with_gradients):
    tokens, vocabulary, chunk = 512, 1_000, 16
    features = torch.randn(tokens, WIDTH, requires_grad=with_gradients)
    weight = torch.randn(vocabulary, WIDTH, requires_grad=with_gradients)
    targets = torch.randint(vocabulary, (tokens,))
    with PeakMemory() as memory:
        loss = linear_cross_entropy(features, weight, targets, tokens=chunk)
        if with_gradients:
            loss.backward()
    a_chunk = chunk * vocabulary * 4
    # A dozen temporary tensors of a chunk, and the gradients with a copy or two.
    assert memory.largest <= max(2 * a_chunk, vocabulary * WIDTH * 4)
    assert memory.peak <= 8 * a_chunk + 4 * (vocabulary + tokens) * WIDTH * 4 < tokens * vocabulary * 4


@pytest.mark.parametrize(
    ("features", "targets", "options", "message"),
    [
        ((4, 3), (5,), {}, r"got \(4, 3\), \(7, 3\) and \(5,\)"),
        ((4, 2), (4,), {}, r"got \(4, 2\), \(7, 3\) and \(4,\)"),
        ((0, 3), (0,), {}, "targets must not be empty"),
        ((4, 3), (4,), {"tokens": 0}, "tokens must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named(features, targets, options, message):
    for function in (linear_cross_entropy, token_losses):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(features), torch.zeros(7, 3), torch.zeros(targets).long(), **options)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_targets_outside_the_vocabulary_are_named(requires_grad):
    features, weight = torch.randn(2, 3, requires_grad=requires_grad), torch.randn(7, 3)
    for function in (linear_cross_entropy, token_losses):
        # PyTorch's own loss leaves −100 out, and its mean is one of fewer targets.
        for outside in (-100, 7):
            with pytest.raises(ValueError, match=f"targets must lie between 0 and 6; got {outside}"):
                function(features, weight, torch.tensor([1, outside]))
        with pytest.raises(TypeError, match=r"targets must be int32 or int64, got torch.float32"):
            function(features, weight, torch.tensor([1.0, 2.0]))
        narrow = function(features, weight, torch.tensor([1, 2], dtype=torch.int32))
        assert torch.equal(narrow, function(features, weight, torch.tensor([1, 2])))


def test_a_second_derivative_is_refused_rather_than_wrong():
    features = torch.randn(4, 3, requires_grad=True)
    loss = linear_cross_entropy(features, torch.randn(7, 3), torch.zeros(4).long())
    (first,) = torch.autograd.grad(loss.square(), features, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@interpreted
@pytest.mark.parametrize(("vocabulary", "columns"), [(29, 29), (29, 64), (300, 320), (9_000, 9_024)])
def test_the_kernel_gives_value_and_gradient(vocabulary, columns):
    pytest.importorskip("triton", reason="needs Triton")
    generator = torch.Generator().manual_seed(vocabulary)
    # Large enough that exponentials overflow unless the maximum is subtracted.
    logits = 60 * torch.randn(7, columns, generator=generator)
    targets = torch.randint(vocabulary, (7,), generator=generator)
    expected, gradient = losses._step(logits.double(), targets, vocabulary, 0.1)
    actual, replaced = losses._fused_step(logits, targets, vocabulary, 0.1)
    assert replaced is logits
    assert_close(actual, expected, 1e-6, "loss")
    assert_close(replaced, gradient, 1e-5, "gradient")


@interpreted
def test_the_kernel_makes_a_target_that_is_none_visible():
    pytest.importorskip("triton", reason="needs Triton")
    actual, _ = losses._fused_step(torch.randn(3, 32), torch.tensor([0, 31, 5]), 29, 1.0)
    assert actual.isnan()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [100, 256, 1_000])
def test_the_kernel_is_as_good_as_pytorch_in_bfloat16(tokens):
    generator = torch.Generator("cuda").manual_seed(tokens)
    features, weight = (
        torch.randn(*shape, generator=generator, device="cuda").requires_grad_() for shape in ((700, 64), (50_257, 64))
    )
    targets = torch.randint(50_257, (700,), generator=generator, device="cuda")
    results = []
    for compute in (
        lambda: full(features.double(), weight.double(), targets),
        lambda: full(features.bfloat16(), weight.bfloat16(), targets).float(),
        lambda: linear_cross_entropy(features, weight, targets, tokens=tokens, dtype=torch.bfloat16),
    ):
        loss = compute()
        results.append((loss, *torch.autograd.grad(loss, (features, weight))))
    for exact, plain, mine in zip(*results, strict=True):
        assert (mine - exact).norm() <= 2 * (plain - exact).norm()
