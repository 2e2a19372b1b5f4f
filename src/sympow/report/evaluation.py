"""Loss against how much was read, of one model or several: a table, JSON and a figure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sympow.data import Loader, open_dataset
from sympow.evaluate import PositionLosses, loss_by_position
from sympow.extras import require
from sympow.model.storage import load_model
from sympow.report.figures import plot_loss_by_position
from sympow.report.timing import environment


def held_out_documents(data: str, length: int, documents: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of stretches of held-out documents, (1, length) each, from each document's beginning on.

    Raises:
        ValueError: no held-out document is that long.
    """
    loader = Loader(open_dataset(data, "heldout"), length, 1, short="drop", shuffle=False, epochs=1)
    return ((batch.inputs, batch.targets) for batch in islice(loader, documents))


def evaluate_model(
    checkpoint: Path, data: str, length: int, documents: int, *, device: str, dtype: torch.dtype | None, piece: int
) -> PositionLosses:
    """Losses of an exported model on held-out documents, with progress on the terminal."""
    model = load_model(checkpoint, device)
    rich = require("rich.progress", "cli")
    console = require("rich.console", "cli").Console(stderr=True)
    with rich.Progress(console=console, transient=True) as progress:
        task = progress.add_task(str(checkpoint), total=documents)
        return loss_by_position(
            model,
            held_out_documents(data, length, documents),
            piece=piece,
            dtype=dtype,
            report=lambda done: progress.update(task, completed=done),
        )


def contexts_up_to(length: int) -> list[int]:
    """1, 4, 16, … and the length itself."""
    contexts = [4**power for power in range(20) if 4**power < length]
    return [*contexts, length]


def print_losses(losses: Mapping[str, PositionLosses], length: int) -> None:
    """Average loss within each context, and its standard error at the longest, one column per model."""
    console = require("rich.console", "cli").Console()
    table = require("rich.table", "cli").Table(
        title="Average loss within a context, nats a token", title_justify="left"
    )
    table.add_column("context", justify="right")
    for name in losses:
        table.add_column(name, justify="right")
    for context in contexts_up_to(length):
        table.add_row(f"{context:,}", *(f"{found.average(0, context):.4f}" for found in losses.values()))
    last = max(1, length // 8)
    cells = (f"{found.average(length - last):.4f}" for found in losses.values())
    table.add_row(f"last {last:,}", *cells)
    console.print(table)


def save_losses(losses: Mapping[str, PositionLosses], facts: dict[str, Any], folder: Path) -> None:
    """Writes evaluation.json (averages by context, losses by position) and loss_by_position.png."""
    folder.mkdir(parents=True, exist_ok=True)
    length = len(next(iter(losses.values())).mean)
    content = {
        **facts,
        "environment": environment(facts["device"]),
        "models": {
            name: {
                "documents": found.documents,
                "by_context": found.by_context(contexts_up_to(length)),
                "mean": [round(x, 5) for x in found.mean.tolist()],
                "error": [None if x != x else round(x, 5) for x in found.error.tolist()],
            }
            for name, found in losses.items()
        },
    }
    (folder / "evaluation.json").write_text(json.dumps(content) + "\n")
    plot_loss_by_position(
        {"held-out documents": {n: f.mean for n, f in losses.items()}}, folder / "loss_by_position.png"
    )
