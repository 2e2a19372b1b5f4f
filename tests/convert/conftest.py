import pytest
from convert.tiny import TINY, make_llama

from sympow.convert import ConvertConfig
from sympow.data.preparation import prepare


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A prepared folder: bytes, documents of a few hundred tokens."""
    folder = tmp_path_factory.mktemp("texts")
    for name, words in (("train", 8), ("heldout", 2)):
        (folder / name).mkdir()
        for number in range(words):
            text = " ".join(f"{(number * 7 + place) % 97} and {place % 13}" for place in range(60))
            (folder / name / f"{number}.txt").write_text(text)
    prepare([folder / "train"], folder / "data", heldout_sources=[folder / "heldout"], tokenizer="bytes", workers=1)
    return folder / "data"


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A folder with a small Llama and the tokenizer of bytes."""
    from sympow.data.tokenizer import ByteTokenizer
    from sympow.hf import to_fast_tokenizer

    folder = tmp_path_factory.mktemp("models") / "teacher"
    make_llama().save_pretrained(folder)
    to_fast_tokenizer(ByteTokenizer()).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(texts):
    """Makes the settings of a small conversion."""

    def make(**changes):
        return ConvertConfig().changed(**{**TINY, "data": str(texts), **changes})

    return make
