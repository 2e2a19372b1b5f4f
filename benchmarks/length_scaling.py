"""Time per token and peak memory of the chunked form by length, beside the attention form and softmax, on a CPU.

    python benchmarks/length_scaling.py --out benchmarks/results/length_scaling_cpu.json

Forward without gradients, p = 2, with gates and rotation. The claim is about the chunked form: its time per token, and
its memory beyond inputs and outputs, do not depend on the length.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from peak_memory import PeakMemory

import sympow
from sympow.check.timing import environment, measure, save_results
from sympow.ops.torch.softmax import softmax_attention

LENGTHS = (4_096, 8_192, 16_384, 32_768)
LARGEST_RATIO = 1.2


def measure_length(length: int, arguments: argparse.Namespace, methods: tuple[str, ...]) -> list[dict[str, Any]]:
    """One row per method at one length."""
    generator = torch.Generator().manual_seed(length)
    q, k, v = torch.randn(3, 1, length, arguments.heads, arguments.dim, generator=generator)
    log_gamma = torch.full((1, length, arguments.heads), 0.999).log()
    beta = 2 * torch.rand(1, length, arguments.heads, generator=generator)
    theta = sympow.rotary_rates(arguments.dim, 65_536)
    calls = {
        "chunked": lambda: sympow.attention(q, k, v, 2, log_gamma, beta, theta, form="chunked"),
        "attention": lambda: sympow.attention(q, k, v, 2, log_gamma, beta, theta, form="attention"),
        "softmax": lambda: softmax_attention(q, k, v, beta=beta, theta=theta),
    }
    rows = []
    for method in methods:
        with torch.no_grad():
            timing = measure(calls[method], runs=arguments.runs)
            with PeakMemory() as memory:
                y = calls[method]()
        rows.append(
            {
                "method": method,
                "length": length,
                "microseconds_per_token": 1e6 * timing.median / length,
                "spread": timing.spread,
                "runs": timing.runs,
                "peak_bytes_beyond_inputs_and_outputs": memory.peak - y.nbytes,
            }
        )
        print(
            f"{method:>10} {length:>7,} tokens  {rows[-1]['microseconds_per_token']:7.2f} µs/token  "
            f"± {100 * timing.spread / 2:4.1f} %  {rows[-1]['peak_bytes_beyond_inputs_and_outputs'] / 1e6:8.2f} MB",
            flush=True,
        )
    return rows


def main() -> int:
    """Returns 1 if the chunked form's time per token depends on the length by more than LARGEST_RATIO."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument(
        "--longest-quadratic", type=int, default=16_384, help="longest length for the other two methods"
    )
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for length in LENGTHS:
        quadratic = length <= arguments.longest_quadratic
        rows += measure_length(length, arguments, ("chunked", "attention", "softmax") if quadratic else ("chunked",))
    chunked = [row for row in rows if row["method"] == "chunked"]
    times = [row["microseconds_per_token"] for row in chunked]
    peaks = [row["peak_bytes_beyond_inputs_and_outputs"] for row in chunked]
    summary = {
        "time_per_token_largest_over_smallest": max(times) / min(times),
        "peak_bytes_longest_over_shortest": peaks[-1] / peaks[0],
    }
    print(json.dumps(summary))
    if summary["time_per_token_largest_over_smallest"] > LARGEST_RATIO:
        print(f"time per token varies by more than {LARGEST_RATIO:g}: was the machine busy?", file=sys.stderr)
    if arguments.out:
        shape = {"power": 2, "heads": arguments.heads, "dim": arguments.dim, "dtype": "float32"}
        save_results(arguments.out, environment(), shape=shape, rows=rows, summary=summary)
    return int(summary["time_per_token_largest_over_smallest"] > LARGEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
