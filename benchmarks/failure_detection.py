"""Time until a run of two processes ends after one fails: with the heartbeat, and with what torch offers for it.

    python benchmarks/failure_detection.py --timeout 60

For each case the script starts torchrun on the CPU (Gloo), makes rank 1 fail at step 5, and prints how long rank 0 and
torchrun kept running after that and what they reported. Failures: "killed" (SIGKILL), "stopped" (SIGSTOP, which looks
like a lost machine), "sleeps" (the main thread hangs), "none" (the cost of the detection) and "restarts" (two torchrun
agents, one of which restarts a killed process; with and without sympow's rendezvous). Detections: "heartbeat";
"timeout", that of torch.distributed, by default 1,800 s for Gloo and 600 s for NCCL; "barrier", a monitored barrier
before every step, with a traceback of each process that makes no progress. `--timeout` is that of the detection, for
the heartbeat `--hang-after`.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import timeit
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

FAILING_STEP = 5
RUN = "--layers 1 --width 32 --heads 2 --context 64 --batch-tokens 256 --no-tensorboard --device cpu"
DETECTIONS = ("heartbeat", "timeout", "barrier")
FAILURES = ("killed", "stopped", "sleeps", "none", "restarts")


class NoHeartbeat:
    """Replaces the heartbeat."""

    def __init__(self, place: object, stop: object, hang_after: float) -> None:
        self.timeout = hang_after

    def __enter__(self) -> NoHeartbeat:
        return self

    def __exit__(self, *_: object) -> None: ...

    def report_progress(self, **_: object) -> None: ...


class Barrier(NoHeartbeat):
    """Replaces the heartbeat by what torch and Python have."""

    def report_progress(self, **_: object) -> None:
        faulthandler.dump_traceback_later(self.timeout)

    def __exit__(self, *_: object) -> None:
        faulthandler.cancel_dump_traceback_later()


def worker(failure: str, detection: str, timeout: float, notes: Path, arguments: list[str]) -> None:
    """One process of the run; rank 1 fails."""
    import torch.distributed as dist

    import sympow.cli.train
    from sympow.train import heartbeat, loop, processes

    if detection != "heartbeat":
        loop.Heartbeat = NoHeartbeat if detection == "timeout" else Barrier  # type: ignore[attr-defined,assignment]
        processes.torchrun_hosts_store = lambda: False
        dist.init_process_group = partial(dist.init_process_group, timeout=timedelta(seconds=timeout))
    barrier = partial(dist.monitored_barrier, timeout=timedelta(seconds=timeout), wait_all_ranks=True)
    rank, step, thread = int(os.environ["RANK"]), loop.Training.step, heartbeat.Heartbeat._run
    (notes / f"pid{rank}").write_text(str(os.getpid()))

    def failing(self: Any, batch: Any) -> Any:
        if rank == 1 and self.step_number == FAILING_STEP and not (notes / "failed").exists():
            (notes / "failed").write_text("")
            if failure == "sleeps":
                time.sleep(1e6)
            os.kill(os.getpid(), signal.SIGSTOP if failure == "stopped" else signal.SIGKILL)
        if detection == "barrier":
            barrier()
        return step(self, batch)

    def timed(self: Any) -> None:
        began = time.monotonic()
        thread(self)
        report = timeit.timeit(self.report_progress, number=10_000) / 10_000
        print(f"cost: rank {rank}, thread {time.thread_time() / (time.monotonic() - began):.2%} of a core, "
              f"{report * 1e6:.2f} µs a progress report")  # fmt: skip

    def timed_barrier(self: Any, *_: object) -> None:
        print(f"cost: rank {rank}, {timeit.timeit(barrier, number=1_000) * 1e3:.0f} µs a monitored barrier")

    if failure == "none":
        heartbeat.Heartbeat._run = timed  # type: ignore[method-assign]
        Barrier.__exit__ = timed_barrier  # type: ignore[method-assign]
    else:
        loop.Training.step = failing  # type: ignore[method-assign]
    sys.argv = ["sympow.train", *arguments]
    sympow.cli.train.main()


def run(failure: str, detection: str, timeout: float) -> str:
    """Starts a run that fails and describes its end."""
    with tempfile.TemporaryDirectory() as folder:
        notes, restarts = Path(folder), failure == "restarts"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        agents = f"--nnodes 2 --nproc-per-node 1 --max-restarts 1 --rdzv-backend c10d --rdzv-endpoint {endpoint}"
        command = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *(agents if restarts else "--standalone --nproc-per-node 2").split(),
            *(__file__, "--worker", failure, detection, str(timeout), folder),
            *("--out", f"{folder}/run", "--hang-after", f"{timeout:.0f}", *RUN.split()),
            *{"none": "--steps 1000", "restarts": "--steps 20 --save-every 1"}.get(failure, "--steps 10000").split(),
        ]
        with (notes / "log").open("w") as output:
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            started = [
                subprocess.Popen(command, stdout=output, stderr=output, env=environment) for _ in range(1 + restarts)
            ]
        while not (notes / "failed").exists() and started[0].poll() is None:
            time.sleep(0.05)
        began = time.monotonic()
        survivor, survived = int((notes / "pid0").read_text()), 0.0
        while any(process.poll() is None for process in started):
            if not survived and not _alive(survivor):
                survived = time.monotonic() - began
            time.sleep(0.05)
        ended = time.monotonic() - began
        said = (notes / "log").read_text()
        steps = (notes / "run" / "metrics.jsonl").read_text().count("\n")
    codes = [process.returncode for process in started]
    marks = r"cost: |stopped: |monitoredBarrier|Timeout \(|RuntimeError|Timed out|rank *:|exitcode *:|resumed from"
    reported = re.compile(marks + "|Root Cause|File .*failure_detection")
    lines = "\n".join(f"    {line.strip()[:200]}" for line in said.splitlines() if reported.search(line))
    times = f"rank 0 after {survived or ended:.1f} s, torchrun {codes} after {ended:.1f} s, {steps} steps"
    return f"{failure}, {detection}, {timeout:.0f} s: {times}\n{lines.replace(folder, '')}"


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3], float(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
    else:
        parser = argparse.ArgumentParser()
        parser.add_argument("--timeout", type=float, default=60.0)
        parser.add_argument("--failures", nargs="+", choices=FAILURES, default=FAILURES)
        parser.add_argument("--detections", nargs="+", choices=DETECTIONS, default=DETECTIONS)
        given = parser.parse_args()
        for failure in given.failures:
            for detection in given.detections:
                print(run(failure, detection, given.timeout), flush=True)
