"""The three forms on a CPU, in about a minute: that they agree, their time by context, and the size of a state.

python examples/three_forms.py --out build/three_forms
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import sympow
from sympow.check.timing import Timing, environment, measure
from sympow.model.accounting import crossover, key_value_elements, state_elements
from sympow.ops import reference
from sympow.ops.torch.softmax import softmax_attention
from sympow.report.figure_files import plot_time_against_context
from sympow.report.model_info import format_bytes

HEADS, DIM = 4, 32
CONTEXTS = (512, 1_024, 2_048, 4_096, 8_192, 16_384)


def make_inputs(length: int, heads: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """A random sequence with gates and data-dependent rotation."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (1 + torch.randn(3, 1, length, heads, dim, generator=generator)).to(dtype)
    return {
        "q": q,
        "k": k,
        "v": v,
        "log_gamma": torch.rand(1, length, heads, generator=generator).mul(0.1).neg().to(dtype),
        "beta": torch.rand(1, length, heads, generator=generator).mul(2).to(dtype),
        "theta": sympow.rotary_rates(dim, 65_536).to(dtype),
    }


def show_agreement(console: Console) -> None:
    """Compares outputs and gradients of every form with the paper's equations, `sympow.ops.reference`."""
    table = Table(title="Largest difference from the paper's equations, float64, 24 tokens", title_justify="left")
    for column in ("", "p = 2: outputs", "gradients", "p = 4: outputs", "gradients"):
        table.add_column(column, justify="right" if column else "left")
    inputs = {name: x.requires_grad_() for name, x in make_inputs(24, 2, 4, torch.float64).items()}

    def gradients(y: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(y.square().sum(), tuple(inputs.values()))

    rows: dict[str, Callable[[int], Tensor]] = {
        "attention form": lambda p: sympow.attention(**inputs, power=p, form="attention"),
        "chunked form, chunks of 7": lambda p: sympow.attention(**inputs, power=p, form="chunked", chunk_size=7),
        "recurrent form": lambda p: sympow.attention(**inputs, power=p, form="recurrent"),
        "chunked, then recurrent": lambda p: in_two_calls(inputs, p, 15),
    }
    expected = {}
    for power in (2, 4):
        y = reference.attention(**inputs, power=power)
        expected[power] = (y, *gradients(y))
    for name, form in rows.items():
        cells = []
        for power, wanted in expected.items():
            y = form(power)
            off = [(a - b).abs().max().item() for a, b in zip((y, *gradients(y)), wanted, strict=True)]
            cells += [f"{off[0]:.1e}", f"{max(off[1:]):.1e}"]
        table.add_row(name, *cells)
    console.print(table)


def in_two_calls(inputs: dict[str, Any], power: int, cut: int) -> Tensor:
    """The first tokens by the chunked form, the rest by the recurrent form from the returned state."""
    calls = [{n: x if n == "theta" else x[:, s] for n, x in inputs.items()} for s in (slice(cut), slice(cut, None))]
    head, state = sympow.attention(**calls[0], power=power, form="chunked", chunk_size=7, return_state=True)
    tail = sympow.attention(**calls[1], power=power, form="recurrent", initial_state=state)
    return torch.cat([head, tail], dim=1)


@torch.no_grad()
def time_forms(console: Console, contexts: Sequence[int]) -> dict[str, dict[int, Timing]]:
    """Times the forward pass of the operator with gates, p = 2, float32."""
    timings: dict[str, dict[int, Timing]] = {"softmax": {}, "attention form": {}, "chunked form": {}}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("timing", total=len(contexts))
        for context in contexts:
            inputs = make_inputs(context, HEADS, DIM, torch.float32)
            plain = {name: x for name, x in inputs.items() if name != "log_gamma"}
            calls: dict[str, Callable[[], Tensor]] = {
                "softmax": partial(softmax_attention, **plain),
                "attention form": partial(sympow.attention, **inputs, form="attention"),
                "chunked form": partial(sympow.attention, **inputs, form="chunked"),
            }
            for method, call in calls.items():
                timings[method][context] = measure(call, runs=3)
            progress.advance(task)
    return timings


def machine() -> str:
    """What was timed on, in words."""
    found = environment()
    threads = "1 thread" if found["threads"] == 1 else f"{found['threads']} threads"
    return f"{found['device']}, {threads}, torch {found['torch']}"


def show_timings(console: Console, timings: dict[str, dict[int, Timing]]) -> None:
    table = Table(title=f"Time per call, ms ({machine()})", title_justify="left")
    table.add_column("context", justify="right")
    for method in timings:
        table.add_column(method, justify="right")
    for context in timings["softmax"]:
        cells = [
            f"{1e3 * by[context].median:.1f} ± {1e3 * (by[context].slowest - by[context].fastest) / 2:.1f}"
            for by in timings.values()
        ]
        table.add_row(f"{context:,}", *cells)
    console.print(table)


def show_states(console: Console) -> None:
    table = Table(title="Size of the state of one sequence, bfloat16, all layers", title_justify="left")
    for column in ("model", "power", "state", "KV cache at 65,536", "cheaper than attention from"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for name in ("gpt2-124m", "byte-11m", "byte-400k"):
        for power in (2, 4):
            config = sympow.GPTConfig.preset(name, power=power)
            table.add_row(
                name,
                str(power),
                format_bytes(2 * state_elements(config)),
                format_bytes(2 * key_value_elements(config, 65_536)),
                f"{crossover(config):,} tokens",
            )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/three_forms"), help="folder for the figure")
    parser.add_argument("--tiny", action="store_true", help="only the two shortest contexts")
    arguments = parser.parse_args()
    out: Path = arguments.out
    console = Console()
    show_agreement(console)
    timings = time_forms(console, CONTEXTS[:2] if arguments.tiny else CONTEXTS)
    show_timings(console, timings)
    show_states(console)
    figure = out / "time_against_context.png"
    plot_time_against_context(timings, f"Forward, p = 2, {HEADS} heads of {DIM}, float32; {machine()}", figure)
    console.print(f"\nFigure: {figure}")
    console.print("Next: sympow info --help, README.md for the operator, docs/ for the mathematics")


if __name__ == "__main__":
    main()
