"""Bytes of states against bytes of keys and values for the shapes of known models: the table in docs/swap.md.

python -c "from sympow.report.memory import memory_table; print(memory_table())"
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sympow.settings import check_power, symmetric_dim


@dataclass(frozen=True)
class AttentionShape:
    """What the memory of a model's cache depends on.

    Attributes:
        layers: the number of layers with self-attention.
        key_value_heads, head_dim: h_kv and d of a layer.
    """

    layers: int
    key_value_heads: int
    head_dim: int

    def cache_bytes(self, tokens: int, itemsize: int = 2) -> int:
        """Bytes of a sequence's keys and values: 2 d numbers for each token, head and layer.

        Args:
            itemsize: bytes of a number; 2 for bfloat16.
        """
        return 2 * self.head_dim * itemsize * self.key_value_heads * self.layers * tokens

    def state_bytes(self, power: int = 2, *, copied: bool = False) -> int:
        """Bytes of a sequence's states in float32: D (d + 1) numbers for each head and layer, D = C(d + p − 1, p).

        Args:
            power: p.
            copied: whether to add the 16-bit copy that decoding in bfloat16 on a GPU reads with p = 2: D d numbers, and
                a float32 number for each of its D rows.
        """
        check_power(power)
        features = symmetric_dim(self.head_dim, power)
        of_a_head = 4 * features * (self.head_dim + 1)
        if copied:
            of_a_head += features * (2 * self.head_dim + 4)
        return of_a_head * self.key_value_heads * self.layers

    def break_even(self, power: int = 2, *, copied: bool = False) -> int:
        """The context from which states take fewer bytes than keys and values in bfloat16."""
        return math.ceil(self.state_bytes(power, copied=copied) / self.cache_bytes(1))


# As in the configs published with the models.
KNOWN_SHAPES = {
    "Llama-3 8B": AttentionShape(32, 8, 128),
    "Llama-3.2 1B": AttentionShape(16, 8, 64),
    "Mistral 7B": AttentionShape(32, 8, 128),
    "Qwen3 0.6B": AttentionShape(28, 8, 128),
    "Qwen3 1.7B": AttentionShape(28, 8, 128),
    "Qwen3 4B": AttentionShape(36, 8, 128),
    "Qwen3 8B": AttentionShape(36, 8, 128),
    "Qwen3 14B": AttentionShape(40, 8, 128),
}


def memory_table(
    shapes: Mapping[str, AttentionShape] = KNOWN_SHAPES,
    *,
    power: int = 2,
    contexts: Sequence[int] = (8_192, 32_768, 131_072),
) -> str:
    """A Markdown table, one row per model: bytes of the states and of the KV cache of one sequence, all layers swapped.

    Args:
        shapes: attention shapes by the names of the models.
        power: p.
        contexts: the context lengths, in tokens, of the columns for the KV cache.
    """
    head = ["model", "states", "with the copy for decoding", *(f"cache at {n:,}" for n in contexts)]
    head += ["states smaller from", "with the copy from"]
    rows = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, shape in shapes.items():
        sizes = [shape.state_bytes(power), shape.state_bytes(power, copied=True)]
        sizes += [shape.cache_bytes(context) for context in contexts]
        breaks = [shape.break_even(power), shape.break_even(power, copied=True)]
        rows.append([name, *(f"{size / 1e9:.2f} GB" for size in sizes), *(f"{n:,}" for n in breaks)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
