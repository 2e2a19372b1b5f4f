import textwrap
from dataclasses import replace

import pytest
from experiment_settings import TINY

from sympow.experiments import Evaluation
from sympow.experiments.grid import cpu


@pytest.fixture
def scale():
    """A scale of tiny runs."""
    evaluation = Evaluation(tokens=256, length=64, documents=2, pairs=(2,), distances=(16,))
    return replace(cpu().changed(**TINY), evaluation=evaluation)


@pytest.fixture
def folder(tmp_path):
    """A folder with an experiment of two runs."""
    source = """
        from dataclasses import replace
        from sympow.experiments import Evaluation


        def pair(scale):
            '''Two runs.

            And no more.
            '''
            scale = replace(scale, evaluation=Evaluation(tokens=256, length=64, documents=2))
            return [scale.run(variant, context=32) for variant in ("gating", "conformal")]


        def _helper(scale):
            raise AssertionError


        def no_experiment(scale, other):
            raise AssertionError
    """
    path = tmp_path / "grids"
    path.mkdir()
    (path / "mine.py").write_text(textwrap.dedent(source))
    return path
