"""`prepare`: shards, the same files after any interruption, and error messages."""

import gc
import gzip
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

import sympow.data.preparation as module
from sympow.data import load_tokenizer, open_dataset, prepare
from sympow.data.describe import describe
from sympow.data.manifest import WORK_FOLDER
from sympow.data.preparation import LOCK_FILE, write_portion
from sympow.data.sources import Reader, ReadingPlace, Source
from sympow.data.tokenizer import ByteTokenizer


def texts_of(dataset):
    """The decoded text of every document, by the document's name."""
    tokenizer = dataset.load_tokenizer()
    return {
        dataset.document_name(n): tokenizer.decode(dataset.read(n, 0, int(length)))
        for n, length in enumerate(dataset.lengths)
    }


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def jsonl_texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_every_document_comes_back_from_the_shards(corpus, tmp_path):
    manifest = prepare([corpus], tmp_path / "out", heldout=0, workers=1)
    texts = texts_of(open_dataset(tmp_path / "out"))
    assert texts[str(corpus / "a.txt")] == "first document\n"
    assert texts[str(corpus / "more" / "b.txt")] == "zweites Dokument: größer\n"
    assert texts[f"{corpus / 'c.jsonl'}, row 0"] == "line 0 "
    assert [text for name, text in texts.items() if "jsonl" in name] == jsonl_texts(corpus / "c.jsonl")
    assert manifest.counts["documents"] == len(texts) == 42
    assert manifest.counts["files"] == 3
    assert manifest.counts["files_ignored"] == [str(corpus / "picture.png")]
    assert manifest.counts["tokens"] == sum(len(text.encode()) + 1 for text in texts.values())
    assert manifest.counts["source_bytes"] == sum(len(text.encode()) for text in texts.values())


def test_documents_end_in_the_boundary(corpus, tmp_path):
    prepare([corpus / "a.txt"], tmp_path / "out", heldout=0, workers=1)
    dataset = open_dataset(tmp_path / "out")
    assert dataset.read(0, 0, 16).tolist() == [*b"first document\n", 256]
    assert dataset.read(0, 6, 9).tolist() == [*b"doc"]
    with pytest.raises(ValueError, match="has 16 tokens; tokens 10 to 17"):
        dataset.read(0, 10, 17)


@pytest.mark.parametrize("saved_rows", [1, 3, 1000])
def test_reading_goes_on_from_any_document(corpus, tmp_path, monkeypatch, saved_rows):
    monkeypatch.setattr("sympow.data.sources.SAVED_ROWS", saved_rows)
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": [f"row {n}" for n in range(9)]}), tmp_path / "t.parquet", row_group_size=2)
    names = [corpus / "a.txt", corpus / "c.jsonl", corpus / "more" / "b.txt", tmp_path / "t.parquet"]
    sources = [Source(str(name), "train") for name in names]
    reader = Reader(sources, "text")
    documents, places = zip(*((document, reader.place) for document in reader), strict=True)
    assert [document.text for document in documents if ".jsonl" in document.source] == jsonl_texts(names[1])
    assert len(documents) == 51
    # Opening a table takes up to a second, so this continues from few places: at both ends of each source and inside.
    every_place = (*places, reader.place)
    for number in (0, 1, 5, 40, 41, 42, 46, 50, 51):
        place = every_place[number]
        # As the record of a shard has it.
        again = ReadingPlace(**json.loads(json.dumps(asdict(place))))
        assert list(Reader(sources, "text", again)) == list(documents[number:])


def test_a_large_file_becomes_several_shards_and_blocks_are_whole_ones(corpus, tmp_path, monkeypatch):
    prepare([corpus / "c.jsonl"], tmp_path / "out", heldout=0, workers=1, shard_bytes=1000)
    dataset = open_dataset(tmp_path / "out")
    assert list(texts_of(dataset).values()) == jsonl_texts(corpus / "c.jsonl")
    assert len(dataset.manifest.splits["train"]) > 4
    assert dataset.blocks.tolist() == [0, 40]
    monkeypatch.setattr("sympow.data.formats.shards.BLOCK_TOKENS", 2500)
    dataset = open_dataset(tmp_path / "out")
    ends = np.cumsum([shard.documents for shard in dataset.shards]).tolist()
    assert 2 < len(dataset.blocks) <= len(ends)
    assert set(dataset.blocks.tolist()) <= {0, *ends}
    tokens = np.add.reduceat(dataset.lengths, dataset.blocks[:-1])
    shard_tokens = [shard.tokens for shard in dataset.shards]
    assert all(count <= 2500 or count in shard_tokens for count in tokens.tolist())


def test_tables_of_every_kind_are_read(tmp_path):
    pytest.importorskip("datasets")
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = ["one, and more", "zweite Zeile: größer"]
    (tmp_path / "a.csv").write_text(f'id,text\n1,"{rows[0]}"\n2,{rows[1]}\n')
    (tmp_path / "b.tsv").write_text(f"text\tid\n{rows[0]}\t1\n{rows[1]}\t2\n")
    (tmp_path / "c.json").write_text(json.dumps([{"text": text} for text in rows]))
    lines = "\n".join(json.dumps({"text": text}) for text in rows).encode()
    (tmp_path / "d [1].jsonl").write_bytes(lines)
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(lines))
    pq.write_table(pa.table({"id": [1, 2], "text": rows}), tmp_path / "f.parquet", row_group_size=1)
    sources = sorted(tmp_path.iterdir())
    prepare(sources, tmp_path / "out", heldout=0, workers=1, shard_bytes=40)
    texts = texts_of(open_dataset(tmp_path / "out"))
    assert list(texts) == [f"{source}, row {row}" for source in sources for row in range(2)]
    assert list(texts.values()) == rows * 6


def test_tables_name_the_extra_that_reads_them(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prepare([corpus / "a.txt"], tmp_path / "text", heldout=0, workers=1).counts["documents"] == 1
    with pytest.raises(ModuleNotFoundError, match=r"datasets is not installed; .*'conformal-sympow\[datasets\]'"):
        prepare([corpus / "c.jsonl"], tmp_path / "table", heldout=0, workers=1)


def test_a_dataset_is_found_by_name(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "mine").mkdir()
    for split, text in (("train", "to learn from"), ("validation", "to hold out")):
        (tmp_path / "mine" / f"{split}.jsonl").write_text(json.dumps({"body": text}))
    name, options = f"hf:{tmp_path / 'mine'}", {"field": "body", "workers": 1}
    first = prepare([name], tmp_path / "out", heldout_sources=[f"{name},split=validation"], **options)
    assert texts_of(open_dataset(tmp_path / "out")) == {f"{name}, row 0": "to learn from"}
    assert splits_of(tmp_path / "out") == [["to learn from"], ["to hold out"]]
    assert prepare([name], tmp_path / "out", heldout_sources=[f"{name},split=validation"], **options) == first
    (tmp_path / "mine" / "train.jsonl").write_text(json.dumps({"body": "to learn from instead"}))
    with pytest.raises(ValueError, match="prepared from something else: sources differ"):
        prepare([name], tmp_path / "out", heldout_sources=[f"{name},split=validation"], **options)
    with pytest.raises(ValueError, match=r"mine,split=test cannot be read by datasets: Bad split: test"):
        prepare([f"{name},split=test"], tmp_path / "other", **options)


@pytest.mark.slow
def test_two_workers_write_what_one_does(corpus, tmp_path):
    options = {"shard_bytes": 1000, "heldout": 0.3}
    prepare([corpus], tmp_path / "one", workers=1, **options)
    prepare([corpus], tmp_path / "two", workers=2, **options)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


PREPARING = """
import sys, time
from sympow.data import prepare

def stop_at_the_first_shard(progress):
    if progress.documents:
        print("writing", flush=True)
        time.sleep(600)

if __name__ == "__main__":
    prepare([sys.argv[1]], sys.argv[2], workers=2, shard_bytes=1000, heldout=0, on_progress=stop_at_the_first_shard)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["SIGTERM", "SIGKILL"])
def test_workers_end_when_their_parent_is_killed(corpus, tmp_path, ending):
    psutil = pytest.importorskip("psutil")
    (tmp_path / "preparing.py").write_text(PREPARING)
    command = [sys.executable, str(tmp_path / "preparing.py"), str(corpus), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "writing\n"
        children = psutil.Process(parent.pid).children()
        parent.send_signal(getattr(signal, ending))
    try:
        # On Linux also the process in which Python keeps track of semaphores.
        assert len(children) >= 2
        assert psutil.wait_procs(children, timeout=60)[1] == []
    finally:
        for child in children:
            if child.is_running():
                child.kill()
    # What they left is no obstacle, and makes no difference.
    for folder in ("out", "undisturbed"):
        prepare([corpus], tmp_path / folder, workers=1, shard_bytes=1000, heldout=0)
    assert files_in(tmp_path / "out") == files_in(tmp_path / "undisturbed")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_an_interrupted_run_goes_on_and_gives_the_same_files(corpus, tmp_path, monkeypatch, tokenizer):
    options = {"shard_bytes": 1000, "heldout": 0.3, "workers": 1, "tokenizer": tokenizer}
    if tokenizer == "bpe":
        options["vocab_size"] = 280
    prepare([corpus], tmp_path / "whole", **options)
    done = []

    def stop_at_the_third(portion, *rest):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(portion.number)
        return write_portion(portion, *rest)

    out = tmp_path / "out"
    monkeypatch.setattr(module, "write_portion", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        prepare([corpus], out, **options)
    with pytest.raises(ValueError, match=r"partly prepared: run the same `sympow data prepare` again"):
        open_dataset(out)
    again = []
    monkeypatch.setattr(module, "write_portion", lambda *a: again.append(a[0].number) or write_portion(*a))
    prepare([corpus], out, **options)
    assert done == [0, 1, 2]
    assert again[0] == 3
    assert files_in(out) == files_in(tmp_path / "whole")


def test_a_finished_run_is_not_repeated(corpus, tmp_path, monkeypatch):
    first = prepare([corpus], tmp_path / "out", heldout=0, workers=1)
    monkeypatch.setattr(module, "write_portion", lambda *a: pytest.fail("did the work again"))
    assert prepare([corpus], tmp_path / "out", heldout=0, workers=1) == first


def test_a_folder_prepared_otherwise_is_refused_until_overwritten(corpus, tmp_path):
    out = tmp_path / "out"
    prepare([corpus], out, workers=1)
    (out / "notes").write_text("mine")
    with pytest.raises(ValueError, match=r"prepared from something else: heldout \(was 0\.02, now 0\.5\) differ"):
        prepare([corpus], out, heldout=0.5, workers=1)
    (corpus / "a.txt").write_text("another document")
    with pytest.raises(ValueError, match="prepared from something else: sources differ"):
        prepare([corpus], out, workers=1)
    prepare([corpus], out, workers=1, overwrite=True)
    assert "another document" in texts_of(open_dataset(out)).values()
    assert (out / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("sources", "options", "message"),
    [
        (["nowhere"], {}, "nowhere is neither a file nor a folder, nor hf:NAME of a dataset"),
        (["hf:"], {}, "a dataset must be named as hf:NAME or hf:NAME,split=train,OPTION=VALUE; got 'hf:'"),
        (["hf:a/b,split"], {}, "a dataset must be named as hf:NAME"),
        (["empty"], {}, r"empty has no document in it: text \(\.txt"),
        (["a.txt", "a.txt"], {}, "twice"),
        ([], {}, "at least one file or folder"),
        (["a.txt"], {"tokenizer": "gpt5"}, "tokenizer must be"),
        (["a.txt"], {"tokenizer": "empty"}, "holds no saved tokenizer"),
        (["a.txt"], {"tokenizer": "a.txt"}, r"not a readable tokenizer\.json"),
        (["a.txt"], {"tokenizer": "bpe", "vocab_size": 3}, "vocab_size must be at least 257"),
        (["a.txt"], {"vocab_size": 300}, "vocab_size is for tokenizer='bpe'"),
        (["a.txt"], {"tokenizer": "gpt2", "boundary_token": "</s>"}, "boundary_token is for"),
        (["a.txt"], {"heldout": 1.0}, "heldout must be at least 0 and below 1, got 1.0"),
        (["a.txt"], {"heldout": 0.1, "heldout_sources": ["a.txt"]}, "give one of them"),
        (["a.txt", "c.jsonl"], {"field": "body", "heldout": 0}, r"c\.jsonl: no column 'body'; it has 'text', 'id'"),
        (["a.txt", "t.parquet"], {"field": "text", "heldout": 0}, r"t\.parquet: no column 'text'"),
        (["a.txt"], {"heldout_sources": ["nowhere"]}, "neither a file nor a folder"),
        (["a.txt"], {"workers": 0}, "workers must be at least 1"),
    ],
)
def test_mistakes_are_named_and_a_refused_overwrite_leaves_the_folder_as_it_was(
    corpus, tmp_path, monkeypatch, sources, options, message
):
    monkeypatch.chdir(corpus)
    (corpus / "empty").mkdir()
    if "t.parquet" in sources:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"body": ["row"]}), "t.parquet")
    out = tmp_path / "out"
    prepare(["a.txt", "c.jsonl"], out, tokenizer="bpe", vocab_size=280, workers=1)
    before = files_in(out)
    with pytest.raises(ValueError, match=message):
        prepare(sources, out, overwrite=True, **{"workers": 1, **options})
    assert files_in(out) == before


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_a_dataset_is_overwritten_with_its_own_tokenizer(corpus, tmp_path, name):
    out = tmp_path / "out"
    prepare([corpus], out, tokenizer="bpe", vocab_size=280, workers=1)
    before = load_tokenizer(out)
    options = {"tokenizer": str(out / name), "heldout": 0, "workers": 1}
    done = prepare([corpus / "a.txt"], out, overwrite=True, **options)
    assert list(texts_of(open_dataset(out)).values()) == ["first document\n"]
    assert load_tokenizer(out).encode("größer").tolist() == before.encode("größer").tolist()
    # The same request is recognized as done.
    assert prepare([corpus / "a.txt"], out, **options) == done


def test_an_overwrite_that_was_interrupted_can_be_repeated(corpus, tmp_path, monkeypatch):
    out = tmp_path / "out"
    prepare([corpus], out, shard_bytes=1000, workers=1)
    unlink, removed = Path.unlink, []

    def stop_at_the_third(path, **options):
        removed.append(path)
        if len(removed) == 3:
            raise KeyboardInterrupt
        unlink(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            prepare([corpus / "a.txt"], out, heldout=0, overwrite=True, workers=1)
    prepare([corpus / "a.txt"], out, heldout=0, workers=1)
    prepare([corpus / "a.txt"], tmp_path / "new", heldout=0, workers=1)
    assert files_in(out) == files_in(tmp_path / "new")


@pytest.mark.parametrize("overwrite", [False, True])
def test_two_preparations_do_not_write_to_one_folder(corpus, tmp_path, overwrite):
    out, refused = tmp_path / "out", []

    def prepare_meanwhile(progress):
        if not refused:
            with pytest.raises(ValueError, match="is in use by another preparation; wait until it has ended") as error:
                prepare([corpus / "a.txt"], out, heldout=0, workers=1, overwrite=overwrite)
            refused.append(error)

    prepare([corpus], out, heldout=0, workers=1, on_progress=prepare_meanwhile)
    assert refused
    assert len(open_dataset(out).lengths) == 42
    assert not [name for name in files_in(out) if "lock" in name]


def test_the_lock_of_a_killed_preparation_is_in_nobodys_way(corpus, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / LOCK_FILE).touch()
    prepare([corpus], out, heldout=0, workers=1)
    assert not (out / LOCK_FILE).exists()
    (out / LOCK_FILE).touch()
    assert describe(str(out), verify=True)["splits"]["train"]["documents"] == 42
    assert len(open_dataset(out).lengths) == 42


@pytest.mark.parametrize("out", ["out", "new/folders/out"])
def test_a_refused_preparation_leaves_no_folder(corpus, tmp_path, out):
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match="tokenizer must be"):
        prepare([corpus], tmp_path / out, tokenizer="gpt5", workers=1)
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_with_other_things_is_refused_and_left_alone(corpus, tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "tokenizer.json").write_text("somebody's")
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        prepare([corpus], tmp_path / "out", workers=1, overwrite=overwrite)
    assert files_in(tmp_path / "out") == {"tokenizer.json": b"somebody's"}


def test_held_out_documents_are_a_share_and_copies_stay_together(tmp_path):
    lines = [json.dumps({"text": f"document {n % 500}"}) for n in range(1000)]
    (tmp_path / "d.jsonl").write_text("\n".join(lines))
    prepare([tmp_path / "d.jsonl"], tmp_path / "out", heldout=0.2, workers=1)
    train, heldout = (set(texts_of(open_dataset(tmp_path / "out", split)).values()) for split in ("train", "heldout"))
    assert not train & heldout
    assert len(train | heldout) == 500
    assert 70 <= len(heldout) <= 130


def test_held_out_sources_are_held_out(corpus, tmp_path):
    prepare([corpus / "c.jsonl"], tmp_path / "out", heldout_sources=[corpus / "a.txt"], workers=1)
    assert list(texts_of(open_dataset(tmp_path / "out", "heldout")).values()) == ["first document\n"]
    assert len(open_dataset(tmp_path / "out").lengths) == 40


@pytest.mark.parametrize("heldout", ["more/b.txt", "more", "a.txt", "link.txt"])
def test_files_of_a_source_can_be_held_out(corpus, tmp_path, heldout):
    (tmp_path / "link.txt").symlink_to(corpus / "a.txt")
    held = tmp_path / heldout if heldout == "link.txt" else corpus / heldout
    manifest = prepare([corpus], tmp_path / "out", heldout_sources=[held], workers=1)
    train, heldout_texts = splits_of(tmp_path / "out")
    small = ["first document\n", "zweites Dokument: größer\n"]
    assert heldout_texts == [small["more" in heldout]]
    assert sorted(train) == sorted([small["more" not in heldout], *jsonl_texts(corpus / "c.jsonl")])
    assert manifest.counts["files"] == 3


def test_ignored_files_are_counted_once_and_without_those_held_out(corpus, tmp_path):
    (corpus / "more" / "notes.xyz").write_text("named by itself")
    (corpus / "more" / "table.bin").write_bytes(b"\xff")
    held = [corpus / "more", corpus / "more" / "notes.xyz"]
    manifest = prepare([corpus], tmp_path / "out", heldout_sources=held, workers=1)
    assert sorted(manifest.counts["files_ignored"]) == [str(corpus / "more" / "table.bin"), str(corpus / "picture.png")]


@pytest.mark.parametrize(
    ("sources", "heldout_sources", "message"),
    [
        (
            ["more/b.txt", "c.jsonl"],
            ["more/b.txt"],
            r"sources and heldout_sources both contain more/b\.txt; name its fold",
        ),
        (["more/b.txt"], ["more"], r"sources and heldout_sources both contain more/b\.txt"),
        (["more", "more/b.txt"], ["a.txt"], r"sources contain more/b\.txt twice"),
        (["c.jsonl"], ["more", "more/b.txt"], r"sources contain more/b\.txt twice"),
        (["more"], ["more"], "heldout_sources must leave a file of the sources for training"),
    ],
)
def test_a_file_that_is_named_twice_is_refused(corpus, tmp_path, monkeypatch, sources, heldout_sources, message):
    monkeypatch.chdir(corpus)
    with pytest.raises(ValueError, match=message):
        prepare(sources, tmp_path / "out", heldout_sources=heldout_sources, workers=1)


def splits_of(folder):
    """Texts of both splits, in order."""
    return [list(texts_of(open_dataset(folder, split)).values()) for split in ("train", "heldout")]


def write_documents(folder, count, copies=1):
    folder.mkdir()
    for n in range(count):
        for copy in range(copies):
            (folder / f"{n}-{copy}.txt").write_text(f"document {n} has a text of its own")
    return folder


def test_two_hundredths_are_held_out_by_default(tmp_path):
    texts = [f"document {n}" for n in range(2000)]
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    manifest = prepare([tmp_path / "d.jsonl"], tmp_path / "out", workers=1)
    train, heldout = splits_of(tmp_path / "out")
    assert sorted(train + heldout) == sorted(texts)
    assert 20 <= len(heldout) <= 60
    assert manifest.request["heldout"] == 0.02


@pytest.mark.parametrize("count", [2, 3, 11])
@pytest.mark.parametrize("heldout", [1e-9, 0.02, 0.5, 0.999_999])
def test_of_few_documents_at_least_one_goes_to_each_side(tmp_path, count, heldout):
    folder = write_documents(tmp_path / "texts", count, copies=2)
    prepare([folder], tmp_path / "out", heldout=heldout, workers=1)
    train, heldout_texts = splits_of(tmp_path / "out")
    assert train
    assert heldout_texts
    assert not set(train) & set(heldout_texts), "copies of a document must stay together"
    assert len(train) + len(heldout_texts) == 2 * count
    if heldout < 0.1:
        assert len(heldout_texts) == 2
    # The result does not depend on where sources are cut into ranges.
    prepare([folder], tmp_path / "cut", heldout=heldout, workers=1, shard_bytes=40)
    assert splits_of(tmp_path / "cut") == [train, heldout_texts]


def test_a_document_held_out_is_not_learned_from(tmp_path, monkeypatch):
    learned = []
    monkeypatch.setattr(module, "train_bpe", lambda texts, size: learned.extend(texts) or load_tokenizer("bytes"))
    prepare([write_documents(tmp_path / "texts", 3)], tmp_path / "out", tokenizer="bpe", workers=1)
    train, heldout = splits_of(tmp_path / "out")
    assert sorted(learned) == sorted(train)
    assert len(heldout) == 1


@pytest.mark.parametrize("copies", [1, 2])
def test_of_a_single_document_the_end_is_held_out(tmp_path, copies):
    book = "".join(f"Sentence {n} tells more. " for n in range(400))
    for copy in range(copies):
        (tmp_path / f"{copy}.txt").write_text(book)
    prepare([tmp_path / f"{copy}.txt" for copy in range(copies)], tmp_path / "out", workers=1)
    train, heldout = splits_of(tmp_path / "out")
    assert len(train) == len(heldout) == copies
    assert train[0] + heldout[0] == book
    assert len(heldout[0]) == round(0.02 * len(book))


def test_nothing_is_held_out_when_asked(corpus, tmp_path):
    prepare([corpus / "a.txt"], tmp_path / "all", heldout=0, workers=1)
    with pytest.raises(ValueError, match="has no split 'heldout'"):
        open_dataset(tmp_path / "all", "heldout")


def test_a_document_that_cannot_be_shared_out_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ValueError, match=r"no document for the split 'heldout' out of 1, with heldout=0\.02"):
        prepare([tmp_path / "x.txt"], tmp_path / "out", workers=1)


def test_files_with_known_names_in_a_folder_are_documents(tmp_path):
    names = ["a.md", "b.TXT", "c.py", "sub/d.rst", "data.bin", ".venv/b.py"]
    for name in names:
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"a document, {name}")
    manifest = prepare([tmp_path / "texts"], tmp_path / "out", heldout=0, workers=1)
    assert texts_of(open_dataset(tmp_path / "out")) == {
        str(tmp_path / "texts" / name): f"a document, {name}" for name in names[:4]
    }
    assert manifest.counts["files_ignored"] == [str(tmp_path / "texts" / "data.bin")]


def test_a_file_that_is_named_is_text_whatever_its_name(tmp_path):
    paths = [tmp_path / name for name in ("README", "notes.md", "old.TXT", "page.xyz")]
    for path in paths:
        path.write_text(f"größer, {path.name}")
    prepare(paths, tmp_path / "out", heldout=0, workers=1)
    assert texts_of(open_dataset(tmp_path / "out")) == {str(path): f"größer, {path.name}" for path in paths}


def test_the_tokenizer_travels_with_the_data(corpus, tmp_path):
    prepare([corpus], tmp_path / "bpe", tokenizer="bpe", vocab_size=300, workers=1)
    saved = load_tokenizer(tmp_path / "bpe")
    assert saved.vocab_size == open_dataset(tmp_path / "bpe").vocab_size == 300
    # The saved tokenizer prepares other data with the same ids.
    prepare([corpus / "a.txt"], tmp_path / "other", tokenizer=str(tmp_path / "bpe"), heldout=0, workers=1)
    dataset = open_dataset(tmp_path / "other")
    assert dataset.read(0, 0, int(dataset.lengths[0]) - 1).tolist() == saved.encode("first document\n").tolist()


class Constant(ByteTokenizer):
    """Encodes each character as one id."""

    def __init__(self, vocab_size, index):
        self.vocab_size, self.boundary, self.index = vocab_size, vocab_size - 1, index

    def encode(self, text):
        return np.full(len(text), self.index, np.uint32)


def test_a_large_vocabulary_gets_wider_ids(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_tokenizer", lambda *a: Constant(70_000, 65_537))
    manifest = prepare([corpus / "a.txt"], tmp_path / "out", heldout=0, workers=1)
    assert manifest.dtype == "uint32"
    assert open_dataset(tmp_path / "out").read(0, 14, 16).tolist() == [65_537, 69_999]


def test_an_id_beyond_the_tokenizers_vocabulary_names_the_file(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_tokenizer", lambda *a: Constant(300, 300))
    with pytest.raises(ValueError, match=r"a\.txt: token id 300 is beyond the tokenizer's vocabulary of 300"):
        prepare([corpus / "a.txt"], tmp_path / "out", heldout=0, workers=1)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", r"x\.txt is empty"),
        ("x.jsonl", b"", r"x\.jsonl is empty"),
        ("x.txt", b"caf\xe9", r"x\.txt is not UTF-8 text: byte 0xe9 at offset 3; convert it first.*iconv -f ENCODING"),
        ("x.txt", "text".encode("utf-16"), r"x\.txt is not UTF-8 text: byte 0xff at offset 0; .*iconv -f UTF-16"),
        ("x.zip", b"PK\x03\x04\xff", r"x\.zip is not UTF-8 text: byte 0xff at offset 4"),
        (
            "x.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}\n',
            r"x\.jsonl cannot be read by datasets: .*can't decode byte 0xe9",
        ),
        ("x.jsonl", b'{"text": "a"}\n{"text": ""}\n', r"x\.jsonl, row 1: the document is empty"),
        ("x.jsonl", b'{"text": "a"}\n{"text"\n', r"x\.jsonl cannot be read by datasets: JSON parse error.* in row 1"),
        ("x.jsonl", b'{"text": "a"}\n' + b"[" * 200_000, r"x\.jsonl cannot be read by datasets: JSON parse error"),
        ("x.jsonl", b'{"body": "a"}', r"x\.jsonl: no column 'text'; it has 'body'"),
        ("x.jsonl", b'{"text": 3}', r"x\.jsonl, row 0: column 'text' must be text, got int"),
        ("x.json", b"[1]", r"x\.json, row 0: column 'text' must be text, got int"),
        ("x.json", b'[{"body": "a"}]', r"x\.json: no column 'text'; it has 'body'"),
        (
            "x.jsonl",
            b'{"text": "\\ud800"}',
            r"x\.jsonl cannot be read by datasets: JSON parse error: The surrogate pair",
        ),
        ("x.csv", b"text\na\nNA\n", r"x\.csv, row 1: the document is empty"),
        ("x.parquet", b"PAR0", r"x\.parquet cannot be read by datasets: Parquet file size is 4 bytes"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}', mtime=0)[:-9], r"x\.jsonl\.gz cannot be read by datasets: "),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_bad_source_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as failure:
        prepare([tmp_path / name], tmp_path / "out", workers=1)
    # datasets leaves a file open that it cannot read, of which a later test would be warned.
    del failure
    gc.collect()


def test_empty_documents_are_left_out_and_counted_when_asked(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n{"text": ""}\n')
    (tmp_path / "y.txt").write_text("")
    sources = [tmp_path / "x.jsonl", tmp_path / "y.txt"]
    manifest = prepare(sources, tmp_path / "out", heldout=0, skip_empty=True, workers=1)
    assert manifest.counts["documents"] == 1
    assert manifest.counts["empty_documents_skipped"] == 2


def test_the_fingerprint_follows_the_content(corpus, prepared, tmp_path):
    prepare([corpus], tmp_path / "same", heldout=0, workers=1)
    assert open_dataset(tmp_path / "same").fingerprint == open_dataset(prepared).fingerprint
    (corpus / "a.txt").write_text("first document!")
    prepare([corpus], tmp_path / "changed", heldout=0, workers=1)
    assert open_dataset(tmp_path / "changed").fingerprint != open_dataset(prepared).fingerprint


def test_nothing_of_the_work_is_left(prepared):
    assert not (prepared / WORK_FOLDER).exists()
    assert not [path for path in prepared.iterdir() if path.name.endswith(".partial")]


def test_a_request_that_failed_before_its_first_shard_can_be_corrected(corpus, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="tokenizer must be"):
        prepare([corpus], out, tokenizer="gpt5", workers=1)
    with pytest.raises(ValueError, match="no column 'body'"):
        prepare([corpus / "c.jsonl"], out, field="body", workers=1)
    assert prepare([corpus], out, workers=1).counts["documents"] == 42
