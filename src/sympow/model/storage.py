"""A model in a folder: its config as JSON, its parameters as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from torch import Tensor

from sympow.extras import require
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(folder: Path | str, config: GPTConfig, weights: Mapping[str, Tensor]) -> None:
    """Writes a model into a folder.

    Args:
        weights: as `GPT.state_dict` names them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.detach().contiguous() for name, tensor in weights.items()}
    require("safetensors.torch", "train").save_file(contiguous, str(folder / WEIGHTS_FILE))
    (folder / CONFIG_FILE).write_text(json.dumps(asdict(config), indent=2) + "\n")


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> GPT:
    """Reads a model that `save_model` wrote, such as the `model` folder of a training run.

    Example:
        >>> model = load_model("runs/first/model")  # doctest: +SKIP
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        inner = folder / "model"
        hint = f"; did you mean {inner}?" if (inner / CONFIG_FILE).is_file() else ""
        raise ValueError(f"{folder} holds no model: {CONFIG_FILE} is missing{hint}")
    content = json.loads((folder / CONFIG_FILE).read_text())
    unknown = set(content) - {field.name for field in fields(GPTConfig)}
    if unknown:
        raise ValueError(f"{folder / CONFIG_FILE} has fields that this version does not know: {sorted(unknown)}")
    with torch.device("meta"):
        model = GPT(GPTConfig(**content))
    weights = require("safetensors.torch", "train").load_file(str(folder / WEIGHTS_FILE), device=str(device))
    model.load_state_dict(weights, assign=True)
    return model
