"""The soak test itself: it passes when all is well, and fails when something is damaged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import soak

SCRIPT = Path(soak.__file__)


@pytest.mark.slow
def test_a_short_soak_ends_with_the_undisturbed_run(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--kills", "6", "--steps", "60", "--seed", "1", "--out", str(tmp_path / "soak")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "metrics and weights after 60 and 70 steps: the same, bit for bit"


def make_run(folder, losses, weights=b"weights"):
    (folder / "model").mkdir(parents=True)
    lines = [{"step": step, "loss": loss, "tokens_per_second": id(loss)} for step, loss in enumerate(losses, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "model" / "model.safetensors").write_bytes(weights)
    return soak.Run(None, folder, None, len(losses))


def test_what_differs_between_two_runs_is_found(tmp_path):
    alone = make_run(tmp_path / "alone", [3.0, 2.0, 1.0])
    assert soak.differences(make_run(tmp_path / "same", [3.0, 2.0, 1.0]), alone) == []
    (line,) = soak.differences(make_run(tmp_path / "other", [3.0, 2.0000001, 1.0]), alone)
    assert line.startswith("metrics of step 2: ")
    assert soak.differences(make_run(tmp_path / "short", [3.0, 2.0]), alone) == ["2 lines of metrics instead of 3"]
    assert soak.differences(make_run(tmp_path / "weights", [3.0, 2.0, 1.0], b"other"), alone) == ["weights"]


def test_an_attempt_that_fails_by_itself_ends_the_soak(tmp_path):
    run = make_run(tmp_path / "run", [1.0])
    run.log.write_text("Traceback (most recent call last):\n")
    with pytest.raises(soak.SoakError, match="an attempt ended with 1 instead of 0 and said:\nTraceback"):
        run.check(1, 0)
    with pytest.raises(soak.SoakError, match="Traceback"):
        run.check(0, 0)
