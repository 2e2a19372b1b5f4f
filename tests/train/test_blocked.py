"""Processes with different settings, and processes that wait in a collective for one that hangs."""

import json
import signal

import pytest
from train.conftest import before_step

from sympow.data.preparation import prepare

DIFFERENT = """
import os, sys
if os.environ["RANK"] == "1":
    sys.argv += {flags!r}
"""
HANGING = before_step("""
    heartbeat.STOP_GRACE, heartbeat.EXIT_GRACE = 2.0, 1.0
    while os.environ["RANK"] == "{rank}" and self.step_number == 3:
        time.sleep(60)
""")


@pytest.mark.parametrize(
    ("name", "value", "here"),
    [
        ("learning_rate", 0.01, 0.003),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("seed", 5, 0),
                ("power", 4, 2),
                ("batch_tokens", 384, 192),
                ("steps", 7, 6),
                ("save_every", 3, 2),
            )
        ),
    ],
)
def test_processes_with_other_settings_are_refused(start, tmp_path, name, value, here):
    flag = f"--{name.replace('_', '-')}"
    training = start(tmp_path / "run", processes=2, code=DIFFERENT.format(flags=[flag, str(value)]))
    assert training.wait() == [2, 2], training.log.read_text()
    said = " ".join(training.log.read_text().split())
    assert said.count(f"{flag} must be the same in all processes; rank 0 has {here}, rank 1 {value}") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_of_which_one_resumes_are_refused(start, finish, tmp_path):
    finish(tmp_path / "run", processes=2, steps=2)
    code = "import os, sys; os.environ['RANK'] == '1' and sys.argv.remove('--resume')"
    training = start(tmp_path / "run", processes=2, resume=True, code=code + "; sys.argv += ['--steps', '4']")
    assert training.wait() == [2, 2], training.log.read_text()
    assert "must be the same in all processes; rank 0 has" in " ".join(training.log.read_text().split())


def test_processes_with_other_data_of_the_same_name_are_refused(start, texts, tmp_path):
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "another text " * 40}) + "\n" for _ in range(80)))
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (tmp_path / "0" / "data").symlink_to(texts)
    prepare([tmp_path / "texts.jsonl"], tmp_path / "1" / "data", heldout=0.2, workers=1)
    code = f"import os; os.chdir({str(tmp_path)!r} + '/' + os.environ['RANK'])"
    training = start(tmp_path / "run", processes=2, code=code, data="./data")
    assert training.wait() == [2, 2], training.log.read_text()
    assert "--data must be the same in all processes" in " ".join(training.log.read_text().split())


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_main_thread_that_hangs_ends_all_by_name(start, tmp_path, rank):
    training = start(tmp_path / "run", processes=3, hang_after=8, code=HANGING.format(rank=rank))
    assert training.wait() == [1, 1, 1], training.log.read_text()
    said = [line for line in training.log.read_text().splitlines() if line.startswith("stopped: ")]
    assert len(said) == 3
    for line in said:
        assert line.startswith(f"stopped: rank {rank} (process {training.pids[rank]} on "), line
        assert "hangs in run (loop.py:" in line
        assert line.endswith("no progress for 8 s")


@pytest.mark.slow
def test_a_process_that_waits_for_another_ends_on_sigterm(start, tmp_path):
    training = start(tmp_path / "run", processes=2, code=HANGING.format(rank=1))
    training.wait_for_step(3)
    training.send(signal.SIGTERM, process=0)
    assert training.wait() == [1, 1], training.log.read_text()
    said = f"stopped: rank 0 (process {training.pids[0]} on "
    assert training.log.read_text().count(said) == 2
    assert "received SIGTERM but stays blocked in " in training.log.read_text()
