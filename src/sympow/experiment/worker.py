"""One run from training to its result: what `sympow experiment` starts for each, in a process of its own.

python -m sympow.experiment.worker FOLDER
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sympow import __version__
from sympow.bench.timing import environment
from sympow.data import open_dataset
from sympow.data.tokenizer import token_unit
from sympow.evaluate import document_sequences, loss_by_position
from sympow.evaluate.evaluation_file import FILE as EVALUATION_FILE
from sympow.evaluate.evaluation_file import ModelEvaluation, rounded, write_evaluations
from sympow.evaluate.head_statistics import held_out_rows, measure_heads, write_heads
from sympow.evaluate.model_evaluation import Setting, run_probes
from sympow.experiment.results import condensed
from sympow.experiment.runs import Evaluation, Run
from sympow.files import write_atomically
from sympow.invocation import first_process
from sympow.model.gpt import GPT, SEGMENT_SIZE
from sympow.model.storage import load_model
from sympow.report.run_collection import RESULT_FILE, RUNS
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import CHECKPOINTS, CONFIG_FILE, EXPORT, METRICS_FILE
from sympow.train.trainer import NonFiniteLossError, train

ORDER_FILE = "order.json"
WANTED_FILE = "wanted.yaml"
SITTINGS_FILE = "sittings.json"
LOG_FILE = "log.txt"
# Exit code of a run that was stopped and can go on: "temporary failure" by the custom of sysexits.
STOPPED = 75
# Tokens of held-out documents read at once.
BATCH_TOKENS = 32_768


@dataclass(frozen=True)
class Order:
    """What a worker needs to know besides the config.

    Attributes:
        run: its name.
        variant: one of VARIANTS.
        changes: what is particular about it.
        evaluation: what to measure.
        results: where results go.
        command: that makes this one point again.
        device: "cpu" or "cuda"; None: a GPU if there is one.
        jobs: runs that are trained beside each other.
        keep_checkpoints: when it is done.
    """

    run: str
    variant: str
    changes: dict[str, Any]
    evaluation: Evaluation
    results: str
    command: str
    device: str | None
    jobs: int
    keep_checkpoints: bool

    @classmethod
    def read(cls, path: Path) -> Order:
        content = json.loads(path.read_text("utf-8"))
        return cls(**{**content, "evaluation": Evaluation(**content["evaluation"])})


def give_order(folder: Path, run: Run, order: Order) -> None:
    """Writes what `work` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WANTED_FILE, run.config.to_yaml().encode())
    write_atomically(folder / ORDER_FILE, (json.dumps(asdict(order), indent=1) + "\n").encode())


def work(folder: Path) -> bool:
    """Trains, or goes on training, and then evaluates. Returns whether it came to the end."""
    order = Order.read(folder / ORDER_FILE)
    config = TrainConfig.read(folder / WANTED_FILE)
    begin = time.monotonic()
    first = first_process()
    earlier = _read_sittings(folder)
    if first:
        # Already now: of a sitting that is killed, at least it is known that there was one.
        _write_sittings(folder, [*earlier, 0.0])
    problem = None
    try:
        train(config, folder, resume=True, device=order.device)
    except NonFiniteLossError as error:
        problem = str(error)
    if not first:
        return True
    sittings = [*earlier, round(time.monotonic() - begin, 1)]
    _write_sittings(folder, sittings)
    lines = read_metrics(folder / METRICS_FILE)
    if problem is None and (not lines or lines[-1]["step"] < config.run.steps):
        return False
    config = TrainConfig.read(folder / CONFIG_FILE)
    row = _describe(order, config, lines, sittings)
    keep = folder / "result"
    shutil.rmtree(keep, ignore_errors=True)
    keep.mkdir()
    (keep / CONFIG_FILE).write_text(config.to_yaml(), "utf-8")
    (keep / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in condensed(lines)), "utf-8")
    if problem is None:
        row |= _evaluate(order, config, folder, keep)
    else:
        row |= {"status": "diverged", "problem": problem, "final_loss": None}
    row["total_seconds"] = round(row["train_seconds"] + row.get("evaluate_seconds", 0.0), 1)
    _hand_in(keep, Path(order.results) / RUNS / order.run, row)
    if not order.keep_checkpoints:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return True


def _describe(
    order: Order, config: TrainConfig, lines: list[dict[str, float]], sittings: list[float]
) -> dict[str, Any]:
    """What a run is, and what its training came to."""
    device = "cpu" if order.device == "cpu" or not torch.cuda.is_available() else "cuda"
    machine = environment(device)
    last = lines[-max(1, config.run.steps // order.evaluation.final_part) :]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    with torch.device("meta"):
        parameters = GPT(config.model).count_parameters()
    return {
        "run": order.run,
        "variant": order.variant,
        "power": None if config.model.mixer == "softmax" else config.model.power,
        "context": config.data.context,
        "seed": config.run.seed,
        "changes": order.changes,
        "status": "done",
        "parameters": parameters,
        "steps": config.run.steps,
        "tokens": config.run.steps * config.run.batch_tokens,
        "final_loss": round(statistics.fmean(line["loss"] for line in last), 5) if last else None,
        "final_loss_steps": len(last),
        "train_seconds": round(sum(sittings), 1),
        "sittings": len(sittings),
        "jobs": order.jobs,
        "tokens_per_second": round(statistics.median(speeds[1:] or speeds)) if speeds else None,
        "device": "cpu" if device == "cpu" else machine["device"],
        "torch": machine["torch"],
        "environment": {**machine, "sympow": __version__},
        "command": order.command,
    }


def _evaluate(order: Order, config: TrainConfig, folder: Path, keep: Path) -> dict[str, Any]:
    begin = time.monotonic()
    wanted, context = order.evaluation, config.data.context
    on_gpu = order.device != "cpu" and torch.cuda.is_available()
    device, dtype = ("cuda" if on_gpu else "cpu"), (torch.bfloat16 if config.run.precision == "bf16" else None)
    model = load_model(folder / EXPORT, device)
    # Texts as a whole: a state of power 4 costs far more than the tokens of these texts do without one, softmax is far
    # slower behind a cache, and what is left takes no longer.
    segment_size = max(SEGMENT_SIZE, wanted.length)
    heldout = open_dataset(config.data.data, "heldout")
    batch = max(1, BATCH_TOKENS // context)
    rows = document_sequences(heldout, context, max(1, wanted.tokens // context), batch)
    within = loss_by_position(model, rows, segment_size=segment_size, dtype=dtype)
    found: dict[str, Any] = {"heldout_loss": round(within.average(), 5)}
    probes = [name for name, asked in (("recall", wanted.pairs), ("passkey", wanted.distances)) if asked]
    setting = Setting(
        config.data.data,
        wanted.length or context,
        wanted.documents,
        tuple(probes),
        segment_size=segment_size,
        device=device,
        dtype=dtype,
        **{name: asked for name, asked in (("pairs", wanted.pairs), ("distances", wanted.distances)) if asked},
    )
    losses = within
    if wanted.length:
        long = document_sequences(heldout, wanted.length, wanted.documents)
        losses = loss_by_position(model, long, segment_size=segment_size, dtype=dtype)
    recall, passkey = run_probes(model, folder / EXPORT, setting)
    evaluation = ModelEvaluation(losses, context, recall, passkey, token_unit(folder / EXPORT))
    facts = {"command": order.command, "data": config.data.data, "device": device, "dtype": str(dtype or "float32")}
    described = {**facts, "environment": environment(device)}
    small = evaluation.as_json(positions=False)
    for path, positions in ((keep, False), (folder, True)):
        write_evaluations(path / EVALUATION_FILE, {order.run: evaluation}, described, positions=positions)
    found |= {name: small[name] for name in ("by_context", "by_position", "recall", "passkey")}
    settings = {"data": config.data.data, "context": context, "short": config.data.short}
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        heads = measure_heads(model, held_out_rows(settings), config.data.data)
    if heads.quantities:
        for path in (keep, folder):
            write_heads(path, heads)
    return {**found, "evaluate_seconds": round(time.monotonic() - begin, 1)}


def _hand_in(keep: Path, target: Path, row: dict[str, Any]) -> None:
    """Moves the files to where results are, the row last: its presence says that all is there."""
    target.mkdir(parents=True, exist_ok=True)
    (target / RESULT_FILE).unlink(missing_ok=True)
    for path in sorted(keep.iterdir()):
        write_atomically(target / path.name, path.read_bytes())
    shutil.rmtree(keep)
    write_atomically(target / RESULT_FILE, (json.dumps(rounded(row), indent=1) + "\n").encode())


def _read_sittings(folder: Path) -> list[float]:
    """Seconds of training so far, one number for each time it was started; 0 where that ended badly."""
    path = folder / SITTINGS_FILE
    return list(json.loads(path.read_text("utf-8"))) if path.is_file() else []


def _write_sittings(folder: Path, sittings: list[float]) -> None:
    write_atomically(folder / SITTINGS_FILE, json.dumps(sittings).encode())


if __name__ == "__main__":
    sys.exit(0 if work(Path(sys.argv[1])) else STOPPED)
