"""Cost model of the forms in plain PyTorch, from which the cheaper form and the chunk size are chosen.

Counted for one sequence of t tokens and one key/value head with g query heads of dim d, value dim e, D features:

    attend to c tokens within a chunk   g · c²/2 · 2(d + e + 1)     (scores, weighted values, their sum)
    query a state with one token        g · 2D(e + 1)
    fold one token into a state             2D(e + 1)

The attention form is one chunk of t tokens; it queries or updates a state only where one is given or asked for. The
chunked form queries in every chunk but the first, and folds in every chunk but the last (a state given or asked for
adds those).

Operations alone would favour tiny chunks. Larger chunks save memory traffic and launches, which `Machine` expresses in
operations: scores and features are read or written several times, the state is read and written twice in every chunk
(decay, sum), and every chunk has about a hundred launches, shared by all sequences and heads of the batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sympow.settings import symmetric_dim

PASSES_PER_SCORE = 6
PASSES_PER_FEATURE = 10
SMALLEST_CHUNK = 64
LARGEST_CHUNK = 1 << 16


@dataclass(frozen=True)
class Machine:
    """How many operations of a matrix product take as long as moving one element, and as the launches of one chunk."""

    per_element: float
    per_chunk: float


# Server cores: 60 GFLOP/s in float32, 4 billion elements per second, 2 ms for the launches of a chunk on two of Arm; on
# one of x86 with AVX-512 170 GFLOP/s and 7 to 10 billion elements.
CPU = Machine(per_element=16, per_chunk=1e8)
# A large GPU, float32: 40 TFLOP/s, 800 billion elements per second, 0.5 ms.
GPU = Machine(per_element=50, per_chunk=2e10)


@dataclass(frozen=True)
class Cost:
    """Operations of matrix products (a multiply-add counts as two), elements moved, and chunks."""

    operations: float = 0.0
    elements: float = 0.0
    chunks: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.operations + other.operations, self.elements + other.elements, self.chunks + other.chunks)

    def __mul__(self, factor: float) -> Cost:
        return Cost(self.operations * factor, self.elements * factor, self.chunks * factor)

    def on(self, machine: Machine) -> float:
        """The whole cost in operations of matrix products."""
        return self.operations + machine.per_element * self.elements + machine.per_chunk * self.chunks


@dataclass(frozen=True)
class Workload:
    """What the cost of one sequence and one key/value head depends on; `parallel` of them share a call."""

    length: int
    key_dim: int
    value_dim: int
    power: int
    group: int = 1
    parallel: int = 1
    initial_state: bool = False
    return_state: bool = False

    @property
    def features(self) -> int:
        return symmetric_dim(self.key_dim, self.power)

    def attend(self, tokens: int) -> Cost:
        scores = self.group * tokens * tokens / 2
        return Cost(2 * scores * (self.key_dim + self.value_dim + 1), PASSES_PER_SCORE * scores)

    def query(self, tokens: int) -> Cost:
        return self._features_with_state(self.group * tokens)

    def fold(self, tokens: int) -> Cost:
        return self._features_with_state(tokens)

    def carry(self) -> Cost:
        return Cost(0, 4 * self.features * (self.value_dim + 1))

    def _features_with_state(self, rows: int) -> Cost:
        return Cost(2 * rows * self.features * (self.value_dim + 1), PASSES_PER_FEATURE * rows * self.features)


def attention_cost(work: Workload) -> Cost:
    """The attention form."""
    return chunked_cost(work, work.length)


def chunked_cost(work: Workload, chunk_size: int) -> Cost:
    """The chunked form, in chunks of `chunk_size` with a shorter last one."""
    whole, rest = divmod(work.length, chunk_size)
    first = min(chunk_size, work.length)
    last = rest or first
    chunks = math.ceil(work.length / chunk_size)
    attend = work.attend(chunk_size) * whole + work.attend(rest)
    query = work.query(work.length - (0 if work.initial_state else first))
    fold = work.fold(work.length - (0 if work.return_state else last))
    carry = work.carry() * (chunks - 1 + work.initial_state + work.return_state)
    return attend + query + fold + carry + Cost(chunks=chunks / work.parallel)


def best_chunk_size(work: Workload, machine: Machine) -> int:
    """The power of two with the least cost, between SMALLEST_CHUNK and LARGEST_CHUNK."""
    best = SMALLEST_CHUNK
    size = 2 * best
    while size <= LARGEST_CHUNK:
        if chunked_cost(work, size).on(machine) < chunked_cost(work, best).on(machine):
            best = size
        size *= 2
    return best


def cheaper_form(work: Workload, machine: Machine) -> Literal["attention", "chunked"]:
    """Whichever of the two costs less; "attention" where one chunk holds everything."""
    chunked = chunked_cost(work, best_chunk_size(work, machine)).on(machine)
    return "chunked" if chunked < attention_cost(work).on(machine) else "attention"


def crossover_length(key_dim: int, value_dim: int, power: int, group: int = 1) -> int:
    """The context at which querying and updating a state takes as many operations per token as attending.

    Operations alone, for long sequences: g t (d + e + 1) = (g + 1) 2D(e + 1).
    """
    features = symmetric_dim(key_dim, power)
    return round((group + 1) * 2 * features * (value_dim + 1) / (group * (key_dim + value_dim + 1)))
