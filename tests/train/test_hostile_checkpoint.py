"""Checkpoints that were tampered with, with checksums recomputed to match."""

import json
import pickle
import shutil

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from sympow.train import train
from sympow.train.checkpoint import SEAL, DamagedCheckpointError, seal

LAST = "step-000000004"


class Payload:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return exec, (f"open({str(self.path)!r}, 'w').close()",)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return tmp_path_factory.mktemp("original") / "run"


@pytest.fixture
def out(original, tiny, tmp_path):
    """A run of four steps with checkpoints at 2 and 4."""
    if not original.exists():
        train(tiny(steps=4), original, device="cpu")
    return shutil.copytree(original, tmp_path / "run")


@pytest.fixture
def changed(out):
    """Lets a function change the files of the last checkpoint, and recomputes the checksums."""

    def change(how, **content):
        path = out / "checkpoints" / LAST
        before = json.loads((path / SEAL).read_text())
        (path / SEAL).unlink()
        how(path)
        kept = {name: value for name, value in before.items() if name not in ("files", "checksum")}
        seal(path.rename(path.with_name("changed")), path, kept | content)

    return change


def change_metadata(path, how):
    metadata = pickle.loads((path / ".metadata").read_bytes())
    how(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def assert_the_one_before_is_used(tiny, losses, out, capfd, message):
    capfd.readouterr()
    train(tiny(steps=5), out, resume=True, device="cpu")
    printed = capfd.readouterr().err
    assert f"{LAST} is damaged: {message}" in printed
    assert "step-000000002\n" in printed
    assert len(losses(out)) == 5


def test_the_list_of_tensors_runs_nothing(tiny, losses, out, changed, tmp_path, capfd):
    ran = tmp_path / "ran"
    changed(lambda path: (path / ".metadata").write_bytes(pickle.dumps(Payload(ran))))
    assert_the_one_before_is_used(tiny, losses, out, capfd, ".metadata names builtins.exec")
    assert not ran.exists()


def test_a_payload_beside_a_good_list_runs_nothing(tiny, losses, out, changed, tmp_path, capfd):
    ran = tmp_path / "ran"

    def add(metadata):
        metadata.planner_data = Payload(ran)

    changed(lambda path: change_metadata(path, add))
    assert_the_one_before_is_used(tiny, losses, out, capfd, ".metadata names builtins.exec")
    assert not ran.exists()


def put_object(path, ran, index, kind=None):
    """Puts an object in the place of the tensor "rng", under an index of its own, and of another kind if given."""
    torch.save(Payload(ran), path / "object")

    def refer(metadata):
        (before,) = (index for index in metadata.storage_data if index.fqn == "rng")
        info = metadata.storage_data.pop(before)
        info.relative_path, info.offset, info.length = "object", 0, (path / "object").stat().st_size
        metadata.storage_data[index or before] = info
        if kind is not None:
            metadata.state_dict_metadata["rng"] = kind

    change_metadata(path, refer)


def test_an_object_in_the_place_of_a_tensor_is_not_unpickled(tiny, losses, out, changed, tmp_path, capfd):
    ran = tmp_path / "ran"
    changed(lambda path: put_object(path, ran, MetadataIndex("rng"), BytesStorageMetadata()))
    named = "torch.distributed.checkpoint.metadata.BytesStorageMetadata"
    assert_the_one_before_is_used(tiny, losses, out, capfd, f".metadata names {named}, which does not belong")
    assert not ran.exists()


def test_a_tensor_that_is_something_else_is_not_unpickled(tiny, out, changed, tmp_path):
    ran = tmp_path / "ran"
    changed(lambda path: put_object(path, ran, None))
    with pytest.raises(DamagedCheckpointError, match=rf"{LAST} cannot be loaded: "):
        train(tiny(steps=5), out, resume=True, device="cpu")
    assert not ran.exists()


@pytest.mark.parametrize("name", ["../step-000000002/__0_0.distcp", "/etc/hostname", "..", 7])
def test_a_tensor_in_a_file_of_someone_else_is_refused(tiny, losses, out, changed, capfd, name):
    def refer(metadata):
        next(iter(metadata.storage_data.values())).relative_path = name

    changed(lambda path: change_metadata(path, refer))
    message = f".metadata refers to {name!r}, which is not a file of the checkpoint"
    assert_the_one_before_is_used(tiny, losses, out, capfd, message)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"not a pickle", pickle.dumps([1, 2]), b"(" * 100])
def test_a_list_of_tensors_that_is_none_is_refused(tiny, losses, out, changed, capfd, content):
    changed(lambda path: (path / ".metadata").write_bytes(content))
    assert_the_one_before_is_used(tiny, losses, out, capfd, ".metadata is ")


@pytest.mark.parametrize("content", [{"step": "4"}, {"progress": None}, {"progress": {"config": {}, "loader": {}}}])
def test_a_seal_that_is_none_is_refused(tiny, losses, out, changed, capfd, content):
    changed(lambda path: None, **content)
    assert_the_one_before_is_used(tiny, losses, out, capfd, "sealed.json is not that of a checkpoint")


def test_a_checkpoint_holds_tensors_alone(out):
    metadata = pickle.loads((out / "checkpoints" / LAST / ".metadata").read_bytes())
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}
    assert any(name.startswith("optimizer.state.") for name in metadata.state_dict_metadata)
