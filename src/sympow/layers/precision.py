"""Float32 projections and float64 constants of gates and rotations. `FloatLinear` initializes W_γ and W_β to zero."""

# No `from __future__ import annotations`: the operator's schema is read off the annotations.

from collections.abc import Callable
from typing import Any, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sympow.errors import ArgumentError
from sympow.ops.numerics import without_autocast


class KeepsFloat32(nn.Module):
    """A module whose parameters follow `module.to` to other devices and to float64, but not to half precision.

    Parameters that were loaded in half precision stay what they are.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def convert(x: Tensor) -> Tensor:
            y = fn(x)
            if not (x.is_floating_point() and y.is_floating_point()) or _is_half(x.dtype) or not _is_half(y.dtype):
                return y
            return x.to(y.device, torch.float32)

        return super()._apply(convert, recurse)


def _is_half(dtype: torch.dtype) -> bool:
    return torch.promote_types(dtype, torch.float32) != dtype


class FloatLinear(KeepsFloat32, nn.Linear):
    """x Wᵀ + b in float32 or better, whatever the dtype of x and with or without autocast.

    Gates and rotation scales are summed over the whole sequence; near γ = 1 a bfloat16 logit would leave three
    significant bits of log γ. W is initialized to zero, so that at first the result is the bias for every input.

    A subclass of `nn.Linear`, so that tools such as peft wrap it with adapters.

    Args:
        width: width of x.
        out_width: width of the result.
        bias: initial value of b; None: no bias.
    """

    def __init__(self, width: int, out_width: int, bias: float | None = None) -> None:
        # Set first: super().__init__ calls reset_parameters, which reads it.
        self.initial_bias = bias
        super().__init__(width, out_width, bias=bias is not None)

    def reset_parameters(self) -> None:
        """W = 0, and every bias at its initial value."""
        nn.init.zeros_(self.weight)
        if self.initial_bias is not None:
            nn.init.constant_(self.bias, self.initial_bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        with without_autocast(x.device):
            return linear(x.to(dtype), self.weight.to(dtype), bias)


def project(x: Tensor, projection: nn.Module) -> Tensor:
    """Projects x (…, width) in float32 or better, through any adapter around the projection."""
    # An adapter computes in the dtype of its input, or of autocast.
    with without_autocast(x.device):
        return projection(x.to(torch.promote_types(x.dtype, torch.float32)))


def is_plain_projection(projection: nn.Module, device: torch.device) -> TypeGuard[FloatLinear]:
    """Whether a kernel can use the weight and bias of a projection instead of calling it.

    It cannot with an adapter around the projection, or where an offloaded weight is on the device only during a call.
    """
    return type(projection) is FloatLinear and projection.weight.device == device


def project_together(x: Tensor, projections: list[nn.Module | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Projects x (b, t, width) through each projection; None where there is none.

    On a GPU and in bfloat16, x is rounded, as for queries, keys and values, and one product computes all projections.
    Weights and results are not rounded.

    Args:
        dtype: what the layer computes in.
    """
    present = [projection for projection in projections if projection is not None]
    plain = [projection for projection in present if is_plain_projection(projection, x.device)]
    if not (plain and len(plain) == len(present) and x.is_cuda and dtype == torch.bfloat16):
        return [None if projection is None else project(x, projection) for projection in projections]
    weight = torch.cat([projection.weight for projection in plain])
    results = multiply_precisely(x.to(dtype), weight).split([len(p.weight) for p in plain], dim=-1)
    biased = iter(y if p.bias is None else y + p.bias for y, p in zip(results, plain, strict=True))
    return [None if projection is None else next(biased) for projection in projections]


def multiply_precisely(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ in float32 for x (…, width) in bfloat16 and W (outputs, width), sixteen bits of whose mantissa are used."""
    with torch.no_grad():
        high = weight.to(x.dtype)
        low = (weight - high.to(weight.dtype)).to(x.dtype)
        terms = torch.cat([high, low])
    product = _multiply_terms(x.flatten(0, -2), terms, weight)
    first, second = product.split(len(weight), dim=-1)
    return (first + second).unflatten(0, x.shape[:-1])


@torch.library.custom_op("sympow::multiply_terms", mutates_args=())
def _multiply_terms(x: Tensor, terms: Tensor, weight: Tensor) -> Tensor:
    """x (n, width) times both terms of W, (n, 2 outputs) float32; W itself is an input for its gradient."""
    if x.is_cuda:
        return torch.mm(x, terms.mT, out_dtype=torch.float32)
    return x.to(torch.float32) @ terms.to(torch.float32).mT


@_multiply_terms.register_fake
def _(x: Tensor, terms: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], terms.shape[0], dtype=torch.float32)


def _save_factors(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, terms, weight = inputs
    ctx.save_for_backward(x, terms)
    ctx.weight_dtype = weight.dtype


def _differentiate_product(ctx: Any, d_product: Tensor) -> tuple[Tensor, None, Tensor]:
    # Both terms are added, so their gradients are the same. Products are in the dtype of x, as under autocast.
    x, terms = ctx.saved_tensors
    outputs = len(terms) // 2
    d_result = d_product[:, :outputs].to(x.dtype)
    return d_result @ terms[:outputs], None, (d_result.mT @ x).to(ctx.weight_dtype)


_multiply_terms.register_autograd(_differentiate_product, setup_context=_save_factors)


class ConstantTable(nn.Module):
    """A constant float64 tensor on the device it is asked for.

    Not a buffer: `module.to(torch.bfloat16)` would round a buffer, and the rounding of a rotation rate is multiplied by
    the position; and on the meta device a buffer would be uninitialized. The tensor moves with the module, and is made
    again from Python numbers on any other device.
    """

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        if values.is_meta:
            raise ArgumentError("values", "must hold numbers, got a tensor on the meta device")
        self.values = tuple(values.tolist())
        self._table = self._on(torch.device("cpu"))

    def forward(self, device: torch.device) -> Tensor:
        if self._table.device == device:
            return self._table
        table = self._on(device)
        # Not while torch.compile traces: its tensors must not outlive the trace, and the change of the module would
        # trigger a recompilation.
        if type(table) is Tensor and not torch.compiler.is_compiling():
            self._table = table
        return table

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Follows `module.to` to another device, but not to another dtype.
        device = fn(torch.empty(0, device=self._table.device)).device
        if device.type != "meta" and device != self._table.device:
            self._table = self._on(device)
        return super()._apply(fn, recurse)

    def _on(self, device: torch.device) -> Tensor:
        # An inference tensor could not be used in a later backward pass.
        with torch.inference_mode(False):
            return torch.tensor(self.values, dtype=torch.float64, device=device)
