"""What `sympow info` prints about a model: parameters, state size, FLOPs and cache size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from sympow.extras import require
from sympow.model.accounting import (
    count_parameters,
    crossover,
    key_value_elements,
    mixing_operations,
    other_operations,
    state_elements,
)
from sympow.model.config import GPTConfig
from sympow.settings import symmetric_dim

CONTEXTS = (256, 1_024, 4_096, 16_384, 65_536, 262_144, 1_048_576)
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


def model_info(config: GPTConfig, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """Everything the command prints, as numbers ready for JSON."""
    parameters = count_parameters(config)
    info: dict[str, Any] = {
        "config": asdict(config),
        "parameters": {
            "total": parameters.total,
            "without_gating_and_data_dependent_rotary": parameters.base,
            "gating_overhead_percent": 100 * parameters.gating_overhead,
            "gating_and_rotary_overhead_percent": 100 * parameters.total_overhead,
        },
        "other_flops_per_token": other_operations(config),
        "key_value_cache_bytes": {
            context: {name: size * key_value_elements(config, context) for name, size in _DTYPE_BYTES.items()}
            for context in contexts
        },
    }
    if config.mixer == "sympow":
        info["features"] = symmetric_dim(config.head_shape.head_dim, config.power)
        info["state_bytes"] = {name: size * state_elements(config) for name, size in _DTYPE_BYTES.items()}
        info["crossover_context"] = crossover(config)
    info["attention_flops_per_token"] = [asdict(mixing_operations(config, context)) for context in contexts]
    return info


def print_info(info: dict[str, Any], title: str) -> None:
    """Prints the result of `model_info` as tables."""
    console = require("rich.console", "cli").Console()
    table = require("rich.table", "cli").Table
    sympow = info["config"]["mixer"] == "sympow"

    facts = table(title=title, show_header=False, title_justify="left")
    parameters = info["parameters"]
    facts.add_row("parameters", f"{parameters['total']:,}")
    facts.add_row("gating adds", f"{parameters['gating_overhead_percent']:+.2f} %")
    facts.add_row("gating and rotary add", f"{parameters['gating_and_rotary_overhead_percent']:+.2f} %")
    if sympow:
        facts.add_row("features D per head", f"{info['features']:,}")
        for dtype, whose in (("float32", "as kept in memory"), ("bfloat16", "as the paper counts it")):
            facts.add_row(f"state per sequence, {dtype} ({whose})", format_bytes(info["state_bytes"][dtype]))
        facts.add_row("crossover (FLOPs)", f"{info['crossover_context']:,} tokens")
    facts.add_row("FLOPs per token outside attention", format_count(info["other_flops_per_token"]))
    console.print(facts)

    costs = table(title="FLOPs per token in attention, forward, all layers", title_justify="left")
    costs.add_column("context", justify="right")
    for name in ("attention form", "chunked form", "chunk", "recurrent form") if sympow else ("softmax",):
        costs.add_column(name, justify="right")
    costs.add_column("KV cache, bfloat16", justify="right")
    for row in info["attention_flops_per_token"]:
        cache = format_bytes(info["key_value_cache_bytes"][row["context"]]["bfloat16"])
        cells = [format_count(row["attention"])]
        if sympow:
            cells += [format_count(row["chunked"]), f"{row['chunk_size']:,}", format_count(row["recurrent"])]
        costs.add_row(f"{row['context']:,}", *cells, cache)
    console.print(costs)


def format_bytes(size: float) -> str:
    """A size in decimal units with two digits or more: 39 MB, 14 GB."""
    for unit, limit in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= limit:
            value = size / limit
            return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f} {unit}"
    return f"{size:.0f} B"


def format_count(count: float) -> str:
    """A count with three digits and a decimal prefix: 77.9 M."""
    for unit, limit in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.3g}"
