import itertools
import math

import pytest
import torch

import sympow
from sympow.ops import reference
from sympow.ops.symmetric import even_power, multi_indices


@pytest.mark.parametrize(("dim", "power", "expected"), [(64, 2, 2080), (64, 4, 766_480), (1, 6, 1), (3, 1, 3)])
def test_symmetric_dim_counts_distinct_monomials(dim, power, expected):
    assert sympow.symmetric_dim(dim, power) == expected


@pytest.mark.parametrize(("dim", "power"), [(1, 2), (2, 4), (3, 6), (5, 2), (7, 4), (4, 3), (6, 1), (3, 8)])
def test_inner_products_of_features_are_powers_of_inner_products(dim, power):
    x, y = torch.randn(2, 10, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(dim))
    features = (sympow.symmetric_power(x, power) * sympow.symmetric_power(y, power)).sum(-1)
    # Terms are as large as the lengths allow, however small their sum.
    scale = (x.norm(dim=-1) * y.norm(dim=-1)) ** power
    torch.testing.assert_close(features / scale, (x * y).sum(-1) ** power / scale, rtol=0, atol=1e-12)
    assert sympow.symmetric_power(x, power).shape == (10, sympow.symmetric_dim(dim, power))


@pytest.mark.parametrize(("dim", "power"), [(2, 2), (3, 4), (4, 3), (2, 6)])
def test_features_stand_in_the_documented_order(dim, power):
    x = torch.randn(2, 5, dim, dtype=torch.float64)
    torch.testing.assert_close(sympow.symmetric_power(x, power), reference.phi(x, power))
    expected = list(itertools.combinations_with_replacement(range(dim), power))
    assert [tuple(row) for row in multi_indices(dim, power).tolist()] == expected


def test_a_single_vector_has_features_too():
    x = torch.tensor([2.0, 3.0], dtype=torch.float64)
    expected = torch.tensor([4.0, math.sqrt(2) * 6, 9.0], dtype=torch.float64)
    torch.testing.assert_close(sympow.symmetric_power(x, 2), expected)


@pytest.mark.parametrize("power", [2, 3, 4])
def test_features_are_differentiable(power):
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: sympow.symmetric_power(x, power), x)


def test_features_made_first_in_inference_mode_still_train():
    with torch.inference_mode():
        sympow.symmetric_power(torch.randn(2, 11), 2)
    x = torch.randn(2, 11, requires_grad=True)
    sympow.symmetric_power(x, 2).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize(("rows", "columns", "power"), [(3, 3, 2), (2, 2, 6), (3, 4, 3), (4, 2, 4), (5, 5, 1)])
def test_power_of_a_matrix_acts_on_features_as_the_matrix_on_vectors(rows, columns, power):
    matrix, x = torch.randn(rows, columns, dtype=torch.float64), torch.randn(7, columns, dtype=torch.float64)
    bar = sympow.symmetric_power_of_matrix(matrix, power)
    expected = sympow.symmetric_power(x @ matrix.T, power)
    torch.testing.assert_close(sympow.symmetric_power(x, power) @ bar.T, expected, rtol=1e-10, atol=1e-10)


def test_power_of_a_matrix_agrees_with_the_tensor_product():
    matrix = torch.randn(3, 3, dtype=torch.float64)
    expected = reference.power_of_matrix(matrix, 4)
    torch.testing.assert_close(sympow.symmetric_power_of_matrix(matrix, 4), expected, rtol=1e-10, atol=1e-12)


def test_power_of_a_product_is_the_product_of_powers():
    a, b = torch.randn(2, 4, 4, dtype=torch.float64)
    product = sympow.symmetric_power_of_matrix(a, 4) @ sympow.symmetric_power_of_matrix(b, 4)
    torch.testing.assert_close(sympow.symmetric_power_of_matrix(a @ b, 4), product, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("power", [2, 4, 6, 8, 10, 14])
def test_even_power_is_pow_with_a_finite_gradient_at_zero(power):
    x = torch.tensor([-1.5, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)
    y = even_power(x, power)
    torch.testing.assert_close(y, x**power)
    y.sum().backward()
    torch.testing.assert_close(x.grad, power * x.detach() ** (power - 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sympow.symmetric_power(torch.tensor([1, 2]), 2), "x must be floating point"),
        (lambda: sympow.symmetric_power(torch.ones(2), 2.0), "power must be an int, got float"),
        (lambda: sympow.symmetric_power_of_matrix(torch.eye(2), True), "power must be an int, got bool"),
        (lambda: sympow.rotate(torch.tensor([1, 2]), torch.ones(1)), "x must be floating point"),
    ],
)
def test_arguments_of_another_type_are_named(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sympow.symmetric_dim(0, 2), "dim"),
        (lambda: sympow.symmetric_dim(3, -1), "power"),
        (lambda: sympow.symmetric_power(torch.ones(3), 0), "power"),
        (lambda: sympow.symmetric_power(torch.tensor(1.0), 2), "x"),
        (lambda: sympow.symmetric_power_of_matrix(torch.ones(3), 2), "matrix"),
        (lambda: sympow.symmetric_power_of_matrix(torch.eye(3), 0), "power"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
