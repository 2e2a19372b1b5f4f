"""Tiles follow the limits of a GPU, and what is for Hopper runs on Hopper alone. Devices are faked."""

import ast
import importlib
import pkgutil
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime import KernelInterface

import sympow.kernels
from support import forget_devices
from sympow.kernels import common, hopper
from sympow.kernels.attention import tiles as attention_tiles
from sympow.kernels.attention.op import fused_attention
from sympow.kernels.device_limits import H200, KIB, Limits, device_limits, first_fitting, limits_of, register_limit
from sympow.kernels.pair_gates import op as pair_op
from sympow.kernels.pair_gates.op import fused_pair_attention
from sympow.kernels.states import quartic_features

HOPPER_MODULES = [info.name for info in pkgutil.iter_modules(hopper.__path__, "sympow.kernels.hopper.")]
# Compute capability, KiB of shared memory of a CTA, and whether it is AMD's, whose capabilities are other numbers.
OTHERS = {
    "A100": (8, 0, 163, False),
    "RTX 3090": (8, 6, 99, False),
    "L40S": (8, 9, 99, False),
    "B200": (10, 0, 227, False),
    "B300": (10, 3, 227, False),
    "Thor": (11, 0, 227, False),
    "RTX 5090": (12, 0, 99, False),
    "GB10": (12, 1, 99, False),
    "MI250": (9, 0, 64, True),
    "MI300X": (9, 4, 64, True),
}


@pytest.fixture
def fake(monkeypatch):
    """Makes torch report a GPU."""

    def fake(major, minor, kib, amd):
        properties = SimpleNamespace(major=major, minor=minor, shared_memory_per_block=48 * KIB)
        if amd:  # has no opt-in
            properties.shared_memory_per_block = kib * KIB
        else:
            properties.shared_memory_per_block_optin = kib * KIB
        monkeypatch.setattr(torch.version, "hip", "6.4" if amd else None)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
        forget_devices()

    yield fake
    forget_devices()


@cache
def portable_kernels():
    """Module and name of every kernel that a module launches, except those for Hopper."""
    found = set()
    for info in pkgutil.walk_packages(sympow.kernels.__path__, "sympow.kernels."):
        if info.name in HOPPER_MODULES:
            continue
        module = importlib.import_module(info.name)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "launch":
                name = getattr(node.args[0], "id", "")
                if isinstance(getattr(module, name, None), KernelInterface):
                    found.add((module, name))
    return found


@pytest.fixture
def launches(monkeypatch):
    """Names and options of kernels that are launched, which compute nothing.

    Tensors seem to be on a GPU, and the modules of kernels for Hopper cannot be imported.
    """
    found = []

    def record(name):
        class Recorder:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: found.append((name, kwargs))

        return Recorder()

    for module, name in portable_kernels():
        monkeypatch.setattr(module, name, record(name))
    for name in HOPPER_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delattr(hopper, name.rpartition(".")[2], raising=False)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    return found


def attend(dim, chunk):
    """Forward and backward pass of a call that the kernels for Hopper support."""
    q, k, v = (torch.zeros(1, 256, 2, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    log_gamma = torch.zeros(1, 256, 2, requires_grad=True)
    y, *_ = fused_attention(q, k, v, log_gamma, None, None, None, None, 2, chunk, dim, chunk > 0, True, False)
    y.sum().backward()


def attend_with_pair_gates(dim, chunk):
    q, k, v = (torch.zeros(1, 256, 2, dim, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    log_gamma = torch.zeros(1, 256, 2, dim // 2, requires_grad=True)
    y, *_ = fused_pair_attention(q, k, v, log_gamma, None, None, 2, chunk, True)
    y.sum().backward()


@pytest.mark.parametrize("name", OTHERS)
def test_float32_products_are_those_that_a_gpu_has(fake, name):
    fake(*OTHERS[name])
    assert common.dot_precision(torch.float32) == ("ieee" if OTHERS[name][-1] else "tf32x3")


@pytest.mark.parametrize("name", OTHERS)
def test_nothing_for_hopper_is_reached_on_another_gpu(fake, launches, name):
    fake(*OTHERS[name])
    for call in (attend, attend_with_pair_gates):
        for dim, chunk in ((64, 0), (128, 0), (128, 128)):
            call(dim, chunk)
    kernels = {kernel for kernel, _ in launches}
    assert {"forward_kernel", "query_gradient_kernel", "key_gradient_kernel", "update_kernel"} <= kernels
    if OTHERS[name][-1]:
        assert not any("maxnreg" in options for _, options in launches)


@pytest.mark.parametrize(("dim", "chunk"), [(64, 0), (128, 0), (128, 128)])
def test_on_hopper_it_is_reached(fake, launches, dim, chunk):
    fake(9, 0, 227, False)
    with pytest.raises(ImportError, match="hopper"):
        attend(dim, chunk)


def test_limits_are_those_that_torch_reports(fake):
    fake(*OTHERS["L40S"])
    assert device_limits(0) == Limits(101_376, "mma")
    fake(*OTHERS["MI300X"])
    assert device_limits(0) == Limits(65_536, "mfma")
    fake(*OTHERS["B200"])
    assert device_limits(0) == Limits(232_448, "tcgen05")
    fake(9, 0, 227, False)
    assert device_limits(0) == H200 == limits_of(torch.zeros(1))


def chosen(limits):
    """The tiles of all tables; of float32 those for heads of up to 64, above which only Hopper has any."""
    tables = (attention_tiles.choose_tiles, pair_op.choose_pair_tiles)
    quartic = [(dim, value_dim) for dim in (16, 32) for value_dim in (16, 32, 64, 128)]
    return [
        *(choose(dim, limits) for choose in tables for dim in (16, 64, 80, 128)),
        *(quartic_features.quartic_tiles_for(*dims, limits) for dims in quartic),
        *(attention_tiles.choose_tiles(dim, limits, torch.float32) for dim in (16, 64)),
        *(quartic_features.quartic_tiles_for(*dims, limits, torch.float32) for dims in quartic if dims[1] <= 64),
        first_fitting(attention_tiles.FLOAT32_PIECES, limits),
    ]


@pytest.mark.parametrize(
    ("kib", "instructions"),
    [(64, "mfma"), (160, "mfma"), (99, "mma"), (100, "mma"), (163, "mma"), (227, "wgmma"), (227, "tcgen05")],
)
def test_tiles_suit_the_gpu(kib, instructions):
    for tiles in chosen(Limits(kib * KIB, instructions)):
        assert tiles.shared_memory <= kib * KIB
        assert instructions in ("wgmma", "tcgen05") or not tiles.asynchronous
        assert tiles.instructions in (None, instructions)


def test_an_h200_has_the_tiles_that_were_measured_on_it():
    narrow, wide = (attention_tiles.choose_tiles(dim, H200) for dim in (64, 128))
    assert (narrow.states, narrow.forward, narrow.query, narrow.key) == ({}, {}, {}, {})
    assert wide.states == {"entries": 1, "stages": 2}
    assert wide.forward == {"warps": 8, "stages": 2}
    assert wide.query == {"rows": 64, "warps": 4, "stages": 2, "registers": None}
    assert wide.key == {"rows": 64, "warps": 8, "stages": 2}
    narrow, wide = (pair_op.choose_pair_tiles(dim, H200) for dim in (64, 128))
    assert (narrow.states, narrow.forward, narrow.query, narrow.key) == ({}, {}, {"registers": 168}, {})
    assert (wide.states, wide.forward) == ({"entries": 1, "stages": 2}, {"warps": 8, "stages": 2})
    assert (wide.query, wide.key) == ({"rows": 128, "warps": 8}, {})
    assert [quartic_features.quartic_tiles_for(*dims, H200).width for dims in ((16, 16), (32, 64), (32, 128))] == [
        128,
        256,
        128,
    ]
    assert quartic_features.quartic_tiles_for(16, 16, H200).outer == {"warps": 8, "registers": 128}
    narrow, wide = (attention_tiles.choose_tiles(dim, H200, torch.float32) for dim in (64, 128))
    assert (narrow.states, narrow.forward) == ({"entries": 1, "stages": 2}, {"warps": 8, "stages": 2})
    assert (narrow.query, narrow.key) == ({"warps": 8, "stages": 2, "registers": None}, {"warps": 8, "stages": 2})
    assert wide.states == {"entries": 1, "stages": 1, "warps": 8}
    assert wide.forward == wide.key == {"rows": 64, "warps": 8, "stages": 1}
    assert register_limit(128) == {"maxnreg": 128}
    assert register_limit(None) == {}


def test_a_gpu_with_too_little_shared_memory_is_told_before_a_launch():
    with pytest.raises(ValueError, match=r"need 64 KiB of shared memory for a CTA, and the GPU has 48 KiB: pass back"):
        first_fitting(attention_tiles.WIDE, Limits(48 * KIB, "wgmma"))
