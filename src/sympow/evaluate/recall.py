"""What the state holds, by number and distance: associative recall of random pairs (`sympow.data`'s task "mqar").

A model of text has not been trained for it. Pairs of tokens drawn from its own vocabulary are shown once each and asked
for in another order; before anything was learned of them a value's loss is about the logarithm of the number of values,
and how far below that it comes is what was kept. A model trained on the task itself is asked in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sympow.data.associative_recall import KEYS, VALUES, pairs_and_queries
from sympow.data.dataset import TokenDataset
from sympow.evaluate.scoring import score_answers
from sympow.model.gpt import GPT, PIECE

PAIRS = (4, 16, 64)
SEQUENCES = 64
# Tokens at most that are read at once, in as many sequences as fit.
BATCH_TOKENS = 65_536


@dataclass(frozen=True)
class Vocabulary:
    """What to ask with.

    Attributes:
        keys, values: ids, none of them in both.
        boundary: id to begin with.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    boundary: int

    @classmethod
    def of_text(cls, dataset: TokenDataset, size: int = 256, tokens: int = 65_536) -> Vocabulary:
        """The commonest tokens of documents, alternately a key and a value: those a model has had occasion to learn.

        Args:
            size: keys and values together at most.
            tokens: to count in, from each of the first documents.
        """
        counts = np.zeros(dataset.vocab_size, np.int64)
        for document in range(min(16, len(dataset.lengths))):
            read = dataset.read(document, 0, min(tokens, int(dataset.lengths[document])))
            counts += np.bincount(read, minlength=dataset.vocab_size)
        counts[dataset.boundary] = 0
        common = np.argsort(-counts, kind="stable")[: min(size, int((counts > 0).sum()))]
        return cls(common[::2], common[1::2], dataset.boundary)

    @classmethod
    def of_task(cls, boundary: int) -> Vocabulary:
        """That of the training task."""
        return cls(KEYS, VALUES, boundary)


@dataclass(frozen=True)
class RecallPoint:
    """How well pairs of a certain number are recalled from a certain distance.

    Attributes:
        pairs: how many were shown.
        nearest, farthest: tokens between a value and the place where it is asked for, from and to.
        accuracy: share of values that were the likeliest token.
        loss: mean, nats.
        guess: the loss of one who only knows which ids are values.
        answers: how many.
    """

    pairs: int
    nearest: int
    farthest: int
    accuracy: float
    loss: float
    guess: float
    answers: int


def associative_recall(
    model: GPT,
    vocabulary: Vocabulary,
    *,
    pairs: Sequence[int] | None = None,
    sequences: int = SEQUENCES,
    seed: int = 0,
    piece: int = PIECE,
    dtype: torch.dtype | None = None,
) -> list[RecallPoint]:
    """Accuracy and loss of values at their second appearance, by number of pairs and distance in octaves.

    Args:
        vocabulary: ids to use.
        pairs: how many to show; each number is a setting of its own. None: those of PAIRS that there are keys for.
        sequences: per setting.
        seed: of the pairs.
        piece, dtype: as in `score_answers`.

    Raises:
        ValueError: there are fewer keys than pairs.
    """
    if pairs is None:
        pairs = [number for number in PAIRS if number <= len(vocabulary.keys)] or [len(vocabulary.keys)]
    most = max(pairs)
    if most > len(vocabulary.keys):
        raise ValueError(f"pairs must be at most {len(vocabulary.keys)}, the keys there are; got {most}")
    found = []
    for number in pairs:
        length = 4 * number
        choose = np.random.default_rng([seed, number])
        made = np.stack(
            [pairs_and_queries(choose, vocabulary.keys, vocabulary.values, number, length) for _ in range(sequences)]
        )
        tokens = torch.from_numpy(np.insert(made, 0, vocabulary.boundary, axis=1))
        asked = torch.arange(2 * number + 2, length + 1, 2)
        batches = tokens.split(max(1, BATCH_TOKENS // length))
        scored = [score_answers(model, batch, asked, piece=piece, dtype=dtype) for batch in batches]
        losses = torch.cat([answers.losses for answers in scored]).double()
        right = torch.cat([answers.right for answers in scored])
        found += _by_octave(number, _distances(made, number), losses, right, math.log(len(vocabulary.values)))
    return found


def _distances(made: NDArray[np.int64], pairs: int) -> torch.Tensor:
    """Tokens from each value's first appearance to its second, (sequences, pairs)."""
    keys = made[:, ::2]
    order = (keys[:, pairs:, None] == keys[:, None, :pairs]).argmax(2)
    return torch.from_numpy(2 * (np.arange(pairs, 2 * pairs) - order))


def _by_octave(
    pairs: int, distances: torch.Tensor, losses: torch.Tensor, right: torch.Tensor, guess: float
) -> list[RecallPoint]:
    points = []
    octaves = distances.double().log2().floor().long()
    for octave in octaves.unique().tolist():
        here = octaves == octave
        points.append(
            RecallPoint(
                pairs,
                int(distances[here].min()),
                int(distances[here].max()),
                accuracy=right[here].double().mean().item(),
                loss=losses[here].mean().item(),
                guess=guess,
                answers=int(here.sum()),
            )
        )
    return points
