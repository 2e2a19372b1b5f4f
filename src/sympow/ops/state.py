"""The recurrent state: all that a sequence leaves behind for what follows it (paper eq. conformal_in_practice)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from sympow.ops.symmetric import symmetric_dim

_FORMAT = "sympow-state-1"


@dataclass(frozen=True, eq=False)
class State:
    """S, Z and μ after some tokens, for every sequence of a batch and every key/value head.

    The same state serves every form and backend. With packed documents the batch axis counts documents.

    Attributes:
        kv: Sᵀ = Σ_j b_j φ(k_j) v_jᵀ, (b, h_kv, D, e); float32, or float64 from float64 inputs.
        normalizer: Z = Σ_j b_j φ(k_j), (b, h_kv, D).
        phase: μ in radians within half a turn of zero, (b, h_kv, d/2), float64; None if nothing is rotated.
        power: p.
        key_dim: d.
    """

    kv: Tensor
    normalizer: Tensor
    phase: Tensor | None
    power: int
    key_dim: int

    def __post_init__(self) -> None:
        dim = symmetric_dim(self.key_dim, self.power)
        if self.kv.ndim != 4 or self.kv.shape[2] != dim:
            raise ValueError(
                f"kv must be (batch, heads, {dim}, value dim) for power {self.power} and key dim {self.key_dim}, "
                f"got {tuple(self.kv.shape)}"
            )
        if self.normalizer.shape != self.kv.shape[:3]:
            raise ValueError(
                f"normalizer must be {tuple(self.kv.shape[:3])} to match kv, got {tuple(self.normalizer.shape)}"
            )
        if self.phase is not None and self.phase.shape != (*self.kv.shape[:2], self.key_dim // 2):
            raise ValueError(
                f"phase must be {(*self.kv.shape[:2], self.key_dim // 2)} to match kv, got {tuple(self.phase.shape)}"
            )

    @classmethod
    def zeros(
        cls,
        batch: int,
        heads: int,
        key_dim: int,
        value_dim: int,
        power: int,
        *,
        rotated: bool,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> State:
        """The state before the first token."""
        dim = symmetric_dim(key_dim, power)
        phase = torch.zeros(batch, heads, key_dim // 2, dtype=torch.float64, device=device) if rotated else None
        return cls(
            kv=torch.zeros(batch, heads, dim, value_dim, dtype=dtype, device=device),
            normalizer=torch.zeros(batch, heads, dim, dtype=dtype, device=device),
            phase=phase,
            power=power,
            key_dim=key_dim,
        )

    @property
    def batch(self) -> int:
        return self.kv.shape[0]

    @property
    def heads(self) -> int:
        return self.kv.shape[1]

    @property
    def value_dim(self) -> int:
        return self.kv.shape[3]

    @property
    def requires_grad(self) -> bool:
        """Whether autograd would follow any of the tensors now."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self._tensors().values())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """The state on another device or in another dtype; `phase` stays float64, since it must not be rounded."""
        phase = None if self.phase is None else self.phase.to(device=device)
        moved = self._map(lambda x: x.to(device=device, dtype=dtype))
        return replace(moved, phase=phase)

    def detach(self) -> State:
        """The state cut from the graph that made it."""
        return self._map(Tensor.detach)

    def clone(self) -> State:
        """A copy that shares no memory with this one."""
        return self._map(Tensor.clone)

    def select(self, index: slice | Tensor) -> State:
        """Some sequences of the batch, by a slice or an integer tensor (which may repeat and reorder them)."""
        return self._map(lambda x: x[index])

    @classmethod
    def cat(cls, states: Sequence[State]) -> State:
        """Several states as one batch."""
        if not states:
            raise ValueError("states must hold at least one state, got none")
        kinds = {(s.power, s.key_dim, s.phase is None) for s in states}
        if len(kinds) > 1:
            raise ValueError(f"states must agree in power, key dim and rotation to be joined, got {sorted(kinds)}")
        phases = [s.phase for s in states if s.phase is not None]
        return replace(
            states[0],
            kv=torch.cat([s.kv for s in states]),
            normalizer=torch.cat([s.normalizer for s in states]),
            phase=torch.cat(phases) if phases else None,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the state to a file that `State.load` reads."""
        # Copies, since torch.save writes all of the memory that a slice of a batch points into.
        tensors = {name: tensor.detach().clone() for name, tensor in self._tensors().items()}
        torch.save({"format": _FORMAT, "power": self.power, "key_dim": self.key_dim, **tensors}, path)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str | None = None) -> State:
        """Reads a state written by `save`."""
        content = torch.load(path, map_location=device, weights_only=True)
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError(f"path must name a file written by State.save; {path} is something else")
        return cls(phase=content.pop("phase", None), **content)

    def _map(self, function: Callable[[Tensor], Tensor]) -> State:
        changes: dict[str, Any] = {name: function(tensor) for name, tensor in self._tensors().items()}
        return replace(self, **changes)

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without a missing phase."""
        members = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: member for name, member in members.items() if isinstance(member, Tensor)}


def _flatten(state: State) -> tuple[list[Any], tuple[int, int]]:
    return [state.kv, state.normalizer, state.phase], (state.power, state.key_dim)


def _unflatten(children: Any, context: tuple[int, int]) -> State:
    # Without __init__: tree_map may put anything in place of the tensors, which the checks would refuse.
    state = object.__new__(State)
    for name, value in zip(("kv", "normalizer", "phase", "power", "key_dim"), (*children, *context), strict=True):
        object.__setattr__(state, name, value)
    return state


# torch.compile, checkpointing and torch.func walk arguments as trees; without this a State would be a leaf to them.
_pytree.register_pytree_node(State, _flatten, _unflatten, serialized_type_name="sympow.State")
