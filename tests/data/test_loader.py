"""The loader: content and order of batches, several processes, and resuming."""

import json
import re
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sympow.data import Loader
from sympow.data.loader import prefetch
from sympow.data.row_order import full_rows, joined_rows

LENGTHS = [100, 64, 130, 33, 17, 256, 90, 71, 64, 200]
BLOCKS = [0, 3, 4, 8, 10]


def take(loader, count):
    iterator = iter(loader)
    batches = list(islice(iterator, count))
    iterator.close()
    return batches


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a.inputs, b.inputs)
        and torch.equal(a.targets, b.targets)
        and torch.equal(a.document_ids, b.document_ids)
        for a, b in zip(first, second, strict=True)
    )


def slices(batch):
    """(document, start, inputs, targets) of every slice of a batch."""
    offsets = batch.slice_offsets.tolist()
    inputs, targets = batch.inputs.flatten(), batch.targets.flatten()
    for n, (document, start) in enumerate(zip(batch.document_ids, batch.document_starts, strict=True)):
        now = slice(offsets[n], offsets[n + 1])
        yield document.item(), start.item(), inputs[now].numpy(), targets[now].numpy()


@pytest.mark.parametrize("short", ["drop", "join", "pack"])
def test_every_piece_is_what_its_label_says(memory, short):
    dataset = memory(LENGTHS, BLOCKS)
    for batch in Loader(dataset, 32, 3, short=short, epochs=2):
        for document, start, inputs, targets in slices(batch):
            tokens = dataset.documents[document]
            assert np.array_equal(targets, tokens[start : start + len(targets)])
            before = tokens[start - 1] if start else dataset.boundary
            assert np.array_equal(inputs, [before, *targets[:-1]])


def test_cut_rows_are_of_one_document_each(memory):
    loader = Loader(memory(LENGTHS, BLOCKS), 32, 4, short="drop", epochs=1)
    for batch in loader:
        assert batch.inputs.shape == batch.targets.shape == (4, 32)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64
        assert batch.cu_seqlens is None
        assert len(batch.document_ids) == 4
        assert (batch.targets.diff(dim=1) == 1).all()


@pytest.mark.parametrize("short", ["drop", "join", "pack"])
def test_no_token_comes_twice_in_an_epoch_and_the_summary_counts_the_others(memory, short):
    loader = Loader(memory(LENGTHS, BLOCKS), 32, 3, short=short, epochs=1)
    targets = torch.cat([batch.targets.flatten() for batch in loader])
    summary = loader.summary
    assert len(targets.unique()) == len(targets) == summary.tokens_in_batches
    assert summary.tokens == sum(LENGTHS)
    assert summary.tokens == (
        summary.tokens_in_batches
        + summary.tokens_in_rows_left_over
        + summary.tokens_in_documents_dropped
        + summary.tokens_in_tails_dropped
        + summary.tokens_too_few_for_a_row
    )
    if short == "drop":
        assert (summary.documents_dropped, summary.tokens_in_documents_dropped) == (1, 17)
        assert summary.tokens_in_tails_dropped == sum(length % 32 for length in LENGTHS if length >= 32)
    else:
        assert summary.documents_dropped == summary.tokens_in_tails_dropped == 0
        assert summary.tokens_too_few_for_a_row < 32 * (len(BLOCKS) - 1)


def test_packed_batches_have_boundaries(memory):
    loader = Loader(memory(LENGTHS, BLOCKS), 32, 4, short="pack", epochs=1)
    sizes = []
    for batch in loader:
        assert batch.inputs.shape == batch.targets.shape == (1, 4 * 32)
        assert batch.cu_seqlens.dtype == torch.int32
        assert batch.cu_seqlens[0] == 0
        assert batch.cu_seqlens[-1] == 4 * 32
        assert len(batch.cu_seqlens) == len(batch.document_ids) + 1
        # Rows begin with a slice, so that no slice is longer than the context.
        assert set(range(0, 129, 32)) <= set(batch.cu_seqlens.tolist())
        sizes += batch.cu_seqlens.diff().tolist()
    assert max(sizes) == 32
    assert min(sizes) < 32


def test_joined_rows_hold_short_documents_without_boundaries(memory):
    loader = Loader(memory([10] * 20), 32, 2, short="join", epochs=1)
    (*batches,) = loader
    assert len(batches) == 200 // 32 // 2
    assert all(batch.cu_seqlens is None and batch.inputs.shape == (2, 32) for batch in batches)
    assert all(len(batch.document_ids) > 6 for batch in batches)


def test_a_document_shorter_than_the_context_is_refused_unless_said_otherwise(memory):
    with pytest.raises(ValueError, match=r"2 of 10 documents are shorter than context=64: first 3\.txt with 33 tokens"):
        Loader(memory(LENGTHS, BLOCKS), 64, 2)


def test_a_document_of_exactly_the_context_is_a_row(memory):
    batch = next(iter(Loader(memory([32]), 32, 1)))
    assert batch.targets.tolist() == [list(range(32))]


def test_too_little_data_for_a_batch_is_refused(memory):
    with pytest.raises(ValueError, match=r"memory gives 3 rows of context=32, fewer than batch_size=4"):
        Loader(memory([100]), 32, 4)


def test_a_token_beyond_the_vocabulary_names_file_and_place(memory_of):
    document = np.zeros(96)
    document[70] = 300
    dataset = memory_of([np.zeros(64), document])
    with pytest.raises(ValueError, match=r"1\.txt: token 70 of document 1 is 300, beyond the vocabulary of 257"):
        list(Loader(dataset, 32, 1, epochs=1))
    # An invalid token is also found as the input before a row's first target.
    document[70], document[63] = 0, 300
    with pytest.raises(ValueError, match=r"1\.txt: token 63 of document 1 is 300"):
        list(Loader(memory_of([np.zeros(64), document]), 32, 1, epochs=1, seed=1))
    dataset = memory_of([np.zeros(64), np.zeros(96)])
    dataset.documents[1] = np.where(np.arange(96) == 63, -1, 0)
    with pytest.raises(ValueError, match=r"1\.txt: token 63 of document 1 is -1, below 0"):
        list(Loader(dataset, 32, 1, epochs=1, seed=1))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lengths", [64], "ArgumentTypeError: lengths of the dataset must be a NumPy array of integers, got list"),
        ("blocks", np.array([0.0, 1]), "ArgumentTypeError: blocks of the dataset must be .* got an array of float64"),
        ("boundary", None, "ArgumentTypeError: boundary of the dataset must be an int, got NoneType"),
        ("boundary", 257, "ArgumentError: boundary of the dataset must be .* below its vocab_size, 257; got 257"),
        ("documents", [np.ones(64)], "TypeError: 0.txt: read.0, 0, 32. .* must return integers, got float64"),
        ("documents", [np.ones(20, int)], "UserError: 0.txt: .* must return 32 tokens, got an array of shape .20,."),
    ],
)
def test_a_dataset_with_wrong_members_is_refused(memory_of, name, value, message):
    dataset = memory_of([np.zeros(64)])
    setattr(dataset, name, value)
    with pytest.raises((TypeError, ValueError)) as error:
        next(iter(Loader(dataset, 32, 1, shuffle=False)))
    assert re.match(message, f"{error.type.__name__}: {error.value}")


def test_the_order_follows_the_seed_and_changes_every_epoch(memory):
    def order(seed, **options):
        loader = Loader(memory(LENGTHS, BLOCKS), 16, 1, short="drop", seed=seed, epochs=2, **options)
        rows = [batch.targets[0, 0].item() for batch in loader]
        return rows[: len(rows) // 2], rows[len(rows) // 2 :]

    first, second = order(0)
    assert order(0) == (first, second)
    assert order(1)[0] != first != second
    assert sorted(first) == sorted(second) == sorted(order(1)[0])
    assert order(0, shuffle=False) == (sorted(first), sorted(first))


def test_the_order_does_not_change_with_versions(memory):
    """A resumed run relies on the order that it began with."""
    loader = Loader(memory([64] * 8), 64, 1, epochs=1, seed=5)
    assert [batch.document_ids.item() for batch in loader] == [3, 7, 4, 2, 1, 0, 6, 5]


def test_blocks_are_mixed_a_few_at_a_time(memory):
    blocks = list(range(0, 41, 4))
    loader = Loader(memory([16] * 40, blocks), 16, 1, epochs=1, group_tokens=2 * 4 * 16)
    documents = [batch.document_ids.item() for batch in loader]
    assert sorted(documents) == list(range(40))
    for first in range(0, 40, 8):
        group = documents[first : first + 8]
        assert len({document // 4 for document in group}) == 2
        assert [document // 4 for document in group] != sorted(document // 4 for document in group)


@pytest.mark.parametrize("short", ["drop", "join", "pack"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_any_number_of_processes_sees_the_same_batches(memory, short, world_size):
    whole = list(Loader(memory(LENGTHS, BLOCKS), 16, 6, short=short, epochs=2))
    shares = [
        list(Loader(memory(LENGTHS, BLOCKS), 16, 6, short=short, epochs=2, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    for n, batch in enumerate(whole):
        dim = 1 if short == "pack" else 0
        assert torch.equal(torch.cat([share[n].inputs for share in shares], dim), batch.inputs)
        assert torch.equal(torch.cat([share[n].targets for share in shares], dim), batch.targets)
        assert torch.equal(torch.cat([share[n].document_ids for share in shares]), batch.document_ids)
        assert all(share[n].rows == 6 // world_size for share in shares)


@pytest.mark.parametrize("short", ["drop", "pack"])
@pytest.mark.parametrize("depth", [0, 4])
def test_a_loader_resumes_at_the_exact_batch(memory, short, depth):
    def loader(**options):
        return Loader(memory(LENGTHS, BLOCKS), 16, 4, short=short, seed=3, prefetch=depth, **options)

    per_epoch = loader().batches_per_epoch
    expected = take(loader(), 2 * per_epoch + 3)
    for taken in (0, 1, per_epoch - 1, per_epoch, per_epoch + 2):
        first = loader()
        assert same(take(first, taken), expected[:taken])
        state = json.loads(json.dumps(first.state_dict()))
        resumed = loader()
        resumed.load_state_dict(state)
        assert same(take(resumed, len(expected) - taken), expected[taken:])


def test_a_position_from_two_processes_continues_on_three(memory):
    expected = take(Loader(memory(LENGTHS, BLOCKS), 16, 6, short="drop"), 5)
    two = Loader(memory(LENGTHS, BLOCKS), 16, 6, short="drop", rank=1, world_size=2)
    take(two, 3)
    shares = []
    for rank in range(3):
        three = Loader(memory(LENGTHS, BLOCKS), 16, 6, short="drop", rank=rank, world_size=3)
        three.load_state_dict(two.state_dict())
        shares.append(take(three, 2))
    for n in range(2):
        assert torch.equal(torch.cat([share[n].inputs for share in shares]), expected[3 + n].inputs)


def test_iterating_again_goes_on_and_the_end_stays_the_end(memory):
    loader = Loader(memory(LENGTHS, BLOCKS), 16, 4, short="drop", epochs=1)
    first = take(loader, 3)
    rest = list(loader)
    assert same([*first, *rest], list(Loader(memory(LENGTHS, BLOCKS), 16, 4, short="drop", epochs=1)))
    assert list(loader) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed was 1, here it is 0"),
        ({"context": 8}, "context was 8, here it is 16"),
        ({"batch_size": 2}, "batch_size was 2, here it is 4"),
        ({"short": "join"}, "short was 'join', here it is 'drop'"),
        ({"fingerprint": "x"}, "the data have changed .* the fingerprint of memory was 'x', and is now 'memory'"),
        ({"batch": 10_000}, "batch must be below"),
        ({"epoch": -1}, "epoch must be at least 0"),
    ],
)
def test_a_position_in_another_order_is_refused(memory, change, message):
    loader = Loader(memory(LENGTHS, BLOCKS), 16, 4, short="drop")
    with pytest.raises(ValueError, match=message):
        loader.load_state_dict({**loader.state_dict(), **change})


@pytest.mark.parametrize("short", ["drop", "pack"])
@pytest.mark.parametrize("rows", [1, 2, 4, 6, 10])
def test_a_batch_splits_into_smaller_ones(memory, short, rows):
    batch = next(iter(Loader(memory(LENGTHS, BLOCKS), 16, 6, short=short)))
    parts = batch.split(rows)
    assert [part.rows for part in parts] == [min(rows, 6 - first) for first in range(0, 6, rows)]
    assert torch.equal(torch.cat([part.targets.flatten() for part in parts]), batch.targets.flatten())
    assert [found[:2] for part in parts for found in slices(part)] == [found[:2] for found in slices(batch)]
    for part in parts:
        assert (part.cu_seqlens is None) == (short == "drop")
        for (_, _, _, targets), (_, _, _, expected) in zip(slices(part), slices(part.split(rows)[0]), strict=True):
            assert np.array_equal(targets, expected)
    with pytest.raises(ValueError, match="rows must be at least 1, got 0"):
        batch.split(0)


def test_a_batch_moves_to_a_device(memory):
    batch = next(iter(Loader(memory(LENGTHS, BLOCKS), 16, 6, short="pack"))).to("meta")
    assert batch.inputs.device.type == batch.targets.device.type == batch.cu_seqlens.device.type == "meta"
    assert batch.document_ids.device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"context": 0}, ValueError, "context must be at least 1, got 0"),
        ({"context": 8.0}, TypeError, "context must be an int, got float"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": 3, "world_size": 2}, ValueError, "batch_size must be a multiple of world_size=2, got 3"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size=2, got 2"),
        ({"short": "pad"}, ValueError, "short must be one of 'refuse', 'drop', 'join', 'pack'; got 'pad'"),
        ({"seed": -1}, ValueError, "seed must be at least 0"),
        ({"epochs": 0}, ValueError, "epochs must be at least 1"),
    ],
)
def test_mistakes_are_named(memory, options, error, message):
    with pytest.raises(error, match=message):
        Loader(memory(LENGTHS, BLOCKS), **{"context": 16, "batch_size": 4, **options})


def test_batches_are_made_ahead_in_order_and_errors_come_in_their_place():
    made = []

    def numbers():
        for n in range(6):
            made.append(n)
            yield n
        raise OSError("the disk is gone")

    taken = prefetch(numbers(), 2)
    assert next(taken) == 0
    deadline = time.monotonic() + 5
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    assert made == [0, 1, 2]
    assert list(islice(taken, 5)) == [1, 2, 3, 4, 5]
    with pytest.raises(OSError, match="the disk is gone"):
        next(taken)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
@pytest.mark.parametrize("blocks", [[0, 2, 2, 4], [0, 3, 1, 4], [1, 4], [0, 3], [0, 5], [4], [], [[0, 4]]])
def test_blocks_that_miscount_documents_are_refused(memory, blocks, dtype):
    dataset = memory([12] * 4)
    dataset.blocks = np.array(blocks, dtype)
    with pytest.raises(
        ValueError, match=r"blocks must strictly increase from 0 to the number of documents, which is 4; got \["
    ):
        Loader(dataset, 8, 1, short="join")


def test_leaving_an_iteration_ends_its_thread(memory):
    def threads():
        return sum(thread.name.startswith("sympow-prefetch") for thread in threading.enumerate())

    iterator = iter(Loader(memory(LENGTHS, BLOCKS), 16, 4, short="drop"))
    next(iterator)
    assert threads() == 1
    iterator.close()
    assert threads() == 0


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    context=st.integers(1, 20),
    seed=st.integers(0, 10),
)
def test_rows_cover_documents_without_overlap(lengths, context, seed):
    lengths = np.array(lengths)
    order = np.random.default_rng(seed).permutation(len(lengths))
    seen = set()
    for rows in (full_rows(lengths, 7, context), joined_rows(lengths, 7, context, order)):
        sizes = rows.stops - rows.starts
        assert (sizes > 0).all()
        assert (np.add.reduceat(sizes, rows.offsets[:-1]) == context).all() if len(rows) else not len(sizes)
        for document, start, stop in zip(rows.documents, rows.starts, rows.stops, strict=True):
            assert stop <= lengths[document - 7]
            tokens = {(document, token) for token in range(start, stop)}
            assert not tokens & seen
            seen |= tokens
    assert lengths.sum() - len(seen) < context
