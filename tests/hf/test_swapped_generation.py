"""Caches of swapped models: decoding, padding, beams and continuation equal a pass over the whole text."""

import copy

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from support import assert_close
from sympow.hf import StateLayer, swapped_layers
from sympow.ops.state import State
from sympow.ops.window import Window

MODELS = (
    *("llama", "mistral-window", "gpt2"),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen2", "qwen3")),
)
PADDING = 49
GREEDY = {"do_sample": False, "pad_token_id": PADDING}


def read(model, ids, segments, cache=None):
    """Logits of a text that is read in segments with a cache, and the cache."""
    found, start = [], 0
    for length in segments:
        out = model(ids[:, start : start + length], past_key_values=cache, use_cache=True)
        cache, start = out.past_key_values, start + length
        found.append(out.logits)
    return torch.cat(found, dim=1), cache


def states(model, cache):
    return [cache.layers[index] for index in swapped_layers(model)]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layers", ["all", "every-other", [0]])
@pytest.mark.parametrize("segments", [[1] * 24, [5, 1, 1, 1, 7, 1, 1, 7]])
@torch.no_grad()
def test_a_text_in_segments_gives_what_one_pass_gives(swapped, tokens, kind, layers, segments):
    model, ids = swapped(kind, layers=layers), tokens(2, 24)
    expected = model(ids, use_cache=False).logits
    found, cache = read(model, ids, segments)
    assert_close(found, expected, 1e-9, "logits")
    assert cache.get_seq_length() == 24
    assert {type(layer) for layer in states(model, cache)} == {StateLayer}
    assert all(layer.get_seq_length() == 24 for layer in cache.layers)
    kept = [cache.layers[i] for i in range(3) if i not in swapped_layers(model)]
    assert all(layer.keys is not None for layer in kept)


@pytest.mark.parametrize("policy", ["auto", "state", "keys"])
@torch.no_grad()
def test_keys_and_values_become_a_state_when_it_is_smaller(swapped, tokens, policy):
    model, ids = swapped("llama", cache_policy=policy, layers=[0, 2]), tokens(1, 60)
    expected = model(ids, use_cache=False).logits
    for segments in ([1] * 60, [3, 50, 1, 6], [60]):
        found, cache = read(model, ids, segments)
        assert_close(found, expected, 1e-9, "logits")
        # 36 features of 9 numbers take less than the keys and values of 60 tokens.
        for layer in states(model, cache):
            folded = isinstance(layer.past, State) or layer.past.kv is not None
            assert folded == (policy != "keys")
    few, cache = read(model, ids[:, :3], [2, 1])
    assert_close(few, expected[:, :3], 1e-9, "logits")
    for layer in states(model, cache):
        held = isinstance(layer.past, Window) and layer.past.kv is None
        assert held == (policy != "state")


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("layers", ["all", "every-other"])
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_left_padding_changes_nothing(swapped, tokens, pad_left, kind, layers, beams):
    model = swapped(kind, layers=layers)
    texts = [row[:length] for row, length in zip(tokens(3, 8, vocabulary=PADDING), (8, 5, 1), strict=True)]
    ids, mask = pad_left(texts, token=PADDING)
    options = {"max_new_tokens": 6, "num_beams": beams, **GREEDY}
    together = model.generate(ids, attention_mask=mask, **options)
    for text, row in zip(texts, together, strict=True):
        alone = model.generate(text[None], **options)[0]
        assert row[8:].tolist() == alone[len(text) :].tolist()


@torch.no_grad()
def test_the_logits_of_a_padded_text_are_those_of_the_text(swapped, tokens):
    model, ids = swapped(), tokens(2, 10)
    expected = model(ids).logits
    # Padding on the left, on the right and in between.
    places = torch.tensor([2, 3, 4, 7, 8, 9, 10, 12, 13, 14])
    padded, mask = torch.full((2, 16), PADDING), torch.zeros(2, 16, dtype=torch.long)
    padded[:, places], mask[:, places] = ids, 1
    found = model(padded, attention_mask=mask).logits
    assert_close(found[:, places], expected, 1e-9, "logits")
    cache = None
    for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 16)):
        out = model(padded[:, start:stop], attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
        cache, inside = out.past_key_values, (places >= start) & (places < stop)
        assert_close(out.logits[:, places[inside] - start], expected[:, inside], 1e-9, f"logits from {start}")


@pytest.mark.parametrize("layers", ["all", [0, 2]])
@torch.no_grad()
def test_a_mask_may_be_of_more_or_of_fewer_tokens_than_so_far(swapped, tokens, layers):
    model, ids = swapped(layers=layers), tokens(2, 20)
    expected = model(ids).logits
    # Columns for tokens to come, whatever they hold, do not count.
    longer = torch.cat([torch.ones(2, 20), torch.zeros(2, 10)], dim=1)
    for use_cache in (False, True):
        assert_close(model(ids, attention_mask=longer, use_cache=use_cache).logits, expected, 1e-9, "logits")
    cache, segments = DynamicCache(), ids.split([11, 1, 8], dim=1)
    found = [model(segment, attention_mask=longer, past_key_values=cache).logits for segment in segments]
    assert_close(torch.cat(found, dim=1), expected, 1e-9, "logits")
    # A mask of the new tokens alone: the first of these is padding.
    if layers == "all":
        _, cache = read(model, ids[:, :12], [12])
        new = torch.cat([torch.full((2, 1), PADDING), ids[:, 12:]], dim=1)
        mask = (torch.arange(9) > 0).long().expand(2, 9)
        assert_close(
            model(new, attention_mask=mask, past_key_values=cache).logits[:, 1:], expected[:, 12:], 1e-9, "logits"
        )


@pytest.mark.parametrize("layers", ["all", [0, 2]])
@torch.no_grad()
def test_positions_must_continue_those_of_a_cache(swapped, tokens, layers):
    model, ids = swapped(layers=layers), tokens(2, 12)
    expected = model(ids).logits
    mask = (torch.arange(12) >= torch.tensor([[3], [0]])).long()
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    padded = model(ids, attention_mask=mask, position_ids=counted).logits

    def after(start, positions, before=None, mask=None):
        """Logits of the tokens from `start` on, which get these positions."""
        cache = model(ids[:, :start], use_cache=True, attention_mask=mask, position_ids=before).past_key_values
        return model(ids[:, start:], past_key_values=cache, attention_mask=mask, position_ids=positions).logits

    for start in (8, 11):
        places = torch.arange(start, 12).unsqueeze(0)
        assert_close(after(start, places), expected[:, start:], 1e-9, "logits")
        for wrong in (places + 3, places - start):
            message = f"position_ids must continue those .*got {wrong[0, 0]} for the token after {start} others"
            with pytest.raises(ValueError, match=message):
                after(start, wrong)
    assert_close(after(8, counted[:, 8:], counted[:, :8], mask), padded[:, 8:], 1e-9, "logits")
    with pytest.raises(ValueError, match="position_ids must continue those"):
        after(8, counted[:, 8:] - 1, counted[:, :8], mask)
    gap = torch.tensor([[0, 1, 2, 5, 6, 7]])
    for cache in (None, DynamicCache()):
        with pytest.raises(ValueError, match=r"position_ids must increase by 1 .*got 5 after 2"):
            model(ids[:, :6], position_ids=gap, past_key_values=cache)
    for documents in ({"position_ids": gap % 5 % 3}, {"seq_idx": gap // 5}, {"cu_seq_lens_q": torch.tensor([0, 3, 6])}):
        with pytest.raises(ValueError, match="not supported with packed documents"):
            model(ids[:1, :6], past_key_values=DynamicCache(), **documents)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(("beams", "layers"), [(1, "all"), (1, "every-other"), (4, "all"), (4, [0, 1])])
@torch.no_grad()
def test_generation_with_a_cache_equals_recomputation(swapped, tokens, kind, beams, layers):
    model, ids = swapped(kind, layers=layers), tokens(2, 6)
    options = {"max_new_tokens": 10, "num_beams": beams, "num_return_sequences": beams, **GREEDY}
    found = model.generate(ids, **options)
    assert found.tolist() == model.generate(ids, use_cache=False, **options).tolist()
    assert len(set(found.flatten().tolist())) > 3, "the model repeats itself: choose another seed"


@pytest.mark.parametrize("layers", ["all", "every-other"])
@pytest.mark.parametrize("make_cache", [lambda model: DynamicCache(config=model.config), lambda model: DynamicCache()])
@torch.no_grad()
def test_a_given_cache_is_continued(swapped, tokens, layers, make_cache):
    model, ids = swapped("qwen3", layers=layers), tokens(2, 6)
    whole = model.generate(ids, max_new_tokens=9, **GREEDY)
    cache = make_cache(model)
    first = model.generate(ids, max_new_tokens=4, past_key_values=cache, **GREEDY)
    assert cache.get_seq_length() == 9
    fork = copy.deepcopy(cache)
    for past in (cache, fork):
        assert model.generate(first, max_new_tokens=5, past_key_values=past, **GREEDY).tolist() == whole.tolist()


@pytest.mark.parametrize("layers", ["all", "every-other", [0, 1], [1, 2]])
@torch.no_grad()
def test_an_offloaded_cache_is_brought_back_in_time(swapped, tokens, layers, monkeypatch):
    """A cache whose keys and values are not there until they are prefetched; streams of a GPU are stood in for."""

    class Stream:
        def wait_stream(self, other):
            """All is done at once."""

        def __enter__(self):
            return self

        def __exit__(self, *_):
            """Raises what was raised."""

    gone = []

    def offload(layer):
        gone.append(layer)
        layer.kept, layer.keys, layer.values = (layer.keys, layer.values), "offloaded", "offloaded"

    def prefetch(layer):
        if layer.keys == "offloaded":
            layer.keys, layer.values = layer.kept

    monkeypatch.setattr(DynamicLayer, "offload", offload)
    monkeypatch.setattr(DynamicLayer, "prefetch", prefetch)
    monkeypatch.setattr(DynamicLayer, "get_seq_length", lambda layer: getattr(layer, "seen", 0))
    update = DynamicLayer.update

    def count(layer, keys, values, *others, **named):
        layer.seen = getattr(layer, "seen", 0) + keys.shape[2]
        return update(layer, keys, values, *others, **named)

    monkeypatch.setattr(DynamicLayer, "update", count)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    model, ids = swapped(layers=layers), tokens(2, 12)
    cache = DynamicCache(config=model.config)
    cache.offloading, cache.only_non_sliding, cache.prefetch_stream = True, True, Stream()
    found, _ = read(model, ids, [7, 1, 1, 3], cache)
    assert_close(found, model(ids, use_cache=False).logits, 1e-9, "logits")
    # Every softmax layer, after each of the four calls.
    assert len(gone) == 4 * (3 - len(swapped_layers(model)))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@torch.no_grad()
def test_padding_reaches_swapped_layers_with_any_attention_function(swapped, tokens, implementation):
    ids = tokens(2, 8)
    mask = (torch.arange(8) >= torch.tensor([[3], [0]])).long()
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    # Before any softmax layer, since eager attention rounds to float32.
    for layers, place in (("all", 3), ([0, 1], 2)):
        model = swapped(layers=layers)
        expected = model(ids[:1, 3:], output_hidden_states=True).hidden_states[place]
        model.set_attn_implementation(implementation)
        found = model(ids, attention_mask=mask, position_ids=positions, output_hidden_states=True).hidden_states[place]
        assert_close(found[:1, 3:], expected, 1e-9, "features")


@torch.no_grad()
def test_a_model_without_softmax_makes_no_mask_of_all_pairs(swapped, tokens, monkeypatch):
    from transformers import masking_utils

    ids, mask = tokens(2, 8), (torch.arange(8) >= torch.tensor([[3], [0]])).long()
    model, hybrid = swapped(), swapped(layers=[0])

    def refuse(*args, **kwargs):
        raise AssertionError("a mask of all pairs is made")

    monkeypatch.setitem(masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", refuse)
    model(ids, attention_mask=mask)
    with pytest.raises(AssertionError, match="a mask of all pairs"):
        hybrid(ids, attention_mask=mask)


@pytest.mark.parametrize("layers", ["all", "every-other"])
@torch.no_grad()
def test_assisted_generation_gives_what_the_model_gives_alone(swapped, pretrained, tokens, layers):
    model, ids = swapped(layers=layers), tokens(1, 6)
    ids = torch.cat([ids, ids], dim=1)
    expected = model.generate(ids, max_new_tokens=12, **GREEDY)
    assert model.generate(ids, max_new_tokens=12, prompt_lookup_num_tokens=3, **GREEDY).tolist() == expected.tolist()
    for assistant in (pretrained(), swapped(seed=5), swapped(layers=layers)):
        found = model.generate(ids, max_new_tokens=12, assistant_model=assistant, **GREEDY)
        assert found.tolist() == expected.tolist()
    # The model without its last layers is the assistant.
    for layer in (1, 2):
        found = model.generate(ids, max_new_tokens=12, assistant_early_exit=layer, **GREEDY)
        assert found.tolist() == expected.tolist()


@torch.no_grad()
def test_what_swapped_layers_cannot_do_is_refused(swapped, pretrained, tokens):
    model, ids = swapped(layers=[1]), tokens(1, 4)
    cases = [
        (ValueError, "past_key_values must be a DynamicCache", {"past_key_values": StaticCache(model.config, 16)}),
        (ValueError, "attention_mask must be .batch, tokens so far.", {"attention_mask": torch.ones(1, 1, 4, 4)}),
        (ValueError, "attention_mask must be .1, at least 4.", {"attention_mask": torch.ones(1, 3)}),
        (TypeError, "cu_seq_lens_q must be a tensor, got list", {"cu_seq_lens_q": [0, 1, 4]}),
        (ValueError, "swapped layers have no paged cache", {"cache": object(), "use_cache": False}),
    ]
    for kind, message, given in cases:
        with pytest.raises(kind, match=message):
            model(ids, **given)
    cache = pretrained()(ids, use_cache=True).past_key_values
    with pytest.raises(
        ValueError, match="must have a state for layer 1, which was swapped; it has keys and values of 4"
    ):
        model(ids, past_key_values=cache)
    cache = DynamicCache(config=pretrained(num_hidden_layers=1).config)
    with pytest.raises(ValueError, match="must have an entry for layer 1, which was swapped; it has 1"):
        model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must be a DynamicCache"):
        model.generate(ids, max_new_tokens=2, cache_implementation="static", **GREEDY)


@pytest.mark.parametrize("layers", ["all", [0, 2]])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(swapped, tokens, layers):
    model, ids = swapped(layers=layers), tokens(2, 12)
    lengths = ((5, 7), (12,))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])
    found = model(ids, position_ids=positions).logits
    for row, (text, cuts) in enumerate(zip(ids, lengths, strict=True)):
        for document, logits in zip(text.split(cuts), found[row].split(cuts), strict=True):
            assert_close(logits, model(document[None]).logits[0], 1e-9, "logits")
    with pytest.raises(ValueError, match="not supported with packed documents"):
        model(ids, position_ids=positions, use_cache=True)


@pytest.mark.parametrize(("kind", "layers"), [("llama", [0, 2]), ("gpt2", [0, 2]), ("gpt2", "all")])
@torch.no_grad()
def test_softmax_layers_find_the_packed_documents_that_swapped_ones_do(swapped, tokens, kind, layers):
    model, ids = swapped(kind, layers=layers), tokens(1, 12)
    cuts = (5, 1, 6)
    positions = torch.cat([torch.arange(length) for length in cuts])[None]
    numbers = torch.repeat_interleave(torch.arange(3), torch.tensor(cuts))[None]
    expected = torch.cat([model(document).logits for document in ids.split(cuts, dim=1)], dim=1)
    for marks in (
        {"position_ids": positions, "attention_mask": torch.ones_like(ids)},
        {"seq_idx": numbers},
        {"cu_seq_lens_q": torch.tensor([0, 5, 6, 12], dtype=torch.int32)},
    ):
        assert_close(model(ids, **marks).logits, expected, 1e-9, "logits")
    # Two documents with padding between them, whose positions the second one goes on from.
    first, last = ids.split(6, dim=1)
    mask, positions = torch.tensor([[1] * 6 + [0] * 2 + [1] * 6]), torch.arange(6)[None]
    marks = {"attention_mask": mask, "position_ids": torch.cat([positions, mask[:, 6:8], positions + 1], dim=1)}
    found = model(torch.cat([first, first[:, :2], last], dim=1), **marks).logits[:, mask[0] != 0]
    expected = torch.cat([model(first).logits, model(last, position_ids=positions + 1).logits], dim=1)
    assert_close(found, expected, 1e-9, "logits")
