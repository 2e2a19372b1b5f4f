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
# All kernels for one GPU, and for the others those that come closest to what it has; `make gpu-targets` compiles all of
# them for all. sm_89 has as much memory as sm_120, and sm_80 more. Triton's own part allocates the memory, so it has to
# do.
FLOAT16, FLOAT32 = (
    f"chunked form with states, {heads}" for heads in ("float16, p = 2, heads of 128", "float32, p = 2, heads of 64")
)
CALLS = {"sm_120": "", "gfx942": FLOAT16, "sm_100": FLOAT32}
# Columns of tensor memory of a multiprocessor of sm_100.
TENSOR_MEMORY = 512


@pytest.fixture(scope="module", params=CALLS)
def reports(request):
    # In a separate process, since kernels cannot be compiled with TRITON_INTERPRET=1.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(TOOL), request.param, "--call", CALLS[request.param]]
    tool = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert tool.returncode == 0, tool.stderr[-4000:]
    return [json.loads(line) for line in tool.stdout.splitlines()]


def test_every_kernel_compiles(reports):
    *kernels, rest = reports
    assert len(kernels) > 10
    assert rest["missing"] == [] or rest["gpu"] != "sm_120"
    assert [report for report in kernels if "error" in report] == []


def test_memory_suffices(reports):
    kernels = reports[:-1]
    assert [r for r in kernels if r["shared"] > r["limit"] or r["tensor_memory"] > TENSOR_MEMORY] == []
    # What the tables say of their tiles, by which these were chosen.
    assert [r for r in kernels if r["declared"] is not None and not r["shared"] <= r["declared"] <= r["limit"]] == []
    assert len([r for r in kernels if r["declared"] is not None]) >= 5
