"""One decoding step beside softmax with a cache, and the rotation of queries and keys, on a GPU.

    python benchmarks/decode_and_rotation.py --out benchmarks/results/h200_decode_and_rotation.json

A decoding step is timed by replaying a CUDA graph of it, as generation runs it, against `scaled_dot_product_attention`
of one query with a cache, captured likewise. Bandwidth counts the state read once and written once, beside that of a
plain copy.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import sympow
from sympow.kernels.rotation_op import fused_rotation
from sympow.report.timing import environment, measure

BATCH, HEADS, DIM = 16, 12, 64
STEPS_PER_REPLAY = 10


def graph_of(function: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """A graph of several calls, recorded after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            function()
    return graph


def time_graph(name: str, function: Callable[[], Any], runs: int, **facts: Any) -> dict[str, Any]:
    graph = graph_of(function, STEPS_PER_REPLAY)
    timing = measure(graph.replay, runs=runs, warmup=5, device="cuda")
    row = {"what": name, "microseconds": 1e6 * timing.median / STEPS_PER_REPLAY, "spread": timing.spread, **facts}
    print(json.dumps(row), flush=True)
    return row


@torch.no_grad()
def decode_rows(power: int, dim: int, runs: int) -> list[dict[str, Any]]:
    """A gated, data-dependently rotated step from a random state."""
    q, k, v = torch.randn(3, BATCH, 1, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    log_gamma = torch.full((BATCH, 1, HEADS), -0.001, device="cuda")
    beta = torch.rand(BATCH, 1, HEADS, device="cuda")
    theta = sympow.rotary_rates(dim, 65_536, device="cuda")
    keys, values = torch.randn(2, BATCH, 256, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    _, state = sympow.attention(keys, keys, values, power, theta=theta, return_state=True, backend="torch")
    arguments: dict[str, Any] = {"log_gamma": log_gamma, "beta": beta, "theta": theta, "power": power}
    expected = sympow.attention(q, k, v, **arguments, initial_state=state, form="recurrent", backend="torch")
    actual = sympow.attention(q, k, v, **arguments, initial_state=state, backend="triton")
    error = ((actual - expected).double().norm() / expected.double().norm()).item()

    def step() -> None:
        sympow.attention(q, k, v, **arguments, initial_state=state, return_state=True, backend="triton")

    size = state.kv.nbytes + state.normalizer.nbytes
    source, target = torch.empty_like(state.kv), torch.empty_like(state.kv)
    copy = time_graph("copy of the state", lambda: target.copy_(source), runs, bytes_moved=2 * target.nbytes)
    row = time_graph(f"decode, p = {power}, d = {dim}", step, runs, bytes_moved=2 * size, error=error)
    for measured in (copy, row):
        measured["terabytes_per_second"] = measured["bytes_moved"] / measured["microseconds"] / 1e6
    row["fraction_of_copy_bandwidth"] = row["terabytes_per_second"] / copy["terabytes_per_second"]
    print(json.dumps(row), flush=True)
    return [copy, row]


@torch.no_grad()
def softmax_rows(runs: int) -> list[dict[str, Any]]:
    rows = []
    for keys in (2_048, 16_384, 65_536):
        q = torch.randn(BATCH, HEADS, 1, DIM, device="cuda", dtype=torch.bfloat16)
        k, v = torch.randn(2, BATCH, HEADS, keys, DIM, device="cuda", dtype=torch.bfloat16)
        call = lambda q=q, k=k, v=v: scaled_dot_product_attention(q, k, v)  # noqa: E731
        rows.append(time_graph(f"softmax decode, {keys:,} keys", call, runs))
    return rows


def rotation_rows(runs: int) -> list[dict[str, Any]]:
    """65,536 tokens of 12 heads of 64, with a scale per head and token."""
    q, k = torch.randn(2, 1, 65_536, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    beta = 2 * torch.rand(1, 65_536, HEADS, device="cuda")
    theta = sympow.rotary_rates(DIM, 65_536, device="cuda")
    turned, _ = fused_rotation(q, k, beta, theta, None)
    angles = sympow.accumulate_phase(theta, beta)
    expected = sympow.rotate(q.double(), angles)
    error = ((turned - expected).norm() / expected.norm()).item()
    timing = measure(lambda: fused_rotation(q, k, beta, theta, None), runs=runs, warmup=5, device="cuda")
    eager = {"what": "rotation, forward", "microseconds": 1e6 * timing.median, "spread": timing.spread, "error": error}
    print(json.dumps(eager), flush=True)
    graph = time_graph("rotation, forward, in a graph", lambda: fused_rotation(q, k, beta, theta, None), runs)
    return [eager, graph]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--runs", type=int, default=30)
    arguments = parser.parse_args()
    rows = [*decode_rows(2, DIM, arguments.runs), *softmax_rows(arguments.runs), *rotation_rows(arguments.runs)]
    rows += decode_rows(4, 16, arguments.runs)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        shape = {"batch": BATCH, "heads": HEADS, "dim": DIM}
        content = {"environment": environment("cuda"), "shape": shape, "rows": rows}
        arguments.out.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
