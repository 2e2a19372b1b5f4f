"""Step time of one long sequence on up to 1,024 GPUs, simulated from kernel times of one GPU and stated link speeds.

    python benchmarks/scaling_simulation.py --out benchmarks/results/scaling_simulation.json

Nothing here is measured on more than one GPU. Kernel times are those of benchmarks/results/h200_p2.json; the work of a
rank is counted, and also taken from h200_context_parallel.json if that exists. Messages have the sizes of
`traffic.py`, which tests compare with counted bytes. docs/benchmarks.md lists the assumptions.
A figure is written beside the JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from traffic import LayerShape, key_value_bytes, message_bytes

from sympow.check.timing import save_results
from sympow.extras import require
from sympow.model.accounting import other_operations
from sympow.model.config import GPTConfig
from sympow.parallel.scan import MOST_BYTES_GATHERED, MOST_RANKS_GATHERED, rounds_of
from sympow.settings import symmetric_dim

RESULTS = Path(__file__).parent / "results"
CONTEXTS = (65_536, 1_048_576, 10_485_760, 104_857_600)
GPUS = tuple(2**n for n in range(11))
MEASURED_TOKENS = 65_536
# Bytes of memory traffic that one of several ranks has and a single GPU does not, for a forward and backward pass over
# 65,536 tokens and 12 heads of 64 in chunks of 1,024. In each pass the rank keeps the states of chunks in float32
# instead of bfloat16, writes and reads them once, and reads them again for the state that it sends: 3 · 4 bytes instead
# of 2 · 2 for each of 64 · 12 · 64³ elements. It also concatenates the outputs of both halves of the heads: y, dq, dk
# and dv are read and written once more.
MOVED = 2 * (12 - 4) * (64 * 12 * 64**3) + 4 * 2 * (MEASURED_TOKENS * 12 * 64 * 2)


@dataclass(frozen=True)
class Machine:
    """Assumed properties of the cluster; none is measured.

    Attributes:
        per_node: GPUs that NVLink connects.
        near: bandwidth between two GPUs of a node, in bytes per second and direction.
        far: the same between GPUs of different nodes.
        efficiency: fraction of the bandwidth that messages reach.
        near_latency, far_latency: seconds before a message's first byte.
        memory: memory bandwidth of a GPU in bytes per second.
        matrix_rate: FLOP/s that projections and MLPs reach.
        memory_bytes: memory of a GPU.
    """

    per_node: int = 8
    near: float = 450e9
    far: float = 50e9
    efficiency: float = 0.8
    near_latency: float = 10e-6
    far_latency: float = 25e-6
    memory: float = 3.5e12
    matrix_rate: float = 445e12
    memory_bytes: float = 141e9

    def send(self, size: float, gpus: int) -> float:
        """Seconds to send a message over the slowest link in use."""
        near = gpus <= self.per_node
        return (self.near_latency if near else self.far_latency) + size / (
            self.efficiency * (self.near if near else self.far)
        )


@dataclass(frozen=True)
class Kernels:
    """Seconds for 65,536 tokens and 12 heads of 64, forward and backward, on one H200.

    Attributes:
        chunked: the chunked form, p = 2; it does not depend on the context.
        softmax: cuDNN at a context of 65,536 tokens; it is proportional to the context.
        attention: the attention form, p = 2, at a context of 65,536 tokens; it is proportional to the context.
        middle_rank: time of a rank that receives and sends a state, relative to `chunked`, from counted bytes.
        middle_rank_measured: the same ratio from h200_context_parallel.json; None if there is no such file.
    """

    chunked: float
    softmax: float
    attention: float
    middle_rank: float
    middle_rank_measured: float | None


def read_kernels(results: Path, machine: Machine) -> Kernels:
    """Kernel times from the committed benchmarks of one H200."""
    rows = json.loads((results / "h200_p2.json").read_text())["rows"]
    at = {row["method"]: row["forward_and_backward"]["median"] for row in rows if row["context"] == MEASURED_TOKENS}
    measured = results / "h200_context_parallel.json"
    middle = None
    if measured.exists():
        rows = json.loads(measured.read_text())["rows"]
        # The longest context, since shards are long; there the plain path takes the chunked form as well.
        longest = max((row for row in rows if row["what"] == "forward and backward"), key=lambda row: row["context"])
        middle = longest["middle_rank_over_plain"]
    chunked = at["chunked form, triton"]
    return Kernels(
        chunked=chunked,
        softmax=at["softmax, cuDNN"],
        attention=at["attention form, triton"],
        middle_rank=1 + MOVED / machine.memory / chunked,
        middle_rank_measured=middle,
    )


@dataclass(frozen=True)
class Step:
    """Seconds of a training step of one sequence: compute of one GPU, and its time waiting for messages."""

    method: str
    context: int
    gpus: int
    compute: float
    waiting: float
    bytes_per_layer: float
    fits: bool

    @property
    def total(self) -> float:
        return self.compute + self.waiting


class Simulation:
    """Step times of the paper's 124M model with one sequence on all GPUs."""

    def __init__(self, kernels: Kernels, machine: Machine, config: GPTConfig) -> None:
        self.kernels, self.machine, self.config = kernels, machine, config

    def others(self, tokens: float) -> float:
        """Seconds of everything but attention, forward and backward."""
        return 3 * other_operations(self.config) * tokens / self.machine.matrix_rate

    def through_states(
        self, context: int, gpus: int, shape: LayerShape, per_token: float, middle_rank: float, method: str
    ) -> Step:
        """Context parallelism with states: fold, exchange, attend.

        Args:
            per_token: seconds of one layer's attention on one GPU, forward and backward.
            middle_rank: time of one of several ranks, relative to a single GPU.
        """
        tokens, layers = context / gpus, self.config.layers
        message = message_bytes(shape)
        gathered = gpus <= MOST_RANKS_GATHERED and gpus * message <= MOST_BYTES_GATHERED
        local = tokens * per_token * (middle_rank if gpus > 1 else 1)
        # Half of each exchange overlaps with compute on the other heads. Of several rounds, only the first does.
        behind = local / 4
        if gpus == 1:
            messages, waiting = 0, 0.0
        elif gathered:
            messages = gpus - 1
            waiting = 2 * max(0.0, messages * self.machine.send(message, gpus) - behind)
        else:
            rounds = rounds_of(gpus)
            messages = len(rounds)
            add = 5 * message / self.machine.memory
            first = self.machine.send(message, gpus)
            waiting = 2 * (max(0.0, first - behind) + sum(self.machine.send(message, gpus) + add for _ in rounds[1:]))
        phases = 2 * self.machine.send(0, gpus) if gpus > 1 else 0.0
        memory = (2 if not gathered else gpus + 1) * message
        return Step(
            method,
            context,
            gpus,
            self.others(tokens) + layers * local,
            layers * (waiting + phases),
            2.0 * messages * message,
            memory < self.machine.memory_bytes / 2,
        )

    def by_ring(self, context: int, gpus: int, per_token: float, method: str) -> Step:
        """Ring attention; `per_token`: time of one layer's attention at 65,536 tokens, forward and backward."""
        tokens, layers, shape = context / gpus, self.config.layers, LayerShape()
        local = tokens * per_token * context / 65_536
        shard = key_value_bytes(shape, context) / gpus
        # Forward one shard of keys and values per step; backward also their gradients in float32.
        waiting = 0.0
        sent = 0.0
        for share, size in ((1 / 3, shard), (2 / 3, 3 * shard)):
            step = share * local / gpus
            waiting += (gpus - 1) * max(0.0, self.machine.send(size, gpus) - step)
            sent += (gpus - 1) * size
        return Step(method, context, gpus, self.others(tokens) + layers * local, layers * waiting, sent, True)

    def by_gather(self, context: int, gpus: int, per_token: float, method: str) -> Step:
        """All-gather of keys and values before attention, as softmax does under --context-parallel."""
        tokens, layers, shape = context / gpus, self.config.layers, LayerShape()
        # The last rank attends to the whole context, and the others wait for it.
        local = tokens * per_token * context / 65_536 * (2 - 1 / gpus)
        everything = key_value_bytes(shape, context)
        sent = 2 * everything * (gpus - 1) / gpus
        waiting = 2 * self.machine.send(sent / 2, gpus) if gpus > 1 else 0.0
        fits = 2 * everything < self.machine.memory_bytes / 2
        return Step(method, context, gpus, self.others(tokens) + layers * local, layers * waiting, sent, fits)


def simulate(kernels: Kernels, machine: Machine) -> list[Step]:
    """All methods, contexts and numbers of GPUs."""
    simulation = Simulation(kernels, machine, GPTConfig.preset("gpt2-124m", rotary="scale"))
    per_token = 1 / 65_536
    quadratic, quartic = LayerShape(), LayerShape(power=4)
    # Assumes that kernels for p = 4 are as fast per feature as those for p = 2. For heads of 64 there are none.
    larger = symmetric_dim(64, 4) / symmetric_dim(64, 2)
    steps = []
    for context in CONTEXTS:
        for gpus in GPUS:
            if context // gpus < 1_024:
                continue
            chunked, middle = kernels.chunked * per_token, kernels.middle_rank
            if kernels.middle_rank_measured is not None:
                slower = kernels.middle_rank_measured
                steps.append(
                    simulation.through_states(
                        context, gpus, quadratic, chunked, slower, "state, p = 2, work as measured"
                    )
                )
            steps += [
                simulation.through_states(context, gpus, quadratic, chunked, middle, "state, p = 2, work as counted"),
                simulation.through_states(context, gpus, quartic, larger * chunked, middle, "state, p = 4"),
                simulation.by_ring(
                    context, gpus, kernels.attention * per_token, "attention form in a ring, p = 2 or 4"
                ),
                simulation.by_ring(context, gpus, kernels.softmax * per_token, "softmax, ring attention"),
                simulation.by_gather(context, gpus, kernels.softmax * per_token, "softmax, keys and values gathered"),
            ]
    return steps


def plot(steps: list[Step], path: Path) -> None:
    """Tokens per second and GPU by the number of GPUs, with a panel per context."""
    pyplot = require("matplotlib.pyplot", "report")
    figure, panels = pyplot.subplots(1, len(CONTEXTS), figsize=(15, 4.1), sharey=True, layout="constrained")
    methods = list(dict.fromkeys(step.method for step in steps))
    for panel, context in zip(panels, CONTEXTS, strict=True):
        for number, method in enumerate(methods):
            found = [step for step in steps if step.method == method and step.context == context and step.fits]
            speeds = [step.context / step.gpus / step.total for step in found]
            panel.plot([step.gpus for step in found], speeds, "xosd^v"[number] + "-", color=f"C{number}", label=method)
        panel.set(xscale="log", yscale="log", title=f"{context:,} tokens", xlabel="GPUs")
        panel.set_xlim(0.8, 1_300)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens per second and GPU (simulated)")
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> int:
    """Writes JSON and figure, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with measured kernel times")
    parser.add_argument("--out", type=Path, help="JSON file to write; a figure goes beside it")
    arguments = parser.parse_args()
    machine = Machine()
    kernels = read_kernels(arguments.results, machine)
    measured = kernels.middle_rank_measured
    print(
        f"time of one of several ranks relative to one GPU: {kernels.middle_rank:.2f} from counted bytes, "
        f"{'never measured' if measured is None else f'{measured:.2f} measured'}"
    )
    steps = simulate(kernels, machine)
    for step in steps:
        if step.gpus in (1, 8, 64, 1_024):
            speed = step.context / step.gpus / step.total
            print(
                f"{step.method:<40} {step.context:>11,} tokens on {step.gpus:>5,}: {step.total:9.3f} s, "
                f"{step.waiting / step.total:5.1%} waiting, {speed:10,.0f} tokens/s each"
                f"{'' if step.fits else '  (does not fit)'}"
            )
    if arguments.out:
        rows: list[dict[str, Any]] = [{**asdict(step), "total": step.total} for step in steps]
        save_results(
            arguments.out,
            None,
            command="python benchmarks/scaling_simulation.py",
            indent=1,
            simulated=True,
            kernels=asdict(kernels),
            machine=asdict(machine),
            model="gpt2-124m, one sequence on all GPUs",
            rows=rows,
        )
        plot(steps, arguments.out.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
