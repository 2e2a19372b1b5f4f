"""What states of any kind have in common: some tensors, a batch axis in front, nothing computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

Record = TypeVar("Record")


class TensorRecord:
    """A base for frozen dataclasses whose members are tensors (or None) with the batch first, and plain values."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor requires gradients."""
        return any(tensor.requires_grad for tensor in self._tensors().values())

    def detach(self) -> Self:
        """The same, cut from the graph that made it."""
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
    """A record on its way into or out of a module, which nothing in between takes apart.

    FSDP2 casts every floating-point tensor that it finds among a module's inputs and outputs to the dtype it computes
    in, and it looks into dataclasses: states would be rounded at every call. It does not look into this.

    Attributes:
        record: what is inside.
    """

    def __init__(self, record: Record) -> None:
        self.record = record


def register_as_tree(cls: type[TensorRecord], *values: str) -> None:
    """Lets torch.compile, checkpointing and torch.func see the tensors inside a record; `values` names the others.

    Rebuilding skips __init__: a tree may hold anything in place of the tensors, which checks would refuse.
    """

    def flatten(record: TensorRecord) -> tuple[list[Any], tuple[Any, ...]]:
        members = record._members()
        return [m for n, m in members.items() if n not in values], tuple(members[n] for n in values)

    def unflatten(children: Any, context: tuple[Any, ...]) -> TensorRecord:
        names = [field.name for field in fields(cls) if field.name not in values]  # type: ignore[arg-type]
        record = object.__new__(cls)
        for name, value in zip((*names, *values), (*children, *context), strict=True):
            object.__setattr__(record, name, value)
        return record

    _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"sympow.{cls.__name__}")


def check_tensor_member(name: str, value: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    """Refuses a member that is no tensor, or of another dtype than those allowed."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be one of {', '.join(map(str, dtypes))}; got {value.dtype}")


def is_known(size: int) -> bool:
    """Whether a size is a number, and not one that a compiler leaves open."""
    if not torch.compiler.is_compiling():
        return True
    # Imported here, since it takes longer to import than all of this package.
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return has_static_value(size)


def stretches(length: int, size: int | None) -> list[slice]:
    """Slices that together have all of an axis, each of at most `size`; one for None, or for a length left open."""
    if size is None or not (is_known(length) and is_known(size)):
        return [slice(None)]
    return [slice(start, start + size) for start in range(0, length, size)]
