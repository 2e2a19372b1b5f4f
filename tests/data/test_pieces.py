"""Texts in pieces: their tokens are those of the whole text, for every tokenizer for which cuts are known."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from sympow.data import pieces as module
from sympow.data.pieces import known_cuts, pieces
from sympow.data.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer, train_bpe

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LATER = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
# As in the files of the models that are named.
SPLITS = {
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen3.5": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "mistral": f"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*" + r"|\p{N}" + LATER,
    "gpt-4o": f"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    + r"|\p{N}{1,3}"
    + LATER,
}
TEXT = "The cat's hat, isn't it?  \n\n I'LL say 1234 things!\n中国，日本。カナ、\ncafe\u0301 a\u0308 \u00a0 x\t\ty \r\n"
# Characters of every class that the patterns know, so that random texts join them in all ways.
CHARACTERS = " \n\t\r\u00a0\u3000\x1cabTS'’dm19٣.,!/-_，。、？中カかé\u0301\u3099ǅʰ😀\u200b"
FEW = st.text(CHARACTERS, max_size=40)


def split_by(pattern, normalizer=None):
    """A tokenizer with few merges whose texts are split by a pattern before."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = normalizer
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    model.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    model.train_from_iterator([TEXT, TEXT.replace(" ", "\n"), CHARACTERS] * 3, trainer)
    return model


def with_added(*tokens):
    model = split_by(SPLITS["qwen2"])
    model.add_tokens(list(tokens))
    return model


@pytest.fixture(scope="module")
def known():
    """Tokenizers for which cuts are known, by name."""
    models = {name: split_by(pattern) for name, pattern in SPLITS.items()}
    models["nfc"] = split_by(SPLITS["qwen2"], normalizers.NFC())
    models["added spaces"] = with_added("    ", "\n\n", "<think>", "ab")
    found = {name: JsonTokenizer(model, "file") for name, model in models.items()}
    return found | {"bytes": ByteTokenizer(), "gpt2": load_tokenizer("gpt2"), "bpe": train_bpe([TEXT], 300)}


NAMES = (*SPLITS, "nfc", "added spaces", "bytes", "gpt2", "bpe")


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=300, deadline=None)
@given(text=st.one_of(FEW, st.text(max_size=40)), size=st.integers(1, 6))
@example(text="a\n\n\nb  \n c", size=1)
@example(text="a  b", size=1)
@example(text="!\nb?\n\n 中。，中\n国", size=1)
@example(text="<think>    a    \n\n\n", size=1)
@example(text="ab" * 300 + " " * 300 + "\n" * 300 + "12" * 300 + "!" * 300 + " a" + "!" * 300 + "\nb", size=1)
def test_pieces_have_the_tokens_of_the_whole_text(known, name, text, size):
    tokenizer = known[name]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "PIECE", size)
        found = list(pieces("text", text, tokenizer.cuts))
    assert "".join(found) == text
    assert [token for piece in found for token in tokenizer.encode(piece).tolist()] == tokenizer.encode(text).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_every_known_tokenizer_cuts_long_texts(known, name):
    text = TEXT * 2_000
    found = list(pieces("text", text, known[name].cuts))
    assert max(map(len, found)) < module.PIECE + len(TEXT)
    tokens = [token for piece in found for token in known[name].encode(piece).tolist()]
    assert tokens == known[name].encode(text).tolist()


def changed(**parts):
    model = split_by(SPLITS["qwen2"])
    for name, part in parts.items():
        setattr(model, name, part)
    return model


@pytest.mark.parametrize(
    "model",
    [
        changed(normalizer=normalizers.Replace(" ", "▁"), pre_tokenizer=None),
        changed(pre_tokenizer=pre_tokenizers.Metaspace()),
        changed(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        changed(normalizer=normalizers.NFKC()),
        # Pieces of ten characters, counted from the beginning of the text.
        split_by(r"(?m:.{1,10})"),
        with_added("New York"),
        with_added(AddedToken("<think>", rstrip=True)),
        with_added(AddedToken("ab", single_word=True)),
    ],
    ids=["no split", "metaspace", "prefix space", "nfkc", "another pattern", "a space inside", "rstrip", "single word"],
)
def test_other_tokenizers_have_no_known_cuts(model):
    assert known_cuts(model) is None
    text = "ab " * 10_000
    assert list(pieces("text", text, None)) == [text]


def test_a_piece_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="text must have at most 4,194,304 characters without a space; got 4,194,305"):
        list(pieces("text", "ACGT" * 2**20 + "A", module.CUTS))
    with pytest.raises(
        ValueError, match="characters with this tokenizer, which takes a text as a whole; got 6,000,000"
    ):
        list(pieces("text", "a " * 3_000_000, None))
