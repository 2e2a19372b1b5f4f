"""Training with context parallelism equals training in one process."""

import shutil

import pytest
from train.comparison import STEPS, same

from sympow.train import TrainConfig
from sympow.train.checkpoint import read_seal

# Four sequences of 33 tokens, which two processes cannot halve.
UNEVEN = {"context": 33, "batch_tokens": 132}
THOROUGH = UNEVEN | {"micro_batch_tokens": 33, "clip_norm": 0.5, "evaluate_every": 2}
# Nine sequences, of which the last is evaluated by one group of two.
THOROUGH |= {"evaluate_tokens": 297}


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "others"), [("ddp", (1, 3)), ("fsdp", (3,))])
def test_two_by_two_processes_equal_one_and_others_go_on(finish, alone, tmp_path, parallel, others):
    two_by_two = {"processes": 4, "context_parallel": 2, "parallel": parallel}
    printed = finish(tmp_path / "grid", steps=STEPS // 2, **two_by_two, **THOROUGH)
    assert "on 4 × cpu, context parallel 2" in printed
    for processes in others:
        out = shutil.copytree(tmp_path / "grid", tmp_path / f"then-{processes}")
        finish(out, processes=processes, resume=True, steps=STEPS, context_parallel=processes)
        assert same(out, alone(**THOROUGH))
        assert read_seal(out / "checkpoints" / f"step-{STEPS:09d}")["world_size"] == processes


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"short": "pack", "micro_batch_tokens": 66, "recompute": True},
        {"mixer": "softmax", "gating": "scalar", "short": "pack"},
        {"power": 4, "gating": "vector", "rotary": "learned"},
    ],
    ids=["packed", "softmax", "vector"],
)
def test_whatever_the_model_and_the_documents(finish, alone, tmp_path, changes):
    changes = UNEVEN | changes
    finish(tmp_path / "two", processes=2, context_parallel=2, steps=STEPS, **changes)
    assert same(tmp_path / "two", alone(**changes))


def test_processes_that_cannot_be_shared_out_are_refused(start, tmp_path):
    training = start(tmp_path / "run", processes=2, context_parallel=3)
    assert training.wait() == [2, 2]
    message = "--context-parallel must divide the number of processes, 2; got 3"
    assert message in " ".join(training.log.read_text().split())


def test_a_context_that_cannot_be_shared_out_is_refused():
    with pytest.raises(ValueError, match="context_parallel must leave each process a token of the context, 32; got 64"):
        TrainConfig().changed(context=32, batch_tokens=64, context_parallel=64)
