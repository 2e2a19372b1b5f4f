"""Releases of Triton: which of them run the Hopper kernels, and that results do not depend on their defaults."""

import ast
import sys
import warnings
from pathlib import Path

import pytest
import torch

import sympow
from support import forget_devices

pytest.importorskip("triton", reason="needs Triton")

import triton

from sympow.kernels.attention import engines

HALF = engines.Call(torch.device("cuda"), torch.bfloat16, 64, 64, 100, 2, 0, False, (1, 0), None)
KERNELS = Path(sympow.__file__).parent / "kernels"


@pytest.fixture
def name_with(monkeypatch):
    """Names the engine that serves a call on a Hopper GPU with a release of Triton, without Gluon."""

    def forget():
        forget_devices()
        engines._compiled_by_this_release.cache_clear()

    def prepare(version):
        for name in [name for name in sys.modules if name.startswith("sympow.kernels.hopper")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        forget()
        return lambda call: engines.engine_for(call).name

    yield prepare
    forget()


@pytest.mark.parametrize("version", ["3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0"])
def test_releases_that_compile_the_hopper_kernels_use_them(name_with, version):
    assert name_with(version)(HALF) == "Hopper kernels"


def test_other_releases_are_told_once_what_they_lose(name_with):
    name = name_with("9.9.0")
    with pytest.warns(UserWarning, match=r"not used with Triton 9\.9\.0.*3\.6\.x.*8 to 15 % longer"):
        assert name(HALF) == "Triton kernels"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name(HALF) == "Triton kernels"


def test_calls_that_the_hopper_kernels_never_take_bring_no_warning(name_with):
    name = name_with("9.9.0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert name(HALF._replace(dtype=torch.float32)) == "Triton kernels"


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
