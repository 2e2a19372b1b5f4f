"""What a model keeps of what it has read: a state, or the keys and values themselves while they take less.

A state of D (e + 1) numbers a head is large where p or d is: 29 GB in float32 for p = 4 and d = 64 in the 124M model.
Keys and values of the tokens read so far take less until there are about D of them, and give the same numbers. So by
default they are kept until they would outgrow the state, and then folded into one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch
from torch import nn

from sympow.checks import check_choice
from sympow.layers.mixers import ConformalAttention, LayerMemory, LayerState
from sympow.model.gpt import ModelState
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.state import State
from sympow.ops.torch.softmax import KeyValueState
from sympow.ops.window import CAPACITY, Window

Memory = Literal["auto", "state", "keys"]
# "auto": keys and values until they would take more bytes than a state; "state": a state from the first token on;
# "keys": keys and values, however many.
MEMORIES = ("auto", "state", "keys")
# Tokens to make room for where nobody says how many will come; room then doubles.
LEAST_ROOM = 256


class Model(Protocol):
    """What there is to know of a model here: `sympow.GPT`, or the same in transformers."""

    @property
    def blocks(self) -> nn.ModuleList: ...
    @property
    def embedding(self) -> nn.Embedding: ...
    @property
    def config(self) -> Any: ...


class Memories:
    """What each layer of a model decodes with, token by token: steps of the layers change them in place.

    Args:
        model: the one that has read.
        state: what was read; it stays as it is, unless owned.
        tokens: how many are to come, as far as known: room is made for as many. None: room grows as needed.
        memory: as in `sympow.generation.decoder.Decoder`.
        owned: whether the state may be used up; saves a copy.
        dtype: of queries, keys and values; None: `activation_dtype` of the model.

    Attributes:
        layers: one memory a layer, all alike.
    """

    def __init__(
        self,
        model: Model,
        state: ModelState,
        *,
        tokens: int | None = None,
        memory: Memory = "auto",
        owned: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_memory(memory, model, state)
        if len(state) != len(model.blocks):
            raise ValueError(f"reading must be of a model with {len(model.blocks)} layers, got {len(state)}")
        self._memory, self._expected = memory, tokens
        self._backend = model.config.backend
        self._dtype = activation_dtype(model) if dtype is None else dtype
        self._gate_per_pair = gates_per_pair(model)
        self.layers: list[LayerMemory] = [self._open(layer, owned) for layer in state]

    @property
    def folded(self) -> bool:
        """Whether there is a state, rather than keys and values alone."""
        return any(isinstance(memory, Window) and memory.kv is not None for memory in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes, the room in them included."""
        return sum(memory.nbytes for memory in self.layers)

    @torch.no_grad()
    def make_room(self, fold: Callable[[], None] | None = None) -> bool:
        """Folds or grows the memories where they are full, and says whether others took their place.

        Args:
            fold: what folds all of them; None: `fold`.
        """
        first = self.layers[0]
        if first.tokens < first.capacity:
            return False
        if isinstance(first, Window) and first.kv is not None:
            (fold or self.fold)()
            for memory in self.layers:
                memory.tokens = 0
            return False
        # One at a time, so that the old one of a layer is gone before the next layer's new one is made.
        self._expected = None
        for number, memory in enumerate(self.layers):
            if isinstance(memory, KeyValueCache):
                self.layers[number] = memory.resized(self._room(memory.tokens))
            elif self._memory == "auto" and memory.tokens >= memory.most_tokens:
                self.layers[number] = self._open_window(memory.close(self._backend), owned=True)
            else:
                self.layers[number] = memory.resized(self._room(memory.tokens, memory.most_tokens))
        return True

    def fold(self) -> None:
        """Folds all windows into their states."""
        for memory in self.layers:
            assert isinstance(memory, Window)
            memory.fold(self._backend)

    @torch.no_grad()
    def close(self) -> ModelState:
        """What was read and decoded, as a state. The memories are used up."""
        layers: list[LayerState] = []
        while self.layers:
            memory = self.layers.pop(0)
            if isinstance(memory, KeyValueCache) or memory.kv is not None:
                layers.append(memory.close())
            else:
                layers.append(memory.resized(max(1, memory.tokens)))
        return tuple(layers)

    @torch.no_grad()
    def _open(self, layer: LayerState, owned: bool) -> LayerMemory:
        if isinstance(layer, KeyValueState):
            return KeyValueCache.open(layer, capacity=self._room(layer.length))
        if isinstance(layer, State):
            return self._open_window(layer, owned)
        if self._memory == "state" or (self._memory == "auto" and layer.tokens >= layer.most_tokens):
            return self._open_window(layer.folded(), owned=True)
        return layer.resized(self._room(layer.tokens, layer.most_tokens))

    def _open_window(self, state: State, owned: bool) -> Window:
        return Window.open(
            state, capacity=CAPACITY, dtype=self._dtype, gate_per_pair=self._gate_per_pair, copy=not owned
        )

    def _room(self, held: int, most: int | None = None) -> int:
        """Places for tokens beside those held; no more than take as much as a state, unless keys are asked for."""
        room = held + max(1, self._expected) if self._expected is not None else max(held + LEAST_ROOM, 2 * held)
        return room if most is None or self._memory == "keys" else min(room, most)


def check_memory(memory: str, model: Model, state: ModelState | None = None) -> None:
    """Refuses what a model, or what it has read so far, cannot do."""
    check_choice("memory", memory, MEMORIES)
    if memory == "state" and model.config.mixer == "softmax":
        raise ValueError("memory='state' is for symmetric power attention: softmax has no state, only keys and values")
    if memory == "keys" and state is not None and any(isinstance(layer, State) for layer in state):
        raise ValueError("memory='keys' comes too late: keys and values were folded into a state already")


def prepare(model: Model, state: ModelState | None, batch: int, tokens: int, memory: Memory) -> ModelState | None:
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
        if memory == "state" or _offloaded(model):
            return None
        return empty_windows(model, batch) if memory == "keys" or tokens <= most_tokens(model) else None
    return fold(state) if memory == "state" or (memory == "auto" and outgrown(state, tokens)) else state


def outgrown(state: ModelState, tokens: int) -> bool:
    """Whether keys and values, if that is what was kept, and those of more tokens would take more than a state."""
    layer = state[0]
    return isinstance(layer, Window) and layer.tokens + tokens > layer.most_tokens


def fold(state: ModelState) -> ModelState:
    """The same with keys and values folded into states; what is given stays as it is."""
    return tuple(layer.folded() if isinstance(layer, Window) else layer for layer in state)


def most_tokens(model: Model) -> int:
    """How many tokens take no more memory as keys and values than as a state; of a model with symmetric powers."""
    return empty_windows(model, 1)[0].most_tokens


def state_bytes(windows: ModelState) -> int:
    """What a state in place of keys and values would take."""
    return sum(w.bytes_of_a_state * w.count.numel() for w in windows if isinstance(w, Window))


def empty_windows(model: Model, batch: int) -> tuple[Window, ...]:
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
                device=mixer.qkv_proj.weight.device,
            )
        )
    return tuple(windows)


def _offloaded(model: Model) -> bool:
    """Whether weights come to their device only when they are used, so that nobody knows it before."""
    return any(parameter.is_meta for parameter in model.blocks.parameters())


def activation_dtype(model: Model) -> torch.dtype:
    """Of queries, keys and values: that of the parameters, or of autocast."""
    weight = model.embedding.weight
    if torch.is_autocast_enabled(weight.device.type):
        return torch.get_autocast_dtype(weight.device.type)
    return weight.dtype


def gates_per_pair(model: Model) -> bool:
    """Whether every rotated pair has a gate of its own."""
    return model.config.gating == "vector"
