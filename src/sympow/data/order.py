"""Orders that depend on a seed and on nothing else."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def permutation(count: int, *seed: int) -> NDArray[np.int64]:
    """The numbers below `count` in an order set by the seed's numbers, (count,).

    Sorting raw random bits, since NumPy promises their sequence to stay the same from version to version and promises
    no such thing for its own permutations: a run must go on in the same order after an upgrade.
    """
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(count)
    return np.argsort(bits, kind="stable")
