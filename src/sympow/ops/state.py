"""`State`: the recurrent state S, Z and μ after some tokens (paper eq. conformal_in_practice), saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sympow import tensor_file
from sympow.checks import check_at_least
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.ops.compilation import TensorRecord, check_tensor_member, conv_shape, register_as_pytree
from sympow.settings import check_features, check_power, check_state_sizes, symmetric_dim

FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMAT = "sympow state 2"


@dataclass(frozen=True, eq=False)
class State(TensorRecord):
    """S, Z and μ after some tokens, for every sequence of a batch and every key/value head.

    A state can be passed to every form and backend. With packed documents the batch axis is that of documents.

    Entries are p-th powers of keys, so those must stay in the range of the dtype: entries of keys within about 1e±4 for
    p = 8 in float32, a wider range for lower powers. Beyond it a state overflows to infinity or underflows to zero;
    calls without states do not have this limit.

    Attributes:
        kv: Sᵀ = Σ_j b_j φ(k_j) v_jᵀ, (b, h_kv, D, e); float32, or float64 from float64 inputs.
        normalizer: Z = Σ_j b_j φ(k_j), (b, h_kv, D).
        phase: μ in radians, within ±π, (b, h_kv, d/2), float64; None without rotation.
        power: p.
        key_dim: d.
        conv_state: the last inputs of a layer's short convolution, (b, width − 1, channels), for the layer alone; None
            without one.
    """

    kv: Tensor
    normalizer: Tensor
    phase: Tensor | None
    power: int
    key_dim: int
    conv_state: Tensor | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_power(self.power)
        for name in ("kv", "normalizer"):
            check_tensor_member(name, getattr(self, name), FLOAT_DTYPES)
        if self.phase is not None:
            check_tensor_member("phase", self.phase, (torch.float64,))
        dim = symmetric_dim(self.key_dim, self.power)
        if self.kv.ndim != 4 or self.kv.shape[2] != dim:
            raise ArgumentError(
                "kv",
                f"must be (batch, heads, {dim}, value dim) for power {self.power} and key dim {self.key_dim}, "
                f"got {tuple(self.kv.shape)}",
            )
        if self.normalizer.shape != self.kv.shape[:3]:
            raise ArgumentError(
                "normalizer", f"must be {tuple(self.kv.shape[:3])} to match kv, got {tuple(self.normalizer.shape)}"
            )
        if self.phase is not None and self.phase.shape != (*self.kv.shape[:2], self.key_dim // 2):
            raise ArgumentError(
                "phase", f"must be {(*self.kv.shape[:2], self.key_dim // 2)} to match kv, got {tuple(self.phase.shape)}"
            )
        if self.conv_state is not None:
            check_tensor_member("conv_state", self.conv_state, FLOAT_DTYPES)
            if self.conv_state.ndim != 3 or len(self.conv_state) != len(self.kv):
                raise ArgumentError(
                    "conv_state",
                    f"must be ({len(self.kv)}, tokens, channels) to match kv, got {tuple(self.conv_state.shape)}",
                )
        for name, tensor in self._tensors().items():
            if tensor.device != self.kv.device:
                raise ArgumentError(name, f"must be on the device of kv, {self.kv.device}; got {tensor.device}")

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
        check_state_sizes(batch, heads, key_dim, value_dim, power, rotated=rotated)
        check_features(key_dim, power)
        if dtype not in FLOAT_DTYPES:
            raise ArgumentTypeError("dtype", f"must be one of {', '.join(map(str, FLOAT_DTYPES))}; got {dtype}")
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
        """The state on another device or in another dtype.

        `phase` stays in float64, since it must not be rounded, and `conv_state` in the dtype of a layer's activations.
        """
        phase, conv_state = (None if x is None else x.to(device=device) for x in (self.phase, self.conv_state))
        kv, normalizer = (x.to(device=device, dtype=dtype) for x in (self.kv, self.normalizer))
        return replace(self, kv=kv, normalizer=normalizer, phase=phase, conv_state=conv_state)

    @classmethod
    def cat(cls, states: Sequence[State]) -> State:
        """Joins states into one batch."""
        if not states:
            raise ArgumentError("states", "must hold at least one state, got none")
        kinds = sorted({(s.power, s.key_dim, s.heads, s.value_dim, s.phase is not None, conv_shape(s)) for s in states})
        if len(kinds) > 1:
            raise ArgumentError(
                "states",
                f"to be joined must agree in (power, key dim, heads, value dim, rotated, short_conv); got {kinds}",
            )
        phases = [s.phase for s in states if s.phase is not None]
        inputs = [s.conv_state for s in states if s.conv_state is not None]
        return replace(
            states[0],
            kv=torch.cat([s.kv for s in states]),
            normalizer=torch.cat([s.normalizer for s in states]),
            phase=torch.cat(phases) if phases else None,
            conv_state=torch.cat(inputs) if inputs else None,
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file that `State.load` reads. An existing file is replaced once the new one is complete."""
        words = {"power": str(self.power), "key_dim": str(self.key_dim)}
        tensor_file.save(path, FORMAT, self._tensors(), words)

    @classmethod
    def load(cls, path: str | PathLike[str], device: torch.device | str | None = None) -> State:
        """Reads a state written by `save`.

        Args:
            device: of the state; by default the CPU.

        Raises:
            ValueError: the file is something else, or is damaged: its checksum covers every bit.
        """
        try:
            members = _read(path)
            # Before the features are counted, which takes long for absurd numbers.
            for name in ("power", "key_dim"):
                check_at_least(name, members[name], 1)
            check_features(members["key_dim"], members["power"])
            state = cls(**members)
            check_phase(state.phase)
        except (TypeError, ValueError) as error:
            raise ArgumentError("path", f"must name a file written by State.save: {error}") from error
        return state.to(device)


def check_phase(phase: Tensor | None) -> None:
    """Raises unless the phase of a file holds angles as calls leave them, within ±π up to rounding."""
    if phase is not None and not bool((phase.abs() <= math.pi + 1e-3).all()):  # nor NaN
        raise ArgumentError("phase", f"must lie within ±π, got {phase.abs().max().item():.6g}")


def _read(path: str | PathLike[str]) -> dict[str, Any]:
    tensors, words = tensor_file.load(path, FORMAT)
    if missing := {"kv", "normalizer", "power", "key_dim"} - tensors.keys() - words.keys():
        raise UserError(f"{path} lacks {', '.join(sorted(missing))}")
    return {"phase": None, **tensors, **{name: int(words[name]) for name in ("power", "key_dim")}}


register_as_pytree(State, "power", "key_dim")
