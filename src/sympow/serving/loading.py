"""`ServedModel`: a model from a training run or in Hugging Face format, with its chat template if it has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sympow.data.pieces import known_cuts, pieces
from sympow.data.tokenizer import SETTINGS_FILE, Tokenizer, load_tokenizer
from sympow.extras import require
from sympow.generation.text import TextModel
from sympow.model.gpt import GPT
from sympow.model.storage import CONFIG_FILE

TRANSFORMERS_CONFIG_FILE = "config.json"
TRANSFORMERS_TOKENIZER_FILE = "tokenizer_config.json"


class ChatText(str):
    """A chat as its template writes it, in which special tokens are spelled."""


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        tokenizer: a tokenizer of transformers with a `chat_template`.
    """

    tokenizer: Any

    def write(self, messages: list[dict[str, str]]) -> ChatText:
        """A chat as a text, with the generation prompt at the end.

        Raises:
            ValueError: the template refuses the messages, for example because roles do not alternate.
        """
        refused = require("jinja2", "serve").TemplateError
        try:
            text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except refused as error:
            raise ValueError(f"messages do not fit this model's chat template: {error}") from error
        if not text:
            raise ValueError("messages are empty under this model's chat template")
        return ChatText(text)

    def tokens(self, text: ChatText) -> Iterator[int]:
        """The tokens of a chat, piece by piece."""
        for piece in pieces("messages", text, known_cuts(self.tokenizer.backend_tokenizer)):
            # Special tokens in the template's text become tokens. The template itself adds BOS where it is needed.
            yield from self.tokenizer(piece, add_special_tokens=False, split_special_tokens=False)["input_ids"]


@dataclass(frozen=True)
class ServedModel:
    """A model with its name in the API.

    Attributes:
        chat: the chat template; None if the tokenizer has none.
    """

    name: str
    text_model: TextModel
    chat: ChatTemplate | None = None

    @classmethod
    def load(
        cls, folder: Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None, name: str | None = None
    ) -> ServedModel:
        """Loads a model folder.

        Args:
            folder: the `model` folder of a training run, or a folder that `save_pretrained` wrote, of a
                `SympowForCausalLM` or of a model with swapped attention in all layers.
            dtype: dtype of the parameters; None: as they were saved.
            name: name in the API; by default the folder's name, and that of the run for a folder called `model`.
        """
        name = name or _name_of(folder)
        if not in_transformers_format(folder):
            return cls(name, TextModel.load(folder, device, dtype))
        # Without this check, the error would name a module of this package instead of the extra.
        require("transformers", "hf")
        from sympow.hf.quiet import quiet
        from sympow.hf.text_model import load_text_model

        with quiet():
            text_model, tokenizer = load_text_model(folder, device, dtype)
        has_template = getattr(tokenizer, "chat_template", None) is not None
        return cls(name, text_model, ChatTemplate(tokenizer) if has_template else None)


def in_transformers_format(folder: Path) -> bool:
    """Whether `save_pretrained` wrote a folder, and not `sympow train`."""
    return not (folder / CONFIG_FILE).is_file() and (folder / TRANSFORMERS_CONFIG_FILE).is_file()


def load_from_transformers(folder: Path, device: torch.device | str, dtype: torch.dtype | None) -> GPT:
    """The model of a folder that `save_pretrained` wrote, which may be without a tokenizer."""
    # As above.
    require("transformers", "hf")
    from sympow.hf.quiet import quiet
    from sympow.hf.text_model import load_gpt

    with quiet():
        return load_gpt(folder, device, dtype)


def saved_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer in a model's folder of either format; None: there is none."""
    if not in_transformers_format(folder):
        return load_tokenizer(folder) if (folder / SETTINGS_FILE).is_file() else None
    if not (folder / TRANSFORMERS_TOKENIZER_FILE).is_file():
        return None
    require("transformers", "hf")
    from sympow.hf.text_model import load_tokenizer_of_folder

    tokenizer, _ = load_tokenizer_of_folder(folder)
    return tokenizer


def _name_of(folder: Path) -> str:
    whole = folder.absolute()
    return whole.parent.name if whole.name == "model" and whole.parent.name else whole.name
