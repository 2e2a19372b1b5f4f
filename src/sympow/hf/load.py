"""Reads folders in Hugging Face format for `sympow.generation.load`: our own models, those with swapped attention."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sympow.data.tokenizer import Tokenizer
from sympow.errors import UserError
from sympow.generation.chat import ChatTemplate
from sympow.hf.model.config import SympowConfig
from sympow.hf.model.conversion import (
    TOKENIZER_CONFIG_FILE,
    TRANSFORMERS_CONFIG_FILE,
    from_fast_tokenizer,
    load_whole,
    to_native,
)
from sympow.hf.swap.swapped_gpt import SwappedGPT
from sympow.hf.transformers_module import SWAPPED_TYPE, load_without_code, quiet
from sympow.model.gpt import GPT
from sympow.parsing import read_json


def load(
    folder: Path, device: torch.device | str, dtype: torch.dtype | None
) -> tuple[GPT, Tokenizer, ChatTemplate | None]:
    """As `sympow.generation.load.load`."""
    _check_kind(folder)
    if not (folder / TOKENIZER_CONFIG_FILE).is_file():
        raise UserError(f"{folder} holds no tokenizer: {TOKENIZER_CONFIG_FILE} is missing")
    model = load_model(folder, device, dtype)
    tokenizer, fast = _load_tokenizers(folder, _ends(model) if isinstance(model, SwappedGPT) else ())
    has_template = getattr(fast, "chat_template", None) is not None
    return model, tokenizer, ChatTemplate(fast) if has_template else None


def load_model(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> GPT:
    """As `sympow.generation.load.load_model`."""
    with quiet():
        if _check_kind(folder) == SWAPPED_TYPE:
            model = load_whole(AutoModelForCausalLM, folder, dtype=dtype or "auto")
            return SwappedGPT(model.to(device)).eval()
        native = to_native(folder)
        return native.to(device=device, dtype=dtype or native.embedding.weight.dtype).eval()


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """As `sympow.generation.load.load_tokenizer`."""
    return _load_tokenizers(folder)[0] if (folder / TOKENIZER_CONFIG_FILE).is_file() else None


def _load_tokenizers(folder: Path, ends: Iterable[int] = ()) -> tuple[Tokenizer, Any]:
    """The tokenizer of a folder, and that of transformers.

    Args:
        ends: ids that end a generated text besides those of the tokenizer.
    """
    kind = _check_kind(folder)
    with quiet():
        fast = load_without_code(AutoTokenizer, folder)
    return from_fast_tokenizer(fast, own_beginning=kind == SWAPPED_TYPE, ends=ends), fast


def _check_kind(folder: Path) -> str:
    """The type of a folder's model, if it has symmetric power attention."""
    config = read_json(folder / TRANSFORMERS_CONFIG_FILE)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind not in (SWAPPED_TYPE, SympowConfig.model_type):
        raise UserError(
            f"{folder} holds a model of type {kind!r}, which has no symmetric power attention: convert it first, by "
            f"sympow convert {folder} --data … --out …"
        )
    return str(kind)


def _ends(model: SwappedGPT) -> list[int]:
    """The tokens at which `generate` of transformers stops."""
    ends = model.net.generation_config.eos_token_id
    return [ends] if isinstance(ends, int) else list(ends or ())
