"""The data loader: batches of rows in a reproducible, resumable order, the same for any number of processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sympow.checks import check_at_least, check_choice
from sympow.data.dataset import TokenDataset
from sympow.data.row_order import Ints, RowOrder, RowSlices
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.settings import SHORT

T = TypeVar("T")


def prefetch(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, up to `depth` of them computed ahead in a thread; an error is raised in place of its item.

    Closing the generator ends the thread; garbage collection closes it.
    """
    if depth == 0:
        yield from items
        return
    # One worker, so that items are computed in order.
    pool = ThreadPoolExecutor(1, thread_name_prefix="sympow-prefetch")
    # Each in a list, so that the end, an empty list, differs from any item.
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
    """Rows of tokens with their targets, and the documents they come from.

    Either (rows, context), one sequence per row, or packed: (1, rows · context) with the boundaries of documents.

    Attributes:
        inputs: int64: the token before each target; the boundary token before a document's first token.
        targets: int64, same shape.
        cu_seqlens: int32, (slices + 1,): where slices of documents begin and, last, where they end; None if not packed.
        document_ids: int64, (slices,): the document of each slice. A row is one slice, unless remainders of documents
            were joined or packed into it.
        document_starts: int64, (slices,): position of the first target in its document.
        slice_offsets: int32, (slices + 1,): where slices begin in the flattened batch, packed or not.
        context: tokens of a row.
    """

    inputs: Tensor
    targets: Tensor
    cu_seqlens: Tensor | None
    document_ids: Tensor
    document_starts: Tensor
    slice_offsets: Tensor
    context: int

    @property
    def rows(self) -> int:
        return self.inputs.numel() // self.context

    def split(self, rows: int) -> list[Batch]:
        """Micro-batches of `rows` rows each, to accumulate gradients over; the last may have fewer."""
        if rows < 1:
            raise ArgumentError("rows", f"must be at least 1, got {rows}")
        micro_batches = []
        for first in range(0, self.rows, rows):
            start, stop = first * self.context, min(first + rows, self.rows) * self.context
            bounds = torch.tensor([start, stop], dtype=torch.int32, device=self.slice_offsets.device)
            # Every row begins with a slice, so that both are found exactly.
            low, high = torch.searchsorted(self.slice_offsets, bounds).tolist()
            offsets = self.slice_offsets[low : high + 1] - start
            packed = self.cu_seqlens is not None
            shape = (1, stop - start) if packed else (-1, self.context)
            micro_batches.append(
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
        return micro_batches

    def to(self, device: torch.device | str) -> Batch:
        """Copies tokens and boundaries to a device, asynchronously from pinned memory; ids of documents stay here."""
        return replace(
            self,
            inputs=self.inputs.to(device, non_blocking=True),
            targets=self.targets.to(device, non_blocking=True),
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True),
        )


GROUP_TOKENS = 2**28


@dataclass(frozen=True)
class Summary:
    """Counts of an epoch. Every token is in one of the token counts after the first.

    Attributes:
        documents: in the dataset.
        tokens: in the dataset.
        batches: of an epoch.
        tokens_in_batches: of an epoch.
        tokens_in_rows_left_over: of rows too few for another batch; different rows in every epoch, when shuffled.
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
    the boundary token before a document's first. `short` says what happens to the remainder.

    The sequence of global batches depends only on the dataset, `context`, `batch_size`, `short` and `seed`. Each
    process gets an equal number of rows of each batch, so that any number of processes trains on the same batches.

    Args:
        dataset: the documents.
        context: tokens of a row.
        batch_size: rows of a global batch, a multiple of world_size.
        short: for remainders shorter than the context, both short documents and the tails of long ones:
            "refuse" raises if a whole document is shorter (tails are dropped);
            "drop" drops both;
            "join" concatenates remainders into rows without marking where one ends;
            "pack" does so too and returns batches of one long row, (1, rows · context), with `cu_seqlens`.
        seed: of the order.
        shuffle: False: in order of the documents, for evaluation.
        rank: number of this process.
        world_size: number of processes.
        epochs: to stop after; None: never.
        prefetch: batches to prepare ahead in a thread; 0: no thread.
        pin_memory: whether batches are in page-locked memory, for asynchronous copies to a GPU.
        group_tokens: rows are shuffled among as many blocks as have this many tokens together, at least one.
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
            raise ArgumentError("rank", f"must be below world_size={world_size}, got {rank}")
        if batch_size % world_size:
            raise ArgumentError("batch_size", f"must be a multiple of world_size={world_size}, got {batch_size}")
        _check_members(dataset)
        self.dataset, self.context, self.batch_size, self._short = dataset, context, batch_size, short
        self._rank, self._world_size = rank, world_size
        self._epochs, self._prefetch, self._pin_memory = epochs, prefetch, pin_memory
        # All that the sequence of global batches depends on.
        self._identity = {
            "seed": seed,
            "shuffle": shuffle,
            "context": context,
            "batch_size": batch_size,
            "short": short,
            "group_tokens": group_tokens,
            "fingerprint": dataset.fingerprint,
        }
        self._order = RowOrder(
            dataset.lengths,
            dataset.blocks,
            context,
            join=short in ("join", "pack"),
            seed=seed if shuffle else None,
            group_tokens=group_tokens,
        )
        self.summary = self._summarize()
        # Batches before the next one, those of earlier epochs included.
        self._position = 0

    @property
    def batches_per_epoch(self) -> int:
        return self.summary.batches

    def __iter__(self) -> Generator[Batch, None, None]:
        """Batches from the current position on. Only one iteration at a time, since the position is the loader's."""
        begin, per_epoch = self._position, self.batches_per_epoch
        positions = count(begin) if self._epochs is None else range(begin, self._epochs * per_epoch)
        made = ((position, self._make(*divmod(position, per_epoch))) for position in positions)
        with closing(prefetch(made, self._prefetch)) as ready:
            for position, batch in ready:
                # Before the yield: a checkpoint written while the batch is in use must point to the next one.
                self._position = position + 1
                yield batch

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch yielded, and all that the order of batches depends on."""
        epoch, batch = divmod(self._position, self.batches_per_epoch)
        return {"epoch": epoch, "batch": batch, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the position of the next iteration; the number of processes may differ."""
        if missing := self.state_dict().keys() - state.keys():
            raise UserError(f"the saved position lacks {', '.join(sorted(missing))}")
        for name, expected in self._identity.items():
            if state[name] != expected:
                if name == "fingerprint":
                    raise UserError(
                        f"the data have changed since the position was saved: the fingerprint of {self.dataset.name} "
                        f"was {state[name]!r}, and is now {expected!r}"
                    )
                raise UserError(
                    f"the saved position is for another order of batches: {name} was {state[name]!r}, "
                    f"here it is {expected!r} ({self.dataset.name})"
                )
        check_at_least("epoch", state["epoch"], 0)
        check_at_least("batch", state["batch"], 0)
        if state["batch"] >= self.batches_per_epoch:
            raise ArgumentError(
                "batch", f"must be below the {self.batches_per_epoch} of an epoch, got {state['batch']}"
            )
        self._position = state["epoch"] * self.batches_per_epoch + state["batch"]

    def _make(self, epoch: int, batch: int) -> Batch:
        """The rows of a global batch that belong to this process."""
        share = self.batch_size // self._world_size
        first = batch * self.batch_size + self._rank * share
        rows = self._order.rows(epoch, first, first + share)
        packed = self._short == "pack"
        shape = (1, share * self.context) if packed else (share, self.context)
        inputs, targets = (torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory) for _ in range(2))
        offsets = np.append(0, np.cumsum(rows.stops - rows.starts)).astype(np.int32)
        self._fill(rows, offsets, inputs.view(-1).numpy(), targets.view(-1).numpy())
        slice_offsets = torch.from_numpy(offsets)
        return Batch(
            inputs,
            targets,
            slice_offsets if packed else None,
            torch.from_numpy(rows.documents),
            torch.from_numpy(rows.starts),
            slice_offsets,
            self.context,
        )

    def _fill(self, rows: RowSlices, offsets: NDArray[np.int32], inputs: Ints, targets: Ints) -> None:
        """Reads slices of documents into the flattened inputs and targets, (tokens,), from their offsets on."""
        read, boundary = self.dataset.read, self.dataset.boundary
        slices = zip(rows.documents.tolist(), rows.starts.tolist(), rows.stops.tolist(), offsets.tolist(), strict=False)
        for document, start, stop, place in slices:
            end = place + stop - start
            # A slice is read with the token before it, which is the first input.
            first = max(start - 1, 0)
            tokens = np.asarray(read(document, first, stop))
            if tokens.shape != (stop - first,) or tokens.dtype.kind not in "iu":
                self._refuse_slice(document, first, stop, tokens)
            if start:
                inputs[place:end] = tokens[:-1]
                targets[place:end] = tokens[1:]
            else:
                inputs[place] = boundary
                inputs[place + 1 : end] = tokens[:-1]
                targets[place:end] = tokens
        # As unsigned integers, so that one comparison finds negative ids too.
        if max(inputs.view(np.uint64).max(), targets.view(np.uint64).max()) >= self.dataset.vocab_size:
            self._refuse_token(rows, offsets, inputs, targets)

    def _refuse_slice(self, document: int, start: int, stop: int, tokens: NDArray[Any]) -> None:
        asked = f"{self.dataset.document_name(document)}: read({document}, {start}, {stop}) of the dataset must return"
        if tokens.dtype.kind not in "iu" and tokens.size:
            raise TypeError(f"{asked} integers, got {tokens.dtype}")
        raise UserError(f"{asked} {stop - start} tokens, got an array of shape {tokens.shape}")

    def _refuse_token(self, rows: RowSlices, offsets: NDArray[np.int32], inputs: Ints, targets: Ints) -> None:
        wrong = [x.view(np.uint64) >= self.dataset.vocab_size for x in (inputs, targets)]
        place = int(np.argmax(wrong[0] | wrong[1]))
        number = int(np.searchsorted(offsets, place, side="right")) - 1
        document, start = int(rows.documents[number]), int(rows.starts[number])
        # An input is the target before it.
        token, before = (targets[place], 0) if wrong[1][place] else (inputs[place], 1)
        what = "below 0" if token < 0 else f"beyond the vocabulary of {self.dataset.vocab_size:,}"
        raise UserError(
            f"{self.dataset.document_name(document)}: token {start + place - int(offsets[number]) - before:,} of "
            f"document {document:,} is {token}, {what}"
        )

    def _summarize(self) -> Summary:
        lengths = self.dataset.lengths
        join = self._short in ("join", "pack")
        short = lengths < self.context
        documents_short = int(short.sum())
        if documents_short and self._short == "refuse":
            first = int(np.argmax(short))
            raise UserError(
                f"{documents_short:,} of {len(lengths):,} documents are shorter than context={self.context:,}: first "
                f"{self.dataset.document_name(first)} with {lengths[first]:,} tokens; choose short='drop', 'join' or "
                "'pack', or a shorter context"
            )
        tokens, rows = int(lengths.sum()), self._order.count
        batches = rows // self.batch_size
        if not batches:
            raise UserError(
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


def _check_members(dataset: TokenDataset) -> None:
    """Refuses members of another type than `TokenDataset` has, as in a dataset of the user's own."""
    for name in ("lengths", "blocks"):
        value: Any = getattr(dataset, name)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
            raise ArgumentTypeError(name, f"of the dataset must be a NumPy array of integers, got {got}")
    boundary: Any = dataset.boundary
    if not isinstance(boundary, int | np.integer):
        raise ArgumentTypeError("boundary", f"of the dataset must be an int, got {type(boundary).__name__}")
    if not 0 <= boundary < dataset.vocab_size:
        raise ArgumentError(
            "boundary",
            f"of the dataset must be at least 0 and below its vocab_size, {dataset.vocab_size:,}; got {boundary}",
        )
