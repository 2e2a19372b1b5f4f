"""Launches find the kernel that Triton would compile for them, and descriptors are those that Triton makes."""

import itertools
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature
from triton.tools.tensor_descriptor import TensorDescriptor

from sympow.kernels import launch as launches
from sympow.kernels.launch import _kinds, blocks_of, ceil_div, launch


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


def kernel(x, size: tl.constexpr):
    pass


@pytest.mark.parametrize("target", [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)])
def test_arguments_of_one_kind_are_of_one_kind_to_triton(monkeypatch, target):
    """And the other way round where it counts: a kind that is finer than Triton's only costs a second entry."""
    jit = JITFunction(kernel)
    bind = create_function_from_signature(jit.signature, jit.params, make_backend(target))
    monkeypatch.setattr(torch.version, "hip", "6.4" if target.backend == "hip" else None)
    memory = torch.zeros(64)
    tensors = [memory, memory[1:], memory[4:], memory.bfloat16(), memory.bfloat16()[1:], memory.double(), memory.int()]
    numbers = [0, 1, 2, 15, 16, 17, 32, 2**31 - 1, 2**31, 2**31 + 16, 2**40, 2**63, 2**63 + 16, -1, -16, -(2**31) - 1]
    described = [blocks_of(x.view(8, 8), [4, 8]) for x in (memory, memory.bfloat16())]
    pairs = [Pair(memory, None), Pair(memory[1:], None), Pair(memory, memory), Pair(memory, memory.int())]
    # Never written, so that the system gives no memory for it.
    tensors.append(torch.empty(2**31, dtype=torch.uint8).view(torch.float32))
    values = [*tensors, *numbers, *described, *pairs, None, True, False, 0.5, 1.0, (memory, 16), (memory, 3)]
    kinds = {}
    for value in values:
        _, specialization, _ = bind(value, size=1)
        kinds.setdefault(_kinds((value,)), []).append(str(specialization[0]))
    assert all(len(set(found)) == 1 for found in kinds.values())
    assert 20 < len(kinds) < len(values)


def add_kernel(x, described, pair, size, nothing, block: tl.constexpr, factor: tl.constexpr = 3):
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(pair[1] + at, factor * tl.load(x + at, mask=at < size) + tl.load(pair[0] + at))


class NoDevice:
    """A driver of Triton that compiles for an H200 and keeps what would be launched."""

    def __init__(self) -> None:
        self.utils = self
        self.launched: list[tuple] = []

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_device_properties(self, device):
        return {"max_shared_mem": 232_448}

    def load_binary(self, name, binary, shared, device):
        return object(), (name, hash(binary)), 0, 0, 1024

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launched.append(arguments)


def test_later_launches_are_those_of_triton():
    """In a process of its own: where Triton's interpreter has run a kernel, Triton compiles none any more."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    same, compared = map(int, done.stdout.split(" of "))
    assert same == compared > 300


def compare_launches():
    driver = NoDevice()
    triton.runtime.driver._active = driver
    torch.cuda.current_device = lambda: 0
    jit = JITFunction(add_kernel)

    def arguments(size):
        x, y, z = (torch.zeros(64) for _ in range(3))
        return x, blocks_of(z.view(8, 8), [4, 8]), Pair(y, z), size, None

    given = [arguments(size) for size in (48, 64, 48, 49, 50, 1, 48)]
    constants = [{"block": 16}, {"block": 16, "factor": 5}, {"block": 16, "num_warps": 2}]
    for each in constants:
        for call in given:
            launch(jit, (2, 3), *call, **each, enable_fp_fusion=True)
    found, driver.launched = driver.launched, []
    for each in constants:
        for call in given:
            jit[(2, 3)](*call, **each, enable_fp_fusion=True)
    assert len(found) == len(given) * len(constants)
    # Triton makes a dictionary for hooks at each launch; all else is the same object, or the same number.
    pairs = [pair for calls in zip(found, driver.launched, strict=True) for pair in zip(*calls, strict=True)]
    same = [got is want or type(got).__name__ == "LazyDict" or got == want for got, want in pairs]
    assert len(launches._COMPILED) == 3 * len(constants)
    print(f"{sum(same)} of {len(same)}")


def test_a_descriptor_is_that_of_triton():
    x = torch.zeros(4, 6, 2, 32).transpose(1, 2)
    for _ in range(2):
        found, expected = blocks_of(x, [1, 1, 4, 32]), TensorDescriptor.from_tensor(x, [1, 1, 4, 32])
        assert type(found) is TensorDescriptor
        for name in ("shape", "strides", "block_shape", "padding"):
            assert list(getattr(found, name)) == list(getattr(expected, name)), name
        assert found.base is x


def test_a_block_that_triton_does_not_support_is_refused():
    for _ in range(2):
        with pytest.raises((ValueError, AssertionError)):
            blocks_of(torch.zeros(8, 8), [3, 8])


def test_quotients_are_rounded_up():
    for size, part in itertools.product(range(20), range(1, 7)):
        assert ceil_div(size, part) == len(range(0, size, part))


if __name__ == "__main__":
    compare_launches()
