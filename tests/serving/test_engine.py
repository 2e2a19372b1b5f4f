"""Requests that share a batch give what each gives alone, whoever joins, leaves, fails or is cancelled meanwhile."""

import asyncio
import copy
import gc
import random
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from itertools import pairwise

import pytest
import torch

from support import assert_close
from sympow.data.tokenizer import ByteTokenizer
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.generation.text import TextModel
from sympow.model import GPT, GPTConfig
from sympow.serving import (
    Engine,
    EngineClosedError,
    Event,
    QueueFullError,
    RequestError,
)
from sympow.serving.engine import captured, prefill_graphs, slots
from sympow.serving.engine.prefill_graphs import StateBuffer
from sympow.serving.engine.prefix_cache import PrefixCache
from sympow.serving.engine.request import Prefill

BOUNDARY = ByteTokenizer.boundary
SETTINGS = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.7, top_k=5),
    Sampling(temperature=1.3, top_p=0.8, repetition_penalty=1.2),
    Sampling(min_p=0.1, top_p=0.95, top_k=40),
    Sampling(temperature=0.0, repetition_penalty=1.5),
)


def text_model(seed: int = 0, dtype: torch.dtype = torch.float64, **config) -> TextModel:
    """A small model whose outputs depend on all of the text, and vary."""
    torch.manual_seed(seed)
    shape = {"vocab_size": 257, "layers": 2, "width": 16, "heads": 2, "key_value_heads": 1, "rotary": "scale"}
    model = GPT(GPTConfig(**(shape | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                std = 0.5 if name == "embedding.weight" else 2 / parameter.shape[1] ** 0.5
                parameter.normal_(std=std)
    return TextModel(model.to(dtype).eval(), ByteTokenizer())


@pytest.fixture(scope="module")
def small() -> TextModel:
    return text_model()


def engine_of(model: TextModel, slots: int = 4, **options) -> Engine:
    options = {"segment_size": 8, "window": 4, "prefix_cache_bytes": 0} | options
    return Engine(model, slots, **options)


def alone(model: TextModel, prompt, sampling: Sampling, max_tokens: int, seed: int | None, prefix=None) -> list[int]:
    """The tokens of `generate`, up to the boundary."""
    if isinstance(prompt, str):
        ids = model.encode(prompt)[:, 0 if prefix is None else 1 :]
    else:
        ids = torch.tensor([list(prompt)])
    given = {"prompt": ids if ids.shape[1] else None, "prefix": prefix}
    return [int(t) for t in generate(model.model, max_tokens, sampling, stop=BOUNDARY, seed=seed, **given)]


def random_request(rng: random.Random) -> dict:
    length = rng.choice([0, 1, 5, 8, 16, 23])
    return {
        "prompt": "".join(rng.choice("abcdef \n") for _ in range(length)),
        "sampling": rng.choice(SETTINGS),
        "max_tokens": rng.randint(1, 13),
        "seed": rng.randrange(1000),
    }


@pytest.mark.parametrize(
    "config",
    [
        {},
        pytest.param({"gating": "vector", "rotary": "pairs"}, marks=pytest.mark.slow),
        pytest.param({"gating": "none", "rotary": "none"}, marks=pytest.mark.slow),
        {"short_conv": 4},
        {"mixer": "softmax", "short_conv": 4},
    ],
    ids=["conformal", "vector gates", "plain", "short convolution", "softmax"],
)
def test_requests_in_company_give_what_each_gives_alone(config):
    model, rng = text_model(**config), random.Random(1)
    requests = [random_request(rng) for _ in range(12)]
    softmax = config.get("mixer") == "softmax"
    with engine_of(model, 5, step_rows=2, max_context=64 if softmax else None) as engine:
        # New ones come while earlier ones run, and slots are given away several times.
        completions = [engine.submit(**request) for request in requests[:3]]
        for request in requests[3:]:
            events = iter(completions[-2])
            for _ in range(rng.randint(1, 3)):
                next(events, None)
            completions.append(engine.submit(**request))
        results = [completion.result(60) for completion in completions]
        assert engine.stats().running == 0
    for request, result in zip(requests, results, strict=True):
        expected = alone(model, **request)
        assert list(result.tokens) == expected
        assert result.text == model.tokenizer.decode(expected)
        ended = expected[-1] == BOUNDARY
        assert result.finish_reason == ("stop" if ended else "length")
        assert result.usage.prompt_tokens == 1 + len(request["prompt"])
        assert result.usage.completion_tokens == len(expected)
        assert result.time_to_first_token > 0


def test_rounding_does_not_depend_on_the_company():
    """In float32, where every sum is rounded: the very same log-probabilities, bit for bit."""
    model, rng = text_model(dtype=torch.float32, width=32), random.Random(2)
    requests = [random_request(rng) | {"logprobs": 3, "max_tokens": 7} for _ in range(7)]
    with engine_of(model, 5, step_rows=4) as engine:
        together = [engine.submit(**request) for request in requests]
        together = [completion.result(60) for completion in together]
        apart = [engine.submit(**request).result(60) for request in reversed(requests)][::-1]
    assert [result.logprobs for result in together] == [result.logprobs for result in apart]
    assert [result.tokens for result in together] == [result.tokens for result in apart]


def test_text_comes_as_it_is_generated(small):
    with engine_of(small) as engine:
        completion = engine.submit("ab", max_tokens=9, seed=3)
        events = list(completion)
        assert events == list(completion)
        result = completion.result()
    assert [event.finish_reason for event in events] == [None] * 8 + ["length"]
    assert all(len(event.tokens) == 1 for event in events)
    assert "".join(event.text for event in events) == result.text == small.tokenizer.decode(result.tokens)
    assert events[-1].usage == result.usage


def test_coroutines_wait_for_events_of_the_worker(small):
    requests = [{"prompt": "x" * n, "max_tokens": 6, "seed": n, "sampling": Sampling()} for n in range(8)]

    async def tokens_of(engine: Engine, request: dict) -> list[int]:
        return [token async for event in engine.submit(**request) for token in event.tokens]

    async def everything(engine: Engine):
        streamed = await asyncio.gather(*(tokens_of(engine, request) for request in requests))
        whole = await asyncio.gather(*(engine.submit(**request).aresult() for request in requests))
        prefix = await engine.submit_prefill("some text").aresult()
        return streamed, [list(result.tokens) for result in whole], prefix.tokens

    with engine_of(small) as engine:
        streamed, whole, tokens = asyncio.run(everything(engine))
    assert streamed == whole == [alone(small, **request) for request in requests]
    assert tokens == 10


def test_a_loop_that_has_ended_does_not_disturb_the_worker(small):
    async def only_the_first(completion):
        async for _ in completion:
            return

    with engine_of(small) as engine:
        completion = engine.submit("a", max_tokens=40, seed=1, ignore_boundary=True)
        asyncio.run(only_the_first(completion))
        assert len(completion.result(60).tokens) == 40


def test_stop_strings_end_the_text_and_are_not_part_of_it(small):
    options = {"sampling": Sampling(), "max_tokens": 30, "seed": 5}
    expected = small.tokenizer.decode(alone(small, "q", **options))
    stop = expected[6:9]
    place = expected.index(stop)
    with engine_of(small) as engine:
        result = engine.submit("q", stop=["never in it", stop], **options).result(60)
        assert (result.text, result.finish_reason) == (expected[:place], "stop")
        assert engine.submit("q", stop=stop, **options).result(60).text == expected[:place]
        # What might have become a stop string is part of the text after all.
        held = expected[-1] + "never"
        assert engine.submit("q", stop=held, **options).result(60).text == expected


def test_a_boundary_token_ends_a_text_unless_it_is_ignored():
    model = text_model(layers=1)
    with torch.no_grad():
        # Likely in the middle of texts, but not everywhere.
        model.model.embedding.weight[BOUNDARY] *= 3
    with engine_of(model, 16) as engine:
        ended = [engine.submit("ab", max_tokens=12, seed=seed) for seed in range(16)]
        longer = [engine.submit("ab", max_tokens=12, seed=seed, ignore_boundary=True) for seed in range(16)]
        results = [(a.result(60), b.result(60)) for a, b in zip(ended, longer, strict=True)]
    for short, long in results:
        assert len(long.tokens) == 12
        assert long.finish_reason == "length"
        place = long.tokens.index(BOUNDARY) if BOUNDARY in long.tokens else 11
        assert short.tokens == long.tokens[: place + 1]
        assert short.finish_reason == ("stop" if BOUNDARY in long.tokens else "length")
        assert (short.text, long.text) == tuple(model.tokenizer.decode(x.tokens) for x in (short, long))
    assert any(1 < len(short.tokens) < 12 for short, _ in results)


def test_log_probabilities_are_those_of_the_model(small):
    prompt = "some prompt that is longer than a segment"
    with engine_of(small) as engine:
        other = engine.submit("z", max_tokens=30, seed=1)
        sampling = Sampling(temperature=0.5, repetition_penalty=2.0)
        result = engine.submit(prompt, sampling, max_tokens=7, seed=2, logprobs=4, echo=True).result(60)
        unasked = engine.submit(prompt, sampling, max_tokens=7, seed=2).result(60)
        scored = engine.submit(prompt, max_tokens=0, logprobs=0, echo=True).result(60)
        assert other.result(60).logprobs is None
    assert result.text == prompt + unasked.text
    assert result.tokens == unasked.tokens
    ids = [BOUNDARY, *prompt.encode(), *result.tokens]
    logits, _ = small.model(torch.tensor([ids]))
    expected = logits[0].log_softmax(-1).detach()
    entries = [*result.prompt_logprobs, *result.logprobs]
    assert [entry.token for entry in entries] == ids
    assert entries[0].logprob is None
    assert entries[0].top == ()
    own = torch.tensor([entry.logprob for entry in entries[1:]], dtype=torch.float64)
    assert_close(own, expected[torch.arange(len(ids) - 1), torch.tensor(ids[1:])], 1e-9, "log-probabilities")
    likely = expected[:-1].topk(4)
    assert [[token for token, _ in entry.top] for entry in entries[1:]] == likely.indices.tolist()
    values = torch.tensor([[value for _, value in entry.top] for entry in entries[1:]], dtype=torch.float64)
    assert_close(values, likely.values, 1e-9, "those of the most likely tokens")
    assert (scored.text, scored.tokens, scored.finish_reason) == (prompt, (), "length")
    assert [entry.logprob for entry in scored.prompt_logprobs] == [entry.logprob for entry in result.prompt_logprobs]


def test_an_echo_comes_first(small):
    with engine_of(small) as engine:
        events = list(engine.submit([97, 98, 99], max_tokens=2, seed=0, echo=True))
    assert events[0] == Event("abc", (97, 98, 99), None, echo=True)
    assert [event.echo for event in events] == [True, False, False]


def test_a_cancelled_request_makes_room(small):
    with engine_of(small, 1) as engine:
        endless = engine.submit("a", max_tokens=10**6, seed=1, ignore_boundary=True)
        waiting = engine.submit("b", max_tokens=5, seed=2)
        dropped = engine.submit("c", max_tokens=5, seed=2)
        next(iter(endless))
        dropped.cancel()
        assert dropped.result(60).finish_reason == "cancelled"
        assert not waiting.done
        endless.cancel()
        result = endless.result(60)
        assert result.finish_reason == "cancelled"
        assert 0 < result.usage.completion_tokens == len(result.tokens)
        assert list(waiting.result(60).tokens) == alone(small, "b", Sampling(), 5, 2)
        endless.cancel()
        assert engine.stats().finished.get("cancelled") == 2


def test_a_full_queue_refuses_and_recovers(small):
    with engine_of(small, 1, max_queue=2) as engine:
        there = [engine.submit("a", max_tokens=10**6, seed=1, ignore_boundary=True) for _ in range(3)]
        with pytest.raises(QueueFullError, match="3 requests run or wait"):
            engine.submit("b", max_tokens=1)
        assert engine.stats().rejected == 1
        there[1].cancel()
        there[1].result(60)
        there.append(engine.submit("b", max_tokens=1, seed=4))
        for completion in there:
            completion.cancel()


@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_that_waits_takes_four_bytes_for_each_token(small, as_ids):
    text = "a long prompt " * 20_000
    prompt = small.encode(text)[0].tolist() if as_ids else text
    with engine_of(small, 1, max_queue=8, prefix_cache_bytes=2**20) as engine:
        first = engine.submit("a", max_tokens=10**6, seed=1, ignore_boundary=True)
        next(iter(first))
        tracemalloc.start()
        waiting = [engine.submit(prompt, max_tokens=1) for _ in range(8)]
        gc.collect()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert engine.stats().queued == 8
        assert taken < 8 * 4.5 * len(text)
        assert waiting[0].prompt_tokens == tuple(small.encode(text)[0].tolist())
        for completion in (first, *waiting):
            completion.cancel()


def test_contexts_are_prefilled_once_and_asked_many_times(small):
    text, progress = "a long document, " * 9, []
    with engine_of(small) as engine:
        prefix = engine.prefill(text, progress=lambda done, total: progress.append((done, total)))
        longer = engine.prefill("and more", prefix=prefix)
        keys = small.prefill(text, cache_policy="keys")
        kept = [layer.clone() for layer in prefix.state]
        for question, before in (("who?", prefix), ("", prefix), ("why?", longer), ("who?", keys)):
            result = engine.submit(question, max_tokens=8, seed=6, prefix=before).result(60)
            assert list(result.tokens) == alone(small, question, Sampling(), 8, 6, prefix=before)
        assert engine.submit([], max_tokens=2, seed=6, prefix=prefix).result(60).usage.prompt_tokens == 0
    tokens = 1 + len(text)
    assert progress == [(min(n, tokens), tokens) for n in range(8, tokens + 8, 8)]
    assert prefix.tokens == tokens
    for layer, before in zip(prefix.state, kept, strict=True):
        assert torch.equal(layer.kv, before.kv)


def test_a_context_can_be_cancelled(small):
    started = threading.Event()
    with engine_of(small) as engine:
        prefilling = engine.submit_prefill([1] * 100_000, progress=lambda *_: started.set())
        assert started.wait(60)
        prefilling.cancel()
        with pytest.raises(RequestError, match="cancelled"):
            prefilling.result(60)
        assert 0 < prefilling.done_tokens < 100_000
        assert engine.stats().prefilling == 0


def test_a_long_prompt_delays_nobody_by_more_than_a_segment(small, monkeypatch):
    """Between two steps of a running request at most one segment is prefilled, by long prompts in turn."""
    log: list[tuple[str, int]] = []
    features, step = small.model.features, small.model.step
    monkeypatch.setattr(small.model, "features", lambda t, s: (log.append(("segment", t.shape[1])), features(t, s))[1])
    monkeypatch.setattr(small.model, "step", lambda *a: (log.append(("step", 0)), step(*a))[1])
    gate, order = threading.Event(), []
    with engine_of(small) as engine:
        running = engine.submit("a", max_tokens=10**6, seed=1, ignore_boundary=True)
        next(iter(running))
        # The worker waits here until all others are submitted.
        first = engine.submit_prefill([0], progress=lambda *_: gate.wait(60))
        long = [
            engine.submit_prefill([n] * 80, progress=lambda done, _, n=n: order.append(f"{n} {done}")) for n in (1, 2)
        ]
        short = engine.submit("bcd", max_tokens=1, seed=1)
        gate.set()
        for awaited in (first, short, *long):
            awaited.result(60)
        running.cancel()
    assert order == [f"{n} {done}" for done in range(8, 88, 8) for n in (1, 2)]
    # The short prompt has its turn after one segment of each long one.
    assert [size for kind, size in log if kind == "segment"] == [2, 1, 8, 8, 4, *[8] * 18]
    steps = [place for place, (kind, _) in enumerate(log) if kind == "step"]
    assert max(sum(n for _, n in log[a:b]) for a, b in pairwise(steps)) == 8


def test_few_long_prompts_take_turns_and_short_ones_do_not_wait_for_them(small):
    gate, order, counted = threading.Event(), [], []
    with engine_of(small, 2, prefix_cache_bytes=2**24) as engine:
        engine.prefill([9] * 21)
        # The worker waits here until all others are submitted.
        first = engine.submit_prefill([0], progress=lambda *_: gate.wait(60))

        def watch(name: str) -> dict:
            def progress(done: int, _: int) -> None:
                order.append(f"{name}{done}")
                counted.append(engine.stats().prefilling)

            return {"progress": progress}

        texts = {"a": [1] * 24, "b": [2] * 20, "c": [3] * 24, "d": [4] * 24, "e": [5] * 16, "f": [6] * 16}
        # The last two are short, one by itself and one by what the cache has of it.
        texts |= {"s": [7] * 5, "t": [9] * 23}
        submitted = [engine.submit_prefill(text, **watch(name)) for name, text in texts.items()]
        gate.set()
        for awaited in (first, *submitted):
            awaited.result(60)
        assert engine.stats().prefilling == 0
    assert " ".join(order) == "a8 b8 c8 d8 s5 t23 a16 b16 c16 d16 a24 e8 b20 f8 c24 d24 e16 f16"
    # The one whose segment was just computed is among those counted.
    assert counted == [8, 8, 8, 8, 8, 7, *[6] * 5, *[5] * 2, *[4] * 2, 3, 2, 1]


def test_prompts_that_begin_alike_start_from_what_was_read(small):
    shared = "an introduction that all of them share; "
    prompts = [shared + "one", shared + "two", shared + "one", shared, shared + "one and more", "something else"]
    options = {"sampling": Sampling(), "max_tokens": 6, "seed": 9}
    with engine_of(small, prefix_cache_bytes=2**24) as engine:
        results = [engine.submit(prompt, **options).result(60) for prompt in prompts]
        stats = engine.stats()
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.tokens) == alone(small, prompt, **options)
    # 41 tokens are shared: borders lie at 40; the third prompt is the first one; the fourth ends after a border.
    assert [result.usage.cached_tokens for result in results] == [0, 40, 44, 40, 44, 0]
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefix_hit_tokens) == (4, 2, 168)
    assert stats.prompt_tokens == sum(1 + len(p) for p in prompts) - 168
    assert 0 < stats.prefix_nbytes <= 2**24


@pytest.mark.parametrize("padded", [False, True], ids=["eager", "padded for graphs"])
@pytest.mark.parametrize("second", [48, 40], ids=["beyond a border", "to a border"])
def test_what_starts_at_a_border_is_rounded_as_alone(second, padded):
    """In float32, bit for bit, although a prompt before it read the segment up to the border in part only."""
    model, rng = text_model(dtype=torch.float32, width=32).model, random.Random(5)
    tokens = tuple(rng.randrange(256) for _ in range(second))
    third = (*tokens[:40], *(rng.randrange(256) for _ in range(5)))
    graphs = prefill_graphs.PrefillGraphs(model, 20, StateBuffer(model)) if padded else None

    def read(prompt: tuple[int, ...], known: PrefixCache, kept: PrefixCache) -> Prefill:
        reading = Prefill(prompt, 20)
        while not reading.finished:
            reading.look_up(known)
            reading.advance(model, kept, graphs)
        return reading

    with torch.no_grad():
        first, left, nothing = PrefixCache(2**24), PrefixCache(2**24), PrefixCache(0)
        read(tokens[:13], first, first)
        assert read(tokens, first, left).cached == 13
        expected = read(third, nothing, nothing).prefix
        found = read(third, left, left)
        assert torch.equal(found.prefix.logits, expected.logits)
        # What this one left at the border, which it read as a whole, serves the next.
        again = read((*third[:40], 7), left, left)
    assert (found.cached, again.cached) == (0, 40)


def test_requests_of_one_prompt_at_the_same_time_read_it_once(small):
    prompt = "the same for all of them, and rather long" * 3
    with engine_of(small, prefix_cache_bytes=2**24) as engine:
        completions = [engine.submit(prompt, max_tokens=3, seed=seed) for seed in range(4)]
        for seed, completion in enumerate(completions):
            assert list(completion.result(60).tokens) == alone(small, prompt, Sampling(), 3, seed)
        assert engine.stats().prompt_tokens == 1 + len(prompt)


def test_the_prefix_cache_stays_within_its_budget(small):
    with engine_of(small, prefix_cache_bytes=2**24) as engine:
        engine.submit("12345678", max_tokens=1).result(60)
        entry = engine.stats().prefix_nbytes // engine.stats().prefix_entries
    with engine_of(small, prefix_cache_bytes=3 * entry) as engine:
        for prompt in ("first", "second", "third", "first", "fourth", "first", "second"):
            engine.submit(prompt, max_tokens=1).result(60)
            assert engine.stats().prefix_nbytes <= 3 * entry
        # "first" was used again before "second" had to make room for "fourth".
        assert (engine.stats().prefix_hits, engine.stats().prefix_entries) == (2, 3)
    with engine_of(small, prefix_cache_bytes=0) as engine:
        for _ in range(2):
            engine.submit("first", max_tokens=1).result(60)
        assert (engine.stats().prefix_hits, engine.stats().prefix_entries) == (0, 0)


def test_one_bad_request_fails_alone(small):
    good = {"prompt": "fine", "sampling": Sampling(), "max_tokens": 12, "seed": 3}
    prefix = Prefix.prefill(small.model, small.encode("text"), cache_policy="state")
    for tensor in (prefix.state[1].kv, prefix.state[1].normalizer):
        tensor[:] = torch.nan
    with engine_of(small, 3) as engine:
        before = [engine.submit(**good) for _ in range(2)]
        bad = engine.submit("x", max_tokens=12, seed=1, prefix=prefix)
        last = list(bad)[-1]
        assert last.finish_reason == "error"
        assert "NaN" in last.error
        with pytest.raises(RequestError, match="logits are NaN"):
            bad.result()
        # The slots, and the one that held NaN, serve others.
        after = [engine.submit(**good) for _ in range(4)]
        for completion in before + after:
            assert list(completion.result(60).tokens) == alone(small, **good)
        assert engine.stats().finished == {"error": 1, "length": 6}


def test_a_tokenizers_error_is_its_requests_own(small):
    class Fragile(ByteTokenizer):
        def decode(self, ids):
            if len(ids) == 3:
                raise KeyError("cannot decode")
            return super().decode(ids)

    with engine_of(TextModel(small.model, Fragile())) as engine:
        with pytest.raises(RequestError, match="KeyError: 'cannot decode'"):
            engine.submit("a", max_tokens=9, seed=1).result(60)
        assert len(engine.submit("a", max_tokens=2, seed=1).result(60).tokens) == 2


def test_a_worker_that_fails_tells_everyone(monkeypatch):
    model = text_model()
    engine = engine_of(model, 1)
    completions = [engine.submit("a", max_tokens=10**6, seed=1, ignore_boundary=True) for _ in range(2)]
    next(iter(completions[0]))

    def broken(*_):
        raise MemoryError("none left")

    monkeypatch.setattr(model.model, "step", broken)
    for completion in completions:
        with pytest.raises(RequestError, match="none left"):
            completion.result(60)
    with pytest.raises(EngineClosedError, match="none left"):
        engine.submit("a", max_tokens=1)
    engine.close()


def test_closing_finishes_or_cancels_what_is_left(small):
    options = {"max_tokens": 20, "seed": 1, "ignore_boundary": True}
    engine = engine_of(small, 1)
    drained = [engine.submit("a", **options) for _ in range(3)]
    engine.close(drain=True)
    assert [completion.result(0).finish_reason for completion in drained] == ["length"] * 3
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        engine.submit("a", **options)
    with pytest.raises(EngineClosedError):
        engine.submit_prefill("a")
    engine.close()
    engine = engine_of(small, 1)
    endless = [engine.submit("a", **(options | {"max_tokens": 10**6})) for _ in range(2)]
    prefilling = engine.submit_prefill([1] * 10**5)
    engine.close(drain=True, timeout=0.01)
    assert [completion.result(0).finish_reason for completion in endless] == ["cancelled"] * 2
    with pytest.raises(RequestError, match="cancelled"):
        prefilling.result(0)
    assert engine.stats().running == engine.stats().queued == 0


@pytest.mark.parametrize("fails", [False, True], ids=["closed", "failed"])
def test_closing_frees_the_slots_at_once(fails, monkeypatch):
    model = text_model()
    monkeypatch.setattr("sympow.serving.engine.engine.unsupported_reason", lambda _: None)
    engine = engine_of(model)
    worker = engine._scheduler
    engine.submit("a", max_tokens=6, seed=1).result(60)
    kept = (worker._slots, worker._sampler, worker._prefill_graphs, worker._slots.logits, worker._slots._layers[0])
    left = [weakref.ref(x) for x in kept]
    del kept

    def broken(*_):
        try:
            raise MemoryError("none left")
        except MemoryError as error:
            raise RuntimeError("no step") from error

    gc.disable()  # which would free them some time later
    try:
        if fails:
            monkeypatch.setattr(model.model, "step", broken)
            with pytest.raises(RequestError, match="no step"):
                engine.submit("a", max_tokens=6, seed=1).result(60)
        engine.close()
        assert [reference() for reference in left] == [None] * 5
        assert repr(engine.failure) == ("RuntimeError('no step')" if fails else "None")
    finally:
        gc.enable()


def live_tensor_bytes() -> int:
    gc.collect()
    # Not fake ones, of torch's compiler, which other tests may have left.
    tensors = {id(x): x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)}
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors.values()}.values())


def settles_at(size: int) -> bool:
    """Whether live tensors take so many bytes, at once or when the worker has returned from its last step."""
    return any(live_tensor_bytes() == size or time.sleep(0.1) for _ in range(50))


@pytest.mark.slow
def test_nothing_is_left_of_a_thousand_requests():
    model = text_model(layers=1, width=8, heads=1)
    rng = random.Random(4)
    with engine_of(model) as engine:  # tables of features, which stay
        engine.submit("a", max_tokens=6, seed=0).result(60)
    del engine
    threads, at_first = threading.active_count(), live_tensor_bytes()
    with engine_of(model, 32, max_queue=1000, step_rows=32, window=64) as engine:
        engine.submit("a", max_tokens=1, seed=0, logprobs=1).result(60)
        idle = live_tensor_bytes()
        completions = []
        for number in range(1000):
            sampling = SETTINGS[number % len(SETTINGS)]
            prompt = [rng.randrange(256) for _ in range(rng.randint(1, 8))]
            completions.append(engine.submit(prompt, sampling, max_tokens=rng.randint(1, 6), seed=number))
            if number % 3 == 0:
                rng.choice(completions[-30:]).cancel()
        reasons = [completion.result(120).finish_reason for completion in completions]
        stats = engine.stats()
        assert (stats.running, stats.prefilling, stats.queued) == (0, 0, 0)
        assert stats.submitted == sum(stats.finished.values()) == 1001
        assert reasons.count("cancelled") == stats.finished["cancelled"] > 100
        assert stats.generated_tokens == 1 + sum(len(c.result().tokens) for c in completions)
        assert sum(stats.ttft_counts) == sum(c.first_token_at is not None for c in completions) + 1
        assert settles_at(idle)
        # All slots can be taken again.
        again = [engine.submit([number], max_tokens=3, seed=number) for number in range(32)]
        assert [list(c.result(60).tokens) for c in again] == [
            alone(model, [number], Sampling(), 3, number) for number in range(32)
        ]
    del engine
    assert threading.active_count() == threads
    assert settles_at(at_first)


def test_warming_up_changes_no_output(small):
    with engine_of(small) as engine:
        engine.warm_up()
        assert list(engine.submit("a", max_tokens=9, seed=2).result(60).tokens) == alone(small, "a", Sampling(), 9, 2)
        running = engine.submit("a", max_tokens=10**6, seed=2, ignore_boundary=True)
        next(iter(running))
        with pytest.raises(RuntimeError, match="before requests run"):
            engine.warm_up()
        running.cancel()


@pytest.mark.parametrize("max_context", [1, 7, 8, 9, 30])
def test_softmax_models_warm_up_with_slots_shorter_than_a_segment(max_context):
    model = text_model(mixer="softmax", layers=1)
    with engine_of(model, max_context=max_context) as engine:
        engine.warm_up()
        generated = min(max_context, 6) - 1
        prompt = [5] * (max_context - generated)
        completion = engine.submit(prompt, max_tokens=generated, seed=2)
        assert list(completion.result(60).tokens) == alone(model, prompt, Sampling(), generated, 2)


def test_nothing_is_left_to_capture_after_warming_up(monkeypatch):
    """As on a GPU, with calls that are counted in the place of CUDA graphs: from the third on they would be replays."""
    counts: Counter[str] = Counter()

    class Counted:
        def __init__(self, function, **_):
            self.function = function

        def __call__(self):
            counts[f"{self.function.func.__name__}{self.function.args}"] += 1
            self.function()

    monkeypatch.setattr(captured, "CapturedCall", Counted)
    monkeypatch.setattr("sympow.serving.engine.scheduler.mark_now", lambda _: None)
    monkeypatch.setattr(prefill_graphs, "SHORTEST", 4)
    monkeypatch.setattr("sympow.serving.engine.engine.unsupported_reason", lambda _: None)
    with engine_of(text_model(layers=1), 5, step_rows=2, window=16) as engine:
        engine._scheduler._device = torch.device("cuda")
        engine._scheduler._slots._capture = True
        engine.warm_up()
        warm = {name for name, count in counts.items() if count >= 3}
        assert warm == set(counts)
        counts.clear()
        for company in (1, 3, 5):
            together = [
                engine.submit("ab" * (n + 1), max_tokens=20, seed=n, ignore_boundary=True) for n in range(company)
            ]
            assert all(len(completion.result(60).tokens) == 20 for completion in together)
        for sampling in SETTINGS:
            for logprobs in (None, 2):
                engine.submit("ab", sampling, max_tokens=2, seed=1, logprobs=logprobs).result(60)
    assert any(name.startswith("_fold") for name in counts)
    assert {"_prefill_padded(4,)", "_prefill_padded(8,)"} <= set(counts)
    assert set(counts) <= warm


def test_folding_where_no_window_is_full_changes_nothing():
    model = text_model(dtype=torch.float32).model
    rows = slots.Slots(model, 3, window=4, max_context=None, step_rows=2, graphs=False)
    rows.tokens[:] = torch.arange(4)
    other = copy.deepcopy(rows)
    for _ in range(10):
        rows.step(3)
        other.step(3)
        other.fold_full(3)
        other.fold_full(3)
        assert torch.equal(rows.logits, other.logits)


def test_mistakes_are_named(small):
    with pytest.raises(TypeError, match="text_model must be a TextModel, got GPT"):
        Engine(small.model)
    for name in ("slots", "segment_size", "window", "max_context", "max_queue", "step_rows"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            Engine(small, **{name: 0})
    with pytest.raises(ValueError, match="prefix_cache_bytes must be at least 0"):
        Engine(small, prefix_cache_bytes=-1)
    with pytest.raises(ValueError, match="step_rows must be at most the number of slots, 4; got 5"):
        Engine(small, 4, step_rows=5)
    with pytest.raises(ValueError, match="max_context must be given for a softmax model"):
        Engine(text_model(mixer="softmax"))
    with pytest.raises(ValueError, match="boundary token 256, but the model has 256"):
        Engine(text_model(vocab_size=256))
    prefix = small.prefill("a")
    mistakes = [
        (ValueError, "prompt must hold at least one token", {"prompt": []}),
        (ValueError, "prompt must hold ids from 0 to 256, got 257", {"prompt": [1, 257]}),
        (TypeError, "prompt must be a string or token ids, got float among them", {"prompt": [1.0]}),
        (TypeError, "prompt must be a string or token ids, got int$", {"prompt": 5}),
        (TypeError, "prompt must be a string or token ids, got bytes$", {"prompt": b"abc"}),
        (TypeError, "prompt must be a string or token ids, got NoneType$", {"prompt": None}),
        (ValueError, "prompt is not UTF-8 text: character 1 ", {"prompt": "a\ud800"}),
        (ValueError, "max_tokens must be at least 0, got -1", {"max_tokens": -1}),
        (TypeError, "max_tokens must be an int", {"max_tokens": 1.5}),
        (ValueError, "logprobs must be at most 20", {"logprobs": 21}),
        (ValueError, "stop must not contain an empty string", {"stop": ["a", ""]}),
        (TypeError, "stop must be a string or strings, got int among them", {"stop": [1]}),
        (TypeError, "stop must be a string or strings, got int$", {"stop": 5}),
        (TypeError, "seed must be an int", {"seed": "1"}),
        (ValueError, "seed must be at most", {"seed": 2**64}),
        (TypeError, "sampling must be a Sampling, got dict", {"sampling": {}}),
        (TypeError, "prefix must be a Prefix, got str", {"prefix": "text"}),
        (ValueError, "prefix must be of one text, got 2", {"prefix": prefix.fork(2)}),
        (ValueError, "2 layers and 257 tokens, got 1 and 257", {"prefix": text_model(layers=1).prefill("a")}),
        (
            ValueError,
            "prompt is too long: 2 tokens of the prefix, 30 of its own and 9",
            {"prompt": "a" * 30, "prefix": prefix},
        ),
    ]
    with engine_of(small, max_context=40) as engine:
        for kind, message, arguments in mistakes:
            with pytest.raises(kind, match=message):
                engine.submit(**({"prompt": "a", "max_tokens": 9} | arguments))
        with pytest.raises(ValueError, match="text is too long"):
            engine.prefill("a" * 40)
        with pytest.raises(TypeError, match="text must be a string or token ids, got int"):
            engine.prefill(5)
        assert engine.stats().submitted == 0
        assert len(engine.submit("a" * 30, max_tokens=9, seed=1).result(60).tokens) <= 9
