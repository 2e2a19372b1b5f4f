"""A run of a grid: one model on text, trained as `sympow train` does, and evaluated."""

from __future__ import annotations

import math
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from experiments.store import StoredResult
from sympow import GPT, __version__
from sympow.check.timing import environment
from sympow.data import load_tokenizer, open_dataset
from sympow.data.tokenizer import token_unit
from sympow.errors import UserError
from sympow.evaluate import (
    Vocabulary,
    associative_recall,
    document_sequences,
    loss_by_position,
    passkey_retrieval,
)
from sympow.evaluate.evaluation_file import FILE as EVALUATION_FILE
from sympow.evaluate.evaluation_file import ModelEvaluation, rounded, write_evaluations
from sympow.evaluate.head_statistics import held_out_rows, measure_heads, write_heads
from sympow.evaluate.probes import choose_distances, choose_pairs
from sympow.invocation import first_process
from sympow.model.config import EXECUTION_OPTIONS
from sympow.model.gpt import SEGMENT_SIZE
from sympow.model.storage import load_model
from sympow.train import TrainConfig, train
from sympow.train.config import SECTIONS
from sympow.train.loop import NonFiniteLossError
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import CHECKPOINTS, CONFIG_FILE, EXPORT, METRICS_FILE

# Settings of execution and logging. What a run learns does not depend on them, except through rounding.
BOOKKEEPING = frozenset(
    {
        "vocab_size",  # set from the data when it is opened
        *EXECUTION_OPTIONS,
        "micro_batch_tokens",
        "compile",
        "recompute",
        "loss_tokens",
        "parallel",
        "context_parallel",
        "log_every",
        "evaluate_every",
        "evaluate_tokens",
        "save",
        "save_every",
        "keep",
        "hang_after",
        "tensorboard",
        "wandb",
    }
)
# The final training loss is the mean over the last 1/10 of the steps.
FINAL_PART = 10
# Most points of a training curve that are stored.
POINTS = 128
# Tokens of held-out documents in a batch.
BATCH_TOKENS = 32_768


@dataclass(frozen=True)
class EvaluationPlan:
    """How a trained model is evaluated.

    Attributes:
        tokens: approximate number of held-out tokens for the loss at the training context.
        length: tokens of each held-out document for the loss by context and position; 0 skips this measurement.
        documents: number of these documents.
        pairs: numbers of pairs for the associative recall probe; empty skips the probe.
        distances: distances for the passkey probe; empty skips the probe.
    """

    tokens: int = 65_536
    length: int = 0
    documents: int = 16
    pairs: tuple[int, ...] = ()
    distances: tuple[int, ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """One point of a grid.

    Attributes:
        name: also the name of its folder; the same run has the same name in every experiment.
        variant: one of VARIANTS.
        config: the training config.
        evaluation: how the trained model is evaluated.
        changes: settings that differ from the scale's, besides variant, power, context and seed.
        keep_checkpoints: whether checkpoints stay when the run is done; the exported model always does.
    """

    name: str
    variant: str
    config: TrainConfig
    evaluation: EvaluationPlan
    changes: dict[str, Any] = field(default_factory=dict)
    keep_checkpoints: bool = False

    @property
    def results(self) -> tuple[str, ...]:
        """Names of its results."""
        return (self.name,)

    @property
    def tokens(self) -> int:
        """Tokens that it is trained on."""
        return self.config.run.steps * self.config.run.batch_tokens

    @property
    def power(self) -> int | None:
        return None if self.config.model.mixer == "softmax" else self.config.model.power

    def folder(self, out: Path, experiment: str) -> Path:
        """Where it is trained; a run of several experiments is trained once for all of them."""
        return out / self.name

    def differences(self, row: Mapping[str, Any]) -> list[str]:
        """The settings in which a result is not this run's, as text."""
        return differences(read_config(row["config"]), self.config)

    def train(self, folder: Path, device: str, command: str, say: Callable[[str], None]) -> list[StoredResult] | None:
        """Trains the model, or resumes its training, and evaluates it.

        Returns:
            its result; nothing in all processes of torchrun but the first. None: a signal has stopped the training.

        Raises:
            UserError: held-out documents do not have what the evaluation needs, or the folder is of another run.
        """
        if first_process():
            self._check_evaluation()
            self._check_folder(folder)
        problem = None
        try:
            if self.config.run.compile:
                # Models of another shape that this process has trained count towards torch's limit of recompilations.
                torch.compiler.reset()
            train(self.config, folder, resume=True, device=device)
        except NonFiniteLossError as error:
            problem = str(error)
        if not first_process():
            return []
        lines = read_metrics(folder / METRICS_FILE)
        if problem is None and (not lines or lines[-1]["step"] < self.config.run.steps):
            return None
        config = TrainConfig.read(folder / CONFIG_FILE)
        row = {**self._describe(config, lines, device), "command": command}
        curves: dict[str, Any] = {"metrics": curves_of_metrics(condense(lines))}
        if problem is None:
            say(f"{self.name}: evaluating")
            numbers, more = self._evaluate(config, folder, device, command)
            row, curves = row | numbers, curves | more
            said = f"loss {row['final_loss']:.4f}, held out {row['heldout_loss']:.4f}"
        else:
            row |= {"status": "diverged", "problem": problem, "final_loss": None}
            said = "diverged"
        say(f"{self.name}: {said}")
        return [StoredResult({**rounded(row), "config": asdict(config)}, curves)]

    def discard(self, folder: Path) -> None:
        """Removes what only a resumption needs."""
        if not self.keep_checkpoints:
            shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)

    def _check_folder(self, folder: Path) -> None:
        begun = folder / CONFIG_FILE
        if begun.is_file() and (different := differences(TrainConfig.read(begun), self.config)):
            raise UserError(f"{folder} has a run with other settings: {'; '.join(different)}. Choose another --out")

    def _check_evaluation(self) -> None:
        """Raises a UserError for held-out documents that do not have what is measured on them."""
        plan, context = self.evaluation, self.config.data.context
        heldout = open_dataset(self.config.data.data, "heldout")
        longest = int(heldout.lengths.max())
        needed = {f"a context of {context:,}": context, f"an evaluation with length={plan.length:,}": plan.length}
        for what, tokens in needed.items():
            if longest < tokens:
                raise UserError(
                    f"{what} needs a held-out document of {tokens:,} tokens; the longest of {heldout.name} has "
                    f"{longest:,}"
                )
        if plan.distances:
            choose_distances(plan.distances, heldout)
        if plan.pairs:
            choose_pairs(plan.pairs, Vocabulary.of_text(heldout))

    def _describe(self, config: TrainConfig, lines: Sequence[dict[str, float]], device: str) -> dict[str, Any]:
        """The columns of the table that are known after training."""
        machine = environment(device)
        last = lines[-max(1, config.run.steps // FINAL_PART) :]
        speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
        with torch.device("meta"):
            parameters = GPT(config.model).count_parameters()
        return {
            "run": self.name,
            "variant": self.variant,
            "power": self.power,
            "context": config.data.context,
            "seed": config.run.seed,
            "changes": self.changes,
            "status": "done",
            "parameters": parameters,
            "steps": config.run.steps,
            "tokens": self.tokens,
            "final_loss": round(statistics.fmean(line["loss"] for line in last), 5) if last else None,
            "final_loss_steps": len(last),
            "tokens_per_second": round(statistics.median(speeds[1:] or speeds)) if speeds else None,
            "device": "cpu" if device == "cpu" else machine["device"],
            "torch": machine["torch"],
            "environment": {**machine, "sympow": __version__},
        }

    def _evaluate(
        self, config: TrainConfig, folder: Path, device: str, command: str
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Evaluates the model; returns columns of the table, and curves."""
        begin = time.monotonic()
        plan, context, data = self.evaluation, config.data.context, config.data.data
        dtype = torch.bfloat16 if config.run.precision == "bf16" else None
        # Each document in one pass: at power 4 the attention form over these lengths costs far less than a state does,
        # and softmax is far slower with a cache.
        how: dict[str, Any] = {"segment_size": max(SEGMENT_SIZE, plan.length), "dtype": dtype}
        model, heldout = load_model(folder / EXPORT, device), open_dataset(data, "heldout")
        rows = document_sequences(heldout, context, max(1, plan.tokens // context), max(1, BATCH_TOKENS // context))
        within = losses = loss_by_position(model, rows, **how)
        if plan.length:
            losses = loss_by_position(model, document_sequences(heldout, plan.length, plan.documents), **how)
        recall = associative_recall(model, Vocabulary.of_text(heldout), pairs=plan.pairs, **how) if plan.pairs else []
        passkey = []
        if plan.distances:
            tokenizer = load_tokenizer(folder / EXPORT)
            passkey = passkey_retrieval(model, tokenizer, heldout, distances=plan.distances, **how)
        evaluation = ModelEvaluation(losses, context, recall, passkey, token_unit(folder / EXPORT))
        facts = {"data": data, "device": device, "dtype": str(dtype or "float32")}
        described = {"command": command, **facts, "environment": environment(device)}
        write_evaluations(folder / EVALUATION_FILE, {self.name: evaluation}, described)
        content = evaluation.as_json(positions=False)
        curves = {"by_position": content["by_position"]}
        settings = {"data": data, "context": context, "short": config.data.short}
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None):
            heads = measure_heads(model, held_out_rows(settings), data)
        if heads.quantities:
            write_heads(folder, heads)
            curves["heads"] = {"tokens": heads.tokens, "data": heads.data, "quantities": heads.quantities}
        numbers = {
            "heldout_loss": round(within.average(), 5),
            **{name: content[name] for name in ("by_context", "recall", "passkey")},
            "evaluation": {**facts, **{name: content[name] for name in ("documents", "unit")}},
            "evaluate_seconds": round(time.monotonic() - begin, 1),
        }
        return numbers, curves


def read_config(content: Mapping[str, Mapping[str, Any]]) -> TrainConfig:
    """A config as a row has it."""
    return TrainConfig(**{name: section(**content[name]) for name, section in SECTIONS.items()})


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """The settings that a run's result depends on, by name.

    No name occurs in two sections of a config. Of the data only the last component of the path counts, since data may
    be moved.
    """
    found = {name: value for name, value in config.settings().items() if name not in BOOKKEEPING}
    return {**found, "data": found["data"].rstrip("/").rpartition("/")[2]}


def differences(one: TrainConfig, other: TrainConfig) -> list[str]:
    """The settings in which two runs differ, as text."""
    here, there = settings_of(one), settings_of(other)
    return [f"{name} {here[name]!r} and {there[name]!r}" for name in here if here[name] != there[name]]


def heldout_loss(row: Mapping[str, Any]) -> float:
    """The held-out loss of a finished run by its row; infinite if it diverged."""
    return float(row["heldout_loss"]) if row["status"] == "done" else math.inf


def condense(lines: Sequence[dict[str, float]], points: int = POINTS) -> list[dict[str, float]]:
    """Metrics in at most `points` lines, evenly spaced: each number is its mean since the line before.

    So the mean over the last tenth of the lines is that over the last tenth of the steps.
    """
    every = max(1, math.ceil(len(lines) / points))
    found = []
    for first in range(0, len(lines), every):
        group = lines[first : first + every]
        names = dict.fromkeys(name for line in group for name in line)
        values = {name: [line[name] for line in group if name in line] for name in names}
        line: dict[str, float] = {name: float(f"{sum(x) / len(x):.6g}") for name, x in values.items()}
        found.append({**line, "step": group[-1]["step"]})
    return found


def curves_of_metrics(lines: Sequence[Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Steps and values of each metric; metrics that are logged rarely have few of both."""
    curves: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        for name, value in line.items():
            if name != "step":
                curve = curves.setdefault(name, {"step": [], "value": []})
                curve["step"].append(line["step"])
                curve["value"].append(value)
    return curves
