"""Releases of Triton: which of them run the Hopper kernels, and that results do not depend on their defaults."""

import ast
import importlib
import sys
import warnings
from pathlib import Path

import pytest
import torch

import sympow
from support import forget_devices

triton = pytest.importorskip("triton", reason="needs Triton")

HALF = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)
KERNELS = Path(sympow.__file__).parent / "kernels"


@pytest.fixture
def hopper_with(monkeypatch):
    """`sympow.kernels.hopper` as imported with a release of Triton, with a Hopper GPU and without Gluon."""

    def load(version):
        for name in [name for name in sys.modules if name.startswith("sympow.kernels.hopper")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        forget_devices()
        return importlib.import_module("sympow.kernels.hopper")

    yield load
    forget_devices()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"])
def test_releases_that_compile_the_hopper_kernels_use_them(hopper_with, version):
    assert hopper_with(version).supports(HALF, HALF, HALF)


def test_other_releases_are_told_once_what_they_lose(hopper_with):
    hopper = hopper_with("9.9.0")
    with pytest.warns(UserWarning, match=r"not used with Triton 9\.9\.0.*3\.6\.x.*8 to 15 % longer"):
        assert not hopper.supports(HALF, HALF, HALF)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hopper.supports(HALF, HALF, HALF)


def test_calls_that_the_hopper_kernels_never_take_bring_no_warning(hopper_with):
    hopper = hopper_with("9.9.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hopper.supports(HALF.float(), HALF.float(), HALF.float())


def test_every_launch_says_whether_products_and_sums_are_fused():
    # The default depends on the release: fused up to Triton 3.9, which announces the opposite for 3.10.
    launches = [
        (path.name, call.lineno, [keyword.arg for keyword in call.keywords])
        for path in KERNELS.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "launch"
    ]
    assert len(launches) > 30
    assert not [launch[:2] for launch in launches if "enable_fp_fusion" not in launch[2]]
    assert not [path.name for path in KERNELS.rglob("*.py") if "_kernel[" in path.read_text()]
