"""What a GPU has for one CTA, and which tiles are chosen by it, before a launch.

Most tiles were measured on an H200. Other GPUs have less shared memory, or matrix instructions that read their operands
from registers (mma.sync on Ampere, Ada and consumer Blackwell, MFMA on AMD) instead of shared or tensor memory (wgmma
on Hopper, tcgen05 on data-centre Blackwell): tiles of the H200 then spill. A table lists tiles in the order of
preference, each with the shared memory that it takes; `first_fitting` takes the first that suits the GPU.

`tests/kernels/targets.py` compiles the kernels with the tiles of several GPUs, and `tests/kernels/test_targets.py`
compares the shared memory that they take with what the tables say and with what each GPU has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from sympow.errors import UserError

KIB = 1024
# Sizes of heads that the Hopper kernels are compiled for. Larger heads than the first are padded to the second with
# zeros; smaller ones run on the portable kernels.
HOPPER_WIDTHS = (64, 128)
# Sizes of keys and of values that the kernels of states with p = 4 are compiled for.
QUARTIC_DIMS = (16, 32)
QUARTIC_VALUE_DIMS = (16, 32, 64, 128)
# The matrix instructions of a GPU: NVIDIA's by major compute capability, where they are not mma.sync; and AMD's.
NVIDIA_INSTRUCTIONS = {9: "wgmma", 10: "tcgen05", 11: "tcgen05"}
AMD_INSTRUCTIONS = "mfma"


@dataclass(frozen=True)
class Limits:
    """What tiles depend on.

    Attributes:
        shared_memory: bytes that a CTA can have.
        instructions: those of matrix products: "mma", "wgmma", "tcgen05" or "mfma".
    """

    shared_memory: int
    instructions: str

    @property
    def asynchronous(self) -> bool:
        """Whether matrix products read their operands from shared or tensor memory, not from registers."""
        return self.instructions in ("wgmma", "tcgen05")


H200 = Limits(227 * KIB, "wgmma")


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What a set of tiles needs: base class of the tables' entries.

    Attributes:
        shared_memory: bytes of shared memory that a kernel takes with these tiles, at most.
        asynchronous: whether they are only for GPUs with asynchronous matrix products.
        instructions: the only instructions that they are for; None: any.
    """

    shared_memory: int
    asynchronous: bool = False
    instructions: str | None = None

    def suits(self, limits: Limits) -> bool:
        """Whether a GPU has what they need."""
        if (self.asynchronous and not limits.asynchronous) or self.instructions not in (None, limits.instructions):
            return False
        return self.shared_memory <= limits.shared_memory


Choice = TypeVar("Choice", bound=Footprint)


def first_fitting(candidates: Sequence[Choice], limits: Limits) -> Choice:
    """The first of the candidates, which come in the order of preference, that suits a GPU."""
    for candidate in candidates:
        if candidate.suits(limits):
            return candidate
    least = min(candidate.shared_memory for candidate in candidates)
    raise UserError(
        f"the kernels need {least / KIB:g} KiB of shared memory for a CTA, and the GPU has "
        f"{limits.shared_memory / KIB:g} KiB: pass backend='torch'"
    )


def limits_of(x: Tensor) -> Limits:
    """The limits of the GPU that holds x; those of an H200 for Triton's interpreter."""
    return device_limits(x.device.index) if x.is_cuda else H200


# Cached, as `is_hopper` is: every call of an operator asks several times, and torch takes microseconds for an answer.
@cache
def device_limits(device: torch.device | str | int | None) -> Limits:
    """The limits of a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Limits(properties.shared_memory_per_block, AMD_INSTRUCTIONS)
    return Limits(properties.shared_memory_per_block_optin, NVIDIA_INSTRUCTIONS.get(properties.major, "mma"))


@cache
def is_hopper(device: torch.device | None) -> bool:
    """Whether a GPU is an NVIDIA Hopper (sm_90). Later GPUs do not have its instructions; and torch gives AMD's gfx90a
    the same capability."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)


def register_limit(registers: int | None) -> dict[str, int]:
    """The option of a launch that limits the registers of a thread; Triton has none for AMD's GPUs."""
    return {} if registers is None or torch.version.hip is not None else {"maxnreg": registers}
