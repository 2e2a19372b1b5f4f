"""The command `sympow info`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sympow.cli.common import print_json
from sympow.errors import ArgumentError
from sympow.model.config import MIXERS, PRESETS
from sympow.settings import GATES, ROTATIONS


def info(
    preset: Annotated[
        str, typer.Argument(help=f"Preset: {', '.join(PRESETS)}; or the model folder of a run.")
    ] = "gpt2-124m",
    power: Annotated[int | None, typer.Option(help="Power p, even.")] = None,
    mixer: Annotated[str | None, typer.Option(help=f"Attention operator: {', '.join(MIXERS)}.")] = None,
    gating: Annotated[str | None, typer.Option(help=f"Kind of gate: {', '.join(GATES)}.")] = None,
    rotary: Annotated[str | None, typer.Option(help=f"Kind of rotation: {', '.join(ROTATIONS)}.")] = None,
    short_conv: Annotated[int | None, typer.Option(help="Taps of a short convolution; 0: none.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers.")] = None,
    width: Annotated[int | None, typer.Option(help="Width of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Number of query heads.")] = None,
    key_value_heads: Annotated[int | None, typer.Option(help="Number of key/value heads, a divisor of heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Head dimension; by default width / heads.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Vocabulary size.")] = None,
    chunk_size: Annotated[
        int | None, typer.Option(help="Tokens of a chunk of the chunked form; by default the cheapest.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(help="Context to count FLOPs at; repeatable; by default several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show parameters, state size and FLOPs of a model.

    Options override those of the preset or the folder.
    """
    from sympow.model.config import GPTConfig
    from sympow.model.storage import load_config
    from sympow.report.model_info import CONTEXTS, model_info, print_info

    changes: dict[str, Any] = {
        "power": power,
        "mixer": mixer,
        "gating": gating,
        "rotary": rotary,
        "short_conv": short_conv,
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "chunk_size": chunk_size,
    }
    in_folder = preset not in PRESETS and Path(preset).is_dir()
    config = load_config(preset) if in_folder else GPTConfig.preset(preset)
    config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    if context and min(context) < 1:
        raise ArgumentError("context", f"must be at least 1, got {min(context)}")
    described = model_info(config, tuple(context) if context else CONTEXTS)
    if as_json:
        print_json(described)
    else:
        print_info(described, title=preset)
