import json
from itertools import pairwise

import numpy as np
import pytest

from sympow.data import prepare
from sympow.data.tokenizer import ByteTokenizer


class MemoryDataset:
    """Documents from lists of ids; the n-th comes from the file `n.txt`."""

    name = "memory"
    boundary = 256
    vocab_size = 257

    def __init__(self, documents, blocks=None, fingerprint="memory"):
        self.documents = [np.asarray(document, np.uint16) for document in documents]
        self.lengths = np.array([len(document) for document in self.documents], np.int64)
        self.blocks = np.array([0, len(documents)] if blocks is None else blocks, np.int64)
        self.fingerprint = fingerprint

    def read(self, document, start, stop):
        return self.documents[document][start:stop]

    def document_name(self, document):
        return f"{document}.txt"

    def load_tokenizer(self):
        return ByteTokenizer()


def unique_documents(lengths):
    """Documents in which all tokens are distinct, so that a token identifies its position."""
    return [np.arange(start, stop) for start, stop in pairwise(np.cumsum([0, *lengths]))]


@pytest.fixture
def memory():
    """Makes a dataset of documents of given lengths, in which all tokens are distinct."""

    def make(lengths, blocks=None):
        dataset = MemoryDataset(unique_documents(lengths), blocks)
        dataset.vocab_size, dataset.boundary = sum(lengths) + 1, sum(lengths)
        return dataset

    return make


@pytest.fixture
def memory_of():
    """Makes a dataset of given ids."""
    return MemoryDataset


def write_corpus(folder):
    """A folder with texts, a table, and a file that is not a document."""
    (folder / "more").mkdir(parents=True)
    (folder / "a.txt").write_text("first document\n")
    (folder / "more" / "b.txt").write_text("zweites Dokument: größer\n")
    lines = [json.dumps({"text": f"line {n} " * (n + 1), "id": n}) for n in range(40)]
    (folder / "c.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "picture.png").write_bytes(b"\x89PNG no document")
    return folder


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """A prepared folder that no test changes."""
    out = tmp_path_factory.mktemp("prepared")
    prepare([write_corpus(out / "corpus")], out / "out", heldout=0, workers=1)
    return out / "out"
