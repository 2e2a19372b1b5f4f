"""Measurements on this machine: speed and memory (`sympow bench`), accuracy of kernels (`sympow check`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """What is timed on a kind of device unless the user says otherwise: seconds to a few minutes of work.

    Attributes:
        contexts: sequence lengths.
        tokens: of a call.
        heads: of a call.
        dtype: of q, k and v.
        runs: rounds.
    """

    contexts: tuple[int, ...]
    tokens: int
    heads: int
    dtype: str
    runs: int


SIZES = {
    "cuda": Sizes((1_024, 4_096, 16_384, 65_536), 65_536, 12, "bfloat16", 20),
    # float32: most CPUs emulate bfloat16 products, hundreds of times slower.
    "cpu": Sizes((256, 1_024, 4_096), 4_096, 2, "float32", 3),
}
