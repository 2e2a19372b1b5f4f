"""Compares two versions of sympow bit by bit, through the command line alone.

    python tools/bitwise.py store before.json --source OLD/src
    python tools/bitwise.py store after.json --source NEW/src
    python tools/bitwise.py compare before.json after.json

A job is a training, a conversion or a text; what it stores are its losses and gradient norms as they stand in its
metrics, and hashes of the weights and texts that it writes. Jobs run as `python -m sympow` with the given source, in
this environment, on the device that --device names.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUMBERS = ("loss", "gradient_norm", "learning_rate", "heldout_loss")
SMALL = [
    *("--preset", "laptop", "--context", "256", "--batch-tokens", "1024", "--micro-batch-tokens", "512"),
    *("--log-every", "1", "--seed", "3"),
]
STEPS = ["--steps", "50"]


def main() -> None:
    parser, store = parsers(__doc__, "jobs")
    store.add_argument("--only", help="names of jobs, separated by commas")
    arguments = parser.parse_args()
    if arguments.command == "compare":
        sys.exit(differences(*(json.loads(file.read_text("utf-8")) for file in arguments.files)))
    only = arguments.only.split(",") if arguments.only else None
    stored: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, result in results(Jobs(Path(folder), arguments.source.resolve(), arguments.device), only):
            stored[name] = result
            print(name, hashlib.sha256(json.dumps(result).encode()).hexdigest()[:16], flush=True)
            arguments.file.write_text(json.dumps(stored, indent=1), "utf-8")


def parsers(description: str | None, what: str) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """A parser of the two commands that store what something gives and compare it, and that of `store`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    store = commands.add_parser("store", help=f"run the {what} and write what they give")
    store.add_argument("file", type=Path)
    store.add_argument("--source", type=Path, required=True, help="folder with the package sympow")
    store.add_argument("--device", default="cpu")
    compare = commands.add_parser("compare", help="compare two files, and fail at a difference")
    compare.add_argument("files", type=Path, nargs=2)
    return parser, store


class Jobs:
    """Runs commands in `folder` with the package in `source`."""

    def __init__(self, folder: Path, source: Path, device: str) -> None:
        self.folder, self.device = folder, device
        self.environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}

    def command(self, *words: str, processes: int = 1) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        launcher = torchrun if processes > 1 else []
        return [sys.executable, *launcher, "-m", "sympow", *words, "--device", self.device]

    def run(self, *words: str, processes: int = 1) -> str:
        command = self.command(*words, processes=processes)
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        return done.stdout

    def train(self, name: str, *flags: str, processes: int = 1) -> object:
        self.run("train", *SMALL, *flags, "--out", name, processes=processes)
        return [*numbers(self.folder / name / "metrics.jsonl"), weights(self.folder / name / "model")]


def results(jobs: Jobs, only: list[str] | None) -> Iterator[tuple[str, object]]:
    def wanted(name: str) -> bool:
        return only is None or name in only

    schedule = ["--schedule", "cosine", "--warmup-steps", "5"]
    trainings = {
        "one process": schedule,
        "packed": ["--short", "pack", "--rotary", "scale", "--rotation-init", "0.01"],
        "recomputed, a gate per pair": ["--recompute", "--gating", "vector", "--key-value-heads", "2"],
        "softmax": ["--mixer", "softmax"],
    }
    for name, flags in trainings.items():
        # Later jobs continue or read the first one.
        if wanted(name) or name == "one process":
            yield name, jobs.train(name.replace(" ", "-"), *STEPS, *flags)
    if jobs.device == "cpu":
        for name, flags in {
            "two processes": [],
            "two processes, fsdp": ["--parallel", "fsdp"],
            "context parallel": ["--context-parallel", "2"],
        }.items():
            if wanted(name):
                yield name, jobs.train(name.replace(" ", "-").replace(",", ""), *STEPS, *flags, processes=2)
    if wanted("resumed"):
        yield "resumed", resumed(jobs, schedule)
    if wanted("texts"):
        sampled = ["--prompt", "def ", "--prompt", "import torch", "--tokens", "60", "--dtype", "float32"]
        yield (
            "texts",
            [
                jobs.run("generate", "one-process/model", *sampled, *choice)
                for choice in (
                    ["--temperature", "0"],
                    ["--seed", "5", "--top-k", "20"],
                    ["--seed", "7", "--cache", "keys"],
                )
            ],
        )
    if wanted("conversion"):
        yield "conversion", conversion(jobs)


def resumed(jobs: Jobs, schedule: list[str]) -> object:
    """A run that is killed after its first checkpoint, and resumed. Steps that are repeated count once."""
    command = jobs.command("train", *SMALL, *STEPS, *schedule, "--save-every", "10", "--out", "resumed")
    with subprocess.Popen(command, cwd=jobs.folder, env=jobs.environment, stdout=subprocess.DEVNULL) as process:
        checkpoints = jobs.folder / "resumed" / "checkpoints"
        while process.poll() is None and not any(checkpoints.glob("step-*/sealed.json")):
            time.sleep(0.05)
        process.kill()
    jobs.run("train", "--resume", "--out", "resumed")
    lines = {line[0]: line for line in numbers(jobs.folder / "resumed" / "metrics.jsonl")}
    return [*lines.values(), weights(jobs.folder / "resumed" / "model")]


def conversion(jobs: Jobs) -> object:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    tokens: dict[str, Any] = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
    config = LlamaConfig(**shape, **tokens, num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(jobs.folder / "teacher")
    flags = "--context 64 --batch-tokens 512 --micro-batch-tokens 256 --match-tokens 5120 --distill-tokens 5120"
    flags += " --extend-tokens 2048 --evaluate-tokens 1024 --log-every 1 --seed 1 --out converted"
    jobs.run("convert", "teacher", *flags.split())
    stages = sorted((jobs.folder / "converted" / "stages").glob("*/metrics.jsonl"))
    return [*(line for stage in stages for line in numbers(stage)), weights(jobs.folder / "converted" / "model")]


def numbers(metrics: Path) -> list[list[object]]:
    lines = map(json.loads, metrics.read_text("utf-8").splitlines())
    return [[line["step"], *(line.get(name) for name in NUMBERS)] for line in lines]


def weights(folder: Path) -> str:
    """A hash of the tensors of a saved model, without the file's metadata."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def differences(before: dict[str, object], after: dict[str, object]) -> int:
    """Prints what differs and returns how many jobs do."""
    differing = [name for name in before if before[name] != after.get(name)]
    for name in before:
        print(f"{name}: {'DIFFERENT' if name in differing else 'equal'}")
    return len(differing)


if __name__ == "__main__":
    main()
