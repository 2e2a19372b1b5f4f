"""What remains of a run: small files that every figure can be drawn from, and a summary of all runs of an experiment.

    RESULTS/runs/RUN/config.yaml      the settings it was trained with
    RESULTS/runs/RUN/metrics.jsonl    its metrics, in at most POINTS lines: numbers are means since the line before
    RESULTS/runs/RUN/evaluation.json  loss by evaluation context and position, probes
    RESULTS/runs/RUN/heads.json       what its gates and rotations do
    RESULTS/runs/RUN/result.json      one row: what it is, what came out, how long it took and on what
    RESULTS/EXPERIMENT/summary.json   the rows of an experiment's runs
    RESULTS/EXPERIMENT/summary.csv    the same for a spreadsheet

Runs are kept once, whichever experiments they belong to. A run is done when its result.json is there.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from sympow.experiment.runs import Run, differences
from sympow.files import write_atomically
from sympow.parsing import read_json
from sympow.report.run_collection import RESULT_FILE, RUNS, SUMMARY_FILE
from sympow.train.config import TrainConfig
from sympow.train.run_folder import CONFIG_FILE

POINTS = 128
# Columns of the summary that are no lists.
COLUMNS = (
    "run",
    "variant",
    "power",
    "context",
    "seed",
    "changes",
    "status",
    "parameters",
    "steps",
    "tokens",
    "final_loss",
    "final_loss_steps",
    "heldout_loss",
    "train_seconds",
    "total_seconds",
    "tokens_per_second",
    "device",
    "torch",
    "command",
)


def result_of(run: Run, results: Path) -> dict[str, Any] | None:
    """The row of a run that is done, or None.

    Raises:
        ValueError: the run there was trained with other settings.
    """
    folder = results / RUNS / run.name
    if not (folder / RESULT_FILE).is_file():
        return None
    if different := differences(TrainConfig.read(folder / CONFIG_FILE), run.config):
        raise ValueError(
            f"{folder} is of another config: {'; '.join(different)}. Choose another folder for results, or remove it"
        )
    return read_row(folder / RESULT_FILE)


def read_row(path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict) or "run" not in content:
        raise ValueError(f"{path} is no result of a run")
    return content


def all_rows(results: Path) -> list[dict[str, Any]]:
    """Of every run that is done, in the order of their names."""
    return [read_row(path) for path in sorted((results / RUNS).glob(f"*/{RESULT_FILE}"))]


def condensed(lines: Sequence[dict[str, float]], points: int = POINTS) -> list[dict[str, float]]:
    """Metrics in at most so many lines, evenly apart: each number is its mean since the line before.

    So the mean over the last tenth of the lines is that over the last tenth of the steps.
    """
    every = max(1, math.ceil(len(lines) / points))
    found = []
    for first in range(0, len(lines), every):
        part = lines[first : first + every]
        names = dict.fromkeys(name for line in part for name in line)
        values = {name: [line[name] for line in part if name in line] for name in names}
        line: dict[str, float] = {name: _significant(sum(x) / len(x)) for name, x in values.items()}
        found.append({**line, "step": part[-1]["step"]})
    return found


def write_summary(name: str, rows: Iterable[dict[str, Any]], results: Path) -> list[Path]:
    """Writes the summary of an experiment and returns its files."""
    rows = list(rows)
    folder = results / name
    contexts = sorted({int(context) for row in rows for context in row.get("by_context") or {}})
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *(f"heldout_loss_within_{context}" for context in contexts)])
    for row in rows:
        losses = row.get("by_context") or {}
        cells = [json.dumps(row[c]) if isinstance(row.get(c), dict) else row.get(c, "") for c in COLUMNS]
        writer.writerow([*cells, *(losses.get(str(context), "") for context in contexts)])
    files = {
        folder / SUMMARY_FILE: json.dumps({"experiment": name, "runs": rows}, indent=1) + "\n",
        folder / "summary.csv": text.getvalue(),
    }
    for path, content in files.items():
        write_atomically(path, content.encode())
    return list(files)


def _significant(number: float, digits: int = 6) -> float:
    return float(f"{number:.{digits}g}")
