"""Which tokens of a sequence, and which parts of its documents, each rank has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sympow.checks import check_at_least, check_choice
from sympow.ops.validation import document_offsets

# The dimension of a mesh that sequences are split over.
MESH_DIM = "cp"
EXCHANGES = ("auto", "gather", "rounds")


@dataclass(frozen=True, eq=False)
class Shards:
    """How a sequence lies over the ranks of a group: in order, each rank with the tokens after those of the one before.

    Attributes:
        group: the ranks: a process group, or a mesh with a dimension "cp" (or with only one).
        lengths: tokens of each rank. They may differ, and may be 0.
        cu_seqlens: offsets of packed documents in the whole sequence, (documents + 1,) integers from 0 to its length,
            the same on every rank; None: one document. A document may cross borders of shards, any number of them.
        exchange: how states pass between ranks (`sympow.parallel.scan`): "gather" (one all-gather), "rounds" (point to
            point, in as many rounds as the number of ranks has binary digits), or "auto": rounds for many ranks or
            large states.

    Example:
        >>> shards = Shards.even(tokens.shape[1], mesh["cp"])  # doctest: +SKIP
        >>> logits, _ = model(shards.take(tokens), shards=shards, return_state=False)  # doctest: +SKIP
    """

    group: dist.ProcessGroup
    lengths: tuple[int, ...]
    cu_seqlens: Tensor | None = None
    exchange: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", as_group(self.group))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if len(self.lengths) != self.group.size():
            raise ValueError(
                f"lengths must have an entry for each of {self.group.size()} ranks, got {len(self.lengths)}"
            )
        for length in self.lengths:
            check_at_least("lengths", length, 0)
        check_choice("exchange", self.exchange, EXCHANGES)
        if self.cu_seqlens is not None and not isinstance(self.cu_seqlens, Tensor):
            raise TypeError(f"cu_seqlens must be a tensor, got {type(self.cu_seqlens).__name__}")

    @classmethod
    def even(
        cls,
        length: int,
        group: dist.ProcessGroup | DeviceMesh,
        cu_seqlens: Tensor | None = None,
        *,
        exchange: str = "auto",
    ) -> Shards:
        """A sequence of `length` tokens in parts as equal as can be, longer ones first."""
        check_at_least("length", length, 1)
        group = as_group(group)
        share, longer = divmod(length, group.size())
        lengths = tuple(share + (rank < longer) for rank in range(group.size()))
        return cls(group, lengths, cu_seqlens, exchange)

    @classmethod
    def gather(
        cls,
        length: int,
        group: dist.ProcessGroup | DeviceMesh,
        cu_seqlens: Tensor | None = None,
        *,
        exchange: str = "auto",
    ) -> Shards:
        """From each rank's own number of tokens, which the ranks tell each other: one small exchange, waited for."""
        group = as_group(group)
        lengths: list[int] = [0] * group.size()
        dist.all_gather_object(lengths, length, group=group)
        return cls(group, tuple(lengths), cu_seqlens, exchange)

    @property
    def size(self) -> int:
        return len(self.lengths)

    @cached_property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def length(self) -> int:
        """Tokens of this rank."""
        return self.lengths[self.rank]

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    @property
    def start(self) -> int:
        """Where this rank's tokens begin in the whole sequence."""
        return self.starts[self.rank]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each rank's tokens begin and, last, where they end."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def offsets(self) -> list[int]:
        """Where documents begin in the whole sequence and, last, where they end."""
        return [0, self.total] if self.cu_seqlens is None else document_offsets(self.cu_seqlens, self.total)

    def portion(self, rank: int | None = None, *, preceded: bool = False, followed: bool = False) -> Portion:
        """What a rank has of the documents.

        Args:
            rank: None: this one.
            preceded: the first document, the only one then, goes on with what came before the whole sequence.
            followed: the last document, the only one then, goes on after the whole sequence, so that its state has to
                reach the last rank, with tokens there or without.
        """
        key = (self.rank if rank is None else rank, preceded, followed)
        if key not in self._portions:
            self._portions[key] = self._find_portion(*key)
        return self._portions[key]

    @cached_property
    def _portions(self) -> dict[tuple[int, bool, bool], Portion]:
        """Those asked for so far: every layer of a model asks for the same."""
        return {}

    def _find_portion(self, rank: int, preceded: bool, followed: bool) -> Portion:
        start, stop = self.starts[rank : rank + 2]
        before_last = rank < self.size - 1
        if preceded:
            return Portion((0, stop - start), start, rank > 0, before_last, range(rank))
        # The last offset ends a document and begins none.
        begun = self.offsets[bisect_right(self.offsets, start, hi=len(self.offsets) - 1) - 1]
        inside = self.offsets[bisect_right(self.offsets, start) : bisect_left(self.offsets, stop)]
        holder = bisect_right(self.starts, begun, hi=self.size) - 1
        return Portion(
            offsets=tuple(x - start for x in (start, *inside, stop)),
            before=start - begun,
            continues=start > begun,
            goes_on=before_last if followed else self.offsets[bisect_left(self.offsets, stop)] != stop,
            sources=range(holder, rank) if start > begun else range(0),
        )

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The part of this rank, of a tensor that has the whole sequence along `dim`."""
        if x.shape[dim] != self.total:
            raise ValueError(
                f"x must have the whole sequence, {self.total} tokens, along dim {dim}; got {x.shape[dim]}"
            )
        return x.narrow(dim, self.start, self.length)

    def check_length(self, name: str, length: int) -> None:
        if length != self.length:
            raise ValueError(
                f"{name} must have the {self.length} tokens of rank {self.rank} of {self.size}; got {length}"
            )


@dataclass(frozen=True)
class Portion:
    """What a rank has of packed documents.

    Attributes:
        offsets: where its pieces of documents begin and, last, where they end, counted from its first token.
        before: tokens of the first piece's document on earlier ranks.
        continues: whether the first piece goes on with something from earlier ranks.
        goes_on: whether a later rank has more of the last piece's document, or returns the state after it.
        sources: the ranks with those earlier tokens.
    """

    offsets: tuple[int, ...]
    before: int
    continues: bool
    goes_on: bool
    sources: range

    @property
    def passes(self) -> bool:
        """Whether one document comes from earlier ranks and goes on to later ones."""
        return self.continues and self.goes_on and len(self.offsets) == 2

    @property
    def last(self) -> slice:
        """The tokens of the last piece."""
        return slice(*self.offsets[-2:])


def as_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group that sequences are split over."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise TypeError(f"group must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    if MESH_DIM in (group.mesh_dim_names or ()):
        return group.get_group(MESH_DIM)
    if group.ndim != 1:
        raise ValueError(f"group must have one dimension, or one named {MESH_DIM!r}; got {group.mesh_dim_names}")
    return group.get_group()


def as_shards(shards: Shards | dist.ProcessGroup | DeviceMesh, length: int) -> Shards:
    """Shards as given, or those of a group whose ranks tell each other how many tokens they have."""
    if isinstance(shards, Shards):
        return shards
    return Shards.gather(length, shards)
