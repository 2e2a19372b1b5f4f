"""Loads model folders, those of `sympow train` and those that `save_pretrained` of transformers wrote.

The commands and `TextModel.load` load every model here. A folder of transformers is read by `sympow.hf.load`, which
imports this package and not the other way round: it is imported by its name once there is such a folder, so that all
other models need neither it nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from sympow.data import tokenizer as tokenizers
from sympow.data.tokenizer import Tokenizer
from sympow.extras import require
from sympow.generation.chat import ChatTemplate
from sympow.model import storage
from sympow.model.gpt import GPT

TRANSFORMERS_CONFIG_FILE = "config.json"


def in_transformers_format(folder: Path | str) -> bool:
    """Whether `save_pretrained` wrote a folder, and not `sympow train`."""
    folder = Path(folder)
    return not (folder / storage.CONFIG_FILE).is_file() and (folder / TRANSFORMERS_CONFIG_FILE).is_file()


def load_model(folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> GPT:
    """The model of a folder, which may be without a tokenizer.

    Args:
        folder: the `model` folder of a training run, or a folder that `save_pretrained` wrote, of a `SympowForCausalLM`
            or of a model with swapped attention in all layers.
        dtype: of the parameters; None: as they were saved.

    Raises:
        ValueError: the folder holds no model, one of another kind, or one that is damaged.
    """
    if in_transformers_format(folder):
        model: GPT = _reader().load_model(Path(folder), device, dtype)
        return model
    model = storage.load_model(folder, device).eval()
    return model if dtype is None else model.to(dtype)


def load_tokenizer(folder: Path | str) -> Tokenizer | None:
    """The tokenizer in a model's folder; None: there is none."""
    if in_transformers_format(folder):
        found: Tokenizer | None = _reader().load_tokenizer(Path(folder))
        return found
    return tokenizers.load_tokenizer(folder) if (Path(folder) / tokenizers.SETTINGS_FILE).is_file() else None


def load(
    folder: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[GPT, Tokenizer, ChatTemplate | None]:
    """A model, its tokenizer, and the chat template of the tokenizer if it has one; arguments as in `load_model`.

    Raises:
        ValueError: as in `load_model`; or the folder has no tokenizer.
    """
    if in_transformers_format(folder):
        found: tuple[GPT, Tokenizer, ChatTemplate | None] = _reader().load(Path(folder), device, dtype)
        return found
    return load_model(folder, device, dtype), tokenizers.load_tokenizer(folder), None


def _reader() -> Any:
    # Without this check, the error would name a module of this package instead of the extra.
    require("transformers", "hf")
    return import_module("sympow.hf.load")
