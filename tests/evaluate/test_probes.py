"""Probes of the state measure what a model remembers, and for how many tokens."""

import math

import numpy as np
import pytest
import torch
from evaluate_oracles import Oracle
from torch.nn.functional import cross_entropy

from support import assert_close
from sympow import GPT, GPTConfig
from sympow.data import load_tokenizer, open_dataset
from sympow.evaluate import Vocabulary, associative_recall, passkey_retrieval
from sympow.evaluate.probes import score_answers

VOCABULARY = Vocabulary(np.arange(0, 20), np.arange(20, 40), boundary=40)


@pytest.mark.parametrize("segment_size", [3, 100])
def test_answers_are_scored_as_a_forward_pass_scores_them(segment_size):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=17, layers=2, width=16, heads=2, rotary="scale"))
    tokens, places = torch.randint(17, (3, 12)), torch.tensor([1, 4, 11])
    losses, right = score_answers(model, tokens, places, segment_size=segment_size)
    logits = model(tokens)[0].detach()[:, places - 1]
    expected = cross_entropy(logits.flatten(0, 1), tokens[:, places].flatten(), reduction="none").view(3, 3)
    assert_close(losses, expected, 1e-5, "losses")
    assert right.tolist() == (logits.argmax(-1) == tokens[:, places]).tolist()
    assert model.training


def test_what_is_remembered_is_recalled():
    model = Oracle(41, order=1, memory=10**6)
    points = associative_recall(model, VOCABULARY, pairs=(2, 16), sequences=8, segment_size=7)
    assert {point.pairs for point in points} == {2, 16}
    assert sum(point.answers for point in points if point.pairs == 16) == 8 * 16
    for point in points:
        assert point.accuracy == 1
        assert point.loss == pytest.approx(0, abs=1e-6)
        assert point.guess == pytest.approx(math.log(20))


def test_what_is_forgotten_is_not_recalled():
    points = associative_recall(Oracle(41, order=1, memory=16), VOCABULARY, pairs=(16,), sequences=8)
    near = [point for point in points if point.farthest <= 16]
    far = [point for point in points if point.nearest > 16]
    assert near
    assert far
    assert all(point.accuracy == 1 for point in near)
    assert all(point.accuracy == 0 and point.loss > 10 for point in far)


def test_distances_are_those_to_the_pair():
    """A single pair is queried right after it is shown."""
    (point,) = associative_recall(Oracle(41, order=1, memory=2), VOCABULARY, pairs=(1,), sequences=4)
    assert (point.nearest, point.farthest, point.accuracy) == (2, 2, 1)


def test_a_vocabulary_of_text_has_its_commonest_tokens():
    heldout = open_dataset("stdlib", "heldout")
    found = Vocabulary.of_text(heldout, size=10)
    assert len(found.keys) == len(found.values) == 5
    assert set(map(chr, [*found.keys, *found.values])) >= set(" etr")
    assert heldout.boundary not in [*found.keys, *found.values]


def test_by_default_there_are_no_more_pairs_than_keys():
    """Text in bytes has fewer common tokens than the largest number of pairs needs."""
    points = associative_recall(Oracle(41, order=1, memory=10**6), VOCABULARY, sequences=2)
    assert {point.pairs for point in points} == {4, 16}


def test_more_pairs_than_keys_are_refused():
    with pytest.raises(ValueError, match="pairs must be at most 20, the number of keys; got 21"):
        associative_recall(Oracle(41, 1, 10), VOCABULARY, pairs=(21,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pairs": []}, "pairs must have at least one number, got none"),
        ({"pairs": [2, 0]}, r"pairs must be numbers of at least 1, got \(2, 0\)"),
        ({"sequences": 0}, "sequences must be at least 1, got 0"),
    ],
)
def test_mistakes_of_a_recall_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        associative_recall(Oracle(41, 1, 10), VOCABULARY, **arguments)


def test_a_vocabulary_without_values_is_refused():
    """Text of a single token has a key and no value."""
    with pytest.raises(ValueError, match="vocabulary must have at least one key and one value, got 1 and 0"):
        associative_recall(Oracle(41, 1, 10), Vocabulary(np.arange(1), np.arange(0), boundary=40))


@pytest.fixture(scope="module")
def text():
    return load_tokenizer("bytes"), open_dataset("stdlib", "heldout")


def test_a_passkey_is_found_as_far_back_as_the_memory_goes(text):
    model = Oracle(257, order=14, memory=200)
    near, far = passkey_retrieval(model, *text, distances=(50, 400), keys=4, segment_size=64)
    assert (near.distance, far.distance) == (50, 400)
    assert near.accuracy == 1
    assert near.loss == pytest.approx(0, abs=1e-4)
    # A key that the text does not contain has the same loss at every distance.
    assert near.control > 10
    assert far.accuracy == 0
    assert far.loss == pytest.approx(far.control)


def test_a_model_may_have_more_ids_than_its_tokenizer(text):
    """As converted models with padded embeddings have."""
    (found,) = passkey_retrieval(Oracle(320, order=14, memory=200), *text, distances=(50,), keys=2)
    assert found.accuracy == 1


def test_mistakes_of_a_passkey_are_named(text):
    tokenizer, documents = text
    with pytest.raises(ValueError, match="distances must fit into a document"):
        passkey_retrieval(Oracle(257, 8, 8), tokenizer, documents, distances=(10**9,))
    with pytest.raises(ValueError, match="tokenizer must be the model's: it has 257 ids, the model 41"):
        passkey_retrieval(Oracle(41, 8, 8), tokenizer, documents)
    with pytest.raises(ValueError, match="keys must be at least 1, got 0"):
        passkey_retrieval(Oracle(257, 8, 8), tokenizer, documents, keys=0)
    with pytest.raises(ValueError, match="distances must have at least one number, got none"):
        passkey_retrieval(Oracle(257, 8, 8), tokenizer, documents, distances=())
    with pytest.raises(ValueError, match=r"distances must be numbers of at least 1, got \(64, -1\)"):
        passkey_retrieval(Oracle(257, 8, 8), tokenizer, documents, distances=(64, -1))
