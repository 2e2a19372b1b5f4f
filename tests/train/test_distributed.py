"""Several processes compute what one computes, and continue from each other's checkpoints."""

import shutil
import signal

import pytest
import torch
import torch.distributed as dist
from train.comparison import STEPS, same
from train.conftest import before_step, torchrun

from support import assert_close
from sympow.model.storage import load_model
from sympow.train.checkpoint import read_seal
from sympow.train.processes import Place, any_process

# A checkpoint every step: writing in the background must not interfere with the collectives of training.
THOROUGH = {"layers": 2, "micro_batch_tokens": 64, "clip_norm": 0.5, "save_every": 1, "evaluate_every": 2}
# Nine sequences, of which the last is evaluated by one process of two.
THOROUGH |= {"evaluate_tokens": 288}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_processes_agree_to_stop_without_waiting_for_their_devices(monkeypatch, elsewhere):
    """At every step the flag is exchanged between hosts, also if the device (here "meta") holds no data."""

    def all_reduce(flag, op):
        assert flag.device.type == "cpu"
        assert op == dist.ReduceOp.MAX
        flag.clamp_(min=float(elsewhere))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    place = Place(rank=0, world_size=2, device=torch.device("meta"))
    assert any_process(False, place) == elsewhere
    assert any_process(True, place)


@pytest.mark.slow
def test_torchrun_starts_two_processes_that_equal_one(texts, alone, tmp_path):
    done = torchrun("-m", "sympow.train", out=tmp_path / "run", data=texts, **THOROUGH)
    assert done.stdout.splitlines() == [str(tmp_path / "run")]
    assert same(tmp_path / "run", alone(**THOROUGH))


@pytest.mark.slow
def test_two_processes_that_share_parameters_out_equal_one(finish, alone, tmp_path):
    out = tmp_path / "two"
    printed = finish(out, processes=2, parallel="fsdp", steps=STEPS, **THOROUGH)
    assert "on 2 × cpu" in printed
    assert printed.count(f"step {STEPS} of {STEPS}") == 1
    assert printed.splitlines().count(str(out)) == 1
    assert same(out, alone(**THOROUGH))
    assert read_seal(out / "checkpoints" / f"step-{STEPS:09d}")["world_size"] == 2
    # The export gathered sharded parameters.
    exported, reference = (load_model(folder / "model") for folder in (out, alone(**THOROUGH)))
    assert exported.config.layers == 2
    assert sum(p.numel() for p in exported.parameters()) == exported.count_parameters()
    for mine, theirs in zip(exported.parameters(), reference.parameters(), strict=True):
        assert_close(mine, theirs, 5e-5, "parameters")


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_checkpoint_of_two_processes_continues_on_another_number(finish, alone, tmp_path, parallel):
    finish(tmp_path / "two", processes=2, parallel=parallel, steps=STEPS // 2)
    for number in (1, 3):
        out = shutil.copytree(tmp_path / "two", tmp_path / f"then-{number}")
        printed = finish(out, processes=number, resume=True, steps=STEPS)
        assert f"on {number} × cpu" in printed
        assert f"resumed from {out / 'checkpoints' / f'step-{STEPS // 2:09d}'}" in printed
        assert same(out, alone())
        seal = read_seal(out / "checkpoints" / f"step-{STEPS:09d}")
        assert (seal["world_size"], seal["step"]) == (number, STEPS)


@pytest.mark.slow
def test_a_checkpoint_of_one_process_continues_on_two(finish, alone, tmp_path):
    finish(tmp_path / "run", steps=STEPS // 2)
    finish(tmp_path / "run", processes=2, resume=True, steps=STEPS, parallel="fsdp")
    assert same(tmp_path / "run", alone())


@pytest.mark.slow
def test_several_processes_recompute_and_pack(finish, alone, tmp_path):
    changes = {"recompute": True, "short": "pack", "micro_batch_tokens": 32}
    finish(tmp_path / "two", processes=2, parallel="fsdp", steps=STEPS, **changes)
    assert same(tmp_path / "two", alone(**changes))


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_of_them_together(start, finish, losses, alone, tmp_path):
    slower = before_step("time.sleep(0.1)")
    training = start(tmp_path / "run", processes=2, steps=STEPS, save_every=0, code=slower)
    training.wait_for_step(2)
    training.send(signal.SIGTERM, process=1)
    assert training.wait() == [0, 0], training.log.read_text()
    done = len(losses(tmp_path / "run"))
    assert 2 <= done < STEPS
    assert f"saved after step {done}" in training.log.read_text()
    finish(tmp_path / "run", processes=2, resume=True)
    assert same(tmp_path / "run", alone())


def test_what_one_process_meets_stops_all_with_the_same_message(start, tmp_path):
    code = """
import os
from sympow.train import loop
accumulate = loop.Training._accumulate_gradients
def spoiled(self, micro_batches):
    broken = os.environ["RANK"] == "1" and self.step_number == 3
    return accumulate(self, micro_batches) * (float("nan") if broken else 1.0)
loop.Training._accumulate_gradients = spoiled
"""
    training = start(tmp_path / "run", processes=2, code=code)
    assert training.wait() == [1, 1]
    printed = training.log.read_text()
    assert printed.count("stopped: step 4: the loss is nan") == 1
    assert "Traceback" not in printed


def test_a_batch_that_cannot_be_shared_is_refused(start, tmp_path):
    training = start(tmp_path / "run", processes=2, batch_tokens=96)
    assert training.wait() == [2, 2]
    printed = " ".join(training.log.read_text().split())
    # Printed once, since both processes have the same error.
    said = "Error: --batch-tokens must hold as many sequences for each of 2 processes; got 96, 3 sequences of 32"
    assert printed.count(said) == 1
    assert printed.count("Error") == 1
    assert not (tmp_path / "run").exists()


def test_the_first_process_chooses_the_folder(start, losses, tmp_path):
    """The default name is the time, which may differ between processes."""
    code = "import os, sys; sys.argv[sys.argv.index('--out') + 1] += os.environ['RANK']"
    training = start(tmp_path / "run", processes=2, code=code)
    assert training.wait() == [0, 0], training.log.read_text()
    assert len(losses(tmp_path / "run0")) == 6
    assert not (tmp_path / "run1").exists()
