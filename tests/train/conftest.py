import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import soak
from train.comparison import STEPS

import support
from sympow.data.preparation import prepare
from sympow.train import TrainConfig, loop, train
from sympow.train.metrics import read_metrics
from sympow.train.signals import stop_on_signals

# Timeout in seconds for a busy machine; no test waits this long otherwise.
PATIENCE = 60.0
TINY = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "rotary": "scale",
    "context": 32,
    "batch_tokens": 192,
    "learning_rate": 3e-3,
    # Far above the rounding errors of gradients, near 1e-9: Adam divides a gradient by its size, and would make a full
    # step of one that is only rounding error. Half of the gradients are larger than this.
    "epsilon": 1e-4,
    "warmup_steps": 0,
    "clip_norm": 0.0,
    "log_every": 1,
    "evaluate_every": 0,
    "tensorboard": False,
}


def seed():
    """The seed of runs; margins.py shifts it."""
    return {"seed": support.seed_shift}


@pytest.fixture(autouse=True)
def nothing_to_collect():
    """A run starts with a garbage collection; freezing what is imported makes it fast."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def signals_reach_pytest(monkeypatch):
    """A run in this process takes Ctrl-C or SIGTERM as a request to stop; this raises the signal again after the run.

    Otherwise a signal that should end pytest, such as that of `timeout`, would look like a run with too few steps.
    """

    @contextmanager
    def passing_on():
        with stop_on_signals() as stop:
            yield stop
        if stop.signal is not None:
            signal.raise_signal(signal.Signals[stop.signal])

    monkeypatch.setattr(loop, "stop_on_signals", passing_on)


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A prepared folder of bytes: documents of 20 to 400, a fifth held out."""
    folder = tmp_path_factory.mktemp("texts")
    choose = random.Random(0)
    words = ["state", "gate", "turn", "key", "value", "decay", "power", "token", "and", "of"]
    documents = [" ".join(choose.choices(words, k=choose.randint(4, 80))) for _ in range(80)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare([folder / "texts.jsonl"], folder / "prepared", heldout=0.2, workers=1)
    return folder / "prepared"


@pytest.fixture
def tiny(texts):
    """Makes the config of a tiny run."""

    def make(**changes):
        return TrainConfig().changed(**{"data": str(texts), "steps": 6, "save_every": 2, **TINY, **seed(), **changes})

    return make


@pytest.fixture
def losses():
    """Reads the loss of every step of a run; steps must be there once each, in order."""

    def read(folder):
        lines = read_metrics(Path(folder) / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
        return [line["loss"] for line in lines]

    return read


@pytest.fixture(scope="session")
def known():
    """A cache of the folders of single-process runs."""
    return {}


@pytest.fixture
def alone(known, tiny, tmp_path_factory):
    """The folder of the same run in one process."""

    def run(**changes):
        key = str(sorted(changes.items()))
        # margins.py changes the arithmetic of this run from one call to the next.
        if key not in known or support.observe is not None:
            known[key] = train(tiny(steps=STEPS, **changes), tmp_path_factory.mktemp("alone"), device="cpu")
        return known[key]

    return run


def before_step(code):
    """Code for a training process that runs other code before each step, in which `self` is the training."""
    return f"""
import os, signal, time
from sympow.train import heartbeat, loop
step = loop.Training.step
def changed(self, batch):
{textwrap.indent(textwrap.dedent(code).strip(), "    ")}
    return step(self, batch)
loop.Training.step = changed
"""


# Long enough that a signal arrives during the phase that a test wants.
SLOWER = before_step("time.sleep(0.02)")


@pytest.fixture
def before_steps(monkeypatch):
    """Calls a function with the training before each step of runs in this process."""

    def call(act):
        step = loop.Training.step

        def changed(self, batch):
            act(self)
            return step(self, batch)

        monkeypatch.setattr(loop.Training, "step", changed)

    return call


def torchrun(*words, out, environment=None, **changes):
    """Runs torchrun with two processes of a program for training, on a tiny run; it must end well."""
    command = [Path(sys.executable).with_name("torchrun"), "--standalone", "--nproc-per-node", "2", *words]
    command += ["--out", out, "--device", "cpu", *as_flags({**TINY, **seed(), "steps": STEPS, **changes})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return done


def as_flags(changes):
    flags = []
    for name, value in changes.items():
        flag = name.replace("_", "-")
        flags += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return flags


@dataclass
class Training:
    """The processes of a run that may still be running."""

    pids: list[int]
    log: Path
    out: Path
    ask: Callable
    codes: dict[int, int] = field(default_factory=dict)

    def wait(self, patience=PATIENCE):
        """Waits for the processes; returns their exit codes, negative for a signal."""
        end = time.monotonic() + patience
        while running := [pid for pid in self.pids if pid not in self.codes]:
            for pid in running:
                if (code := self.ask({"wait": pid})) is not None:
                    self.codes[pid] = code
            if time.monotonic() > end:
                raise TimeoutError(f"processes {running} do not end:\n{self.log.read_text()}")
            time.sleep(0.01)
        return [self.codes[pid] for pid in self.pids]

    def kill(self):
        """Kills processes that a failed test left running."""
        for pid in self.pids:
            if pid not in self.codes:
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait_for_step(self, step):
        """Waits until metrics.jsonl has the step."""
        end = time.monotonic() + PATIENCE
        while self.steps_written() < step:
            if time.monotonic() > end:
                raise TimeoutError(f"step {step} does not come:\n{self.log.read_text()}")
            time.sleep(0.001)

    def steps_written(self):
        try:
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def send(self, number, process=0):
        os.kill(self.pids[process], number)


@pytest.fixture(scope="session")
def launcher():
    """Returns a function that starts training processes through launcher.py."""
    # Warnings are errors in the launcher as well.
    with soak.Launcher("-W", "error") as process:
        yield process.ask


@pytest.fixture
def start(launcher, texts, tmp_path):
    """Starts `python -m sympow.train` on a tiny run, in one process or several."""
    started = []

    def run(out, *, processes=1, resume=False, code="", **changes):
        defaults = {"data": texts, "steps": 6, "save_every": 2, **TINY, **seed()}
        arguments = ["--out", str(out), "--device", "cpu", *(["--resume"] if resume else [])]
        arguments += as_flags(changes if resume else {**defaults, **changes})
        log = tmp_path / f"{Path(out).name}.log"
        environments = [{}]
        if processes > 1:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            shared = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environments = [{**shared, "RANK": str(n), "LOCAL_RANK": str(n)} for n in range(processes)]
        pids = [
            launcher({"environment": environment, "arguments": arguments, "code": code, "log": str(log)})
            for environment in environments
        ]
        started.append(Training(pids, log, Path(out), launcher))
        return started[-1]

    yield run
    for training in started:
        training.kill()


@pytest.fixture
def finish(start):
    """Starts a run, waits until it ends successfully, and returns its output."""

    def run(out, **options):
        training = start(out, **options)
        codes = training.wait()
        printed = training.log.read_text()
        assert set(codes) == {0}, printed
        return printed

    return run
