"""A full or read-only disk ends a run with one line, and earlier checkpoints stay intact."""

import pytest
from train.conftest import before_step

# From a given step on, files are limited to a size that checkpoints exceed and metrics do not reach.
LIMITED = """
import resource
from sympow.train import loop, trainer
save = {owner}.{name}
def limited(*arguments):
    if {begins}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    return save(*arguments)
{owner}.{name} = limited
"""
SAVE = {"owner": "loop.Training", "name": "save"}
# None, after the checkpoint before is complete.
FINISH = "arguments[0].checkpoints.finish()"
# From the third step on, writing to a file fails as on a disk without space.
FULL = before_step("""
    for handle in os.listdir("/proc/self/fd") if self.step_number == 2 else ():
        path = f"/proc/self/fd/{handle}"
        if os.path.exists(path) and "metrics.jsonl" in os.readlink(path):
            os.dup2(os.open("/dev/full", os.O_WRONLY), int(handle))
""")
# The same for a file that is opened each time.
REPLACED = before_step("""
    for path in (self.folder / "tensorboard").iterdir() if self.step_number == 2 else ():
        path.unlink()
        path.symlink_to("/dev/full")
""")


@pytest.fixture
def fail(start, losses):
    """Runs until the disk is full; checks for the one-line message and that nothing was lost."""

    def run(out, code, message, **changes):
        training = start(out, code=code, **changes)
        assert training.wait() == [1], training.log.read_text()
        log = training.log.read_text()
        assert "Traceback" not in log
        assert "Exception" not in log
        said = [line for line in log.splitlines() if "error" in line]
        assert len(said) == 1, log
        assert message in said[0]
        assert not list(out.glob("checkpoints/*.unfinished"))
        assert start(out, resume=True).wait() == [0]
        start(out.with_name("whole"), **changes).wait()
        assert losses(out) == losses(out.with_name("whole"))

    return run


def test_a_checkpoint_that_cannot_be_written(fail, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    message = f"error: {folder}/step-000000004 could not be written: File too large; the last one is "
    fail(
        tmp_path / "run",
        LIMITED.format(**SAVE, begins=f"arguments[0].step_number >= 4 and not {FINISH}"),
        message + f"{folder}/step-000000002",
    )


@pytest.mark.slow
def test_a_first_checkpoint_that_cannot_be_written(fail, tmp_path):
    message = "step-000000002 could not be written: File too large; there is none before it"
    fail(tmp_path / "run", LIMITED.format(**SAVE, begins="True"), message)


@pytest.mark.slow
def test_a_model_that_cannot_be_written(fail, tmp_path):
    message = f"error: {tmp_path / 'run' / 'model' / 'model.safetensors'}: File too large"
    fail(tmp_path / "run", LIMITED.format(owner="trainer", name="_export", begins="True"), message)
    assert not list((tmp_path / "run" / "model").glob(".*"))


@pytest.mark.slow
def test_metrics_that_cannot_be_written(fail, tmp_path):
    message = f"error: {tmp_path / 'run' / 'metrics.jsonl'}: No space left on device"
    fail(tmp_path / "run", FULL, message, save_every=1)


@pytest.mark.slow
def test_events_that_cannot_be_written(fail, tmp_path):
    message = f"error: {tmp_path / 'run' / 'tensorboard'}: No space left on device"
    fail(tmp_path / "run", REPLACED, message, save_every=1, tensorboard=True)
