"""Communication volume of one attention layer in bytes sent per rank: states, ring attention, all-gather of k and v.

A ring all-gather or reduce-scatter sends N − 1 of N shards. `docs/scaling.md` compares the three.
"""

from __future__ import annotations

from dataclasses import dataclass

from sympow.parallel.scan import rounds_of
from sympow.settings import check_power, symmetric_dim


@dataclass(frozen=True)
class LayerShape:
    """The dimensions of an attention layer that determine its communication volume.

    Attributes:
        heads: key/value heads h_kv.
        key_dim: d.
        value_dim: e.
        power: p.
        pairs: gates per head: 0 without gating, 1 for a scalar gate, d/2 for one per rotated pair.
        rotated: whether the rotation depends on the data, so that its phase is exchanged, too.
    """

    heads: int = 12
    key_dim: int = 64
    value_dim: int = 64
    power: int = 2
    pairs: int = 1
    rotated: bool = True

    def __post_init__(self) -> None:
        check_power(self.power)

    @property
    def state_elements(self) -> int:
        """Elements of S and Z, all heads."""
        return self.heads * symmetric_dim(self.key_dim, self.power) * (self.value_dim + 1)


def message_bytes(shape: LayerShape, itemsize: int = 4) -> int:
    """One message of the scan: S and Z in the dtype of states, log decays in float64."""
    return shape.state_elements * itemsize + 8 * shape.heads * shape.pairs


def phase_bytes(shape: LayerShape) -> int:
    """The phase of a rank, in float64."""
    return 8 * shape.heads * (shape.key_dim // 2) if shape.rotated else 0


def state_bytes(shape: LayerShape, ranks: int, *, rank: int, exchange: str, itemsize: int = 4) -> int:
    """Forward pass with states; in the backward pass, rank r sends what rank N − 1 − r sends here."""
    in_rounds = sum(rank + distance < ranks for distance in rounds_of(ranks))
    messages = ranks - 1 if exchange == "gather" else in_rounds
    return messages * message_bytes(shape, itemsize) + (ranks - 1) * phase_bytes(shape)


def key_value_bytes(shape: LayerShape, context: int, itemsize: int = 2) -> int:
    """Size of keys and values of a whole sequence."""
    return context * shape.heads * (shape.key_dim + shape.value_dim) * itemsize


def ring_attention_bytes(
    shape: LayerShape, context: int, ranks: int, *, itemsize: int = 2, gradient_itemsize: int = 4
) -> tuple[int, int]:
    """Forward and backward pass of ring attention, with equal shards.

    Forward, a rank sends keys and values N − 1 times. Backward it does so again, together with their gradients, which
    accumulate on the way and need one more step to return to their rank.
    """
    shard = key_value_bytes(shape, context, itemsize) // ranks
    gradients = key_value_bytes(shape, context, gradient_itemsize) // ranks
    return (ranks - 1) * shard, (ranks - 1) * shard + ranks * gradients


def gathered_key_value_bytes(shape: LayerShape, context: int, ranks: int, *, itemsize: int = 2) -> tuple[int, int]:
    """Forward pass with an all-gather of keys and values, backward with a reduce-scatter of their gradients."""
    shard = key_value_bytes(shape, context, itemsize) // ranks
    return (ranks - 1) * shard, (ranks - 1) * shard
