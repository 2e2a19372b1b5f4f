"""The language model: `GPT`, its config and presets, the loss, its file format, and its costs.

`GPT` is imported when it is first used: the config alone does not need torch, which takes seconds to import.
"""

from typing import TYPE_CHECKING, Any

from sympow.model.config import PRESETS, GPTConfig

if TYPE_CHECKING:
    from sympow.model.gpt import GPT

__all__ = ["GPT", "PRESETS", "GPTConfig"]


def __getattr__(name: str) -> Any:
    if name == "GPT":
        from sympow.model.gpt import GPT

        return GPT
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
