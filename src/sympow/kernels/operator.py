"""Operators of PyTorch that eager calls reach without PyTorch's dispatcher.

torch.compile, torch.export and modes of dispatch need them in `torch.library`. There a call with gradients takes
the host several hundred µs, as long as the kernels of a short sequence take the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class Operator:
    """A function of tensors and plain values that returns tensors, or None for those that a call does not have.

    What it returns shares no memory with its arguments. In `torch.library`, whose operators return tensors alone, an
    empty tensor represents None. An operator without a registered gradient takes the way through the dispatcher if one
    of its arguments requires gradients, and refuses them there.

    Attributes:
        op: the operator of `torch.library`.
    """

    def __init__(self, function: Function, name: str, mutates: tuple[str, ...]) -> None:
        self.op = torch.library.custom_op(name, _without_none(function), mutates_args=mutates)
        self._function = function
        self._differentiable: type[torch.autograd.Function] | None = None

    def register_fake(self, function: Function) -> Function:
        """Registers what the operator returns for fake tensors; a decorator."""
        self.op.register_fake(_without_none(function))
        return function

    def register_gradient(self, save: Function, differentiate: Function) -> None:
        """Makes the operator differentiable, once.

        Args:
            save: as `setup_context` of `torch.autograd.Function`; it sees None for what a call does not have.
            differentiate: as its `backward`. An operator that it calls has no gradient, so that a second derivative is
                refused.
        """

        # torch passes the arguments by these names.
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
            save(ctx, inputs, tuple(x if x.numel() else None for x in output))

        self.op.register_autograd(differentiate, setup_context=setup_context)
        function = self._function

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = function(*arguments)
            save(ctx, arguments, output)
            return output

        # Without `setup_context` of its own, for which torch would read the signature of `forward` at every call.
        members = {"forward": staticmethod(forward), "backward": staticmethod(differentiate)}
        self._differentiable = type(function.__name__, (torch.autograd.Function,), members)

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _is_watched():
            return self.op(*arguments)
        needs_grad = False
        for x in arguments:
            if isinstance(x, Tensor):
                # Others, such as fake or distributed ones, bring their own meaning of an operator.
                if type(x) not in (Tensor, torch.nn.Parameter) or x.is_meta:
                    return self.op(*arguments)
                needs_grad = needs_grad or x.requires_grad
        if not needs_grad or not torch.is_grad_enabled():
            return self._function(*arguments)
        return self.op(*arguments) if self._differentiable is None else self._differentiable.apply(*arguments)


def operator(name: str, mutates: tuple[str, ...] = ()) -> Callable[[Function], Operator]:
    """Makes an `Operator` of the function below it, with that name in `torch.library`.

    Args:
        mutates: names of the arguments that it writes to.
    """
    return lambda function: Operator(function, name, mutates)


def _without_none(function: Function) -> Function:
    """The function with empty tensors for what is None among the tensors that it returns."""

    @wraps(function)
    def filled(*arguments: Any) -> Any:
        output = function(*arguments)
        if not isinstance(output, tuple):
            return output
        like = next(x for x in arguments if isinstance(x, Tensor))
        return tuple(like.new_empty(0) if x is None else x for x in output)

    return filled


def _is_watched() -> bool:
    """Whether a mode of dispatch (fake tensors, selective checkpoints, counters) or torch.func sees operators.

    torch.profiler sees kernels alone, and torch.jit.trace nothing.
    """
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active())
