"""Parameters, state size and FLOPs of a model, counted from its config without allocating it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path, PurePosixPath

import torch

from sympow.errors import UserError
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.ops.cost import GPU, Workload, attention_cost, best_chunk_size, chunked_cost, crossover_length
from sympow.settings import symmetric_dim


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a model, and of the same model without its gates, or its gates and data-dependent rotation.

    Attributes:
        base: no gating, RoPE (or none, if the config has none).
        gated: the config's gating, rotary as in base.
        total: the config itself.
    """

    base: int
    gated: int
    total: int

    @property
    def gating_overhead(self) -> float:
        """The parameters of gating, as a fraction of base."""
        return self.gated / self.base - 1

    @property
    def total_overhead(self) -> float:
        """The parameters of gating and rotary together, as a fraction of base."""
        return self.total / self.base - 1


def count_parameters(config: GPTConfig) -> ParameterCount:
    """Counts the parameters of a model on the meta device."""
    plain_rotary = replace(config, rotary="none" if config.rotary == "none" else "fixed")
    variants = (replace(plain_rotary, gating="none"), plain_rotary, config)
    with torch.device("meta"):
        return ParameterCount(*(GPT(variant).count_parameters() for variant in variants))


def check_fits(config: GPTConfig, device: torch.device, processes: int = 1) -> None:
    """Raises ValueError if a model is too large to be trained, before it exhausts the memory.

    Args:
        processes: over which parameters, gradients and optimizer states are sharded.
    """
    machine = host_memory()
    room = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else machine
    # The host builds the whole model; training adds gradients and two moments of Adam, all in float32.
    for what, needed, there in (
        ("build", 4 * config.weights, machine),
        ("train", 16 * config.weights // processes, room),
    ):
        if needed > there:
            raise UserError(
                f"a model of {config.weights:,} weights takes {needed / 1e9:,.0f} GB to {what}, and there are "
                f"{there / 1e9:,.0f} GB of memory; choose fewer layers, a smaller width or a smaller vocabulary"
            )


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, or the limit of its container or job, if that is less.

    Where the operating system does not say, as on Windows, there is no limit.

    Args:
        root: of the file system.
    """
    known = {"SC_PAGE_SIZE", "SC_PHYS_PAGES"} <= getattr(os, "sysconf_names", {}).keys()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else sys.maxsize
    for path in _limit_files(root):
        text = path.read_text("utf-8").strip() if path.is_file() else ""
        # "max": there is no limit. Older kernels then have a number larger than any memory.
        if text.isdigit():
            memory = min(memory, int(text))
    return memory


def _limit_files(root: Path) -> Iterator[Path]:
    """Files with the memory limits of this process's control groups (cgroups) and of those around them."""
    membership = root / "proc/self/cgroup"
    for line in membership.read_text("utf-8").splitlines() if membership.is_file() else ():
        # In version 2 "0::GROUP"; in version 1 a line for each kind of resource, "5:memory:GROUP".
        _, kinds, group = line.split(":", 2)
        if kinds == "":
            folder, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        relative = PurePosixPath(group.lstrip("/"))
        # A container may not see its groups, but only its own files, in the topmost folder.
        for one in (relative, *relative.parents):
            yield folder / one / name


def state_elements(config: GPTConfig) -> int:
    """Numbers in the state of one sequence, all layers: D (d + 1) per head, as the paper counts (§4.1).

    With a short convolution of width w also the last w − 1 queries, keys and values of each layer.

    The paper gives sizes in bfloat16. States here are float32, so that sums over long contexts stay precise.
    """
    shape = config.head_shape
    per_head = symmetric_dim(shape.head_dim, config.power) * (shape.head_dim + 1)
    return config.layers * shape.key_value_heads * per_head + conv_elements(config)


def conv_elements(config: GPTConfig) -> int:
    """Numbers that the short convolutions of all layers keep of one sequence."""
    shape = config.head_shape
    channels = (shape.heads + 2 * shape.key_value_heads) * shape.head_dim
    return config.layers * max(0, config.short_conv - 1) * channels


def key_value_elements(config: GPTConfig, context: int) -> int:
    """Numbers in the key/value cache of one sequence of `context` tokens, all layers."""
    shape = config.head_shape
    return config.layers * shape.key_value_heads * context * 2 * shape.head_dim + conv_elements(config)


@dataclass(frozen=True)
class MixingOperations:
    """FLOPs per token of all attention layers, forward, averaged over a sequence of `context` tokens."""

    context: int
    attention: float
    chunked: float
    chunk_size: int
    recurrent: float


def mixing_operations(config: GPTConfig, context: int) -> MixingOperations:
    """FLOPs of each form at a context; a multiplication and an addition count as two.

    The chunk size is the config's, or the one the cost model chooses for a GPU; it never exceeds the context.
    """
    shape = config.head_shape
    work = Workload(
        length=context,
        key_dim=shape.head_dim,
        value_dim=shape.head_dim,
        power=config.power,
        group=shape.heads // shape.key_value_heads,
        parallel=shape.key_value_heads,
    )
    chunk_size = min(context, config.chunk_size or best_chunk_size(work, GPU))
    # The recurrent form queries the state and folds a token into it at every step: chunks of one token.
    recurrent = replace(work, initial_state=True, return_state=True)
    per_token = config.layers * shape.key_value_heads / context
    return MixingOperations(
        context=context,
        attention=attention_cost(work).operations * per_token,
        chunked=chunked_cost(work, chunk_size).operations * per_token,
        chunk_size=chunk_size,
        recurrent=(recurrent.query(context) + recurrent.fold(context)).operations * per_token,
    )


@cache
def other_operations(config: GPTConfig) -> int:
    """FLOPs per token outside the attention operator, forward: two for every entry of a weight matrix."""
    with torch.device("meta"):
        model = GPT(config)
    return 2 * sum(p.numel() for p in model.parameters() if p.ndim == 2)


def crossover(config: GPTConfig) -> int:
    """The context from which the recurrent form takes fewer FLOPs per token than the attention form."""
    shape = config.head_shape
    return crossover_length(shape.head_dim, shape.head_dim, config.power, shape.heads // shape.key_value_heads)
