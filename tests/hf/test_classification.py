"""Sequence classification: classifiers and reward models."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import AutoModelForSequenceClassification

from support import assert_close, assert_same_model
from sympow.hf import SympowForSequenceClassification


@pytest.fixture
def classifier(make):
    """A classifier with the weights of a language model."""
    from copy import deepcopy

    language_model = make()
    config = deepcopy(language_model.config)
    config.num_labels, config.pad_token_id = 3, 49
    torch.manual_seed(1)
    model = SympowForSequenceClassification(config).double().eval()
    model.model = language_model.model
    return model


@torch.no_grad()
def test_a_text_is_scored_after_its_last_token(classifier, tokens):
    text, other = tokens(2, 8).clamp(max=48)
    alone = classifier(text[None]).logits
    features = classifier.model(text[None]).last_hidden_state
    assert_close(alone, classifier.score(features[:, -1]), 1e-12, "scores")
    pad = torch.full((4,), 49)
    for padded, mask in (
        (torch.cat([text, pad]), [1] * 8 + [0] * 4),
        (torch.cat([pad, text]), [0] * 4 + [1] * 8),
        (torch.cat([text, pad]), None),
    ):
        batch = torch.stack([padded, torch.cat([other, other[:4]])])
        full = None if mask is None else torch.tensor([mask, [1] * 12])
        assert_close(classifier(batch, attention_mask=full).logits[:1], alone, 1e-9, "padded")


def test_labels_give_a_loss_of_their_kind(classifier, tokens):
    ids = tokens(2, 8)
    logits = classifier(ids).logits
    classes = torch.tensor([2, 0])
    expected = torch.nn.functional.cross_entropy(logits, classes)
    assert_close(classifier(ids, labels=classes).loss, expected, 1e-9, "loss")
    classifier(ids, labels=classes).loss.backward()
    assert classifier.score.weight.grad.any()


@torch.no_grad()
def test_a_language_model_becomes_one_by_its_folder(make, tokens, tmp_path):
    language_model = make()
    language_model.save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1)
    assert type(model) is SympowForSequenceClassification
    assert model(tokens()).logits.shape == (2, 1)
    assert_same_model(model.model, language_model.model, tokens())
    model.save_pretrained(tmp_path / "reward")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert_same_model(again, model, tokens())


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("filled", [None, 0, 1], ids=["clamped", "zeros", "ones"])
@torch.no_grad()
def test_positions_of_padded_texts_change_nothing(classifier, make, tokens, side, filled):
    """With the positions that transformers makes of a mask: of padding they repeat, as those of packed documents do."""
    language_model, ids = make(), tokens(2, 9).clamp(max=48)
    lengths = torch.tensor([[4], [9]])
    mask = (torch.arange(9) >= 9 - lengths if side == "left" else torch.arange(9) < lengths).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    if filled is not None:
        positions = positions.masked_fill(mask == 0, filled)
    found = classifier(ids, attention_mask=mask, position_ids=positions).logits
    logits = language_model(ids, attention_mask=mask, position_ids=positions).logits
    for row in range(2):
        text = ids[row : row + 1, mask[row] == 1]
        assert_close(found[row : row + 1], classifier(text).logits, 1e-9, "scores")
        assert_close(logits[row : row + 1, mask[row] == 1], language_model(text).logits, 1e-9, "logits")


def test_inputs_that_are_missing_or_given_twice_are_refused(classifier, tokens):
    embedded = torch.zeros(2, 12, 16, dtype=torch.float64)
    for given in ({}, {"input_ids": tokens(), "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds must be given"):
            classifier(**given)
    with pytest.raises(TypeError, match="past_key_values must be a SympowCache, got tuple"):
        classifier(tokens(), position_ids=torch.arange(12)[None], past_key_values=())


@pytest.mark.parametrize("marks", [{"cu_seq_lens_q": [0, 5, 12]}, {"position_ids": [[*range(5), *range(7)]]}], ids=str)
def test_packed_documents_are_refused(classifier, tokens, marks):
    with pytest.raises(ValueError, match="scores of packed documents are not supported"):
        classifier(tokens(1), **{name: torch.tensor(value) for name, value in marks.items()})
