"""How a layer's width divides into heads."""

from __future__ import annotations

from dataclasses import dataclass

from sympow.ops.validation import check_positive


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer, all defaults filled in: h, h_kv, d."""

    heads: int
    key_value_heads: int
    head_dim: int

    @classmethod
    def resolve(
        cls, width: int, heads: int, key_value_heads: int | None, head_dim: int | None, *, in_pairs: bool
    ) -> HeadShape:
        """Fills in what is None, and refuses what does not fit.

        Args:
            width: size of the residual stream.
            heads: query heads.
            key_value_heads: None: as many as heads.
            head_dim: None: width / heads.
            in_pairs: whether entries of a head are used in pairs, so that there must be an even number.
        """
        for name, value in (("width", width), ("heads", heads)):
            check_positive(name, value)
        for name, optional in (("key_value_heads", key_value_heads), ("head_dim", head_dim)):
            if optional is not None:
                check_positive(name, optional)
        if head_dim is None:
            if width % heads:
                raise ValueError(f"width must be a multiple of heads unless head_dim is given; got {width} and {heads}")
            head_dim = width // heads
        if key_value_heads is None:
            key_value_heads = heads
        if heads % key_value_heads:
            raise ValueError(f"heads must be a multiple of key_value_heads; got {heads} and {key_value_heads}")
        if in_pairs and head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary or vector gating, which act on pairs; got {head_dim}")
        return cls(heads, key_value_heads, head_dim)


def acts_on_pairs(gating: str, rotary: str) -> bool:
    """Whether a gate or rotation of these kinds treats entries of a head in pairs."""
    return rotary != "none" or gating == "vector"
