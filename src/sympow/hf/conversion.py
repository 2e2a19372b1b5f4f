"""Models both ways: `sympow.GPT` and `SympowForCausalLM`, in memory and as folders. Weights are copied, not changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from sympow.data.tokenizer import SETTINGS_FILE, Tokenizer, load_tokenizer
from sympow.extras import require
from sympow.files import check_can_write
from sympow.hf.config import SympowConfig
from sympow.hf.modeling import SympowForCausalLM
from sympow.hf.tokenizer import from_fast_tokenizer, to_fast_tokenizer
from sympow.model.gpt import GPT
from sympow.model.storage import CONFIG_FILE, load_model, save_model

TRANSFORMERS_CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def from_native(source: GPT | Path | str) -> SympowForCausalLM:
    """The transformers model with the weights of a native one.

    Args:
        source: a model, or the folder of one, such as `model` in that of a training run. A tokenizer in the folder says
            which tokens begin, end and pad.

    Example:
        >>> from_native("runs/first/model").save_pretrained("first")  # doctest: +SKIP
    """
    tokenizer = None
    if not isinstance(source, GPT):
        tokenizer = _native_tokenizer(Path(source))
        source = load_model(source)
    others: dict[str, int] = {}
    if tokenizer is not None and tokenizer.boundary < source.config.vocab_size:
        others = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), tokenizer.boundary)
    config = SympowConfig.from_native(source.config, **others)
    config.dtype = source.embedding.weight.dtype
    with torch.device("meta"):
        model = SympowForCausalLM(config)
    weights = {f"model.{name}": tensor.detach().clone() for name, tensor in source.state_dict().items()}
    model.load_state_dict(weights | {"lm_head.weight": weights["model.embedding.weight"]}, assign=True)
    model.tie_weights()
    return model.eval()


def to_native(source: SympowForCausalLM | Path | str) -> GPT:
    """The native model with the weights of a transformers one.

    Args:
        source: a model, or a folder that `save_pretrained` wrote.
    """
    model = source if isinstance(source, SympowForCausalLM) else _load_whole(_existing(source))
    if not torch.equal(model.lm_head.weight, model.model.embedding.weight):
        raise ValueError("source must have its lm_head tied to its embedding, as native models do")
    with torch.device("meta"):
        native = GPT(model.config.to_native())
    weights = {name: tensor.detach().clone() for name, tensor in model.model.state_dict().items()}
    native.load_state_dict(weights, assign=True)
    return native.eval()


def convert_to_transformers(folder: Path | str, out: Path | str) -> None:
    """Writes a native model's folder, tokenizer included, as one that `from_pretrained` of the Auto classes reads."""
    _check_out(folder, out)
    from_native(folder).save_pretrained(out)
    tokenizer = _native_tokenizer(Path(folder))
    if tokenizer is not None:
        to_fast_tokenizer(tokenizer).save_pretrained(out)


def convert_to_native(folder: Path | str, out: Path | str) -> None:
    """Writes a folder of transformers, tokenizer included, as one that `load_model` and `load_tokenizer` read."""
    _check_out(folder, out)
    model = to_native(folder)
    save_model(out, model.config, model.state_dict())
    if (Path(folder) / TOKENIZER_CONFIG_FILE).is_file():
        from_fast_tokenizer(AutoTokenizer.from_pretrained(folder)).save(out)


def _native_tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / SETTINGS_FILE).is_file() else None


def _load_whole(folder: Path) -> SympowForCausalLM:
    """The model of a folder, if its tensors are those of its config: transformers fills in random ones, with a warning.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    damage = require("safetensors", "hf").SafetensorError
    try:
        # Shapes that differ are told rather than raised, as the others are.
        loaded: Any = SympowForCausalLM.from_pretrained(folder, output_loading_info=True, ignore_mismatched_sizes=True)
    except damage as error:
        raise ValueError(f"{folder} has weights that cannot be read: {error}") from error
    model, told = loaded
    if missing := sorted(told["missing_keys"]):
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {TRANSFORMERS_CONFIG_FILE} asks for")
    if unknown := sorted(told["unexpected_keys"]):
        raise ValueError(f"{folder} has {', '.join(unknown)}, for which {TRANSFORMERS_CONFIG_FILE} has no use")
    if differing := sorted(name for name, *_ in told["mismatched_keys"]):
        raise ValueError(
            f"{folder} has {', '.join(differing)} of other shapes than {TRANSFORMERS_CONFIG_FILE} asks for"
        )
    assert isinstance(model, SympowForCausalLM)
    return model


def _existing(folder: Path | str) -> Path:
    """The folder, if there is a model in it: transformers would take another name for one on the Hub."""
    folder = Path(folder)
    if not (folder / TRANSFORMERS_CONFIG_FILE).is_file():
        hint = ", but a native model" if (folder / CONFIG_FILE).is_file() else ""
        raise ValueError(f"{folder} holds no model of transformers{hint}: {TRANSFORMERS_CONFIG_FILE} is missing")
    return folder


def _check_out(folder: Path | str, out: Path | str) -> None:
    if Path(folder).resolve() == Path(out).resolve():
        # Both kinds have a model.safetensors with different names in it.
        raise ValueError(f"out must be another folder than the model's, got {out}")
    check_can_write("out", Path(out), "folder")
