"""The language model: `GPT`, its config and presets, the loss, its file format, and its costs."""

from sympow.model.config import PRESETS, GPTConfig
from sympow.model.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig"]
