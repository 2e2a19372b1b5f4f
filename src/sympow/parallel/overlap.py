"""The sequences of a call in two halves: states of one are on their way while the other is worked on.

Halves of the batch, or of the key heads where the batch is one. Either way the heads of all sequences, taken in order,
are cut once: what kernels leave of them, (b, h, …), is contiguous in each half, as they want it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sympow.ops.sequence import Sequence
from sympow.ops.state import State


@dataclass(frozen=True)
class Half:
    """Some of the batch, or of the key heads of a batch of one.

    Attributes:
        by_batch: which of the two.
        start, count: those it has.
    """

    by_batch: bool
    start: int
    count: int

    @property
    def state_dim(self) -> int:
        """The axis of states that is cut."""
        return 0 if self.by_batch else 1

    @property
    def token_dim(self) -> int:
        """The axis of inputs and outputs that is cut."""
        return 0 if self.by_batch else 2

    def tokens(self, x: Tensor, group: int = 1) -> Tensor:
        """Of x (b, t, h, …), with `group` heads to a key head."""
        return self._part(x, self.token_dim, group)

    def heads(self, x: Tensor, group: int = 1) -> Tensor:
        """Of x (b, h, …), likewise."""
        return self._part(x, self.state_dim, group)

    def state(self, state: State | None) -> State | None:
        if state is None:
            return None
        phase = None if state.phase is None else self.heads(state.phase)
        kv, normalizer = self.heads(state.kv), self.heads(state.normalizer)
        return State(kv, normalizer, phase, power=state.power, key_dim=state.key_dim)

    def _part(self, x: Tensor, dim: int, group: int) -> Tensor:
        group = 1 if self.by_batch else group
        return x.narrow(dim, group * self.start, group * self.count)


def halves_of(batch: int, key_heads: int) -> list[Half]:
    """Two, or one if there is but one sequence of one key head."""
    by_batch = batch > 1
    count = batch if by_batch else key_heads
    middle = count // 2
    return [Half(by_batch, 0, middle), Half(by_batch, middle, count - middle)] if middle else [Half(by_batch, 0, count)]


def split(sequence: Sequence, halves: list[Half]) -> list[Sequence]:
    """The inputs of each half.

    Split rather than sliced: gradients of the parts are then put together in one pass.
    """
    sizes, dim, by_batch = [half.count for half in halves], halves[0].token_dim, halves[0].by_batch

    def parts(x: Tensor | None, group: int = 1) -> tuple[Tensor | None, ...]:
        group = 1 if by_batch else group
        return (None,) * len(sizes) if x is None else x.split([group * size for size in sizes], dim=dim)

    columns = (
        parts(sequence.q, sequence.group),
        *(parts(x) for x in (sequence.k, sequence.v, sequence.log_gamma, sequence.beta)),
    )
    return [
        replace(sequence, q=q, k=k, v=v, log_gamma=log_gamma, beta=beta)
        for q, k, v, log_gamma, beta in zip(*columns, strict=True)
    ]
