"""Stored results of experiments: for each experiment a table and a file of curves, as JSON lines with a line per run.

    RESULTS/EXPERIMENT.jsonl          what a run is, its config, its final numbers, the machine and the command
    RESULTS/EXPERIMENT.curves.jsonl   its metrics over training, its loss by position, what its heads learned

A run of several experiments has the same lines in the files of each of them, so that every pair of files is complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sympow.checks import check_regular_file
from sympow.evaluate.heads import HeadTable
from sympow.evaluate.results import Evaluation
from sympow.files import write_atomically

TABLE_ENDING = ".jsonl"
CURVES_ENDING = ".curves.jsonl"


@dataclass(frozen=True)
class StoredRun:
    """One finished run of an experiment.

    Attributes:
        row: its line in the table.
        curves: its line in the file of curves, without the run's name.
        source: the file that it was read from.
    """

    row: dict[str, Any]
    curves: dict[str, Any]
    source: Path

    @property
    def name(self) -> str:
        return str(self.row["run"])

    @property
    def metrics(self) -> list[dict[str, float]]:
        """As `read_metrics` returns them: one record per logged step."""
        lines: dict[int, dict[str, float]] = {}
        for name, curve in self.curves["metrics"].items():
            for step, value in zip(curve["step"], curve["value"], strict=True):
                lines.setdefault(step, {"step": step})[name] = value
        return [lines[step] for step in sorted(lines)]

    @property
    def evaluation(self) -> Evaluation | None:
        """None for a run that diverged, which was not evaluated."""
        facts = self.row.get("evaluation")
        return None if facts is None else Evaluation.of_file({**facts, **self.row, **self.curves}, facts)

    @property
    def heads(self) -> HeadTable | None:
        heads = self.curves.get("heads")
        return None if heads is None else HeadTable(heads["quantities"], heads["tokens"], heads["data"])


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


def tables_in(folder: Path) -> list[Path]:
    """Tables of experiments directly in a folder: JSON lines with a file of curves beside them."""
    return [_table_of(path) for path in sorted(folder.glob(f"*{CURVES_ENDING}")) if _table_of(path).is_file()]


def is_table(path: Path) -> bool:
    return path.is_file() and path.name.endswith(TABLE_ENDING) and _curves_of(path).is_file()


def read_rows(table: Path) -> list[dict[str, Any]]:
    """The lines of a table, without their curves.

    Raises:
        ValueError: a line is damaged.
    """
    return list(_read_lines(table))


def read_table(table: Path) -> list[StoredRun]:
    """The runs of a table with their curves.

    Raises:
        ValueError: a line is damaged, or a run has no curves.
    """
    curves = {line.pop("run"): line for line in _read_lines(_curves_of(table))}
    runs = []
    for row in _read_lines(table):
        if row["run"] not in curves:
            raise ValueError(f"{table} has the run {row['run']}, and {_curves_of(table).name} has no curves of it")
        runs.append(StoredRun(row, curves[row["run"]], table))
    return runs


def write_table(table: Path, runs: Iterable[StoredRun]) -> list[Path]:
    """Writes a table and its curves, and returns both paths.

    The curves are replaced first: whenever a process is killed, every run of the table has its curves.
    """
    runs = list(runs)
    files = {
        _curves_of(table): [{"run": run.name, **run.curves} for run in runs],
        table: [run.row for run in runs],
    }
    for path, lines in files.items():
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in lines).encode())
    return [table, _curves_of(table)]


def _curves_of(table: Path) -> Path:
    return table.with_name(table.name.removesuffix(TABLE_ENDING) + CURVES_ENDING)


def _table_of(curves: Path) -> Path:
    return curves.with_name(curves.name.removesuffix(CURVES_ENDING) + TABLE_ENDING)


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    check_regular_file(path)
    # Not `splitlines`, which also splits at characters that JSON permits within a string.
    for number, line in enumerate(path.read_text("utf-8").removesuffix("\n").split("\n"), start=1):
        try:
            content = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("run"), str):
            raise ValueError(f"{path}: line {number} names no run")
        yield content
