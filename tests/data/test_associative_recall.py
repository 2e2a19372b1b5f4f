"""The MQAR dataset: every answer follows from a pair, and it trains like any other dataset."""

import numpy as np
import pytest

from sympow.data import Loader, open_dataset


def test_every_query_has_the_value_of_its_pair():
    dataset = open_dataset("mqar:pairs=5,length=32")
    for document in range(20):
        tokens = dataset.read(document, 0, 32).reshape(-1, 2)
        pairs = dict(tokens[:5].tolist())
        assert len(pairs) == 5
        assert max(pairs) < 128 <= min(pairs.values())
        assert all(pairs[key] == value for key, value in tokens[5:].tolist())
        # Every round queries every pair once.
        assert set(tokens[5:10, 0].tolist()) == set(tokens[10:15, 0].tolist()) == set(pairs)


def test_documents_are_the_same_every_time_and_differ_from_each_other():
    one, other = (open_dataset("mqar:pairs=8") for _ in range(2))
    assert one.lengths.tolist() == [32] * 65_536
    assert one.fingerprint == other.fingerprint
    assert (
        open_dataset("mqar").fingerprint == open_dataset("mqar:pairs=16,length=64,documents=65536,seed=0").fingerprint
    )
    np.testing.assert_array_equal(one.read(3, 0, 32), other.read(3, 0, 32))
    np.testing.assert_array_equal(one.read(3, 5, 9), one.read(3, 0, 32)[5:9])
    texts = {one.read(n, 0, 32).tobytes() for n in range(50)}
    texts |= {open_dataset("mqar:pairs=8", "heldout").read(n, 0, 32).tobytes() for n in range(50)}
    texts |= {open_dataset("mqar:pairs=8,seed=1").read(n, 0, 32).tobytes() for n in range(50)}
    assert len(texts) == 150
    names = ("mqar:pairs=8", "mqar:pairs=8,seed=1", "mqar:pairs=9,length=32", "mqar:pairs=8,documents=7")
    assert len({open_dataset(name).fingerprint for name in names}) == 4


def test_a_row_is_a_document():
    dataset = open_dataset("mqar:pairs=4,documents=10")
    batches = list(Loader(dataset, 16, 5, shuffle=False, epochs=1))
    assert [batch.inputs.shape for batch in batches] == [(5, 16), (5, 16)]
    np.testing.assert_array_equal(batches[1].targets[2].numpy(), dataset.read(7, 0, 16))
    assert (batches[0].inputs[:, 0] == dataset.boundary).all()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mqar:pairs=129", "pairs must be at most 128, the number of keys; got 129"),
        ("mqar:pairs=4,length=8", r"length must be even and above 2 · pairs = 8, got 8"),
        ("mqar:pairs=4,length=11", "length must be even"),
        ("mqar:size=4", "mqar takes the options pairs=NUMBER, length=NUMBER.*; got 'size=4'"),
        ("mqar:pairs=many", "got 'pairs=many'"),
        ("mqar:pairs=0", "pairs must be at least 1, got 0"),
    ],
)
def test_mistakes_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        open_dataset(name)
