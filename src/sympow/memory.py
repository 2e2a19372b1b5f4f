"""What a model keeps of what it has read: a state, or the keys and values themselves while they take less.

A state of D (e + 1) numbers a head is large where p or d is: 29 GB in float32 for p = 4 and d = 64 in the 124M model.
Keys and values of the tokens read so far take less until there are about D of them, and give the same numbers. So by
default they are kept until they would outgrow the state, and then folded into one.
"""

from __future__ import annotations

from typing import Literal

import torch

from sympow.checks import check_choice
from sympow.layers.mixers import ConformalAttention
from sympow.model.gpt import GPT, ModelState
from sympow.ops.state import State
from sympow.ops.window import Window

Memory = Literal["auto", "state", "keys"]
# "auto": keys and values until they would take more bytes than a state; "state": a state from the first token on;
# "keys": keys and values, however many.
MEMORIES = ("auto", "state", "keys")


def check_memory(memory: str, model: GPT, state: ModelState | None = None) -> None:
    """Refuses what a model, or what it has read so far, cannot do."""
    check_choice("memory", memory, MEMORIES)
    if memory == "state" and model.config.mixer == "softmax":
        raise ValueError("memory='state' is for symmetric power attention: softmax has no state, only keys and values")
    if memory == "keys" and state is not None and any(isinstance(layer, State) for layer in state):
        raise ValueError("memory='keys' comes too late: keys and values were folded into a state already")


def prepare(model: GPT, state: ModelState | None, batch: int, tokens: int, memory: Memory) -> ModelState | None:
    """What reading more tokens starts from.

    Args:
        state: after what was read so far; None: nothing.
        batch: sequences.
        tokens: to be read.
        memory: one of MEMORIES.

    Returns:
        The state as it is, or with its keys and values folded; empty windows where nothing was read and keys and
        values are to be kept; None where nothing was read and a state is to be made.
    """
    check_memory(memory, model, state)
    if model.config.mixer == "softmax":
        return state
    if state is None:
        keep = memory == "keys" or (memory == "auto" and tokens <= most_tokens(model))
        return empty_windows(model, batch) if keep else None
    return fold(state) if memory == "state" or (memory == "auto" and outgrown(state, tokens)) else state


def outgrown(state: ModelState, tokens: int) -> bool:
    """Whether keys and values, if that is what was kept, and those of more tokens would take more than a state."""
    layer = state[0]
    return isinstance(layer, Window) and layer.tokens + tokens > layer.most_tokens


def fold(state: ModelState) -> ModelState:
    """The same with keys and values folded into states; what is given stays as it is."""
    return tuple(layer.folded() if isinstance(layer, Window) else layer for layer in state)


def most_tokens(model: GPT) -> int:
    """How many tokens take no more memory as keys and values than as a state; of a model with symmetric powers."""
    return empty_windows(model, 1)[0].most_tokens


def state_bytes(windows: ModelState) -> int:
    """What a state in place of keys and values would take."""
    return sum(w.bytes_of_a_state * w.count.numel() for w in windows if isinstance(w, Window))


def empty_windows(model: GPT, batch: int) -> tuple[Window, ...]:
    """Keys and values of nothing yet, for every layer."""
    windows = []
    for block in model.blocks:
        mixer = block.mixer
        assert isinstance(mixer, ConformalAttention)
        windows.append(
            Window.empty(
                batch,
                mixer.key_value_heads,
                mixer.head_dim,
                mixer.head_dim,
                mixer.power,
                rotated=model.config.rotary != "none",
                capacity=1,
                dtype=activation_dtype(model),
                gate_per_pair=gates_per_pair(model),
                device=model.embedding.weight.device,
            )
        )
    return tuple(windows)


def activation_dtype(model: GPT) -> torch.dtype:
    """Of queries, keys and values: that of the parameters, or of autocast."""
    weight = model.embedding.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def gates_per_pair(model: GPT) -> bool:
    """Whether every rotated pair has a gate of its own."""
    return model.config.gating == "vector"
