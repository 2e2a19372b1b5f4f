"""Bytes a rank sends for one attention layer and one sequence: through a state, by ring attention, by an all-gather.

Counted as sent: a ring all-gather or reduce-scatter passes on N − 1 of N parts. `docs/scaling.md` compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from sympow.ops.symmetric import symmetric_dim
from sympow.parallel.scan import rounds_of


@dataclass(frozen=True)
class LayerShape:
    """As much of an attention layer as what is sent depends on.

    Attributes:
        heads: key/value heads h_kv.
        key_dim: d.
        value_dim: e.
        power: p.
        pairs: numbers of a gate: 0 without gating, 1 for one a head, d/2 for one a pair.
        turned: whether the rotation depends on the data, so that its phase is exchanged, too.
    """

    heads: int = 12
    key_dim: int = 64
    value_dim: int = 64
    power: int = 2
    pairs: int = 1
    turned: bool = True

    @property
    def state_elements(self) -> int:
        """Numbers of S and Z, all heads."""
        return self.heads * symmetric_dim(self.key_dim, self.power) * (self.value_dim + 1)


def message_bytes(shape: LayerShape, itemsize: int = 4) -> int:
    """One message of the scan: S and Z in the dtype of states, and logarithms of decays in float64."""
    return shape.state_elements * itemsize + 8 * shape.heads * shape.pairs


def phase_bytes(shape: LayerShape) -> int:
    """What a rank turns, in float64."""
    return 8 * shape.heads * (shape.key_dim // 2) if shape.turned else 0


def state_bytes(shape: LayerShape, ranks: int, *, rank: int, exchange: str, itemsize: int = 4) -> int:
    """A forward pass through states; a backward pass sends as much, mirrored: as rank N − 1 − rank does here."""
    in_rounds = sum(rank + distance < ranks for distance in rounds_of(ranks))
    messages = ranks - 1 if exchange == "gather" else in_rounds
    return messages * message_bytes(shape, itemsize) + (ranks - 1) * phase_bytes(shape)


def key_value_bytes(shape: LayerShape, context: int, itemsize: int = 2) -> int:
    """Keys and values of a whole sequence."""
    return context * shape.heads * (shape.key_dim + shape.value_dim) * itemsize


def ring_attention_bytes(
    shape: LayerShape, context: int, ranks: int, *, itemsize: int = 2, gradient_itemsize: int = 4
) -> tuple[int, int]:
    """Forward and backward pass of ring attention, in equal parts of the context.

    Forward, a rank passes on the keys and values of N − 1 ranks. Backward it does so again, and with them go their
    gradients, which add up on the way and need one step more to come home.
    """
    part = key_value_bytes(shape, context, itemsize) // ranks
    gradients = key_value_bytes(shape, context, gradient_itemsize) // ranks
    return (ranks - 1) * part, (ranks - 1) * part + ranks * gradients


def gathered_key_value_bytes(shape: LayerShape, context: int, ranks: int, *, itemsize: int = 2) -> tuple[int, int]:
    """Forward pass with an all-gather of keys and values, backward with a reduce-scatter of their gradients."""
    part = key_value_bytes(shape, context, itemsize) // ranks
    return (ranks - 1) * part, (ranks - 1) * part
