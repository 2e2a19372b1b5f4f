"""Saves and loads a model as a folder: its config as JSON, its parameters as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sympow import tensor_file
from sympow.errors import ArgumentError, UserError
from sympow.files import write_atomically
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.parsing import read_json

CONFIG_FILE = "model.json"
WEIGHTS_FILE = "model.safetensors"


def save_model(folder: Path | str, config: GPTConfig, weights: Mapping[str, Tensor]) -> None:
    """Writes a model into a folder. Each file is replaced once it is complete: an interruption leaves the earlier one.

    Args:
        weights: as `GPT.state_dict` names them.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensor_file.write(folder / WEIGHTS_FILE, weights, {})
    write_atomically(folder / CONFIG_FILE, (json.dumps(asdict(config), indent=2) + "\n").encode())


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> GPT:
    """Reads a model that `save_model` wrote, such as the `model` folder of a training run.

    Example:
        >>> model = load_model("runs/first/model")  # doctest: +SKIP
    """
    try:
        torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(
            "device", f"must be a device of torch, such as 'cpu' or 'cuda:0'; got {device!r}"
        ) from error
    folder = Path(folder)
    config = load_config(folder)
    if not (folder / WEIGHTS_FILE).is_file():
        raise UserError(f"{folder} holds no whole model: {WEIGHTS_FILE} is missing")
    with torch.device("meta"):
        model = GPT(config)
    weights = _read_weights(folder / WEIGHTS_FILE, device)
    _check_weights(folder / WEIGHTS_FILE, weights, model.state_dict())
    model.load_state_dict(weights, assign=True)
    return model


def load_config(folder: Path | str) -> GPTConfig:
    """Reads the config of a model that `save_model` wrote, without its parameters."""
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        inner = folder / "model"
        hint = f"; did you mean {inner}?" if (inner / CONFIG_FILE).is_file() else ""
        if (folder / "config.json").is_file():
            hint = "; it has a config.json, as models in Hugging Face format have, which cannot be read here"
        raise UserError(f"{folder} holds no model: {CONFIG_FILE} is missing{hint}")
    return _read_config(folder / CONFIG_FILE)


def _read_config(path: Path) -> GPTConfig:
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path} must map fields to values, got {type(content).__name__}")
    known = [field.name for field in fields(GPTConfig)]
    if unknown := content.keys() - set(known):
        raise UserError(f"{path} has fields that this version does not know: {', '.join(sorted(unknown))}")
    try:
        config = GPTConfig(**content)
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: {error}") from error
    # A default could be another model than that of the weights: shapes do not tell power or rotation.
    if missing := [name for name in known if name not in content]:
        raise UserError(f"{path} must have all fields of a model's config, and lacks {', '.join(missing)}")
    return config


def _read_weights(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    try:
        return load_file(str(path), device=str(device))
    except SafetensorError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _check_weights(path: Path, weights: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - weights.keys()), sorted(weights.keys() - expected.keys())
    if missing:
        raise UserError(f"{path} lacks {', '.join(missing)}, which {CONFIG_FILE} requires")
    if unknown:
        raise UserError(f"{path} has {', '.join(unknown)}, which {CONFIG_FILE} does not describe")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            raise UserError(
                f"{path}: {name} has shape {tuple(tensor.shape)}, but {CONFIG_FILE} requires "
                f"{tuple(expected[name].shape)}"
            )
