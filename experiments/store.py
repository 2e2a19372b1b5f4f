"""Results on disk: for each experiment a table and a file of curves, as JSON lines with a line per result.

    RESULTS/EXPERIMENT.jsonl          what was trained, its settings, its final numbers, the machine and the command
    RESULTS/EXPERIMENT.curves.jsonl   loss and metrics over training, loss or accuracy by position, what heads learned

A run or a sweep is done when its results are in a table. A run of several experiments is in the table of each, so that
every table is complete. Any number of processes may add results at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock

from sympow.errors import UserError
from sympow.files import write_atomically

TABLE_ENDING = ".jsonl"
CURVES_ENDING = ".curves.jsonl"
# In the folder of results.
LOCK_FILE = ".lock"


@dataclass(frozen=True)
class StoredResult:
    """What has come out of a run, or of a sweep on one task.

    Attributes:
        row: its line in the table.
        curves: its line in the file of curves, without the name.
    """

    row: dict[str, Any]
    curves: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.row["run"])


class HasResults(Protocol):
    """What has results: a run of a grid, or a sweep."""

    @property
    def results(self) -> tuple[str, ...]:
        """Names of its results."""

    def differences(self, row: dict[str, Any]) -> list[str]:
        """The settings in which a result of that name is of something else, as text."""


class Store:
    """The results in a folder, as they were when it was read.

    Attributes:
        folder: of the tables.
        tables: results by experiment, then by name, in the order of the file.

    Raises:
        UserError: a file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = sorted(path.name.removesuffix(CURVES_ENDING) for path in folder.glob(f"*{CURVES_ENDING}"))
        self.tables = {name: read_table(folder, name) for name in names}

    def find(self, experiment: str, work: HasResults) -> list[StoredResult] | None:
        """The results of a run or sweep, from the experiment's table or else another; None: it is not done.

        Raises:
            UserError: the experiment's table has a result of that name with other settings.
        """
        for name in sorted(self.tables, key=lambda name: name != experiment):
            table = self.tables[name]
            if not all(result in table for result in work.results):
                continue
            found = [table[result] for result in work.results]
            different = [words for one in found for words in work.differences(one.row)]
            if not different:
                return found
            if name == experiment:
                raise UserError(
                    f"{found[0].name} in {self.folder / name}{TABLE_ENDING} has other settings: "
                    f"{'; '.join(dict.fromkeys(different))}. Choose another folder for results, or remove it there"
                )
        return None

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of all runs of grids by name.

        Raises:
            UserError: two tables differ in a run.
        """
        found: dict[str, tuple[str, StoredResult]] = {}
        for table, results in self.tables.items():
            for name, result in results.items():
                if "config" not in result.row:
                    continue
                first, known = found.setdefault(name, (table, result))
                # Compared as text: NaN is not equal to itself.
                if json.dumps([known.row, known.curves]) != json.dumps([result.row, result.curves]):
                    raise UserError(
                        f"{first}{TABLE_ENDING} and {table}{TABLE_ENDING} in {self.folder} have different results of "
                        f"{name}: remove one"
                    )
        return {name: result.row for name, (_, result) in found.items()}

    def add(self, experiment: str, results: Sequence[StoredResult]) -> None:
        """Adds results to the table of an experiment as it is now: other processes may have added some, too."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / LOCK_FILE):
            table = read_table(self.folder, experiment)
            table |= {result.name: result for result in results}
            write_table(self.folder, experiment, table.values())
        self.tables[experiment] = table


def read_table(folder: Path, experiment: str) -> dict[str, StoredResult]:
    """The results of an experiment by name; none if there is no table.

    Raises:
        UserError: a line is damaged, or a result has no curves.
    """
    table, curves_file = folder / f"{experiment}{TABLE_ENDING}", folder / f"{experiment}{CURVES_ENDING}"
    if not table.is_file():
        return {}
    rows, curves = _read_lines(table), _read_lines(curves_file)
    if missing := rows.keys() - curves.keys():
        raise UserError(f"{table} has {min(missing)}, and {curves_file.name} has no curves of it")
    without_name = {name: {key: x for key, x in line.items() if key != "run"} for name, line in curves.items()}
    return {name: StoredResult(row, without_name[name]) for name, row in rows.items()}


def write_table(folder: Path, experiment: str, results: Iterable[StoredResult]) -> None:
    """Writes a table and its curves.

    The curves are replaced first: whenever a process is killed, every result of the table has its curves.
    """
    results = list(results)
    lines = {
        CURVES_ENDING: [{"run": result.name, **result.curves} for result in results],
        TABLE_ENDING: [result.row for result in results],
    }
    for ending, contents in lines.items():
        text = "".join(json.dumps(content) + "\n" for content in contents)
        write_atomically(folder / f"{experiment}{ending}", text.encode())


def _read_lines(path: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), start=1):
        try:
            content = json.loads(line)
            found[content["run"]] = content
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: line {number} is not a result") from error
    return found
