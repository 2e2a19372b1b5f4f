"""Compiles what calls of the package launch, for GPUs that are not here: shared and tensor memory, spills.

TRITON_INTERPRET must not be 1.

python tests/kernels/targets.py                 a line of JSON for every kernel and GPU, of its largest tiles (minutes)
python tests/kernels/targets.py --machine-code  the same, down to machine code, of which LLVM and ptxas report spills
python tests/kernels/targets.py --all           every launch, of more head sizes and powers, likewise (hours)
python tests/kernels/targets.py sm_89 ...       for these GPUs alone
python tests/kernels/targets.py --call TEXT     of the calls whose names contain TEXT alone

Every kernel is replaced by a recorder of its launches; then calls run on the CPU, on tensors whose numbers do not
matter, with tiles that are chosen by the limits of a GPU. Each launch is compiled as Triton would on that GPU, with the
types, divisibilities and options of its arguments: to LLVM's IR, for which shared memory is allocated, or further.
"""

from __future__ import annotations

import ast
import importlib
import io
import json
import math
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import sympow
import sympow.kernels
from sympow.kernels import common, device_limits
from sympow.kernels.attention import shard, split_float32
from sympow.kernels.attention import tiles as attention_tiles
from sympow.kernels.cross_entropy import cross_entropy_in_place
from sympow.kernels.decode.gate_projection import step_gates
from sympow.kernels.device_limits import KIB, Footprint, Limits
from sympow.kernels.pair_gates import op as pair_op
from sympow.kernels.running_sums import gate_sums
from sympow.kernels.states import quartic_features
from sympow.kernels.states.message_packing import pack, unpack
from sympow.ops import dispatch
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.rotary import rotary_rates
from sympow.ops.torch.softmax import softmax_attention
from sympow.ops.window import Window


@dataclass(frozen=True)
class Gpu:
    target: GPUTarget
    limits: Limits


def _cuda(capability: int, kib: int, instructions: str = "mma") -> Gpu:
    return Gpu(GPUTarget("cuda", capability, 32), Limits(kib * KIB, instructions))


# What the vendors document as the largest shared memory of a CTA.
GPUS = {
    "sm_80": _cuda(80, 163),
    "sm_89": _cuda(89, 99),
    "sm_90": _cuda(90, 227, "wgmma"),
    "sm_100": _cuda(100, 227, "tcgen05"),
    "sm_120": _cuda(120, 99),
    "gfx942": Gpu(GPUTarget("hip", "gfx942", 64), Limits(64 * KIB, "mfma")),
}


# Calls ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Dtype, head dims, query heads of a key head, and power of a call."""

    dtype: torch.dtype = torch.bfloat16
    dim: int = 64
    value_dim: int | None = None
    group: int = 1
    power: int = 2

    def __str__(self) -> str:
        values = "" if self.value_dim is None else f" and {self.value_dim}"
        group = f" in groups of {self.group}" if self.group > 1 else ""
        return f"{str(self.dtype).removeprefix('torch.')}, p = {self.power}, heads of {self.dim}{values}{group}"

    def tokens(self, length: int, *, gates: tuple[int, ...] = (), documents: bool = False) -> dict[str, Any]:
        """q, k, v and log γ, with gradients."""
        batch, heads = (1 if documents else 2), 2
        shapes = {
            "q": (batch, length, heads * self.group, self.dim),
            "k": (batch, length, heads, self.dim),
            "v": (batch, length, heads, self.value_dim or self.dim),
        }
        found: dict[str, Any] = {
            name: torch.zeros(shape, dtype=self.dtype, requires_grad=True) for name, shape in shapes.items()
        }
        found["log_gamma"] = torch.zeros(batch, length, heads, *gates, requires_grad=True)
        if documents:
            found["cu_seqlens"] = torch.tensor([0, 100, length], dtype=torch.int32)
        return found


def attend(of: Heads, form: str = "attention", *, states: bool = False, pairs: bool = False, documents: bool = False):
    """Forward and backward pass."""
    tokens = of.tokens(320, gates=(of.dim // 2,) if pairs else (), documents=documents)
    theta = rotary_rates(of.dim, 320)
    initial = None
    if states:
        initial = sympow.State.zeros(2, 2, of.dim, of.value_dim or of.dim, power=of.power, rotated=True)
    result = sympow.attention(
        **tokens, power=of.power, beta=torch.zeros_like(tokens["log_gamma"]), theta=theta, initial_state=initial,
        return_state=states, form=form, chunk_size=128 if form == "chunked" else None, backend="triton",
    )  # fmt: skip
    (result[0] if states else result).sum().backward()


def attend_to_long_sequence(of: Heads) -> None:
    """So long that the gradient of the gates is corrected within the sequence, and running sums take two launches."""
    sympow.attention(**of.tokens(8256), power=of.power, form="attention", backend="triton").sum().backward()


def attend_to_shard(of: Heads) -> None:
    tokens = of.tokens(320)
    q, k, v = (tokens[name].detach() for name in "qkv")
    plan = shard.Plan(128, initial=True, return_state=True)
    gates = shard.gate_sums(tokens["log_gamma"].detach())
    folded = shard.fold(k, v, gates, plan)
    assert folded.end is not None
    state = unpack(pack(folded.end, 0.0).unsqueeze(0), (2, 2, of.dim, of.dim), decays=True)
    out = shard.Outputs.new(q, v, plan)
    shard.attend(q, k, v, gates, folded.chunks, state, out)
    shard.fold_gradient(shard.prepare_gradient(v, q, out), k, gates, out.state_share, plan)


def decode(of: Heads) -> None:
    """One token from a state; with a window, which is folded; and of softmax attention."""
    length, heads = 3, 2
    tokens = {name: x.detach() for name, x in of.tokens(length).items()}
    beta, theta = torch.zeros(2, length, heads), rotary_rates(of.dim, 320)
    first, token = (
        {"beta": beta[:, cut], "theta": theta} | {name: x[:, cut] for name, x in tokens.items()}
        for cut in (slice(0, 2), slice(2, 3))
    )
    with torch.no_grad():
        _, state = sympow.attention(**first, power=of.power, form="chunked", backend="torch", return_state=True)
        sympow.attention(**token, power=of.power, form="recurrent", backend="triton", initial_state=state)
        window = Window.open(state, capacity=64, dtype=of.dtype)
        window.step(**token, backend="triton")
        window.fold("triton")
        _, keys = softmax_attention(**first, return_state=True)
        KeyValueCache.open(keys, capacity=128).step(**token, backend="triton")
        width = torch.zeros(heads, 768)
        step_gates(torch.zeros(2, 768, dtype=of.dtype), width, torch.zeros(heads), width)


def cross_entropy(dtype: torch.dtype) -> None:
    cross_entropy_in_place(torch.zeros(2, 50_304, dtype=dtype), torch.zeros(2, dtype=torch.int64), 50_257, 1.0)


WIDE = Heads(dim=128)
HALF, WIDE_HALF = (Heads(dtype=torch.float16, dim=dim) for dim in (64, 128))
SINGLE, WIDE_SINGLE = (Heads(dtype=torch.float32, dim=dim) for dim in (64, 128))
QUARTIC = Heads(dim=32, value_dim=64, power=4)
# Each kernel, mostly with the largest heads, which take the most shared memory.
CALLS: dict[str, Callable[[], object]] = {
    f"attention form, {Heads()}": lambda: attend(Heads()),
    f"chunked form with states, {WIDE}": lambda: attend(WIDE, "chunked", states=True),
    f"chunked form, {QUARTIC}": lambda: attend(QUARTIC, "chunked"),
    f"a gate per pair, chunked form, {WIDE}": lambda: attend(WIDE, "chunked", pairs=True),
    f"shard, {Heads()}": lambda: attend_to_shard(Heads()),
    f"decoding, {Heads(group=4)}": lambda: decode(Heads(group=4)),
    f"attention form, {HALF}": lambda: attend(HALF),
    f"chunked form with states, {WIDE_HALF}": lambda: attend(WIDE_HALF, "chunked", states=True),
    f"attention form, {SINGLE}": lambda: attend(SINGLE),
    f"chunked form with states, {SINGLE}": lambda: attend(SINGLE, "chunked", states=True),
    f"chunked form with states, {WIDE_SINGLE}": lambda: attend(WIDE_SINGLE, "chunked", states=True),
    f"chunked form, {replace(QUARTIC, dtype=torch.float32)}": lambda: attend(
        replace(QUARTIC, dtype=torch.float32), "chunked"
    ),
    # Split, as on Hopper, where the sums of other calls are.
    "running sums of 4,096 gates": lambda: gate_sums(torch.zeros(1, 4096, 2)).split,
    "cross-entropy, bfloat16": lambda: cross_entropy(torch.bfloat16),
}


def _more_calls() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {"cross-entropy, float32": lambda: cross_entropy(torch.float32)}
    for dim in (16, 64, 128):
        for power in (2, 4):
            of = Heads(dim=dim, power=power)
            found[f"attention form, {of}"] = lambda of=of: attend(of)
            found[f"attention form, documents, {of}"] = lambda of=of: attend(of, documents=True)
            found[f"attention form, long, {of}"] = lambda of=of: attend_to_long_sequence(of)
        for group in (1, 4):
            of = Heads(dim=dim, group=group)
            found[f"chunked form, {of}"] = lambda of=of: attend(of, "chunked")
            found[f"chunked form with states, {of}"] = lambda of=of: attend(of, "chunked", states=True)
            found[f"a gate per pair, attention form, {of}"] = lambda of=of: attend(of, pairs=True)
            found[f"a gate per pair, chunked form, {of}"] = lambda of=of: attend(of, "chunked", pairs=True)
            found[f"decoding, {of}"] = lambda of=of: decode(of)
        for dtype in (torch.float16, torch.float32):
            for power in (2, 4):
                of = Heads(dtype=dtype, dim=dim, power=power)
                found[f"attention form, {of}"] = lambda of=of: attend(of)
                found[f"attention form, documents, {of}"] = lambda of=of: attend(of, documents=True)
                found[f"attention form, long, {of}"] = lambda of=of: attend_to_long_sequence(of)
            of = Heads(dtype=dtype, dim=dim, group=4)
            found[f"chunked form, {of}"] = lambda of=of: attend(of, "chunked")
            found[f"decoding, {of}"] = lambda of=of: decode(of)
    for dtype in (torch.bfloat16, torch.float32):
        for dim in (16, 32):
            for value_dim in (16, 32, 64, 128):
                of = Heads(dtype=dtype, dim=dim, value_dim=value_dim, power=4)
                found[f"chunked form, {of}"] = lambda of=of: attend(of, "chunked")
    of = Heads(dim=16, power=4)
    found[f"decoding, {of}"] = lambda: decode(of)
    return found


# Launches ------------------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """In the place of a kernel: records its launches, and computes nothing."""

    name: str
    kernel: JITFunction
    launches: list[tuple[tuple, dict]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.launches.append((args, kwargs))

        return launch


@dataclass(frozen=True)
class Launch:
    """A launch of a kernel by a call."""

    call: str
    recorder: Recorder
    args: tuple
    kwargs: dict[str, Any]

    @property
    def dtype(self) -> torch.dtype:
        """Of its first argument, in all kernels with tables one of the operands."""
        return getattr(self.args[0], "base", self.args[0]).dtype

    @property
    def size(self) -> int:
        """A number that grows with its tiles: the product of its sizes."""
        sizes = (value for name, value in self.kwargs.items() if name.isupper() and name != "STAGES")
        return math.prod(value for value in sizes if type(value) is int and value > 0)


def replace_kernels() -> list[Recorder]:
    """Puts a recorder in the place of every kernel that a module launches, except those for Hopper GPUs alone."""
    recorders = []
    for info in pkgutil.walk_packages(sympow.kernels.__path__, "sympow.kernels."):
        if info.name.startswith("sympow.kernels.hopper"):
            continue
        module = importlib.import_module(info.name)
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "launch":
                name = getattr(node.args[0], "id", "")
                kernel = getattr(module, name, None)
                if isinstance(kernel, JITFunction):
                    recorders.append(Recorder(f"{info.name.removeprefix('sympow.kernels.')}.{name}", kernel, []))
                    setattr(module, name, recorders[-1])
    return recorders


def choose_as_on(gpu: Gpu) -> None:
    """Tiles and options as on a GPU, for tensors on the CPU."""
    device_limits.H200 = gpu.limits
    torch.version.hip = "6.4" if gpu.target.backend == "hip" else None
    common.IN_PTX = tl.constexpr(gpu.target.backend == "cuda")


def declared(launch: Launch, limits: Limits) -> int | None:
    """The shared memory that the table says the launch takes at most; None for a kernel with fixed tiles."""
    tiles: Footprint
    constants = launch.kwargs
    match launch.recorder.name.split("."):
        case ["pair_gates", *_, "forward_kernel" | "query_gradient_kernel" | "key_gradient_kernel"]:
            tiles = pair_op.choose_pair_tiles(constants["D"], limits)
        case ["attention", "split_float32", "forward_kernel" | "query_gradient_kernel" | "key_gradient_kernel"]:
            tiles = device_limits.first_fitting(attention_tiles.FLOAT32_PIECES, limits)
        case ["attention", *_, "forward_kernel" | "query_gradient_kernel" | "key_gradient_kernel"]:
            tiles = attention_tiles.choose_tiles(constants["D"], limits, launch.dtype)
        case ["states", "quadratic", "update_kernel" | "decay_and_transpose_kernel"]:
            tiles = attention_tiles.choose_tiles(constants["D"], limits, launch.dtype)
        case ["states", "quartic" | "quartic_query", _] if "PAIRS" in constants:
            value_dim = max(16, constants["E"])  # denominators have values of 1
            tiles = quartic_features.quartic_tiles_for(32, value_dim, limits, launch.dtype)
        case _:
            return None
    return tiles.shared_memory


def compile_launch(launch: Launch, gpu: Gpu, *, machine_code: bool) -> dict[str, Any]:
    """What Triton's compiler reports of a launch: bytes of shared memory, columns of tensor memory, and of machine code
    the bytes of stack, to which registers spill.
    """
    kernel, backend = launch.recorder.kernel, make_backend(gpu.target)
    kwargs = launch.kwargs | {"debug": False, "instrumentation_mode": ""}
    bound, specialization, options = create_function_from_signature(kernel.signature, kernel.params, backend)(
        *launch.args, **kwargs
    )
    options, signature, constexprs, attributes = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source = ASTSource(kernel, signature, constexprs, attributes)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    code = source.make_ir(
        gpu.target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict[str, Callable[[Any, dict], Any]] = {}
    backend.add_stages(stages, options, source.language)
    metadata = {"target": gpu.target, **options.__dict__}
    notes = io.StringIO()
    with redirect_stdout(notes):
        for name, stage in stages.items():
            code = stage(code, metadata)
            if name == "amdgcn":
                notes.write(code)
            if name == "llir" and not machine_code:
                break
    found = {"shared": metadata["shared"], "tensor_memory": metadata.get("tmem_size") or 0}
    if machine_code:
        spilled = re.findall(r"(\d+) bytes stack frame|\.private_segment_fixed_size: (\d+)", notes.getvalue())
        found["stack"] = sum(int(nvidia or amd) for nvidia, amd in spilled)
    return found


def recorded(recorders: list[Recorder], calls: dict[str, Callable[[], object]]) -> Iterator[Launch]:
    """The launches of the calls, those with the same types and constants once."""
    known = set()
    for call, run in calls.items():
        run()
        for recorder in recorders:
            for args, kwargs in recorder.launches:
                key = (recorder.name, tuple(map(_kind, args)), tuple(sorted(kwargs.items())))
                if key not in known:
                    known.add(key)
                    yield Launch(call, recorder, args, kwargs)
            recorder.launches.clear()


def largest(launches: Iterable[Launch], limits: Limits) -> list[Launch]:
    """Of each kernel the launch with the largest tiles; where a table says what they take, of each dtype."""
    found: dict[tuple, Launch] = {}
    for launch in launches:
        key = (launch.recorder.name, None if declared(launch, limits) is None else launch.dtype)
        if key not in found or launch.size > found[key].size:
            found[key] = launch
    return list(found.values())


def reports(gpus: list[str], *, text: str, everything: bool, machine_code: bool) -> Iterator[dict[str, Any]]:
    """What the compiler reports of each kernel or, for `everything`, of each launch, in calls named with `text`."""
    recorders = replace_kernels()
    # Which calls are supported is not the question here, and the tensors are on the CPU.
    dispatch.unsupported_reason = lambda request: None
    dispatch.softmax_step_unsupported_reason = lambda sequence: None
    split_float32.ON_CPU = True
    for name in gpus:
        gpu = GPUS[name]
        choose_as_on(gpu)
        calls = CALLS | (_more_calls() if everything else {})
        if gpu.limits.instructions != "wgmma":
            calls = {name: call for name, call in calls.items() if not _needs_hopper(name)}
        calls = {name: call for name, call in calls.items() if text in name}
        launches: Iterable[Launch] = recorded(recorders, calls)
        launches = list(launches) if everything else largest(launches, gpu.limits)
        for launch in launches:
            begin = time.monotonic()
            found = {
                "gpu": name, "kernel": launch.recorder.name, "call": launch.call, "limit": gpu.limits.shared_memory,
                "declared": declared(launch, gpu.limits),
            }  # fmt: skip
            try:
                found |= compile_launch(launch, gpu, machine_code=machine_code)
            except Exception as error:  # noqa: BLE001 (whatever a compiler raises: every kernel is reported)
                found["error"] = f"{type(error).__name__}: {error}"[-2000:]
            yield found | {"seconds": round(time.monotonic() - begin, 1)}
        launched = {launch.recorder.name for launch in launches}
        yield {"gpu": name, "missing": [x.name for x in recorders if x.name not in launched]}


def _needs_hopper(call: str) -> bool:
    """Whether `dispatch.wide_float32_unsupported_reason` leaves a call to Hopper."""
    return "float32" in call and "128" in call and "decoding" not in call


def _kind(x: Any) -> Any:
    """What a launch is specialized for: types of tensors, blocks of descriptors, which arguments there are."""
    if isinstance(x, tuple):
        return tuple(map(_kind, x))
    return (type(x).__name__, str(getattr(x, "dtype", "")), tuple(getattr(x, "block_shape", ())))


def main(arguments: list[str]) -> None:
    gpus = [name for name in arguments if name in GPUS] or list(GPUS)
    triton.knobs.nvidia.dump_ptxas_log = True
    everything = "--all" in arguments
    machine_code = everything or "--machine-code" in arguments
    text = arguments[arguments.index("--call") + 1] if "--call" in arguments else ""
    for report in reports(gpus, text=text, everything=everything, machine_code=machine_code):
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
