"""Sequences of held-out documents: the beginning of every document comes before later sequences of any."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from benchmarks.peak_memory import PeakMemory

from sympow import GPT, GPTConfig
from sympow.evaluate import document_sequences, loss_by_position
from sympow.evaluate.held_out_loss import count_sequences


@dataclass
class Documents:
    lengths: np.ndarray
    name: str = "some documents"
    boundary: int = 99
    content: list = field(init=False)

    def __post_init__(self):
        self.content = [100 * (n + 1) + np.arange(length) for n, length in enumerate(self.lengths)]

    def read(self, document, start, stop):
        return self.content[document][start:stop]


DATASET = Documents(np.array([7, 3, 4]))


def test_every_document_comes_before_any_comes_twice():
    found = [targets[0, 0].item() for _, targets in document_sequences(DATASET, 3, 10)]
    assert found == [100, 200, 300, 103]


def test_inputs_are_the_tokens_before():
    (first, *_, last) = document_sequences(DATASET, 3, 10)
    assert (first[0].tolist(), first[1].tolist()) == ([[99, 100, 101]], [[100, 101, 102]])
    assert (last[0].tolist(), last[1].tolist()) == ([[102, 103, 104]], [[103, 104, 105]])


def test_batches_hold_several_and_the_last_what_is_left():
    shapes = [tuple(inputs.shape) for inputs, _ in document_sequences(DATASET, 2, 5, batch=3)]
    assert shapes == [(3, 2), (2, 2)]


@pytest.mark.parametrize(
    ("length", "count", "expected"), [(3, 10, (4, 3)), (3, 2, (2, 2)), (4, 10, (2, 2)), (5, 9, (1, 1))]
)
def test_sequences_and_their_documents_are_counted(length, count, expected):
    assert count_sequences(DATASET, length, count) == expected
    assert len(list(document_sequences(DATASET, length, count))) == expected[0]


def test_too_long_a_stretch_is_refused():
    with pytest.raises(ValueError, match=r"length must be at most 7, the longest document of some documents; got 8"):
        document_sequences(DATASET, 8, 1)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        document_sequences(DATASET, 3, 0)


@pytest.mark.slow
def test_memory_does_not_depend_on_how_much_is_read():
    """With four times the tokens, up to 65,536, only the stored losses grow: no features are kept per token."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=17, layers=1, width=32, heads=2, rotary="scale"))
    peaks = {}
    for length in (16_384, 65_536):
        document = tuple(torch.randint(17, (2, 1, length)))
        with PeakMemory() as memory:
            loss_by_position(model, [document], segment_size=2_048)
        peaks[length] = memory.peak
    per_token = (peaks[65_536] - peaks[16_384]) / (65_536 - 16_384)
    # float32 and float64 losses, their sums and squares; features alone would be 128 numbers per token.
    assert per_token < 64


@pytest.mark.gpu
def test_a_long_document_on_a_gpu_in_pieces_is_that_in_one_pass_in_memory_that_does_not_grow():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=17, layers=2, width=64, heads=2, rotary="scale")).double().cuda()
    document = torch.randint(17, (2, 1, 65_536))

    def read(length, segment_size):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        losses = loss_by_position(model, [tuple(document[..., :length])], segment_size=segment_size).mean
        return losses, torch.cuda.max_memory_allocated() - before

    whole, whole_peak = read(65_536, 65_536)
    # Long enough for segments that start from a state and end in one.
    _, short_peak = read(32_768, 8_192)
    in_pieces, peak = read(65_536, 8_192)
    torch.testing.assert_close(in_pieces, whole, rtol=1e-8, atol=1e-8)
    # Token, target and losses: 24 bytes per token; features alone would take 512.
    assert (peak - short_peak) / (65_536 - 32_768) < 64
    assert peak < whole_peak
