"""`sympow check`: its references are right, it passes on a working installation, and fails on a broken kernel."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from support import FORMS, random_inputs, run_reference
from sympow.check import accuracy, installation
from sympow.check.accuracy import plain_attention, plain_softmax_attention
from sympow.cli.app import app
from sympow.ops import dispatch as ops_dispatch
from sympow.ops.interface import attention

PORTABLE = accuracy.Machine("cpu", "torch", torch.float32, length=40, dim=8, seed=0)


@pytest.mark.parametrize("power", [2, 4])
@pytest.mark.parametrize(
    ("gate", "rotation"), [("none", "none"), ("scalar", "fixed"), ("scalar", "scale"), ("scalar", "pairs")]
)
def test_the_plain_formula_is_the_papers(power, gate, rotation):
    inputs = random_inputs(0, length=7, heads=4, key_heads=2, gate=gate, rotation=rotation)
    found = plain_attention(**inputs.arguments(), power=power)
    assert torch.allclose(found, run_reference(inputs, power), atol=1e-12, rtol=1e-12)


def test_the_plain_formula_keeps_packed_documents_apart():
    inputs = random_inputs(1, length=9)
    packed = plain_attention(**inputs.arguments(), power=2, documents=(2, 7))
    alone = [run_reference(inputs.time(*part), 2) for part in ((0, 2), (2, 9))]
    assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-12, rtol=1e-12)


def test_the_plain_formula_of_softmax():
    inputs = random_inputs(2, length=6, gate="none", rotation="none")
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    assert torch.allclose(plain_softmax_attention(inputs.q, inputs.k, inputs.v), expected, atol=1e-12, rtol=1e-12)


@pytest.fixture
def without_interpreter(monkeypatch):
    """Runs the portable forms, as on a CPU without TRITON_INTERPRET=1, since the interpreter takes minutes."""
    for module in (accuracy, ops_dispatch):
        monkeypatch.setattr(module, "triton_interpreted", lambda: False)


@pytest.mark.slow
@pytest.mark.usefixtures("without_interpreter")
def test_everything_passes_here():
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--no-timing", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["passed"]
    assert found["timing"] == []
    assert found["installation"]["torch"] == torch.__version__
    assert {form for form in FORMS if any(form in case["name"] for case in found["accuracy"])} == set(FORMS)
    assert all(case["passed"] and 0 < case["error"] <= case["bar"] for case in found["accuracy"])


def with_gates_off_by_one(*arguments, log_gamma=None, **options):
    if log_gamma is not None:
        log_gamma = log_gamma.roll(1, dims=1)
    return attention(*arguments, log_gamma=log_gamma, **options)


def without_one_key(q, k, v, **options):
    k = torch.cat([k[:, :3], 0 * k[:, 3:4], k[:, 4:]], dim=1)
    return attention(q, k, v, **options)


@pytest.mark.parametrize("mistake", [with_gates_off_by_one, without_one_key])
@pytest.mark.parametrize("form", FORMS)
def test_a_mistake_is_found(monkeypatch, mistake, form):
    case = accuracy.OperatorCall(form)
    assert case.compare(PORTABLE).outcome("right", 1e-5).passed
    monkeypatch.setattr(accuracy, "attention", mistake)
    assert not case.compare(PORTABLE).outcome("wrong", 1e-5).passed


def test_a_seed_that_no_generator_takes_is_refused_before_anything_is_printed():
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--no-timing", "--seed", str(2**64)])
    assert result.exit_code == 2
    assert "--seed must be at most 18,446,744,073,709,551,615" in " ".join(result.output.split())
    assert result.stdout == ""


@pytest.mark.usefixtures("without_interpreter")
@pytest.mark.slow
def test_a_failure_is_the_exit_code(monkeypatch):
    monkeypatch.setattr(accuracy, "attention", with_gates_off_by_one)
    result = CliRunner().invoke(app, ["check", "--device", "cpu", "--no-timing"])
    assert result.exit_code == 1
    assert "FAILED attention form, p = 2" in result.stderr


def test_a_kernel_that_cannot_be_launched_fails_with_its_message(monkeypatch):
    def launch(*arguments, **options):
        raise RuntimeError("out of shared memory\nand more about it")

    monkeypatch.setattr(accuracy, "attention", launch)
    outcomes = list(accuracy.check_accuracy(PORTABLE))
    failed = [outcome for outcome in outcomes if not outcome.passed]
    assert failed
    assert all(outcome.problem == "RuntimeError: out of shared memory" for outcome in failed)
    assert any(outcome.passed for outcome in outcomes), "what does not call it is checked all the same"


def test_numbers_that_are_not_finite_fail():
    exact = {"y": torch.ones(3, dtype=torch.float64)}
    found = accuracy.Comparison({"y": torch.tensor([1.0, torch.nan, 1.0])}, exact, {"y": torch.ones(3)})
    assert not found.outcome("y", 1e-5).passed


def test_the_extras_are_those_of_the_project():
    """Without extras that only name other extras, and those that no function of the package needs."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    for extra, packages in installation.EXTRAS.items():
        named = [re.match(r"[\w-]+", text)[0] for text in project["optional-dependencies"][extra]]
        assert [name for name in named if name != project["name"]] == list(packages)
    others = project["optional-dependencies"].keys() - installation.EXTRAS.keys()
    assert others == {"all", "dev", "docs", "wandb"}


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(installation, "EXTRAS", {"data": ("numpy", "no-such-package"), "cli": ("numpy",)})
    assert installation.describe_installation("cpu")["missing"] == "data (no-such-package)"


@pytest.mark.usefixtures("without_interpreter")
def test_calls_that_no_kernel_serves_say_why():
    assert all(route.served_by == "PyTorch" and route.reason for route in installation.routes("cpu"))


def test_what_serves_a_call_on_a_gpu_without_triton(monkeypatch):
    monkeypatch.setattr(ops_dispatch, "triton_available", lambda: False)
    monkeypatch.setattr(ops_dispatch, "triton_interpreted", lambda: False)
    served = {route.call: route for route in installation.routes("cuda")}
    assert served["bfloat16, p = 2, heads of 64"].reason.startswith("Triton is not installed")
    assert "not torch.float64" in served["float64, p = 2, heads of 64"].reason
    assert served["bfloat16, p = 2, one gate per rotated pair"].reason.startswith("Triton is not installed")


def test_what_serves_a_call_on_a_gpu_that_is_no_hopper(monkeypatch):
    monkeypatch.setattr(ops_dispatch, "triton_available", lambda: True)
    monkeypatch.setattr(ops_dispatch, "triton_interpreted", lambda: False)
    monkeypatch.setattr(installation, "_engine_name", lambda request: "Triton kernels")
    served = {route.call: route for route in installation.routes("cuda")}
    assert served["bfloat16, p = 2, heads of 64"] == replace(
        served["bfloat16, p = 2, heads of 128"], call="bfloat16, p = 2, heads of 64"
    )
    assert served["bfloat16, p = 2, heads of 64"].served_by == "Triton kernels"
    assert served["bfloat16, p = 6, heads of 64"].reason.startswith("Powers above 4 run on")


COVERAGE = """
import inspect, pkgutil, importlib
import torch
from triton.runtime.interpreter import GridExecutor, InterpretedFunction
import sympow.kernels
from sympow.check.accuracy import Machine, check_accuracy

launched = set()
# Counts a launch instead of interpreting it, which would take minutes; what kernels compute has tests of its own.
GridExecutor.__call__ = lambda self, *_, **__: launched.add((self.fn.__module__, self.fn.__name__))
list(check_accuracy(Machine.find("cpu")))
for module in pkgutil.walk_packages(sympow.kernels.__path__, "sympow.kernels."):
    if not module.ispkg and "hopper" not in module.name:
        for name, kernel in vars(importlib.import_module(module.name)).items():
            own = isinstance(kernel, InterpretedFunction) and kernel.fn.__module__ == module.name
            if own and name.endswith("_kernel") and (module.name, name) not in launched:
                print(module.name, name)
"""


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches in Triton's interpreter, without a GPU")
def test_every_kernel_is_checked():
    """Covers the portable kernels; those in Gluon, for Hopper, have no interpreter."""
    pytest.importorskip("triton", reason="needs Triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    found = subprocess.run([sys.executable, "-c", COVERAGE], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout == "", "kernels that no check launches"
