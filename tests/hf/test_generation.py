"""`generate()` of transformers: every search strategy gives the tokens that the forward pass implies."""

import copy
from functools import partial
from itertools import product

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

from accelerate import cpu_offload
from transformers import DynamicCache, GenerationConfig

from support import assert_close
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.hf import SympowCache, to_native
from sympow.ops.state import State
from sympow.ops.window import Window

PADDING = 49


@pytest.fixture
def make(make):
    """Models that do not repeat one token from the start."""
    return partial(make, noise=0.3)


def greedily(model, text, count):
    """Greedy decoding by a forward pass over the whole text for each token."""
    ids = text[None]
    for _ in range(count):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0]


def log_probability(model, ids, start):
    """The log-probability of the tokens from `start` on, given those before: (b,)."""
    logs = model(ids, use_cache=False).logits.log_softmax(-1)[:, start - 1 : -1]
    return logs.gather(-1, ids[:, start:, None]).sum((1, 2))


@pytest.mark.parametrize(
    "kind", [{"power": 2}, {"power": 4}, {"gating": "none", "rotary": "fixed"}, {"mixer": "softmax"}]
)
@torch.no_grad()
def test_greedy_is_the_argmax_of_the_forward(make, tokens, kind):
    model, text = make(**kind), tokens(1, 5)[0]
    out = model.generate(text[None], max_new_tokens=8, do_sample=False)
    assert out[0].tolist() == greedily(model, text, 8).tolist()


@pytest.mark.parametrize("kind", [{"power": 2}, {"power": 4}, {"mixer": "softmax"}])
@pytest.mark.parametrize("beams", [1, 3])
@torch.no_grad()
def test_a_left_padded_batch_gives_what_its_texts_give_alone(make, tokens, pad_left, kind, beams):
    model = make(**kind)
    texts = [row[:length] for row, length in zip(tokens(3, 8, vocabulary=PADDING), (8, 5, 1), strict=True)]
    ids, mask = pad_left(texts, token=PADDING)
    options = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": PADDING}
    together = model.generate(ids, attention_mask=mask, **options)
    for text, row in zip(texts, together, strict=True):
        alone = model.generate(text[None], **options)[0]
        assert row[8:].tolist() == alone[len(text) :].tolist()


@pytest.mark.parametrize("kind", [{"power": 2}, {"mixer": "softmax"}])
@torch.no_grad()
def test_a_repetition_penalty_does_what_it_does_in_native_generation(make, tokens, kind):
    model, ids = make(**kind), tokens(2, 5)
    options = {"max_new_tokens": 8, "do_sample": False}
    out = model.generate(ids, repetition_penalty=1.5, **options)
    assert not torch.equal(out, model.generate(ids, **options)), "the penalty changes nothing: choose another seed"
    native = to_native(model)
    prefix = Prefix.prefill(native, ids)
    for given in ({"prompt": ids}, {"prefix": prefix}):
        sampling = Sampling(temperature=0, repetition_penalty=1.5)
        found = torch.stack(list(generate(native, 8, sampling, **given)), dim=1)
        assert torch.equal(out[:, 5:], found)


@torch.no_grad()
def test_sampling_with_a_cache_draws_what_it_draws_without(make, tokens):
    model, ids = make(), tokens(3, 5)
    drawn = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        drawn.append(
            model.generate(ids, max_new_tokens=6, do_sample=True, top_k=20, temperature=0.8, use_cache=use_cache)
        )
    assert torch.equal(*drawn)
    torch.manual_seed(3)
    several = model.generate(ids, max_new_tokens=6, do_sample=True, num_return_sequences=2)
    assert several.shape == (6, 11)


@torch.no_grad()
def test_beam_search_wide_enough_is_brute_force(make, tokens):
    """With a beam for every prefix, beam search finds the best of all continuations."""
    model, text = make(vocab_size=4), tokens(1, 5, vocabulary=4)[0]
    everything = torch.tensor([[*text.tolist(), *rest] for rest in product(range(4), repeat=4)])
    scores = log_probability(model, everything, 5)
    best = scores.argsort(descending=True)[:3]
    out = model.generate(
        text[None],
        max_new_tokens=4,
        num_beams=4**3,
        num_return_sequences=3,
        length_penalty=0.0,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    assert out.sequences.tolist() == everything[best].tolist()
    assert_close(out.sequences_scores.double(), scores[best], 1e-5, "scores")


@torch.no_grad()
def test_narrow_beams_follow_the_reordered_states(make, tokens):
    """Compares with a beam search without a state, which has nothing to reorder."""
    model, text, width = make(vocab_size=6), tokens(1, 5, vocabulary=6)[0], 3
    beams, scores = text[None], torch.zeros(1, dtype=torch.float64)
    origins = []
    for _ in range(7):
        logs = model(beams, use_cache=False).logits[:, -1].log_softmax(-1)
        scores, chosen = (scores[:, None] + logs).flatten().topk(width)
        origin = chosen // 6
        origins.append(origin.tolist())
        beams = torch.cat([beams[origin], (chosen % 6)[:, None]], dim=1)
    assert any(origin != sorted(set(origin)) for origin in origins[1:]), "no state was reordered: choose another seed"
    options = {"max_new_tokens": 7, "num_beams": width, "num_return_sequences": width, "do_sample": False}
    out = model.generate(text[None], length_penalty=0.0, **options)
    assert out.tolist() == beams.tolist()
    assert torch.equal(model.generate(text[None], length_penalty=0.0, use_cache=False, **options), out)


class TestAssisted:
    @pytest.mark.parametrize("kind", [{"power": 2}, {"power": 4}, {"mixer": "softmax"}])
    @torch.no_grad()
    def test_an_assistant_changes_nothing_but_the_work(self, make, tokens, kind):
        """The assistant is a perturbed copy of the model, so that some of its tokens are accepted and some are not."""
        model, text = make(**kind), tokens(1, 6)
        assistant = copy.deepcopy(model)
        for parameter in assistant.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(parameter)
        expected = model.generate(text, max_new_tokens=24, do_sample=False)
        calls = []
        model.model.register_forward_hook(lambda *_: calls.append(1))
        out = model.generate(text, max_new_tokens=24, do_sample=False, assistant_model=assistant)
        assert torch.equal(out, expected)
        assert len(calls) < 24, "nothing was accepted"

    @torch.no_grad()
    def test_prompt_lookup(self, make):
        model, text = make(), torch.tensor([[3, 4, 5, 6, 3, 4, 5, 6, 3, 4]])
        expected = model.generate(text, max_new_tokens=12, do_sample=False)
        assert torch.equal(
            model.generate(text, max_new_tokens=12, do_sample=False, prompt_lookup_num_tokens=3), expected
        )


class TestContinuing:
    @torch.no_grad()
    def test_a_prompt_read_once_serves_several_continuations(self, make, tokens):
        model, prompt = make(), tokens(1, 7)
        cache = model(prompt, use_cache=True).past_key_values
        for seed in (5, 6):
            whole = torch.cat([prompt, tokens(1, 3, seed=seed)], dim=1)
            expected = model.generate(whole, max_new_tokens=5, do_sample=False)
            out = model.generate(whole, past_key_values=copy.deepcopy(cache), max_new_tokens=5, do_sample=False)
            assert torch.equal(out, expected)
        assert cache.get_seq_length() == 7

    @torch.no_grad()
    def test_a_conversation_goes_on_from_the_returned_cache(self, make, tokens):
        model, ids = make(), tokens(1, 4)
        first = model.generate(ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        longer = torch.cat([first.sequences, tokens(1, 2, seed=9)], dim=1)
        out = model.generate(longer, past_key_values=first.past_key_values, max_new_tokens=4, do_sample=False)
        assert torch.equal(out, model.generate(longer, max_new_tokens=4, do_sample=False))

    @torch.no_grad()
    def test_a_long_prompt_is_read_in_pieces(self, make, tokens, pad_left):
        model = make()
        ids, mask = pad_left([row[:length] for row, length in zip(tokens(2, 23), (23, 11), strict=True)])
        expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        longest = []
        model.model.register_forward_pre_hook(
            lambda module, args, kwargs: longest.append(kwargs["input_ids"].shape[1]), with_kwargs=True
        )
        out = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, prefill_chunk_size=5)
        assert torch.equal(out, expected)
        assert max(longest) == 5

    def test_a_prefix_read_with_gradients_serves_too(self, make, tokens):
        """The cache is copied outside of torch.no_grad(), where its tensors are part of an autograd graph."""
        model, whole = make(), tokens(1, 9)
        cache = model(whole[:, :7], use_cache=True).past_key_values
        expected = model.generate(whole, max_new_tokens=5, do_sample=False)
        for _ in range(2):
            out = model.generate(whole, past_key_values=copy.deepcopy(cache), max_new_tokens=5, do_sample=False)
            assert torch.equal(out, expected)


class TestMemory:
    """The cache policy during decoding."""

    @pytest.mark.parametrize("cache_policy", ["auto", "state", "keys"])
    @pytest.mark.parametrize("kind", [{"power": 2}, {"power": 4}, {"gating": "vector", "rotary": "pairs"}])
    @torch.no_grad()
    def test_all_give_what_the_forward_says(self, make, tokens, kind, cache_policy):
        """Beyond a window of 64 tokens, and beyond the break-even of a state."""
        model, ids = make(**kind), tokens(2, 83)
        cache = SympowCache(cache_policy)
        out = [model(ids[:, :3], past_key_values=cache).logits]
        out += [model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(3, 83)]
        assert_close(torch.cat(out, 1), model(ids, use_cache=False).logits, 1e-9, "logits")
        assert cache.get_seq_length() == 83
        folded = isinstance(cache.state[0], State)
        assert folded == (cache_policy != "keys")

    @torch.no_grad()
    def test_keys_and_values_are_kept_while_they_take_less(self, make, tokens):
        """With p = 4 and heads of 16, the break-even is at 700 tokens."""
        model = make(power=4, hidden_size=64)
        cache = SympowCache()
        model.generate(tokens(1, 5), past_key_values=cache, max_new_tokens=9)
        assert all(isinstance(layer, Window) for layer in cache.state)
        state = SympowCache("state")
        model.generate(tokens(1, 5), past_key_values=state, max_new_tokens=9)
        assert all(isinstance(layer, State) for layer in state.state)
        assert cache.nbytes < state.nbytes / 2

    def test_the_state_does_not_grow(self, make, tokens):
        model = make()
        sizes = {
            model.generate(tokens(1, length), max_new_tokens=4, return_dict_in_generate=True).past_key_values.nbytes
            for length in (30, 600)
        }
        assert len(sizes) == 1

    @pytest.mark.parametrize("mixer", ["sympow", "softmax"])
    @torch.no_grad()
    def test_offloaded_weights_come_when_they_are_used(self, make, tokens, mixer):
        model, ids = make(mixer=mixer), tokens(1, 5)
        expected = model.generate(ids, max_new_tokens=6, do_sample=False)
        offloaded = cpu_offload(make(mixer=mixer), execution_device=torch.device("cpu"))
        assert offloaded.model.blocks[0].mixer.qkv_proj.weight.is_meta
        assert torch.equal(offloaded.generate(ids, max_new_tokens=6, do_sample=False), expected)

    def test_mistakes_are_named(self, make, tokens):
        with pytest.raises(ValueError, match="cache_policy must be one of 'auto', 'state', 'keys'; got 'some'"):
            SympowCache("some")
        with pytest.raises(ValueError, match=r"cache_policy='keys' is for calls under torch.no_grad\(\)"):
            make()(tokens(), past_key_values=SympowCache("keys"))


def test_a_sequence_ends_with_its_end_token(make, tokens):
    model, ids = make(), tokens(2, 5)
    free = model.generate(ids, max_new_tokens=8, do_sample=False)
    end = free[0, 7].item()
    out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=end, pad_token_id=PADDING)
    stop = free[0, 5:].tolist().index(end)
    assert out[0, 5 : 6 + stop].tolist() == free[0, 5 : 6 + stop].tolist()
    assert (out[0, 6 + stop :] == PADDING).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cache_implementation": "static"}, ValueError, "cache_implementation must not be set.*'static'"),
        ({"past_key_values": DynamicCache()}, TypeError, "past_key_values must be a SympowCache, got DynamicCache"),
    ],
)
def test_caches_of_other_kinds_are_refused(make, tokens, options, error, message):
    with pytest.raises(error, match=message):
        make().generate(tokens(), generation_config=GenerationConfig(max_new_tokens=2), **options)


class TestCache:
    @pytest.fixture
    def model(self, make):
        return make()

    @pytest.fixture
    def cache(self, model, tokens):
        with torch.no_grad():
            return model(tokens(3, 6), use_cache=True).past_key_values

    @pytest.mark.parametrize("mixer", ["sympow", "softmax"])
    @torch.no_grad()
    def test_sequences_are_selected_between_single_tokens(self, make, tokens, mixer):
        model, ids = make(mixer=mixer), tokens(3, 8)
        cache = model(ids[:, :5]).past_key_values
        model(ids[:, 5:6], past_key_values=cache)
        fork = copy.deepcopy(cache)
        cache.batch_select_indices(torch.tensor([2, 0]))
        out = model(ids[[2, 0], 6:7], past_key_values=cache).logits
        assert_close(out, model(ids[[2, 0], :7]).logits[:, -1:], 1e-9, "selected")
        assert cache.batch_size == 2
        out = model(ids[:, 6:], past_key_values=fork).logits
        assert_close(out, model(ids).logits[:, 6:], 1e-9, "the fork")
        assert (len(fork), len(fork.layers)) == (2, 2)

    def test_forgetting_everything(self, cache):
        cache.reset()
        assert cache.state is None
        assert (cache.get_seq_length(), cache.batch_size, len(cache), cache.nbytes) == (0, -1, 0, 0)
        assert cache.layers == []

    def test_what_it_says_of_itself(self, cache):
        assert len(cache) == len(cache.layers) == 2
        assert cache.layers[1].state is cache.state[1]
        assert (cache.is_sliding, cache.is_linear) == ([False, False], [False, False])
        assert not cache.is_recording_past(0)
        assert cache.is_initialized
        assert not cache.is_compileable
        assert not cache.is_croppable
        assert (cache.get_max_length(), cache.max_batch_size) == (-1, 3)
        assert cache.get_mask_sizes(2) == (8, 0)
        assert repr(cache) == f"SympowCache(length=6, nbytes={cache.nbytes})"
        with pytest.raises(TypeError, match="update is not supported"):
            cache.update(None, None, 0)

    def test_an_empty_one_is_reordered_in_peace(self):
        cache = SympowCache()
        cache.reorder_cache(torch.tensor([0]))
        assert cache.state is None


class TestAsTransformersTestsIt:
    """The generation tests of transformers' repository, which no package contains."""

    @pytest.mark.parametrize("kind", [{"power": 2}, {"mixer": "softmax"}])
    @torch.no_grad()
    def test_a_cache_changes_nothing(self, make, tokens, kind):
        model, ids = make(**kind), tokens(2, 6)
        for options in ({}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
            options = {"max_new_tokens": 6, "do_sample": False, **options}
            with_cache = model.generate(ids, use_cache=True, **options)
            assert torch.equal(with_cache, model.generate(ids, use_cache=False, **options))

    @torch.no_grad()
    def test_embeddings_may_be_the_prompt(self, make, tokens):
        model, ids = make(), tokens(2, 6)
        embedded = model.get_input_embeddings()(ids)
        options = {"max_new_tokens": 5, "do_sample": False}
        expected = model.generate(ids, **options)[:, 6:]
        assert torch.equal(model.generate(inputs_embeds=embedded, **options), expected)
        assert torch.equal(model.generate(inputs_embeds=embedded, use_cache=False, **options), expected)

    @torch.no_grad()
    def test_a_text_may_start_from_nothing(self, make):
        model = make(bos_token_id=3)
        out = model.generate(max_new_tokens=4, do_sample=False)
        assert out[0].tolist() == greedily(model, torch.tensor([3]), 4).tolist()

    @pytest.mark.parametrize("kind", [{"power": 2}, {"mixer": "softmax"}])
    @torch.no_grad()
    def test_what_was_asked_for_comes_along(self, make, tokens, kind):
        model, ids = make(**kind), tokens(2, 6)
        out = model.generate(
            ids,
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            output_hidden_states=True,
        )
        assert out.sequences.shape == (2, 10)
        assert [tuple(x.shape) for x in out.logits] == [(2, 50)] * 4 == [tuple(x.shape) for x in out.scores]
        lengths = [[tuple(x.shape) for x in step] for step in out.hidden_states]
        assert lengths == [[(2, 6, 16)] * 3] + [[(2, 1, 16)] * 3] * 3
        expected = model(out.sequences, output_hidden_states=True, use_cache=False).hidden_states
        for layer in range(3):
            found = torch.cat([step[layer] for step in out.hidden_states], 1)
            assert_close(found, expected[layer][:, :-1], 1e-9, "hidden states")
        # The last token was sampled but not yet passed through the model.
        assert out.past_key_values.get_seq_length() == 9
        assert len(out.past_key_values) == len(out.past_key_values.layers) == 2

    @torch.no_grad()
    def test_several_samples_of_a_prompt_go_their_own_ways(self, make, tokens):
        model, ids = make(), tokens(1, 6)
        torch.manual_seed(0)
        out = model.generate(ids, max_new_tokens=8, do_sample=True, num_return_sequences=4, temperature=2.0)
        assert out.shape == (4, 14)
        assert len({tuple(row) for row in out.tolist()}) > 1
        assert (out[:, :6] == ids).all()
