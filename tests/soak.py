"""Soak test of resuming: kills a run many times, damages its checkpoints, and compares it with an undisturbed run.

    python tests/soak.py                 # 100 kills: a few minutes on two cores
    python tests/soak.py --kills 1000 --seed 7 --out build/soak

Each attempt is killed (SIGKILL) at a random moment: while it starts, between two steps, or while it writes a
checkpoint. After half of the kills, checkpoints are damaged: a bit is flipped, or a file is cut off, emptied,
overwritten or removed. The next attempt uses --resume. At the end, metrics and weights must equal those of a run that
was never killed, bit for bit, also after some further steps, which depend on the state of the optimizer and the
position in the data. An attempt that ends in another way than by being killed is a failure. Exits with 1 on failure.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
# Further steps of both runs at the end.
MORE_STEPS = 10
WORDS = ("state", "gate", "turn", "key", "value", "decay", "power", "token", "and", "of")
MODEL = {"layers": 1, "width": 32, "heads": 2, "context": 32, "batch-tokens": 192, "micro-batch-tokens": 96}
OPTIMIZER = {"learning-rate": 3e-3, "warmup-steps": 20, "weight-decay": 0.1, "clip-norm": 1.0}
RUN = {"save-every": 3, "keep": 3, "log-every": 25, "evaluate-every": 50, "evaluate-tokens": 256, "device": "cpu"}
# Metrics that depend on time.
TIMED = {"tokens_per_second"}
TOO_LATE = "not at all, since it had come to its end"
# Seconds between two polls of a run.
POLL = 0.003


class SoakError(Exception):
    """A run did not behave as it must."""


class Launcher:
    """Forks training processes from one that has imported everything, so that an attempt starts within a second.

    Args:
        flags: of Python.
    """

    def __init__(self, *flags: str) -> None:
        self._flags = flags

    def __enter__(self) -> Launcher:
        self._process = subprocess.Popen(
            [sys.executable, *self._flags, str(TESTS / "train" / "launcher.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def start(self, arguments: list[str], log: Path) -> int:
        """Starts a process; returns its id."""
        return self.ask({"environment": {}, "arguments": arguments, "code": "", "log": str(log)})

    def poll(self, pid: int) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self.ask({"wait": pid})

    def ask(self, request: dict[str, object]) -> int | None:
        """The answer of launcher.py to a request: to start a process, or to wait for one."""
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


class Run:
    """A run and its attempts.

    Args:
        folder: the run folder; logs are written beside it.
        steps: number of training steps.
    """

    def __init__(self, launcher: Launcher, folder: Path, data: Path, steps: int) -> None:
        self.launcher, self.folder, self.data, self.steps = launcher, folder, data, steps
        self.log = folder.with_suffix(".log")
        self._logged = 0

    def start(self) -> int:
        self._logged = self.log.stat().st_size if self.log.exists() else 0
        arguments = ["--out", str(self.folder)]
        if (self.folder / "config.yaml").exists():
            arguments += ["--resume", "--steps", str(self.steps), "--device", "cpu"]
        else:
            flags = {**MODEL, **OPTIMIZER, **RUN, "data": self.data, "steps": self.steps}
            arguments += ["--no-tensorboard", *(str(x) for name, value in flags.items() for x in (f"--{name}", value))]
        return self.launcher.start(arguments, self.log)

    def finish(self) -> float:
        """Runs an attempt to its end; returns the seconds to its first step."""
        pid, before = self.start(), self.steps_written()
        # Started here, since the very first attempt waits for the launcher.
        begin, first = time.monotonic(), 0.0
        while (code := self.launcher.poll(pid)) is None:
            if not first and self.steps_written() > before:
                first = time.monotonic() - begin
            time.sleep(POLL)
        self.check(code, 0)
        return first

    def check(self, code: int, expected: int) -> None:
        if code != expected or "Traceback" in self.said():
            raise SoakError(f"an attempt ended with {code} instead of {expected} and said:\n{self.said()}")

    def said(self) -> str:
        """The output of the last attempt."""
        with self.log.open("rb") as file:
            file.seek(self._logged)
            return file.read().decode(errors="replace")

    def steps_written(self) -> int:
        try:
            return (self.folder / "metrics.jsonl").read_bytes().count(b"\n")
        except FileNotFoundError:
            return 0

    def metrics(self) -> list[dict[str, float]]:
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]

    def unfinished(self) -> bool:
        return any((self.folder / "checkpoints").glob("*.unfinished"))


def kill_at_random(run: Run, choose: random.Random, limit: int, start_seconds: float) -> tuple[str, int]:
    """Runs an attempt and kills it; returns when that was, and the number of steps made.

    Args:
        limit: step after which it is killed in any case, so that the run does not end early.
        start_seconds: approximate seconds to the first step.
    """
    way = choose.choice(("time", "step", "checkpoint"))
    before = run.steps_written()
    # Steps after the last checkpoint are repeated, so the number of steps falls first.
    wanted = before + choose.randint(1, 12)
    until = choose.uniform(0, 1.5 * start_seconds) if way == "time" else float("inf")
    pid, begin, lowest = run.start(), time.monotonic(), before
    while True:
        code = run.launcher.poll(pid)
        if code is not None:
            run.check(code, 0)
            return TOO_LATE, run.steps_written() - lowest
        steps = run.steps_written()
        lowest = min(lowest, steps)
        due = {
            "time": time.monotonic() - begin >= until,
            "step": steps >= wanted,
            "checkpoint": steps > lowest and run.unfinished(),
        }
        if due[way] or (steps >= limit and steps > lowest):
            break
        time.sleep(POLL)
    time.sleep(choose.uniform(0, 0.03))
    os.kill(pid, signal.SIGKILL)
    while (code := run.launcher.poll(pid)) is None:
        time.sleep(POLL)
    if code == 0:
        return TOO_LATE, run.steps_written() - lowest
    run.check(code, -signal.SIGKILL)
    made = run.steps_written() - lowest
    if not made:
        return "before its first step", made
    return "while a checkpoint was written" if run.unfinished() else "between checkpoints", made


def damage(run: Run, choose: random.Random) -> list[str]:
    """Damages the newest checkpoint, some other, or now and then all of them. Returns what was done."""
    whole = sorted(path for path in (run.folder / "checkpoints").glob("step-*") if path.suffix == "")
    if not whole:
        return []
    kind = choose.random()
    chosen = whole if kind < 0.04 else [whole[-1]] if kind < 0.7 else [choose.choice(whole)]
    return [damage_one(path, choose) for path in chosen]


def damage_one(checkpoint: Path, choose: random.Random) -> str:
    file = choose.choice(sorted(checkpoint.iterdir()))
    content = bytearray(file.read_bytes())
    ways = ["bit flipped", "cut off", "emptied", "overwritten", "removed"]
    way = choose.choice(ways)
    if way == "removed" or not content:
        file.unlink()
        return "removed"
    if way == "bit flipped":
        content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
    elif way == "cut off":
        del content[choose.randrange(len(content)) :]
    elif way == "emptied":
        content.clear()
    else:
        at = choose.randrange(len(content))
        content[at : at + 512] = choose.randbytes(len(content[at : at + 512]))
    file.write_bytes(content)
    return way


def differences(run: Run, other: Run) -> list[str]:
    """The differences between two runs, as messages."""
    found = []
    mine, theirs = run.metrics(), other.metrics()
    if len(mine) != len(theirs):
        found.append(f"{len(mine)} lines of metrics instead of {len(theirs)}")
    found += [f"metrics of step {b['step']}: {a} instead of {b}" for a, b in zip(mine, theirs, strict=False) if a != b]
    weights = [(x.folder / "model" / "model.safetensors").read_bytes() for x in (run, other)]
    if weights[0] != weights[1]:
        found.append("weights")
    return found


def prepare_texts(folder: Path) -> Path:
    from sympow.data.preparation import prepare

    choose = random.Random(0)
    texts = [" ".join(choose.choices(WORDS, k=choose.randint(4, 80))) for _ in range(80)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "texts.jsonl"], folder / "data", heldout=0.2, workers=1)
    return folder / "data"


def listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.most_common())


def soak(kills: int, steps: int, seed: int, out: Path) -> None:
    """Runs the soak and prints what was done; raises SoakError on failure."""
    choose = random.Random(seed)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    data = prepare_texts(out)
    with Launcher() as launcher:
        alone, killed = (Run(launcher, out / name, data, steps) for name in ("undisturbed", "killed"))
        begin = time.monotonic()
        start_seconds = alone.finish()
        print(f"undisturbed: {steps} steps in {time.monotonic() - begin:.0f} s", flush=True)
        moments: Counter[str] = Counter()
        damages: Counter[str] = Counter()
        resumed: Counter[str] = Counter()
        made = 0
        begin = time.monotonic()
        while (done := moments.total() - moments[TOO_LATE]) < kills:
            if moments[TOO_LATE] > kills:
                raise SoakError("the run ends too soon to be killed as often; give it more --steps")
            moment, count = kill_at_random(killed, choose, steps * (done + 1) // (kills + 2), start_seconds)
            moments[moment] += 1
            made += count
            said = killed.said()
            resumed["rejected a damaged checkpoint and used an earlier one"] += "is damaged" in said
            resumed["resumed from a checkpoint"] += "resumed from" in said
            resumed["started from the beginning"] += "starting from the beginning" in said
            if choose.random() < 0.5:
                damages.update(damage(killed, choose))
        last = killed.steps_written()
        killed.finish()
        print(f"killed: {listed(moments)}, in {time.monotonic() - begin:.0f} s")
        print(f"damaged checkpoints, by a file: {listed(damages)}")
        print(f"attempts: {listed(resumed)}")
        print(f"steps: {made + steps - last:,} made, of which {steps} count")
        found = differences(killed, alone)
        if not found:
            for run in (alone, killed):
                run.steps = steps + MORE_STEPS
                run.finish()
            found = differences(killed, alone)
        if found:
            raise SoakError("\n".join(["the killed run differs from the undisturbed one:", *found[:20]]))
    print(f"metrics and weights after {steps} and {steps + MORE_STEPS} steps: the same, bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="how often to kill the run")
    parser.add_argument("--steps", type=int, default=400, help="steps of the run")
    parser.add_argument("--seed", type=int, default=0, help="of moments and damages")
    parser.add_argument(
        "--out", type=Path, default=Path("build/soak"), help="folder for both runs; it is emptied first"
    )
    options = parser.parse_args()
    try:
        soak(options.kills, options.steps, options.seed, options.out)
    except SoakError as error:
        sys.exit(f"soak failed: {error}")


if __name__ == "__main__":
    main()
