"""What is captured as a CUDA graph, where, and what happens if that fails, with a fake in the place of the device."""

import gc
import threading
import time
import warnings
import weakref
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from support import decode
from sympow import GPT, GPTConfig
from sympow.generation import decoder as decoder_module
from sympow.generation.decoder import CapturedCall, Decoder
from sympow.generation.prefix import Prefix


class FakeDevice:
    """In the place of `torch.cuda`: what is captured, on which stream, and what fails.

    Attributes:
        stream: the current one.
        captures: (device, pool) of each capture.
        fails: where a capture fails: None, "inside" or "at the end".
    """

    def __init__(self, monkeypatch):
        self.device, self.stream, self.fails = 0, "default", None
        self.captures, self.active, self.most_active = [], 0, 0
        fakes = {
            "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
            "Stream": lambda device: f"capture stream of {device}",
            "stream": self.on_stream,
            "graph": self.graph,
            "current_device": lambda: self.device,
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(decoder_module, "_capture_stream", cache(decoder_module._capture_stream.__wrapped__))

    @contextmanager
    def on_stream(self, stream):
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    @contextmanager
    def graph(self, graph, *, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.captures.append((stream, pool))
        self.active += 1
        self.most_active = max(self.most_active, self.active)
        self.stream = stream
        try:
            if self.fails == "inside":
                raise torch.OutOfMemoryError("no memory for it")
            yield
        finally:
            self.active -= 1
        # As torch does, it leaves the stream as it is.
        if self.fails == "at the end":
            raise RuntimeError("capture invalidated")


def test_the_first_call_of_recorded_work_runs_as_it_is():
    calls = []
    work = CapturedCall(lambda: calls.append(1), capture=False)
    work()
    work()
    assert len(calls) == 2


@pytest.mark.parametrize("fails", ["inside", "at the end"])
def test_where_a_capture_fails_optional_work_runs_as_it_is(monkeypatch, fails):
    fake, calls = FakeDevice(monkeypatch), []
    work = CapturedCall(lambda: calls.append(fake.stream), capture=True, optional=True)
    work()
    fake.fails = fails
    with pytest.warns(RuntimeWarning, match="could not be captured.*(no memory for it|capture invalidated)"):
        work()
    work()
    assert len(fake.captures) == 1
    # In the failed capture nothing runs; elsewhere it runs on the stream on which it was called.
    assert [stream for stream in calls if stream != "capture stream of 0"] == ["default"] * 3
    required = CapturedCall(lambda: None, capture=True)
    required()
    with pytest.raises(RuntimeError, match=r"no memory for it|capture invalidated"):
        required()
    assert fake.stream == "default"


def test_an_error_of_the_work_itself_is_not_hidden(monkeypatch):
    FakeDevice(monkeypatch)
    healthy = [True]

    def function():
        if not healthy[0]:
            raise RuntimeError("sizes do not match")

    work = CapturedCall(function, capture=True, optional=True)
    work()
    healthy[0] = False
    with pytest.warns(RuntimeWarning), pytest.raises(RuntimeError, match="sizes do not match"):
        work()


def test_each_device_captures_on_a_stream_of_its_own(monkeypatch):
    fake = FakeDevice(monkeypatch)
    for device, pool in ((0, "a"), (1, "b"), (0, "a")):
        fake.device = device
        work = CapturedCall(lambda: None, capture=True, pool=pool)
        for _ in range(3):
            work()
    expected = [("capture stream of 0", "a"), ("capture stream of 1", "b"), ("capture stream of 0", "a")]
    assert fake.captures == expected
    assert fake.stream == "default"


def test_one_graph_is_captured_at_a_time(monkeypatch):
    """However many threads do: torch does not allow more."""
    fake = FakeDevice(monkeypatch)
    works = [CapturedCall(lambda: time.sleep(0.02), capture=True) for _ in range(4)]
    for work in works:
        work()
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.captures) == 4
    assert fake.most_active == 1


@pytest.mark.parametrize("fails", [None, "inside", "at the end"])
def test_no_garbage_is_collected_during_a_capture(monkeypatch, fails):
    """A CUDA graph among it, as of an earlier decoder, would be freed, which invalidates the capture."""
    fake, freed = FakeDevice(monkeypatch), []

    class Graph:
        def __init__(self):
            self.cycle = self
            weakref.finalize(self, freed.append, True)

    def function():
        if fake.active:
            # Far more objects than the collector waits for.
            Graph()
            assert [[] for _ in range(20 * gc.get_threshold()[0])]
            assert not freed

    work = CapturedCall(function, capture=True, optional=True)
    work()
    fake.fails = fails
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        work()
    assert fake.captures
    assert gc.isenabled()
    gc.collect()
    assert freed or fails == "inside"


@pytest.mark.slow
def test_decoding_goes_on_where_captures_fail(monkeypatch):
    torch.manual_seed(0)
    model = GPT(GPTConfig.preset("byte-400k", rotary="scale")).eval()
    tokens = torch.randint(256, (2, 300))
    prefix = Prefix.prefill(model, tokens[:, :20], cache_policy="state")
    expected, _ = decode(model, prefix, tokens[:, 20:], cache_policy="state")
    fake = FakeDevice(monkeypatch)
    fake.fails = "inside"
    decoder = Decoder(model, prefix, cache_policy="state")
    decoder._capture = True
    decoder._reset_graphs()
    with pytest.warns(RuntimeWarning, match="could not be captured"):
        found = [decoder.step(token).clone() for token in tokens[:, 20:].unbind(1)]
    assert torch.equal(torch.stack(found, dim=1), expected)
    # One for steps, and one for folds, of which there is a second.
    assert len(fake.captures) == 2


def test_a_decoder_that_is_dropped_is_freed_at_once(monkeypatch):
    """Not when garbage is collected, for its caches may take most of a device's memory."""
    torch.manual_seed(0)
    model = GPT(GPTConfig.preset("byte-400k", rotary="scale")).eval()
    prefix = Prefix.prefill(model, torch.randint(256, (1, 20)), cache_policy="state")
    FakeDevice(monkeypatch)
    decoder = Decoder(model, prefix, cache_policy="state")
    decoder._capture = True
    decoder._reset_graphs()
    for _ in range(3):
        decoder.step(torch.zeros(1, dtype=torch.int64))
    kept = weakref.ref(decoder), weakref.ref(decoder._cache)
    gc.disable()
    try:
        del decoder
        assert [x() for x in kept] == [None, None]
    finally:
        gc.enable()
