"""The benchmark of `sympow bench`: forms and backends of `sympow.attention` beside softmax and other packages."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sympow.check.timing import Timing, environment, measure_interleaved, save_results
from sympow.checks import check_at_least, check_choice
from sympow.errors import ArgumentError
from sympow.extras import require
from sympow.model.accounting import host_memory
from sympow.ops.dispatch import chunked_unsupported_reason
from sympow.ops.interface import attention
from sympow.settings import Backend, Form

BASELINE = "softmax, cuDNN"
# What the names of methods add for a gate per rotated pair, and for none. One gate per head is the default.
GATINGS = {"scalar": "", "vector": ", a gate per pair", "none": ", no gates"}


@dataclass(frozen=True)
class Setting:
    """The size, power, gates, dtype and device of the calls to time. Rotation is not timed.

    Attributes:
        tokens: of a call.
        heads: query heads.
        dim: d of queries, keys and values.
        kv_heads: key heads, a divisor of `heads`; None: as many as query heads.
        shape: the model whose heads these are (`sympow.check.SHAPES`), or None.
        gating: the gates with which `sympow.attention` is timed, each of `GATINGS`.
        other_dtypes: dtypes in which `sympow.attention` is timed as well, beside `dtype`.
    """

    tokens: int = 65_536
    heads: int = 12
    dim: int = 64
    power: int = 2
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    kv_heads: int | None = None
    shape: str | None = None
    gating: tuple[str, ...] = ("scalar",)
    other_dtypes: tuple[torch.dtype, ...] = ()

    def __post_init__(self) -> None:
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        for name in ("tokens", "heads", "dim", "kv_heads"):
            check_at_least(name, getattr(self, name), 1)
        if self.heads % self.key_heads:
            raise ArgumentError("kv_heads", f"must divide heads, {self.heads}; got {self.kv_heads}")
        for kind in self.gating:
            check_choice("gating", kind, GATINGS)
        if "vector" in self.gating and self.dim % 2:
            raise ArgumentError("dim", f"must be even for a gate per rotated pair, got {self.dim}")

    @property
    def key_heads(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // self.key_heads

    def least_bytes(self, backward: bool) -> int:
        """Bytes that any method takes at least: q, k, v and the output, with their gradients if there is a backward."""
        numbers = 2 * self.tokens * (self.heads + self.key_heads) * self.dim
        return (1 + backward) * numbers * self.dtype.itemsize

    def inputs(self, context: int, grad: bool) -> dict[str, Tensor]:
        """Random q (b, t, h, d), k and v (b, t, h_kv, d), and log γ near 0.999, (b, t, h_kv)."""
        generator = torch.Generator(self.device).manual_seed(context)
        rows = (self.tokens // context, context)
        made = {
            name: torch.randn(*rows, heads, self.dim, generator=generator, device=self.device, dtype=self.dtype)
            for name, heads in (("q", self.heads), ("k", self.key_heads), ("v", self.key_heads))
        }
        logits = torch.randn(*rows, self.key_heads, generator=generator, device=self.device) + 6.9
        made["log_gamma"] = torch.nn.functional.logsigmoid(logits)
        return {name: x.requires_grad_(grad) for name, x in made.items()}


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        peak_bytes: peak memory allocated by a forward and backward pass, without the inputs; None on a CPU.
        extra_bytes: the same without the output and the gradients, which every method returns.
    """

    method: str
    context: int
    forward: Timing
    forward_and_backward: Timing | None
    peak_bytes: int | None
    extra_bytes: int | None


Call = Callable[[], Tensor]
# Maps a setting, a context and inputs to the call to time and the tensors to differentiate with respect to.
Method = Callable[[Setting, int, dict[str, Tensor]], tuple[Call, list[Tensor]]]


def methods(setting: Setting, backends: Sequence[Backend]) -> dict[str, Method]:
    """The methods that can be timed on this device with the packages installed, by name."""
    found: dict[str, Method] = {}
    if setting.device == "cuda":
        found[BASELINE] = partial(_softmax, SDPBackend.CUDNN_ATTENTION)
        found["softmax, flash"] = partial(_softmax, SDPBackend.FLASH_ATTENTION)
    else:
        found["softmax"] = partial(_softmax, None)
    for backend, kind, dtype in product(backends, setting.gating, _dtypes(setting)):
        name = f"{backend}{GATINGS[kind]}{dtype}"
        found[f"attention form, {name}"] = partial(_sympow, "attention", backend, kind, _dtypes(setting)[dtype])
        if _chunked_reason(setting, backend, _dtypes(setting)[dtype]) is None:
            found[f"chunked form, {name}"] = partial(_sympow, "chunked", backend, kind, _dtypes(setting)[dtype])
    if setting.device == "cuda" and _importable("retention"):
        found["retention, chunked"] = _retention
    if setting.device == "cuda" and _importable("fla.ops.simple_gla"):
        # It has as many key heads as query heads. Repeating keys and gates is not timed.
        found["fla, simple GLA (p = 1)" + (", keys repeated" if setting.group > 1 else "")] = _simple_gla
    return found


def unsupported_methods(setting: Setting, backends: Sequence[Backend]) -> dict[str, str]:
    """Why methods that other settings have cannot be timed in this one, by name."""
    reasons = {
        f"chunked form, {backend}{name}": _chunked_reason(setting, backend, dtype)
        for backend, (name, dtype) in product(backends, _dtypes(setting).items())
    }
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _dtypes(setting: Setting) -> dict[str, torch.dtype]:
    """The dtypes to time, by what they add to the name of a method."""
    return {"": setting.dtype, **{f", {dtype_name(dtype)}": dtype for dtype in setting.other_dtypes}}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _chunked_reason(setting: Setting, backend: Backend, dtype: torch.dtype) -> str | None:
    """Why the chunked form is not timed.

    Where it has no kernels, it runs in plain PyTorch, which may take minutes with a large state. It is timed only if
    that backend was asked for.
    """
    return None if backend == "torch" else chunked_unsupported_reason(setting.power, setting.dim, setting.dim, dtype)


def run_bench(
    setting: Setting,
    contexts: Sequence[int],
    backends: Sequence[Backend],
    *,
    backward: bool = True,
    runs: int = 20,
    only: Sequence[str] = (),
    on_progress: Callable[[str, int], None] = lambda what, total: None,
    on_unsupported: Callable[[str, str], None] = lambda method, reason: None,
) -> Iterator[Row]:
    """Times every method at every context; the samples of one context are interleaved.

    Args:
        setting: what to time.
        contexts: sequence lengths, each a divisor of setting.tokens.
        backends: of `sympow.attention`.
        backward: whether to time forward and backward together too.
        runs: number of rounds; each takes one sample of every method.
        only: time only methods whose name contains one of these; empty: all.
        on_progress: called after each round with a description and the number of all rounds.
        on_unsupported: called, before anything is timed, with the name of each method that cannot run in this setting,
            and a sentence that says why.

    Raises:
        ValueError: a context does not divide the tokens, or an entry of `only` is in no method's name.
    """
    for context in contexts:
        check_at_least("context", context, 1)
        if setting.tokens % context:
            raise ArgumentError("contexts", f"must divide tokens, {setting.tokens}; got {context}")
    check_at_least("runs", runs, 1)
    _check_fits(setting, backward)
    available, unsupported = methods(setting, backends), unsupported_methods(setting, backends)
    for part in only:
        if not any(part in name for name in (*available, *unsupported)):
            raise ArgumentError(
                "only", f"must be contained in the name of a method: {'; '.join(available)}. Got {part!r}"
            )

    def wanted(name: str) -> bool:
        return not only or any(part in name for part in only)

    chosen = {name: method for name, method in available.items() if wanted(name)}
    unsupported = {name: reason for name, reason in unsupported.items() if wanted(name)}
    unsupported |= _refusals(chosen, setting, min(contexts), backward)
    for name, reason in unsupported.items():
        chosen.pop(name, None)
        on_unsupported(name, reason)
    if not chosen:
        raise ArgumentError(
            "only", f"must leave a method to time: {'; '.join(available)}. Got {', '.join(map(repr, only))}"
        )
    # One more round for the warm-up.
    total = len(contexts) * (1 + backward) * (runs + 1)
    for context in contexts:
        yield from _measure_methods(chosen, setting, context, backward, runs, lambda what: on_progress(what, total))


def _check_fits(setting: Setting, backward: bool) -> None:
    """Raises a ValueError if the tensors of a call alone are larger than the memory, before they are allocated."""
    on_gpu = setting.device == "cuda"
    room = torch.cuda.get_device_properties(setting.device).total_memory if on_gpu else host_memory()
    needed = setting.least_bytes(backward)
    if needed > room:
        raise ArgumentError(
            "tokens",
            f"must fit into memory: q, k, v and the output of {setting.tokens:,} tokens take at least "
            f"{needed / 1e9:,.1f} GB{' with their gradients' if backward else ''}, and there are {room / 1e9:,.1f} GB; "
            "choose a shorter context, fewer tokens or fewer heads",
        )


def _refusals(chosen: dict[str, Method], setting: Setting, context: int, backward: bool) -> dict[str, str]:
    """Why methods of other packages refuse inputs of this setting, by name: what they say at a first call."""
    found = {}
    for name, method in chosen.items():
        if getattr(method, "func", method) not in OTHERS:
            continue
        call, _ = method(setting, context, setting.inputs(context, grad=backward))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                call()
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError, TypeError, AssertionError, NotImplementedError) as error:
                found[name] = _one_line(error, said)
    return found


def _one_line(error: Exception, said: list[warnings.WarningMessage]) -> str:
    """The message of an exception. Where SDPA has no kernel, the reason is in warnings, among those about the kernels
    that were not to be used.
    """
    reasons = [str(warning.message).partition(" (Triggered")[0] for warning in said]
    reasons = [reason for reason in reasons if not reason.endswith(("runtime disabled.", "not used because:"))]
    return " ".join(f"{type(error).__name__}: {error} {' '.join(reasons)}".split())


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr while `run_bench` runs; yields the callback to pass as its on_progress."""
    rich = require("rich.progress", "cli")
    console = require("rich.console", "cli").Console(stderr=True)
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TimeRemainingColumn())
    # Disabled in a log file, which has a line for each row.
    with rich.Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("first calls", total=None)
        yield lambda what, total: bar.update(task, description=what, advance=1, total=total)


def save_rows(
    rows: Sequence[Row], setting: Setting, command: str, path: Path, unsupported: Mapping[str, str] | None = None
) -> None:
    """Writes rows as JSON, with the device, the versions, the command, and why some methods were not timed."""
    others = [dtype_name(dtype) for dtype in setting.other_dtypes]
    described = {**asdict(setting), "dtype": dtype_name(setting.dtype), "other_dtypes": others}
    measured, reasons = [asdict(row) for row in rows], dict(unsupported or {})
    save_results(
        path, environment(setting.device), command=command, setting=described, rows=measured, unsupported=reasons
    )


def describe(setting: Setting) -> str:
    """The setting in one line."""
    dtype = dtype_name(setting.dtype)
    grouped = setting.group > 1
    heads = f"{setting.heads} query and {setting.kv_heads} key heads" if grouped else f"{setting.heads} heads"
    shape = "" if setting.shape is None else f"{setting.shape}: "
    return f"{shape}{setting.tokens:,} tokens a call, {heads} of {setting.dim}, p = {setting.power}, {dtype}"


def print_rows(rows: Sequence[Row], title: str) -> None:
    """Prints a table: median ± half the range in milliseconds, and speed relative to softmax at the same context."""
    console = require("rich.console", "cli").Console()
    table = require("rich.table", "cli").Table(title=title, title_justify="left")
    columns = ["context", "method", "forward, ms", "speed", "forward + backward, ms", "speed"]
    # Memory is measured on a GPU only.
    with_memory = any(row.extra_bytes is not None for row in rows)
    for column in [*columns, *(["peak extra"] if with_memory else [])]:
        table.add_column(column, justify="left" if column == "method" else "right")
    baseline = {row.context: row for row in rows if row.method in (BASELINE, "softmax")}
    for row in rows:
        base = baseline.get(row.context)
        base_forward, base_both = (base.forward, base.forward_and_backward) if base else (None, None)
        table.add_row(
            f"{row.context:,}",
            row.method,
            _milliseconds(row.forward),
            _speed(base_forward, row.forward),
            _milliseconds(row.forward_and_backward),
            _speed(base_both, row.forward_and_backward),
            *([] if row.extra_bytes is None else [f"{row.extra_bytes / 2**30:.2f} GiB"]),
        )
    console.print(table)


def _measure_methods(
    chosen: dict[str, Method],
    setting: Setting,
    context: int,
    backward: bool,
    runs: int,
    after_round: Callable[[str], None],
) -> Iterator[Row]:
    # On a GPU, the first calls compile and autotune kernels.
    warmup = 3 if setting.device == "cuda" else 1
    timed = partial(measure_interleaved, runs=runs, warmup=warmup, device=setting.device)
    inputs = setting.inputs(context, grad=False)
    with torch.no_grad():
        forward = timed(
            {name: method(setting, context, inputs)[0] for name, method in chosen.items()},
            after_round=partial(after_round, f"{context:,}: forward"),
        )
    if not backward:
        yield from (Row(name, context, forward[name], None, None, None) for name in chosen)
        return
    inputs = setting.inputs(context, grad=True)
    both = {name: _forward_and_backward(*method(setting, context, inputs)) for name, method in chosen.items()}
    both_timing = timed(both, after_round=partial(after_round, f"{context:,}: forward and backward"))
    for name, call in both.items():
        memory = _peak_memory(call) if setting.device == "cuda" else (None, None)
        yield Row(name, context, forward[name], both_timing[name], *memory)


def _forward_and_backward(call: Call, leaves: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    gradient = torch.randn_like(call())

    def both() -> tuple[Tensor, ...]:
        y = call()
        return (y.detach(), *torch.autograd.grad(y, leaves, gradient))

    return both


def _peak_memory(call: Callable[[], tuple[Tensor, ...]]) -> tuple[int, int]:
    """Peak memory allocated by a call in bytes, with and without the tensors that it returns."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    peak = torch.cuda.max_memory_allocated() - before
    return peak, peak - sum(result.nbytes for result in results)


def _softmax(
    kernel: SDPBackend | None, setting: Setting, context: int, inputs: dict[str, Tensor]
) -> tuple[Call, list[Tensor]]:
    # (b, h, t, d) contiguous: the layout in which these kernels are fastest.
    q, k, v = (
        inputs[name].detach().transpose(1, 2).contiguous().requires_grad_(inputs[name].requires_grad) for name in "qkv"
    )

    def call() -> Tensor:
        with nullcontext() if kernel is None else sdpa_kernel(kernel):
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=setting.group > 1)

    return call, [q, k, v]


def _sympow(
    form: Form,
    backend: Backend,
    gating: str,
    dtype: torch.dtype,
    setting: Setting,
    context: int,
    inputs: dict[str, Tensor],
) -> tuple[Call, list[Tensor]]:
    tensors = dict(inputs)
    log_gamma = tensors.pop("log_gamma")
    if dtype != setting.dtype:
        tensors = {name: x.detach().to(dtype).requires_grad_(x.requires_grad) for name, x in tensors.items()}
    if gating == "scalar":
        tensors["log_gamma"] = log_gamma
    elif gating == "vector":
        noise = torch.rand(*log_gamma.shape, setting.dim // 2, device=log_gamma.device)
        by_pair = log_gamma.detach().unsqueeze(-1) * (0.5 + noise)
        tensors["log_gamma"] = by_pair.requires_grad_(log_gamma.requires_grad)
    arguments: dict[str, Any] = {**tensors, "power": setting.power, "form": form, "backend": backend}
    return partial(attention, **arguments), list(tensors.values())


def _retention(setting: Setting, context: int, inputs: dict[str, Tensor]) -> tuple[Call, list[Tensor]]:
    power_retention = import_module("retention").power_retention
    names = {"Q": "q", "K": "k", "V": "v", "log_G": "log_gamma"}
    arguments = {name: inputs[ours] for name, ours in names.items()}
    options = {"deg": setting.power, "scale": setting.dim**-0.5, "chunk_size": min(1024, context)}
    return partial(power_retention, **arguments, **options), list(inputs.values())


def _simple_gla(setting: Setting, context: int, inputs: dict[str, Tensor]) -> tuple[Call, list[Tensor]]:
    chunk_simple_gla = import_module("fla.ops.simple_gla").chunk_simple_gla
    arguments = [
        (x if name == "q" else x.detach().repeat_interleave(setting.group, dim=2)).requires_grad_(x.requires_grad)
        for name, x in inputs.items()
    ]
    return lambda: chunk_simple_gla(*arguments)[0], arguments


# Methods that are not this package's, which have limits of their own.
OTHERS = (_softmax, _retention, _simple_gla)


@cache
def _importable(module: str) -> bool:
    """Whether a package can be imported; warns if it is installed but fails to import."""
    if find_spec(module.partition(".")[0]) is None:
        return False
    try:
        import_module(module)
    except (ImportError, RuntimeError, OSError) as error:
        warnings.warn(f"{module} is installed but cannot be imported, so it is not timed: {error}", stacklevel=2)
        return False
    return True


def _milliseconds(timing: Timing | None) -> str:
    return "" if timing is None else f"{1e3 * timing.median:.3f} ± {5e2 * (timing.slowest - timing.fastest):.3f}"


def _speed(baseline: Timing | None, timing: Timing | None) -> str:
    return "" if baseline is None or timing is None else f"{baseline.median / timing.median:.2f}×"
