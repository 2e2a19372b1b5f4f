"""What a loader gives to a trainer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
