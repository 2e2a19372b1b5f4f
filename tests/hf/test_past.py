"""What caches of our models and of swapped ones have in common: their states are one class, `Past`."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import DynamicCache

from support import assert_close
from sympow.hf import StateLayer, SympowCache, swapped_layers
from sympow.hf.past import Past
from sympow.ops.state import State


@dataclass
class Cached:
    """A model, and how it holds its past."""

    model: Any

    def cache(self):
        """An empty cache, whose entries can record tokens before the first one."""
        if not swapped_layers(self.model):
            return SympowCache()
        cache = DynamicCache(config=self.model.config)
        for index in swapped_layers(self.model):
            cache.layers[index] = StateLayer()
        return cache

    def pasts(self, cache) -> list[Past]:
        return [cache] if isinstance(cache, Past) else [cache.layers[index] for index in swapped_layers(self.model)]

    def logits(self, ids):
        """Of the whole text in one call."""
        return self.model(ids, use_cache=False).logits

    def read(self, ids, segments, cache=None):
        """Logits of a text that is read in segments, and the cache."""
        cache = self.cache() if cache is None else cache
        parts = ids.split(segments, dim=1)
        return torch.cat([self.model(x, past_key_values=cache, use_cache=True).logits for x in parts], dim=1), cache


@pytest.fixture(params=["own", "softmax", "swapped", "hybrid"])
def cached(request, make, swapped):
    models = {
        "own": make,
        "softmax": lambda: make(mixer="softmax"),
        "swapped": swapped,
        "hybrid": lambda: swapped(layers=[0, 2]),
    }
    return Cached(models[request.param]())


def without_softmax(test):
    """For what caches of softmax attention do in another way, or transformers' own layers in a hybrid."""
    return pytest.mark.parametrize("cached", ["own", "swapped"], indirect=True)(test)


CHANGES = {
    "reorder_cache": (torch.tensor([2, 0, 1]), [2, 0, 1]),
    "batch_select_indices": (torch.tensor([1, 1]), [1, 1]),
    "batch_repeat_interleave": (2, [0, 0, 1, 1, 2, 2]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("segments", [[6], [6, 1], [30, 1]], ids=str)
@torch.no_grad()
def test_sequences_are_selected_reordered_and_repeated(cached, tokens, segments, change):
    (argument, rows), length, ids = CHANGES[change], sum(segments), tokens(3, 40)
    expected = cached.logits(ids[:, : length + 2])
    _, cache = cached.read(ids[:, :length], segments)
    getattr(cache, change)(argument)
    assert all(past.batch_size == len(rows) for past in cached.pasts(cache))
    assert cache.get_seq_length() == length
    found, _ = cached.read(ids[rows, length : length + 2], 1, cache)
    assert_close(found, expected[rows, -2:], 1e-9, "logits")


@pytest.mark.parametrize("change", CHANGES)
@without_softmax
@torch.no_grad()
def test_so_are_those_to_be_read_again_from_the_first_token_on(cached, tokens, change):
    (argument, rows), ids, cache = CHANGES[change], tokens(3, 9), cached.cache()
    cache.activate_past_recording()
    cached.read(ids[:, :8], 8, cache)
    cache.crop(-3)
    getattr(cache, change)(argument)
    assert all(past.batch_size == len(rows) for past in cached.pasts(cache))
    found, _ = cached.read(ids[rows, 5:7], 2, cache)
    assert_close(found, cached.logits(ids[rows, :7])[:, 5:], 1e-9, "logits")


@pytest.mark.parametrize("first", [0, 5])
@torch.no_grad()
def test_removed_tokens_leave_no_trace(cached, tokens, first):
    ids, other, cache = tokens(2, 12), tokens(2, 12, seed=9), cached.cache()
    if first:
        cached.read(ids[:, :first], [first - 1, 1], cache)
    cache.activate_past_recording()
    cached.read(torch.cat([ids[:, first:8], other[:, :2]], dim=1), [6 - first, 4], cache)
    past = cached.pasts(cache)[0]
    with pytest.raises(ValueError, match=f"tokens_to_remove is 11 tokens, but {10 - first} were recorded"):
        past.crop(-11)
    cache.crop(torch.tensor(-2) if past is cache else -2)  # a tensor is how assisted generation counts
    assert cache.get_seq_length() == 8
    assert type(past.get_seq_length()) is int
    cache.reorder_cache(torch.tensor([1, 0]))
    expected = cached.logits(ids).flip(0)[:, 8:]
    found, _ = cached.read(ids.flip(0)[:, 8:], [1, 3], cache)
    assert_close(found, expected, 1e-9, "logits")
    cache.crop(-4)
    assert past.pending is None
    found, _ = cached.read(ids.flip(0)[:, 8:], 4, cache)
    assert_close(found, expected, 1e-9, "logits")
    cache.crop(0)
    with pytest.raises(ValueError, match="but 0 were recorded"):
        past.crop(-1)


@without_softmax
@torch.no_grad()
def test_a_cache_without_all_its_tokens_takes_another_batch(cached, tokens):
    ids, cache = tokens(3, 6), cached.cache()
    cache.activate_past_recording()
    cached.read(tokens(2, 4, seed=5), 4, cache)
    cache.crop(-4)
    assert (cache.get_seq_length(), cache.batch_size) == (0, -1)
    assert_close(cached.read(ids, 6, cache)[0], cached.logits(ids), 1e-9, "logits")
    assert cache.batch_size == 3


@torch.no_grad()
def test_tokens_are_removed_only_where_they_were_recorded(cached, tokens):
    _, cache = cached.read(tokens(), 12)
    past = cached.pasts(cache)[0]
    for removed in (-2, torch.tensor(-2)):
        with pytest.raises(ValueError, match=r"is 2 tokens, but 0 were recorded: .* only if activate_past_recording"):
            past.crop(removed)
    with pytest.raises(ValueError, match="tokens_to_remove must not be positive"):
        past.crop(3)
    past.crop(0)
    assert past.get_seq_length() == 12
    assert not cache.is_croppable
    with pytest.raises(TypeError, match="update is not supported"):
        past.update(None, None)


@without_softmax
@torch.no_grad()
def test_a_reset_cache_is_an_empty_one_that_records_nothing(cached, tokens):
    # Of layers of our own: before 5.18, transformers fills its own with zeros instead.
    ids, cache = tokens(1, 9), cached.cache()
    cached.model.generate(
        ids[:, :6], past_key_values=cache, max_new_tokens=4, prompt_lookup_num_tokens=2, pad_token_id=49
    )
    assert all(past.record_past for past in cached.pasts(cache))
    cache.reset()
    assert not any(past.record_past or past.nbytes for past in cached.pasts(cache))
    assert cache.get_seq_length() == 0
    found, _ = cached.read(ids, 1, cache)
    assert_close(found, cached.logits(ids), 1e-9, "logits")
    with pytest.raises(ValueError, match="but 0 were recorded"):
        cached.pasts(cache)[0].crop(-1)


@torch.no_grad()
def test_what_was_read_in_inference_mode_goes_on_outside_of_it(cached, tokens):
    ids = tokens(1, 9)
    expected = cached.logits(ids)
    with torch.inference_mode():
        _, cache = cached.read(ids[:, :6], [5, 1])
    found, _ = cached.read(ids[:, 6:], [1, 1, 1], cache)
    assert_close(found, expected[:, 6:], 1e-9, "logits")


def test_gradients_pass_through_a_cache(cached, tokens):
    ids = tokens(1, 12)
    weight = next(parameter for name, parameter in cached.model.named_parameters() if "v_proj" in name or "qkv" in name)

    def gradient(segments):
        cached.model.zero_grad()
        logits, _ = cached.read(ids, segments)
        logits.log_softmax(-1)[:, -1, 0].sum().backward()
        return weight.grad.clone()

    expected = gradient([12])
    assert expected.abs().max() > 1e-6
    assert_close(gradient([7, 1, 4]), expected, 1e-9, "gradient", relative=True)


@pytest.mark.slow
@pytest.mark.parametrize("cached", ["own", "hybrid"], indirect=True)
@torch.no_grad()
def test_a_compiled_model_decodes_beyond_the_keys_and_values_of_a_state(cached, tokens):
    """A state replaces the keys and values of more than 5 or 19 tokens, in a step of one token or in a segment."""
    few = isinstance(cached.cache(), Past)
    torch.compiler.reset()
    compiled = Cached(torch.compile(cached.model, backend="eager"))
    for segments in ([4, 1, 1, 1], [2, 1, 1, 3]) if few else ([18, 1, 1, 1], [16, 1, 1, 4]):
        ids = tokens(2, sum(segments))
        found, cache = compiled.read(ids, segments, cached.cache())
        assert_close(found, cached.logits(ids), 1e-9, "logits")
        past = cached.pasts(cache)[0]
        assert isinstance((past.state[0] if few else past.past), State) or past.past.kv is not None
