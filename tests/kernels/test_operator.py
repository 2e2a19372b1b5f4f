"""Operators mean the same with and without PyTorch's dispatcher: values, gradients, and what is missing."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.operator import operator


# Schemas are read off the annotations; None in the place of a tensor is an empty one there.
@operator("sympow::test_scaled")
def scaled(x: torch.Tensor, bias: torch.Tensor | None, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    """factor x + bias, and twice the bias or None."""
    return factor * x + (0 if bias is None else bias), None if bias is None else 2 * bias


@scaled.register_fake
def _(x, bias, factor):
    return torch.empty_like(x), None if bias is None else torch.empty_like(bias)


@operator("sympow::test_scaled_backward")
def scaled_backward(dy: torch.Tensor, x: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * dy


@scaled_backward.register_fake
def _(dy, x, factor):
    return torch.empty_like(dy)


def _save(ctx, inputs, output):
    ctx.save_for_backward(inputs[0], output[1])
    ctx.factor = inputs[2]
    if output[1] is not None:
        ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, dy, _):
    x, doubled = ctx.saved_tensors
    return scaled_backward(dy, x, ctx.factor), None if doubled is None else dy.sum().reshape(1), None


scaled.register_gradient(_save, _differentiate)


def inputs(biased: bool) -> tuple:
    x = torch.randn(5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return x, torch.tensor([0.5], requires_grad=True) if biased else None, 3.0


def dispatched(call) -> set[str]:
    """Names of the operators of sympow that PyTorch's dispatcher saw."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    return {event.name for event in profiler.events() if event.name.startswith("sympow::")}


@pytest.mark.parametrize("biased", [False, True])
def test_both_ways_give_the_same(biased):
    arguments = inputs(biased)
    leaves = [x for x in arguments if isinstance(x, torch.Tensor)]
    found, expected = scaled(*arguments), scaled.op(*arguments)
    assert torch.equal(found[0], expected[0])
    assert (found[1] is None) == (not expected[1].numel()) == (not biased)
    dy = torch.arange(5.0)
    for got, want in zip(*(torch.autograd.grad(y[0], leaves, dy) for y in (found, expected)), strict=True):
        assert torch.equal(got, want)
    torch.library.opcheck(scaled.op, arguments)


def test_the_dispatcher_sees_a_call_only_if_something_watches():
    arguments = inputs(True)
    assert not dispatched(lambda: scaled(*arguments)[0].sum().backward())
    with FlopCounterMode(display=False):
        assert dispatched(lambda: scaled(*arguments)) == {"sympow::test_scaled"}
    with FakeTensorMode() as mode:
        fake = scaled(mode.from_tensor(arguments[0]), None, 3.0)
    assert fake[0].shape == (5,)


def test_a_compiled_call_is_one_graph():
    x, _, _ = inputs(False)
    compiled = torch.compile(lambda x: scaled(x, None, 3.0)[0].sin(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), scaled(x, None, 3.0)[0].sin())


def test_a_second_derivative_is_refused():
    arguments = inputs(True)
    for y in (scaled(*arguments)[0].sum(), scaled(*arguments)[0].square().sum()):
        (gradient,) = torch.autograd.grad(y, arguments[:1], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(gradient.sum(), arguments[:1])


@pytest.mark.parametrize("biased", [False, True])
def test_a_checkpoint_can_be_watched_in_one_of_its_two_runs(biased):
    arguments = inputs(biased)

    def call(x):
        return scaled(x, *arguments[1:])[0].sin()

    with FlopCounterMode(display=False):
        y = checkpoint(call, arguments[0], use_reentrant=False)
    (expected,) = torch.autograd.grad(call(arguments[0]).sum(), arguments[:1])
    (found,) = torch.autograd.grad(y.sum(), arguments[:1])
    assert torch.equal(found, expected)


def test_without_gradients_nothing_is_recorded():
    arguments = inputs(True)
    with torch.no_grad():
        assert not scaled(*arguments)[0].requires_grad
    assert scaled(*arguments)[0].requires_grad
