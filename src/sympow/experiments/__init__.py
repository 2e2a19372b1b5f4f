"""Experiments: grids of training runs that are planned, run in parallel, resumed, and stored as tables of results.

An experiment is a function that takes a `Scale` and returns a list of `Run`s, or takes the name of a scale and returns
a list of `Sweep`s or `RecallSweep`s; the paper's are in `experiments/`.
"""

from sympow.experiments.grid import SCALES, Evaluation, Run, Scale
from sympow.experiments.recall_sweep import RecallSweep
from sympow.experiments.tracking_sweep import Sweep
from sympow.model.config import VARIANTS

__all__ = ["SCALES", "VARIANTS", "Evaluation", "RecallSweep", "Run", "Scale", "Sweep"]
