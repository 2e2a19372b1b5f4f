"""Converts models and tokenizers between sympow's own (native) format and transformers, in memory and as folders."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sympow.data.tokenizer import (
    END_OF_TEXT,
    MODEL_FILE,
    SETTINGS_FILE,
    ByteTokenizer,
    JsonTokenizer,
    Tokenizer,
    load_tokenizer,
)
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.files import check_can_write
from sympow.hf.model.config import SympowConfig
from sympow.hf.model.modeling import SympowForCausalLM
from sympow.hf.transformers_module import SWAPPED_TYPE, load_without_code
from sympow.model.gpt import GPT
from sympow.model.storage import CONFIG_FILE, load_model, save_model
from sympow.parsing import read_json

TRANSFORMERS_CONFIG_FILE = "config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def from_native(source: GPT | Path | str) -> SympowForCausalLM:
    """Converts a native model to transformers; the weights are copied.

    Args:
        source: a model, or a folder with one, such as the `model` folder of a training run. The config gets its BOS,
            EOS and padding tokens from the folder's tokenizer.

    Example:
        >>> from_native("runs/first/model").save_pretrained("first")  # doctest: +SKIP
    """
    if not isinstance(source, GPT | Path | str):
        raise ArgumentTypeError("source", f"must be a GPT or a folder with one, got {type(source).__name__}")
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
    """Converts a model of transformers to a native one; the weights are copied.

    Args:
        source: a model, or a folder that `save_pretrained` wrote.
    """
    if not isinstance(source, SympowForCausalLM | Path | str):
        raise ArgumentTypeError(
            "source", f"must be a SympowForCausalLM or a folder with one, got {type(source).__name__}"
        )
    model = source if isinstance(source, SympowForCausalLM) else load_whole(SympowForCausalLM, _existing(source))
    if not torch.equal(model.lm_head.weight, model.model.embedding.weight):
        raise ArgumentError("source", "must have its lm_head tied to its embedding, as native models do")
    with torch.device("meta"):
        native = GPT(model.config.to_native())
    weights = {name: tensor.detach().clone() for name, tensor in model.model.state_dict().items()}
    native.load_state_dict(weights, assign=True)
    return native.eval()


def convert_to_transformers(folder: Path | str, out: Path | str) -> None:
    """Converts the folder of a native model and its tokenizer to one that the Auto classes' `from_pretrained` reads."""
    _check_out(folder, out, CONFIG_FILE)
    from_native(folder).save_pretrained(out)
    tokenizer = _native_tokenizer(Path(folder))
    if tokenizer is not None:
        to_fast_tokenizer(tokenizer).save_pretrained(out)


def convert_to_native(folder: Path | str, out: Path | str) -> None:
    """Converts a folder of transformers, with its tokenizer, to one that `load_model` and `load_tokenizer` read."""
    _check_out(folder, out, TRANSFORMERS_CONFIG_FILE)
    model = to_native(folder)
    save_model(out, model.config, model.state_dict())
    if (Path(folder) / TOKENIZER_CONFIG_FILE).is_file():
        from_fast_tokenizer(load_without_code(AutoTokenizer, folder)).save(out)


def to_fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """Converts a tokenizer of `sympow.data` to one of transformers with the same ids.

    The boundary token between documents becomes the BOS, EOS and padding token, and padding is on the left. As in the
    native tokenizer, no tokens are added to a text, and a text that spells a special token is encoded as text; with
    `split_special_tokens=False` it becomes that token.

    Args:
        tokenizer: such as `sympow.data.tokenizer.load_tokenizer(folder)`.
    """
    if isinstance(tokenizer, ByteTokenizer):
        backend, boundary = _byte_level(), END_OF_TEXT
    elif isinstance(tokenizer, JsonTokenizer):
        with TemporaryDirectory() as folder:
            tokenizer.save(folder)
            backend = tokenizers.Tokenizer.from_file(str(Path(folder) / MODEL_FILE))
        boundary = tokenizer.boundary_token
        # Native tokenizers add no tokens to a text.
        backend.post_processor = None
    else:
        raise ArgumentTypeError("tokenizer", f"must be a tokenizer of sympow.data, got {type(tokenizer).__name__}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=boundary,
        eos_token=boundary,
        pad_token=boundary,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        # Saved in tokenizer_config.json, for `from_fast_tokenizer`.
        sympow_kind=tokenizer.kind,
    )
    assert fast.eos_token_id == tokenizer.boundary
    return fast


def from_fast_tokenizer(fast: Any, *, own_beginning: bool = False, ends: Iterable[int] = ()) -> Tokenizer:
    """Converts a fast tokenizer to a native one with the same ids; its EOS token becomes the boundary token.

    Args:
        own_beginning: whether documents begin with the ids that the tokenizer itself puts before a text, such as BOS or
            none, if it was not made by `to_fast_tokenizer`; otherwise with the boundary token.
        ends: ids that end a generated text besides EOS and those that begin documents.
    """
    backend = getattr(fast, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(f"fast must be a tokenizer with a tokenizer.json, got {type(fast).__name__}")
    kind = fast.init_kwargs.get("sympow_kind", "file")
    if kind == ByteTokenizer.kind:
        tokenizer = ByteTokenizer()
        tokenizer.ends = tokenizer.ends.union(ends)
        return tokenizer
    # A copy, since JsonTokenizer changes how special tokens are treated.
    model = tokenizers.Tokenizer.from_str(backend.to_str())
    foreign = own_beginning and "sympow_kind" not in fast.init_kwargs
    beginning = ids_before_text(fast) if foreign else None
    # Data for teachers with a BOS token has that between documents, so that it also ends them.
    ends = {*ends, *(beginning or ())}
    return JsonTokenizer(model, kind, fast.eos_token, name=type(fast).__name__, beginning=beginning, ends=ends)


def ids_before_text(fast: Any) -> list[int]:
    """The ids that a tokenizer of transformers puts before those of a text."""
    text = fast("a", add_special_tokens=False)["input_ids"]
    whole: list[int] = fast("a")["input_ids"]
    places = (place for place in range(len(whole)) if whole[place : place + len(text)] == text)
    return whole[: next(places, 0)]


def _native_tokenizer(folder: Path) -> Tokenizer | None:
    return load_tokenizer(folder) if (folder / SETTINGS_FILE).is_file() else None


def load_whole(kind: Any, folder: Path, **options: Any) -> Any:
    """Loads a model whose tensors must be those of its config: transformers would initialize missing ones randomly.

    Args:
        kind, options: as for `load_without_code`.

    Raises:
        ValueError: a tensor is missing, unknown, or of another shape.
    """
    try:
        # Wrong shapes are then reported with the missing and unknown tensors, rather than raised.
        options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, told = load_without_code(kind, folder, **options)
    except SafetensorError as error:
        raise UserError(f"{folder} has weights that cannot be read: {error}") from error
    if missing := sorted(told["missing_keys"]):
        raise UserError(f"{folder} lacks {', '.join(missing)}, which {TRANSFORMERS_CONFIG_FILE} requires")
    if unknown := sorted(told["unexpected_keys"]):
        raise UserError(f"{folder} has {', '.join(unknown)}, which {TRANSFORMERS_CONFIG_FILE} does not describe")
    if differing := sorted(name for name, *_ in told["mismatched_keys"]):
        raise UserError(f"{folder} has {', '.join(differing)} of other shapes than {TRANSFORMERS_CONFIG_FILE} requires")
    return model


def _existing(folder: Path | str) -> Path:
    """The folder, if there is a model of ours in it.

    transformers would look for any other name on the Hub, and initialize our model where it finds another.
    """
    folder = Path(folder)
    if not (folder / TRANSFORMERS_CONFIG_FILE).is_file():
        hint = ", but a native model" if (folder / CONFIG_FILE).is_file() else ""
        raise UserError(f"{folder} holds no model of transformers{hint}: {TRANSFORMERS_CONFIG_FILE} is missing")
    config = read_json(folder / TRANSFORMERS_CONFIG_FILE)
    kind = config.get("model_type") if isinstance(config, dict) else None
    if kind == SWAPPED_TYPE:
        raise UserError(
            f"{folder} holds a model with swapped attention, which has no native counterpart: `sympow generate` and "
            "`sympow serve` take it as it is, as does AutoModelForCausalLM of transformers after `import sympow.hf`"
        )
    if kind != SympowConfig.model_type:
        raise UserError(f"{folder} must hold a model of type {SympowConfig.model_type!r}, got {kind!r}")
    return folder


def _check_out(folder: Path | str, out: Path | str, other: str) -> None:
    """Raises for an output folder with a model of the other format: both have a model.safetensors.

    Args:
        other: file that only a model of the other format has.
    """
    if Path(folder).resolve() == Path(out).resolve():
        raise ArgumentError("out", f"must be another folder than the model's, got {out}")
    if (Path(out) / other).exists():
        raise ArgumentError(
            "out", f"must not hold a model of the other format, whose weights would be lost; {out} has {other}"
        )
    check_can_write("out", Path(out), "folder")


def _byte_level() -> Any:
    """The tokenizer whose ids are bytes: byte-level BPE without merges."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE({char: byte for byte, char in enumerate(_byte_names())}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([END_OF_TEXT])
    return model


def _byte_names() -> list[str]:
    """The character of each byte in byte-level BPE: a printable byte's own, else the next one from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
