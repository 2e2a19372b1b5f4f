"""Token files of datatrove, Megatron and nanoGPT: read back equal, in the loader's order, and refused when damaged."""

import json
import os
import struct

import numpy as np
import pytest
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.data import Loader, open_dataset
from sympow.data.formats.token_files import TokenFiles
from sympow.data.tokenizer import ByteTokenizer, train_bpe

# Ids of bytes, each document with the boundary at its end.
DOCUMENTS = [[*f"document {n} ".encode() * (1 + 7 * n % 5), 256] for n in range(40)]


def write_datatrove(path, documents, dtype="<u2", tokenizer=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate(documents)
    path.write_bytes(tokens.astype(dtype).tobytes())
    ends = np.cumsum([len(document) for document in documents]).tolist()
    path.with_name(path.name + ".index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    if tokenizer:
        metadata = f"{tokenizer}|{np.dtype(dtype).itemsize}\n{len(tokens)}\n{len(tokens) / 1000:.2f} kT"
        path.with_name(path.name + ".metadata").write_text(metadata)


def write_megatron(path, documents, dtype="<i4", code=4, sequences=1):
    """Each document in a number of sequences."""
    path.parent.mkdir(parents=True, exist_ok=True)
    parts = [part for document in documents for part in np.array_split(document, sequences)]
    path.write_bytes(np.concatenate(parts).astype(dtype).tobytes())
    lengths = [len(part) for part in parts]
    begins = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    firsts = np.arange(len(documents) + 1) * sequences
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(parts), len(firsts))
    arrays = np.array(lengths, "<i4"), begins.astype("<i8"), firsts.astype("<i8")
    path.with_suffix(".idx").write_bytes(header + b"".join(array.tobytes() for array in arrays))


def write_nanogpt(path, documents, dtype="<u2"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.concatenate(documents).astype(dtype).tobytes())


def write_llmc(path, documents, dtype="<u2", kind=(20240520, 1)):
    """Documents begin with the boundary, and do not end in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.concatenate([[256, *document[:-1]] for document in documents])
    header = np.zeros(256, "<i4")
    header[:3] = *kind, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


WRITERS = {
    "datatrove": lambda folder, documents: write_datatrove(folder / "00000_doc_shuffled.ds", documents),
    "datatrove, four bytes": lambda folder, documents: write_datatrove(folder / "a.ds", documents, "<u4", "bytes"),
    "Megatron": lambda folder, documents: write_megatron(folder / "a_text_document.bin", documents),
    "Megatron, uint16": lambda folder, documents: write_megatron(folder / "a.bin", documents, "<u2", 8),
    "Megatron, sentences": lambda folder, documents: write_megatron(folder / "a.bin", documents, sequences=3),
    "nanoGPT": lambda folder, documents: write_nanogpt(folder / "train.bin", documents),
    "llm.c": lambda folder, documents: write_llmc(folder / "fineweb_train_000001.bin", documents),
    "llm.c, four bytes": lambda folder, documents: write_llmc(folder / "a.bin", documents, "<u4", (20240801, 7)),
}


def documents_of(dataset):
    return [dataset.read(n, 0, int(length)).tolist() for n, length in enumerate(dataset.lengths)]


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer for token files."""
    (tmp_path / "tokens").mkdir()
    ByteTokenizer().save(tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.mark.parametrize("kind", WRITERS)
def test_documents_come_back_equal(folder, kind):
    WRITERS[kind](folder, DOCUMENTS)
    dataset = open_dataset(folder)
    # In these files, the last document does not end in the boundary.
    expected = [*DOCUMENTS[:-1], DOCUMENTS[-1][:-1]] if kind.startswith("llm.c") else DOCUMENTS
    assert documents_of(dataset) == expected
    assert (dataset.vocab_size, dataset.boundary) == (257, 256)
    assert dataset.read(3, 2, 6).tolist() == DOCUMENTS[3][2:6]
    with pytest.raises(ValueError, match=r"has .* tokens; tokens 0 to 5,000"):
        dataset.read(0, 0, 5000)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("short", ["join", "pack"])
def test_a_loader_goes_on_exactly_where_it_stopped(folder, kind, short, memory_of):
    WRITERS[kind](folder / "part", DOCUMENTS[:25])
    WRITERS[kind](folder / "rest", DOCUMENTS[25:])
    options = {"context": 16, "batch_size": 4, "short": short, "epochs": 2, "prefetch": 0}
    loader = Loader(open_dataset(folder), **options)
    batches = list(loader)
    assert len(batches) > 20
    if not kind.startswith("llm.c"):
        # The order is that of the same documents in any other dataset.
        others = Loader(memory_of(DOCUMENTS), **options)
        assert all((a.inputs == b.inputs).all() for a, b in zip(batches, others, strict=True))
    for stopped in (1, 7, len(batches) - 1):
        first = Loader(open_dataset(folder), **options)
        iterator = iter(first)
        for _ in range(stopped):
            next(iterator)
        again = Loader(open_dataset(folder), **options)
        again.load_state_dict(json.loads(json.dumps(first.state_dict())))
        rest = list(again)
        assert len(rest) == len(batches) - stopped
        assert all((a.targets == b.targets).all() for a, b in zip(rest, batches[stopped:], strict=True))


def test_files_are_read_in_the_order_of_their_names_and_named(folder):
    write_datatrove(folder / "b" / "0.ds", DOCUMENTS[:5])
    write_megatron(folder / "c" / "0.bin", DOCUMENTS[5:9])
    write_nanogpt(folder / "d" / "0.bin", DOCUMENTS[9:])
    dataset = open_dataset(folder)
    assert documents_of(dataset) == DOCUMENTS
    assert dataset.document_name(0) == f"{folder / 'b' / '0.ds'}, document 0"
    assert dataset.document_name(8) == f"{folder / 'c' / '0.bin'}, document 3"
    assert dataset.formats == ["Megatron", "datatrove", "nanoGPT"]


def test_blocks_are_documents_in_order(folder, monkeypatch):
    monkeypatch.setattr("sympow.data.formats.token_files.BLOCK_TOKENS", 100)
    write_nanogpt(folder / "a.bin", DOCUMENTS)
    dataset = open_dataset(folder)
    assert dataset.blocks[0] == 0
    assert dataset.blocks[-1] == len(DOCUMENTS)
    assert len(dataset.blocks) > 10
    # As `Loader` demands.
    assert (np.diff(dataset.blocks) > 0).all()
    assert (np.add.reduceat(dataset.lengths, dataset.blocks[:-1]) < 200).all()


@pytest.mark.parametrize("name", ["val.bin", "fineweb_val_000000.bin", "heldout/00000.bin", "a_validation.bin"])
def test_files_are_held_out_by_their_names(folder, name):
    write_nanogpt(folder / "train.bin", DOCUMENTS[:30])
    write_nanogpt(folder / name, DOCUMENTS[30:])
    assert documents_of(open_dataset(folder)) == DOCUMENTS[:30]
    assert documents_of(open_dataset(folder, "heldout")) == DOCUMENTS[30:]


def test_a_file_can_be_named_and_a_split_without_files_is_refused(folder):
    write_nanogpt(folder / "a.bin", DOCUMENTS[:30])
    write_nanogpt(folder / "b.bin", DOCUMENTS[30:])
    assert documents_of(open_dataset(folder / "b.bin")) == DOCUMENTS[30:]
    with pytest.raises(ValueError, match=r"tokens has no split 'heldout': files to hold out must have a word such as"):
        open_dataset(folder, "heldout")
    with pytest.raises(ValueError, match=r"b\.bin has no split 'heldout'"):
        open_dataset(folder / "b.bin", "heldout")


def test_the_fingerprint_follows_the_content(folder):
    fingerprints = set()
    for documents in (DOCUMENTS, DOCUMENTS[1:], [[5, *DOCUMENTS[0][1:]], *DOCUMENTS[1:]]):
        write_datatrove(folder / "a.ds", documents)
        fingerprints |= {open_dataset(folder).fingerprint, open_dataset(folder).fingerprint}
    assert len(fingerprints) == 3


def test_empty_documents_and_empty_files_are_left_out(folder):
    write_datatrove(folder / "a.ds", [[], DOCUMENTS[0], [], [], DOCUMENTS[1], []])
    # As a task of datatrove leaves them that had no documents.
    (folder / "b.ds").touch()
    (folder / "b.ds.index").touch()
    assert documents_of(open_dataset(folder)) == DOCUMENTS[:2]
    (folder / "a.ds").unlink()
    with pytest.raises(ValueError, match="has no tokens in its 1 files"):
        open_dataset(folder)


def cut(name, count):
    def damage(folder):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-count])

    return damage


def overwrite(name, offset, content):
    def damage(folder):
        path = folder / name
        old = path.read_bytes()
        path.write_bytes(old[:offset] + content + old[offset + len(content) :])

    return damage


def replace(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def remove(name):
    return lambda folder: (folder / name).unlink()


def pipe(name):
    def damage(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return damage


def swapped_ends(folder):
    ends = np.fromfile(folder / "a.ds.index", "<u8")
    ends[[3, 4]] = ends[[4, 3]]
    ends.tofile(folder / "a.ds.index")


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("a.ds", cut("a.ds", 2), r"a\.ds\.index does not fit a\.ds, which has .* bytes: .* tokens by the index"),
        ("a.ds", cut("a.ds", 1), r"a\.ds\.index does not fit a\.ds"),
        ("a.ds", cut("a.ds.index", 8), r"a\.ds\.index does not fit a\.ds, .* 1,\d+ tokens: its last document ends"),
        ("a.ds", cut("a.ds.index", 3), r"a\.ds\.index is damaged or incomplete: 317 bytes are no whole number of <u8"),
        ("a.ds", replace("a.ds.index", b""), r"a\.ds\.index does not fit a\.ds, .* ends at token 0"),
        ("a.ds", swapped_ends, "a.ds.index does not fit a.ds, .*: its ends do not increase"),
        ("a.ds", overwrite("a.ds.index", 0, b"\xff" * 8), "its ends do not increase"),
        ("a.ds", remove("a.ds.index"), r"a\.ds has no a\.ds\.index beside it.*save_index=True"),
        ("a.ds", replace("a.ds.loss", b"\1"), r"a\.ds has a a\.ds\.loss, by which some tokens do not count"),
        ("a.ds", replace("a.ds.metadata", b"bytes|4\n"), r"a\.ds\.index does not fit a\.ds|no whole number of <u4"),
        ("a.ds", replace("a.ds.metadata", b"bytes"), r"a\.ds\.metadata must begin with a tokenizer's name"),
        ("a.ds", replace("a.ds.metadata", b"\xff|3"), r"a\.ds\.metadata must begin with a tokenizer's name"),
        ("a.ds", pipe("a.ds"), r"a\.ds is not a file"),
        ("a.ds", pipe("a.ds.index"), r"a\.ds\.index is not a file"),
        ("a.bin", cut("a.bin", 4), r"a\.idx does not fit a\.bin, which has"),
        ("a.bin", cut("a.bin", 1), r"a\.bin is damaged or incomplete: .* no whole number of <i4"),
        ("a.bin", cut("a.idx", 1), r"a\.idx must have 842 bytes for 40 sequences and 41 ends .* got 841"),
        ("a.bin", cut("a.idx", 820), r"a\.idx is not an index of Megatron"),
        ("a.bin", overwrite("a.idx", 0, b"TNTIDX\0\0"), r"a\.idx is not an index of Megatron"),
        ("a.bin", overwrite("a.idx", 9, b"\2"), r"a\.idx has version 2; this program reads version 1"),
        ("a.bin", overwrite("a.idx", 17, b"\6"), r"a\.idx must say that ids are integers, .*; got 6"),
        ("a.bin", overwrite("a.idx", 17, b"\x63"), r"a\.idx must say that ids are integers, .*; got 99"),
        ("a.bin", overwrite("a.idx", 18, b"\xff" * 8), r"a\.idx must have 221,360,928,\S+ bytes"),
        ("a.bin", overwrite("a.idx", 34, b"\xff" * 4), r"a\.idx is damaged: its sequences must follow one another"),
        ("a.bin", overwrite("a.idx", 34 + 160, b"\1"), r"a\.idx is damaged: its sequences must follow one another"),
        ("a.bin", overwrite("a.idx", 34 + 480, b"\1"), r"a\.idx is damaged: its documents must have all 40 sequences"),
        ("a.bin", overwrite("a.idx", 34 + 488, b"\xff"), r"a\.idx is damaged: its documents must have all 40"),
        ("a.bin", overwrite("a.idx", 842, bytes(40)), r"a\.idx is of a multimodal dataset"),
        ("a.bin", pipe("a.idx"), r"a\.idx is not a file"),
        ("train.bin", cut("train.bin", 1), r"train\.bin is damaged or incomplete: .* no whole number of <u2"),
        ("train.bin", overwrite("train.bin", 8, b"\xff\xff"), r"train\.bin has the id 65,535, beyond the tokenizer's"),
        ("train.bin", pipe("train.bin"), r"train\.bin is not a file"),
        ("c.bin", cut("c.bin", 2), r"c\.bin must have 1,\d+ tokens by its header, got 1,\d+; it is damaged"),
    ],
)
def test_a_damaged_file_is_named(folder, kind, damage, message):
    write = {"a.ds": write_datatrove, "a.bin": write_megatron, "train.bin": write_nanogpt, "c.bin": write_llmc}[kind]
    write(folder / kind, DOCUMENTS)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        open_dataset(folder)


def test_a_file_of_megatron_without_its_index_is_not_taken_for_another(folder):
    write_megatron(folder / "a_text_document.bin", DOCUMENTS)
    write_megatron(folder / "b.bin", DOCUMENTS)
    (folder / "b.idx").unlink()
    with pytest.raises(ValueError, match=r"b\.bin has no b\.idx beside it"):
        open_dataset(folder)
    (folder / "a_text_document.idx").unlink()
    with pytest.raises(ValueError, match=r"a_text_document\.bin is a file of Megatron by its name"):
        open_dataset(folder)


def test_ids_of_two_bytes_are_refused_for_a_larger_vocabulary(tmp_path):
    class Wide(ByteTokenizer):
        vocab_size = 70_000

    write_nanogpt(tmp_path / "a.bin", DOCUMENTS)
    with pytest.raises(ValueError, match=r"a\.bin must have a header.*ids are uint16, and the tokenizer has 70,000"):
        TokenFiles(tmp_path, tokenizer=Wide())


def test_an_id_beyond_the_vocabulary_is_named_when_it_is_read(folder):
    write_datatrove(folder / "a.ds", [*DOCUMENTS, [1, 2, 300]])
    with pytest.raises(ValueError, match=r"a\.ds, document 40: token 2 of document 40 is 300, beyond the vocabulary"):
        list(Loader(open_dataset(folder), 16, 1, short="join", epochs=1, prefetch=0))


def test_a_folder_that_does_not_say_its_tokenizer_is_refused(folder):
    (folder / "sympow_tokenizer.json").unlink()
    write_datatrove(folder / "a.ds", DOCUMENTS, tokenizer="somebody/elses")
    message = (
        r"tokens does not say which tokenizer made its ids; its metadata name 'somebody/elses', which is not here: put "
        r"the tokenizer\.json into .*tokens, or name it with `sympow data tokenizer .*tokens NAME`"
    )
    with pytest.raises(ValueError, match=message):
        open_dataset(folder)
    assert documents_of(TokenFiles(folder, tokenizer=ByteTokenizer())) == DOCUMENTS


def test_the_tokenizer_is_found_beside_the_files_or_by_the_metadata(tmp_path):
    pytest.importorskip("tokenizers")
    made = train_bpe(["some text to learn from"] * 3, 270)
    made.save(tmp_path / "made")
    tokens, document = tmp_path / "tokens", [*made.encode("some text"), made.boundary]
    write_datatrove(tokens / "a.ds", [document], "<u2", tmp_path / "made/tokenizer.json")
    dataset = open_dataset(tokens)
    assert dataset.load_tokenizer().decode(dataset.read(0, 0, int(dataset.lengths[0]))) == "some text"
    # What lies beside the files counts first.
    (tokens / "tokenizer.json").write_bytes((tmp_path / "made" / "tokenizer.json").read_bytes())
    (tokens / "a.ds.metadata").write_text("elsewhere/tokenizer.json|2\n")
    assert open_dataset(tokens).vocab_size == made.vocab_size


def invoke(*arguments):
    return CliRunner().invoke(app, ["data", *map(str, arguments)], terminal_width=200)


def test_the_command_names_a_tokenizer_and_info_describes_the_folder(tmp_path):
    write_nanogpt(tmp_path / "tokens" / "train.bin", DOCUMENTS[:30])
    write_nanogpt(tmp_path / "tokens" / "val.bin", DOCUMENTS[30:])
    refused = invoke("info", tmp_path / "tokens")
    assert refused.exit_code == 2
    assert "sympow data tokenizer" in refused.output
    result = invoke("tokenizer", tmp_path / "tokens", "bytes")
    assert result.exit_code == 0, result.output
    assert "bytes, 257 tokens, boundary token 256" in result.output
    described = json.loads(invoke("info", tmp_path / "tokens", "--json", "--tokens", "9").output)
    assert described["format"] == "nanoGPT"
    assert [described["splits"][split]["documents"] for split in ("train", "heldout")] == [30, 10]
    assert described["splits"]["train"]["beginnings"][1]["text"] == "document "
    assert "│ format         │ nanoGPT" in invoke("info", tmp_path / "tokens").output
    assert invoke("tokenizer", tmp_path, "gpt5").exit_code == 2


def test_a_tokenizer_is_named_only_for_token_files(tmp_path):
    result = invoke("tokenizer", tmp_path, "bytes")
    assert result.exit_code == 2
    assert "folder must have token files in it (.ds, .bin)" in result.stderr
    assert not list(tmp_path.iterdir())


TEXTS = [f"document {n}: " + "some words " * (n % 7 + 1) for n in range(30)]


@pytest.fixture
def tokenizer_file(tmp_path):
    pytest.importorskip("tokenizers")
    train_bpe(TEXTS, 300).save(tmp_path / "made")
    return tmp_path / "made" / "tokenizer.json"


@pytest.mark.parametrize("megatron", [False, True])
def test_files_of_datatrove_itself(tmp_path, tokenizer_file, megatron):
    pytest.importorskip("datatrove", reason="datatrove is not installed")
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer, MegatronDocumentTokenizer

    options = {"tokenizer_name_or_path": str(tokenizer_file), "eos_token": "<|endoftext|>"}
    if megatron:
        step = MegatronDocumentTokenizer(str(tmp_path / "tokens"), **options)
    else:
        step = DocumentTokenizer(str(tmp_path / "tokens"), shuffle_documents=False, **options)
    for rank in range(2):
        half = TEXTS[rank * 15 : rank * 15 + 15]
        step.run((Document(text, str(n)) for n, text in enumerate(half)), rank, 2)
    if megatron:
        (tmp_path / "tokens" / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    dataset = open_dataset(tmp_path / "tokens")
    tokenizer = dataset.load_tokenizer()
    assert documents_of(dataset) == [[*tokenizer.encode(text).tolist(), tokenizer.boundary] for text in TEXTS]


@pytest.mark.parametrize("dtype", [np.int32, np.uint16])
def test_files_of_megatron_itself(folder, dtype):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    import torch

    builder = indexed.IndexedDatasetBuilder(str(folder / "a_text_document.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document) - 3, 3])
    builder.finalize(str(folder / "a_text_document.idx"))
    assert documents_of(open_dataset(folder)) == DOCUMENTS
