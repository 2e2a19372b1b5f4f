"""The language model."""

from sympow.model.config import PRESETS, GPTConfig
from sympow.model.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig"]
