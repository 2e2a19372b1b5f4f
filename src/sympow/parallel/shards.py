"""`Shards`: which tokens of a sequence, and which slices of its documents, each rank has."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sympow.checks import check_at_least, check_choice
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.ops.validation import document_offsets

# The dimension of a device mesh over which sequences are sharded.
MESH_DIM = "cp"
EXCHANGES = ("auto", "gather", "rounds")


@dataclass(frozen=True, eq=False)
class Shards:
    """A sequence sharded over the ranks of a group: consecutive tokens, in order of rank.

    Attributes:
        group: the ranks: a process group, or a mesh with a dimension "cp" (or with only one).
        lengths: tokens of each rank. They may differ, and may be 0.
        cu_seqlens: offsets of packed documents in the whole sequence, (documents + 1,) integers from 0 to its length,
            the same on every rank; None: one document. A document may extend over any number of shards.
        exchange: algorithm of the scan over ranks (`sympow.parallel.scan`): "gather" (one all-gather), "rounds" (point
            to point, in ⌈log₂ ranks⌉ rounds), or "auto": rounds for many ranks or large states.

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
            raise ArgumentError(
                "lengths", f"must have an entry for each of {self.group.size()} ranks, got {len(self.lengths)}"
            )
        for length in self.lengths:
            check_at_least("lengths", length, 0)
        check_choice("exchange", self.exchange, EXCHANGES)
        if self.cu_seqlens is not None and not isinstance(self.cu_seqlens, Tensor):
            raise ArgumentTypeError("cu_seqlens", f"must be a tensor, got {type(self.cu_seqlens).__name__}")

    @classmethod
    def even(
        cls,
        length: int,
        group: dist.ProcessGroup | DeviceMesh,
        cu_seqlens: Tensor | None = None,
        *,
        exchange: str = "auto",
    ) -> Shards:
        """A sequence of `length` tokens in shards of equal length; the first ones get the remainder, one token each."""
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
        """From each rank's own number of tokens, by an all-gather that blocks the host."""
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
        """Position of this rank's first token in the whole sequence."""
        return self.starts[self.rank]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Positions of the ranks' first tokens and, last, the length."""
        return tuple(accumulate(self.lengths, initial=0))

    @cached_property
    def offsets(self) -> list[int]:
        """Positions of the documents' first tokens and, last, the length."""
        return [0, self.total] if self.cu_seqlens is None else document_offsets(self.cu_seqlens, self.total)

    def shard(self, rank: int | None = None, *, preceded: bool = False, followed: bool = False) -> Shard:
        """The slices of documents on a rank.

        Args:
            rank: None: this one.
            preceded: the only document continues an `initial_state` of the whole sequence.
            followed: the state after the only document is returned, so that it has to reach the last rank, even if
                that has no tokens.
        """
        key = (self.rank if rank is None else rank, preceded, followed)
        if key not in self._cached:
            self._cached[key] = self._find_shard(*key)
        return self._cached[key]

    @cached_property
    def _cached(self) -> dict[tuple[int, bool, bool], Shard]:
        """A cache, since every layer of a model asks for the same."""
        return {}

    def _find_shard(self, rank: int, preceded: bool, followed: bool) -> Shard:
        start, stop = self.starts[rank : rank + 2]
        before_last = rank < self.size - 1
        if preceded:
            return Shard((0, stop - start), start, rank > 0, before_last, range(rank))
        # The last offset is the end of a document, not a beginning.
        begun = self.offsets[bisect_right(self.offsets, start, hi=len(self.offsets) - 1) - 1]
        inside = self.offsets[bisect_right(self.offsets, start) : bisect_left(self.offsets, stop)]
        holder = bisect_right(self.starts, begun, hi=self.size) - 1
        return Shard(
            offsets=tuple(x - start for x in (start, *inside, stop)),
            tokens_before=start - begun,
            continues=start > begun,
            continues_later=before_last if followed else self.offsets[bisect_left(self.offsets, stop)] != stop,
            sources=range(holder, rank) if start > begun else range(0),
        )

    def take(self, x: Tensor, dim: int = 1) -> Tensor:
        """The shard of this rank, of a tensor that has the whole sequence along `dim`."""
        if x.shape[dim] != self.total:
            raise ArgumentError(
                "x", f"must have the whole sequence, {self.total} tokens, along dim {dim}; got {x.shape[dim]}"
            )
        return x.narrow(dim, self.start, self.length)

    def check_length(self, name: str, length: int) -> None:
        if length != self.length:
            raise ArgumentError(
                name, f"must have the {self.length} tokens of rank {self.rank} of {self.size}; got {length}"
            )


@dataclass(frozen=True)
class Shard:
    """The slices of packed documents on one rank.

    Attributes:
        offsets: where its slices of documents begin and, last, where they end, counted from its first token.
        tokens_before: tokens of the first slice's document on earlier ranks.
        continues: whether the first slice continues a document, or a state, of earlier ranks.
        continues_later: whether the last slice's document continues on a later rank, or its state is returned there.
        sources: the ranks with those earlier tokens.
    """

    offsets: tuple[int, ...]
    tokens_before: int
    continues: bool
    continues_later: bool
    sources: range

    @property
    def passes(self) -> bool:
        """Whether the only slice continues a document of earlier ranks that also continues on later ones."""
        return self.continues and self.continues_later and len(self.offsets) == 2

    @property
    def last(self) -> slice:
        """The tokens of the last slice."""
        return slice(*self.offsets[-2:])


def as_group(group: dist.ProcessGroup | DeviceMesh) -> dist.ProcessGroup:
    """The process group over which sequences are sharded."""
    if isinstance(group, dist.ProcessGroup):
        return group
    if not isinstance(group, DeviceMesh):
        raise ArgumentTypeError("group", f"must be a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    if MESH_DIM in (group.mesh_dim_names or ()):
        return group.get_group(MESH_DIM)
    if group.ndim != 1:
        raise ArgumentError("group", f"must have one dimension, or one named {MESH_DIM!r}; got {group.mesh_dim_names}")
    return group.get_group()


def as_shards(shards: Shards | dist.ProcessGroup | DeviceMesh, length: int) -> Shards:
    """Shards as given, or those of a group, by an all-gather of the ranks' lengths."""
    if isinstance(shards, Shards):
        return shards
    return Shards.gather(length, shards)
