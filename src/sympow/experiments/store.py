"""Results of finished runs: where a run's result is found, and how the table of an experiment is written from results.

A worker writes the result of its run into the run's own folder (`result.json`), all at once, when the run has finished.
The command then writes the table of the experiment (`sympow.report.experiment_results`) from these. A run is done when
it is in a table, or has a result in its folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sympow.evaluate.heads import FILE as HEADS_FILE
from sympow.evaluate.results import FILE as EVALUATION_FILE
from sympow.experiments.grid import Run, differences
from sympow.files import write_atomically
from sympow.parsing import read_json, read_yaml
from sympow.report.experiment_results import (
    TABLE_ENDING,
    StoredRun,
    curves_of_metrics,
    read_table,
    tables_in,
    write_table,
)
from sympow.report.run_collection import RESULT_FILE, RUNS
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics
from sympow.train.run_folder import CONFIG_FILE, METRICS_FILE

# Most points of a training curve that are stored.
POINTS = 128


class Store:
    """The results there are, of tables and of runs that are in no table yet.

    Args:
        results: folder of tables.
        out: folder of the runs' own folders.
    """

    def __init__(self, results: Path, out: Path) -> None:
        self._results, self._out = results, out
        self._runs = {**_read_folders(out), **read_results(results)}

    def row(self, run: Run) -> dict[str, Any] | None:
        """The row of a run that is done, or None.

        Raises:
            ValueError: there is a result of that name with other settings.
        """
        stored = self._find(run)
        return None if stored is None else stored.row

    def rows(self) -> list[dict[str, Any]]:
        """The rows of all runs, in the order of their names."""
        return [self._runs[name].row for name in sorted(self._runs)]

    def state(self, run: Run) -> str:
        """Whether a run is "done", "begun" or "new"."""
        if self._find(run) is not None:
            return "done"
        return "begun" if (self._out / run.name / CONFIG_FILE).is_file() else "new"

    def write(self, experiment: str, runs: Sequence[Run]) -> list[Path]:
        """Writes the table of an experiment from those of its runs that are done, and returns the files."""
        stored = [one for run in runs if (one := self._find(run)) is not None]
        return write_table(self._results / f"{experiment}{TABLE_ENDING}", stored)

    def _find(self, run: Run) -> StoredRun | None:
        if run.name not in self._runs:
            if not (self._out / run.name / RESULT_FILE).is_file():
                return None
            self._runs[run.name] = _read_folder(self._out / run.name)
        stored = self._runs[run.name]
        # JSON is YAML.
        config = TrainConfig.from_yaml(json.dumps(stored.row["config"]))
        if different := differences(config, run.config):
            raise ValueError(
                f"{run.name} in {stored.source} is of another config: {'; '.join(different)}. "
                "Choose other folders for runs and results, or remove it there"
            )
        return stored


def read_results(results: Path) -> dict[str, StoredRun]:
    """All runs of a folder of results by name: those of its tables, and of the run folders of earlier versions.

    Raises:
        ValueError: a file is damaged, or two tables differ in a run.
    """
    found: dict[str, StoredRun] = {}
    for table in tables_in(results):
        for run in read_table(table):
            known = found.setdefault(run.name, run)
            # Compared as text: NaN is not equal to itself.
            if json.dumps([known.row, known.curves]) != json.dumps([run.row, run.curves]):
                raise ValueError(f"{known.source} and {run.source} have different results of {run.name}: remove one")
    return {**_read_folders(results / RUNS), **found}


def write_result(folder: Path, row: dict[str, Any], curves: dict[str, Any]) -> None:
    """Writes the result of a run into its folder; its presence says that the run has finished."""
    write_atomically(folder / RESULT_FILE, (json.dumps({**row, "curves": curves}) + "\n").encode())


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
        line: dict[str, float] = {name: _significant(sum(x) / len(x)) for name, x in values.items()}
        found.append({**line, "step": group[-1]["step"]})
    return found


def _read_folders(folder: Path) -> dict[str, StoredRun]:
    return {path.parent.name: _read_folder(path.parent) for path in sorted(folder.glob(f"*/{RESULT_FILE}"))}


def _read_folder(folder: Path) -> StoredRun:
    path = folder / RESULT_FILE
    row = read_json(path)
    if not isinstance(row, dict) or "run" not in row:
        raise ValueError(f"{path} is no result of a run")
    curves = row.pop("curves", None)
    return StoredRun(row, curves, path) if curves is not None else _read_earlier_layout(folder, row)


def _read_earlier_layout(folder: Path, row: dict[str, Any]) -> StoredRun:
    """A result of version 0.1 or before: the row in result.json, and everything else in files beside it."""
    curves: dict[str, Any] = {"metrics": curves_of_metrics(read_metrics(folder / METRICS_FILE))}
    if "by_position" in row:
        curves["by_position"] = row.pop("by_position")
    if (folder / EVALUATION_FILE).is_file():
        content = read_json(folder / EVALUATION_FILE)
        model = content["models"][row["run"]]
        facts = {name: content[name] for name in ("data", "device", "dtype")}
        row["evaluation"] = {**facts, **{name: model[name] for name in ("documents", "unit") if name in model}}
    if (folder / HEADS_FILE).is_file():
        curves["heads"] = read_json(folder / HEADS_FILE)
    return StoredRun({**row, "config": read_yaml(folder / CONFIG_FILE)}, curves, folder / RESULT_FILE)


def _significant(number: float, digits: int = 6) -> float:
    return float(f"{number:.{digits}g}")
