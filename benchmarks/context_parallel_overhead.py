"""Overhead of context parallelism on one GPU: a group of one rank, and the work of a middle rank, beside the operator.

    python benchmarks/context_parallel_overhead.py --out benchmarks/results/h200_context_parallel.json

"plain" is `sympow.attention`, "one rank" is `sympow.parallel.attention` on a group of one, forward and backward: the
claim is that the second costs less than 2 % more. "middle rank" is what one rank of many computes for the same tokens,
without communication: it folds its own tokens, and attends to them and to a received state. That time is one of the two
that benchmarks/scaling_simulation.py uses. With --kernels, each kernel's time is listed too: if their sum is less than
the total, the device waits for the host.

Each of the two is interleaved with the plain path alone. A device that waited for the host has cooled down and runs
the next call faster; with three interleaved calls that would always favour the same one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import sympow
from sympow.check.timing import Timing, environment, measure_interleaved, save_results
from sympow.parallel import Shards
from sympow.parallel import attention as sharded_attention

LARGEST_OVERHEAD = 0.02
RANKS = 4
PLAIN_AGAIN = "plain, beside the middle rank"


def make_inputs(arguments: argparse.Namespace, context: int) -> dict[str, Any]:
    """Inputs with gates and data-dependent rotation that require gradients."""
    device, batch = arguments.device, max(1, arguments.tokens // context)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, context, *shape, device=device, generator=generator)

    dtype = getattr(torch, arguments.dtype)
    inputs = {name: normal(arguments.heads, arguments.dim).to(dtype) for name in ("q", "k", "v")}
    inputs["log_gamma"] = -0.001 * normal(arguments.heads).exp()
    inputs["beta"] = 1 + 0.1 * normal(arguments.heads).tanh()
    for tensor in inputs.values():
        tensor.requires_grad_()
    return {**inputs, "theta": sympow.rotary_rates(arguments.dim, 65_536, device=device)}


def with_backward(function: Callable[[], Tensor], inputs: dict[str, Any]) -> Callable[[], None]:
    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    dy = torch.ones_like(function())

    def run() -> None:
        torch.autograd.grad(function(), leaves, dy)

    return run


def describe(timing: Timing) -> dict[str, Any]:
    return {**vars(timing), "spread": timing.spread}


def time_by_kernel(call: Callable[[], Any], device: str, calls: int = 5) -> dict[str, dict[str, float]]:
    """Seconds and launches of each kernel in one call, longest first. The sum is the time that the device is busy."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    call()
    with profile(activities=activities) as profiler:
        for _ in range(calls):
            call()
    found = [event for event in profiler.key_averages() if event.device_type.name == device.upper()]
    seconds = {event.key: (event.self_device_time_total if device == "cuda" else event.self_cpu_time_total) / 1e6
               for event in found}  # fmt: skip
    launches = {event.key: event.count for event in found}
    names = sorted(seconds, key=lambda name: -seconds[name])
    return {name: {"seconds": seconds[name] / calls, "launches": launches[name] / calls} for name in names}


def time_beside_plain(calls: dict[str, Callable[[], Any]], arguments: argparse.Namespace) -> dict[str, Timing]:
    """Timings of each call, and of the plain path twice: interleaved with one rank, and with the middle rank."""
    how: dict[str, Any] = {"runs": arguments.runs, "warmup": 3, "device": arguments.device}
    alone = measure_interleaved({name: calls[name] for name in ("plain", "one rank")}, **how)
    among = measure_interleaved({PLAIN_AGAIN: calls["plain"], "middle rank": calls["middle rank"]}, **how)
    return alone | among


def measure_context(arguments: argparse.Namespace, context: int, alone: dist.ProcessGroup) -> Iterator[dict[str, Any]]:
    """Rows of one context: forward alone, and forward with backward."""
    inputs = make_inputs(arguments, context)
    assert dist.group.WORLD is not None
    one, middle = Shards(alone, (context,)), Shards(dist.group.WORLD, (context,) * RANKS)
    calls: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: sympow.attention(**inputs, power=arguments.power),
        "one rank": lambda: sharded_attention(**inputs, power=arguments.power, shards=one),
        "middle rank": lambda: sharded_attention(**inputs, power=arguments.power, shards=middle),
    }
    for what in ("forward", "forward and backward"):
        timed: dict[str, Callable[[], Any]] = {}
        for name, call in calls.items():
            timed[name] = with_backward(call, inputs) if what != "forward" else torch.no_grad()(call)
        kernels = {}
        if arguments.kernels:
            kernels = {name: time_by_kernel(call, arguments.device) for name, call in timed.items()}
        timings = time_beside_plain(timed, arguments)
        overhead = timings["one rank"].median / timings["plain"].median - 1
        ratio = timings["middle rank"].median / timings[PLAIN_AGAIN].median
        print(
            f"{context:>7,} tokens, {what}: plain {1e3 * timings['plain'].median:.3f} ms, one rank {overhead:+.2%}, "
            f"a middle rank {ratio:.2f} times as much",
            flush=True,
        )
        for name, found in kernels.items():
            busy, launches = (sum(kernel[what] for kernel in found.values()) for what in ("seconds", "launches"))
            print(f"        {name}: kernels take {1e3 * busy:.3f} ms in {launches:.0f} launches", flush=True)
        yield {
            "context": context,
            "what": what,
            "overhead_of_one_rank": overhead,
            "middle_rank_over_plain": ratio,
            "timings": {name: describe(timing) for name, timing in timings.items()},
            **({"kernels": kernels} if kernels else {}),
        }


def main() -> int:
    """Returns 1 if one rank costs more than LARGEST_OVERHEAD over the plain path, forward and backward."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", help="by default bfloat16 on a GPU, float32 elsewhere")
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens per call, in as many sequences as fit")
    parser.add_argument("--context", type=int, nargs="+", default=[4_096, 16_384, 65_536])
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--power", type=int, default=2)
    parser.add_argument("--runs", type=int, default=40, help="samples of each call")
    parser.add_argument("--kernels", action="store_true", help="also list the time of each kernel")
    arguments = parser.parse_args()
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.device == "cuda" else "float32")
    # A fake process group without communication: this process acts as one of several.
    dist.init_process_group("fake", store=FakeStore(), rank=RANKS // 2, world_size=RANKS)
    setting = {name: value for name, value in vars(arguments).items() if name != "out"}
    rows = []
    try:
        alone = dist.new_group([RANKS // 2])
        for row in (row for context in arguments.context for row in measure_context(arguments, context, alone)):
            rows.append(row)
            # After every row, so that an interrupted run keeps its results.
            if arguments.out:
                save_results(arguments.out, environment(arguments.device), setting=setting, rows=rows)
    finally:
        dist.destroy_process_group()
    worst = max(row["overhead_of_one_rank"] for row in rows if row["what"] != "forward")
    print(f"largest overhead of one rank, forward and backward: {worst:+.2%} (claim: below {LARGEST_OVERHEAD:.0%})")
    return int(worst > LARGEST_OVERHEAD)


if __name__ == "__main__":
    sys.exit(main())
