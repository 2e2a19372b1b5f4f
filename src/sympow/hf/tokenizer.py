"""Tokenizers both ways: ours, and transformers' fast ones. The ids of a text are the same in both."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from sympow.data.tokenizer import END_OF_TEXT, MODEL_FILE, ByteTokenizer, JsonTokenizer, Tokenizer


def to_fast_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A tokenizer for transformers that gives the same ids.

    The token between documents begins and ends a text, and pads batches, on the left. As in ours, nothing is added to a
    text, and a text that spells a special token is encoded as text; `split_special_tokens=False` makes it the token.

    Args:
        tokenizer: from `sympow.data`, such as `load_tokenizer(folder)`.
    """
    if isinstance(tokenizer, ByteTokenizer):
        backend, boundary = _byte_level(), END_OF_TEXT
    elif isinstance(tokenizer, JsonTokenizer):
        with TemporaryDirectory() as folder:
            tokenizer.save(folder)
            backend = tokenizers.Tokenizer.from_file(str(Path(folder) / MODEL_FILE))
        boundary = tokenizer.boundary_token
        # What it would add to a text, ours leaves out.
        backend.post_processor = None
    else:
        raise TypeError(f"tokenizer must be a tokenizer of sympow.data, got {type(tokenizer).__name__}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=boundary,
        eos_token=boundary,
        pad_token=boundary,
        padding_side="left",
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        # Kept in tokenizer_config.json, for the way back.
        sympow_kind=tokenizer.kind,
    )
    assert fast.eos_token_id == tokenizer.boundary
    return fast


def from_fast_tokenizer(fast: Any) -> Tokenizer:
    """Our tokenizer with the ids of a fast one, whose end-of-sequence token becomes the one between documents."""
    backend = getattr(fast, "backend_tokenizer", None)
    if backend is None:
        raise TypeError(f"fast must be a tokenizer with a tokenizer.json, got {type(fast).__name__}")
    kind = fast.init_kwargs.get("sympow_kind", "file")
    if kind == ByteTokenizer.kind:
        return ByteTokenizer()
    # A copy, since ours changes how it treats special tokens.
    model = tokenizers.Tokenizer.from_str(backend.to_str())
    return JsonTokenizer(model, kind, fast.eos_token, name=type(fast).__name__)


def _byte_level() -> Any:
    """The tokenizer whose ids are bytes: an encoding of byte pairs that never merges any."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE({char: byte for byte, char in enumerate(_byte_names())}, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens([END_OF_TEXT])
    return model


def _byte_names() -> list[str]:
    """The characters by which byte-level tokenizers call bytes: their own if printable, else the next from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
