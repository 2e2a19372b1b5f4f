"""The command `sympow`. Thin: each command reads its options and calls the library."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

from sympow.layers.gates import GATES
from sympow.layers.rotations import ROTATIONS
from sympow.model.config import MIXERS, PRESETS, GPTConfig

try:
    import typer
except ModuleNotFoundError as error:
    raise SystemExit(
        "the command sympow needs typer and rich; they come with: pip install 'conformal-sympow[cli]'"
    ) from error


app = typer.Typer(
    help="Conformal symmetric power transformers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Makes typer keep commands as commands, even while there is only one."""


@app.command()
def info(
    preset: Annotated[str, typer.Argument(help=f"Model to describe: {', '.join(PRESETS)}.")] = "gpt2-124m",
    power: Annotated[int | None, typer.Option(help="p, even.")] = None,
    mixer: Annotated[str | None, typer.Option(help=f"Attention operator: {', '.join(MIXERS)}.")] = None,
    gating: Annotated[str | None, typer.Option(help=f"Kind of gate: {', '.join(GATES)}.")] = None,
    rotary: Annotated[str | None, typer.Option(help=f"Kind of rotation: {', '.join(ROTATIONS)}.")] = None,
    layers: Annotated[int | None, typer.Option(help="Number of blocks.")] = None,
    width: Annotated[int | None, typer.Option(help="Size of the residual stream.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads.")] = None,
    key_value_heads: Annotated[int | None, typer.Option(help="Key/value heads, a divisor of heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Size of a head; by default width / heads.")] = None,
    vocab_size: Annotated[int | None, typer.Option(help="Number of tokens.")] = None,
    chunk_size: Annotated[int | None, typer.Option(help="Chunk of the chunked form; by default by cost.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Context to count at; repeat for more.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Parameters, state size and operations of a model, and where the state beats attention."""
    from sympow.report.info import CONTEXTS, model_info, print_info

    changes: dict[str, Any] = {
        "power": power,
        "mixer": mixer,
        "gating": gating,
        "rotary": rotary,
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "vocab_size": vocab_size,
        "chunk_size": chunk_size,
    }
    try:
        config = GPTConfig.preset(preset, **{k: v for k, v in changes.items() if v is not None})
        if context and min(context) < 1:
            raise ValueError(f"context must be at least 1, got {min(context)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    described = model_info(config, tuple(context) if context else CONTEXTS)
    if as_json:
        json.dump(described, sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_info(described, title=preset)


def main() -> None:
    """Entry point of the installed command."""
    app()


if __name__ == "__main__":
    main()
