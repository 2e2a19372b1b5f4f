"""Untrusted data folders: whatever they contain is opened, or refused with the name of the file."""

import json
import os
import pickle
import shutil
import signal
import stat

import numpy as np
import pytest

from sympow.data import open_dataset
from sympow.data.manifest import VERIFIED_FILE
from sympow.data.tokenizer import load_tokenizer
from sympow.files import sha256_of, write_atomically


@pytest.fixture(autouse=True)
def no_waiting():
    """Ends a test that blocks, as on a pipe, so that it does not block the suite."""

    def stop(*_):
        raise TimeoutError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    """A copy of a prepared folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return shutil.copytree(prepared, tmp_path / "out")


def change_manifest(folder, change):
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shard(content):
    return content["splits"]["train"][0]


def changed(**values):
    return lambda content: content.update(values)


def changed_shard(**values):
    return lambda content: shard(content).update(values)


@pytest.mark.parametrize(
    "name", ["../elsewhere/train-00000", "/etc/passwd", "..", ".", "", "a/b", "a\\b", ".hidden", "a\0b", "a\n", 3, None]
)
def test_names_that_leave_the_folder_are_refused(folder, name):
    shutil.copytree(folder, folder.parent / "elsewhere")
    change_manifest(folder, changed_shard(name=name))
    with pytest.raises(ValueError, match=r"manifest\.json is a damaged manifest: a shard's name must be letters"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(splits=[]), "splits must map names to lists of shards"),
        (changed(splits={"train": 3, "heldout": []}), "splits must map names to lists of shards"),
        (changed(splits={"train": []}), "splits must be train and heldout, got train"),
        (changed(splits={"train": [3], "heldout": []}), "a shard must have name, documents, tokens"),
        (changed(splits={"train": [{}], "heldout": []}), "a shard must have name, documents, tokens"),
        (changed(dtype="object"), "dtype must be one of uint16, uint32; got 'object'"),
        (changed(dtype=None), "dtype must be one of uint16, uint32; got None"),
        (changed(tokenizer=None), "tokenizer must map names to values, got NoneType"),
        (changed(tokenizer={"kind": "bytes"}), "vocab_size must be an int, got NoneType"),
        (changed(tokenizer={"vocab_size": 257, "boundary": 257}), "boundary must be below vocab_size=257, got 257"),
        (changed(tokenizer={"vocab_size": 257, "boundary": "x"}), "boundary must be an int, got str"),
        (changed(counts={"tokens": "many"}), "counts must be numbers or lists, got tokens='many'"),
        (changed(request=3), "request must map names to values, got int"),
        (changed(version=2), "has version 2; this program reads version 1"),
        (changed(surplus=3), "missing or unknown fields: surplus"),
        (lambda content: content.pop("counts"), "missing or unknown fields: counts"),
        (lambda content: shard(content).pop("tokens"), "a shard must have name, documents, tokens"),
        (changed_shard(surplus=1), "a shard must have name, documents, tokens"),
        (changed_shard(tokens=-1), "tokens of train-00000 must be at least 1, got -1"),
        (changed_shard(tokens=1.5), "tokens of train-00000 must be an int, got float"),
        (changed_shard(documents=10**30), "documents of train-00000 must be at most"),
        (changed_shard(tokens_sha256="x"), "tokens_sha256 of train-00000 must be 64 hexadecimal digits, got 'x'"),
        (changed_shard(sources="files"), "sources of a shard must be a list, got str"),
        (changed_shard(sources=[3]), "sources of train-00000 must be strings"),
    ],
)
def test_malformed_manifests_are_refused(folder, change, message):
    change_manifest(folder, change)
    with pytest.raises(ValueError, match=rf"manifest\.json (is a damaged manifest: )?{message}"):
        open_dataset(folder)


@pytest.mark.parametrize(
    "content", [b"[]", b"3", b"null", b'"x"', b"[" * 100_000, b"\xff\xfe", b"", b"{", b'{"format": "x", "version": 1}']
)
def test_what_is_no_manifest_is_refused(folder, content):
    (folder / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json is not"):
        open_dataset(folder)


def npy(header, content=b"", version=b"\x01\x00"):
    width = 2 if version == b"\x01\x00" else 4
    return b"\x93NUMPY" + version + len(header).to_bytes(width, "little") + header + content


class Program:
    def __reduce__(self):
        return os.mkdir, ("ran",)


def pickled():
    return npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", pickle.dumps(np.array([Program()])))


@pytest.mark.parametrize("kind", ["tokens", "index"])
@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Program()),
        pickled(),
        npy(b"{'descr': '<u2', 'fortran_order': False, 'shape': (1000000000000,), }\n"),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000, 3), }\n"),
        npy(b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"9" * 5000 + b",), }\n"),
        npy(b"(" * 60_000),
        npy(b"", version=b"\x02\x00"),
        b"\x93NUMPY\x02\x00\xff\xff\xff\xff",
        npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (3,), }\n", bytes(24)),
        b"PK\x03\x04" + bytes(100),
        b"",
    ],
    ids=["pickle", "object", "long", "wide", "digits", "nested", "version", "header", "float", "zip", "empty"],
)
def test_arrays_of_another_kind_are_refused(folder, kind, content, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / f"train-00000.{kind}.npy").write_bytes(content)
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}\.npy (is not a readable shard|must be)"):
        open_dataset(folder)
    assert not (folder / "ran").exists()


@pytest.mark.parametrize("name", ["train-00000.tokens.npy", "train-00000.index.npy"])
def test_an_array_that_is_cut_or_missing_is_named(folder, name):
    (folder / name).write_bytes((folder / name).read_bytes()[:-10])
    with pytest.raises(ValueError, match=rf"{name} must be .* in a file of"):
        open_dataset(folder)
    (folder / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        open_dataset(folder)


def test_a_manifest_that_agrees_with_a_huge_header_does_not_make_it_true(folder):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000, 3), }\n"
    (folder / "train-00000.index.npy").write_bytes(npy(header))
    change_manifest(folder, changed_shard(documents=10**11))
    with pytest.raises(ValueError, match=r"index\.npy must be int64 of shape .* in a file of 2,400,000,000,\d+ bytes"):
        open_dataset(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.__setitem__((slice(2), 0), [-1, index[:2, 0].sum() + 1]),
        lambda index: index.__setitem__((slice(2), 0), [0, index[:2, 0].sum()]),
        lambda index: index.__setitem__((slice(4), 0), 2**62),
        lambda index: index.__setitem__((0, 1), 99),
        lambda index: index.__setitem__((0, 1), -1),
        lambda index: index.__setitem__((0, 2), -1),
    ],
    ids=["negative", "empty", "overflow", "source", "negative source", "position"],
)
def test_places_that_are_none_are_refused(folder, change):
    path = folder / "train-00000.index.npy"
    index = np.load(path)
    change(index)
    np.save(path, index)
    with pytest.raises(ValueError, match=r"train-00000\.index\.npy must have the positions of"):
        open_dataset(folder)


@pytest.mark.parametrize(
    "name",
    ["manifest.json", "train-00000.tokens.npy", "train-00000.index.npy", "sympow_tokenizer.json", VERIFIED_FILE],
)
def test_pipes_are_refused_and_not_waited_for(folder, name):
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=r"is not a file|holds no saved tokenizer|source must be"):
        open_dataset(folder).load_tokenizer()


def flip(path):
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("kind", ["tokens", "index"])
@pytest.mark.parametrize("opened_before", [False, True])
def test_a_flipped_bit_is_found_on_opening(folder, kind, opened_before):
    before = open_dataset(folder) if opened_before else None
    path = folder / f"train-00000.{kind}.npy"
    times = path.stat()
    flip(path)
    # As tools that copy files do. They cannot set the inode's ctime.
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ValueError, match=rf"train-00000\.{kind}\.npy (is damaged|must have the positions)"):
        open_dataset(folder)
    if before is not None:
        with pytest.raises(ValueError, match=rf"train-00000\.{kind}\.npy is damaged"):
            before.verify()


def test_hashes_are_compared_once(folder, monkeypatch):
    hashed = []
    monkeypatch.setattr("sympow.data.manifest.sha256_of", spy(hashed))
    open_dataset(folder)
    assert sorted(hashed) == ["train-00000.index.npy", "train-00000.tokens.npy"]
    open_dataset(folder)
    assert len(hashed) == 2
    shutil.copytree(folder, folder.parent / "copy")
    open_dataset(folder.parent / "copy")
    assert len(hashed) == 4, "a copy must be read again"
    open_dataset(folder).verify()
    assert len(hashed) == 6, "verify must read again"


def spy(hashed):
    def hash_and_note(path):
        hashed.append(path.name)
        return sha256_of(path)

    return hash_and_note


@pytest.mark.parametrize("content", ["{", "[]", "3", '{"train-00000.tokens.npy": 3}'])
def test_a_damaged_record_is_not_believed(folder, content):
    open_dataset(folder)
    (folder / VERIFIED_FILE).write_text(content)
    flip(folder / "train-00000.tokens.npy")
    with pytest.raises(ValueError, match=r"tokens\.npy is damaged"):
        open_dataset(folder)


def test_a_folder_that_can_only_be_read_has_its_record_elsewhere(folder, monkeypatch, tmp_path):
    def refuse(path, content):
        if path.parent == folder:
            raise PermissionError(13, "Permission denied", str(path))
        write_atomically(path, content)

    # Permissions do not keep root from writing.
    monkeypatch.setattr("sympow.data.manifest.write_atomically", refuse)
    hashed = []
    monkeypatch.setattr("sympow.data.manifest.sha256_of", spy(hashed))
    open_dataset(folder)
    open_dataset(folder)
    assert len(hashed) == 2
    assert not (folder / VERIFIED_FILE).exists()
    assert len(list((tmp_path / "caches" / "sympow").iterdir())) == 1


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{}",
        "3",
        '{"kind": 3}',
        '{"kind": "file"}',
        '{"kind": "bytes", "more": 1}',
        '{"kind": "bpe", "boundary_token": 3}',
    ],
)
def test_malformed_settings_of_a_tokenizer_are_refused(tmp_path, content):
    (tmp_path / "sympow_tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"sympow_tokenizer\.json must name the kind"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", ['{"model": {}}', '{"model": {"type": "BPE", "vocab": 3, "merges": []}}', '{"model": null}']
)
def test_a_tokenizer_that_the_library_does_not_read_is_named(tmp_path, content):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer\.json that the library tokenizers reads"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_is_a_pipe_is_refused(tmp_path):
    (tmp_path / "sympow_tokenizer.json").write_text('{"kind": "file", "boundary_token": "x"}')
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a file"):
        load_tokenizer(tmp_path)


def test_the_record_can_be_read_by_those_who_can_read_the_data(folder):
    open_dataset(folder)
    modes = [stat.S_IMODE((folder / name).stat().st_mode) for name in (VERIFIED_FILE, "manifest.json")]
    assert modes[0] == modes[1]
