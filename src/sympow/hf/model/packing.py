"""Finds packed documents in `position_ids` that restart or in `seq_idx`, as transformers' collators pass them.

`cu_seq_lens_q` already has the offsets. The other two must be searched for documents: if they were ignored, a document
would attend to the ones before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sympow.errors import ArgumentError, ArgumentTypeError


def packed_offsets(
    position_ids: Tensor | None, seq_idx: Tensor | None, mask: Tensor | None, shape: torch.Size
) -> Tensor | None:
    """Offsets of documents in the concatenated rows of a batch, (n + 1,) int32; None if every row is one document.

    Args:
        position_ids: (b, t) or (1, t). A position that does not increase starts a document. Positions may count padding
            inside a document or not.
        seq_idx: (b, t) or (1, t), the index of each token's document.
        mask: (b, t) bool, False for padding; None: no padding.
        shape: (b, t).

    Raises:
        ValueError: positions have gaps, or there is padding inside a document of a packed batch.
    """
    length = shape[1]
    marks = {"position_ids": position_ids, "seq_idx": seq_idx}
    given = {name: _rows(name, x, shape) for name, x in marks.items() if x is not None}
    if not given or length < 2:
        return None
    device = next(iter(given.values())).device
    real = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask
    places = torch.arange(length, device=device)
    # For each token, the index of the last token before it that is not padding, or −1.
    before = places.where(real, -1).cummax(1).values.roll(1, 1)
    before[:, 0] = -1
    follows = real & (before >= 0)
    starts, jumps = torch.zeros_like(real), torch.zeros_like(real)
    for name, x in given.items():
        step = x - x.gather(1, before.clamp(min=0))
        if name == "seq_idx":
            starts |= follows & (step != 0)
        else:
            starts |= follows & (step <= 0)
            jumps = follows & (step > 1) & (step != places - before)
    if torch.compiler.is_compiling():
        # The number of documents would be a data-dependent shape in the graph.
        message = "position_ids restart or have gaps; in a compiled model, pass packed documents' cu_seq_lens_q"
        torch._assert_async(~(starts | jumps).any(), message)
        return None
    if jumps.any():
        row, place = jumps.nonzero()[0].tolist()
        came = given["position_ids"][row, place - 1 : place + 1].tolist()
        raise ArgumentError(
            "position_ids",
            "must increase by 1 from token to token, or restart for the next document: the model counts "
            f"positions itself; got {came[1]} after {came[0]}",
        )
    if not starts.any():
        return None
    if bool((follows & ~starts & (places - before > 1)).any()):
        raise ArgumentError("attention_mask", "must not have padding inside of packed documents, only between them")
    # Documents end at the ends of rows, and each padding token becomes a separate document.
    starts |= ~real | ~follows
    offsets = starts.flatten().nonzero().flatten()
    return torch.cat([offsets, offsets.new_tensor([starts.numel()])]).to(torch.int32)


def check_continuation(
    position_ids: Tensor, attention_mask: Tensor | None, mask: Tensor | None, seen: int, shape: torch.Size
) -> None:
    """Raises unless positions continue those of the tokens in a cache, which a model counted itself.

    Positions may count padding or not. If no mask says how many earlier tokens were padding, any number is accepted.

    Args:
        position_ids: (b, t) or (1, t), of the new tokens.
        attention_mask: (b, n), 0 for padding; it is used if it covers the earlier tokens too. None: no padding.
        mask: (b, t) bool, False for padding among the new tokens; None: no padding.
        seen: the number of earlier tokens, at least 1.
        shape: (b, t).

    Raises:
        ValueError: there is a gap, or a position of an earlier token again.
    """
    given = _rows("position_ids", position_ids, shape)
    highest = seen + torch.arange(shape[1], device=given.device)
    lowest = torch.ones_like(highest)
    if attention_mask is not None and attention_mask.shape[1] >= seen + shape[1]:
        so_far = attention_mask[:, : seen + shape[1]].to(given.device) != 0
        lowest = so_far.cumsum(1)[:, seen:] - 1
    wrong = (given > highest) | (given < lowest)
    if mask is not None:
        wrong &= mask.to(given.device)
    if torch.compiler.is_compiling():
        torch._assert_async(~wrong.any(), "position_ids must continue those of the tokens in past_key_values")
    elif wrong.any():
        row, place = wrong.nonzero()[0].tolist()
        raise ArgumentError(
            "position_ids",
            "must continue those of the tokens in past_key_values: the model counts positions itself; "
            f"got {int(given[row, place])} for the token after {seen + place} others",
        )


def _rows(name: str, x: Tensor, shape: torch.Size) -> Tensor:
    if not isinstance(x, Tensor):
        raise ArgumentTypeError(name, f"must be a tensor, got {type(x).__name__}")
    if x.ndim != 2 or x.shape[0] not in (1, shape[0]) or x.shape[1] != shape[1]:
        raise ArgumentError(name, f"must be {tuple(shape)} or {(1, shape[1])}, got {tuple(x.shape)}")
    return x.expand(shape)
