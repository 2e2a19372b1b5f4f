"""The lock of a run folder: one run per folder, however many start at the same moment."""

import errno
import os
import signal
import time
from contextlib import ExitStack

import pytest
import torch
from train.conftest import PATIENCE, before_step
from typer.testing import CliRunner

from sympow import locks
from sympow.cli.app import app
from sympow.locks import lock_file
from sympow.train import TrainConfig, loop, train
from sympow.train.metrics import read_metrics
from sympow.train.processes import Place
from sympow.train.run_folder import LostFolderError, claimed_folder

STARTS = 50
# A barrier: all processes arrive here before any continues.
WAIT_FOR_EVERYONE = """
import os, sys, time
open({ready!r} + str(os.getpid()), "w").close()
while not os.path.exists({go!r}):
    time.sleep(0.002)
"""
WITHOUT_OUT = """
os.chdir({folder!r})
at = sys.argv.index("--out")
del sys.argv[at : at + 2]
"""
SLOWER = before_step("time.sleep(0.05)")


@pytest.fixture
def start_together(start, tmp_path):
    """Starts runs with seeds from 0, and waits for their ends."""

    def run(code="", out=None, **changes):
        (tmp_path / "ready").mkdir()
        wait = WAIT_FOR_EVERYONE.format(ready=str(tmp_path / "ready") + "/", go=str(tmp_path / "go"))
        trainings = [
            start(out or tmp_path / f"seed-{seed}", code=wait + code, **{**changes, "seed": seed})
            for seed in range(STARTS)
        ]
        while len(os.listdir(tmp_path / "ready")) < STARTS:
            time.sleep(0.01)
        (tmp_path / "go").touch()
        codes = [training.wait(STARTS * PATIENCE)[0] for training in trainings]
        # Only now: runs on one folder share a log.
        return [(code, training.log.read_text()) for code, training in zip(codes, trainings, strict=True)]

    return run


@pytest.mark.slow
def test_fifty_runs_started_at_once_have_a_folder_each_and_all_their_lines(start_together, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    ended = start_together(WITHOUT_OUT.format(folder=str(here)), steps=3, save=False)
    assert [code for code, _ in ended] == [0] * STARTS
    folders = list((here / "runs").iterdir())
    assert len(folders) == STARTS
    assert sorted(TrainConfig.read(folder / "config.yaml").run.seed for folder in folders) == list(range(STARTS))
    for folder in folders:
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]
    printed = {log.splitlines()[-1] for _, log in ended}
    assert printed == {f"runs/{folder.name}" for folder in folders}


@pytest.mark.slow
def test_of_fifty_runs_started_at_once_on_one_folder_one_trains(start_together, losses, tmp_path):
    ended = start_together(SLOWER, out=tmp_path / "run", steps=3)
    codes = [code for code, _ in ended]
    assert sorted(codes) == [0] + [2] * (STARTS - 1)
    log = " ".join(ended[0][1].split())
    # The first run's process may not have been named yet: the lock is taken before the name is written.
    in_use = log.count("is in use by process ") + log.count("is in use by another process")
    assert in_use + log.count("holds a run already") == STARTS - 1
    assert "Traceback" not in log
    assert TrainConfig.read(tmp_path / "run" / "config.yaml").run.seed == codes.index(0)
    assert len(losses(tmp_path / "run")) == 3


def test_a_run_that_is_under_way_is_not_resumed(start, losses, tmp_path):
    out = tmp_path / "run"
    training = start(out, code=SLOWER, steps=12, save_every=2)
    training.wait_for_step(3)
    unfinished = out / "checkpoints" / "step-000000099.unfinished"
    unfinished.mkdir()
    second = start(out, resume=True)
    assert second.wait() == [2]
    assert f"is in use by process {training.pids[0]} on " in " ".join(second.log.read_text().split())
    assert unfinished.exists()
    assert training.wait() == [0]
    assert len(losses(out)) == 12
    # The lock is free again, also if the run was killed.
    third = start(out, resume=True, code=SLOWER, steps=40)
    third.wait_for_step(13)
    third.send(signal.SIGKILL)
    third.wait()
    assert start(out, resume=True, steps=14).wait() == [0]


def assert_is_in_use(folder):
    """Asserts that a run of this process has a folder, and that another does not get it."""
    place = Place(rank=0, world_size=1, device=torch.device("cpu"))
    with (
        pytest.raises(ValueError, match=rf"run is in use by process {os.getpid()} on .* since \d{{4}}-"),
        claimed_folder(folder, resume=True, place=place),
    ):
        pytest.fail("two runs have one folder")


def test_two_runs_of_one_process_do_not_share_a_folder(tiny, tmp_path, monkeypatch):
    seen = []

    def second(*arguments, **options):
        assert_is_in_use(tmp_path / "run")
        seen.append(True)
        return make(*arguments, **options)

    make = loop.make_optimizer
    monkeypatch.setattr(loop, "make_optimizer", second)
    train(tiny(steps=1), tmp_path / "run", device="cpu")
    assert seen == [True]


def test_a_run_without_a_folder_gets_one(tiny, losses, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda text: "20300101-000000")
    folders = [train(tiny(steps=1, save=False), device="cpu") for _ in range(3)]
    assert list(map(str, folders)) == [f"runs/20300101-000000{ending}" for ending in ("", "-2", "-3")]
    assert [len(losses(folder)) for folder in folders] == [1, 1, 1]
    with pytest.raises(ValueError, match="out must name the run to resume"):
        train(tiny(steps=1), resume=True, device="cpu")


def test_a_lock_on_a_file_that_was_removed_is_none(tmp_path, monkeypatch):
    """A refused run removes its folder while the next run is about to lock it."""
    lock, tried = locks.lock_descriptor, []

    def removing(handle, **how):
        tried.append(handle)
        if len(tried) == 1:
            (tmp_path / "run" / "run.lock").unlink()
            (tmp_path / "run").rmdir()
        return lock(handle, **how)

    monkeypatch.setattr(locks, "lock_descriptor", removing)
    with lock_file(tmp_path / "run" / "run.lock", wait=False):
        assert len(tried) == 2
        with (
            pytest.raises(BlockingIOError, match="another process holds the lock"),
            lock_file(tmp_path / "run" / "run.lock", wait=False),
        ):
            pytest.fail("two locks are held")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_file_system_without_locks_is_named(tiny, losses, tmp_path, monkeypatch):
    def refuse(handle, **how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "lock_descriptor", refuse)
    with pytest.warns(UserWarning, match="run has no locks: other commands can write there"):
        train(tiny(steps=2), tmp_path / "run", device="cpu")
    assert len(losses(tmp_path / "run")) == 2


def test_a_run_whose_lock_is_removed_still_admits_no_other(tiny, losses, tmp_path, before_steps):
    out, refused = tmp_path / "run", []

    def remove(training):
        if training.step_number == 1:
            (out / "run.lock").unlink()
        if training.step_number == 2:
            assert_is_in_use(out)
            refused.append(True)

    before_steps(remove)
    train(tiny(steps=4), out, device="cpu")
    assert refused == [True]
    assert len(losses(out)) == 4
    assert not (out / "run.lock").exists()


def test_a_run_ends_when_another_has_taken_its_folder(tiny, tmp_path, before_steps):
    out, others = tmp_path / "run", ExitStack()

    def take(training):
        if training.step_number == 2:
            (out / "run.lock").unlink()
            others.enter_context(lock_file(out / "run.lock", wait=False)).write_note("process 1 on elsewhere")

    before_steps(take)
    message = r"run.lock was removed during the run, and process 1 on elsewhere has taken the folder"
    with others:
        with pytest.raises(LostFolderError, match=message):
            train(tiny(steps=4, save_every=0), out, device="cpu")
        # The other's lock is not removed.
        assert (out / "run.lock").exists()
    assert [line["step"] for line in read_metrics(out / "metrics.jsonl")] == [1, 2]


def point_nowhere(path):
    path.symlink_to("nowhere/run.lock")


@pytest.mark.parametrize(
    ("make", "found"), [(os.mkdir, "a folder"), (os.mkfifo, "no regular file"), (point_nowhere, "no regular file")]
)
def test_a_lock_that_is_no_file_is_named(tiny, tmp_path, make, found):
    (tmp_path / "run").mkdir()
    make(tmp_path / "run" / "run.lock")
    with pytest.raises(ValueError, match=rf"run.lock must be a file, which keeps other processes out; it is {found}"):
        train(tiny(steps=1), tmp_path / "run", device="cpu")


def test_a_lock_that_is_released_at_any_moment_is_taken(tmp_path, monkeypatch):
    """A process that looks whether the lock is a file may do so while the holder removes it."""
    (tmp_path / "run.lock").touch()
    monkeypatch.setattr("pathlib.Path.is_file", lambda path: path.unlink(missing_ok=True))
    with locks.lock_file(tmp_path / "run.lock", wait=False):
        assert (tmp_path / "run.lock").exists()


def test_a_full_disk_without_room_for_the_lock_is_named(tiny, tmp_path, monkeypatch):
    def full(handle, content):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(locks.os, "write", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*run.lock'"):
        train(tiny(steps=1), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_a_folder_with_other_files_is_refused(tiny, tmp_path, monkeypatch):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "draft.txt").write_text("Dear")
    message = r"out must be a new or empty folder, or that of a run; .*letters has other files \(draft.txt\)"
    with pytest.raises(ValueError, match=message):
        train(tiny(steps=1), tmp_path / "letters", device="cpu")
    assert [path.name for path in (tmp_path / "letters").iterdir()] == ["draft.txt"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".DS_Store").touch()
    train(tiny(steps=1, save=False), tmp_path / "empty", device="cpu")


def test_an_empty_name_is_not_the_working_directory(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="out must name a folder, got ''"):
        train(tiny(steps=1), "", device="cpu")
    (tmp_path / "text.txt").write_text("words")
    prepare = ("data", "prepare", "text.txt")
    for words in (("train", "--out", ""), ("train", "--out="), (*prepare, "--out", ""), ("report", "runs", "-o", "")):
        refused = CliRunner().invoke(app, list(words))
        assert refused.exit_code == 2
        assert "--out must name a file or folder, got ''" in refused.output
    (tmp_path / "text.txt").unlink()
    assert list(tmp_path.iterdir()) == []
