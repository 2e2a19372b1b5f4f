"""What `sympow evaluate` measures and prints: held-out loss by position and context, and probes of the state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sympow.bench.timing import environment
from sympow.checks import check_at_least, check_choice
from sympow.data import load_tokenizer, open_dataset
from sympow.data.tokenizer import token_unit
from sympow.evaluate import (
    PasskeyPoint,
    PositionLosses,
    RecallPoint,
    Vocabulary,
    associative_recall,
    loss_by_position,
    passkey_retrieval,
    stretches,
)
from sympow.evaluate.passkey import DISTANCES
from sympow.evaluate.results import averages_over_ranges
from sympow.extras import require
from sympow.files import write_atomically
from sympow.model.gpt import GPT, PIECE
from sympow.model.storage import load_model
from sympow.report.figures import plot_loss_by_context, plot_loss_by_position, plot_probes
from sympow.train.provenance import TrainedOn

FILE = "evaluation.json"
# Training context of a model that does not record it.
UNKNOWN_CONTEXT = 1_024
PROBES = ("recall", "passkey")


@dataclass(frozen=True)
class Setting:
    """What to evaluate on, and how.

    Attributes:
        data: as for training; its held-out documents are used.
        length: tokens to read of each document.
        documents: number of documents.
        probes: any of "recall" and "passkey".
        pairs: numbers of pairs of the recall probe; None: as many as the vocabulary allows.
        distances: of the passkey probe, in tokens.
        piece: tokens per segment of the prefill.
        device: "cuda" or "cpu".
        dtype: of matrix products, under autocast; None: no autocast.
    """

    data: str
    length: int
    documents: int
    probes: tuple[str, ...] = ()
    pairs: tuple[int, ...] | None = None
    distances: tuple[int, ...] = DISTANCES
    piece: int = PIECE
    device: str = "cpu"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("length", "documents", "piece"):
            check_at_least(name, getattr(self, name), 1)
        for probe in self.probes:
            check_choice("probe", probe, PROBES)
        for name, values in (("pairs", self.pairs), ("distances", self.distances)):
            if values is not None and (not values or min(values) < 1):
                raise ValueError(f"{name} must be numbers of at least 1, got {values}")


@dataclass(frozen=True)
class ModelEvaluation:
    """Results of one model.

    Attributes:
        losses: by position.
        trained_at: training context, if the run folder records it.
        recall, passkey: results of the probes that were requested.
        unit: the name of one token, "token" or "byte".
    """

    losses: PositionLosses
    trained_at: int | None = None
    recall: list[RecallPoint] = field(default_factory=list)
    passkey: list[PasskeyPoint] = field(default_factory=list)
    unit: str = "token"

    def as_json(self, *, positions: bool) -> dict[str, Any]:
        """The content of evaluation.json for this model; `positions` adds the loss at every position."""
        mean = self.losses.mean.tolist()
        content: dict[str, Any] = {
            "documents": self.losses.documents,
            "trained_at": self.trained_at,
            "unit": self.unit,
            "by_context": rounded(self.losses.by_context(contexts_up_to(len(mean), 2))),
            "by_position": rounded({round(at, 1): x for at, x in zip(*averages_over_ranges(mean), strict=True)}),
            "recall": [rounded(asdict(point)) for point in self.recall],
            "passkey": [rounded(asdict(point)) for point in self.passkey],
        }
        if positions:
            content["mean"] = [round(x, 5) for x in mean]
            content["error"] = [None if x != x else round(x, 5) for x in self.losses.error.tolist()]
        return content


@dataclass(frozen=True)
class Sample:
    """The held-out documents that models are evaluated on.

    Attributes:
        data: as `open_dataset` takes it.
        length: tokens to read of each document.
        title: a description of both.
        notes: warnings for the reader of the results.
    """

    data: str
    length: int
    title: str
    notes: tuple[str, ...]


def choose_sample(checkpoints: Sequence[Path], data: str | None = None, length: int | None = None) -> Sample:
    """The sample to evaluate models on: by default, held-out documents of the data they were trained on.

    Args:
        checkpoints: the models' folders.
        data: the data to use instead.
        length: tokens to read of each document. By default 4 times the longest training context; if no document is that
            long, as many as the longest has.

    Raises:
        ValueError: it is unknown what a model was trained on, the data does not exist any more or has no held-out
            documents, or the models were trained on different data.
    """
    records = {path: TrainedOn.find(path) for path in checkpoints}
    notes = []
    if data is None:
        data = _common_data(records)
        if any(record is not None and record.changed() for record in records.values()):
            notes.append(
                f"{data} has changed since it was trained on: documents held out now may be among those learned from"
            )
    lengths = open_dataset(data, "heldout").lengths
    if length is None:
        wanted = 4 * max(UNKNOWN_CONTEXT if record is None else record.context for record in records.values())
        length = min(wanted, int(lengths.max()))
        if length < wanted:
            notes.append(
                f"no held-out document has {wanted:,} tokens, 4 times the training context: reading {length:,}, all of "
                "the longest; a smaller --length may find more documents"
            )
    bytes_alone = all(record is not None and record.tokenizer == "bytes" for record in records.values())
    unit = "tokens (which are bytes)" if bytes_alone else "tokens"
    return Sample(data, length, f"evaluating on held-out documents of {data}, {length:,} {unit} of each", tuple(notes))


def _common_data(records: Mapping[Path, TrainedOn | None]) -> str:
    """The data that all models were trained on."""
    found: dict[str, Path] = {}
    for path, record in records.items():
        if record is None:
            raise ValueError(f"{path} does not say what it was trained on; name the data with --data")
        try:
            found.setdefault(record.source, path)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; name the data with --data") from error
    if len(found) > 1:
        told = ", ".join(f"{path} on {source}" for source, path in found.items())
        raise ValueError(f"models were trained on different data, {told}; name what to compare them on with --data")
    return next(iter(found))


def held_out_documents(data: str, length: int, documents: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of held-out documents, (1, length) each, by `sympow.evaluate.stretches`."""
    return stretches(open_dataset(data, "heldout"), length, documents)


def evaluate_model(checkpoint: Path, setting: Setting, group: ProcessGroup | None = None) -> ModelEvaluation:
    """Evaluates an exported model on held-out documents, with a progress bar.

    Args:
        group: processes that shard each document. The first one runs the probes and shows progress.
    """
    first = group is None or group.rank() == 0
    model = load_model(checkpoint, setting.device)
    vocab_size = open_dataset(setting.data, "heldout").vocab_size
    if vocab_size > model.config.vocab_size:
        raise ValueError(
            f"{setting.data} has a vocabulary of {vocab_size:,} tokens, more than the {model.config.vocab_size:,} of "
            f"{checkpoint}: it must be prepared with the model's tokenizer (--tokenizer {checkpoint})"
        )
    rich = require("rich.progress", "cli")
    console = require("rich.console", "cli").Console(stderr=True)
    with rich.Progress(console=console, transient=True, disable=not first) as progress:
        task = progress.add_task(str(checkpoint), total=setting.documents)
        losses = loss_by_position(
            model,
            held_out_documents(setting.data, setting.length, setting.documents),
            piece=setting.piece,
            dtype=setting.dtype,
            report=lambda done: progress.update(task, completed=done),
            group=group,
        )
        recall, passkey = run_probes(model, checkpoint, setting) if first else ([], [])
    trained_on = TrainedOn.find(checkpoint)
    context = None if trained_on is None else trained_on.context
    return ModelEvaluation(losses, context, recall, passkey, token_unit(checkpoint))


def run_probes(model: GPT, checkpoint: Path, setting: Setting) -> tuple[list[RecallPoint], list[PasskeyPoint]]:
    """Runs the requested probes on held-out documents."""
    how: dict[str, Any] = {"piece": setting.piece, "dtype": setting.dtype}
    recall: list[RecallPoint] = []
    passkey: list[PasskeyPoint] = []
    if setting.probes:
        heldout = open_dataset(setting.data, "heldout")
        trained_for_it = setting.data.partition(":")[0] == "mqar"
        if "recall" in setting.probes:
            vocabulary = Vocabulary.of_task(heldout.boundary) if trained_for_it else Vocabulary.of_text(heldout)
            recall = associative_recall(model, vocabulary, pairs=setting.pairs, **how)
        if "passkey" in setting.probes:
            if trained_for_it:
                raise ValueError("the probe passkey needs documents of text; mqar has none")
            passkey = passkey_retrieval(model, load_tokenizer(checkpoint), heldout, distances=setting.distances, **how)
    return recall, passkey


def contexts_up_to(length: int, ratio: int = 4) -> list[int]:
    """Contexts 1, 4, 16, … (powers of `ratio`) and the length itself."""
    contexts = [1]
    while contexts[-1] * ratio < length:
        contexts.append(contexts[-1] * ratio)
    return [*contexts, length] if length > 1 else contexts


def print_evaluations(found: Mapping[str, ModelEvaluation], length: int) -> None:
    """Prints the average loss over each context, one column per model, and a table per probe."""
    unit = common_unit(found)
    rows = [
        (f"{context:,}", [f"{one.losses.average(0, context):.4f}" for one in found.values()])
        for context in contexts_up_to(length)
    ]
    last = max(1, length // 8)
    rows.append((f"last {last:,}", [f"{one.losses.average(length - last):.4f}" for one in found.values()]))
    _print_table(f"Average loss within a context ({unit}s), nats per {unit}", "context", list(found), rows)
    recalls = {name: one.recall for name, one in found.items() if one.recall}
    if recalls:
        points = next(iter(recalls.values()))
        rows = [
            (
                f"{point.pairs} pairs, {point.nearest} to {point.farthest} {unit}s ago",
                [f"{100 * one[n].accuracy:.0f} %  {one[n].loss:.2f}" for one in recalls.values()],
            )
            for n, point in enumerate(points)
        ]
        title = f"Associative recall: accuracy and loss (a guess among the values has {points[0].guess:.2f})"
        _print_table(title, "", list(recalls), rows)
    keys = {name: one.passkey for name, one in found.items() if one.passkey}
    if keys:
        rows = [
            (
                f"{point.distance:,}",
                [f"{100 * one[n].accuracy:.0f} %  {one[n].loss:.2f}, {one[n].control:.2f}" for one in keys.values()],
            )
            for n, point in enumerate(next(iter(keys.values())))
        ]
        _print_table(
            "Passkey: accuracy, loss of the key, loss of a key that was not told", f"{unit}s ago", list(keys), rows
        )


def save_evaluations(found: Mapping[str, ModelEvaluation], facts: dict[str, Any], folder: Path) -> list[Path]:
    """Writes evaluation.json and the figures; returns their paths."""
    unit = common_unit(found)
    content = {
        **facts,
        "environment": environment(facts["device"]),
        "models": {name: one.as_json(positions=True) for name, one in found.items()},
    }
    write_atomically(folder / FILE, (json.dumps(content) + "\n").encode())
    written = [folder / FILE, folder / "loss_by_context.png", folder / "loss_by_position.png"]
    trained_at = {one.trained_at for one in found.values()}
    plot_loss_by_context(
        {name: one.losses.by_context(contexts_up_to(len(one.losses.mean), 2)) for name, one in found.items()},
        trained_at.pop() if len(trained_at) == 1 else None,
        written[1],
        unit,
    )
    plot_loss_by_position({"held-out documents": {n: one.losses.mean for n, one in found.items()}}, written[2], unit)
    if any(one.recall or one.passkey for one in found.values()):
        written.append(folder / "probes.png")
        plot_probes(
            {name: one.recall for name, one in found.items() if one.recall},
            {name: one.passkey for name, one in found.items() if one.passkey},
            written[-1],
            unit,
        )
    return written


def common_unit(found: Mapping[str, ModelEvaluation]) -> str:
    """The name of one token of all models: "byte" if all are byte-level, otherwise "token"."""
    units = {one.unit for one in found.values()}
    return units.pop() if len(units) == 1 else "token"


def rounded(numbers: Mapping[Any, Any]) -> dict[Any, Any]:
    """Rounds to five digits after the point, so that files stay small; NaN becomes None."""
    return {
        key: (None if value != value else round(value, 5)) if isinstance(value, float) else value
        for key, value in numbers.items()
    }


def _print_table(title: str, first: str, names: Sequence[str], rows: Sequence[tuple[str, list[str]]]) -> None:
    console = require("rich.console", "cli").Console()
    table = require("rich.table", "cli").Table(title=title, title_justify="left")
    table.add_column(first, justify="right")
    for name in names:
        table.add_column(name, justify="right")
    for label, cells in rows:
        table.add_row(label, *cells)
    console.print(table)
