"""Resuming: the same losses after a kill, a stop or a damaged checkpoint."""

import json
import random
import shutil
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from train.conftest import SLOWER

from support import assert_close
from sympow.data.preparation import prepare
from sympow.train import checkpoint as checkpoint_module
from sympow.train import loop, train
from sympow.train.checkpoint import SEAL, DamagedCheckpointError, read_seal
from sympow.train.config import TrainConfig
from sympow.train.metrics import JsonLines, read_metrics
from sympow.train.signals import stop_on_signals

STEPS = 24


def checkpoints(out):
    return sorted(path.name for path in (out / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A cache of the losses of uninterrupted runs."""
    return {}


@pytest.fixture
def expected(uninterrupted, finish, losses, tmp_path):
    """The losses of an uninterrupted run in a separate process.

    Modules and settings of other tests in this process may change the last bit of a sum.
    """

    def run(**changes):
        key = json.dumps(changes, sort_keys=True)
        if key not in uninterrupted:
            finish(tmp_path / "uninterrupted", **changes)
            uninterrupted[key] = losses(tmp_path / "uninterrupted")
            shutil.rmtree(tmp_path / "uninterrupted")
        return uninterrupted[key]

    return run


@pytest.fixture
def expected_here(uninterrupted, tiny, losses, tmp_path):
    """The same in this process, for runs that are interrupted and resumed in it."""

    def run(**changes):
        key = "here", json.dumps(changes, sort_keys=True)
        if key not in uninterrupted:
            uninterrupted[key] = losses(train(tiny(**changes), tmp_path / "uninterrupted", device="cpu"))
        return uninterrupted[key]

    return run


@pytest.mark.slow
def test_the_same_seed_gives_the_same_losses_and_another_gives_others(finish, losses, expected, tmp_path):
    finish(tmp_path / "a")
    finish(tmp_path / "b", seed=1)
    assert losses(tmp_path / "a") == expected()
    assert losses(tmp_path / "b")[0] != losses(tmp_path / "a")[0]


@pytest.mark.slow
def test_a_run_killed_three_times_gives_the_losses_of_one_that_was_not(start, losses, expected, tmp_path):
    out, choose = tmp_path / "run", random.Random(0)
    changes = {"steps": STEPS, "save_every": 3, "warmup_steps": 5, "schedule": "cosine", "weight_decay": 0.1}
    done = 0
    for number, step in enumerate(sorted(choose.sample(range(2, STEPS - 4), 3))):
        resumed = {"resume": True} if number else changes
        training = start(out, code=SLOWER, **resumed)
        training.wait_for_step(max(step, done + 1))
        time.sleep(choose.uniform(0, 0.02))
        training.send(signal.SIGKILL)
        assert training.wait() == [-signal.SIGKILL]
        done = training.steps_written()
        assert done < STEPS
    assert start(out, resume=True).wait() == [0]
    assert losses(out) == expected(**changes)


@pytest.mark.slow
def test_a_run_killed_before_its_first_checkpoint_begins_again(start, losses, expected, tmp_path):
    out = tmp_path / "run"
    training = start(out, code=SLOWER, save_every=0)
    training.wait_for_step(2)
    training.send(signal.SIGKILL)
    training.wait()
    resumed = start(out, resume=True)
    assert resumed.wait() == [0]
    assert "no checkpoint to resume from: starting from the beginning" in resumed.log.read_text()
    assert losses(out) == expected(save_every=0)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_saves_first_and_the_run_goes_on_exactly(start, losses, expected, tmp_path, name):
    out = tmp_path / "run"
    training = start(out, code=SLOWER, steps=STEPS, save_every=0)
    training.wait_for_step(4)
    training.send(getattr(signal, name))
    assert training.wait() == [0], training.log.read_text()
    step = len(losses(out))
    assert 4 <= step < STEPS
    assert checkpoints(out) == [f"step-{step:09d}"]
    assert f"{name}: saved after step {step}" in training.log.read_text()
    # A long path may break the command into several lines.
    said = " ".join(training.log.read_text().replace("\\\n", "").split())
    assert f"sympow train --resume --out {out}" in said
    assert start(out, resume=True).wait() == [0]
    assert losses(out) == expected(steps=STEPS, save_every=0)


def test_a_second_ctrl_c_stops_at_once():
    before = signal.getsignal(signal.SIGINT)
    with stop_on_signals() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == "SIGINT"
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_to_this_process_does_not_end_as_a_shorter_run(tiny, losses, tmp_path, before_steps):
    """The run saves and stops, and the signal then reaches whoever called it: here pytest."""
    before_steps(lambda training: training.step_number == 1 and signal.raise_signal(signal.SIGINT))
    # A process that a shell started in the background ignores SIGINT.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            train(tiny(steps=4, save_every=0), tmp_path / "run", device="cpu")
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(losses(tmp_path / "run")) == 2
    assert checkpoints(tmp_path / "run") == ["step-000000002"]


def test_training_works_in_a_thread_that_cannot_catch_signals(tiny, losses, expected_here, tmp_path):
    thread = threading.Thread(target=train, args=(tiny(), tmp_path / "run"), kwargs={"device": "cpu"})
    thread.start()
    thread.join()
    assert losses(tmp_path / "run") == expected_here()


@pytest.fixture(scope="module")
def original(texts, tmp_path_factory):
    """The run that `trained` copies."""
    return tmp_path_factory.mktemp("original") / "run"


@pytest.fixture
def trained(original, tiny, tmp_path):
    """A copy of a run of six steps with checkpoints at 2, 4 and 6."""
    if not original.exists():
        train(tiny(), original, device="cpu")
    return shutil.copytree(original, tmp_path / "trained")


def damage_by_truncation(path):
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-100])


def damage_a_byte(path):
    file = next(path.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_a_digit_of_the_seal(path):
    file = path / SEAL
    text = file.read_text()
    assert '"batch": 6' in text
    file.write_text(text.replace('"batch": 6', '"batch": 5'))


def lose_a_file(path):
    (path / ".metadata").unlink()


def lose_the_seal(path):
    (path / SEAL).unlink()


def empty_the_seal(path):
    (path / SEAL).write_text("")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_by_truncation, "__0_0.distcp is not what was written"),
        pytest.param(damage_a_byte, "__0_0.distcp is not what was written", marks=pytest.mark.slow),
        (damage_a_digit_of_the_seal, "sealed.json is not what was written"),
        (lose_a_file, ".metadata is missing"),
        (lose_the_seal, "sealed.json is missing or unreadable"),
        pytest.param(empty_the_seal, "sealed.json is missing or unreadable", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    trained, losses, expected_here, capfd, damage, message
):
    out = trained
    assert checkpoints(out) == ["step-000000002", "step-000000004", "step-000000006"]
    damage(out / "checkpoints" / "step-000000006")
    capfd.readouterr()
    train(TrainConfig.read(out / "config.yaml").changed(steps=8), out, resume=True, device="cpu")
    printed = capfd.readouterr().err
    assert f"step-000000006 is damaged: {message}" in printed
    assert "resumed from" in printed
    assert "step-000000004" in printed
    assert losses(out) == expected_here(steps=8)
    assert checkpoints(out) == ["step-000000004", "step-000000006", "step-000000008"]
    for name in ("step-000000004", "step-000000006", "step-000000008"):
        assert read_seal(out / "checkpoints" / name)["step"] == int(name[5:])


def test_damaged_checkpoints_do_not_count_among_those_kept(tiny, tmp_path):
    """Damaged checkpoints have higher steps than those that a resumed run writes, which would be removed first."""
    out = train(tiny(save_every=1, keep=2, steps=6), tmp_path / "run", device="cpu")
    shutil.copytree(out / "checkpoints" / "step-000000005", out / "checkpoints" / "step-000000007")
    shutil.move(out / "checkpoints" / "step-000000006", out / "checkpoints" / "step-000000008")
    for name in ("step-000000007", "step-000000008"):
        damage_by_truncation(out / "checkpoints" / name)
    train(tiny(save_every=1, keep=2, steps=6), out, resume=True, device="cpu")
    assert checkpoints(out) == ["step-000000005", "step-000000006"]


def test_a_checkpoint_says_what_is_wrong_with_it(trained):
    path = trained / "checkpoints" / "step-000000002"
    content = read_seal(path)
    assert content["step"] == 2
    assert content["world_size"] == 1
    assert content["progress"]["config"]["data"]["context"] == 32
    assert content["progress"]["loader"]["batch"] == 2
    (path / SEAL).write_text("null")
    with pytest.raises(DamagedCheckpointError, match=r"step-000000002 is damaged: sealed\.json is missing"):
        read_seal(path)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_last_checkpoints_are_kept(tiny, tmp_path, keep):
    out = train(tiny(save_every=1, keep=keep), tmp_path / "run", device="cpu")
    assert checkpoints(out) == [f"step-{step:09d}" for step in range(7 - keep, 7)]


def test_what_a_kill_left_unfinished_is_ignored_and_removed(tiny, losses, expected_here, tmp_path):
    out = train(tiny(steps=4), tmp_path / "run", device="cpu")
    left = out / "checkpoints" / "step-000000005.unfinished"
    shutil.copytree(out / "checkpoints" / "step-000000004", left)
    train(tiny(), out, resume=True, device="cpu")
    assert not left.exists()
    assert losses(out) == expected_here()


@pytest.mark.parametrize("end", [b'{"step": 5, "loss": 5.1', b'{"step": 5, "lo\xff\0\0'])
def test_a_line_of_metrics_that_was_cut_off_or_damaged_is_made_again(tiny, losses, expected_here, tmp_path, end):
    out = train(tiny(steps=4), tmp_path / "run", device="cpu")
    with (out / "metrics.jsonl").open("ab") as file:
        file.write(end)
    train(tiny(), out, resume=True, device="cpu")
    assert losses(out) == expected_here()


def test_metrics_are_read_up_to_what_was_cut_off(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss"')
    assert read_metrics(file) == [{"step": 1, "loss": 2.0}]
    file.write_text('{"step": 1}\n{"step": 2}')
    assert [line["step"] for line in read_metrics(file)] == [1, 2]
    writer = JsonLines(file, resumed_at=1)
    writer.write(2, {"loss": 3.0})
    writer.close()
    assert read_metrics(file) == [{"step": 1}, {"step": 2, "loss": 3.0}]
    file.write_text('{"step": 1}\nrubbish\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_metrics(file)
    # As after a power failure.
    for damaged in (b"\xff\xfe\n", b"\0" * 9, b'{"step": 2, "loss": 1.\0\x85\x0b\n'):
        file.write_bytes(b'{"step": 1}\n' + damaged)
        assert read_metrics(file) == [{"step": 1}]
    file.write_bytes(b'{"step": 1}\n\xff\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 2 is not JSON"):
        read_metrics(file)
    file.write_text('{"loss": 1}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl: line 1 has no step"):
        read_metrics(file)


def test_data_that_have_changed_are_said_to_have(tiny, tmp_path):
    train(tiny(steps=2), tmp_path / "run", device="cpu")
    (tmp_path / "a.txt").write_text("a document " * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "data", heldout=0, workers=1)
    with pytest.raises(ValueError, match=r"the data have changed since .* the fingerprint of .*data \(train\) was '"):
        train(tiny(data=str(tmp_path / "data")), tmp_path / "run", resume=True, device="cpu")


def test_a_finished_run_that_is_resumed_says_so(tiny, tmp_path, capsys):
    for resume in (False, True):
        train(tiny(), tmp_path / "run", resume=resume, device="cpu")
        said = "this run has finished its 6 steps; more steps would continue it\n" in capsys.readouterr().err
        assert said == resume


def test_a_finished_run_can_be_resumed_with_more_steps(tiny, losses, expected_here, tmp_path):
    out = train(tiny(steps=4), tmp_path / "run", device="cpu")
    train(tiny(steps=4), out, resume=True, device="cpu")
    whole = expected_here()
    assert losses(out) == whole[:4]
    train(tiny(), out, resume=True, device="cpu")
    assert losses(out) == whole


def test_a_model_without_checkpoints_is_not_trained_over(tiny, losses, tmp_path):
    out = train(tiny(steps=2), tmp_path / "run", device="cpu")
    shutil.rmtree(out / "checkpoints")
    before, weights = losses(out), (out / "model" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="run has a trained model, but no checkpoint to resume from"):
        train(tiny(steps=2, learning_rate=1.0), out, resume=True, device="cpu")
    assert (losses(out), (out / "model" / "model.safetensors").read_bytes()) == (before, weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"width": 64}, r"width must be that of .*step-000000006, 32; got 64"),
        ({"gating": "none"}, r"gating must be that of .*, 'scalar'; got 'none'"),
        ({"context": 64}, r"context was 32, here it is 64"),
        ({"seed": 3}, r"seed was 0, here it is 3"),
        ({"steps": 5}, r"steps must be at least the 6 of .*step-000000006, got 5"),
    ],
)
def test_a_resumed_run_that_is_another_is_refused_and_leaves_the_first_as_it_was(tiny, trained, change, message):
    out = trained
    config, metrics = (out / "config.yaml").read_text(), (out / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=message):
        train(tiny(**change), out, resume=True, device="cpu")
    assert (out / "config.yaml").read_text() == config
    assert (out / "metrics.jsonl").read_text() == metrics


def test_what_a_resumed_run_changes_takes_effect(tiny, losses, expected_here, tmp_path):
    """A checkpoint also has Adam's settings, but those of the command apply."""
    out = train(tiny(steps=4), tmp_path / "run", device="cpu")
    seen = []
    make = loop.make_optimizer

    def remember(*arguments):
        seen.append(make(*arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "make_optimizer", remember)
        train(tiny(weight_decay=0.5, beta2=0.95, rotation_rate=0.25, form="attention"), out, resume=True, device="cpu")
    (optimizer,) = seen
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0, 0]
    assert [group["relative_rate"] for group in optimizer.param_groups] == [1, 0.25, 1]
    unchanged = expected_here()
    assert_close(losses(out)[4], unchanged[4], 1e-5, "loss")
    assert abs(losses(out)[5] - unchanged[5]) > 1e-5


def test_the_random_state_is_part_of_a_checkpoint(tiny, tmp_path, before_steps):
    """Only initialization is random now; later additions such as dropout will need the RNG state."""
    drawn = []
    before_steps(lambda _: drawn.append(torch.rand(()).item()))
    train(tiny(steps=4, save_every=0), tmp_path / "whole", device="cpu")
    out = train(tiny(steps=2, save_every=0), tmp_path / "parts", device="cpu")
    torch.manual_seed(99)
    train(tiny(steps=4, save_every=0), out, resume=True, device="cpu")
    assert drawn[4:] == drawn[:4]
    assert len(set(drawn[:4])) == 4


def test_checkpoints_are_exchanged_apart_from_training(tiny, tmp_path, monkeypatch):
    """A thread writes them: in the process group of training, messages of both could be mixed up."""
    groups = []
    save = checkpoint_module.async_save

    def remember(*arguments, **options):
        groups.append((options["process_group"], dist.group.WORLD))
        return save(*arguments, **options)

    monkeypatch.setattr(checkpoint_module, "async_save", remember)
    train(tiny(steps=2), tmp_path / "run", device="cpu")
    assert len(groups) == 1
    assert all(used is not None and used is not world for used, world in groups)


def test_a_folder_with_a_run_is_refused(tiny, tmp_path):
    out = train(tiny(steps=2), tmp_path / "run", device="cpu")
    before = (out / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"run holds a run already: resume it \(--resume\), or"):
        train(tiny(steps=2), out, device="cpu")
    assert (out / "metrics.jsonl").read_text() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"out must name a folder, and .*file is a file"):
        train(tiny(steps=2), tmp_path / "file", device="cpu")


def test_a_run_that_cannot_begin_does_not_claim_its_folder(tiny, tmp_path):
    with pytest.raises(ValueError, match="fewer than batch_size"):
        train(tiny(batch_tokens=32 * 100_000), tmp_path / "run", device="cpu")
    assert train(tiny(steps=1), tmp_path / "run", device="cpu") == tmp_path / "run"
