"""Loss by position: the same for every segment size, and equal to what one forward pass gives."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from sympow import GPT, GPTConfig
from sympow.evaluate import loss_by_position

LENGTH = 40


@pytest.fixture(scope="module", params=["sympow", "softmax"])
def model(request):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=17, layers=2, width=16, heads=2, mixer=request.param, rotary="scale")).double()


def documents(count, length=LENGTH):
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(17, (2, 1, length), generator=generator)) for _ in range(count)]


@pytest.mark.parametrize("segment_size", [1, 7, LENGTH, 100])
def test_pieces_do_not_matter(model, segment_size):
    docs = documents(3)
    expected = torch.stack([cross_entropy(model(x)[0][0], y[0], reduction="none") for x, y in docs]).detach()
    found = loss_by_position(model, docs, segment_size=segment_size)
    assert found.documents == 3
    torch.testing.assert_close(found.mean, expected.mean(0), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.error, expected.std(0) / 3**0.5, rtol=1e-6, atol=1e-9)
    assert found.average(5, 9) == pytest.approx(expected.mean(0)[5:9].mean().item(), rel=1e-9)
    assert found.by_context([1, 8])[8] == pytest.approx(expected.mean(0)[:8].mean().item(), rel=1e-9)


def test_a_batch_counts_as_its_documents(model):
    docs = documents(4)
    together = [(torch.cat([x for x, _ in docs]), torch.cat([y for _, y in docs]))]
    torch.testing.assert_close(loss_by_position(model, together).mean, loss_by_position(model, docs).mean)


def test_one_document_has_no_error_to_give(model):
    assert loss_by_position(model, documents(1)).error.isnan().all()


def test_progress_is_reported_and_the_mode_restored(model):
    model.train()
    seen = []
    loss_by_position(model, documents(3), report=seen.append)
    assert seen == [1, 2, 3]
    assert model.training


@pytest.mark.parametrize(
    ("docs", "message"),
    [
        ([], "documents must not be empty"),
        (documents(1) + documents(1, 12), "one length, 40; got 12"),
        ([(torch.zeros(1, 3).long(), torch.zeros(1, 4).long())], r"\(1, 3\) and \(1, 4\)"),
    ],
)
def test_mistakes_are_named(model, docs, message):
    with pytest.raises(ValueError, match=message):
        loss_by_position(model, docs)
    with pytest.raises(ValueError, match="segment_size must be at least 1, got 0"):
        loss_by_position(model, documents(1), segment_size=0)
