"""Products with the features of p = 2 on a CPU equal those with the features of `symmetric_power`."""

import pytest
import torch

from support import assert_close
from sympow.ops.symmetric import symmetric_power
from sympow.ops.torch import quadratic
from sympow.ops.torch.quadratic import contract, contract_normalizer, expand, expand_into, expand_normalizer


def random_tensors(heads=3, tokens=70, dim=9, value_dim=5, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator, requires_grad=True)

    return random(heads, tokens, dim), random(heads, dim * (dim + 1) // 2, value_dim), random(heads, tokens, value_dim)


@pytest.fixture(params=["one block", "many blocks"])
def blocks(request, monkeypatch):
    quadratic._groups.cache_clear()
    if request.param == "many blocks":
        monkeypatch.setattr(quadratic, "FEATURES", 13)
        monkeypatch.setattr(quadratic, "TOKENS", 16)
        monkeypatch.setattr(quadratic, "ELEMENTS_PER_THREAD", 500)
    yield request.param
    quadratic._groups.cache_clear()


@pytest.mark.parametrize("dim", [1, 2, 9, 33])
def test_products_and_their_gradients_are_those_of_features(dim, blocks):
    x, kv, v = random_tensors(dim=dim)
    features = symmetric_power(x, 2)
    assert_close(contract(x, kv), features @ kv, 1e-12, "contract")
    assert_close(expand(x, v), features.mT @ v, 1e-12, "expand")
    start = kv.detach().clone()
    expand_into(x.detach(), v.detach(), start)
    assert_close(start, kv + features.mT @ v, 1e-12, "in place")
    weights = torch.linspace(-1, 2, v.numel(), dtype=v.dtype).view_as(v)
    got = torch.autograd.grad((contract(x, kv) * weights).sum() + (expand(x, v) * kv).sum(), (x, kv, v))
    want = torch.autograd.grad(((features @ kv) * weights).sum() + ((features.mT @ v) * kv).sum(), (x, kv, v))
    for name, one, other in zip(("x", "kv", "v"), got, want, strict=True):
        assert_close(one, other, 1e-12, name)


def test_second_derivatives_are_exact(blocks):
    x, kv, v = random_tensors(heads=2, tokens=35, dim=3, value_dim=2)
    assert torch.autograd.gradgradcheck(contract, (x, kv))
    assert torch.autograd.gradgradcheck(expand, (x, v))


def test_second_derivatives_need_no_gradient_as_long_as_the_input():
    """They are differences on both sides of the input, which its last digits could not tell apart."""
    x, kv, v = random_tensors()
    direction = 1e-20 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))

    def second(product):
        (gradient,) = torch.autograd.grad((product * v).sum(), x, create_graph=True)
        return torch.autograd.grad((gradient * direction).sum(), (kv, v))

    for got, want in zip(second(contract(x, kv)), second(symmetric_power(x, 2) @ kv), strict=True):
        assert_close(got * 1e20, want * 1e20, 1e-12, "gradient")


def test_normalizers_are_those_of_features():
    q = torch.randn(2, 3, 2, 40, 7, dtype=torch.float64)
    k = torch.randn(2, 3, 40, 7, dtype=torch.float64)
    normalizer = expand_normalizer(k)
    features = symmetric_power(q, 2)
    assert_close(normalizer, symmetric_power(k, 2).sum(2), 1e-12, "normalizer")
    denominator, magnitude = contract_normalizer(q, normalizer)
    assert_close(denominator, (features @ normalizer[:, :, None, :, None]).squeeze(-1), 1e-12, "denominator")
    expected = (features.abs() @ normalizer.abs()[:, :, None, :, None]).squeeze(-1)
    assert_close(magnitude, expected, 1e-12, "magnitude")
