"""The margins of the suite's float32 tolerances, and what measures them."""

import argparse
import ast
import math
import types
from collections import Counter
from pathlib import Path

import arithmetic
import margins
import pytest
import torch
from arithmetic import Arithmetic, Mistake

import support
from support import float32_tolerance, interpreted, random_inputs, run

TESTS = Path(__file__).parent
COMPARISONS = {"assert_close", "assert_relative", "assert_states_close", "within"}


@pytest.fixture
def changed():
    """Computes under an arithmetic, and puts the usual one back."""

    def compute(call, how):
        arithmetic.use(how)
        return call()

    with arithmetic.installed():
        yield compute
    arithmetic.use(Arithmetic())


def test_backwards_products_and_sums_are_those_of_reversed_terms(changed):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 300, 300, generator=generator)
    for call in (
        lambda a, b: a @ b,
        lambda a, b: a[None] @ b[None],
        lambda a, b: torch.addmm(torch.ones(300), a, b),
        lambda a, b: (a * b.mT).sum(1),
    ):
        reversed_terms = changed(lambda call=call: call(a.flip(1), b.flip(0)), Arithmetic())
        backwards = changed(lambda call=call: call(a, b), Arithmetic(backwards=True))
        assert torch.equal(backwards, reversed_terms)
        assert not torch.equal(backwards, changed(lambda call=call: call(a, b), Arithmetic()))


@interpreted
def test_mistakes_in_a_kernel_cross_the_tolerance_and_rounding_does_not(changed):
    pytest.importorskip("triton", reason="needs Triton")
    inputs = random_inputs(0, length=20, heads=1, dim=4, dtype=torch.float32)
    expected = run(inputs.map(torch.Tensor.double), 2, "attention", backend="torch")

    def error(how):
        y = changed(lambda: run(inputs, 2, "attention", backend="triton"), how)
        return (y - expected).abs().max().item() / max(1.0, expected.abs().max().item())

    right = Arithmetic()
    tolerance = float32_tolerance("y", 20)
    assert error(right) <= tolerance / 4
    assert error(Arithmetic(backwards=True)) <= tolerance / 4
    products = [place for place in right.places if place.startswith("product in kernels/attention/forward.py")]
    sums = [place for place in right.places if place.startswith("sum in kernels/attention/forward.py")]
    assert len(products) == 2
    assert sums
    for kind in ("term", "index"):
        for place in products:
            assert error(Arithmetic(mistake=Mistake(place, kind, call=0))) > tolerance, (place, kind)
    assert max(error(Arithmetic(mistake=Mistake(place, "term", None))) for place in sums) > tolerance
    assert torch.equal(
        *(changed(lambda: run(inputs, 2, "attention", backend="triton"), Arithmetic()) for _ in range(2))
    )


def test_float64_is_left_alone(changed):
    a, b = torch.randn(2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how = Arithmetic(mistake=Mistake("product", "term", None))
    assert torch.equal(changed(lambda: a @ b, how), changed(lambda: a @ b, Arithmetic()))
    assert not how.places


class Item(types.SimpleNamespace):
    """A test that compares a product in float32 with one in float64."""

    def runtest(self):
        a, b = torch.randn(2, 30, 30, generator=torch.Generator().manual_seed(0))
        support.assert_close(a @ b, a.double() @ b.double(), self.tolerance, "product 1")


class InProcess(margins.Runner):
    """Runs such tests without pytest."""

    def run(self, item, following, shift, how):
        self.errors = {}
        arithmetic.use(how)
        with margins.shifted_seeds(shift):
            item.runtest()
        return self.errors


def test_tolerances_that_are_too_tight_or_too_loose_are_found(tmp_path, monkeypatch, changed):
    tests = [Item(nodeid=f"test.py::test[{number}]", tolerance=number) for number in (1e-5, 2e-8, 3.0)]
    job = {"number": 0, "jobs": 1, "deadline": math.inf, "setting": "here", "mistakes": 5, "at": ""}
    # Three cases share nine seeds out among them.
    job["settings"] = [(seed, backwards) for seed in range(9) for backwards in (False, True)]
    for name, measure in (("sweep", margins.Runner.sweep), ("mistakes", margins.Runner.make_mistakes)):
        runner = InProcess(job | {"out": tmp_path / f"{name}.jsonl"})
        monkeypatch.setattr(support, "observe", runner.observe)
        measure(runner, list(tests))
    measured = margins.read_measured(tmp_path)
    assert not measured.failures
    seldom, loose, tight = margins.problems(measured)
    assert tight.startswith("test.py::test[2e-08]: product # is off by")
    assert loose.startswith("test.py::test: product #: none of")
    assert seldom == "test.py::test: 9 seeds; needs 50"
    good = measured.margins["test.py::test[1e-05]", "product #", 1e-5]
    assert good.runs == 6  # three seeds, two orders
    assert 0 < good.worst < 1e-6
    assert good.crossing > 0
    assert good.least > 1000
    assert "product in" in good.by
    code = margins.make_table(argparse.Namespace(folders=[tmp_path], out=tmp_path / "table.tsv", add=False))
    assert code == 1
    rows = margins.read_table(tmp_path / "table.tsv")
    assert [(row["test"], row["seeds"]) for row in rows] == [("test.py::test", "9")] * 3
    # A table of the sweep alone keeps the mistakes of the table before.
    (tmp_path / "mistakes.jsonl").unlink()
    margins.make_table(argparse.Namespace(folders=[tmp_path], out=tmp_path / "table.tsv", add=False))
    columns = ("mistakes", "crossing", "least", "by")
    again = margins.read_table(tmp_path / "table.tsv")
    assert [[row[name] for name in columns] for row in again] == [[row[name] for name in columns] for row in rows]
    # What the folder has is not run again.
    runner = InProcess(job | {"out": tmp_path / "again.jsonl", "settings": [*job["settings"], (9, False)]})
    monkeypatch.setattr(support, "observe", runner.observe)
    runner.sweep(list(tests))
    assert runner.measured.settings == {"test.py::test[1e-05]": {(9, False)}}
    assert margins.read_measured(tmp_path).seeds("test.py::test") == 10
    # Seeds in one order count only as far as there are as many in the other.
    one_sided = {"test.py::test": {(seed, False) for seed in range(9)} | {(0, True)}}
    assert margins.Measured({}, one_sided, Counter()).seeds("test.py::test") == 2


def test_every_row_of_the_table_has_its_margin_and_a_mistake_that_crosses_it():
    rows = margins.read_table()
    assert rows
    for row in rows:
        largest_ratio, fewest_seeds = margins.required(row["test"])
        assert float(row["worst error"]) <= largest_ratio * float(row["tolerance"]), row
        assert int(row["seeds"]) >= fewest_seeds, row
        assert int(row["crossing"]) > 0, row
        assert 1 < float(row["least"]) < math.inf, row


def float32_tests():
    """Tests that name a tolerance for float32 rounding in a comparison, or compare whole runs: as test.py::function."""
    for path in sorted(TESTS.rglob("test_*.py")):
        text = path.read_text()
        if "\npytestmark = pytest.mark.gpu" in text:
            continue
        compares_runs = "\nfrom train.comparison import" in text
        for function in ast.parse(text).body:
            if not isinstance(function, ast.FunctionDef) or not function.name.startswith("test_"):
                continue
            if any("gpu" in ast.unparse(decorator) for decorator in function.decorator_list):
                continue
            for call in ast.walk(function):
                if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
                    continue
                numbers = [x.value for x in call.args if isinstance(x, ast.Constant) and isinstance(x.value, float)]
                named = call.func.id in COMPARISONS and any(x > support.LARGEST_FLOAT64 for x in numbers[-1:])
                if named or (compares_runs and call.func.id == "same"):
                    yield f"{path.relative_to(TESTS.parent).as_posix()}::{function.name}"


def test_the_table_has_every_test_that_names_a_tolerance_for_float32():
    missing = set(float32_tests()) - {row["test"] for row in margins.read_table()}
    assert not missing, "measure them with tools/margins.py, as docs/testing.md says"
