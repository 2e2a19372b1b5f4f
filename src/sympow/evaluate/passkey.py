"""What the state holds from far back: a number told once in the middle of other text, and asked for at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sympow.checks import check_at_least
from sympow.data.dataset import TokenDataset
from sympow.data.tokenizer import Tokenizer
from sympow.evaluate.scoring import score_answers
from sympow.model.gpt import GPT, PIECE

STATEMENT = "\nThe pass key is {key}. Remember it: {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DISTANCES = (64, 256, 1_024, 4_096)
KEYS = 16
# Tokens of other text before the key is told.
LEAD = 64
# Tokens at most that are read at once, in as many texts as fit.
BATCH_TOKENS = 65_536


@dataclass(frozen=True)
class PasskeyPoint:
    """How well a key is known from a distance.

    Attributes:
        distance: tokens of other text between the key and the question.
        accuracy: share of keys of which every token was the likeliest.
        loss: of a whole key, mean, nats.
        control: the loss of a key that was not told, in the same texts; what was kept is the difference.
        keys: how many.
    """

    distance: int
    accuracy: float
    loss: float
    control: float
    keys: int


def passkey_retrieval(
    model: GPT,
    tokenizer: Tokenizer,
    text: TokenDataset,
    *,
    distances: Sequence[int] = DISTANCES,
    keys: int = KEYS,
    seed: int = 0,
    piece: int = PIECE,
    dtype: torch.dtype | None = None,
) -> list[PasskeyPoint]:
    """Accuracy and loss of a key of five digits against the distance it was told at.

    A small model may never say a whole key, and still find the one it was told likelier than another.

    Args:
        tokenizer: the model's.
        text: documents to take other text from, held out from training.
        distances: tokens between key and question; one for which no document is long enough is refused.
        keys: per distance, each in a text of its own.
        seed: of the keys.
        piece, dtype: as in `score_answers`.
    """
    for name, value in (("keys", keys), ("distances", min(distances))):
        check_at_least(name, value, 1)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise ValueError(
            f"tokenizer must be the model's: it has {tokenizer.vocab_size:,} ids, the model {model.config.vocab_size:,}"
        )
    chosen = _keys_of_one_length(tokenizer, keys, np.random.default_rng(seed))
    question = tokenizer.encode(QUESTION)
    answers = np.stack([tokenizer.encode(f" {key}") for key in chosen])
    found = []
    for distance in distances:
        texts = _texts_around(text, LEAD + distance, keys)
        rows = []
        for other, key in zip(texts, chosen, strict=True):
            told = tokenizer.encode(STATEMENT.format(key=key))
            rows.append(np.concatenate([[tokenizer.boundary], other[:LEAD], told, other[LEAD:], question]))
        loss, accuracy = _score(model, rows, answers, piece, dtype)
        # Each text again, with the key of another.
        control, _ = _score(model, rows, np.roll(answers, 1, axis=0), piece, dtype) if keys > 1 else (float("nan"), 0)
        found.append(PasskeyPoint(distance, accuracy, loss, control, keys))
    return found


def _keys_of_one_length(tokenizer: Tokenizer, count: int, choose: np.random.Generator) -> list[str]:
    """Different numbers of five digits with equally many tokens, so that texts line up."""
    by_size: dict[tuple[int, int], list[str]] = {}
    for number in choose.permutation(np.arange(10_000, 100_000)).tolist():
        key = str(number)
        size = len(tokenizer.encode(f" {key}")), len(tokenizer.encode(STATEMENT.format(key=key)))
        alike = by_size.setdefault(size, [])
        alike.append(key)
        if len(alike) == count:
            return alike
    raise ValueError(f"keys must be at most {max(map(len, by_size.values()))} with this tokenizer, got {count}")


def _texts_around(text: TokenDataset, length: int, count: int) -> list[NDArray[np.int64]]:
    """So many stretches of a length, from documents in turn, the beginnings first."""
    long_enough = np.flatnonzero(np.asarray(text.lengths) > length)
    if not long_enough.size:
        raise ValueError(
            f"distances must leave room in a document of {text.name}, the longest of which has "
            f"{max(text.lengths):,} tokens; {length:,} were needed"
        )
    found = []
    for number in range(count):
        round_number, place = divmod(number, len(long_enough))
        document = int(long_enough[place])
        # Without the boundary at the end.
        room = int(text.lengths[document]) - 1 - length
        start = min(round_number * length, room)
        found.append(np.asarray(text.read(document, start, start + length), np.int64))
    return found


def _score(
    model: GPT, rows: list[NDArray[np.int64]], answers: NDArray[np.int64], piece: int, dtype: torch.dtype | None
) -> tuple[float, float]:
    """Mean loss of whole answers, and the share of those that are right."""
    tokens = torch.from_numpy(np.stack([np.concatenate(pair) for pair in zip(rows, answers, strict=True)]).astype(int))
    places = torch.arange(tokens.shape[1] - answers.shape[1], tokens.shape[1])
    batches = tokens.split(max(1, BATCH_TOKENS // tokens.shape[1]))
    scored = [score_answers(model, batch, places, piece=piece, dtype=dtype) for batch in batches]
    losses = torch.cat([answers.losses.double().sum(1) for answers in scored])
    right = torch.cat([answers.right.all(1) for answers in scored])
    return losses.mean().item(), right.double().mean().item()
