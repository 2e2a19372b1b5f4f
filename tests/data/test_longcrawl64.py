"""LongCrawl64: a small zarr store with the published layout."""

import json
import os

import numpy as np
import pytest

from sympow.data import Loader, load_tokenizer, open_dataset
from sympow.data.describe import describe
from sympow.data.formats.longcrawl64 import LongCrawl64

zarr = pytest.importorskip("zarr")
numcodecs = pytest.importorskip("numcodecs")

ROWS, LENGTH, CHUNK = 20, 64, (8, 16)


def write(address, seed=0, **changes):
    tokens = np.random.default_rng(seed).integers(0, 50_256, (ROWS, LENGTH), dtype=np.uint16)
    options = {
        "shape": tokens.shape,
        "chunks": CHUNK,
        "dtype": "uint16",
        "zarr_format": 2,
        "compressors": numcodecs.Blosc(cname="lz4"),
        "fill_value": 0,
        "attributes": {"encoder": "tiktoken-gpt2"},
        **changes,
    }
    array = zarr.create_array(str(address), **options)
    array[:] = tokens.astype(options["dtype"])
    return tokens


@pytest.fixture
def store(tmp_path):
    """A folder with both arrays, and their contents."""
    return tmp_path, {split: write(tmp_path / f"{split}.zarr", n) for n, split in enumerate(("train", "heldout"))}


def test_the_store_of_these_tests_is_laid_out_as_published(store):
    metadata = json.loads((store[0] / "train.zarr" / ".zarray").read_text())
    assert metadata["zarr_format"] == 2
    assert metadata["dtype"] == "<u2"
    assert (metadata["compressor"]["id"], metadata["compressor"]["cname"]) == ("blosc", "lz4")
    assert (store[0] / "train.zarr" / "2.3").is_file()


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_range_of_every_row_is_read(store, split):
    folder, tokens = store
    dataset = open_dataset(folder, split)
    assert dataset.lengths.tolist() == [LENGTH] * ROWS
    assert (dataset.vocab_size, dataset.boundary) == (50_257, 50_256)
    for row in (0, 7, 8, 19):
        for start, stop in ((0, LENGTH), (15, 17), (16, 32), (5, 5), (63, 64), (0, 1)):
            assert dataset.read(row, start, stop).tolist() == tokens[split][row, start:stop].tolist()


def test_info_describes_the_splits_that_are_there(store):
    described = describe(str(store[0]), shown_tokens=4)["splits"]
    assert list(described) == ["train", "heldout"]
    assert all((split["documents"], split["tokens"]) == (ROWS, ROWS * LENGTH) for split in described.values())
    first = store[1]["heldout"][0, :4]
    assert described["heldout"]["beginnings"][0]["tokens"] == first.tolist()
    assert described["heldout"]["beginnings"][0]["text"] == load_tokenizer("gpt2").decode(first)
    assert list(describe(str(store[0] / "heldout.zarr"))["splits"]) == ["heldout"]


def test_targets_are_the_row_and_inputs_the_row_shifted_by_one(store):
    folder, tokens = store
    batches = list(Loader(open_dataset(folder), LENGTH, 4, epochs=1))
    assert len(batches) == ROWS // 4
    seen = []
    for batch in batches:
        for row, document in enumerate(batch.document_ids.tolist()):
            assert batch.targets[row].tolist() == tokens["train"][document].tolist()
            assert batch.inputs[row].tolist() == [50_256, *tokens["train"][document][:-1].tolist()]
            seen.append(document)
    assert sorted(seen) == list(range(ROWS))


def test_shorter_contexts_cut_the_row_and_still_see_the_token_before(store):
    folder, tokens = store
    for batch in Loader(open_dataset(folder), 16, 8, epochs=1):
        for row in range(batch.rows):
            document, start = batch.document_ids[row].item(), batch.document_starts[row].item()
            assert batch.targets[row].tolist() == tokens["train"][document, start : start + 16].tolist()
            before = 50_256 if start == 0 else tokens["train"][document, start - 1]
            assert batch.inputs[row, 0].item() == before


@pytest.mark.parametrize("seed", range(6))
def test_a_shuffled_epoch_decodes_every_chunk_once(store, monkeypatch, seed):
    # Blocks of 8, 8 and 4 rows; the cache holds two of them.
    dataset = LongCrawl64(store[0], cache_bytes=2 * 16 * LENGTH)
    decoded = []
    decode = dataset._decode
    monkeypatch.setattr(
        dataset,
        "_decode",
        lambda block, first, last: (
            decoded.extend((block, column) for column in range(first, last)),
            decode(block, first, last),
        ),
    )
    loader = Loader(dataset, 16, 2, epochs=1, seed=seed, group_tokens=16 * LENGTH)
    documents = [document for batch in loader for document in batch.document_ids.tolist()]
    assert documents != sorted(documents)
    assert sorted(decoded) == [(block, column) for block in range(3) for column in range(4)]


def test_the_cache_stays_within_its_bytes(store):
    chunk_bytes = CHUNK[0] * CHUNK[1] * 2
    dataset = LongCrawl64(store[0], cache_bytes=5 * chunk_bytes)
    for row in range(ROWS):
        dataset.read(row, 0, LENGTH)
        assert sum(chunk.nbytes for chunk in dataset._cache.values()) <= 5 * chunk_bytes


def test_a_row_needs_its_chunks_at_once_whatever_the_cache(store):
    tight = LongCrawl64(store[0], cache_bytes=1)
    # The last read needs the oldest chunk of the cache.
    for row, start, stop in ((0, 0, 16), (8, 0, 32), (0, 0, LENGTH)):
        assert tight.read(row, start, stop).tolist() == store[1]["train"][row, start:stop].tolist()


def test_an_fsspec_address_is_read():
    tokens = write("memory://longcrawl64/train.zarr")
    dataset = open_dataset("memory://longcrawl64")
    assert dataset.read(19, 10, 40).tolist() == tokens[19, 10:40].tolist()


def test_a_single_array_has_the_split_of_its_name(store):
    folder, tokens = store
    for split, other in (("train", "heldout"), ("heldout", "train")):
        array, address = folder / f"{split}.zarr", f"memory://single/{split}.zarr"
        for name, expected in ((array, tokens[split]), (f"{array}/", tokens[split]), (address, write(address))):
            assert open_dataset(name, split).read(3, 0, LENGTH).tolist() == expected[3].tolist()
            with pytest.raises(
                ValueError, match=rf"split '{other}', and .*{split}\.zarr has only '{split}'; name the folder"
            ):
                open_dataset(name, other)


def test_an_array_of_another_name_is_for_training(tmp_path):
    tokens = write(tmp_path / "mirror.zarr")
    assert open_dataset(tmp_path / "mirror.zarr").read(0, 0, LENGTH).tolist() == tokens[0].tolist()
    with pytest.raises(ValueError, match=r"must have the split 'heldout', and .*mirror\.zarr has only 'train'"):
        open_dataset(tmp_path / "mirror.zarr", "heldout")


def test_a_missing_chunk_is_refused_on_opening_a_folder(store):
    (store[0] / "train.zarr" / "1.2").unlink()
    with pytest.raises(
        ValueError, match=r"train\.zarr: 1 of 12 chunks are missing, first 1\.2; they would read as zeros"
    ):
        open_dataset(store[0])
    # The rows before it are intact.
    assert len(LongCrawl64(store[0], documents=8).lengths) == 8


def test_a_missing_chunk_behind_an_address_is_refused_on_reading():
    write("memory://broken/train.zarr")
    import fsspec

    fsspec.filesystem("memory").rm("/broken/train.zarr/1.2")
    dataset = open_dataset("memory://broken")
    assert dataset.read(8, 0, 32).any()
    with pytest.raises(ValueError, match=r"broken/train\.zarr: chunk 1\.2 is missing or empty, all of it reads as 0"):
        dataset.read(8, 0, LENGTH)


def test_an_unreadable_chunk_is_named(store):
    path = store[0] / "train.zarr" / "0.1"
    path.write_bytes(b"\0" * 40)
    with pytest.raises(ValueError, match=r"train\.zarr cannot be decoded in chunks 0\.1 to 0\.1"):
        open_dataset(store[0]).read(0, 16, 20)


def test_a_token_beyond_the_vocabulary_names_the_row(store):
    array = zarr.open_array(str(store[0] / "train.zarr"), mode="r+")
    array[3, 20] = 60_000
    with pytest.raises(ValueError, match=r"train\.zarr, row 3: token 20 of document 3 is 60000, beyond the vocab"):
        list(Loader(open_dataset(store[0]), LENGTH, 1, epochs=1))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attributes": {"encoder": "llama"}}, "must have the attribute encoder='tiktoken-gpt2', got 'llama'"),
        ({"attributes": {}}, "got None"),
        ({"dtype": "int32"}, "must be uint16"),
    ],
)
def test_another_array_is_refused(tmp_path, changes, message):
    write(tmp_path / "train.zarr", **changes)
    with pytest.raises(ValueError, match=message):
        open_dataset(tmp_path)


def test_mistakes_are_named(store, tmp_path):
    with pytest.raises(ValueError, match=r"other\.zarr is not a zarr array"):
        open_dataset(tmp_path / "other.zarr")
    with pytest.raises(ValueError, match="documents must be at most the 20"):
        LongCrawl64(store[0], documents=21)
    with pytest.raises(ValueError, match="split must be one of 'train', 'heldout'; got 'test'"):
        open_dataset(store[0], "test")
    with pytest.raises(ValueError, match=r"has 64 tokens; tokens 60 to 65"):
        open_dataset(store[0]).read(0, 60, 65)


def change_metadata(store, **changes):
    path = store[0] / "train.zarr" / ".zarray"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape": [10**15, LENGTH]}, r"documents of .*train\.zarr must be at most 1,000,000,000"),
        ({"shape": [10**8, LENGTH]}, r"at least [\d,]+ of 50,000,000 chunks are missing"),
        ({"shape": [ROWS, 10**12]}, r"tokens of a document of .*train\.zarr must be at most 2,147,483,647"),
        (
            {"chunks": [10**6, 10**6]},
            r"bytes of a chunk of .*train\.zarr must be at most 2,147,483,647, the most that zarr",
        ),
        # zarr 3.4 warns, and reads chunks of 1 row, most of which are not there.
        ({"chunks": [0, 16]}, r"train\.zarr(: at least 66 of 80 chunks| is not a zarr array| must hold tokens)"),
        ({"shape": [0, 0]}, r"train\.zarr must hold tokens"),
        ({"shape": [-1, LENGTH]}, r"train\.zarr is not a zarr array"),
        ({"shape": "wide"}, r"train\.zarr is not a zarr array"),
        ({"shape": None}, r"train\.zarr is not a zarr array"),
        ({"chunks": [[]]}, r"train\.zarr is not a zarr array"),
        ({"dtype": "|O"}, r"train\.zarr is not a zarr array"),
        ({"dtype": 3}, r"train\.zarr is not a zarr array"),
        ({"compressor": {"id": "unheard of"}}, r"train\.zarr is not a zarr array"),
        ({"compressor": 3}, r"train\.zarr is not a zarr array"),
        ({"filters": [{"id": "pickle"}]}, r"train\.zarr (is not a zarr array|has pickled chunks)"),
        ({"compressor": {"id": "pickle"}}, r"train\.zarr (is not a zarr array|has pickled chunks)"),
        ({"zarr_format": 9}, r"train\.zarr is not a zarr array"),
        ({"order": "sideways"}, r"train\.zarr is not a zarr array"),
    ],
    ids=str,
)
def test_metadata_that_claims_too_much_or_nonsense_is_refused(store, changes, message):
    change_metadata(store, **changes)
    with pytest.raises(ValueError, match=message):
        open_dataset(store[0])


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "null", "[" * 100_000, '{"zarr_format": 2}'])
@pytest.mark.parametrize("name", [".zarray", ".zattrs"])
def test_metadata_that_is_not_json_is_refused(store, name, content):
    (store[0] / "train.zarr" / name).write_text(content)
    with pytest.raises(ValueError, match=r"train\.zarr (is not a zarr array|must have the attribute encoder)"):
        open_dataset(store[0])


@pytest.mark.parametrize("name", [".zarray", ".zattrs", "zarr.json", "0.0"])
def test_pipes_in_a_store_are_not_waited_for(store, name):
    path = store[0] / "train.zarr" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(ValueError, match=r"is not a file|chunks are missing"):
        open_dataset(store[0])
