"""The recurrent state: all that a sequence leaves behind for what follows it (paper eq. conformal_in_practice)."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike

import torch
from torch import Tensor

from sympow.ops.record import TensorRecord, check_tensor_member, register_as_tree
from sympow.ops.symmetric import symmetric_dim

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_FORMAT = "sympow-state-1"


@dataclass(frozen=True, eq=False)
class State(TensorRecord):
    """S, Z and μ after some tokens, for every sequence of a batch and every key/value head.

    The same state serves every form and backend. With packed documents the batch axis counts documents.

    Entries are p-th powers of keys, so keys must stay where those have room: within about 1e±4 for p = 8 in float32,
    more widely for lower powers. Beyond, a state overflows to infinity or fades to zero; calls without states do not
    have this limit.

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
        for name in ("kv", "normalizer"):
            check_tensor_member(name, getattr(self, name), FLOAT_DTYPES)
        if self.phase is not None:
            check_tensor_member("phase", self.phase, (torch.float64,))
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
        for name, tensor in self._tensors().items():
            if tensor.device != self.kv.device:
                raise ValueError(f"{name} must be on the device of kv, {self.kv.device}; got {tensor.device}")

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

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> State:
        """The state on another device or in another dtype; `phase` stays float64, since it must not be rounded."""
        phase = None if self.phase is None else self.phase.to(device=device)
        kv, normalizer = (x.to(device=device, dtype=dtype) for x in (self.kv, self.normalizer))
        return replace(self, kv=kv, normalizer=normalizer, phase=phase)

    @classmethod
    def cat(cls, states: Sequence[State]) -> State:
        """Several states as one batch."""
        if not states:
            raise ValueError("states must hold at least one state, got none")
        kinds = sorted({(s.power, s.key_dim, s.heads, s.value_dim, s.phase is not None) for s in states})
        if len(kinds) > 1:
            raise ValueError(
                f"states to be joined must agree in (power, key dim, heads, value dim, rotated); got {kinds}"
            )
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
        try:
            content = torch.load(path, map_location=device, weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
            raise ValueError(f"path must name a file written by State.save; {path} cannot be read as one") from error
        if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
            raise ValueError(f"path must name a file written by State.save; {path} is something else")
        return cls(phase=content.pop("phase", None), **content)


register_as_tree(State, "power", "key_dim")
