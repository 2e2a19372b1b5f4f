"""The worker process of one run: trains or resumes it, evaluates the model, writes the result into the run's folder.

python -m sympow.experiments.worker FOLDER
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
from sympow.data import load_tokenizer, open_dataset
from sympow.data.tokenizer import token_unit
from sympow.evaluate import document_sequences, loss_by_position
from sympow.evaluate.evaluation_file import FILE as EVALUATION_FILE
from sympow.evaluate.evaluation_file import ModelEvaluation, rounded, write_evaluations
from sympow.evaluate.head_statistics import held_out_rows, measure_heads, write_heads
from sympow.evaluate.model_evaluation import Setting, check_probes, run_probes
from sympow.evaluate.probes import LEAD
from sympow.experiments.grid import Evaluation, Run
from sympow.experiments.store import condense, curves_of_metrics, write_result
from sympow.files import write_atomically
from sympow.invocation import first_process
from sympow.model.gpt import GPT, SEGMENT_SIZE
from sympow.model.storage import load_model
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import CHECKPOINTS, CONFIG_FILE, EXPORT, METRICS_FILE
from sympow.train.trainer import NonFiniteLossError, train

JOB_FILE = "job.json"
WANTED_FILE = "wanted.yaml"
SITTINGS_FILE = "sittings.json"
LOG_FILE = "log.txt"
# Exit code of a run that was stopped and can be resumed: "temporary failure" in sysexits.h.
STOPPED = 75
# Tokens of held-out documents in a batch.
BATCH_TOKENS = 32_768


@dataclass(frozen=True)
class JobSpec:
    """What a worker needs to know besides the config.

    Attributes:
        run: the run's name.
        variant: one of VARIANTS.
        changes: settings that differ from the scale's.
        evaluation: how to evaluate the model.
        command: the command that repeats this one run.
        device: "cpu" or "cuda".
        jobs: number of runs that are trained at the same time.
        keep_checkpoints: whether to keep checkpoints when the run is done.
    """

    run: str
    variant: str
    changes: dict[str, Any]
    evaluation: Evaluation
    command: str
    device: str
    jobs: int
    keep_checkpoints: bool

    @classmethod
    def read(cls, path: Path) -> JobSpec:
        content = json.loads(path.read_text("utf-8"))
        return cls(**{**content, "evaluation": Evaluation(**content["evaluation"])})


def write_job(folder: Path, run: Run, job: JobSpec) -> None:
    """Writes what `work` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / WANTED_FILE, run.config.to_yaml().encode())
    write_atomically(folder / JOB_FILE, (json.dumps(asdict(job), indent=1) + "\n").encode())


def work(folder: Path) -> bool:
    """Trains or resumes the run of a folder, then evaluates it. Returns whether it has finished.

    Raises:
        ValueError: held-out documents do not have what the evaluation needs; before training.
    """
    job = JobSpec.read(folder / JOB_FILE)
    config = TrainConfig.read(folder / WANTED_FILE)
    begin = time.monotonic()
    first = first_process()
    if first:
        _check_evaluation(job.evaluation, config)
    earlier = _read_sittings(folder)
    if first:
        # Written before training, so that a process that is killed is counted, too.
        _write_sittings(folder, [*earlier, 0.0])
    problem = None
    try:
        train(config, folder, resume=True, device=job.device)
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
    row = _describe(job, config, lines, sittings)
    curves: dict[str, Any] = {"metrics": curves_of_metrics(condense(lines))}
    if problem is None:
        numbers, more_curves = _evaluate(job, config, folder)
        row, curves = row | numbers, curves | more_curves
    else:
        row |= {"status": "diverged", "problem": problem, "final_loss": None}
    row["total_seconds"] = round(row["train_seconds"] + row.get("evaluate_seconds", 0.0), 1)
    write_result(folder, {**rounded(row), "config": asdict(config)}, curves)
    if not job.keep_checkpoints:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    return True


def _check_evaluation(wanted: Evaluation, config: TrainConfig) -> None:
    """Raises a ValueError for held-out documents that do not have what `_evaluate` measures on them."""
    heldout = open_dataset(config.data.data, "heldout")
    longest = int(heldout.lengths.max())
    needed = {
        f"a context of {config.data.context:,}": config.data.context,
        f"an evaluation with length={wanted.length:,}": wanted.length,
    }
    if wanted.distances:
        # A token more than the text around the key.
        needed[f"an evaluation with distances up to {max(wanted.distances):,}"] = LEAD + max(wanted.distances) + 1
    for what, tokens in needed.items():
        if longest < tokens:
            raise ValueError(
                f"{what} needs a held-out document of {tokens:,} tokens; the longest of {heldout.name} has {longest:,}"
            )
    check_probes(_setting(wanted, config))


def _setting(wanted: Evaluation, config: TrainConfig) -> Setting:
    """The setting of the probes, and where losses by position are measured."""
    probes = [name for name, asked in (("recall", wanted.pairs), ("passkey", wanted.distances)) if asked]
    return Setting(
        config.data.data,
        wanted.length or config.data.context,
        wanted.documents,
        tuple(probes),
        wanted.pairs or None,
        wanted.distances or None,
        # Each document in one pass: at power 4 the attention form over these lengths costs far less than a state does,
        # and softmax is far slower with a cache.
        segment_size=max(SEGMENT_SIZE, wanted.length),
        dtype=torch.bfloat16 if config.run.precision == "bf16" else None,
    )


def _describe(
    job: JobSpec, config: TrainConfig, lines: list[dict[str, float]], sittings: list[float]
) -> dict[str, Any]:
    """The columns of the table that are known after training."""
    device = "cpu" if job.device == "cpu" or not torch.cuda.is_available() else "cuda"
    machine = environment(device)
    last = lines[-max(1, config.run.steps // job.evaluation.final_part) :]
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    with torch.device("meta"):
        parameters = GPT(config.model).count_parameters()
    return {
        "run": job.run,
        "variant": job.variant,
        "power": None if config.model.mixer == "softmax" else config.model.power,
        "context": config.data.context,
        "seed": config.run.seed,
        "changes": job.changes,
        "status": "done",
        "parameters": parameters,
        "steps": config.run.steps,
        "tokens": config.run.steps * config.run.batch_tokens,
        "final_loss": round(statistics.fmean(line["loss"] for line in last), 5) if last else None,
        "final_loss_steps": len(last),
        "train_seconds": round(sum(sittings), 1),
        "sittings": len(sittings),
        "jobs": job.jobs,
        "tokens_per_second": round(statistics.median(speeds[1:] or speeds)) if speeds else None,
        "device": "cpu" if device == "cpu" else machine["device"],
        "torch": machine["torch"],
        "environment": {**machine, "sympow": __version__},
        "command": job.command,
    }


def _evaluate(job: JobSpec, config: TrainConfig, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Evaluates the model of a run; returns columns of the table, and curves."""
    begin = time.monotonic()
    wanted, context = job.evaluation, config.data.context
    on_gpu = job.device != "cpu" and torch.cuda.is_available()
    device, setting = ("cuda" if on_gpu else "cpu"), _setting(wanted, config)
    dtype, segment_size = setting.dtype, setting.segment_size
    model = load_model(folder / EXPORT, device)
    heldout = open_dataset(config.data.data, "heldout")
    batch = max(1, BATCH_TOKENS // context)
    rows = document_sequences(heldout, context, max(1, wanted.tokens // context), batch)
    within = loss_by_position(model, rows, segment_size=segment_size, dtype=dtype)
    losses = within
    if wanted.length:
        rows = document_sequences(heldout, wanted.length, wanted.documents)
        losses = loss_by_position(model, rows, segment_size=segment_size, dtype=dtype)
    tokenizer = load_tokenizer(folder / EXPORT) if "passkey" in setting.probes else None
    recall, passkey = run_probes(model, tokenizer, setting)
    evaluation = ModelEvaluation(losses, context, recall, passkey, token_unit(folder / EXPORT))
    facts = {"data": config.data.data, "device": device, "dtype": str(dtype or "float32")}
    described = {"command": job.command, **facts, "environment": environment(device)}
    write_evaluations(folder / EVALUATION_FILE, {job.run: evaluation}, described, positions=True)
    content = evaluation.as_json(positions=False)
    curves = {"by_position": content["by_position"]}
    settings = {"data": config.data.data, "context": context, "short": config.data.short}
    with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
        heads = measure_heads(model, held_out_rows(settings), config.data.data)
    if heads.quantities:
        write_heads(folder, heads)
        curves["heads"] = {"tokens": heads.tokens, "data": heads.data, "quantities": heads.quantities}
    numbers = {
        "heldout_loss": round(within.average(), 5),
        **{name: content[name] for name in ("by_context", "recall", "passkey")},
        "evaluation": {**facts, **{name: content[name] for name in ("documents", "unit")}},
        "evaluation_settings": asdict(wanted),
        "evaluate_seconds": round(time.monotonic() - begin, 1),
    }
    return numbers, curves


def _read_sittings(folder: Path) -> list[float]:
    """Seconds of training, one number for each process that was started; 0 for one that was killed."""
    path = folder / SITTINGS_FILE
    return list(json.loads(path.read_text("utf-8"))) if path.is_file() else []


def _write_sittings(folder: Path, sittings: list[float]) -> None:
    write_atomically(folder / SITTINGS_FILE, json.dumps(sittings).encode())


if __name__ == "__main__":
    sys.exit(0 if work(Path(sys.argv[1])) else STOPPED)
