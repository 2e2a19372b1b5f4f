"""Prompts prefilled by CUDA graphs on a GPU: as exact as without, the same bits each time, and no synchronization."""

import copy
from contextlib import contextmanager

import pytest
import torch

from sympow import GPT, GPTConfig
from sympow.data.tokenizer import ByteTokenizer
from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel
from sympow.ops.state import State
from sympow.serving import Engine
from sympow.serving.engine.prefill_graphs import SHORTEST, PrefillGraphs, StateBuffer, unsupported_reason
from sympow.serving.engine.prefix_cache import PrefixCache
from sympow.serving.engine.request import Prefill

pytestmark = pytest.mark.gpu
VOCABULARY = 257
KINDS = [
    pytest.param({"power": 2, "heads": 2}, id="p2-64"),
    pytest.param({"power": 2, "heads": 1}, id="p2-128"),
    pytest.param({"power": 2, "heads": 8, "gating": "fixed", "rotary": "fixed"}, id="p2-16-fixed"),
    pytest.param({"power": 4, "heads": 8, "key_value_heads": 4}, id="p4-16"),
    pytest.param({"power": 2, "heads": 4, "key_value_heads": 2, "short_conv": 4}, id="p2-32-conv"),
    pytest.param({"power": 2, "heads": 8, "gating": "vector", "rotary": "pairs"}, id="p2-pairs"),
    pytest.param({"power": 2, "heads": 4, "backend": "torch"}, id="p2-torch"),
]
SEGMENT = 600


def make(dtype=torch.bfloat16, **changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(
        GPTConfig(
            **{"vocab_size": VOCABULARY, "layers": 2, "width": 128, "rotary": "scale", "max_document": 1_000, **changes}
        )
    )
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
        model.final_norm.weight.copy_(torch.randn_like(model.final_norm.weight))
    return model.to(dtype).cuda().eval()


def some_tokens(count, seed=1):
    return tuple(torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist())


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@contextmanager
def no_synchronization():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_graphs_are_as_exact_as_eager_segments(kind, dtype):
    model = make(dtype, **kind)
    exact = copy.deepcopy(model).double()
    assert unsupported_reason(model) is None
    graphs = PrefillGraphs(model, SEGMENT, StateBuffer(model))
    graphs.record()
    past = torch.tensor([some_tokens(300, 9)], device="cuda")
    _, given = model.features(past)
    _, exact_given = exact.features(past)
    # Of states, by layer and tensor: over all lengths, since the error of one is a random walk that may end anywhere.
    errors: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for count in (1, 127, 128, 129, 500, SEGMENT):
        ids = some_tokens(count, count)
        tokens = torch.tensor([ids], device="cuda")
        for before, exact_before in ((None, None), (given, exact_given)):
            expected, whole = exact.features(tokens, exact_before)
            # A token alone is a matrix-vector product, which rounds less than a row of a matrix product: it is compared
            # in a batch of as many rows as its graph has.
            rows = SHORTEST if count == 1 else 1
            batched = None if before is None else [State.cat([layer] * rows) for layer in before]
            plain, plain_after = model.features(tokens.expand(rows, -1), batched)
            plain, plain_after = plain[:1], [layer._map(lambda x: x[:1]) for layer in plain_after]
            with no_synchronization():
                _, features, after = graphs.prefill(ids, before)
            assert error(features, expected) <= 1.5 * error(plain, expected)
            for layer, (wanted, ours, eager) in enumerate(zip(whole, after, plain_after, strict=True)):
                for name in ("kv", "normalizer"):
                    exactly = getattr(wanted, name)
                    found = tuple(error(getattr(state, name), exactly) for state in (ours, eager))
                    errors.setdefault((layer, name), []).append(found)
    for which, found in errors.items():
        ours, eager = torch.tensor(found).norm(dim=0).tolist()
        assert ours <= 1.5 * eager, which


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_eager_captured_and_replayed_calls_give_the_same_bits(kind):
    model = make(**kind)
    graphs = PrefillGraphs(model, SEGMENT, StateBuffer(model))
    first: dict[int, list[torch.Tensor]] = {}
    for _ in range(4):
        for length in graphs.lengths:
            ids = some_tokens(length - 3, length)
            _, features, after = graphs.prefill(ids, None)
            features = features.clone()
            _, more, later = graphs.prefill(ids[:50], after)
            found = [features, more.clone(), *(x for layer in later for x in layer._tensors().values())]
            expected = first.setdefault(length, found)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS[:2])
def test_requests_in_company_give_what_each_gives_alone(kind):
    model = TextModel(make(**kind), ByteTokenizer())
    prompts = [some_tokens(1 + 61 * number % 1_300, number) for number in range(24)]
    greedy = {"sampling": Sampling(temperature=0), "max_tokens": 20, "ignore_boundary": True, "logprobs": 2}
    with Engine(model, 8, segment_size=SEGMENT, max_queue=64, prefix_cache_bytes=0) as engine:
        assert engine._scheduler._prefill_graphs is not None
        together = [engine.submit(prompt, **greedy) for prompt in prompts]
        together = [completion.result(120) for completion in together]
        alone = [engine.submit(prompt, **greedy).result(120) for prompt in prompts]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.logprobs for result in together] == [result.logprobs for result in alone]


@torch.no_grad()
def test_a_prompt_joins_without_synchronization():
    model = TextModel(make(heads=2), ByteTokenizer())
    with Engine(model, 4, segment_size=SEGMENT) as engine:
        engine.warm_up()
        worker = engine._scheduler
        reading = Prefill(some_tokens(1_000), SEGMENT)
        with no_synchronization():
            while not reading.finished:
                reading.advance(model.model, PrefixCache(2**30), worker._prefill_graphs)
            worker._slots.put(1, reading.prefix)
            worker._sampler.put(1, Sampling(), 5, logprobs=False)
        worker._sampler.clear(1)


@torch.no_grad()
def test_a_context_is_computed_when_it_is_handed_over():
    """As is what its progress reports: the host is no more than two segments ahead."""
    model = TextModel(make(heads=2), ByteTokenizer())
    with Engine(model, 2, segment_size=SEGMENT, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        reported = []
        engine.prefill(some_tokens(20 * SEGMENT), progress=lambda done, _: reported.append(done))
        assert torch.cuda.current_stream().query()
    assert reported == [SEGMENT * segment for segment in range(1, 21)]
