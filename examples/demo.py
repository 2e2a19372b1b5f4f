"""The demo of `make demo`: what sympow is for, in a given time on a CPU.

It shows that the three forms of the operator agree, what a token costs after long texts, and what two small models, one
with softmax and one with symmetric power attention, learn from the documentation in Python's standard library. Training
gets the time that the other steps leave.

python examples/demo.py --out build/demo
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import shutil
import sys
import sysconfig
import time
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import sympow
from sympow.check.timing import measure
from sympow.cli.errors import reported
from sympow.data.preparation import prepare
from sympow.evaluate.model_evaluation import EvaluationSetting, choose_sample, evaluate_model
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling
from sympow.generation.text import TextModel
from sympow.invocation import command_line
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.ops.torch.softmax import KeyValueState
from sympow.report.evaluation_summary import save_evaluations
from sympow.report.generated_text import print_stream
from sympow.report.model_info import format_bytes
from sympow.report.run_report import write_report
from sympow.train.config import DataConfig, OptimizerConfig, RunConfig, TrainConfig
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import METRICS_FILE
from sympow.train.trainer import train

SYMPOW = GPTConfig(vocab_size=1_024, layers=1, width=96, heads=3)
MODELS = {"softmax": replace(SYMPOW, mixer="softmax", gating="none"), "sympow": SYMPOW}
CONTEXT = 64
EVALUATED = 16 * CONTEXT
BATCH = 16 * CONTEXT
# Steps of the runs whose speed says how many steps there is time for.
FIRST_STEPS = 60
# Seconds for what comes after training.
AFTERWARDS = 20
# Seconds between two lines of progress.
EVERY = 15
MARKER = "README.txt"


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"), help="folder for everything")
    parser.add_argument("--seconds", type=float, default=120, help="time for everything, training included")
    arguments = parser.parse_args()
    out: Path = arguments.out
    # With more threads than free cores, threads wait for each other.
    torch.set_num_threads(1)
    make_folder(out)
    print(f"This takes {clock(arguments.seconds)} minutes on two free cores. Most of it trains two models.")

    heading("Three forms, one result")
    print(
        f"Outputs of the attention, chunked and recurrent form differ by at most {largest_difference():.0e} (float64)."
    )

    heading("The next token costs the same after any text")
    print("Time of a token, and memory that the text before it takes, in the models trained below:\n")
    print_costs((1_000, 10_000, 100_000))

    heading("Two models learn the documentation of Python's modules")
    write_texts(out / "text")
    sources, heldout = out / "text" / "train", out / "text" / "heldout"
    data = out / "data"
    prepare([sources], data, tokenizer="bpe", vocab_size=SYMPOW.vocab_size, heldout_sources=[heldout], workers=1)
    left = arguments.seconds - AFTERWARDS - (time.monotonic() - start)
    steps = train_all(data, out / "runs", left)
    print(f"\nBoth saw {steps:,} batches of {CONTEXT} tokens a text. Average losses on other modules:\n")
    models = {name: out / "runs" / name / "model" for name in MODELS}
    print_losses(models, data, out / "evaluation")

    heading("The sympow model writes")
    text_model, prompt = TextModel.load(models["sympow"]), "Return the"
    sampling = Sampling(temperature=0.5, top_p=0.9)
    print_stream(text_model, text_model.prefill(prompt), prompt, 120, sampling=sampling, seed=1)

    heading("The page with everything about both runs")
    write_report([out], out / "report", title="Softmax and sympow, two small models")
    print(address(out / "report" / "index.html"))
    print(f"\nDone in {clock(time.monotonic() - start)} minutes. Try next:\n")
    for command in next_commands(models["sympow"], out, steps):
        print(command_line(*command))


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


def largest_difference() -> float:
    """Between the forms, over random tokens with gates and rotation."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 256, 2, 16, generator=generator, dtype=torch.float64)
    log_gamma = -0.1 * torch.rand(1, 256, 2, generator=generator, dtype=torch.float64)
    theta = sympow.rotary_rates(16, 65_536).double()
    call = partial(sympow.attention, q, k, v, log_gamma=log_gamma, theta=theta)
    first, *others = (call(form=form) for form in ("attention", "chunked", "recurrent"))
    return max((first - other).abs().max().item() for other in others)


def print_costs(lengths: tuple[int, ...]) -> None:
    """Time of a decoded token, and memory of what is kept of the text, for models as those that are trained below."""
    print(f"{'after':>14}" + "".join(f"{name:>24}" for name in ("softmax, KV cache", "sympow, state")))
    models = {name: GPT(config).eval() for name, config in MODELS.items()}
    for length in lengths:
        cells = []
        for model in models.values():
            prefix = prefix_of(model, length)
            step = partial(Decoder(model, prefix, tokens=64).step, torch.zeros(1, dtype=torch.int64))
            cells.append(f"{1e3 * measure(step, runs=32).median:.1f} ms, {format_bytes(prefix.nbytes)}")
        print(f"{f'{length:,} tokens':>14}" + "".join(f"{cell:>24}" for cell in cells), flush=True)


def prefix_of(model: GPT, length: int) -> Prefix:
    """A prefilled random text. Keys and values of softmax are random instead, since prefilling takes quadratic time."""
    tokens = torch.randint(model.config.vocab_size, (1, length))
    if model.config.mixer == "sympow":
        return Prefix.prefill(model, tokens, cache_policy="state")
    prefix = Prefix.prefill(model, tokens[:, :1])
    layers: list[Any] = []
    for layer in prefix.state:
        assert isinstance(layer, KeyValueState)
        k, v = (torch.randn(1, length, *x.shape[2:]) for x in (layer.k, layer.v))
        layers.append(replace(layer, k=k, v=v))
    return replace(prefix, state=tuple(layers), tokens=length)


def write_texts(folder: Path) -> None:
    """Writes a file with the documentation of each module of the standard library; every fifth is held out."""
    library = Path(sysconfig.get_path("stdlib"))
    texts = {name: "\n\n".join(docstrings(library, name)) for name in sorted(sys.stdlib_module_names)}
    for number, (name, text) in enumerate((name, text) for name, text in texts.items() if len(text) > 200):
        path = folder / ("train" if number % 5 else "heldout") / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def docstrings(library: Path, module: str) -> Iterator[str]:
    """Those of a module, its classes and functions, without code; of a package, those of all its files."""
    for path in (library / f"{module}.py", *sorted((library / module).rglob("*.py"))):
        if not path.is_file() or {"test", "tests"} & set(path.relative_to(library).parts):
            continue
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and ">>>" not in text:
                    yield text


def training_config(name: str, data: Path, steps: int) -> TrainConfig:
    """Of one model; everything but the model is the same for both."""
    return TrainConfig(
        MODELS[name],
        DataConfig(str(data), CONTEXT),
        OptimizerConfig(1e-2, beta2=0.98, clip_norm=1, warmup_steps=20, schedule="cosine", final_rate=0.05),
        RunConfig(steps, BATCH, BATCH, log_every=max(FIRST_STEPS // 2, steps // 40), save_every=0),
    )


def train_all(data: Path, runs: Path, seconds: float) -> int:
    """Trains each model in its own process, and returns the number of steps that there was time for."""
    runs.mkdir()
    # Spawned, not forked: threads of torch do not survive a fork.
    context = multiprocessing.get_context("spawn")
    speeds, barrier = context.Array("d", len(MODELS)), context.Barrier(len(MODELS))
    end = time.time() + seconds
    shared = data, runs, end, speeds, barrier
    processes = {name: context.Process(target=train_model, args=(name, *shared), daemon=True) for name in MODELS}
    for process in processes.values():
        process.start()
    try:
        steps = follow(processes, runs, end)
        failed = [name for name, process in processes.items() if process.exitcode]
    finally:
        for process in processes.values():
            process.terminate()
    for name in failed:
        raise SystemExit(f"the training of {name} failed:\n{log_of(runs, name).read_text()}")
    return steps


def train_model(name: str, data: Path, runs: Path, end: float, speeds: Any, barrier: Any) -> None:
    """The process of one model.

    Args:
        end: when training is to end, in seconds since 1970.
        speeds: shared by all processes: tokens per second of each model.
        barrier: of all processes.
    """
    with log_of(runs, name).open("wb") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    torch.set_num_threads(1)
    # Both models train at the same time now, as they will.
    with TemporaryDirectory() as folder:
        train(training_config(name, data, FIRST_STEPS), folder, device="cpu")
        speeds[list(MODELS).index(name)] = read_metrics(Path(folder) / METRICS_FILE)[-1]["tokens_per_second"]
    barrier.wait()
    # A tenth is left to evaluations and to a machine that gets busier.
    steps = max(FIRST_STEPS, int(0.9 * (end - time.time()) * min(speeds) / BATCH))
    train(training_config(name, data, steps), runs / name, device="cpu")


def follow(processes: Mapping[str, Any], runs: Path, end: float) -> int:
    """Prints steps and losses now and then until all processes have ended, or one has failed; returns the last step."""
    print("left" + "".join(f"{f'{name}: step':>18}   loss" for name in processes), flush=True)
    waiting, step = True, 0
    while waiting:
        due = time.monotonic() + EVERY
        while waiting and time.monotonic() < due:
            time.sleep(0.2)
            codes = [process.exitcode for process in processes.values()]
            waiting = None in codes and not any(codes)
        cells = ""
        for name in processes:
            metrics = runs / name / METRICS_FILE
            lines = [line for line in read_metrics(metrics) if "loss" in line] if metrics.is_file() else []
            cells += f"{lines[-1]['step']:>18,}  {lines[-1]['loss']:.3f}" if lines else f"{'starting':>25}"
            step = int(lines[-1]["step"]) if lines else 0
        print(clock(max(0, end - time.time()) if waiting else 0) + cells, flush=True)
    return step


def print_losses(models: Mapping[str, Path], data: Path, out: Path) -> None:
    """Prints the average held-out loss within contexts from one to 16 times that of training, and draws it."""
    sample = choose_sample(list(models.values()), str(data), EVALUATED, documents=24)
    setting = EvaluationSetting(sample.data, sample.length, documents=24)
    found = {name: evaluate_model(folder, setting) for name, folder in models.items()}
    save_evaluations(found, {"data": sample.data, "device": "cpu"}, out)
    contexts = [CONTEXT * 2**n for n in range(5)]
    print(f"{'in the first':14}" + "".join(f"{context:>8,}" for context in contexts) + " tokens")
    for name, one in found.items():
        print(f"{name:14}" + "".join(f"{one.losses.average(0, context):8.3f}" for context in contexts))
    print(f"\nThe same as a figure:\n{address(out / 'loss_by_context.png')}", flush=True)


def next_commands(model: Path, out: Path, steps: int) -> list[tuple[object, ...]]:
    """Commands to try next."""
    longest = max((out / "text" / "heldout").iterdir(), key=lambda path: path.stat().st_size)
    return [
        ("inspect", model, longest, "--tokens", 2_000, "--out", out / "inspect.html"),
        ("train", "--resume", "--out", model.parent, "--steps", 2 * steps),
        ("generate", model, "--prompt", "Raise", "--tokens", 200, "--temperature", 0.5),
    ]


def log_of(runs: Path, name: str) -> Path:
    return runs / f"{name}.log"


def clock(seconds: float) -> str:
    """Formats as minutes:seconds."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


def address(path: Path) -> str:
    """The file:// URL of a path."""
    return path.resolve().as_uri()


def heading(text: str) -> None:
    print(f"\n── {text} " + "─" * max(0, 76 - len(text)) + "\n", flush=True)


if __name__ == "__main__":
    with reported("demo"):
        main()
