"""Running sums of log gates as an integer and a remainder, in units of log 2.

The kernels need differences of sums that float32 cannot hold, and on Hopper float64 arithmetic runs in the tensor
cores' pipe: a single float64 addition in a loop waits for every product in flight. In two parts the difference is exact
without it: integers are subtracted as integers, remainders as float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sympow.kernels.common import LOG2_E
from sympow.kernels.gates import SCAN_BLOCK, Gates


@dataclass(frozen=True)
class SplitSums:
    """G / log 2 = whole + rest, with 0 ≤ rest < 1.

    Attributes:
        whole: (b, h_kv, ≥ t) int32, as long as `Gates.to_end`; past the last token its sum is repeated.
        rest: likewise, float32.
    """

    whole: Tensor
    rest: Tensor


@triton.jit
def _split_kernel(sums_ptr, whole_ptr, rest_ptr, length, padded, BLOCK: tl.constexpr):
    sequence = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sums = tl.load(sums_ptr + sequence * length + tl.minimum(rows, length - 1)) * LOG2_E
    whole = tl.floor(sums)
    tl.store(whole_ptr + sequence * padded + rows, whole.to(tl.int32))
    tl.store(rest_ptr + sequence * padded + rows, (sums - whole).to(tl.float32))


def split_sums(gates: Gates) -> SplitSums:
    """The running sums of `gates` in two parts."""
    batch, heads, padded = gates.to_end.shape
    whole = torch.empty_like(gates.to_end, dtype=torch.int32)
    rest = torch.empty_like(gates.to_end)
    _split_kernel[(padded // SCAN_BLOCK, batch * heads)](
        gates.sums, whole, rest, gates.sums.shape[-1], padded, BLOCK=SCAN_BLOCK, enable_fp_fusion=True
    )
    return SplitSums(whole, rest)
