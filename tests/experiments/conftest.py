from dataclasses import replace

import pytest
from experiment_settings import TINY

from experiments.__main__ import EXPERIMENTS
from experiments.grid import cpu
from experiments.text_run import EvaluationPlan


@pytest.fixture
def scale():
    """A scale of tiny runs."""
    evaluation = EvaluationPlan(tokens=256, length=64, documents=2, pairs=(2,), distances=(16,))
    return replace(cpu(), changes=TINY, evaluation=evaluation)


@pytest.fixture
def define(monkeypatch):
    """Makes a function an experiment of its name."""
    return lambda experiment: monkeypatch.setitem(EXPERIMENTS, experiment.__name__, experiment)
