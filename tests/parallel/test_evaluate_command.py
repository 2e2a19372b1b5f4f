"""`sympow evaluate` under torchrun: documents sharded over processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support import assert_close
from sympow import GPT, GPTConfig
from sympow.cli.app import app
from sympow.model.storage import save_model


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(tmp_path):
    config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2, rotary="scale")
    save_model(tmp_path / "run" / "model", config, GPT(config).state_dict())
    arguments = [
        "evaluate",
        tmp_path / "run" / "model",
        "--length",
        100,
        "--documents",
        1,
        "--segment-size",
        30,
        "--data",
        "stdlib",
    ]
    arguments = [*map(str, arguments), "--device", "cpu", "--out"]
    alone = CliRunner().invoke(app, [*arguments, str(tmp_path / "alone")])
    assert alone.exit_code == 0, alone.output
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "sympow", *arguments, str(tmp_path / "together")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("last 12") == 1
    expected, found = (
        json.loads((tmp_path / name / "evaluation.json").read_text())["models"]["run"]["mean"]
        for name in ("alone", "together")
    )
    assert_close(found, expected, 2e-5, "losses")
