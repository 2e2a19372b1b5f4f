"""Time of a decoding step, beside softmax with a KV cache, and of RoPE on queries and keys, on a GPU.

    python benchmarks/decode_and_rotation.py --out benchmarks/results/h200_decode_and_rotation.json

Decoding is timed by replaying CUDA graphs, as in generation, and so is its baseline, `scaled_dot_product_attention` of
one query with a KV cache. There are two modes. Without a window, each step reads and writes the state. With a window of
`capacity` tokens, each step reads a 16-bit copy of the state, and after `capacity` steps a fold reads and writes the
state and writes the copy; the time per step includes its share of the fold. Each graph cycles through several states,
as a model does through its layers, so that no state stays in the L2 cache. Bandwidth counts the bytes of states read
and written; a plain copy is timed beside it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

import sympow
from sympow.check.timing import environment, measure, save_results
from sympow.kernels.rotary import fused_rotation
from sympow.ops.window import Window

BATCH, HEADS, DIM = 16, 12, 64
# Number of states that a graph cycles through, and of calls that it captures.
LAYERS = 3
STEPS_PER_REPLAY = 12
CAPACITIES = (32, 64, 128)


def graph_of(function: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    """A CUDA graph of several calls, captured after a warm-up."""
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


def time_graph(
    name: str, function: Callable[[], Any], runs: int, repeats: int = STEPS_PER_REPLAY, steps: int = 1, **facts: Any
) -> dict[str, Any]:
    """A row with the microseconds per step, where one call of the function makes `steps` steps."""
    graph = graph_of(function, repeats)
    timing = measure(graph.replay, runs=runs, warmup=5, device="cuda")
    row = {"what": name, "microseconds": 1e6 * timing.median / repeats / steps, "spread": timing.spread, **facts}
    if "bytes_moved" in facts:
        row["terabytes_per_second"] = row["bytes_moved"] / row["microseconds"] / 1e6
    print(json.dumps(row), flush=True)
    return row


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).double().norm() / expected.double().norm()).item()


@torch.no_grad()
def decode_rows(power: int, dim: int, runs: int) -> list[dict[str, Any]]:
    """Steps with gates and data-dependent rotation from states of random keys, in both modes."""
    shape = (BATCH, 1, HEADS)
    q, k, v = torch.randn(3, *shape, dim, device="cuda", dtype=torch.bfloat16)
    token: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "log_gamma": torch.full(shape, -0.001, device="cuda"),
        "beta": torch.rand(shape, device="cuda"),
        "theta": sympow.rotary_rates(dim, 65_536, device="cuda"),
    }
    keys, values = torch.randn(2, BATCH, 256, HEADS, dim, device="cuda", dtype=torch.bfloat16)
    _, state = sympow.attention(keys, keys, values, power, theta=token["theta"], return_state=True, backend="torch")
    expected = sympow.attention(**token, power=power, initial_state=state, form="recurrent", backend="torch")
    states = [state.clone() for _ in range(LAYERS)]
    label = f"p = {power}, d = {dim}"

    sources, target = cycle(states), torch.empty_like(state.kv)
    copy = time_graph(
        f"copy of the state, {label}", lambda: target.copy_(next(sources).kv), runs, bytes_moved=2 * target.nbytes
    )

    def step(before: sympow.State) -> torch.Tensor:
        return sympow.attention(**token, power=power, initial_state=before, return_state=True, backend="triton")[0]

    rows = [
        time_graph(
            f"decode, {label}",
            lambda: step(next(sources)),
            runs,
            bytes_moved=2 * state_bytes(state),
            error=relative_error(step(state), expected),
        )
    ]
    rows += [window_row(states, token, expected, size, runs, f"window, {label}") for size in CAPACITIES]
    for row in rows:
        row["fraction_of_copy_bandwidth"] = row["terabytes_per_second"] / copy["terabytes_per_second"]
        print(
            row["what"], f"{row['microseconds']:.1f} µs, {row['fraction_of_copy_bandwidth']:.0%} of a copy", flush=True
        )
    return [copy, *rows]


def state_bytes(state: sympow.State) -> int:
    return state.kv.nbytes + state.normalizer.nbytes


def window_bytes(window: Window) -> float:
    """Bytes of the state and of its 16-bit copy that a step moves, with its share of the fold."""
    assert window.kv is not None
    assert window.normalizer is not None
    state = window.kv.nbytes + window.normalizer.nbytes
    if window.kv_half is None or window.kv_scale is None:
        return state * (window.capacity + 2) / window.capacity
    copy = window.kv_half.nbytes + window.kv_scale.nbytes
    return copy + window.normalizer.nbytes + (2 * state + copy) / window.capacity


def window_row(
    states: list[sympow.State], token: dict[str, Any], expected: torch.Tensor, capacity: int, runs: int, name: str
) -> dict[str, Any]:
    """Time per step of filling and folding a window in every layer, and the time of a fold alone."""
    windows = [Window.open(state, capacity=capacity, dtype=torch.bfloat16) for state in states]
    error = relative_error(windows[0].step(**token, backend="triton"), expected)
    windows[0].fold("triton")

    def fill_and_fold() -> None:
        for _ in range(capacity):
            for window in windows:
                window.step(**token, backend="triton")
        for window in windows:
            window.fold("triton")

    row = time_graph(
        f"{name}, {capacity} tokens, folds included",
        fill_and_fold,
        runs,
        repeats=1,
        steps=capacity * LAYERS,
        bytes_moved=window_bytes(windows[0]),
        capacity=capacity,
        error=error,
    )
    around = cycle(windows)

    def fold_a_full_window() -> None:
        window = next(around)
        window.count.fill_(capacity)
        window.fold("triton")

    fold = time_graph(f"{name}, {capacity} tokens, a fold alone", fold_a_full_window, runs)
    row["microseconds_of_a_fold"] = fold["microseconds"]
    return row


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
    """RoPE on 65,536 tokens with 12 heads of 64, with β for each head and token."""
    q, k = torch.randn(2, 1, 65_536, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    beta = 2 * torch.rand(1, 65_536, HEADS, device="cuda")
    theta = sympow.rotary_rates(DIM, 65_536, device="cuda")
    rotated, _ = fused_rotation(q, k, beta, theta, None)
    angles = sympow.accumulate_phase(theta, beta)
    expected = sympow.rotate(q.double(), angles)
    error = ((rotated - expected).norm() / expected.norm()).item()
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
        shape = {"batch": BATCH, "heads": HEADS, "dim": DIM}
        save_results(arguments.out, environment("cuda"), shape=shape, rows=rows)


if __name__ == "__main__":
    main()
