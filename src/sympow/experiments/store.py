"""Results of experiments on disk: for each experiment a table and a file of curves, as JSON lines with a line per run.

    RESULTS/EXPERIMENT.jsonl          what a run is, its config, its final numbers, the machine and the command
    RESULTS/EXPERIMENT.curves.jsonl   its metrics over training, its loss by position, what its heads learned
    OUT/RUN/result.json               both of one run, in the folder that it was trained in

A worker writes result.json, all at once, when its run has finished; the command writes the table of the experiment from
these. A run is done when it is in a table, or has a result in its folder. A run of several experiments has the same
lines in the files of each of them, so that every pair of files is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sympow.checks import check_regular_file
from sympow.evaluate.evaluation_file import Evaluation
from sympow.evaluate.head_statistics import HeadTable
from sympow.experiments.grid import Evaluation as EvaluationSettings
from sympow.experiments.grid import Run, differences
from sympow.files import write_atomically
from sympow.locks import locked
from sympow.parsing import read_json
from sympow.train.config import TrainConfig
from sympow.train.run_folder import CONFIG_FILE

TABLE_ENDING = ".jsonl"
CURVES_ENDING = ".curves.jsonl"
RESULT_FILE = "result.json"
# Most points of a training curve that are stored.
POINTS = 128


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


class Store:
    """The results on disk: those in tables, and those of runs that are in no table yet.

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
        """Whether a run is "done", "begun" or "new".

        Raises:
            ValueError: there is a result, or a folder in which training has begun, of that name with other settings.
        """
        if self._find(run) is not None:
            return "done"
        begun = self._out / run.name / CONFIG_FILE
        if not begun.is_file():
            return "new"
        _check_same(run, TrainConfig.read(begun), run.evaluation, begun)
        return "begun"

    def write(self, experiment: str, runs: Sequence[Run]) -> list[Path]:
        """Writes the table of an experiment from those of its runs that are done, and returns the files.

        Runs that are in its table and not among these are kept: a grid that grows has them only as long as it has the
        results that they depend on, and the table may be all that is left of them. Other commands may have written
        the table since it was read: what they added is kept, too.

        Raises:
            ValueError: there is a result of a run with other settings.
        """
        table = self._results / f"{experiment}{TABLE_ENDING}"
        with locked(table):
            earlier = {run.name: run for run in read_table(table)} if is_table(table) else {}
            # As when the store was made, what a table has of a run counts for more than what is in its folder.
            self._runs |= earlier
            stored = [one for run in runs if (one := self._find(run)) is not None]
            names = {run.name for run in runs}
            return write_table(table, [*stored, *(run for name, run in earlier.items() if name not in names)])

    def _find(self, run: Run) -> StoredRun | None:
        if run.name not in self._runs:
            if not (self._out / run.name / RESULT_FILE).is_file():
                return None
            self._runs[run.name] = _read_folder(self._out / run.name)
        stored = self._runs[run.name]
        # Rows of earlier versions do not say how their runs were evaluated.
        evaluated = stored.row.get("evaluation_settings")
        evaluation = run.evaluation if evaluated is None else EvaluationSettings(**evaluated)
        # JSON is YAML.
        _check_same(run, TrainConfig.from_yaml(json.dumps(stored.row["config"])), evaluation, stored.source)
        return stored


def read_results(results: Path) -> dict[str, StoredRun]:
    """All runs of the tables in a folder of results, by name.

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
    return found


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


def _check_same(run: Run, config: TrainConfig, evaluation: EvaluationSettings, source: Path) -> None:
    """Raises a ValueError unless what was found under a run's name has the run's settings."""
    different = differences(config, run.config)
    if evaluation != run.evaluation:
        different.append(f"{evaluation} and {run.evaluation}")
    if different:
        raise ValueError(
            f"{run.name} in {source} is of another config: {'; '.join(different)}. "
            "Choose other folders for runs and results, or remove it there"
        )


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


def _read_folders(folder: Path) -> dict[str, StoredRun]:
    return {path.parent.name: _read_folder(path.parent) for path in sorted(folder.glob(f"*/{RESULT_FILE}"))}


def _read_folder(folder: Path) -> StoredRun:
    path = folder / RESULT_FILE
    row = read_json(path)
    if not isinstance(row, dict):
        raise ValueError(f"{path} is not the result of a run")
    if missing := [name for name in ("run", "config", "curves") if name not in row]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    curves = row.pop("curves")
    return StoredRun(row, curves, path)


def _significant(number: float, digits: int = 6) -> float:
    return float(f"{number:.{digits}g}")
