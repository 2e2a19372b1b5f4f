"""Probes of what the state holds: associative recall of random pairs, and retrieval of a passkey.

**Associative recall.** Key-value pairs of tokens from the model's vocabulary are shown once each; then the keys are
repeated in another order as queries. A language model has not been trained for this: a value that its state does not
hold has a loss of about the logarithm of the number of values, and a lower loss shows what the state holds. A model
trained on the task (`mqar` of `sympow.data`) is probed in the same way.

**Passkey.** A number is stated once within other text, and queried at the end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from sympow.checks import check_at_least
from sympow.data.associative_recall import KEYS, VALUES, pairs_and_queries
from sympow.data.dataset import TokenDataset
from sympow.data.tokenizer import Tokenizer
from sympow.errors import ArgumentError
from sympow.evaluate.held_out_loss import features_by_segment
from sympow.model.gpt import GPT, SEGMENT_SIZE

# Tokens read at once at most, in as many sequences as fit.
BATCH_TOKENS = 65_536
# Associative recall.
PAIRS = (4, 16, 64)
SEQUENCES = 64
# Passkey retrieval.
STATEMENT = "\nThe pass key is {key}. Remember it: {key} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is"
DISTANCES = (64, 256, 1_024, 4_096)
PASSKEYS = 16
# Tokens of other text before the key.
LEAD = 64


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of the recall probe.

    Attributes:
        keys, values: token ids; none is both a key and a value.
        boundary: the id that begins a sequence.
    """

    keys: NDArray[np.int64]
    values: NDArray[np.int64]
    boundary: int

    @classmethod
    def of_text(cls, dataset: TokenDataset, size: int = 256, tokens: int = 65_536) -> Vocabulary:
        """The most frequent tokens of documents, which a model has learned best, alternately a key and a value.

        Args:
            dataset: the documents.
            size: number of keys and values together, at most.
            tokens: tokens to count in each of the first 16 documents.
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
        """The keys and values of the training task `mqar`."""
        return cls(KEYS, VALUES, boundary)


@dataclass(frozen=True)
class RecallPoint:
    """Recall of values, for one number of pairs and one range of distances.

    Attributes:
        pairs: number of pairs that were shown.
        nearest, farthest: smallest and largest number of tokens between a value and its query.
        accuracy: share of values that the model predicted (argmax).
        loss: mean loss of the values, in nats.
        guess: loss of a uniform guess among all values.
        answers: number of queries.
    """

    pairs: int
    nearest: int
    farthest: int
    accuracy: float
    loss: float
    guess: float
    answers: int


def check_numbers(name: str, values: Sequence[int]) -> None:
    """Raises a ValueError unless the values are one or more numbers of at least 1."""
    if not len(values):
        raise ArgumentError(name, "must have at least one number, got none")
    if min(values) < 1:
        raise ArgumentError(name, f"must be numbers of at least 1, got {tuple(values)}")


def choose_pairs(pairs: Sequence[int] | None, vocabulary: Vocabulary) -> list[int]:
    """The numbers of pairs to probe: those given, or by default those of PAIRS that there are enough keys for.

    Raises:
        ValueError: a number is below 1 or above the number of keys, or there are none, or no keys or values.
    """
    keys, values = len(vocabulary.keys), len(vocabulary.values)
    if not keys or not values:
        raise ArgumentError("vocabulary", f"must have at least one key and one value, got {keys} and {values}")
    if pairs is None:
        return [number for number in PAIRS if number <= keys] or [keys]
    check_numbers("pairs", pairs)
    if max(pairs) > keys:
        raise ArgumentError("pairs", f"must be at most {keys}, the number of keys; got {max(pairs)}")
    return list(pairs)


def associative_recall(
    model: GPT,
    vocabulary: Vocabulary,
    *,
    pairs: Sequence[int] | None = None,
    sequences: int = SEQUENCES,
    seed: int = 0,
    segment_size: int = SEGMENT_SIZE,
    dtype: torch.dtype | None = None,
) -> list[RecallPoint]:
    """Accuracy and loss of values at their second occurrence, by number of pairs and by distance in octaves.

    Args:
        model: the model.
        vocabulary: token ids of keys and values.
        pairs: numbers of pairs, each probed separately. None: those of PAIRS that there are enough keys for.
        sequences: number of sequences for each number of pairs.
        seed: seed of the random pairs.
        segment_size, dtype: as in `score_answers`.

    Raises:
        ValueError: there are fewer keys than pairs, or no pairs or no sequences.
    """
    check_at_least("sequences", sequences, 1)
    found = []
    for number in choose_pairs(pairs, vocabulary):
        length = 4 * number
        choose = np.random.default_rng([seed, number])
        made = np.stack(
            [pairs_and_queries(choose, vocabulary.keys, vocabulary.values, number, length) for _ in range(sequences)]
        )
        tokens = torch.from_numpy(np.insert(made, 0, vocabulary.boundary, axis=1))
        asked = torch.arange(2 * number + 2, length + 1, 2)
        losses, right = score_answers(model, tokens, asked, segment_size=segment_size, dtype=dtype)
        found += _by_octave(number, _distances(made, number), losses.double(), right, math.log(len(vocabulary.values)))
    return found


def _distances(made: NDArray[np.int64], pairs: int) -> torch.Tensor:
    """Tokens from each value's first occurrence to its second, (sequences, pairs)."""
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


@dataclass(frozen=True)
class PasskeyPoint:
    """Retrieval of passkeys at one distance.

    Attributes:
        distance: tokens of other text between the key and the question.
        accuracy: share of keys whose every token the model predicted (argmax).
        loss: mean loss of a whole key, in nats.
        control: mean loss of a key that the same texts do not contain; the difference shows what the state holds.
        keys: number of keys.
    """

    distance: int
    accuracy: float
    loss: float
    control: float
    keys: int


def choose_distances(distances: Sequence[int] | None, text: TokenDataset) -> list[int]:
    """The distances to probe: those given, or by default those of DISTANCES that some document is long enough for.

    Raises:
        ValueError: a distance is below 1, or no document is long enough for it, or there are none.
    """
    longest = int(max(text.lengths))
    # Without the boundary at the end.
    room = longest - 1 - LEAD
    if distances is not None:
        check_numbers("distances", distances)
    chosen = [number for number in DISTANCES if number <= room] if distances is None else list(distances)
    farthest = max(chosen, default=min(DISTANCES))
    if farthest > room:
        raise ArgumentError(
            "distances",
            f"must fit into a document of {text.name}, the longest of which has {longest:,} tokens; a "
            f"distance of {farthest:,} needs {longest - room + farthest:,}",
        )
    return chosen


def check_has_ids(model: GPT, tokenizer: Tokenizer) -> None:
    """Raises a ValueError unless the model has all ids of the tokenizer.

    It may have more: embeddings of pretrained models are often padded to a round number.
    """
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ArgumentError(
            "tokenizer",
            f"must be the model's: it has {tokenizer.vocab_size:,} ids, the model {model.config.vocab_size:,}",
        )


def passkey_retrieval(
    model: GPT,
    tokenizer: Tokenizer,
    text: TokenDataset,
    *,
    distances: Sequence[int] | None = None,
    keys: int = PASSKEYS,
    seed: int = 0,
    segment_size: int = SEGMENT_SIZE,
    dtype: torch.dtype | None = None,
) -> list[PasskeyPoint]:
    """Accuracy and loss of a key of five digits, by its distance from the question.

    A small model may never predict a whole key, and still give the stated key a lower loss than another.

    Args:
        model: the model.
        tokenizer: the model's tokenizer.
        text: held-out documents to take the other text from.
        distances: numbers of tokens between key and question. Some document must be long enough for each. None: those
            of DISTANCES that documents are long enough for.
        keys: number of keys for each distance, each in its own text.
        seed: seed of the keys.
        segment_size, dtype: as in `score_answers`.

    Raises:
        ValueError: no document is long enough, or the tokenizer is not the model's.
    """
    check_at_least("keys", keys, 1)
    distances = choose_distances(distances, text)
    check_has_ids(model, tokenizer)
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
        loss, accuracy = _score(model, rows, answers, segment_size, dtype)
        # The same texts, scored with the key of another text.
        control, _ = (
            _score(model, rows, np.roll(answers, 1, axis=0), segment_size, dtype) if keys > 1 else (float("nan"), 0)
        )
        found.append(PasskeyPoint(distance, accuracy, loss, control, keys))
    return found


def _keys_of_one_length(tokenizer: Tokenizer, count: int, choose: np.random.Generator) -> list[str]:
    """Distinct numbers of five digits that have equally many tokens, so that all texts have one length."""
    by_size: dict[tuple[int, int], list[str]] = {}
    for number in choose.permutation(np.arange(10_000, 100_000)).tolist():
        key = str(number)
        size = len(tokenizer.encode(f" {key}")), len(tokenizer.encode(STATEMENT.format(key=key)))
        alike = by_size.setdefault(size, [])
        alike.append(key)
        if len(alike) == count:
            return alike
    raise ArgumentError("keys", f"must be at most {max(map(len, by_size.values()))} with this tokenizer, got {count}")


def _texts_around(text: TokenDataset, length: int, count: int) -> list[NDArray[np.int64]]:
    """`count` sequences of `length` tokens, one from each document in order, beginnings first."""
    long_enough = np.flatnonzero(np.asarray(text.lengths) > length)
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
    model: GPT, rows: list[NDArray[np.int64]], answers: NDArray[np.int64], segment_size: int, dtype: torch.dtype | None
) -> tuple[float, float]:
    """Mean loss of whole answers, and the share of correct ones."""
    tokens = torch.from_numpy(np.stack([np.concatenate(pair) for pair in zip(rows, answers, strict=True)]).astype(int))
    places = torch.arange(tokens.shape[1] - answers.shape[1], tokens.shape[1])
    losses, right = score_answers(model, tokens, places, segment_size=segment_size, dtype=dtype)
    return losses.double().sum(1).mean().item(), right.all(1).double().mean().item()


@torch.no_grad()
def score_answers(
    model: GPT, tokens: Tensor, places: Tensor, *, segment_size: int = SEGMENT_SIZE, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Losses of some tokens, each given all tokens before it. Logits are computed for these tokens only.

    Args:
        model: the model.
        tokens: (b, t) integers, on any device.
        places: positions of the tokens to score, (n,), ascending and at least 1; the same in every sequence.
        segment_size: tokens read at a time.
        dtype: dtype of autocast; None: no autocast.

    Returns:
        losses in nats, (b, n) float32, and whether the model predicted the token (argmax), (b, n) bool; on the CPU.
    """
    check_at_least("segment_size", segment_size, 1)
    if not len(places) or int(places.min()) < 1 or int(places.max()) >= tokens.shape[1]:
        raise ArgumentError(
            "places", f"must be one or more positions between 1 and {tokens.shape[1] - 1}, got {places}"
        )
    was_training = model.training
    model.eval()
    try:
        batches = tokens.split(max(1, BATCH_TOKENS // tokens.shape[1]))
        losses, right = zip(
            *(_score_batch(model, batch, places, segment_size, dtype) for batch in batches), strict=True
        )
    finally:
        model.train(was_training)
    return torch.cat(losses), torch.cat(right)


def _score_batch(
    model: GPT, tokens: Tensor, places: Tensor, segment_size: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    device = model.embedding.weight.device
    losses, right = [], []
    for now, features in features_by_segment(model, tokens[:, :-1].to(device), segment_size, dtype):
        # A token is predicted from the features of the one before it.
        here = places[(places - 1 >= now.start) & (places - 1 < now.stop)]
        if not len(here):
            continue
        targets = tokens[:, here].to(device)
        chosen = features[:, (here - 1 - now.start).to(device)].float()
        logits = linear(chosen, model.output_weight.float())
        losses.append(cross_entropy(logits.mT, targets, reduction="none").cpu())
        right.append((logits.argmax(-1) == targets).cpu())
    return torch.cat(losses, dim=1), torch.cat(right, dim=1)
