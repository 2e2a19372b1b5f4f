"""Time per token and peak memory of the chunked form by length, beside the attention form and softmax, on a CPU.

    python benchmarks/length_scaling.py --out benchmarks/results/length_scaling_cpu.json

One sequence, p = 2, float32, with gates and RoPE; softmax is torch's scaled_dot_product_attention of rotated queries
and keys. The methods take turns, without gradients and with them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peak_memory import PeakMemory
from torch import Tensor

import sympow
from sympow.check.timing import environment, measure_interleaved, save_results
from sympow.ops.torch.softmax import softmax_attention

LENGTHS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768)


def methods(dim: int, length: int, heads: int, longest_quadratic: int) -> dict[str, Callable[[Any], Tensor]]:
    """Calls of queries, keys and values, by name."""
    log_gamma = torch.full((1, length, heads), 0.999).log()
    theta = sympow.rotary_rates(dim, 65_536)
    gated = partial(sympow.attention, log_gamma=log_gamma, theta=theta)
    calls: dict[str, Callable[[Any], Tensor]] = {
        "chunked": lambda qkv: gated(*qkv, form="chunked"),
        "attention": lambda qkv: gated(*qkv, form="attention"),
        "softmax": lambda qkv: softmax_attention(qkv[0], qkv[1], qkv[2], theta=theta),
    }
    return calls if length <= longest_quadratic else {"chunked": calls["chunked"]}


def measure_length(dim: int, length: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each method at one length."""
    generator = torch.Generator().manual_seed(length)
    inputs = torch.randn(3, 1, length, arguments.heads, dim, generator=generator)
    leaves = [x.clone().requires_grad_() for x in inputs]
    calls = methods(dim, length, arguments.heads, arguments.longest_quadratic)

    def forward(name: str) -> Callable[[], Tensor]:
        return lambda: torch.no_grad()(calls[name])(inputs)

    def backward(name: str) -> Callable[[], None]:
        return lambda: calls[name](leaves).sum().backward()

    timings = {
        kind: measure_interleaved({name: function(name) for name in calls}, runs=arguments.runs)
        for kind, function in (("forward", forward), ("with_backward", backward))
    }
    rows = []
    for name in calls:
        with PeakMemory() as memory:
            y = forward(name)()
        row: dict[str, Any] = {"method": name, "dim": dim, "length": length}
        for kind, measured in timings.items():
            timing = measured[name]
            row[kind] = {"microseconds_per_token": 1e6 * timing.median / length, "spread": timing.spread}
        row["peak_bytes_beyond_inputs_and_outputs"] = memory.peak - y.nbytes
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measures every length and head dim."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 32], help="sizes of heads (default: 64 32)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="contexts")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: 1)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--longest-quadratic", type=int, default=16_384, help="longest length for the other methods")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [
        row for dim in arguments.dims for length in arguments.lengths for row in measure_length(dim, length, arguments)
    ]
    if arguments.out:
        shape = {"power": 2, "heads": arguments.heads, "dtype": "float32", "runs": arguments.runs}
        save_results(arguments.out, environment(), shape=shape, rows=rows)


if __name__ == "__main__":
    main()
