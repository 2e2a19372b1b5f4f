"""Compiles the kernels for sm_90 without a GPU: registers, stack, shared memory, and whether ptxas serialized wgmma.

TRITON_INTERPRET must not be 1. `releases.py` runs this with every supported release of Triton.

python tests/kernels/sm90.py            a table of all kernels at their default tiles
python tests/kernels/sm90.py --all      the same with variants that differ little from others, or take the longest
python tests/kernels/sm90.py NAME FILE  the machine code of one of them, and its loops with their instructions counted
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from sympow.kernels import float16_range
from sympow.kernels.attention import split_float32
from sympow.kernels.attention.backward import key_gradient_kernel, query_gradient_kernel
from sympow.kernels.attention.forward import forward_kernel
from sympow.kernels.attention.tiles import FLOAT32_PIECES
from sympow.kernels.decode import state_step
from sympow.kernels.decode.gate_projection import step_gates_kernel
from sympow.kernels.decode.softmax_step import softmax_step_kernel
from sympow.kernels.decode.state_step import step_kernel
from sympow.kernels.decode.window_step import fold_window_kernel
from sympow.kernels.device_limits import H200, first_fitting
from sympow.kernels.hopper import backward as hopper_backward
from sympow.kernels.hopper import decayed, short_backward, short_forward
from sympow.kernels.hopper import forward as hopper_forward
from sympow.kernels.hopper import states as hopper_states
from sympow.kernels.pair_gates import backward as pair_backward
from sympow.kernels.pair_gates import decays as pair_decays
from sympow.kernels.pair_gates import forward as pair_forward
from sympow.kernels.pair_gates import neighbours as pair_neighbours
from sympow.kernels.pair_gates.gate_gradient import gate_gradient_kernel
from sympow.kernels.pair_gates.states import scan_pairs_kernel
from sympow.kernels.rotary import _rotate_backward_kernel, _rotate_kernel
from sympow.kernels.running_sums import _correct_drift_kernel, _scan_kernel
from sympow.kernels.states.message_packing import pack_kernel, unpack_kernel
from sympow.kernels.states.quadratic import (
    TRANSPOSE_REGISTERS,
    decay_and_transpose_kernel,
    scan_kernel,
    scan_scales,
    update_kernel,
)
from sympow.kernels.states.quartic import quartic_scan_kernel, quartic_update_kernel
from sympow.kernels.states.quartic_query import inner_gradient_kernel, outer_gradient_kernel, query_kernel

# ptxas reports only when it compiles a kernel, so Triton's cache must be empty.
triton.knobs.compilation.always_compile = True
triton.knobs.nvidia.dump_ptxas_log = True
# Pointer arguments whose type differs from the dtype of the inputs.
POINTERS = {
    **dict.fromkeys(
        [
            "denominator_ptr",
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
            "state_share_ptr",
            "rest_ptr",
            "block_terms_ptr",
            "beta_ptr",
            "keys_ptr",
            "vectors_ptr",
            "partial_ptr",
            "totals_ptr",
            "feature_weights_ptr",
            "weight_ptr",
            "product_ptr",
            "message_ptr",
            "messages_ptr",
            "from_state_ptr",
            "dq_from_state_ptr",
            "dk_from_later_ptr",
            "dv_from_later_ptr",
            "out_ptr",
            "bound_ptr",
            "length_ptr",
            "q_length_ptr",
            "parts_ptr",
            "initial_ptr",
            "d_final_ptr",
            "delta_ptr",
            "factored_delta_ptr",
            "d_denominator_ptr",
            "scales_ptr",
            "key_scales_ptr",
            "state_scale_ptr",
            "other_scales_ptr",
        ],
        "*fp32",
    ),
    **dict.fromkeys(
        [
            "gate_sums_ptr",
            "suffix_sums_ptr",
            "beta_sums_ptr",
            "held_decay_ptr",
            "theta_ptr",
            "phase_ptr",
            "phase_out_ptr",
            "start_ptr",
            "d_beta_sums_ptr",
            "d_theta_ptr",
            "d_start_ptr",
            "relative_ptr",
        ],
        "*fp64",
    ),
    "whole_ptr": "*i32",
    **dict.fromkeys(["copy_ptr", "token_scale_ptr"], "*fp16"),
    **dict.fromkeys(["pairs_ptr", "count_ptr", "arrivals_ptr"], "*i32"),
    **dict.fromkeys(["document_start_ptr", "document_end_ptr"], "*i32"),
}
# Arguments that are NamedTuples: the type of each member; "constexpr" for a member that is None.
TUPLES = {
    "xs": ("*fp32",) * 3,
    "outs": ("*bf16",) * 3,
    "begins": ("*fp32",) * 3,
    "ends": ("*fp32",) * 3,
    "others": ("*bf16",) * 3,
    "sizes": ("i32",) * 3,
    "start_strides": ("i32",) * 3,
    "end_strides": ("i32",) * 3,
}
# Integer arguments that need not be multiples of 16. All others are, in the cases that matter.
UNALIGNED = {
    "splits",
    "window_splits",
    "heads",
    "kv_heads",
    "chunk_count",
    "wide_tiles",
    "state_count",
    "first_entry",
    "first_boundary",
    "first_chunk",
    "first_state",
    "first",
    "nearest",
    "count",
    "numbers",
    "programs",
}


@dataclass(frozen=True)
class Report:
    registers: int
    stack: int
    shared: int
    products: int
    serialized: bool
    carried: int
    sass: str


def compile_kernel(
    kernel, blocks, constants, warps, stages, registers=None, dtype="bf16", fusion=True, tuples=None, disassemble=False
) -> Report:
    """Compiles for sm_90.

    Args:
        blocks: shape of each descriptor's block, by argument, or its dtype and shape; None for an absent one.
        tuples: types of the arguments that are NamedTuples; None: `TUPLES`.
    """
    signature, constexprs, attributes = {}, {}, {}
    in_gluon = isinstance(kernel, GluonJITFunction)
    for index, name in enumerate(kernel.arg_names):
        if name in constants or blocks.get(name, ()) is None:
            signature[name] = "constexpr"
            constexprs[(index,)] = constants.get(name)
            continue
        if name in blocks:
            given, block = blocks[name] if isinstance(blocks[name], tuple) else (dtype, list(blocks[name]))
            layout = f",{gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16)!r}" if in_gluon else ""
            signature[name] = f"tensordesc<{given}{block}{layout}>"
        elif name in (tuples or TUPLES):
            signature[name] = fields = (tuples or TUPLES)[name]
            names = getattr(fields, "_fields", (name,) * len(fields))
            for n, (field, kind) in enumerate(zip(names, fields, strict=True)):
                if kind == "constexpr":
                    constexprs[(index, n)] = None
                elif kind.startswith("*") or field not in UNALIGNED:
                    attributes[(index, n)] = [["tt.divisibility", 16]]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, f"*{dtype}")
        else:
            signature[name] = "i32"
        if name.endswith("_ptr") or (signature[name] == "i32" and name not in UNALIGNED):
            attributes[(index,)] = [["tt.divisibility", 16]]
    options = {"num_warps": warps, "enable_fp_fusion": fusion} | ({"maxnreg": registers} if registers else {})
    options |= {} if in_gluon else {"num_stages": stages}
    source = (GluonASTSource if in_gluon else ASTSource)(kernel, signature, constexprs, attributes)
    log = io.StringIO()
    with redirect_stdout(log):
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    notes = log.getvalue()
    return Report(
        int(re.search(r"Used (\d+) registers", notes).group(1)), int(re.search(r"(\d+) bytes stack", notes).group(1)),
        compiled.metadata.shared, compiled.asm["ptx"].count("wgmma.mma_async"), "serialized" in notes,
        carried(compiled.asm["ptx"]), _disassembled(compiled.asm["cubin"]) if disassemble else "",
    )  # fmt: skip


def carried(ptx: str) -> int:
    """The number of loops whose back edge is crossed by a wgmma in flight that reads its left operand from registers.

    These registers must not be written before the wgmma is done. A loop that computes the next operand first has to
    wait at its end (`common.wait_for_mma`); one that first waits for another product, as in attention, need not.
    """
    lines, labels, found = ptx.splitlines(), {}, 0
    for end, line in enumerate(lines):
        if label := re.match(r"(\$L__BB\w+):", line):
            labels[label.group(1)] = end
        jump = re.search(r"\bbra(?:\.uni)?\s+(\$L__BB\w+);", line)
        if jump and jump.group(1) in labels:
            body = lines[labels[jump.group(1)] : end]
            last = max((n for n, text in enumerate(body) if re.search(r"wgmma\.mma_async.*\}, \{", text)), default=None)
            if last is not None and not any("wgmma.wait_group.sync.aligned 0;" in text for text in body[last:]):
                found += 1
    return found


def _disassembled(cubin: bytes) -> str:
    tool = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def _tile(rows, columns):
    return [1, 1, rows, columns]


# Where float16 kernels find the scales of states and of their gradients.
OF_KEYS = float16_range.KeyRange(None, None).of_states
OF_GRADIENTS = float16_range.RowGradients(*[None] * 7).of_states


def attention_case(
    which, rows, columns, warps, stages, registers=None, state=False, d=64, e=64, power=2, documents=False,
    block_terms=False, high=None, dtype="bf16",
):  # fmt: skip
    """Arguments of `compile_kernel` for a kernel that visits tiles of scores."""
    own, other = (rows, columns) if which in ("forward", "query") else (columns, rows)
    blocks = {
        "q_desc": _tile(own, d), "k_desc": _tile(other, d), "v_desc": _tile(other, e), "y_desc": _tile(rows, e),
        "dy_desc": _tile(own, e), "dq_desc": _tile(own, d), "dk_desc": _tile(rows, d), "dv_desc": _tile(rows, e),
        "q_half_desc": _tile(rows, d // 2), "normalizer_desc": [1, d, d],
    }  # fmt: skip
    width = d // 2 if which == "forward" else d
    blocks |= {"first_half_desc": _tile(e, width), "second_half_desc": _tile(e, width)}
    if not state:
        blocks |= dict.fromkeys(("q_half_desc", "first_half_desc", "second_half_desc", "normalizer_desc"))
    constants = dict(
        GROUP=1, D=d, E=e, POWER=power, GATED=True, PRECISION="tf32x3" if dtype == "fp32" else "tf32", ROWS=rows,
        COLUMNS=columns, STAGES=stages, FLOAT16=dtype == "fp16",
    )  # fmt: skip
    kernel = {"forward": forward_kernel, "query": query_gradient_kernel, "key": key_gradient_kernel}[which]
    optional = {"WITH_STATE": state, "SECOND_HALF": high or d // 2, "SECOND_COLUMN": 0, "DOCUMENTS": documents}
    optional["BLOCK_TERMS"] = block_terms
    constants |= {name: value for name, value in optional.items() if name in kernel.arg_names}
    fusion = which != "forward" or dtype != "fp16" or d > 64
    return kernel, blocks, constants, warps, stages, registers, dtype, fusion


def hopper_case(which, d=128, power=2, group=4, gated=True, state=False, block_terms=False, dtype="bf16"):
    """The same for a Hopper kernel, in Gluon."""
    kernel, stages = {
        "forward": (hopper_forward.forward_kernel, hopper_forward.RING),
        "query": (hopper_backward.query_gradient_kernel, hopper_backward.KEY_RING),
        "key": (hopper_backward.key_gradient_kernel, hopper_backward.QUERY_RING),
    }[which]
    blocks = {name: _tile(64, d) for name in kernel.arg_names if name.endswith("_desc")}
    if which == "forward":
        blocks |= dict.fromkeys(("k_desc", "decayed_desc", "v_desc"), _tile(128, d))
    constants = {"GROUP": group, "POWER": power, "GATED": gated, "WITH_STATE": state, "STAGES": stages}
    absent = () if gated else ("whole_ptr", "rest_ptr")
    absent += (
        ()
        if state
        else ("state_share_ptr", "from_state_ptr", "dq_from_state_ptr", "dk_from_later_ptr", "dv_from_later_ptr")
    )
    if which == "key":
        constants["BLOCK_TERMS"] = block_terms
        absent += () if block_terms else ("block_terms_ptr",)
    absent += () if dtype == "fp16" else ("bound_ptr", "q_length_ptr", "factor_ptr", "scales_ptr")
    constants |= {name: None for name in absent if name in kernel.arg_names}
    return kernel, blocks, constants, 4, None, hopper_forward.START_REGISTERS, dtype


def short_case(which, power=2, group=1, gated=True, dtype="bf16"):
    """The same for a Hopper kernel of short sequences of heads of 64."""
    kernel, rows = {
        "forward": (short_forward.forward_kernel, 128),
        "query": (short_backward.query_gradient_kernel, 64),
        "key": (short_backward.key_gradient_kernel, 64),
    }[which]
    blocks = {name: _tile(64, 64) for name in kernel.arg_names if name.endswith("_desc")}
    blocks |= {"q_desc": _tile(rows, 64)} | ({"y_desc": _tile(rows, 64)} if which == "forward" else {})
    constants = {"GROUP": group, "POWER": power, "GATED": gated, "STAGES": 4}
    if not gated:
        absent = ("whole_ptr", "rest_ptr", "to_end_ptr", "from_start_ptr")
        constants |= {name: None for name in absent if name in kernel.arg_names}
    return kernel, blocks, constants, 4, None, None, dtype, which != "forward"


def state_case(which, group=4, columns=128, high=64):
    """The same for a product with states or a sum for them, heads of 128."""
    constants = {"GROUP": group, "D": 128}
    if which == "update":
        blocks = {"x_desc": _tile(64, columns), "y_desc": _tile(64, 128), "out_desc": _tile(64, columns)}
        constants |= {"ENTRIES": hopper_states.WIDTH // columns, "STAGES": hopper_states.SUM_RING}
        return hopper_states.hopper_update_kernel, blocks, constants, 4, None, hopper_forward.START_REGISTERS
    constants |= {"E": 128, "SECOND_HALF": high, "STAGES": hopper_states.RING}
    if which == "query":
        blocks = {"x_desc": _tile(64, 64)} | dict.fromkeys(("first_half_desc", "second_half_desc"), _tile(128, 64))
        constants["SECOND_COLUMN"] = 64
        return hopper_states.features_times_state_kernel, blocks, constants, 4, None, hopper_forward.START_REGISTERS
    blocks = {"z_desc": _tile(64, 64), "x_desc": _tile(64, 128)}
    blocks |= dict.fromkeys(("first_half_desc", "second_half_desc", "normalizer_desc"), _tile(64, 128))
    constants["FACTORS"] = group > 1
    if group == 1:
        constants |= {"factor_ptr": None, "state_share_ptr": None}
    return hopper_states.vector_times_state_kernel, blocks, constants, 4, None, hopper_forward.START_REGISTERS


def split_case(which, power=2, block_terms=False):
    """The same for a kernel of float32 in pieces."""
    found = first_fitting(FLOAT32_PIECES, H200)
    kernel, tiles = {
        "forward": (split_float32.forward_kernel, found.forward),
        "query": (split_float32.query_gradient_kernel, found.query),
        "key": (split_float32.key_gradient_kernel, found.key),
    }[which]
    rows, columns, stages = tiles["rows"], tiles["columns"], tiles["stages"]
    own, other = (columns, rows) if which == "key" else (rows, columns)
    blocks = {"q_desc": _tile(own, 64), "dy_desc": _tile(own, 64)}
    blocks |= {name: _tile(other, 64) for name in ("k_desc", "v_desc")}
    blocks |= {name: ("fp32", _tile(rows, 64)) for name in ("y_desc", "dq_desc", "dk_desc", "dv_desc")}
    constants = dict(GROUP=1, D=64, E=64, POWER=power, GATED=True, ROWS=rows, COLUMNS=columns, STAGES=stages)
    constants |= {"BLOCK_TERMS": block_terms} if which == "key" else {}
    return kernel, blocks, constants, tiles["warps"], stages, None, "fp16"


def range_case(kernel, dtype="fp16", **constants):
    """The same for a kernel of `float16_range`, or one that splits float32 into pieces."""
    tile = _tile(128, 64)
    blocks = dict.fromkeys(("q_desc", "k_desc", "v_desc", "y_desc", "dy_desc"), (dtype, tile))
    blocks |= dict.fromkeys(
        ("scaled_desc", "divided_desc", "factored_desc", "decayed_desc", "k_pieces", "v_pieces", "q_pieces"), tile
    )
    every = dict(
        GROUP=1,
        POWER=2,
        GATED=True,
        VALUES=True,
        D=64,
        E=64,
        ROWS=128,
        BLOCK=1024,
        TILE=128,
        SPLIT=dtype == "fp32",
        **constants,
    )
    chosen = {name: value for name, value in every.items() if name in kernel.arg_names}
    return kernel, blocks, chosen, 4, 3, None, "fp16"


def update_case(entries, columns, d=64, e=64, tokens=64, stages=3, dtype="bf16"):
    blocks = {
        "x_desc": _tile(tokens, columns), "y_desc": _tile(tokens, e), "decayed_transposed_desc": [1, tokens],
        "out_desc": _tile(e, columns),
    }  # fmt: skip
    constants = {
        "GROUP": 1, "D": d, "E": e, "COLUMNS": columns, "ENTRIES": entries,
        "PRECISION": "tf32x3" if dtype == "fp32" else "tf32", "TOKENS": tokens, "STAGES": stages,
        "FLOAT16": dtype == "fp16", "SCALES": OF_KEYS.columns, "TOKEN_SCALE": OF_KEYS.token_column,
        "KV_SCALE": OF_KEYS.kv_column,
    }  # fmt: skip
    return update_kernel, blocks, constants, 4, stages, None, dtype


def fold_case(dtype="bf16", reverse=False):
    scales = OF_GRADIENTS if reverse else OF_KEYS
    constants = dict(
        GROUP=1, D=64, GATED=True, REVERSE=reverse, PRECISION="tf32x3" if dtype == "fp32" else "tf32", TOKENS=64,
        FLOAT16=dtype == "fp16", SCALES=scales.columns, TOKEN_SCALE=scales.token_column,
    )  # fmt: skip
    registers = None if dtype == "fp32" else TRANSPOSE_REGISTERS
    return decay_and_transpose_kernel, {"x_desc": _tile(64, 64)}, constants, 4, 3, registers, dtype


def scan_case(dtype="bf16"):
    constants = dict(
        GATED=True, REVERSE=True, STARTED=True, GIVEN=True, KEPT=True, RETURN_END=True, MULTIPLIED=True, BLOCK=1024,
        **scan_scales(OF_GRADIENTS, OF_KEYS) | {"FLOAT16": dtype == "fp16"},
    )  # fmt: skip
    tuples = {**TUPLES, "outs": (f"*{dtype}",) * 3, "others": (f"*{dtype}",) * 3}
    return scan_kernel, {}, constants, 4, 3, None, dtype, True, tuples


def step_case(window, group=1, power=2, dim=64, rows=32, warps=4, stages=1, keys=16, copied=False):
    constants = dict(
        GROUP=group, POWER=power, DIM=dim, COLUMNS=dim, GATED=True, ROTATED=True, SCALED=True, PER_PAIR=False,
        UPDATE=not window, WINDOW=window, STATE=True, ROWS=rows, KEYS=keys, SPLITS=16 if dim > 64 else 8,
        COPY=copied, STAGES=stages, FEATURES=512,
    )  # fmt: skip
    absent = ["constexpr"] * 4
    tuples = {
        **decode_tuples(gated=True, scaled=True),
        "state": state_step.StateArguments(
            "*fp16" if copied else "*fp32", "*fp32", "*i32", "*fp32", "*fp32" if copied else "constexpr"
        ),
        "window": state_step.RecentTokens(*(["*fp32", "*bf16", "*fp64", "*i32"] if window else absent)),
        "exchange": state_step.Exchange("*i32", "*fp32", "*fp32", "*fp32", "*fp32"),
        "out": state_step.Outputs("*bf16", "*fp64", *(absent[:2] if window else ["*fp32", "*fp32"])),
    }
    return step_kernel, {}, constants, warps, 1, None, "bf16", True, tuples


def decode_tuples(*, gated, scaled):
    """The NamedTuple arguments that the decoding kernels share."""
    return {
        "token": state_step.Token(
            "*bf16", "*bf16", "*bf16", "*fp32" if gated else "constexpr", "*fp32" if scaled else "constexpr", "*fp64",
            "*fp64",
        ),
        "sizes": state_step.Sizes(*["i32"] * 5),
        "splits": state_step.SplitArguments(*["i32"] * 4),
        "strides": state_step.Strides(*["i32"] * 6),
    }  # fmt: skip


def softmax_step_case(group=1, gated=False):
    constants = dict(
        GROUP=group, DIM=64, COLUMNS=64, GATED=gated, ROTATED=True, SCALED=False, PER_PAIR=False, SCALE=0.125, KEYS=64,
        SPLITS=8,
    )  # fmt: skip
    tuples = {
        **decode_tuples(gated=gated, scaled=False),
        "cache": state_step.RecentTokens("*bf16", "*bf16", "*fp64" if gated else "constexpr", "*i32"),
        "exchange": state_step.Exchange("*i32", "constexpr", "*fp32", "*fp32", "constexpr"),
        "out": state_step.Outputs("*bf16", *["constexpr"] * 3),
    }
    return softmax_step_kernel, {}, constants, 4, 1, None, "bf16", True, tuples


# Types of the kernels for p = 4.
POINTERS |= dict.fromkeys(["result_ptr", "weights_ptr"], "*fp32") | dict.fromkeys(
    [
        "first_tile_ptr",
        "column_ptr",
        "block_ptr",
        "tile_column_ptr",
        "tile_block_ptr",
        "block_tile_ptr",
        "column_blocks_ptr",
        "normalizer_block_tile_ptr",
        "normalizer_column_blocks_ptr",
    ],
    "*i32",
)
UNALIGNED |= {"tiles"}


def quartic_case(which, pairs, e, columns=32, warps=8, stages=3, rows=128, tokens=64):
    """Arguments of `compile_kernel` for a kernel of p = 4, with `pairs` outer pairs and values of `e` in a product."""
    constants = dict(GROUP=1, E=e, PAIRS=pairs, COLUMNS=columns, PRECISION="tf32", STAGES=stages)
    blocks = {"inner_desc": [1, rows, columns], "states_desc": [1, columns, pairs * e]}
    if which == "update":
        blocks = {"inner_desc": [1, tokens, columns], "outer_desc": [1, pairs, tokens], "y_desc": [1, e, tokens]}
        constants |= dict(TILE=32, TOKENS=tokens)
        return quartic_update_kernel, blocks, constants, warps, stages
    constants |= dict(ROWS=rows)
    if which == "inner":
        blocks |= {"normalizer_desc": [1, columns, 64]}
        return inner_gradient_kernel, blocks, constants | dict(NORMALIZER_PAIRS=64), warps, stages
    if which == "query":
        blocks["states_desc"] = [1, columns * pairs, e]
        return query_kernel, blocks, constants, warps, stages
    constants |= dict(WITH_RESULT=True, WITH_GRADIENT=True, ADD=True)
    return outer_gradient_kernel, blocks, constants, warps, stages


# Types of the kernels with a gate per rotated pair.
POINTERS |= dict.fromkeys(
    [
        "across_blocks_ptr",
        "across_tiles_ptr",
        "neighbours_ptr",
        "neighbour_weights_ptr",
        "scores_ptr",
        "query_part_ptr",
        "key_part_ptr",
        "terms_ptr",
        "crossing_ptr",
        "since_ptr",
        "until_ptr",
        "beyond_ptr",
        "decay_ptr",
    ],
    "*fp32",
) | dict.fromkeys(["later_ptr", "drift_ptr"], "*fp64")


def pair_case(which, rows, warps, stages, registers=None, d=64, crossing=False, state=False):
    """Arguments of `compile_kernel` for a kernel that visits tiles of scores, with a gate per rotated pair."""
    kernel = {
        "forward": pair_forward.forward_kernel,
        "query": pair_backward.query_gradient_kernel,
        "key": pair_backward.key_gradient_kernel,
    }[which]
    # Where keys are the rows, queries come in blocks and tiles.
    own = ("near_desc", "v_desc", "dv_desc") if which == "key" else ("q_desc", "y_desc", "dy_desc")
    sizes = dict.fromkeys(own, rows) | dict.fromkeys(("v_block_desc", "q_block_desc", "dy_block_desc"), 16)
    sizes |= {} if which == "key" else {"near_desc": 16}
    blocks = {name: _tile(sizes.get(name, 64), d) for name in kernel.arg_names if name.endswith("_desc")}
    width = d // 2 if which == "forward" else d
    states = {
        "since_desc": _tile(rows, d), "until_desc": _tile(rows, d), "q_half_desc": _tile(rows, d // 2),
        "first_half_desc": _tile(d, width), "second_half_desc": _tile(d, width), "normalizer_desc": [1, d, d],
    }  # fmt: skip
    blocks |= {name: shape if state else None for name, shape in states.items() if name in kernel.arg_names}
    constants = dict(
        GROUP=1, D=d, E=d, WITH_STATE=state, SECOND_COLUMN=0, DOCUMENTS=False, CROSSING=crossing, PRECISION="tf32",
        ROWS=rows, COLUMNS=64, BLOCK=16, STAGES=stages, document_start_ptr=None, document_end_ptr=None,
    )  # fmt: skip
    constants |= {} if crossing else {"crossing_ptr": None}
    constants |= {} if state else dict.fromkeys(("since_ptr", "until_ptr", "state_share_ptr"))
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return kernel, blocks, constants, warps, stages, registers


def pair_token_case(kernel, warps=4, **constants):
    """The same for a kernel that visits a tile of tokens."""
    blocks = {name: _tile(64, 64) for name in kernel.arg_names if name.endswith("_desc")}
    return kernel, blocks, dict(POWER=2, TILE=64) | constants, warps, 3


ROTATION = dict(
    GROUP=1, PAIRS=32, BLOCK_PAIRS=32, PER_PAIR=False, FIXED=False, STARTED=False, TOKENS=32
)  # fmt: skip
FOLD = dict(POWER=2, COLUMNS=64, ROWS=64, TOKENS=32)
CASES = {
    "attention forward p=2": attention_case("forward", 128, 64, 4, 3),
    "attention forward p=4": attention_case("forward", 128, 64, 4, 3, power=4),
    "chunked forward": attention_case("forward", 128, 64, 4, 3, state=True),
    "query gradient": attention_case("query", 128, 64, 8, 3, 128),
    "query gradient, chunked": attention_case("query", 128, 64, 8, 3, 128, state=True),
    "key gradient": attention_case("key", 64, 64, 4, 3),
    "key gradient, chunked": attention_case("key", 64, 64, 4, 3, state=True),
    "chunked forward, documents": attention_case("forward", 128, 64, 4, 3, state=True, documents=True),
    "query gradient, documents": attention_case("query", 128, 64, 8, 3, 128, documents=True),
    "key gradient, documents": attention_case("key", 64, 64, 4, 3, documents=True),
    "key gradient, query blocks": attention_case("key", 64, 64, 4, 3, block_terms=True),
    "chunked forward, wide": attention_case("forward", 128, 64, 8, 2, state=True, d=128, e=128),
    "query gradient, chunked, wide": attention_case("query", 64, 64, 4, 2, state=True, d=128, e=128),
    "key gradient, chunked, wide": attention_case("key", 64, 64, 8, 2, state=True, d=128, e=128),
    "hopper short forward p=2": short_case("forward"),
    "hopper short forward p=4": short_case("forward", power=4),
    "hopper short forward, no gates": short_case("forward", gated=False),
    "hopper short query gradient": short_case("query"),
    "hopper short key gradient": short_case("key"),
    "hopper short key gradient, GQA": short_case("key", group=4),
    "hopper forward": hopper_case("forward", d=64),
    "hopper query gradient": hopper_case("query", d=64),
    "hopper key gradient": hopper_case("key", d=64, group=1),
    "hopper wide forward": hopper_case("forward"),
    "hopper wide forward p=4": hopper_case("forward", power=4),
    "hopper wide forward, no gates": hopper_case("forward", gated=False),
    "hopper wide forward, chunked": hopper_case("forward", state=True),
    "hopper wide query gradient": hopper_case("query"),
    "hopper wide query, chunked": hopper_case("query", state=True),
    "hopper wide key gradient": hopper_case("key"),
    "hopper wide key, no gates": hopper_case("key", gated=False, group=1),
    "hopper wide key, chunked": hopper_case("key", state=True),
    "hopper wide key, query blocks": hopper_case("key", block_terms=True),
    "hopper states query": state_case("query"),
    "hopper states gradient, dq": state_case("gradient"),
    "hopper states gradient, dk": state_case("gradient", group=1),
    "hopper states gradient, heads of 80": state_case("gradient", group=1, high=16),
    "hopper states update": state_case("update"),
    "hopper states update, high": state_case("update", group=1, columns=64),
    "pairs forward": pair_case("forward", 128, 4, 3),
    "pairs query gradient": pair_case("query", 64, 4, 2, 168),
    "pairs key gradient": pair_case("key", 64, 4, 2),
    "pairs key gradient, crossing": pair_case("key", 64, 4, 2, crossing=True),
    "pairs forward, chunked": pair_case("forward", 128, 4, 3, state=True),
    "pairs query gradient, chunked": pair_case("query", 64, 4, 2, 168, state=True),
    "pairs key gradient, chunked": pair_case("key", 64, 4, 2, state=True),
    "pairs forward, wide": pair_case("forward", 128, 8, 2, d=128),
    "pairs query gradient, wide": pair_case("query", 128, 8, 2, d=128),
    "pairs key gradient, wide": pair_case("key", 64, 4, 2, d=128),
    "scan, pairs, tables": pair_token_case(pair_decays.decay_tables_kernel, D=64, BLOCK=16),
    "scan, pairs, queries": pair_token_case(
        pair_decays.decay_tokens_kernel, 2, GROUP=1, D=64, KEYS=False, CHUNKED=True, BLOCK=16
    ),
    "scan, pairs, keys": pair_token_case(
        pair_decays.decay_tokens_kernel, 2, GROUP=1, D=64, KEYS=True, CHUNKED=True, BLOCK=16, scale_ptr=None
    ),
    "scan, pairs, neighbours": pair_token_case(pair_neighbours.neighbour_scores_kernel, 2, GROUP=1, D=64, BLOCK=16),
    "scan, pairs, finish": pair_token_case(pair_neighbours.finish_gradients_kernel, 8, GROUP=1, D=64, BLOCK=16),
    "scan, pairs, states": (
        scan_pairs_kernel, {}, dict(D=64, REVERSE=True, MULTIPLIED=True, BLOCK=1024), 4, 3, None, "bf16", True,
        {"xs": ("*bf16", "*bf16", "*fp32"), "outs": ("*bf16",) * 3, "others": ("*bf16",) * 2},
    ),
    "scan, pairs, gates": pair_token_case(gate_gradient_kernel, PAIRS=32),
    "update, low": update_case(2, 64),
    "update, high": update_case(4, 32),
    "update, wide": update_case(1, 128, d=128, e=128, stages=2),
    "fold": fold_case(),
    "scan": scan_case(),
    "float16 attention forward": attention_case("forward", 128, 64, 4, 3, dtype="fp16"),
    "float16 attention forward p=4": attention_case("forward", 128, 64, 4, 3, power=4, dtype="fp16"),
    "float16 chunked forward": attention_case("forward", 128, 64, 4, 3, state=True, dtype="fp16"),
    "float16 query gradient": attention_case("query", 128, 64, 8, 3, 128, dtype="fp16"),
    "float16 query gradient, chunked": attention_case("query", 128, 64, 8, 3, 128, state=True, dtype="fp16"),
    "float16 key gradient": attention_case("key", 64, 64, 4, 3, dtype="fp16"),
    "float16 key gradient, chunked": attention_case("key", 64, 64, 4, 3, state=True, dtype="fp16"),
    "float16 key gradient, query blocks": attention_case("key", 64, 64, 4, 3, block_terms=True, dtype="fp16"),
    "float16 chunked forward, wide": attention_case("forward", 128, 64, 8, 2, state=True, d=128, e=128, dtype="fp16"),
    "float16 query gradient, wide": attention_case("query", 64, 64, 4, 2, state=True, d=128, e=128, dtype="fp16"),
    "float16 key gradient, wide": attention_case("key", 64, 64, 8, 2, state=True, d=128, e=128, dtype="fp16"),
    "float16 short forward p=2": short_case("forward", dtype="fp16"),
    "float16 short forward p=4": short_case("forward", power=4, dtype="fp16"),
    "float16 short forward, no gates": short_case("forward", gated=False, dtype="fp16"),
    "float16 short query gradient": short_case("query", dtype="fp16"),
    "float16 hopper forward": hopper_case("forward", d=64, group=1, dtype="fp16"),
    "float16 hopper forward, no gates": hopper_case("forward", d=64, group=1, gated=False, dtype="fp16"),
    "float16 hopper query gradient": hopper_case("query", d=64, group=1, dtype="fp16"),
    "float16 hopper query, no gates": hopper_case("query", d=64, group=1, gated=False, dtype="fp16"),
    "float16 hopper key gradient": hopper_case("key", d=64, group=1, dtype="fp16"),
    "float16 hopper key, no gates": hopper_case("key", d=64, group=1, gated=False, dtype="fp16"),
    "float16 hopper key, query blocks": hopper_case("key", d=64, group=1, block_terms=True, dtype="fp16"),
    "float16 hopper wide forward p=4": hopper_case("forward", power=4, dtype="fp16"),
    "float16 hopper wide query gradient": hopper_case("query", dtype="fp16"),
    "float16 hopper wide key gradient": hopper_case("key", dtype="fp16"),
    "float16 update, low": update_case(2, 64, dtype="fp16"),
    "float16 update, high": update_case(4, 32, dtype="fp16"),
    "float16 fold": fold_case("fp16"),
    "float16 fold, reverse": fold_case("fp16", reverse=True),
    "float16 scan": scan_case("fp16"),
    "range, measure": range_case(float16_range.measure_kernel),
    "range, bound": range_case(float16_range.bound_kernel, INITIAL=True),
    "range, prepare": range_case(float16_range.prepare_float16_kernel, D_DENOMINATOR=True),
    "range, gradient scales": range_case(float16_range.gradient_scales_kernel, D_FINAL=True),
    "range, multiply factors": range_case(decayed.multiply_factors_kernel),
    "range, measure float32": range_case(float16_range.measure_kernel, "fp32"),
    "range, prepare float32": range_case(float16_range.prepare_float16_kernel, "fp32", D_DENOMINATOR=False),
    "range, split keys": range_case(split_float32.split_keys_kernel, "fp32"),
    "range, split queries": range_case(split_float32.split_queries_kernel, "fp32"),
    "pieces forward p=2": split_case("forward"),
    "pieces forward p=4": split_case("forward", power=4),
    "pieces query gradient": split_case("query"),
    "pieces key gradient": split_case("key"),
    "pieces key gradient, query blocks": split_case("key", block_terms=True),
    "float32 chunked forward": attention_case("forward", 128, 64, 8, 2, state=True, dtype="fp32"),
    "float32 query gradient, chunked": attention_case("query", 128, 64, 8, 2, state=True, dtype="fp32"),
    "float32 key gradient, chunked": attention_case("key", 64, 64, 8, 2, state=True, dtype="fp32"),
    "float32 chunked forward, wide": attention_case("forward", 64, 64, 8, 1, state=True, d=128, e=128, dtype="fp32"),
    "float32 query gradient, wide": attention_case("query", 64, 64, 8, 1, state=True, d=128, e=128, dtype="fp32"),
    "float32 key gradient, wide": attention_case("key", 64, 64, 8, 1, state=True, d=128, e=128, dtype="fp32"),
    "float32 update": update_case(1, 64, stages=2, dtype="fp32"),
    "float32 fold": fold_case("fp32"),
    "float32 scan": scan_case("fp32"),
    "pack": (pack_kernel, {}, dict(DECAYS=True, CLOSED=False, D=64, E=64), 4, 3),
    "unpack": (unpack_kernel, {}, dict(DECAYS=True, REVERSE=False, D=64, E=64), 4, 3),
    "quartic query, d=16": quartic_case("query", 8, 16, warps=4),
    "quartic query, d=32": quartic_case("query", 8, 32),
    "quartic query, e=128": quartic_case("query", 1, 128),
    "quartic outer, d=16": (*quartic_case("outer", 8, 16), 128),
    "quartic outer, d=32": quartic_case("outer", 8, 32),
    "quartic outer, e=64": quartic_case("outer", 4, 64),
    "quartic outer, e=128": quartic_case("outer", 1, 128),
    "quartic outer, denominator": quartic_case("outer", 64, 1),
    "quartic inner, d=16": quartic_case("inner", 8, 16, warps=4),
    "quartic inner, d=32": quartic_case("inner", 8, 32),
    "quartic inner, e=128": quartic_case("inner", 1, 128),
    "quartic update, d=16": quartic_case("update", 8, 16, columns=64, warps=4),
    "quartic update, d=32": quartic_case("update", 8, 32, columns=64, warps=4),
    "quartic update, e=128": quartic_case("update", 1, 128, columns=64, warps=4),
    "quartic update, denominator": quartic_case("update", 64, 1, columns=64, warps=4),
    "scan, quartic": (quartic_scan_kernel, {}, dict(E=32, GATED=True, REVERSE=False, BLOCK=2048), 4, 3),
    "scan, sums": (_scan_kernel, {}, dict(BLOCK=1024, REVERSE=True, TOTALS_ONLY=False), 4, 3),
    "scan, drift": (_correct_drift_kernel, {}, dict(DOCUMENTS=True, BLOCK=256), 4, 3),
    "rotation": (_rotate_kernel, {}, ROTATION, 4, 3),
    "rotation, backward": (_rotate_backward_kernel, {}, ROTATION, 4, 3),
    "decode": step_case(False, rows=16),
    "decode, p=4, d=16": step_case(False, power=4, dim=16, rows=128),
    "decode, window": step_case(True, rows=8, stages=4),
    "decode, window, GQA": step_case(True, group=4, rows=8, stages=4),
    "decode, window, copy": step_case(True, rows=16, stages=4, copied=True),
    "decode, window, copy, GQA": step_case(True, group=4, dim=128, rows=8, stages=4, keys=8, copied=True),
    "decode, softmax": softmax_step_case(),
    "decode, softmax, gated, GQA": softmax_step_case(group=4, gated=True),
    "decode, gates": (step_gates_kernel, {}, dict(GATED=True, ROTATED=True, OUTPUTS=16, INPUTS=256), 4, 1),
    "window fold": (fold_window_kernel, {}, FOLD | dict(copy_ptr=None, scale_ptr=None, COPY=False), 4, 1, 128),
    "window fold, copy": (fold_window_kernel, {}, FOLD | dict(COPY=True), 4, 1, 128),
    "window fold, copy, wide": (fold_window_kernel, {}, FOLD | dict(COLUMNS=128, COPY=True), 4, 1),
}  # fmt: skip

# Parts of names of the cases that `--all` adds.
WITH_ALL = re.compile(
    "^(?!float16 .*forward p=4).*(p=4|no gates|documents|GQA|query blocks|heads of 80|float32 .*(wide|forward|gradient)"
    "|(float16 (?!hopper)|pairs ).*(wide|chunked)|float16 (query gradient|key gradient|update|fold)"
    "|quartic .*(d=32|e=))"
)


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


def print_table(everything: bool) -> bool:
    """Prints a line for each kernel; returns whether all of them compiled."""
    failed = []
    for name, case in CASES.items():
        if WITH_ALL.search(name) and not everything:
            continue
        try:
            r = compile_kernel(*case)
        except Exception as error:  # noqa: BLE001 (whatever a compiler raises: the table shows every kernel)
            failed.append(name)
            print(f"{name:36} FAILED: {str(error).strip().splitlines()[-1]}", flush=True)
            continue
        print(f"{name:36} registers {r.registers:3} stack {r.stack:4} shared {r.shared:6} wgmma {r.products:3}"
              f" carried {r.carried}{'  SERIALIZED' if r.serialized else ''}", flush=True)  # fmt: skip
    return not failed


if __name__ == "__main__":
    match sys.argv[1:]:
        case [] | ["--all"]:
            sys.exit(0 if print_table("--all" in sys.argv) else 1)
        case [name, path]:
            report = compile_kernel(*CASES[name], disassemble=True)
            Path(path).write_text(report.sass)
            for length, counts in loops(report.sass):
                print(length, dict(counts.most_common(16)))
        case _:
            sys.exit(__doc__)
