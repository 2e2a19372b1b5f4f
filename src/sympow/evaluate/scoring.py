"""Reading a text of any length in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import cross_entropy, linear

from sympow.checks import check_at_least
from sympow.model.gpt import GPT, PIECE, ModelState
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


@dataclass(frozen=True)
class Answers:
    """What a model made of n tokens of each of b texts.

    Attributes:
        losses: nats, (b, n) float32 on the CPU.
        right: whether each was the likeliest, (b, n) bool.
    """

    losses: Tensor
    right: Tensor


@torch.no_grad()
def score_answers(
    model: GPT, tokens: Tensor, places: Tensor, *, piece: int = PIECE, dtype: torch.dtype | None = None
) -> Answers:
    """Scores some tokens of texts, each given all that stands before it; only theirs are the logits that are made.

    Args:
        tokens: (b, t) integers, on any device.
        places: of the tokens to score, (n,), ascending, from 1 on; the same in every text.
        piece: tokens read at a time, the state carried across.
        dtype: of products, under autocast; None: no autocast.
    """
    check_at_least("piece", piece, 1)
    if not len(places) or int(places.min()) < 1 or int(places.max()) >= tokens.shape[1]:
        raise ValueError(f"places must lie between 1 and {tokens.shape[1] - 1}, and there must be some; got {places}")
    device = model.embedding.weight.device
    losses, right = [], []
    was_training = model.training
    model.eval()
    try:
        for now, features in read_in_pieces(model, tokens[:, :-1].to(device), piece, dtype):
            # A token is foretold by the one before it.
            here = places[(places - 1 >= now.start) & (places - 1 < now.stop)]
            if not len(here):
                continue
            targets = tokens[:, here].to(device)
            chosen = features[:, (here - 1 - now.start).to(device)].float()
            logits = linear(chosen, model.embedding.weight.float())
            losses.append(cross_entropy(logits.mT, targets, reduction="none").cpu())
            right.append((logits.argmax(-1) == targets).cpu())
    finally:
        model.train(was_training)
    return Answers(torch.cat(losses, dim=1), torch.cat(right, dim=1))
