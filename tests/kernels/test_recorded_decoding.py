"""Decoding with captured steps and folds, on a fake of CUDA graphs.

Kernels run in Triton's interpreter. As with CUDA graphs, a capture changes no tensor, and a replay runs the device's
work only: the decoder must update its counters on the host itself.
"""

from functools import partial

import pytest
import torch

from support import assert_close, interpreted

pytest.importorskip("triton", reason="needs Triton")

from sympow import GPT, GPTConfig
from sympow.generation import cache as cache_module
from sympow.generation import decoder as decoding_module
from sympow.generation.cache import break_even_tokens
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.ops import window as window_module

pytestmark = interpreted
VOCABULARY = 23


@pytest.fixture
def replays(monkeypatch):
    """Replaces `CapturedCall` by a fake; each replay appends to the list."""
    host, made = [True], []

    class StandIn:
        def __init__(self, work, *, capture, optional):
            self.work, self.calls = work, 0

        def __call__(self):
            self.calls += 1
            is_step = isinstance(self.work, partial)
            if self.calls == 1:
                self.work()
                return
            host[0] = False
            if self.calls == 2:
                # A step is a function of the decoder, a fold a method of its cache.
                cache = self.work.args[0]._cache if is_step else self.work.__self__
                tensors = [x for layer in cache.layers for x in layer._tensors().values()]
                before = [x.clone() for x in tensors]
                self.work()
                for tensor, value in zip(tensors, before, strict=True):
                    tensor.copy_(value)
            self.work()
            host[0] = True
            made.append("step" if is_step else "fold")

    monkeypatch.setattr(window_module, "_on_host", lambda: host[0])
    monkeypatch.setattr(decoding_module, "CapturedCall", StandIn)
    monkeypatch.setattr(cache_module, "CAPACITY", 4)
    return made


@pytest.mark.parametrize(
    ("cache_policy", "options"),
    [
        ("state", {"power": 2}),
        ("auto", {"power": 2}),
        ("keys", {"power": 4}),
        ("auto", {"mixer": "softmax"}),
    ],
)
@torch.no_grad()
def test_replayed_steps_give_the_logits_of_the_forward_pass(replays, cache_policy, options):
    torch.manual_seed(0)
    how = {"backend": "triton", "form": "attention"} if "power" in options else {}
    shape = {"vocab_size": VOCABULARY, "layers": 1, "width": 12, "heads": 2, "rotary": "scale", "max_document": 50}
    model = GPT(GPTConfig(**shape, **options, **how)).eval()
    for parameter in model.blocks.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    tokens = torch.randint(VOCABULARY, (1, 20))
    expected = model(tokens, return_state=False)[0]
    decoder = Decoder(model, Prefix.prefill(model, tokens[:, :3], cache_policy=cache_policy), cache_policy=cache_policy)
    for position in range(3, 20):
        logits = decoder.step(tokens[:, position])
        assert_close(logits, expected[:, position], 1e-5, f"token {position}", relative=True)
    assert replays.count("step") > 10
    if cache_policy == "state":
        assert replays.count("fold") == 3  # four folds of four tokens, the first of them not replayed
    if cache_policy == "auto" and "power" in options:
        assert 3 < break_even_tokens(model) < 17
        assert decoder.folded
    closed = decoder.close()
    assert closed.seen.nonzero()[:, 1].tolist() == tokens.unique().tolist(), "replays record what was decoded, too"
    after = closed.extend(model, tokens[:, :2])
    whole = model(torch.cat([tokens, tokens[:, :2]], dim=1), return_state=False)[0][:, -1]
    assert_close(after.logits, whole, 1e-5, "prefix on", relative=True)
