"""Segments padded to a recorded length give what they give without padding. On a CPU nothing is recorded: the same
function runs at every call.
"""

import random
import threading
import weakref
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from serving.small_model import small_model

from support import assert_close
from sympow.data.tokenizer import ByteTokenizer
from sympow.generation.cache import fold
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.generation.text import TextModel
from sympow.model import GPT
from sympow.serving import Engine
from sympow.serving.engine import prefill_graphs
from sympow.serving.engine.prefill_graphs import PrefillGraphs, StateBuffer, recorded_lengths, unsupported_reason
from sympow.serving.engine.slots import Slots

KINDS = [
    pytest.param({}, id="conformal"),
    pytest.param({"power": 4}, id="p4"),
    pytest.param({"gating": "vector", "rotary": "pairs"}, id="vector gates"),
    pytest.param({"gating": "fixed", "rotary": "fixed"}, id="fixed"),
    pytest.param({"gating": "learned", "rotary": "learned"}, id="learned"),
    pytest.param({"gating": "none", "rotary": "none"}, id="plain"),
    pytest.param({"gating": "clamped", "rotary": "signed"}, id="clamped gates"),
    pytest.param({"gating": "half", "rotary": "grid", "key_value_heads": 2}, id="half gates"),
    pytest.param({"short_conv": 4}, id="short convolution"),
    pytest.param({"form": "attention"}, id="attention form"),
    pytest.param({"form": "chunked", "chunk_size": 8}, id="chunked form"),
]
SEGMENT = 20


def graphs_of(model: GPT) -> PrefillGraphs:
    return PrefillGraphs(model, SEGMENT, StateBuffer(model))


def some_tokens(count: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(256) for _ in range(count))


@pytest.fixture
def four_lengths(monkeypatch):
    """4, 8, 16 and 20 for segments of 20."""
    monkeypatch.setattr(prefill_graphs, "SHORTEST", 4)


@pytest.fixture
def on_any_device(monkeypatch):
    """Engines use graphs' segments on a CPU too."""
    monkeypatch.setattr("sympow.serving.engine.engine.unsupported_reason", lambda model: None)


def members(state):
    return [(f"layer {n} {name}", x) for n, layer in enumerate(state) for name, x in layer._tensors().items()]


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_padded_segments_give_what_whole_ones_give(kind, four_lengths):
    model = small_model(**kind)
    graphs = graphs_of(model)
    assert graphs.lengths == (4, 8, 16, 20)
    state = after = None
    for number, count in enumerate((3, 4, 1, 8, 5, 20, 13, 17)):
        ids = some_tokens(count, number)
        states = []
        # From the beginning, and with the past so far.
        for before, expected_before in ((None, None), (after, state)):
            given, features, padded = graphs.prefill(ids, before)
            expected, whole = model.features(torch.tensor([ids]), expected_before)
            assert given.tolist() == [list(ids)]
            assert_close(features, expected, 1e-9, f"features of {count} tokens")
            for (name, actual), (_, wanted) in zip(members(padded), members(whole), strict=True):
                assert actual.dtype == wanted.dtype
                assert_close(actual, wanted, 1e-9, f"{name} after {count} tokens")
            states.append((padded, whole))
        after, state = states[-1]


@torch.no_grad()
def test_states_belong_to_the_caller_and_buffers_leave_no_trace(four_lengths):
    """In float32, bit for bit."""
    model = small_model(dtype=torch.float32, width=32)
    graphs = graphs_of(model)
    _, _, first = graphs.prefill(some_tokens(20), None)
    at_first = tuple(layer.clone() for layer in first)
    _, features, second = graphs.prefill(some_tokens(6, 1), first)
    features = features.clone()
    for count in (20, 1, 7):
        graphs.prefill(some_tokens(count, count), None)
    for (name, actual), (_, wanted) in zip(members(first), members(at_first), strict=True):
        assert torch.equal(actual, wanted), name
    # The same again, from the buffers that other texts have used since, and from others that none has used.
    for other in (graphs, graphs_of(model)):
        _, features_again, again = other.prefill(some_tokens(6, 1), first)
        assert torch.equal(features_again, features)
        for (name, actual), (_, wanted) in zip(members(again), members(second), strict=True):
            assert torch.equal(actual, wanted), name
            assert not any(actual.data_ptr() == x.data_ptr() for _, x in members(graphs._buffer.layers))


def test_a_segment_holds_the_new_state_of_one_layer_at_a_time(monkeypatch):
    """Graphs keep the memory that they compute in."""
    taken: list[weakref.ref] = []
    load_layer = StateBuffer.load_layer

    def watched(self, number, layer):
        assert number == len(taken)
        taken.append(weakref.ref(layer.kv))
        load_layer(self, number, layer)

    def before_a_block(*_):
        assert not any(state() is not None for state in taken)

    monkeypatch.setattr(StateBuffer, "load_layer", watched)
    model = small_model(layers=3)
    for block in model.blocks:
        block.register_forward_pre_hook(before_a_block)
    graphs_of(model).prefill(some_tokens(7), None)
    assert len(taken) == 3


@torch.no_grad()
def test_without_memory_for_a_graph_segments_are_the_same_without_it(four_lengths, monkeypatch):
    """Bit for bit, with one warning for each length, and no second attempt."""
    attempts: list[int] = []

    class NoMemory:
        def __init__(self, *_, **__):
            attempts.append(1)
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = small_model(dtype=torch.float32)
    graphs, expected = graphs_of(model), graphs_of(model).prefill(some_tokens(7), None)
    graphs.calls._capture = True
    monkeypatch.setattr(torch.cuda, "CUDAGraph", NoMemory)
    graphs.prefill(some_tokens(3), None)
    graphs.prefill(some_tokens(5), None)
    # The second call of this length, which would be captured, and later ones.
    with pytest.warns(RuntimeWarning, match="CUDA out of memory"):
        results = [graphs.prefill(some_tokens(7), None)]
    for _ in range(3):
        results.append(graphs.prefill(some_tokens(7), None))
        assert torch.equal(results[-1][1], expected[1])
    for _, _, state in results:
        for (name, actual), (_, wanted) in zip(members(state), members(expected[2]), strict=True):
            assert torch.equal(actual, wanted), name
    assert len(attempts) == 1
    with pytest.warns(RuntimeWarning, match="CUDA out of memory"):
        graphs.record()
    assert len(attempts) == len(graphs.lengths)


def test_every_segment_fits_the_next_recorded_length():
    assert recorded_lengths(2_048) == (128, 256, 512, 1_024, 2_048)
    assert recorded_lengths(300) == (128, 256, 300)
    assert recorded_lengths(129) == (128, 129)
    for size in (1, 100, 128):
        assert recorded_lengths(size) == (size,)
    graphs = graphs_of(small_model())
    for count in (0, SEGMENT + 1):
        with pytest.raises(ValueError, match=f"1 to 20 of a segment, got {count}"):
            graphs.prefill((1,) * count, None)


def test_a_state_of_another_model_is_refused():
    graphs = graphs_of(small_model())
    tokens = torch.tensor([[1, 2, 3]])

    def state_of(**config):
        return fold(Prefix.prefill(small_model(**config), tokens).state)

    with pytest.raises(ValueError, match="each of 2 layers, got 1"):
        graphs.prefill((1,), state_of(layers=1))
    for config in ({"power": 4}, {"key_value_heads": 2}, {"rotary": "none"}, {"heads": 4}):
        with pytest.raises(ValueError, match=r"layer 0 has .*, expected "):
            graphs.prefill((1,), state_of(**config))
    with pytest.raises(TypeError, match="got Window for layer 0"):
        graphs.prefill((1,), Prefix.prefill(small_model(), tokens, cache_policy="keys").state)


def test_where_graphs_cannot_serve_segments_are_prefilled_as_they_are(monkeypatch):
    def model_on(device: str, *others: str, mixer: str = "sympow", form: str = "auto"):
        parameters = [SimpleNamespace(device=torch.device(name)) for name in (device, *others)]
        config = SimpleNamespace(mixer=mixer, form=form)
        return SimpleNamespace(
            embedding=SimpleNamespace(weight=parameters[0]), config=config, parameters=lambda: parameters
        )

    assert unsupported_reason(model_on("cuda:0", "cuda:0")) is None
    assert "the model is on cpu" in unsupported_reason(small_model())
    assert "softmax" in unsupported_reason(model_on("cuda:0", mixer="softmax"))
    assert "every token" in unsupported_reason(model_on("cuda:0", form="recurrent"))
    for form in ("attention", "chunked"):
        assert unsupported_reason(model_on("cuda:0", form=form)) is None
    assert "not all parameters are on cuda:0" in unsupported_reason(model_on("cuda:0", "meta"))
    monkeypatch.setenv("SYMPOW_CHECK_VALUES", "1")
    assert "SYMPOW_CHECK_VALUES" in unsupported_reason(model_on("cuda:0"))
    with Engine(TextModel(small_model(), ByteTokenizer()), 2) as engine:
        assert engine._scheduler._prefill_graphs is None


def test_an_engine_gives_what_the_model_gives(four_lengths, on_any_device):
    """Prompts of one and several segments, with and without a prefix, scored and not, cached and not."""
    model = TextModel(small_model(), ByteTokenizer())
    prompts = [some_tokens(count, count) for count in (1, 4, 5, 19, 20, 21, 47)]
    prompts += [(*prompts[-1][:40], 1, 2), prompts[-1]]
    context = some_tokens(25, 99)
    options = {"sampling": Sampling(repetition_penalty=1.3), "seed": 4}
    with Engine(model, 4, segment_size=SEGMENT, window=4, max_queue=64) as engine:
        assert engine._scheduler._prefill_graphs is not None
        engine.warm_up()
        prefix = engine.prefill(context)
        for before, given in ((None, {}), (Prefix.prefill(model.model, torch.tensor([context])), {"prefix": prefix})):
            completions = [engine.submit(p, max_tokens=7, ignore_boundary=True, **options, **given) for p in prompts]
            for prompt, completion in zip(prompts, completions, strict=True):
                made = generate(model.model, 7, prompt=torch.tensor([prompt]), prefix=before, **options)
                assert list(completion.result(60).tokens) == [int(token) for token in made]
        scored = engine.submit(prompts[6], max_tokens=0, logprobs=1, echo=True).result(60)
        assert engine.stats().prefix_hits >= 2
    logits, _ = model.model(torch.tensor([prompts[6]]))
    expected = logits[0].log_softmax(-1).detach()[torch.arange(46), torch.tensor(prompts[6][1:])]
    own = torch.tensor([entry.logprob for entry in scored.prompt_logprobs[1:]], dtype=torch.float64)
    assert_close(own, expected, 1e-9, "log-probabilities of the prompt")


def test_padding_counts_for_what_is_prefilled_between_two_steps(four_lengths, on_any_device, monkeypatch):
    model = TextModel(small_model(layers=1), ByteTokenizer())
    log: list[int] = []
    prefill, step = PrefillGraphs.prefill, model.model.step
    monkeypatch.setattr(
        PrefillGraphs,
        "prefill",
        lambda self, ids, state: (log.append(self.padded(len(ids))), prefill(self, ids, state))[1],
    )
    monkeypatch.setattr(model.model, "step", lambda *a: (log.append(0), step(*a))[1])
    gate = threading.Event()
    with Engine(model, 13, segment_size=SEGMENT, prefix_cache_bytes=0) as engine:
        running = engine.submit("a", max_tokens=10**6, seed=1, ignore_boundary=True)
        next(iter(running))
        # The worker waits here until all others are submitted.
        first = engine.submit_prefill([0], progress=lambda *_: gate.wait(60))
        short = [engine.submit([n] * count, max_tokens=1) for n in range(4) for count in (1, 5, 9)]
        gate.set()
        for awaited in (first, *short):
            awaited.result(60)
        running.cancel()
    assert sorted(n for n in log if n) == [4] * 6 + [8] * 4 + [16] * 4
    steps = [place for place, length in enumerate(log) if not length]
    rounds = [sum(log[a:b]) for a, b in pairwise(steps)]
    # 1, 5 and 9 tokens would fit, and are computed as 4, 8 and 16.
    assert max(rounds) <= SEGMENT
    assert any(len(log[a + 1 : b]) > 1 for a, b in pairwise(steps))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_a_state_is_put_through_the_buffer_as_without_it(kind, dtype):
    """All tensors of the slots, bit for bit, the 16-bit copies of states included."""
    model = small_model(dtype=dtype, **kind)
    options = {"window": 4, "max_context": None, "step_rows": 3, "graphs": False}
    directly, through = Slots(model, 3, **options), Slots(model, 3, **options, buffer=StateBuffer(model))
    prefixes = [Prefix.prefill(model, torch.tensor([some_tokens(5, n)]), cache_policy="state") for n in range(4)]
    for slots in (directly, through):
        for layer in slots._layers:
            layer._ensure_copy()
        for row, prefix in enumerate(prefixes[:3]):
            slots.put(row, prefix)
        # What the steps leave in the window of the row must go.
        slots.tokens[:] = torch.arange(3)
        slots.step(3)
        slots.put(1, prefixes[3])
    for one, other in zip(directly._layers, through._layers, strict=True):
        assert one._tensors().keys() == other._tensors().keys()
        for name, tensor in one._tensors().items():
            assert torch.equal(tensor, other._tensors()[name]), name
    assert ("kv_half" in one._tensors()) == (dtype == torch.bfloat16 and kind.get("power", 2) == 2)
    assert torch.equal(directly.logits, through.logits)
