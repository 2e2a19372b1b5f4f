"""Grids of training runs: what they are (`Run`, `Scale`), and how they are run, resumed and summed up.

An experiment is a function that takes a `Scale` and returns runs; those of the paper are in `experiments/`.
"""

from sympow.experiment.runs import Evaluation, Run
from sympow.experiment.scales import SCALES, Scale
from sympow.model.config import VARIANTS

__all__ = ["SCALES", "VARIANTS", "Evaluation", "Run", "Scale"]
