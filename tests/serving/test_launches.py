"""The host runs ahead of the device by one round of segments, and says of nothing that it is done before it is.

On a CPU a launch is its computation, so marks that pass only when the host waits for them stand in for a GPU's.
"""

import threading

import pytest
from serving.small_model import small_model

from sympow.data.tokenizer import ByteTokenizer
from sympow.generation.text import TextModel
from sympow.serving import Engine, RequestError


class SlowDevice:
    """Makes marks that pass in order, when the host waits for one or `run` is called.

    Attributes:
        made, passed: how many marks there are, and how many have passed.
        furthest: the most that had not passed when one was made, itself included.
    """

    def __init__(self):
        self.made = self.passed = self.furthest = 0

    def mark(self, *_):
        self.made += 1
        self.furthest = max(self.furthest, self.made - self.passed)
        return SlowMark(self, self.made)

    def run(self, marks):
        self.passed = max(self.passed, marks)


class SlowMark:
    def __init__(self, device, number):
        self.device, self.number = device, number

    def query(self):
        return self.device.passed >= self.number

    def synchronize(self):
        self.device.run(self.number)


@pytest.fixture
def device(monkeypatch):
    made = SlowDevice()
    monkeypatch.setattr("sympow.serving.engine.scheduler.mark_now", made.mark)
    return made


def an_engine(slots: int = 2) -> Engine:
    return Engine(TextModel(small_model(layers=1), ByteTokenizer()), slots, segment_size=8, prefix_cache_bytes=0)


def test_contexts_are_launched_no_further_than_a_round_ahead(device):
    """Without anybody who decodes, for whose tokens the host would wait."""
    reported = []
    with an_engine() as engine:
        prefix = engine.prefill([1] * 80, progress=lambda done, _: reported.append((done, device.passed)))
        assert device.made == device.passed == 10
        assert prefix.tokens == 80
    assert device.furthest == 2
    # Each report is of what the device has computed, and none is left out.
    assert reported == [(8 * segment, segment) for segment in range(1, 11)]


def test_a_round_of_several_segments_waits_for_all_rounds_but_the_last(device):
    gate = threading.Event()
    with an_engine(slots=8) as engine:
        # The worker waits here until all others are submitted.
        first = engine.submit_prefill([0], progress=lambda *_: gate.wait(60))
        short = [engine.submit([1] * 4, max_tokens=10) for _ in range(8)]
        gate.set()
        for awaited in (first, *short):
            awaited.result(60)
    assert device.made == 9
    assert device.furthest == 4


def test_a_request_without_tokens_ends_when_its_prompt_is_computed(device):
    with an_engine() as engine:
        assert engine.submit([1] * 20, max_tokens=0).result(60).finish_reason == "length"
        assert device.made == device.passed == 3


def test_a_cancelled_context_leaves_no_more_than_two_rounds_to_the_device(device):
    gate, reported = threading.Event(), []

    def progress(done, _):
        reported.append(done)
        if done == 16:
            gate.wait(60)

    with an_engine() as engine:
        prefilling = engine.submit_prefill([1] * 8_000, progress=progress)
        while not reported[1:]:
            gate.wait(0.001)
        prefilling.cancel()
        gate.set()
        with pytest.raises(RequestError, match="cancelled"):
            prefilling.result(60)
        # At most what was launched before the worker saw it, none of which is reported as progress later.
        assert device.made <= 4
        seen = len(reported)
        engine.prefill([2])
        assert len(reported) == seen


@pytest.mark.parametrize("last", [False, True], ids=["on the way", "at the end"])
def test_a_progress_that_fails_ends_its_own_context_alone(device, last):
    def refuse(done, total):
        if done == (total if last else 8):
            raise OverflowError("no more")

    gate = threading.Event()
    with an_engine() as engine:
        # The worker waits here until both others are submitted.
        first = engine.submit_prefill([3], progress=lambda *_: gate.wait(60))
        failing, other = engine.submit_prefill([1] * 24, progress=refuse), engine.submit_prefill([2] * 40)
        gate.set()
        with pytest.raises(RequestError, match="OverflowError: no more"):
            failing.result(60)
        assert other.result(60).tokens == 40
        assert first.result(60).tokens == 1
        assert engine.stats().prefilling == 0
        assert engine.submit("a", max_tokens=1, seed=1).result(60).finish_reason
