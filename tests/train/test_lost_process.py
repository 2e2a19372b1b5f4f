"""The heartbeat: a process that dies or stops ends the run, by name, and torchrun restarts from the last checkpoint."""

import signal
import time
from pathlib import Path

import pytest
from train.comparison import same
from train.conftest import before_step, torchrun

DYING = before_step("""
    if os.environ["RANK"] == "{rank}" and self.step_number == 3:
        os.kill(os.getpid(), signal.{signal})
""")
# A stopped process keeps its connections open, so only the missing heartbeat reveals it. The limits are shortened.
IMPATIENT = "from sympow.train import heartbeat; heartbeat.DEAD_AFTER, heartbeat.EXIT_GRACE = 4.0, 1.0\n"


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_ends_all_by_name(start, tmp_path, rank):
    began = time.monotonic()
    training = start(tmp_path / "run", processes=3, context_parallel=3, code=DYING.format(rank=rank, signal="SIGKILL"))
    codes = training.wait()
    assert time.monotonic() - began < 60
    assert codes.pop(rank) == -signal.SIGKILL
    assert codes == [1, 1], training.log.read_text()
    said = [line for line in training.log.read_text().splitlines() if line.startswith("stopped: ")]
    # Rank 0 hosts the store: without it the others cannot read heartbeats or names.
    named = f"rank {rank}, which hosts" if rank == 0 else f"rank {rank} (process {training.pids[rank]} on "
    assert len(said) == 2, training.log.read_text()
    assert all(named in line for line in said), said


@pytest.mark.slow
def test_a_process_that_hangs_ends_all_by_name(start, tmp_path):
    code = IMPATIENT + DYING.format(rank=1, signal="SIGSTOP")
    training = start(tmp_path / "run", processes=3, code=code)
    end = time.monotonic() + 60
    hanging = training.pids.pop(1)
    try:
        assert training.wait() == [1, 1], training.log.read_text()
    finally:
        training.pids.append(hanging)  # to be killed with the rest
    assert time.monotonic() < end
    assert training.log.read_text().count(f"stopped: rank 1 (process {hanging} on ") == 2


@pytest.mark.slow
def test_torchrun_restarts_from_the_last_checkpoint(alone, texts, tmp_path):
    out = tmp_path / "run"
    program = ("--max-restarts", "1", Path(__file__).with_name("dying.py"))
    changes = {"data": texts, "save_every": 1, "context_parallel": 2}
    done = torchrun(*program, out=out, environment={"DYING_RANK": "1", "DYING_STEP": "3"}, **changes)
    assert "stopped: rank 1 (process " in done.stderr
    assert f"resumed from {out / 'checkpoints' / 'step-'}" in done.stderr
    assert same(out, alone(save_every=1))
