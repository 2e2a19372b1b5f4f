"""Evaluation of exported models (`sympow evaluate`): choice of held-out documents, losses and probes, progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed import ProcessGroup

from sympow.checks import check_at_least, check_choice
from sympow.data import TokenDataset, open_dataset
from sympow.data.associative_recall import RECALL
from sympow.data.provenance import TrainedOn
from sympow.data.tokenizer import Tokenizer, token_unit
from sympow.errors import ArgumentError, UserError
from sympow.evaluate.evaluation_file import ModelEvaluation
from sympow.evaluate.held_out_loss import count_sequences, document_sequences, loss_by_position
from sympow.evaluate.probes import (
    PasskeyPoint,
    RecallPoint,
    Vocabulary,
    associative_recall,
    check_has_ids,
    choose_distances,
    choose_pairs,
    passkey_retrieval,
)
from sympow.evaluate.same_tokenizer import check_same_tokenizer
from sympow.extras import require
from sympow.model.gpt import GPT, SEGMENT_SIZE
from sympow.model.storage import load_model

# Training context of a model whose folder does not record it.
UNKNOWN_CONTEXT = 1_024
PROBES = ("recall", "passkey")
# Seconds between two lines of progress, where it is not shown as a bar.
LINE_EVERY = 10.0


@dataclass(frozen=True)
class EvaluationSetting:
    """What to evaluate on, and how.

    Attributes:
        data: the dataset, as for training; its held-out documents are read.
        length: tokens of a sequence.
        documents: number of sequences at most, which begin with one of each document that is long enough.
        probes: any of "recall" and "passkey".
        pairs: numbers of pairs of the recall probe; None: those that there are enough tokens for.
        distances: distances of the passkey probe; None: those that documents are long enough for.
        segment_size: tokens per prefill segment.
        device: "cuda" or "cpu".
        dtype: dtype of autocast; None: no autocast.
    """

    data: str
    length: int
    documents: int
    probes: tuple[str, ...] = ()
    pairs: tuple[int, ...] | None = None
    distances: tuple[int, ...] | None = None
    segment_size: int = SEGMENT_SIZE
    device: str = "cpu"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("length", "documents", "segment_size"):
            check_at_least(name, getattr(self, name), 1)
        for probe in self.probes:
            check_choice("probe", probe, PROBES)
        for name, values, probe in (("pairs", self.pairs, "recall"), ("distances", self.distances, "passkey")):
            if values is not None and probe not in self.probes:
                raise ArgumentError(name, f"must be given with the probe {probe}, got {values} without it")


@dataclass(frozen=True)
class Sample:
    """The held-out documents that models are evaluated on.

    Attributes:
        data: the dataset, as `open_dataset` takes it.
        length: tokens of a sequence.
        size: numbers of sequences and of the documents that they are of, in words.
        title: data, length and size in words.
        notes: caveats for the reader of the results.
    """

    data: str
    length: int
    size: str
    title: str
    notes: tuple[str, ...]


def choose_sample(
    checkpoints: Sequence[Path], data: str | None = None, length: int | None = None, documents: int = 16
) -> Sample:
    """Chooses what to evaluate models on: by default held-out documents of the data that they were trained on.

    Args:
        checkpoints: the models' folders.
        data: another dataset.
        length: tokens of a sequence. By default 4 times the longest training context; if no document is that
            long, as many as the longest has.
        documents: sequences to read. There may be fewer, and several of one document.

    Raises:
        ValueError: a model's folder does not name its training data, the data is gone or has no held-out documents, or
            none that is long enough, or the models were trained on different data.
    """
    check_at_least("documents", documents, 1)
    records = {path: TrainedOn.find(path) for path in checkpoints}
    notes = []
    if data is None:
        data = _common_data(records)
        if any(record is not None and record.changed() for record in records.values()):
            notes.append(
                f"{data} has changed since the training: documents that are held out now may have been trained on"
            )
    heldout = open_dataset(data, "heldout")
    if length is None:
        wanted = 4 * max(UNKNOWN_CONTEXT if record is None else record.context for record in records.values())
        length = min(wanted, int(heldout.lengths.max()))
        if length < wanted:
            notes.append(
                f"no held-out document has {wanted:,} tokens, 4 times the training context: reading {length:,}, all of "
                "the longest"
            )
    sequences, read = count_sequences(heldout, length, documents)
    size = f"{_counted(sequences, 'sequence')} of {_counted(read, 'document')}"
    if sequences < documents:
        notes.append(
            f"the held-out documents have only {_counted(sequences, 'sequence')} of {length:,} tokens, fewer than the "
            f"{documents:,} of --documents; a smaller --length finds more"
        )
    bytes_alone = all(record is not None and record.tokenizer == "bytes" for record in records.values())
    unit = "tokens (which are bytes)" if bytes_alone else "tokens"
    title = f"evaluating on held-out documents of {data}, {length:,} {unit} at a time: {size}"
    return Sample(data, length, size, title, tuple(notes))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _common_data(records: Mapping[Path, TrainedOn | None]) -> str:
    """The dataset that all models were trained on."""
    found: dict[str, Path] = {}
    for path, record in records.items():
        if not path.exists():
            raise ArgumentError("checkpoints", f"must be model folders, and {path} is not there")
        if record is None:
            raise UserError(f"{path} does not say what it was trained on; name the data with --data")
        try:
            found.setdefault(record.source, path)
        except ValueError as error:
            raise UserError(f"{path}: {error}; name the data with --data") from error
    if len(found) > 1:
        told = ", ".join(f"{path} on {source}" for source, path in found.items())
        raise ArgumentError(
            "models", f"were trained on different data, {told}; name what to compare them on with --data"
        )
    return next(iter(found))


def check_probes(setting: EvaluationSetting) -> EvaluationSetting:
    """Checks what the probes need of the held-out documents, before a model is evaluated or trained.

    Returns:
        the setting with the numbers of pairs and the distances that are probed.

    Raises:
        ValueError: documents have too few kinds of tokens, are too short, or are not of text.
    """
    pairs, distances = setting.pairs, setting.distances
    if setting.probes:
        heldout = open_dataset(setting.data, "heldout")
        if "recall" in setting.probes:
            pairs = tuple(choose_pairs(pairs, _vocabulary(setting.data, heldout)))
        if "passkey" in setting.probes:
            if _of_recall(setting.data):
                raise UserError(f"the probe passkey needs documents of text; {RECALL} has none")
            distances = tuple(choose_distances(distances, heldout))
    return replace(setting, pairs=pairs, distances=distances)


def check_tokenizer(checkpoint: Path, tokenizer: Tokenizer | None, setting: EvaluationSetting) -> None:
    """Checks that the data and the probes of a setting suit a model's tokenizer, before the model is loaded.

    Args:
        checkpoint: the model's folder, for messages.
        tokenizer: the model's tokenizer; None: its folder has none.

    Raises:
        ValueError: the data was tokenized by another tokenizer, or a probe needs the model's and there is none.
    """
    if tokenizer is not None:
        check_same_tokenizer(checkpoint, tokenizer, setting.data)
    elif "passkey" in setting.probes:
        raise UserError(f"the probe passkey needs the model's tokenizer, and {checkpoint} has none")


def _of_recall(data: str) -> bool:
    """Whether a dataset is the task of the recall probe."""
    return data.partition(":")[0] == RECALL


def _vocabulary(data: str, heldout: TokenDataset) -> Vocabulary:
    """The tokens of the recall probe."""
    return Vocabulary.of_task(heldout.boundary) if _of_recall(data) else Vocabulary.of_text(heldout)


def evaluate_model(
    checkpoint: Path,
    setting: EvaluationSetting,
    group: ProcessGroup | None = None,
    *,
    model: GPT | None = None,
    tokenizer: Tokenizer | None = None,
) -> ModelEvaluation:
    """Evaluates an exported model on held-out documents, and shows its progress on standard error.

    Args:
        checkpoint: the model's folder.
        setting: what to evaluate on, and how, as `check_probes` returned it and `check_tokenizer` accepted it.
        group: processes that share each document. The first one runs the probes and shows progress.
        model: the model, if the folder is in another format than that of `load_model`.
        tokenizer: the model's tokenizer, which only the probe "passkey" needs.
    """
    first = group is None or group.rank() == 0
    model = load_model(checkpoint, setting.device) if model is None else model
    heldout = open_dataset(setting.data, "heldout")
    if heldout.vocab_size > model.config.vocab_size:
        raise UserError(
            f"{setting.data} has a vocabulary of {heldout.vocab_size:,} tokens, more than the "
            f"{model.config.vocab_size:,} of {checkpoint}: prepare it with the model's tokenizer"
        )
    if "passkey" in setting.probes and tokenizer is not None:
        check_has_ids(model, tokenizer)
    sequences, _ = count_sequences(heldout, setting.length, setting.documents)
    with _Progress(checkpoint, sequences) if first else nullcontext() as progress:
        losses = loss_by_position(
            model,
            document_sequences(heldout, setting.length, setting.documents),
            segment_size=setting.segment_size,
            dtype=setting.dtype,
            report=None if progress is None else progress.update,
            group=group,
        )
        if progress is not None and setting.probes:
            progress.say(f"probing {' and '.join(setting.probes)}")
        recall, passkey = _run_probes(model, tokenizer, heldout, setting) if first else ([], [])
    trained_on = TrainedOn.find(checkpoint)
    context = None if trained_on is None else trained_on.context
    return ModelEvaluation(losses, context, recall, passkey, token_unit(checkpoint))


class _Progress:
    """How far the evaluation of a model is: a bar on a terminal, elsewhere a line from time to time.

    Args:
        checkpoint: the model's folder.
        total: number of sequences.
    """

    def __init__(self, checkpoint: Path, total: int) -> None:
        self._name, self._total = str(checkpoint), total
        self._start = self._said = time.monotonic()
        console = require("rich.console", "cli").Console(stderr=True)
        self._bar = require("rich.progress", "cli").Progress(
            console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task(self._name, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int) -> None:
        """Called with the number of sequences that have been read."""
        self._bar.update(self._task, completed=done)
        now = time.monotonic()
        if self._bar.disable and (done == self._total or now - self._said >= LINE_EVERY):
            self._said = now
            left = f", {(now - self._start) / done * (self._total - done):,.0f} s left" if done < self._total else ""
            self.say(f"{done:,} of {_counted(self._total, 'sequence')}{left}")

    def say(self, what: str) -> None:
        self._bar.update(self._task, description=f"{self._name}: {what}")
        if self._bar.disable:
            print(f"{self._name}: {what}", file=sys.stderr, flush=True)


def _run_probes(
    model: GPT, tokenizer: Tokenizer | None, heldout: TokenDataset, setting: EvaluationSetting
) -> tuple[list[RecallPoint], list[PasskeyPoint]]:
    how: dict[str, Any] = {"segment_size": setting.segment_size, "dtype": setting.dtype}
    recall: list[RecallPoint] = []
    passkey: list[PasskeyPoint] = []
    if "recall" in setting.probes:
        recall = associative_recall(model, _vocabulary(setting.data, heldout), pairs=setting.pairs, **how)
    if "passkey" in setting.probes:
        assert tokenizer is not None
        passkey = passkey_retrieval(model, tokenizer, heldout, distances=setting.distances, **how)
    return recall, passkey
