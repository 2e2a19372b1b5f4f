"""The attention form on Hopper (sm_90) in Gluon, Triton's language of explicit schedules: heads of 64, bfloat16.

What stands here imports no Gluon, which may be missing or different in releases that the kernels are not for.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

HEAD_DIM = 64
# Gluon may change from one release to the next; these are the ones that the kernels were compared with float64 on.
RELEASES = ("3.6.",)


def serves(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the kernels take these queries, keys and values; otherwise the portable kernels do."""
    return (
        triton.__version__.startswith(RELEASES)
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == k.dtype == v.dtype == torch.bfloat16
        and q.shape[-1] == v.shape[-1] == HEAD_DIM
    )
