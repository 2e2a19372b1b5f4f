"""The command `sympow info`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from sympow.checks import check_choice
from sympow.cli.common import print_json
from sympow.cli.flags import flags_of
from sympow.errors import ArgumentError
from sympow.model.config import PRESETS, GPTConfig

DEFAULT_PRESET = "gpt2-124m"


# Form and backend change how a result is computed, and none of the numbers here.
@flags_of({"Model": GPTConfig.preset(DEFAULT_PRESET)}, without=("form", "backend"))
def info(
    preset: Annotated[
        str, typer.Argument(help=f"Preset: {', '.join(PRESETS)}; or the model folder of a run.")
    ] = DEFAULT_PRESET,
    context: Annotated[
        list[int] | None, typer.Option(help="Context to count FLOPs at; repeatable; by default several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    **changes: Any,
) -> None:
    """Show parameters, state size and FLOPs of a model.

    Options override those of the preset or the folder; the defaults shown are those of gpt2-124m.
    """
    from sympow.model.storage import load_config
    from sympow.report.model_info import CONTEXTS, model_info, print_info

    in_folder = preset not in PRESETS and Path(preset).is_dir()
    if not in_folder:
        check_choice("preset", preset, PRESETS)
    config = load_config(preset) if in_folder else GPTConfig.preset(preset)
    config = replace(config, **{name: value for name, value in changes.items() if value is not None})
    if context and min(context) < 1:
        raise ArgumentError("context", f"must be at least 1, got {min(context)}")
    described = model_info(config, tuple(context) if context else CONTEXTS)
    if as_json:
        print_json(described)
    else:
        print_info(described, title=preset)
