"""Held-out losses against the formula over whole sequences, in float64."""

import math

import pytest
import torch
from convert.tiny import make_llama

from sympow.convert.config import TextConfig
from sympow.convert.evaluation import LossAtContext, ModelLosses, difference, held_out_sequences, measure_losses
from sympow.data import open_dataset


def test_losses_are_those_of_the_models_own_logits(texts):
    model = make_llama().double()
    sequences, notes = held_out_sequences(
        open_dataset(texts, "heldout"), TextConfig(context=16, evaluate_tokens=256), 64
    )
    assert {length: sum(len(inputs) for inputs, _ in batches) for length, batches in sequences.items()} == {
        16: 16,
        64: 4,
        256: 1,
    }
    assert notes == []
    results = measure_losses(model, sequences, None)
    for length, batches in sequences.items():
        with torch.no_grad():
            losses = torch.cat(
                [torch.nn.functional.cross_entropy(model(x).logits.mT, y, reduction="none") for x, y in batches]
            )
        assert losses.shape[1] == length
        found = results[length]
        assert math.isclose(found.loss, losses.mean(), abs_tol=1e-12)
        assert math.isclose(found.late, losses[:, -length // 4 :].mean(), abs_tol=1e-12)
        assert torch.allclose(losses.new_tensor(found.of_each), losses.mean(1), rtol=0, atol=1e-12)
        first = losses[:, 8:10].mean()
        assert math.isclose(next(iter(found.by_position.values())), first, abs_tol=1e-12)


def test_contexts_that_no_document_has_are_left_out_and_said(texts):
    heldout = open_dataset(texts, "heldout")
    longest = int(heldout.lengths.max())
    sequences, notes = held_out_sequences(heldout, TextConfig(context=longest // 3, evaluate_tokens=256), 64)
    assert list(sequences) == [longest // 3]
    assert [note.partition(":")[0] for note in notes] == [
        f"not evaluated at {4 * (longest // 3):,} tokens",
        f"not evaluated at {16 * (longest // 3):,} tokens",
    ]
    # Documents shorter than the training context are joined, as in training.
    sequences, notes = held_out_sequences(heldout, TextConfig(context=longest + 1, evaluate_tokens=256), 64)
    assert list(sequences) == [longest + 1]
    assert sequences[longest + 1][0][0].shape == (1, longest + 1)


def test_contexts_are_those_asked_for_that_the_model_can_take(texts):
    heldout = open_dataset(texts, "heldout")
    text = TextConfig(context=16, evaluate_tokens=256, evaluate_factors="4, 1,2,16")
    assert list(held_out_sequences(heldout, text, 64)[0]) == [16, 32, 64, 256]
    sequences, notes = held_out_sequences(heldout, text, 64, positions=64)
    assert list(sequences) == [16, 32, 64]
    assert notes == ["not evaluated at 256 tokens: the teacher has embeddings of 64 positions"]


def test_a_difference_has_the_error_over_sequences():
    one, other = (LossAtContext(sum(losses) / 2, losses, 0.0, {}) for losses in ([3.0, 5.0], [2.0, 3.0]))
    assert difference(one, other) == (1.5, 0.5)
    single = LossAtContext(3.0, [3.0], 0.0, {})
    mean, error = difference(single, single)
    assert mean == 0
    assert math.isnan(error)


def test_an_evaluation_is_read_back(tmp_path):
    written = ModelLosses("match", 7, {16: LossAtContext(3.0, [2.5, 3.5], 2.75, {"9.5": 3.25})})
    written.save(tmp_path / "match.json")
    assert ModelLosses.read(tmp_path / "match.json") == written
    (tmp_path / "other.json").write_text('{"name": "match"}')
    with pytest.raises(ValueError, match=r"other.json is not an evaluation of a conversion"):
        ModelLosses.read(tmp_path / "other.json")
