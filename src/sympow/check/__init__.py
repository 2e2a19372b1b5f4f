"""What `sympow check` and `sympow bench` measure on this machine: accuracy of kernels, speed and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Sizes:
    """What is timed on a kind of device unless the user says otherwise: seconds to a few minutes of work.

    Attributes:
        contexts: sequence lengths.
        tokens: of a call.
        heads: of a call.
        dtype: of q, k and v.
        runs: rounds.
    """

    contexts: tuple[int, ...]
    tokens: int
    heads: int
    dtype: str
    runs: int


SIZES = {
    "cuda": Sizes((1_024, 4_096, 16_384, 65_536), 65_536, 12, "bfloat16", 20),
    # float32: most CPUs emulate bfloat16 products, hundreds of times slower.
    "cpu": Sizes((256, 1_024, 4_096), 4_096, 2, "float32", 3),
}


class Shape(NamedTuple):
    """The attention of a published model: query heads, key heads and the dimension of both."""

    heads: int
    kv_heads: int
    dim: int


# As num_attention_heads, num_key_value_heads and head_dim of the configurations that were published with the weights.
SHAPES = {
    "gpt2-124m": Shape(12, 12, 64),
    "gpt2-xl": Shape(25, 25, 64),
    "llama-1b": Shape(32, 8, 64),  # Llama 3.2
    "llama-8b": Shape(32, 8, 128),  # Llama 3 and 3.1
    "mistral-7b": Shape(32, 8, 128),
    "phi-2": Shape(32, 32, 80),
    "qwen3-0.6b": Shape(16, 8, 128),
    "qwen3-8b": Shape(32, 8, 128),
    "qwen3-14b": Shape(40, 8, 128),
    "smollm2-135m": Shape(9, 3, 64),
    "starcoder2-3b": Shape(24, 2, 128),
}
