"""The demo of `make demo`: the commands of README.md, one after the other, on a CPU within five minutes.

Two small models of the same size are trained on modules of Python's standard library at a context of 128 tokens: one
with softmax attention, one with conformal symmetric power attention. Both are then evaluated on held-out modules at
eight times the context, and the conformal one generates some Python. Every `sympow` command is printed before it runs.

python examples/demo.py --out build/demo
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sympow.cli.errors import Reported
from sympow.data.standard_library import StandardLibrary
from sympow.invocation import command_line
from sympow.model.config import PAPER_VARIANTS
from sympow.train.metrics import read_metrics

MODELS = {name: PAPER_VARIANTS[name] for name in ("softmax", "conformal")}
CONTEXT = 128
EVALUATED = 8 * CONTEXT
MARKER = "README.txt"
# Seconds between two lines of progress.
EVERY = 15
# The two models train at the same time, with one thread each: with more threads than cores, threads wait for each other
# and training takes up to ten times as long. GPUs are hidden, so that the demo is the same on any machine.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Size:
    """Sizes of the demo.

    Attributes:
        modules: largest number of modules per split.
        vocabulary: vocabulary size of the byte-pair encoding.
        steps: training steps.
        width: width of the models.
        documents: number of held-out documents to evaluate on.
        written: number of tokens to generate.
    """

    modules: int
    vocabulary: int
    steps: int
    width: int
    documents: int
    written: int


FULL = Size(modules=1_000, vocabulary=2_048, steps=800, width=128, documents=96, written=160)
TINY = Size(modules=8, vocabulary=300, steps=6, width=16, documents=4, written=16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for everything")
    parser.add_argument("--tiny", action="store_true", help="run every command at a tiny size, as a test")
    arguments = parser.parse_args()
    out: Path = arguments.out
    size = TINY if arguments.tiny else FULL
    start = time.monotonic()
    make_folder(out)
    data, runs = out / "data", out / "runs"
    models = [runs / name / "model" for name in MODELS]
    conformal = models[-1]

    heading("Text to tokens")
    shown = write_modules(out / "text", size.modules)
    sources = (out / "text" / "train", "--heldout-source", out / "text" / "heldout")
    sympow("data", "prepare", *sources, "--tokenizer", "bpe", "--vocab-size", size.vocabulary, "--out", data)

    heading(f"Two models, {CONTEXT} tokens of context, at the same time")
    train_all({name: training_flags(name, size, data) for name in MODELS}, runs)

    heading(f"Loss on held-out modules, up to {EVALUATED:,} tokens")
    length = ("--length", EVALUATED, "--documents", size.documents)
    sympow("evaluate", *models, "--data", data, *length, "--out", out / "evaluation")
    print_losses(out / "evaluation" / "evaluation.json")

    heading("The conformal model writes some Python")
    sampling = ("--temperature", 0.5, "--top-p", 0.9, "--seed", 1)
    sympow("generate", conformal, "--prompt", "def read(self, size=-1):", "--tokens", size.written, *sampling)

    heading("Figures and pages")
    sympow("report", out, "--out", out / "report", "--title", "Softmax and conformal, two small models")
    sympow("inspect", conformal, shown, "--tokens", 2_000, "--out", out / "inspect.html")

    heading(f"Done in {time.monotonic() - start:.0f} seconds")
    print(f"The report, a page with all losses and settings:\n{address(out / 'report' / 'index.html')}\n")
    print(f"Gates and rotations of the model at each token of {shown.stem}.py:\n{address(out / 'inspect.html')}\n")
    print(f"Loss by position, within and beyond {CONTEXT} tokens:")
    print(f"{address(out / 'evaluation' / 'loss_by_context.png')}\n")
    print("Next steps:\n")
    for command in next_commands(out, conformal, size):
        print(f"{command_line(*command)}\n")


def make_folder(out: Path) -> None:
    """Creates the folder, or empties that of an earlier demo; no other folder is touched."""
    if out.exists():
        if not out.is_dir() or (any(out.iterdir()) and not (out / MARKER).is_file()):
            raise SystemExit(
                f"--out must be a new folder, or one that this demo made, which is replaced; {out} is neither. "
                "Remove it, or name another folder"
            )
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARKER).write_text("Written by examples/demo.py, which replaces this folder when it runs again.\n")


def write_modules(folder: Path, most: int) -> Path:
    """Writes single-file modules of the standard library to folder/train and folder/heldout; returns a held-out one."""
    written: dict[str, list[Path]] = {}
    for split in ("train", "heldout"):
        library = StandardLibrary(split)
        files = [number for number in range(len(library.lengths)) if Path(library.document_name(number)).is_file()]
        written[split] = []
        for number in files[:most]:
            text = library.load_tokenizer().decode(library.read(number, 0, int(library.lengths[number])))
            path = folder / split / f"{Path(library.document_name(number)).stem}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written[split].append(path)
    print(f"{len(written['train'])} modules of Python's standard library, and {len(written['heldout'])} held out\n")
    return min(written["heldout"], key=lambda path: abs(path.stat().st_size - 8_000))


def training_flags(name: str, size: Size, data: Path) -> dict[str, Any]:
    """Flags of `sympow train`: those of the model, and those that both models share."""
    return {
        **MODELS[name],
        "data": data,
        "context": CONTEXT,
        "layers": 4,
        "width": size.width,
        "heads": 2,
        "steps": size.steps,
        "batch-tokens": 8 * CONTEXT,
        "learning-rate": 3e-3,
        "beta2": 0.99,
        "warmup-steps": size.steps // 20,
        "schedule": "cosine",
        "final-rate": 0.05,
        "log-every": max(1, size.steps // 40),
        "evaluate-every": size.steps,
        "evaluate-tokens": 8_192,
        "save-every": 0,
    }


def train_all(flags: Mapping[str, Mapping[str, Any]], runs: Path) -> None:
    """Trains each model in its own process, and prints their losses."""
    runs.mkdir()
    commands = {
        name: ("train", *(word for flag, value in its.items() for word in (f"--{flag}", value)), "--out", runs / name)
        for name, its in flags.items()
    }
    for command in commands.values():
        print(f"$ {command_line(*command)}\n", flush=True)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            with (runs / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(
                    process_of(*command), env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT
                )
        follow(processes, {name: its["steps"] for name, its in flags.items()}, runs)
        failed = {name: process.returncode for name, process in processes.items() if process.returncode}
    finally:
        for process in processes.values():
            process.terminate()
            process.wait()
    for name, code in failed.items():
        log_text = (runs / f"{name}.log").read_text()
        raise SystemExit(f"the training of {name} failed with code {code}:\n{log_text}")


def follow(processes: Mapping[str, subprocess.Popen[bytes]], steps: Mapping[str, int], runs: Path) -> None:
    """Prints steps and losses regularly until all processes have ended, or one has failed."""
    start = time.monotonic()
    print("time" + "".join(f"{name:>16}   loss" for name in processes), flush=True)
    waiting = True
    while waiting:
        due = time.monotonic() + EVERY
        while waiting and time.monotonic() < due:
            time.sleep(0.2)
            codes = [process.poll() for process in processes.values()]
            waiting = None in codes and not any(codes)
        cells, fractions = [], []
        for name in processes:
            metrics = runs / name / "metrics.jsonl"
            losses = [line["loss"] for line in read_metrics(metrics)] if metrics.is_file() else []
            # Smoothed, since the loss of one batch is noisy.
            last = losses[-max(1, steps[name] // 20) :]
            smoothed = f"{sum(last) / len(last):.3f}" if last else ""
            cells.append(f"{f'{len(losses):,} of {steps[name]:,}':>16}  {smoothed:>5}")
            fractions.append(len(losses) / steps[name])
        seconds, slowest = time.monotonic() - start, min(fractions)
        left = f"   about {clock(seconds / slowest - seconds)} left" if waiting and slowest else ""
        print(clock(seconds) + "".join(cells) + left, flush=True)


def print_losses(evaluation: Path) -> None:
    """Losses at positions within the training context and beyond it."""
    models = json.loads(evaluation.read_text())["models"]
    ranges = [(CONTEXT // 2, CONTEXT), (CONTEXT, 2 * CONTEXT), (EVALUATED // 2, EVALUATED)]
    print(f"Loss of the tokens at these positions (both were trained on positions up to {CONTEXT}):\n")
    print(f"{'':16}" + "".join(f"{name:>12}" for name in models))
    for first, last in ranges:
        losses = [sum(model["mean"][first:last]) / (last - first) for model in models.values()]
        print(f"{f'{first:,} to {last:,}':16}" + "".join(f"{loss:12.3f}" for loss in losses))


def next_commands(out: Path, model: Path, size: Size) -> list[tuple[object, ...]]:
    """Commands to try next."""
    return [
        ("generate", model, "--prompt", "class Reader:", "--tokens", 2 * size.written, "--temperature", 0.5),
        ("train", "--resume", "--out", model.parent, "--steps", 2 * size.steps),
        ("evaluate", model, "--data", out / "data", "--probe", "recall", "--length", CONTEXT, "--documents", 4),
    ]


def sympow(*words: object) -> None:
    """Prints a command and runs it."""
    print(f"$ {command_line(*words)}\n", flush=True)
    code = subprocess.run(process_of(*words), env=ENVIRONMENT, check=False).returncode
    if code:
        raise SystemExit(f"sympow {words[0]} failed with code {code}")
    print(flush=True)


def process_of(*words: object) -> list[str]:
    return [sys.executable, "-m", "sympow", *map(str, words)]


def clock(seconds: float) -> str:
    """Formats as minutes:seconds."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def address(path: Path) -> str:
    """The file:// URL of a path."""
    return path.resolve().as_uri()


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 76 - len(text)) + "\n", flush=True)


if __name__ == "__main__":
    with Reported("demo"):
        main()
