"""Decoding on a GPU: the same tokens with CUDA graphs as without, and no synchronization with the device."""

import copy
import gc
import warnings

import pytest
import torch

from support import decode
from sympow import GPT, GPTConfig
from sympow.generation.cache import break_even_tokens
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate

pytestmark = pytest.mark.gpu
VOCABULARY = 211
KINDS = [
    pytest.param({"power": 2, "heads": 2}, id="p2-64"),
    pytest.param({"power": 2, "heads": 8}, id="p2-16"),
    pytest.param({"power": 4, "heads": 8, "key_value_heads": 4}, id="p4-16"),
    pytest.param({"power": 2, "heads": 4, "key_value_heads": 2, "short_conv": 4}, id="p2-32-conv"),
    pytest.param({"power": 2, "heads": 8, "gating": "vector", "rotary": "pairs"}, id="p2-pairs"),
    pytest.param({"mixer": "softmax", "heads": 2, "gating": "none", "rotary": "fixed"}, id="softmax"),
    pytest.param({"mixer": "softmax", "heads": 4, "key_value_heads": 2}, id="softmax-gated"),
]


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


def text(length, batch=3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, length), generator=generator).cuda()


def error(actual, expected):
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_as_good_as_those_of_the_whole_pass(kind):
    model, tokens = make(**kind), text(300)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(tokens, return_state=False)[0][:, 60:]
        plain = error(model(tokens, return_state=False)[0][:, 60:], exact)
    for cache_policy in ("auto", "keys") if kind.get("mixer") == "softmax" else ("auto", "state", "keys"):
        prefix = Prefix.prefill(model, tokens[:, :60], segment_size=50, cache_policy=cache_policy)
        logits, after = decode(model, prefix, tokens[:, 60:], cache_policy=cache_policy)
        assert error(logits, exact) <= 2 * plain
        assert after.tokens == 300
        if cache_policy == "auto" and "power" in kind:
            assert after.folded == (break_even_tokens(model) < 300)
        again, _ = decode(model, prefix, tokens[:, 60:], cache_policy=cache_policy, graphs=False)
        assert error(again, exact) <= 2 * plain


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same_with_graphs_and_without(kind):
    model, tokens = make(**kind), text(40)
    for sampling in (Sampling(temperature=0), Sampling(temperature=0.8, top_k=50, repetition_penalty=1.2)):
        with_graphs, without = (
            torch.stack(list(generate(model, 150, sampling, prompt=tokens, seed=3, graphs=graphs)))
            for graphs in (True, False)
        )
        assert not with_graphs.is_cuda
        assert torch.equal(with_graphs, without)


def test_graphs_that_become_garbage_do_not_disturb_a_capture(monkeypatch):
    model = make(power=2, heads=2)
    prefix = Prefix.prefill(model, text(100), cache_policy="state")

    def decoded() -> Decoder:
        decoder = Decoder(model, prefix, cache_policy="state")
        for tokens in text(3).unbind(1):
            decoder.step(tokens)
        return decoder

    earlier, step = [decoded()], model.step

    def step_with_garbage(*arguments):
        if earlier and torch.cuda.is_current_stream_capturing():
            cycle = [earlier.pop()]
            cycle.append(cycle)
            del cycle
            # Far more objects than the collector waits for.
            assert [[] for _ in range(20 * gc.get_threshold()[0])]
        return step(*arguments)

    monkeypatch.setattr(model, "step", step_with_garbage)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        decoded()
    assert not earlier


def test_texts_of_different_lengths_decode_together_as_alone():
    for kind in ({"power": 2, "heads": 8}, {"mixer": "softmax", "heads": 2, "gating": "none", "rotary": "fixed"}):
        model, tokens, new = make(**kind), text(70), text(100, seed=2)
        prefixes = [Prefix.prefill(model, row[None, :n]) for row, n in zip(tokens, (70, 33, 5), strict=True)]
        together, _ = decode(model, Prefix.cat(prefixes), new)
        for row, prefix in enumerate(prefixes):
            alone, _ = decode(model, prefix, new[row : row + 1])
            assert error(together[row], alone[0].double()) <= 2e-2


def test_a_stop_token_ends_generation_where_it_came():
    model, tokens = make(power=2, heads=2), text(20, batch=1)
    greedy = [int(token) for token in generate(model, 30, Sampling(temperature=0), prompt=tokens)]
    stopped = [int(t) for t in generate(model, 30, Sampling(temperature=0), prompt=tokens, stop=greedy[10])]
    assert stopped == greedy[: greedy.index(greedy[10]) + 1]


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[4]])
def test_steps_wait_for_nothing_and_take_no_memory(kind):
    model, tokens = make(**kind), text(200)
    cache_policy = "auto" if kind.get("mixer") == "softmax" else "state"
    decoder = Decoder(
        model, Prefix.prefill(model, tokens, cache_policy=cache_policy), tokens=400, cache_policy=cache_policy
    )
    token = tokens[:, 0].clone()
    sampling, generator = Sampling(top_k=20, top_p=0.9, min_p=0.01), torch.Generator("cuda").manual_seed(0)
    for _ in range(140):  # steps and folds are captured
        token = sampling.choose(decoder.step(token), None, generator)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(200):
            token = sampling.choose(decoder.step(token), None, generator)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_allocated() <= before + 4096
    assert decoder.logits.isfinite().all()


@pytest.mark.parametrize(
    ("gating", "rotary"), [("scalar", "scale"), ("vector", "pairs"), ("scalar", "fixed"), ("none", "scale")]
)
def test_gates_and_scales_of_a_step_are_exact(gating, rotary):
    from sympow.layers.gates import make_gate
    from sympow.layers.mixers import gate_and_rotate
    from sympow.layers.rotations import make_rotation

    torch.manual_seed(0)
    layers = [make_gate(gating, 768, 12, 64), make_rotation(rotary, 768, 12, 64, 65_536)]
    gate, rotation = (layer.cuda().bfloat16() for layer in layers)
    for parameter in (*gate.parameters(), *rotation.parameters()):
        torch.nn.init.normal_(parameter, std=0.05)
    x = torch.randn(16, 1, 768, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        log_gamma, theta, beta = gate_and_rotate(x, gate, rotation)
        expected = (gate.double()(x.double()), *rotation.double()(x.double()))
    for found, precise in zip((log_gamma, theta, beta), expected, strict=True):
        assert (found is None) == (precise is None)
        if found is not None:
            assert found.shape == precise.shape
            assert error(found, precise) <= 1e-6
