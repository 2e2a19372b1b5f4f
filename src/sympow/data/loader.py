"""Work done ahead of time in a thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from sympow.checks import check_at_least, check_choice
from sympow.data.dataset import TokenDataset
from sympow.data.rows import RowOrder, Rows

T = TypeVar("T")


def prefetch(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, up to `depth` of them made ahead; an error comes in place of the item that it belongs to.

    Closing the generator, which happens when nobody holds it any more, ends the thread.
    """
    if depth == 0:
        yield from items
        return
    # A single thread: the items are made in order.
    pool = ThreadPoolExecutor(1, thread_name_prefix="sympow-prefetch")
    # In a list, so that its end is told from any item.
    made = ([item] for item in items)
    try:
        pending: deque[Future[list[T]]] = deque(pool.submit(next, made, []) for _ in range(depth))
        while item := pending.popleft().result():
            pending.append(pool.submit(next, made, []))
            yield item[0]
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True)
class Batch:
    """Rows of tokens with what they should predict, and where they come from.

    Either (rows, context), a row a sequence, or packed: (1, rows · context) with the boundaries of documents.

    Attributes:
        inputs: int64: each the token before its target; before a document's first token, the boundary.
        targets: int64, same shape.
        cu_seqlens: int32, (pieces + 1,): where pieces of documents begin and, last, where they end; None if not packed.
        document_ids: int64, (pieces,): the document of each piece, in order. A row is one piece, unless remainders of
            documents were joined or packed in it.
        document_starts: int64, (pieces,): the first target's place in its document.
        piece_offsets: int32, (pieces + 1,): where pieces begin in the flattened batch, packed or not.
        context: tokens of a row.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    document_ids: Tensor
    document_starts: Tensor
    piece_offsets: Tensor
    context: int

    @property
    def rows(self) -> int:
        return self.inputs.numel() // self.context

    def split(self, rows: int) -> list[Batch]:
        """Smaller batches of so many rows each, to accumulate gradients over; the last may have fewer."""
        if rows < 1:
            raise ValueError(f"rows must be at least 1, got {rows}")
        parts = []
        for first in range(0, self.rows, rows):
            start, stop = first * self.context, min(first + rows, self.rows) * self.context
            bounds = torch.tensor([start, stop], dtype=torch.int32, device=self.piece_offsets.device)
            # Rows begin with a piece, so both are found.
            low, high = torch.searchsorted(self.piece_offsets, bounds).tolist()
            offsets = self.piece_offsets[low : high + 1] - start
            packed = self.cu_seqlens is not None
            shape = (1, stop - start) if packed else (-1, self.context)
            parts.append(
                Batch(
                    self.inputs.reshape(-1)[start:stop].reshape(shape),
                    self.targets.reshape(-1)[start:stop].reshape(shape),
                    offsets if packed else None,
                    self.document_ids[low:high],
                    self.document_starts[low:high],
                    offsets,
                    self.context,
                )
            )
        return parts

    def to(self, device: torch.device | str) -> Batch:
        """Tokens and boundaries on a device, without waiting where the memory is pinned; the origin stays here."""
        return Batch(
            self.inputs.to(device, non_blocking=True),
            self.targets.to(device, non_blocking=True),
            None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True),
            self.document_ids,
            self.document_starts,
            self.piece_offsets,
            self.context,
        )


SHORT = ("refuse", "drop", "join", "pack")
GROUP_TOKENS = 2**28


@dataclass(frozen=True)
class Summary:
    """What a loader makes of a dataset, each epoch. Every token is in one of the last five counts.

    Attributes:
        documents: in the dataset.
        tokens: in the dataset.
        batches: of an epoch.
        tokens_in_batches: of an epoch.
        tokens_in_rows_left_over: of rows too few for another batch; other rows in every epoch, when shuffled.
        documents_dropped: shorter than the context.
        tokens_in_documents_dropped: theirs.
        tokens_in_tails_dropped: after the last full row of longer documents.
        tokens_too_few_for_a_row: of joined or packed remainders, at the end of each block.
    """

    documents: int
    tokens: int
    batches: int
    tokens_in_batches: int
    tokens_in_rows_left_over: int
    documents_dropped: int
    tokens_in_documents_dropped: int
    tokens_in_tails_dropped: int
    tokens_too_few_for_a_row: int


class Loader:
    """Iterates over batches of a dataset, epoch after epoch.

    A document gives as many rows of `context` tokens as fit; targets are the row, inputs the row shifted by one, with
    the boundary token before a document's first. `short` says what becomes of the rest.

    The sequence of global batches depends on the dataset, `context`, `batch_size`, `short` and `seed` alone. A process
    gets its share of the rows of each batch, so any number of processes train on the same.

    Args:
        dataset: the documents.
        context: tokens of a row.
        batch_size: rows of a global batch, a multiple of world_size.
        short: for remainders shorter than the context, both short documents and the tails of long ones:
            "refuse" raises if a whole document is shorter (tails are left out);
            "drop" leaves out both;
            "join" lays remainders end to end into rows without marking where one ends;
            "pack" does so too and gives batches of one long row, (1, rows · context), with `cu_seqlens`.
        seed: of the order.
        shuffle: False: the documents' own order, for evaluation.
        rank: number of this process.
        world_size: number of processes.
        epochs: to stop after; None: never.
        prefetch: batches to make ahead in a thread; 0: none, and no thread.
        pin_memory: in page-locked memory, from which copies to a GPU do not wait.
        group_tokens: rows are shuffled among as many blocks at a time as have so many tokens together, one at least.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        context: int,
        batch_size: int,
        *,
        short: str = "refuse",
        seed: int = 0,
        shuffle: bool = True,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        prefetch: int = 4,
        pin_memory: bool = False,
        group_tokens: int = GROUP_TOKENS,
    ) -> None:
        for name, value in (("context", context), ("batch_size", batch_size), ("world_size", world_size)):
            check_at_least(name, value, 1)
        for name, value in (("seed", seed), ("rank", rank), ("prefetch", prefetch), ("group_tokens", group_tokens)):
            check_at_least(name, value, 0)
        if epochs is not None:
            check_at_least("epochs", epochs, 1)
        check_choice("short", short, SHORT)
        if rank >= world_size:
            raise ValueError(f"rank must be below world_size={world_size}, got {rank}")
        if batch_size % world_size:
            raise ValueError(f"batch_size must be a multiple of world_size={world_size}, got {batch_size}")
        self.dataset = dataset
        self.context = context
        self.batch_size = batch_size
        self._short, self._seed, self._shuffle = short, seed, shuffle
        self._rank, self._world_size = rank, world_size
        self._epochs, self._prefetch, self._pin_memory = epochs, prefetch, pin_memory
        self._group_tokens = group_tokens
        self._order = RowOrder(
            dataset.lengths,
            dataset.blocks,
            context,
            join=short in ("join", "pack"),
            seed=seed if shuffle else None,
            group_tokens=group_tokens,
        )
        self.summary = self._summarise()
        self._epoch, self._batch = 0, 0

    @property
    def batches_per_epoch(self) -> int:
        return self.summary.batches

    def __iter__(self) -> Generator[Batch, None, None]:
        """Batches from the current position on. One iteration at a time: the position is the loader's."""
        made = ((position, self._make(*position)) for position in self._positions())
        with closing(prefetch(made, self._prefetch)) as ready:
            for (epoch, batch), content in ready:
                # Before the batch is handed over: a checkpoint written while it is in use must name the next.
                self._epoch, self._batch = self._after(epoch, batch)
                yield content

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch taken, and what it is a position in."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from there at the next iteration, with any number of processes."""
        for name, expected in self._identity().items():
            if state.get(name) != expected:
                raise ValueError(
                    f"the saved position is for another order of batches: {name} was {state.get(name)!r}, "
                    f"here it is {expected!r} ({self.dataset.name})"
                )
        check_at_least("epoch", state["epoch"], 0)
        check_at_least("batch", state["batch"], 0)
        if state["batch"] >= self.batches_per_epoch:
            raise ValueError(f"batch must be below the {self.batches_per_epoch} of an epoch, got {state['batch']}")
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _identity(self) -> dict[str, Any]:
        """All that the sequence of global batches depends on."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "context": self.context,
            "batch_size": self.batch_size,
            "short": self._short,
            "group_tokens": self._group_tokens,
            "fingerprint": self.dataset.fingerprint,
        }

    def _positions(self) -> Iterator[tuple[int, int]]:
        epoch, batch = self._epoch, self._batch
        while self._epochs is None or epoch < self._epochs:
            yield epoch, batch
            epoch, batch = self._after(epoch, batch)

    def _after(self, epoch: int, batch: int) -> tuple[int, int]:
        return (epoch, batch + 1) if batch + 1 < self.batches_per_epoch else (epoch + 1, 0)

    def _make(self, epoch: int, batch: int) -> Batch:
        """The share of a global batch that falls to this process."""
        share = self.batch_size // self._world_size
        first = batch * self.batch_size + self._rank * share
        rows = self._order.rows(epoch, first, first + share)
        packed = self._short == "pack"
        shape = (1, share * self.context) if packed else (share, self.context)
        inputs, targets = (torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory) for _ in range(2))
        offsets = np.append(0, np.cumsum(rows.stops - rows.starts)).astype(np.int32)
        self._fill(rows, offsets, inputs.view(-1).numpy(), targets.view(-1).numpy())
        piece_offsets = torch.from_numpy(offsets)
        return Batch(
            inputs,
            targets,
            piece_offsets if packed else None,
            torch.from_numpy(rows.documents),
            torch.from_numpy(rows.starts),
            piece_offsets,
            self.context,
        )

    def _fill(
        self, rows: Rows, offsets: np.ndarray[Any, Any], inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]
    ) -> None:
        read, boundary = self.dataset.read, self.dataset.boundary
        pieces = zip(rows.documents.tolist(), rows.starts.tolist(), rows.stops.tolist(), offsets.tolist(), strict=False)
        for document, start, stop, place in pieces:
            end = place + stop - start
            # A piece is read with the token before it, which is the first input.
            tokens = read(document, max(start - 1, 0), stop)
            if start:
                inputs[place:end] = tokens[:-1]
                targets[place:end] = tokens[1:]
            else:
                inputs[place] = boundary
                inputs[place + 1 : end] = tokens[:-1]
                targets[place:end] = tokens
        if max(inputs.max(), targets.max()) >= self.dataset.vocab_size:
            self._refuse_token(rows, offsets, inputs, targets)

    def _refuse_token(
        self, rows: Rows, offsets: np.ndarray[Any, Any], inputs: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]
    ) -> None:
        place = int(np.argmax((inputs >= self.dataset.vocab_size) | (targets >= self.dataset.vocab_size)))
        piece = int(np.searchsorted(offsets, place, side="right")) - 1
        document, start = int(rows.documents[piece]), int(rows.starts[piece])
        # An input is the target before it.
        token, before = max((targets[place], 0), (inputs[place], 1))
        raise ValueError(
            f"{self.dataset.document_name(document)}: token {start + place - int(offsets[piece]) - before:,} of "
            f"document {document:,} is {token}, beyond the vocabulary of {self.dataset.vocab_size:,}"
        )

    def _summarise(self) -> Summary:
        lengths = self.dataset.lengths
        join = self._short in ("join", "pack")
        short = lengths < self.context
        documents_short = int(short.sum())
        if documents_short and self._short == "refuse":
            first = int(np.argmax(short))
            raise ValueError(
                f"{documents_short:,} of {len(lengths):,} documents are shorter than context={self.context:,}: first "
                f"{self.dataset.document_name(first)} with {lengths[first]:,} tokens; choose short='drop', 'join' or "
                "'pack', or a shorter context"
            )
        tokens, rows = int(lengths.sum()), self._order.count
        batches = rows // self.batch_size
        if not batches:
            raise ValueError(
                f"{self.dataset.name} gives {rows:,} rows of context={self.context:,}, fewer than "
                f"batch_size={self.batch_size:,}"
            )
        dropped = 0 if join else int(lengths[short].sum())
        tails = 0 if join else int((lengths % self.context)[~short].sum())
        return Summary(
            documents=len(lengths),
            tokens=tokens,
            batches=batches,
            tokens_in_batches=batches * self.batch_size * self.context,
            tokens_in_rows_left_over=(rows - batches * self.batch_size) * self.context,
            documents_dropped=0 if join else documents_short,
            tokens_in_documents_dropped=dropped,
            tokens_in_tails_dropped=tails,
            tokens_too_few_for_a_row=tokens - rows * self.context - dropped - tails,
        )
