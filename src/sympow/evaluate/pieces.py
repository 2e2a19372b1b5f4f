"""Reading a text of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sympow.model.gpt import GPT, ModelState
from sympow.parallel.shards import Shards


def read_in_pieces(
    model: GPT, inputs: Tensor, piece: int, dtype: torch.dtype | None, group: ProcessGroup | None = None
) -> Iterator[tuple[slice, Tensor]]:
    """Features of `piece` tokens at a time, the state carried across: what one pass over all of them would give.

    Args:
        inputs: (b, t) integers on the model's device.
        piece: tokens at a time.
        dtype: of products, under autocast; None: no autocast.
        group: processes that read the text together, all with the same inputs: each `piece` tokens at a time.

    Yields:
        which tokens, and their features (b, piece, width); with a group those of this process.
    """
    length = inputs.shape[1]
    together = piece if group is None else piece * group.size()
    if group is not None and model.config.mixer == "softmax" and length > together:
        raise ValueError(
            f"piece must be at least {-(-length // group.size()):,} for a softmax model in {group.size()} processes, "
            f"which cannot pass keys and values of all {length:,} tokens on; got {piece:,}"
        )
    state: ModelState | None = None
    for start in range(0, length, together):
        now = slice(start, min(start + together, length))
        shards = None if group is None else Shards.even(now.stop - start, group)
        tokens = inputs[:, now]
        if shards is not None:
            tokens = shards.take(tokens)
            now = slice(start + shards.start, start + shards.start + shards.length)
        with torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype is not None):
            features, state = model.features(tokens, state, return_state=start + together < length, shards=shards)
        yield now, features
