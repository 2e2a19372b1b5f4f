"""Every kernel compiles for Hopper, uses its matrix instructions, and does not spill much."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton")

pytestmark = pytest.mark.slow
TOOL = Path(__file__).parent / "sm90.py"


@pytest.fixture(scope="module")
def table():
    # In a separate process, since kernels cannot be compiled with TRITON_INTERPRET=1.
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    tool = subprocess.run([sys.executable, str(TOOL)], env=environment, capture_output=True, text=True)
    assert tool.stdout, tool.stderr
    return tool.stdout.splitlines()


def test_every_kernel_compiles(table):
    assert len(table) > 50
    assert [line for line in table if "FAILED" in line] == []


def test_no_product_is_serialized(table):
    # With heads of 128 the state's query leaves no registers for two products in flight.
    serialized = [line for line in table if "SERIALIZED" in line]
    # float32 by tf32 has no speed to lose: its loops wait for the splitting of operands.
    assert all(line.startswith(("chunked forward, wide", "float32")) for line in serialized)


def test_spills_are_few(table):
    # The chunked forward kernel and the query gradient keep some values on the stack, outside their inner loops. In
    # float16 so do the diagonals. With a gate per pair and heads of 128 there are too few registers for the gradients,
    # and operands of float32 by tf32 do not fit in registers at all.
    wide = ("pairs query gradient, wide", "pairs key gradient, wide")
    stack = {line[:36].strip(): int(line.split("stack")[1].split()[0]) for line in table}
    most = {name: 640 if name in wide else 400 if name.startswith(("float16", "pieces")) else 224 for name in stack}
    assert {name: size for name, size in stack.items() if size > most[name] and not name.startswith("float32")} == {}


def test_products_use_the_matrix_units(table):
    without = ("scan", "rotation", "decode", "pack", "unpack", "range", "float16 scan", "float32 scan")
    assert all(int(line.split("wgmma")[1].split()[0]) > 0 for line in table if not line.startswith(without))


def test_loops_wait_for_products_before_their_operands_are_made_again(table):
    # The miscompilation that `common.wait_for_mma` prevents. In the attention kernels a product is in flight across the
    # main loop's back edge, but the loop then waits for the scores, hence for both products, before it computes the
    # next operand. One kernel has two such loops.
    carried = {line[:36].strip(): int(line.split("carried")[1].split()[0]) for line in table}
    attention = ("attention forward", "chunked forward", "query gradient", "key gradient")
    starts = (*attention, *(f"float16 {name}" for name in attention))
    most = {name: (2 if "query blocks" in name else 1) if name.startswith(starts) else 0 for name in carried}
    assert {name: count for name, count in carried.items() if count > most[name]} == {}
