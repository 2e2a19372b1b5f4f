"""Every kernel compiles for GPUs other than Hopper (`test_sm90`), and takes no more memory than a CTA has there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parent / "targets.py"
# The compilers take longest for sm_80, sm_89 and gfx942: there Triton's own part has to do, which allocates the memory.
GPUS = {"sm_80": [], "sm_89": [], "sm_100": ["--machine-code"], "sm_120": ["--machine-code"], "gfx942": []}
# Columns of tensor memory of a multiprocessor of sm_100.
TENSOR_MEMORY = 512


@pytest.fixture(scope="module", params=GPUS)
def reports(request):
    # In a separate process, since kernels cannot be compiled with TRITON_INTERPRET=1.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(TOOL), request.param, *GPUS[request.param]]
    tool = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert tool.returncode == 0, tool.stderr[-4000:]
    return [json.loads(line) for line in tool.stdout.splitlines()]


def test_every_kernel_compiles(reports):
    *kernels, rest = reports
    assert len(kernels) > 35
    assert rest["missing"] == []
    assert [report for report in kernels if "error" in report] == []


def test_memory_suffices(reports):
    kernels = reports[:-1]
    assert [r for r in kernels if r["shared"] > r["limit"] or r["tensor_memory"] > TENSOR_MEMORY] == []
    # What the tables say of their tiles, by which these were chosen.
    assert [r for r in kernels if r["declared"] is not None and not r["shared"] <= r["declared"] <= r["limit"]] == []
    assert len([r for r in kernels if r["declared"] is not None]) >= 10
