"""Compile the kernels for sm_90 without a GPU: registers, stack, shared memory, and whether ptxas serialised a product.

python tests/kernels/sm90.py            a table of all kernels at their default tiles
python tests/kernels/sm90.py NAME FILE  the machine code of one of them, and its loops with their instructions counted
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sympow.kernels.attention_backward import key_gradient_kernel, query_gradient_kernel
from sympow.kernels.attention_forward import forward_kernel
from sympow.kernels.chunk_states import fold_kernel, scan_kernel, update_kernel
from sympow.kernels.decode import _decode_kernel
from sympow.kernels.rotation import _rotate_backward_kernel, _rotate_kernel

BIN = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# Types of pointers other than to the inputs' own dtype.
POINTERS = {
    **dict.fromkeys(
        [
            "weight_ptr",
            "to_end_ptr",
            "from_start_ptr",
            "scale_ptr",
            "minus_delta_ptr",
            "row_term_ptr",
            "column_term_ptr",
            "factor_ptr",
            "kv_ptr",
            "kv_out_ptr",
            "normalizer_ptr",
            "normalizer_out_ptr",
            "log_gamma_ptr",
            "beta_ptr",
        ],
        "*fp32",
    ),
    **dict.fromkeys(
        [
            "sums_ptr",
            "theta_ptr",
            "phase_ptr",
            "phase_out_ptr",
            "start_ptr",
            "d_sums_ptr",
            "d_theta_ptr",
            "d_start_ptr",
        ],
        "*fp64",
    ),
    "index_ptr": "*i16",
}
# Counts that are no multiple of 16 in general; every other integer argument is one in the cases that matter.
UNALIGNED = {"heads", "kv_heads", "slots", "first_entry"}


@dataclass(frozen=True)
class Report:
    registers: int
    stack: int
    shared: int
    products: int
    serialised: bool
    sass: str


def compile_kernel(kernel, blocks, constants, warps, stages, registers=None, dtype="bf16") -> Report:
    """Compiles for sm_90. `blocks`: shape of each descriptor's block, by argument, None for an absent one."""
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or blocks.get(name, ()) is None:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants.get(name)
            continue
        if name in blocks:
            signature[name] = f"tensordesc<{dtype}[{', '.join(map(str, blocks[name]))}]>"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = "i32"
        if name.endswith("_ptr") or (signature[name] == "i32" and name not in UNALIGNED):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs, attributes), target=GPUTarget("cuda", 90, 32), options=options
    )
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = Path(folder, "kernel.cubin"), Path(folder, "kernel.ptx")
        cubin.write_bytes(compiled.asm["cubin"])
        ptx.write_text(compiled.asm["ptx"])
        usage = _run("cuobjdump", "-res-usage", str(cubin)).stdout
        sass = _run("cuobjdump", "-sass", str(cubin)).stdout
        limit = [f"-maxrregcount={registers}"] if registers else []
        notes = _run("ptxas", "-arch=sm_90a", "-v", *limit, str(ptx), "-o", os.devnull).stderr
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    return Report(
        int(found.group(1)), int(found.group(2)), compiled.metadata.shared, sass.count("HGMMA"),
        "serialized" in notes, sass,
    )  # fmt: skip


def _run(tool, *arguments):
    return subprocess.run([f"{BIN}/{tool}", *arguments], capture_output=True, text=True, check=True)


def _tile(rows, columns):
    return [1, 1, rows, columns]


def attention_case(which, rows, columns, warps, stages, registers=None, state=False, d=64, e=64, power=2):
    """Arguments of `compile_kernel` for a kernel that visits tiles of scores."""
    own, other = (rows, columns) if which in ("forward", "query") else (columns, rows)
    blocks = {
        "q_desc": _tile(own, d), "k_desc": _tile(other, d), "v_desc": _tile(other, e), "y_desc": _tile(rows, e),
        "dy_desc": _tile(own, e), "dq_desc": _tile(own, d), "dk_desc": _tile(rows, d), "dv_desc": _tile(rows, e),
        "q_half_desc": _tile(rows, d // 2), "normalizer_desc": [1, d, d],
    }  # fmt: skip
    width = d // 2 if which == "forward" else d
    blocks |= {"low_desc": _tile(e, width), "high_desc": _tile(e, width)}
    if not state:
        blocks |= dict.fromkeys(("q_half_desc", "low_desc", "high_desc", "normalizer_desc"))
    constants = dict(
        GROUP=1, D=d, E=e, POWER=power, GATED=True, PRECISION="tf32", ROWS=rows, COLUMNS=columns, STAGES=stages
    )
    kernel = {"forward": forward_kernel, "query": query_gradient_kernel, "key": key_gradient_kernel}[which]
    optional = {"WITH_STATE": state, "HIGH_COLUMN": 0}
    constants |= {name: value for name, value in optional.items() if name in kernel.arg_names}
    return kernel, blocks, constants, warps, stages, registers


def update_case(entries, columns, d=64, e=64, tokens=64, stages=3):
    blocks = {
        "x_desc": _tile(tokens, columns), "y_desc": _tile(tokens, e), "transposed_desc": [1, tokens],
        "out_desc": _tile(e, columns),
    }  # fmt: skip
    constants = {
        "GROUP": 1, "D": d, "E": e, "COLUMNS": columns, "ENTRIES": entries, "REVERSE": False, "PRECISION": "tf32",
        "TOKENS": tokens, "STAGES": stages,
    }  # fmt: skip
    return update_kernel, blocks, constants, 4, stages


DECODE = dict(
    GROUP=1, POWER=2, DIM=64, GATED=True, ROTATED=True, SCALED=True, PER_PAIR=False, ROWS=64, COLUMNS=32
)  # fmt: skip
ROTATION = dict(
    GROUP=1, PAIRS=32, BLOCK_PAIRS=32, PER_PAIR=False, FIXED=False, STARTED=False, TOKENS=32
)  # fmt: skip
CASES = {
    "attention forward p=2": attention_case("forward", 128, 64, 4, 3),
    "attention forward p=4": attention_case("forward", 128, 64, 4, 3, power=4),
    "chunked forward": attention_case("forward", 128, 64, 4, 3, state=True),
    "query gradient": attention_case("query", 128, 64, 8, 3, 128),
    "query gradient, chunked": attention_case("query", 128, 64, 8, 3, 128, state=True),
    "key gradient": attention_case("key", 64, 64, 4, 3),
    "key gradient, chunked": attention_case("key", 64, 64, 4, 3, state=True),
    "update, low": update_case(2, 64),
    "update, high": update_case(4, 32),
    "fold": (
        fold_kernel, {"x_desc": _tile(64, 64)},
        dict(GROUP=1, D=64, GATED=True, REVERSE=False, PRECISION="tf32", TOKENS=64), 4, 3,
    ),
    "scan": (scan_kernel, {}, dict(GATED=True, REVERSE=False, BLOCK=1024), 4, 3),
    "rotation": (_rotate_kernel, {}, ROTATION, 4, 3),
    "rotation, backward": (_rotate_backward_kernel, {}, ROTATION, 4, 3),
    "decode": (_decode_kernel, {}, DECODE, 4, 3),
}  # fmt: skip


def loops(sass: str) -> list[tuple[int, Counter]]:
    """Length and instructions of each loop, innermost first."""
    code = [(int(m.group(1), 16), m.group(2)) for m in re.finditer(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", sass, re.M)]
    found = []
    for address, text in code:
        jump = re.search(r"BRA\S*.*?0x([0-9a-f]+)", text)
        if jump and (start := int(jump.group(1), 16)) < address:
            body = [t for a, t in code if start <= a <= address]
            found.append((len(body), Counter(re.sub(r"^@!?U?P\w+ ", "", t).split()[0].split(".")[0] for t in body)))
    return sorted(found, key=lambda item: item[0])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        report = compile_kernel(*CASES[sys.argv[1]])
        Path(sys.argv[2]).write_text(report.sass)
        for length, counts in loops(report.sass):
            print(length, dict(counts.most_common(16)))
    else:
        for name, case in CASES.items():
            r = compile_kernel(*case)
            print(f"{name:26} registers {r.registers:3} stack {r.stack:4} shared {r.shared:6} wgmma {r.products:3}"
                  f"{'  SERIALISED' if r.serialised else ''}", flush=True)  # fmt: skip
