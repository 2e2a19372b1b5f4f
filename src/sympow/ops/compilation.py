"""What torch.compile, torch.func and FSDP2 need to know: states as pytrees, and sizes left symbolic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from sympow.errors import ArgumentTypeError

Record = TypeVar("Record")
# Metadata of fields that are computed from others: files do not hold them.
DERIVED = {"derived": True}


class TensorRecord:
    """Base class of states: dataclasses of tensors (or None) with the batch on the first axis, and of plain values."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor requires gradients."""
        return any(tensor.requires_grad for tensor in self._tensors().values())

    def detach(self) -> Self:
        """The same tensors, detached from the autograd graph."""
        return self._map(Tensor.detach)

    def clone(self) -> Self:
        """A copy that shares no memory with this one."""
        return self._map(Tensor.clone)

    def select(self, index: slice | Tensor) -> Self:
        """Some sequences of the batch, by a slice or an integer tensor (which may repeat and reorder them)."""
        return self._map(lambda tensor: tensor[index])

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changes)  # type: ignore[type-var]

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        return {name: value for name, value in self._members().items() if isinstance(value, Tensor)}

    def _members(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


class Sealed(Generic[Record]):
    """A wrapper that hides a state from FSDP2 where a module takes or returns it.

    FSDP2 casts every floating-point tensor among a module's inputs and outputs to the dtype it computes in, even inside
    dataclasses, so states would be rounded at every call. It does not look into this class.

    Attributes:
        record: the state.
    """

    def __init__(self, record: Record) -> None:
        self.record = record


def register_as_pytree(cls: type[TensorRecord], *values: str) -> None:
    """Registers a class as a pytree, so that torch.compile, checkpointing and torch.func see the tensors inside.

    Unflattening skips __init__, whose checks would refuse what torch puts in place of the tensors.

    Args:
        values: names of the members that are not tensors.
    """

    def flatten(record: TensorRecord) -> tuple[list[Any], tuple[Any, ...]]:
        members = record._members()
        # A member that is None is not a leaf: functions of tensors would be called with it.
        present = tuple(n for n, m in members.items() if n not in values and m is not None)
        return [members[n] for n in present], (present, *(members[n] for n in values))

    def unflatten(children: Any, context: tuple[Any, ...]) -> TensorRecord:
        present, *plain = context
        record = object.__new__(cls)
        for field in fields(cls):  # type: ignore[arg-type]
            object.__setattr__(record, field.name, None)
        for name, value in zip((*present, *values), (*children, *plain), strict=True):
            object.__setattr__(record, name, value)
        return record

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"sympow.{cls.__name__}")


def check_is_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(name, f"must be a tensor, got {type(value).__name__}")


def check_tensor_member(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raises a TypeError for a member that is not a tensor of one of the dtypes."""
    check_is_tensor(name, value)
    if value.dtype not in dtypes:
        raise ArgumentTypeError(name, f"must be one of {', '.join(map(str, dtypes))}; got {value.dtype}")


def conv_shape(record: Any) -> tuple[int, ...]:
    """Tokens and channels of a state's `conv_state`; () without one."""
    return () if record.conv_state is None else tuple(record.conv_state.shape[1:])


def runs_now_on_cpu(x: Tensor) -> bool:
    """Whether an operation on x takes place on a CPU at once.

    Not in a graph that is traced. Subclasses, such as fake tensors, and torch.func bring meanings of their own.
    """
    plain = type(x) is Tensor and x.device.type == "cpu"
    return plain and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def is_known(size: int) -> bool:
    """Whether a size is a number, and not symbolic in a graph that torch.compile or torch.export traces."""
    if not torch.compiler.is_compiling():
        return True
    # Imported here, since it takes longer to import than all of sympow.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def slices(length: int, size: int | None) -> list[slice]:
    """Consecutive slices of at most `size` that cover an axis; one slice if `size` is None or the length symbolic."""
    if size is None or not (is_known(length) and is_known(size)):
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, length, size)]
