"""From an experiment's name to its runs: every function of one argument `scale` in a folder of Python files."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from sympow.experiment.runs import Run
from sympow.experiment.scales import Scale

Experiment = Callable[[Scale], list[Run]]
FOLDER = Path("experiments")


def find_experiments(folder: Path | None = None) -> dict[str, Experiment]:
    """Experiments by name, in alphabetical order.

    Args:
        folder: with Python files; by default `experiments` here, or that of the checkout sympow is used from.
    """
    if folder is None:
        folder = _default_folder()
    elif not folder.is_dir():
        raise ValueError(f"folder must have Python files with experiments, and {folder} is no folder")
    found: dict[str, Experiment] = {}
    for path in sorted(folder.glob("*.py")):
        module = _load(path)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ != module.__name__ or name.startswith("_"):
                continue
            if list(inspect.signature(function).parameters) == ["scale"]:
                if name in found:
                    raise ValueError(
                        f"experiment {name!r} is defined twice in {folder}, the second time in {path.name}"
                    )
                found[name] = function
    if not found:
        raise ValueError(f"{folder} has no experiment: a function with the one argument scale, in a Python file")
    return dict(sorted(found.items()))


def runs_of(experiment: Experiment, scale: Scale) -> list[Run]:
    """The runs of an experiment, each once."""
    runs = {run.name: run for run in experiment(scale)}
    if not runs:
        raise ValueError(f"{experiment.__name__} has no runs at scale {scale.name!r}")
    return list(runs.values())


def describe(experiment: Experiment) -> str:
    """The first line of its docstring."""
    return (inspect.getdoc(experiment) or "").partition("\n")[0]


def _default_folder() -> Path:
    beside_the_source = Path(__file__).parents[3] / FOLDER
    for folder in (FOLDER, beside_the_source):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"there is no folder {FOLDER}/ here. The paper's experiments are files of sympow's repository, not of the "
        "installed package: clone it and run this command in it, or name a folder of your own with --folder"
    )


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"sympow_experiments.{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Where dataclasses look for the module that they are of.
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module
