"""Decoding token by token gives the logits of the full forward pass under every cache policy."""

from dataclasses import replace

import pytest
import torch

from support import assert_close, decode
from sympow import GPT, GPTConfig
from sympow.generation.cache import break_even_tokens
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import NonFiniteLogitsError, Sampling, generate
from sympow.ops.state import State
from sympow.ops.torch.softmax import KeyValueState, PaddedKeyValueState
from sympow.ops.window import Window

VOCABULARY = 50
KINDS = [
    pytest.param({"power": 2}, id="p2-conformal"),
    pytest.param({"power": 4}, id="p4-conformal"),
    pytest.param({"power": 2, "gating": "scalar", "rotary": "none"}, id="p2-gated"),
    pytest.param({"power": 4, "gating": "none", "rotary": "fixed"}, id="p4-rotary"),
    pytest.param({"power": 2, "gating": "vector", "rotary": "pairs"}, id="p2-pairs"),
]
SOFTMAX = [
    pytest.param({"mixer": "softmax"}, id="softmax"),
    pytest.param({"mixer": "softmax", "gating": "none", "rotary": "fixed"}, id="softmax-rotary"),
    pytest.param({"mixer": "softmax", "gating": "vector", "rotary": "pairs"}, id="softmax-pairs"),
]
PRECISIONS = [
    pytest.param(torch.float64, 1e-9, id="float64"),
    pytest.param(torch.float32, 1e-4, id="float32", marks=pytest.mark.slow),
]


def in_both_precisions(kinds):
    """Every kind with float64, and the first two with float32: kind, dtype and tolerance."""
    float64, float32 = PRECISIONS
    chosen = [(kind, float64) for kind in kinds] + [(kind, float32) for kind in kinds[:2]]
    return [
        pytest.param(*kind.values, *given.values, id=f"{given.id}-{kind.id}", marks=given.marks)
        for kind, given in chosen
    ]


def make(seed=0, dtype=torch.float64, **changes) -> GPT:
    """A small model with data-dependent gates and rotations."""
    shape = {"vocab_size": VOCABULARY, "layers": 2, "width": 16, "heads": 4, "key_value_heads": 2, "max_document": 100}
    shape["rotary"] = "scale"
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**{**shape, **changes})).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.blocks.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for block in model.blocks:
            # Queries and keys share a direction: without it, a state computes tiny scores as differences of large
            # numbers.
            heads = block.mixer.qkv_proj.bias.unflatten(0, (-1, model.config.width // model.config.heads))
            heads[: -(model.config.key_value_heads or model.config.heads), :2] += 1
        # A tied embedding alone would predict the last input token.
        model.final_norm.weight.copy_(torch.randn_like(model.final_norm.weight))
    return model


def text(length=9, batch=2, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def whole(model, tokens):
    return model(tokens, return_state=False)[0]


def assert_relative(actual, expected, tolerance, what="logits"):
    assert_close(actual, expected, tolerance, what, relative=True)


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), in_both_precisions(KINDS))
@pytest.mark.parametrize("cache_policy", ["auto", "state", "keys"])
def test_prefill_then_decode_is_the_forward_at_every_split(kind, dtype, tolerance, cache_policy):
    model, tokens = make(dtype=dtype, **kind), text()
    expected = whole(model, tokens)
    for split in range(1, 9):
        prefix = Prefix.prefill(model, tokens[:, :split], segment_size=3, cache_policy=cache_policy)
        assert_relative(prefix.logits, expected[:, split - 1], tolerance, f"read {split}")
        logits, after = decode(model, prefix, tokens[:, split:], cache_policy=cache_policy)
        assert_relative(logits, expected[:, split:], tolerance, f"split {split}")
        assert after.tokens == 9
        assert after.folded == (cache_policy == "state" or (cache_policy == "auto" and break_even_tokens(model) < 9))


@pytest.mark.parametrize("rotary", ["scale", "pairs"])
def test_rotations_with_slower_rates_decode_as_the_forward_pass(rotary):
    model, tokens = make(rotary=rotary, max_rate=1.0), text()
    expected = whole(model, tokens)
    prefix = Prefix.prefill(model, tokens[:, :5], segment_size=3, cache_policy="state")
    assert_relative(prefix.logits, expected[:, 4], 1e-9, "read")
    logits, _ = decode(model, prefix, tokens[:, 5:], cache_policy="state")
    assert_relative(logits, expected[:, 5:], 1e-9, "decoded")


@pytest.mark.parametrize("kind", SOFTMAX)
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_the_same_with_softmax(kind, dtype, tolerance):
    model, tokens = make(dtype=dtype, **kind), text()
    expected = whole(model, tokens)
    for split in range(1, 9):
        prefix = Prefix.prefill(model, tokens[:, :split], segment_size=3)
        logits, after = decode(model, prefix, tokens[:, split:])
        assert_relative(logits, expected[:, split:], tolerance, f"split {split}")
        assert type(after.state[0]) is KeyValueState
        more = after.extend(model, text(3))
        assert_relative(more.logits, whole(model, torch.cat([tokens, text(3)], 1))[:, -1], tolerance, "read on")


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
def test_a_long_text_splits_at_random_positions(power, dtype, tolerance):
    model = make(dtype=dtype, power=power, layers=1, width=8, heads=2, key_value_heads=None, max_document=5_000)
    tokens = text(5_000, 1)
    expected = whole(model, tokens)
    for split in torch.randint(1, 4_950, (5,), generator=torch.Generator().manual_seed(power)).tolist():
        for cache_policy in ("auto", "keys"):
            prefix = Prefix.prefill(model, tokens[:, :split], segment_size=1_000, cache_policy=cache_policy)
            logits, _ = decode(model, prefix, tokens[:, split : split + 3], cache_policy=cache_policy)
            assert_relative(prefix.logits, expected[:, split - 1], tolerance, f"{cache_policy}, read {split}")
            assert_relative(logits, expected[:, split : split + 3], tolerance, f"{cache_policy}, split {split}")


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), in_both_precisions(KINDS + SOFTMAX))
@pytest.mark.parametrize(("kept", "then"), [("auto", "auto"), ("keys", "keys"), ("keys", "auto")])
def test_texts_of_different_lengths_decode_together_as_alone(kind, dtype, tolerance, kept, then):
    model, tokens, new = make(dtype=dtype, **kind), text(30, 3), text(22, 3, seed=5)  # the shortest text is folded, too
    lengths = (30, 11, 2)
    prefixes = [Prefix.prefill(model, row[None, :n], cache_policy=kept) for row, n in zip(tokens, lengths, strict=True)]
    together = Prefix.cat(prefixes)
    logits, after = decode(model, together, new, cache_policy=then)
    assert after.folded == (model.config.mixer == "sympow" and then == "auto")
    ahead = after.extend(model, text(2, 3), cache_policy=then)
    for i, n in enumerate(lengths):
        alone = torch.cat([tokens[i : i + 1, :n], new[i : i + 1], text(2, 3)[i : i + 1]], dim=1)
        expected = whole(model, alone)
        assert_relative(logits[i], expected[0, n : n + 22], tolerance, f"text of {n}")
        assert_relative(ahead.logits[i], expected[0, -1], tolerance, f"text of {n}, read on")


@pytest.mark.parametrize(("kind", "dtype", "tolerance"), in_both_precisions(KINDS))
def test_keys_are_folded_when_they_outgrow_the_state(kind, dtype, tolerance):
    model, tokens = make(dtype=dtype, **kind), text(40)
    most = break_even_tokens(model)
    assert 2 < most < 20
    expected = whole(model, tokens)
    decoder = Decoder(model, Prefix.prefill(model, tokens[:, :2]))
    for position in range(2, 40):
        held = position + 1
        logits = decoder.step(tokens[:, position])
        assert_relative(logits, expected[:, position], tolerance, f"token {position}")
        assert decoder.folded == (held > most)
        assert decoder.tokens == held
    assert_relative(decoder.close().extend(model, text(4)).logits, whole(model, torch.cat([tokens, text(4)], 1))[:, -1],
                    tolerance, "read on")  # fmt: skip


def test_a_window_holds_no_more_than_a_state_would():
    model = make(power=4, dtype=torch.float32)
    window = Prefix.prefill(model, text(3), cache_policy="keys").state[0]
    assert isinstance(window, Window)
    # d = 4, p = 4: 35 features; keys, values and one running sum per token.
    assert window.state_nbytes == 35 * 5 * 4
    assert window.token_nbytes == 4 * 4 + 4 * 4 + 8
    assert break_even_tokens(model) == window.break_even_tokens == 17
    state = Prefix.prefill(model, text(3), cache_policy="state").state[0]
    assert window.state_nbytes == (state.kv.nbytes + state.normalizer.nbytes) // (2 * 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("segment_size", [1, 7, 100])
def test_a_prompt_is_read_in_pieces_whatever_is_kept(kind, segment_size):
    model, tokens = make(**kind), text(40)
    expected = whole(model, tokens)
    for cache_policy, kept in (("keys", Window), ("state", State), ("auto", State)):
        prefix = Prefix.prefill(model, tokens, segment_size=segment_size, cache_policy=cache_policy)
        assert_relative(prefix.logits, expected[:, -1], 1e-9, cache_policy)
        assert all(isinstance(layer, kept) for layer in prefix.state)


@pytest.mark.parametrize("power", [2, 4])
def test_reading_on_folds_what_has_outgrown_the_state(power):
    model, tokens = make(power=power), text(60)
    most = break_even_tokens(model)
    prefix = Prefix.prefill(model, tokens[:, : most - 1])
    assert not prefix.folded
    on_the_limit = prefix.extend(model, tokens[:, most - 1 : most])
    assert not on_the_limit.folded
    beyond = on_the_limit.extend(model, tokens[:, most : most + 1])
    assert beyond.folded
    assert not on_the_limit.folded  # unchanged
    again = on_the_limit.extend(model, tokens[:, most : most + 1], cache_policy="keys")
    assert not again.folded
    assert_relative(beyond.logits, whole(model, tokens[:, : most + 1])[:, -1], 1e-9)
    assert_relative(again.logits, beyond.logits, 1e-9)
    with pytest.raises(ValueError, match="cache_policy='keys' is not possible here"):
        beyond.extend(model, tokens[:, :1], cache_policy="keys")


def test_files_hold_nothing_that_is_derived(tmp_path):
    model = make()
    prefix = Prefix.prefill(model, text(3), cache_policy="keys")
    layers = tuple(replace(layer, kv_half=torch.ones(2), kv_scale=torch.ones(2)) for layer in prefix.state)
    replace(prefix, state=layers).save(tmp_path / "with", model)
    prefix.save(tmp_path / "without", model)
    assert (tmp_path / "with").read_bytes() == (tmp_path / "without").read_bytes()
    assert Prefix.load(tmp_path / "with", model).state[0].kv_half is None


@pytest.mark.parametrize("cache_policy", ["keys", "state"])
def test_readings_are_saved_loaded_forked_and_joined(cache_policy, tmp_path):
    model, tokens, new = make(power=4), text(12), text(8, seed=4)
    expected = whole(model, torch.cat([tokens, new], dim=1))[:, 12:]
    prefix = Prefix.prefill(model, tokens, cache_policy=cache_policy)
    prefix.save(tmp_path / "text.prefix", model)
    loaded = Prefix.load(tmp_path / "text.prefix", model)
    assert loaded.folded == (cache_policy == "state")
    assert loaded.nbytes == prefix.nbytes
    assert torch.equal(decode(model, loaded, new)[0], decode(model, prefix, new)[0])
    forked = prefix.fork(2)
    both = decode(model, forked, new.repeat_interleave(2, dim=0))[0]
    assert_relative(both, expected.repeat_interleave(2, dim=0), 1e-9, "forked")
    # Keys and values in a batch with a state are folded, so that both are states.
    other = Prefix.prefill(model, tokens[:, :5], cache_policy="state")
    joined = Prefix.cat([prefix, other])
    assert joined.folded
    logits, _ = decode(model, joined, torch.cat([new, new]))
    assert_relative(logits[:2], expected, 1e-9, "joined")
    shorter = whole(model, torch.cat([tokens[:, :5], new], dim=1))[:, 5:]
    assert_relative(logits[2:], shorter, 1e-9, "the shorter")


def test_a_padded_reading_of_softmax_is_saved_and_joined(tmp_path):
    model, tokens = make(mixer="softmax"), text(9, 3)
    parts = [Prefix.prefill(model, row[None, :n]) for row, n in zip(tokens, (9, 4, 6), strict=True)]
    padded = Prefix.cat(parts[:2])
    assert isinstance(padded.state[0], PaddedKeyValueState)
    padded.save(tmp_path / "text.prefix", model)
    joined = Prefix.cat([Prefix.load(tmp_path / "text.prefix", model), parts[2]])
    logits, after = decode(model, joined, text(3, 3))
    for i, n in enumerate((9, 4, 6)):
        expected = whole(model, torch.cat([tokens[i : i + 1, :n], text(3, 3)[i : i + 1]], dim=1))
        assert_relative(logits[i], expected[0, n:], 1e-9, f"text of {n}")
    assert type(Prefix.cat([parts[0], parts[0]]).state[0]) is KeyValueState
    assert after.tokens == 12


@pytest.mark.parametrize("kind", [*KINDS, *SOFTMAX])
@pytest.mark.parametrize("length", [5, 90])
def test_decoding_leaves_the_reading_as_it_is(kind, length):
    model = make(**kind)
    prefix = Prefix.prefill(model, text(length))
    first, second = (decode(model, prefix, text(30, seed=7))[0] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("cache_policy", ["state", "auto", "keys"])
def test_memory_does_not_grow_where_the_number_of_tokens_is_known(cache_policy):
    model = make(power=2)
    decoder = Decoder(
        model, Prefix.prefill(model, text(90), cache_policy=cache_policy), tokens=100, cache_policy=cache_policy
    )
    decoder.step(text(1)[:, 0])
    tensors = [x.data_ptr() for m in decoder._cache.layers for x in m._tensors().values()]
    size = decoder.nbytes
    for token in text(99).unbind(1):
        decoder.step(token)
    assert decoder.nbytes == size
    assert [x.data_ptr() for m in decoder._cache.layers for x in m._tensors().values()] == tensors


@pytest.mark.parametrize("kind", [{"power": 2}, {"mixer": "softmax"}], ids=str)
def test_room_grows_where_it_is_not_known(kind, monkeypatch):
    monkeypatch.setattr("sympow.generation.cache.MIN_FREE_TOKENS", 4)
    model, tokens = make(**kind), text(60)
    expected = whole(model, tokens)
    decoder = Decoder(model, Prefix.prefill(model, tokens[:, :3], cache_policy="auto"), cache_policy="keys")
    for position in range(3, 60):
        assert_relative(decoder.step(tokens[:, position]), expected[:, position], 1e-9, f"token {position}")
    assert not decoder.folded


def test_autocast_decides_the_dtype_of_keys_and_values():
    model = make(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prefix = Prefix.prefill(model, text(2))
        assert prefix.state[0].values.dtype == torch.bfloat16
        logits, after = decode(model, prefix, text(2))
        assert logits.isfinite().all()
        assert after.state[0].values.dtype == torch.bfloat16
        logits, after = decode(model, after, text(20))
    assert logits.isfinite().all()
    assert after.folded


@pytest.mark.parametrize("kind", [*KINDS, SOFTMAX[0]])
def test_generated_tokens_are_the_argmax_of_the_forward_pass(kind):
    model, given = make(**kind), text(6)
    expected = given
    for _ in range(25):
        expected = torch.cat([expected, whole(model, expected)[:, -1].argmax(-1, keepdim=True)], dim=1)
    for cache_policy in ("auto", "keys") if "mixer" in kind else ("auto", "state", "keys"):
        found = list(generate(model, 25, Sampling(temperature=0), prompt=given, cache_policy=cache_policy))
        assert torch.equal(torch.stack(found, dim=1), expected[:, 6:]), cache_policy


def test_logits_that_are_no_numbers_are_not_passed_over():
    model = make()
    prefix = Prefix.prefill(model, text())
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    tokens = generate(model, 3, prefix=prefix)
    next(tokens)
    with pytest.raises(NonFiniteLogitsError, match="logits are NaN or infinite"):
        next(tokens)


def test_mistakes_are_named():
    model, softmax = make(), make(mixer="softmax")
    prefix = Prefix.prefill(model, text())
    with pytest.raises(ValueError, match="cache_policy must be one of 'auto', 'state', 'keys'; got 'all'"):
        Prefix.prefill(model, text(), cache_policy="all")
    with pytest.raises(ValueError, match="cache_policy='state' is for symmetric power attention"):
        Prefix.prefill(softmax, text(), cache_policy="state")
    with pytest.raises(ValueError, match=r"tokens must be \(2,\), one for each text; got \(3,\)"):
        Decoder(model, prefix).step(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="tokens must lie between 0 and 49; got 50"):
        Decoder(model, prefix).step(torch.tensor([0, 50]))
    decoder = Decoder(model, prefix)
    with pytest.raises(TypeError, match=r"tokens must be int32 or int64, got torch\.float32"):
        decoder.step(torch.tensor([0.0, 1.5]))
    decoder.close()
    for again in (decoder.close, lambda: decoder.step(torch.tensor([0, 1]))):
        with pytest.raises(RuntimeError, match="the decoder is closed"):
            again()
    with pytest.raises(ValueError, match="prefix must be of a model with 2 layers, got 1"):
        Decoder(model, replace(prefix, state=prefix.state[:1]))
    window = Prefix.prefill(model, text(3, 1), cache_policy="keys").state
    with pytest.raises(ValueError, match="cu_seqlens cannot be combined with a state of keys and values"):
        model(text(4, 1), window, cu_seqlens=torch.tensor([0, 2, 4]))
