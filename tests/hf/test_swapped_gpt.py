"""Swapped models behind the interface of `sympow.GPT`: generated from and served as native models are."""

import json

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers")

import tokenizers
from safetensors.torch import load_file, save_file
from server_process import ServerProcess
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from support import assert_close, decode
from sympow.cli.app import app
from sympow.data.tokenizer import ByteTokenizer, encode_continuation, ends_of
from sympow.evaluate import loss_by_position
from sympow.generation.prefix import Prefix, fingerprint_of
from sympow.generation.sampling import Sampling, generate
from sympow.generation.text import TextModel
from sympow.hf import swap_attention, to_fast_tokenizer
from sympow.hf.swap.swapped_gpt import SwappedGPT
from sympow.report.inspection import inspect_text
from sympow.serving import Engine

KINDS = ("llama", "llama3", "yarn", "mistral-window", "qwen2", "qwen3")
GREEDY = Sampling(temperature=0)
# Tokens of `ByteTokenizer`, with which models are saved.
BYTES = {"vocab_size": 257}


def continued(model, ids, count):
    """What transformers' own greedy generation adds to a text."""
    return model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False)[0, len(ids) :].tolist()


@pytest.fixture
def folder(pretrained, tmp_path):
    """Saves a model with swapped attention in all layers and its tokenizer; returns the folder and the model."""

    def save(kind="llama", tokenizer=None, dtype=torch.float64, **changes):
        model = swap_attention(pretrained(kind, dtype=dtype, **{**BYTES, **changes}))
        model.save_pretrained(tmp_path)
        (tokenizer or to_fast_tokenizer(ByteTokenizer())).save_pretrained(tmp_path)
        return tmp_path, model

    return save


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        ("qwen3", {"gating": "vector", "rotary": "pairs"}),
        *(pytest.param(kind, {"power": 4, "gating": "none"}, marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_segments_and_steps_give_the_logits_of_the_model(swapped, tokens, kind, options):
    model, ids = swapped(kind, **options), tokens(2, 24)
    expected = model(ids).logits
    gpt = SwappedGPT(model)
    logits, state = gpt(ids)
    assert_close(logits, expected, 1e-9, "logits")
    assert_close(gpt(ids, return_state=False)[0], expected, 1e-9, "logits without a state")
    assert len(state) == gpt.config.layers == 3
    for policy in ("state", "keys", "auto"):
        prefix = Prefix.prefill(gpt, ids[:, :13], segment_size=5, cache_policy=policy)
        assert_close(prefix.logits, expected[:, 12], 1e-8, f"prefix, {policy}")
        assert prefix.folded == (policy == "state")
        steps, after = decode(gpt, prefix, ids[:, 13:], cache_policy=policy)
        assert_close(steps, expected[:, 13:], 1e-8, f"steps, {policy}")
        assert after.tokens == 24


@torch.no_grad()
def test_padding_and_states_layer_by_layer_change_nothing(swapped, tokens):
    gpt, ids = SwappedGPT(swapped("qwen3")), tokens(1, 9)
    expected, before = gpt.features(ids[:, :3])
    expected, wanted = gpt.features(ids[:, 3:], before)
    padded = torch.nn.functional.pad(ids[:, 3:], (0, 4))
    found = {}
    features, none = gpt.features(padded, before, mask=torch.arange(10)[None] < 6, take_state=found.__setitem__)
    assert none is None
    assert_close(features[:, :6], expected, 1e-8, "features")
    for layer, state in enumerate(wanted):
        assert_close(found[layer].kv, state.kv, 1e-8, f"kv of layer {layer}")


def test_an_untied_head_gives_the_logits(pretrained, tokens):
    model = swap_attention(pretrained("llama", tie_word_embeddings=False))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    gpt, ids = SwappedGPT(model), tokens()
    assert gpt.output_weight is model.lm_head.weight
    with torch.no_grad():
        expected = model(ids).logits
        assert_close(gpt(ids)[0], expected, 1e-9, "logits")
        losses = loss_by_position(gpt, [(ids[:, :-1], ids[:, 1:])], segment_size=4)
    wanted = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert losses.average() == pytest.approx(wanted.item(), rel=1e-6)


def test_models_that_are_more_than_states_are_refused(swapped, pretrained):
    with pytest.raises(ValueError, match="these keep softmax: 0, 2"):
        SwappedGPT(swapped("llama", layers="every-other"))
    with pytest.raises(ValueError, match="SympowGPT2LMHeadModel has position embeddings"):
        SwappedGPT(swapped("gpt2"))
    with pytest.raises(ValueError, match="SympowGPT2LMHeadModel has position embeddings"):
        SwappedGPT(swapped("gpt2").bfloat16())
    model = swapped("llama").train()
    assert SwappedGPT(model).net.training
    model.lm_head.register_forward_hook(lambda module, inputs, logits: 1.01 * logits)
    with pytest.raises(ValueError, match="changes them afterwards"):
        SwappedGPT(model)
    with pytest.raises(TypeError, match="merge_and_unload"):
        SwappedGPT(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="causal language model"):
        SwappedGPT(swap_attention(pretrained("llama").base_model))
    gpt = SwappedGPT(swapped("llama"))
    with pytest.raises(ValueError, match=r"cu_seqlens \(packed documents\) must be None"):
        gpt(torch.zeros(1, 4, dtype=torch.int64), cu_seqlens=torch.tensor([0, 2, 4]))
    with pytest.raises(ValueError, match="between 0 and 49"):
        gpt(torch.full((1, 4), 50))


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_requests_in_company_get_what_transformers_generates(folder, kind):
    path, model = folder(kind)
    text_model = TextModel.load(str(path))
    prompts = ["a", "Once upon a time", "x" * 70, "the end of it"]
    expected = [continued(model, [256, *prompt.encode()], 12) for prompt in prompts]
    options = {"sampling": GREEDY, "max_tokens": 12, "ignore_boundary": True}
    with Engine(text_model, 3, segment_size=16) as engine:
        requests = [engine.submit(prompt, **options) for prompt in prompts]
        assert [list(request.result(120).tokens) for request in requests] == expected
        context = engine.prefill(prompts[1])
        later = engine.submit(prompts[0], prefix=context, **options).result(120).tokens
    assert list(later) == continued(model, [256, *prompts[1].encode(), *prompts[0].encode()], 12)


def test_prefixes_are_saved_for_their_model_alone(folder, pretrained, tmp_path):
    path, _ = folder("llama")
    text_model = TextModel.load(path)
    prefix = text_model.prefill("some text", cache_policy="state")
    prefix.save(tmp_path / "prefix", text_model.model)
    loaded = Prefix.load(tmp_path / "prefix", TextModel.load(path).model)
    assert torch.equal(loaded.logits, prefix.logits)
    rope = {"rope_type": "default", "rope_theta": 2e4}
    other = SwappedGPT(swap_attention(pretrained("llama", rope_parameters=rope, **BYTES)))
    # The same weights and shapes, but other rotations.
    for name, parameter in text_model.model.state_dict().items():
        assert torch.equal(other.state_dict()[name], parameter), name
    assert fingerprint_of(other) != fingerprint_of(text_model.model)
    # Only how it is computed differs, and what generation reads.
    settings = {"backend": "torch", "cache_policy": "keys", "chunk_size": 64}
    same = swap_attention(pretrained("llama", max_position_embeddings=128, **BYTES), **settings)
    assert fingerprint_of(SwappedGPT(same)) == fingerprint_of(text_model.model)
    with pytest.raises(ValueError, match="made by another model"):
        Prefix.load(tmp_path / "prefix", other)


def tokenizer_with(beginning):
    """A tokenizer of letters that puts `beginning` before every text."""
    vocabulary = {letter: number for number, letter in enumerate("abcdefgh")}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="a"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens(["<s>", "</s>"])
    if beginning:
        model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 8)])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("beginning", [True, False], ids=["bos", "none"])
def test_texts_begin_as_the_tokenizer_begins_them(folder, beginning):
    fast = tokenizer_with(beginning)
    path, model = folder(tokenizer=fast, vocab_size=10)
    text_model, tokenizer = TextModel.load(path), AutoTokenizer.from_pretrained(path)
    assert text_model.encode("cafe").tolist() == [tokenizer("cafe")["input_ids"]] == [fast("cafe")["input_ids"]]
    assert text_model.tokenizer.boundary == 9
    assert inspect_text(text_model, "cafe").texts[beginning:] == list("cafe")
    head = text_model.prefill("ca")
    assert torch.equal(text_model.extend(head, "fe").seen, text_model.prefill("cafe").seen)
    with Engine(text_model, 2) as engine:
        result = engine.submit("cafe", sampling=GREEDY, max_tokens=6, ignore_boundary=True).result(120)
        assert list(result.tokens) == continued(model, fast("cafe")["input_ids"], 6)
        if not beginning:
            with pytest.raises(ValueError, match="prompt must hold at least one token"):
                engine.submit("", max_tokens=1)
            with pytest.raises(ValueError, match="the text must not be empty"):
                text_model.prefill("")


def word_tokenizer():
    """As SentencePiece makes them: a word has its space before it, and the first word of a text has none."""
    words = ["▁once", "▁upon", "▁a", "▁time", "▁", "<unk>", "<s>", "</s>", "<end>", "s", "\n"]
    model = tokenizers.Tokenizer(tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=5))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    model.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    model.add_special_tokens(["<s>", "</s>", "<end>"])
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 6)])
    return PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>")


def test_words_keep_their_spaces_in_continuations(folder):
    # It needs pydantic, which only the extra `serve` brings.
    from sympow.serving.web.answers import TokenNames, TokenOffsets

    path, model = folder(tokenizer=word_tokenizer(), vocab_size=11)
    text_model, fast = TextModel.load(path), AutoTokenizer.from_pretrained(path)
    tokenizer = text_model.tokenizer
    assert text_model.encode("once upon").tolist() == [fast("once upon")["input_ids"]] == [[6, 0, 1]]
    assert encode_continuation(tokenizer, " upon").tolist() == [1]
    assert encode_continuation(tokenizer, "s").tolist() == [9]
    prefix = text_model.prefill("once")
    assert torch.equal(text_model.extend(prefix, " upon a").logits, text_model.prefill("once upon a").logits)
    with torch.no_grad():
        model.lm_head.weight[:4] *= 3
    text_model = TextModel(SwappedGPT(model), tokenizer)
    options = {"max_tokens": 6, "ignore_boundary": True, "sampling": GREEDY}
    with Engine(text_model, 2) as engine:
        result = engine.submit("once upon", logprobs=1, echo=True, **options).result(120)
        plain = engine.submit("once upon", **options).result(120)
    ids = [6, 0, 1, *result.tokens]
    assert result.text == fast.decode([token for token in ids if token not in (6, 7)])
    assert plain.text == result.text.removeprefix("once upon")
    names, offsets = TokenNames(tokenizer), TokenOffsets(tokenizer, continues=False)
    assert names.name(1) == " upon"
    assert [offsets.take(token) for token in (6, 0, 1, 2)] == [0, 0, 4, 9]


def test_texts_end_where_transformers_ends_them(folder):
    path, model = folder()
    text = continued(model, [256, *b"Once"], 12)
    end = next(token for token in text[2:] if token not in text[:2])
    count = text.index(end) + 1
    model.generation_config.eos_token_id = [256, end]
    model.save_pretrained(path)
    assert continued(model, [256, *b"Once"], 12) == text[:count]
    text_model = TextModel.load(path)
    assert ends_of(text_model.tokenizer) == {256, end}
    with Engine(text_model, 2) as engine:
        result = engine.submit("Once", sampling=GREEDY, max_tokens=12).result(120)
        assert (list(result.tokens), result.finish_reason) == (text[:count], "stop")
        ignored = engine.submit("Once", sampling=GREEDY, max_tokens=12, ignore_boundary=True).result(120)
        assert list(ignored.tokens) == text
    streamed = "".join(text_model.stream(text_model.prefill("Once"), 12, GREEDY))
    assert streamed == ByteTokenizer().decode(text[: count - 1])


def test_other_models_are_refused_with_what_to_do(pretrained, tmp_path):
    pretrained("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="type 'llama', which has no symmetric power attention: convert it first"):
        TextModel.load(tmp_path)


def test_the_dtype_of_a_loaded_model(folder):
    path, model = folder()
    for dtype in (None, torch.float32):
        gpt = TextModel.load(path, dtype=dtype).model
        assert gpt.embedding.weight.dtype == (dtype or torch.float64)
        assert gpt.count_parameters() == sum(parameter.numel() for parameter in model.parameters())
        assert not gpt.training


def test_damaged_folders_are_refused(folder):
    path, _ = folder()
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.gate.gamma_proj.weight"
    save_file({key: value for key, value in tensors.items() if key != name}, path / "model.safetensors")
    with pytest.raises(ValueError, match=f"lacks {name}"):
        TextModel.load(path)
    (path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        TextModel.load(path)


def test_generate_takes_a_swapped_model(folder):
    path, model = folder(dtype=torch.float32)
    arguments = ["generate", str(path), "--prompt", "Once", "--tokens", "8", "--temperature", "0", "--device", "cpu"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    expected = TextModel(SwappedGPT(model), ByteTokenizer())
    ids = generate(expected.model, 8, GREEDY, prefix=expected.prefill("Once"), stop=256)
    assert "Once" + ByteTokenizer().decode([int(token) for token in ids]) in found.stdout


@pytest.mark.slow
def test_a_server_of_a_swapped_model(folder):
    openai = pytest.importorskip("openai", reason="needs the openai client")
    path, model = folder("qwen3", dtype=torch.float32)
    with ServerProcess(path, "--slots", 4, "--device", "cpu") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        body = {"ignore_eos": True}
        answer = client.completions.create(
            model=client.models.list().data[0].id, prompt="Once upon", max_tokens=9, temperature=0, extra_body=body
        )
    expected = continued(model, [256, *b"Once upon"], 9)
    assert answer.usage.completion_tokens == 9
    assert answer.choices[0].text == ByteTokenizer().decode(expected)


@pytest.mark.gpu
def test_steps_and_segments_are_captured_on_a_gpu(pretrained):
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    model = swap_attention(pretrained("qwen3", dtype=torch.bfloat16, **sizes, **BYTES)).cuda()
    text_model = TextModel(SwappedGPT(model), ByteTokenizer())
    prompts = ["a", "Once upon a time", "x" * 700]
    options = {"sampling": GREEDY, "max_tokens": 24, "ignore_boundary": True}
    with Engine(text_model, 4, segment_size=256, prefix_cache_bytes=0) as engine:
        engine.warm_up()
        assert engine._scheduler._prefill_graphs is not None
        together = [engine.submit(prompt, **options) for prompt in prompts]
        together = [request.result(120).tokens for request in together]
        alone = [engine.submit(prompt, **options).result(120).tokens for prompt in prompts]
    assert together == alone
    eager = list(generate(text_model.model, 24, GREEDY, prefix=text_model.prefill(prompts[1])))
    assert len(eager) == 24


def test_the_record_of_a_swap_determines_the_config(swapped):
    gpt = SwappedGPT(swapped("qwen3", power=4, gating="vector", form="attention", backend="torch"))
    config = gpt.config
    assert (config.vocab_size, config.width, config.heads, config.key_value_heads) == (50, 32, 4, 2)
    assert (config.head_dim, config.power, config.gating, config.form, config.backend) == (
        16, 4, "vector", "attention", "torch",
    )  # fmt: skip
    assert json.loads(json.dumps(gpt.description))["transformers"]["base"] == "qwen3"
