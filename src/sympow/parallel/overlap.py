"""Overlap of communication and compute: a call in two halves, one of which computes while states of the other travel.

The batch is split in two, or the key heads of a batch of one. Either way tensors (b, h, …) are cut once along their
flattened first two axes, so that each half is contiguous, as kernels require.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from sympow.ops.inputs import Inputs
from sympow.ops.state import State


@dataclass(frozen=True)
class Half:
    """One half of a call: a range of batch rows, or of key heads of a batch of one.

    Attributes:
        by_batch: whether batch rows are split, rather than key heads.
        start, count: the range.
    """

    by_batch: bool
    start: int
    count: int

    @property
    def state_dim(self) -> int:
        """The axis of states that is split."""
        return 0 if self.by_batch else 1

    @property
    def token_dim(self) -> int:
        """The axis of inputs and outputs that is split."""
        return 0 if self.by_batch else 2

    def tokens(self, x: Tensor, group: int = 1) -> Tensor:
        """The half of x (b, t, h, …), which has `group` heads per key head."""
        return self._narrow(x, self.token_dim, group)

    def heads(self, x: Tensor, group: int = 1) -> Tensor:
        """The half of x (b, h, …), which has `group` heads per key head."""
        return self._narrow(x, self.state_dim, group)

    def state(self, state: State | None) -> State | None:
        if state is None:
            return None
        phase = None if state.phase is None else self.heads(state.phase)
        kv, normalizer = self.heads(state.kv), self.heads(state.normalizer)
        return State(kv, normalizer, phase, power=state.power, key_dim=state.key_dim)

    def _narrow(self, x: Tensor, dim: int, group: int) -> Tensor:
        group = 1 if self.by_batch else group
        return x.narrow(dim, group * self.start, group * self.count)


def halves_of(batch: int, key_heads: int) -> list[Half]:
    """Two halves, or a single one for one sequence with one key head."""
    by_batch = batch > 1
    count = batch if by_batch else key_heads
    middle = count // 2
    return [Half(by_batch, 0, middle), Half(by_batch, middle, count - middle)] if middle else [Half(by_batch, 0, count)]


def split(inputs: Inputs, halves: list[Half]) -> list[Inputs]:
    """The inputs of each half.

    By `Tensor.split` rather than slicing, so that autograd concatenates the gradients in one pass.
    """
    sizes, dim, by_batch = [half.count for half in halves], halves[0].token_dim, halves[0].by_batch

    def split_tensor(x: Tensor | None, group: int = 1) -> tuple[Tensor | None, ...]:
        group = 1 if by_batch else group
        return (None,) * len(sizes) if x is None else x.split([group * size for size in sizes], dim=dim)

    columns = (
        split_tensor(inputs.q, inputs.group),
        *(split_tensor(x) for x in (inputs.k, inputs.v, inputs.log_gamma, inputs.beta)),
    )
    return [
        replace(inputs, q=q, k=k, v=v, log_gamma=log_gamma, beta=beta)
        for q, k, v, log_gamma, beta in zip(*columns, strict=True)
    ]
