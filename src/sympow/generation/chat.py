"""`ChatTemplate`: writes the messages of a chat as the text that a model was trained to continue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sympow.data.pieces import known_cuts, pieces
from sympow.data.plain_text import check_text
from sympow.errors import ArgumentError
from sympow.extras import require


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer.

    Attributes:
        tokenizer: a tokenizer of transformers with a `chat_template`.
    """

    tokenizer: Any

    def write(self, messages: list[dict[str, str]]) -> str:
        """A chat as a text, in which special tokens are spelled, with the generation prompt at the end.

        Raises:
            ValueError: the template refuses the messages, for example because roles do not alternate.
        """
        refused = require("jinja2", "serve").TemplateError
        try:
            text: str = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except refused as error:
            raise ArgumentError("messages", f"do not fit this model's chat template: {error}") from error
        if not text:
            raise ArgumentError("messages", "are empty under this model's chat template")
        check_text("messages", text)
        return text

    def tokens(self, text: str) -> Iterator[int]:
        """The tokens of a text that `write` returned, piece by piece."""
        for piece in pieces("messages", text, known_cuts(self.tokenizer.backend_tokenizer)):
            # Special tokens in the template's text become tokens. The template itself adds BOS where it is needed.
            yield from self.tokenizer(piece, add_special_tokens=False, split_special_tokens=False)["input_ids"]
