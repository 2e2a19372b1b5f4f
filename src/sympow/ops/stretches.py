"""An axis in stretches, and what to do where a compiler leaves its length open.

torch.compile and torch.export trace a call once for every length, if they may. A loop over stretches of an axis would
be unrolled for one length, so that each other length had to be compiled anew, and could not be exported.
"""

from __future__ import annotations

import torch


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
