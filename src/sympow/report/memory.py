"""Bytes of states against bytes of keys and values for the shapes of known models: the table in docs/swap.md.

python -c "from sympow.report.memory import memory_table; print(memory_table())"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from sympow.model.accounting import key_value_elements, state_elements
from sympow.model.config import GPTConfig
from sympow.settings import symmetric_dim


def shape(layers: int, key_value_heads: int, head_dim: int, power: int = 2) -> GPTConfig:
    """A config with what the memory of a model's cache depends on."""
    width = key_value_heads * head_dim
    return GPTConfig(
        vocab_size=1, layers=layers, width=width, heads=key_value_heads, rotary="none", gating="none", power=power
    )


# As in the configs published with the models.
KNOWN_SHAPES = {
    "Llama-3 8B": shape(32, 8, 128),
    "Llama-3.2 1B": shape(16, 8, 64),
    "Mistral 7B": shape(32, 8, 128),
    "Qwen3 0.6B": shape(28, 8, 128),
    "Qwen3 1.7B": shape(28, 8, 128),
    "Qwen3 4B": shape(36, 8, 128),
    "Qwen3 8B": shape(36, 8, 128),
    "Qwen3 14B": shape(40, 8, 128),
}


def bytes_of_cache(config: GPTConfig, tokens: int, itemsize: int = 2) -> int:
    """Bytes of a sequence's keys and values, in numbers of `itemsize` bytes: 2 for bfloat16."""
    return itemsize * key_value_elements(config, tokens)


def bytes_of_states(config: GPTConfig, *, copied: bool = False) -> int:
    """Bytes of a sequence's states in float32.

    Args:
        copied: whether to add the 16-bit copy that decoding in bfloat16 on a GPU reads with p = 2: D d numbers for each
            head and layer, and a float32 number for each of their D rows.
    """
    head_dim = config.head_shape.head_dim
    copy = symmetric_dim(head_dim, config.power) * (2 * head_dim + 4) if copied else 0
    return 4 * state_elements(config) + config.layers * config.head_shape.key_value_heads * copy


def break_even(config: GPTConfig, *, copied: bool = False) -> int:
    """The context from which states take fewer bytes than keys and values in bfloat16."""
    return math.ceil(bytes_of_states(config, copied=copied) / bytes_of_cache(config, 1))


def memory_table(
    shapes: Mapping[str, GPTConfig] = KNOWN_SHAPES, *, contexts: Sequence[int] = (8_192, 32_768, 131_072)
) -> str:
    """A Markdown table, one row per model: bytes of the states and of the KV cache of one sequence, all layers swapped.

    Args:
        shapes: by the names of the models.
        contexts: the context lengths, in tokens, of the columns for the KV cache.
    """
    head = ["model", "states", "with the copy for decoding", *(f"cache at {n:,}" for n in contexts)]
    head += ["states smaller from", "with the copy from"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, config in shapes.items():
        sizes = [bytes_of_states(config), bytes_of_states(config, copied=True)]
        sizes += [bytes_of_cache(config, context) for context in contexts]
        breaks = [break_even(config), break_even(config, copied=True)]
        rows.append([name, *(f"{size / 1e9:.2f} GB" for size in sizes), *(f"{n:,}" for n in breaks)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
