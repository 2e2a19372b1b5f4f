"""How a layer makes queries, keys and values of x, and its output of what the heads return.

A layer's projections are its own submodules, so that a model's parameters keep their names; adapters such as peft's
replace a submodule by another of the same name. Hence the classes here hold names and sizes, and no modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import Tensor, nn

from sympow.checks import check_choice
from sympow.errors import ArgumentError

# Which entries of a query or key are rotated together: 2j and 2j + 1, or j and j + d/2.
Pairs = Literal["interleaved", "half"]
PAIRS = ("interleaved", "half")


@dataclass(frozen=True)
class Projections(ABC):
    """Base class: which submodules of a layer project, and how.

    Attributes:
        heads, key_value_heads, head_dim: h, h_kv and d.
        out: the name of the projection from heads to the output.
        out_dropout: the name of a module that is applied to the output; None: there is none.
        q_norm, k_norm: names of norms of each query and each key, (…, d) to (…, d); None: there are none.
        pairs: "half": the entries j and j + d/2 of a query or key form a pair, as in most models of transformers.
            They are put next to each other, where rotations and gates per pair expect them. As it happens to queries
            and keys alike, scores do not change.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    out: str
    out_dropout: str | None = None
    q_norm: str | None = None
    k_norm: str | None = None
    pairs: Pairs = "interleaved"

    def __post_init__(self) -> None:
        check_choice("pairs", self.pairs, PAIRS)

    def project(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (b, t, h, d), k and v (b, t, h_kv, d) of x (b, t, width)."""
        q, k, v = self.linear(layer, x)
        if self.q_norm is not None:
            q = getattr(layer, self.q_norm)(q)
        if self.k_norm is not None:
            k = getattr(layer, self.k_norm)(k)
        if self.pairs == "half":
            q, k = _interleaved(q), _interleaved(k)
        return q, k, v

    @abstractmethod
    def linear(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same before norms and before pairs are put next to each other."""

    def output(self, layer: nn.Module, y: Tensor) -> Tensor:
        """(b, t, width) of what the heads return, y (b, t, h, d)."""
        y = getattr(layer, self.out)(y.flatten(2))
        return y if self.out_dropout is None else getattr(layer, self.out_dropout)(y)

    def device(self, layer: nn.Module) -> torch.device:
        """Of the weights: of the output projection's, or of any others where that has none."""
        return next(chain(getattr(layer, self.out).parameters(), layer.parameters(), layer.buffers())).device


@dataclass(frozen=True)
class FusedProjections(Projections):
    """One projection to queries, keys and values, whose outputs are in this order.

    Attributes, beside those of `Projections`:
        qkv: its name.
    """

    out: str = "out_proj"
    qkv: str = "qkv_proj"

    def linear(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.joint(layer, x))

    def joint(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Queries, keys and values side by side, (b, t, (h + 2 h_kv) d)."""
        return getattr(layer, self.qkv)(x)

    def split(self, joint: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (b, t, h, d), k and v (b, t, h_kv, d) of what `joint` returns."""
        heads = _by_heads(joint, self.qkv, self.heads + 2 * self.key_value_heads, self.head_dim)
        q, k, v = heads.split([self.heads, self.key_value_heads, self.key_value_heads], dim=2)
        return q, k, v


@dataclass(frozen=True)
class SeparateProjections(Projections):
    """A projection to queries, one to keys and one to values.

    Attributes, beside those of `Projections`:
        q, k, v: their names.
    """

    out: str = "o_proj"
    q: str = "q_proj"
    k: str = "k_proj"
    v: str = "v_proj"

    def linear(self, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = (self.q, self.heads), (self.k, self.key_value_heads), (self.v, self.key_value_heads)
        q, k, v = (_by_heads(getattr(layer, name)(x), name, heads, self.head_dim) for name, heads in sizes)
        return q, k, v


def _by_heads(y: Tensor, name: str, heads: int, head_dim: int) -> Tensor:
    """y (…, h d), the output of the projection `name`, as (…, h, d).

    Raises:
        ValueError: y has another size, as with projections of another layer that has other heads.
    """
    if y.shape[-1] != heads * head_dim:
        raise ArgumentError(
            name,
            f"must project to {heads * head_dim}, {heads} heads of {head_dim}, as heads, key_value_heads and "
            f"head_dim say; it projects to {y.shape[-1]}",
        )
    return y.unflatten(-1, (heads, head_dim))


def _interleaved(x: Tensor) -> Tensor:
    """Entries (0, d/2, 1, d/2 + 1, …) of x (…, d)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
