"""What the settings of models, layers and data can be: the names of kinds, their limits, and checks.

Without torch, so that configs and the command line, which need no more, are imported at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from sympow.checks import check_at_least, check_at_most, check_bool, check_finite, check_positive, check_size
from sympow.errors import ArgumentError

# Of a call of the operator.
Form = Literal["auto", "attention", "chunked", "recurrent"]
Backend = Literal["auto", "torch", "triton"]
FORMS, BACKENDS = get_args(Form), get_args(Backend)
# A state loses more digits the larger p is: of p = 8 it has none left of a score of a tenth of |q||k|.
POWERS = (2, 4, 6, 8)
LARGEST_POWER = POWERS[-1]
# Kernels and tables count features in 32 bits.
MOST_FEATURES = 2**31 - 1

# Gates of a layer, by the names of `sympow.layers.gates`.
Gating = Literal["none", "fixed", "learned", "scalar", "vector", "clamped", "half"]
GATES = get_args(Gating)
# Kinds whose γ is learned, and has a value before that.
LEARNED_GATES = tuple(kind for kind in GATES if kind not in ("none", "fixed"))
# The default of settings that are always a number. It is not refused for gates that do not learn γ.
INITIAL_GATE = 0.999

# Rotations of a layer, by the names of `sympow.layers.rotations`.
Rotary = Literal["none", "fixed", "learned", "scale", "pairs", "signed", "grid"]
ROTATIONS = get_args(Rotary)
# Kinds with a β or an angle that depends on the token.
DATA_DEPENDENT = ("scale", "pairs", "signed", "grid")
# Kinds that turn half of the pairs by angles of their own instead of scaling the rates of all pairs.
TURNING = ("signed", "grid")
# Kinds that start from given rates in all pairs, such as those of a pretrained model.
WITH_GIVEN_RATES = tuple(kind for kind in ROTATIONS if kind not in TURNING)
# θ_1 in radians per token, the paper's (§2.2).
MAX_RATE = 2 * math.pi

# More taps than that are a mistake: each is a pass over all queries, keys and values.
WIDEST_SHORT_CONV = 64

# What to do with documents shorter than the context.
Short = Literal["refuse", "drop", "join", "pack"]
SHORT = get_args(Short)


def check_power(power: int) -> None:
    """Raises unless it is a power of the operator, one of `POWERS`."""
    if type(power) is int and (power < 2 or power % 2):
        raise ArgumentError(
            "power",
            f"must be even and at least 2, got {power}: only even powers make every score non-negative, "
            "and so the weights of a row a distribution",
        )
    check_at_least("power", power, 2)
    check_at_most("power", power, LARGEST_POWER, "since powers 2, 4, 6 and 8 are supported")


def check_chunk_size(chunk_size: int | None, form: str) -> None:
    if chunk_size is None:
        return
    check_positive("chunk_size", chunk_size)
    if form not in ("auto", "chunked"):
        raise ArgumentError("chunk_size", f"is for form='chunked' (or 'auto', which then means it); got form={form!r}")


def symmetric_dim(dim: int, power: int) -> int:
    """D = C(dim + power - 1, power), the length of φ^power of a vector of `dim` entries."""
    check_size("dim", dim)
    check_size("power", power, 0)
    # Not `math.comb`, which torch.compile cannot trace where it leaves `dim` open.
    count = 1
    for factor in range(power):
        count = count * (dim + factor) // (factor + 1)
    return count


def check_features(dim: int, power: int) -> None:
    """Raises a ValueError for a feature map whose tables alone would fill the memory."""
    check_degree(power)
    check_at_most("dim", dim, MOST_FEATURES, "the most that 32 bits count")
    check_at_most(
        f"the number of features of dim {dim} and power {power}",
        symmetric_dim(dim, power),
        MOST_FEATURES,
        "the most that 32 bits count",
    )


def check_state_sizes(
    batch: int, heads: int, key_dim: int, value_dim: int, power: int, *, rotated: bool, gate_per_pair: bool = False
) -> None:
    """Raises unless a state or a window can have these sizes."""
    for name, size in (("batch", batch), ("heads", heads), ("key_dim", key_dim), ("value_dim", value_dim)):
        check_size(name, size)
    check_power(power)
    check_bool("rotated", rotated)
    if (rotated or gate_per_pair) and key_dim % 2:
        raise ArgumentError("key_dim", f"must be even for pairs of entries to be rotated or gated, got {key_dim}")


def check_degree(power: int) -> None:
    """Raises unless it is a degree of the feature map, which can be odd."""
    check_at_least("power", power, 1)
    check_at_most("power", power, LARGEST_POWER, "since powers from 1 to 8 are supported")


def check_initial_gate(initial_gate: float, kind: str) -> None:
    """Raises unless it is a γ that a sigmoid can have, and gates of this kind learn it."""
    check_finite("initial_gate", initial_gate)
    if not 0 < initial_gate < 1:
        raise ArgumentError("initial_gate", f"must lie between 0 and 1, got {initial_gate}")
    if kind not in LEARNED_GATES:
        raise ArgumentError("initial_gate", f"is for gates that are learned; got {initial_gate} with gating={kind!r}")


def check_gate_heads(kind: str, heads: int) -> None:
    """Raises a ValueError unless a gate of this kind can have so many key/value heads."""
    if kind == "half" and heads < 2:
        raise ArgumentError("key_value_heads", f"must be at least 2 for gating='half', got {heads}")


def rotated_pairs(head_dim: int, fraction: float) -> int:
    """How many pairs of a head are rotated, the fastest ones: at least one."""
    return max(1, round(fraction * (head_dim // 2)))


def check_rotation_dim(kind: str, head_dim: int, fraction: float) -> None:
    """Raises a ValueError unless a rotation of this kind can have heads of this size."""
    if kind in TURNING and head_dim < 4:
        raise ArgumentError(
            "head_dim", f"must be at least 4 for rotary={kind!r}, so that one pair keeps its fixed rate; got {head_dim}"
        )
    if kind in TURNING and rotated_pairs(head_dim, fraction) < 2:
        raise ArgumentError(
            "rotary_fraction",
            f"must rotate at least two pairs for rotary={kind!r}, one of which keeps its fixed rate; "
            f"got {fraction} with heads of {head_dim}",
        )


def check_takes_rates(kind: str) -> None:
    """Raises a ValueError if a rotation of this kind would replace given rates."""
    if kind in TURNING:
        raise ArgumentError(
            "rotary",
            f"must be one of {', '.join(map(repr, WITH_GIVEN_RATES))} where the rates are those of another "
            f"layer: {kind!r} keeps every other rate, in half of the pairs, and stops the rest; got {kind!r}",
        )


def check_rotation_settings(kind: str, max_rate: float, fraction: float) -> None:
    """Raises unless a rotation of this kind can have these settings, which have no effect without a rotation."""
    check_max_rate(max_rate)
    check_finite("rotary_fraction", fraction)
    if not 0 < fraction <= 1:
        raise ArgumentError(
            "rotary_fraction",
            f"must be above 0 and at most 1, got {fraction}; rotary='none' is a model without rotation",
        )
    for name, value, default in (("max_rate", max_rate, MAX_RATE), ("rotary_fraction", fraction, 1)):
        if kind == "none" and value != default:
            raise ArgumentError(name, f"is for models with a rotation; got {value} with rotary='none'")


def check_max_rate(max_rate: float) -> None:
    """Raises unless this can be the fastest of rotation rates, in radians per token."""
    check_finite("max_rate", max_rate)
    if max_rate <= 0:
        raise ArgumentError("max_rate", f"must be above 0 radians per token, got {max_rate}")


def check_short_conv(width: int) -> None:
    """Raises a ValueError or TypeError unless `width` is a number of taps, or 0 for no convolution."""
    check_at_least("short_conv", width, 0)
    check_at_most("short_conv", width, WIDEST_SHORT_CONV, "since it is for the last few tokens")
    if width == 1:
        raise ArgumentError("short_conv", "must be 0 (none) or at least 2, the current token and others; got 1")


@dataclass(frozen=True)
class HeadShape:
    """The heads of a layer with all defaults filled in: h, h_kv and d."""

    heads: int
    key_value_heads: int
    head_dim: int

    @classmethod
    def resolve(
        cls, width: int, heads: int, key_value_heads: int | None, head_dim: int | None, *, in_pairs: bool
    ) -> HeadShape:
        """Fills in what is None, and raises a ValueError where sizes do not fit.

        Args:
            width: size of the residual stream.
            heads: query heads.
            key_value_heads: None: as many as heads.
            head_dim: None: width / heads.
            in_pairs: whether gate or rotation act on pairs of entries, so that head_dim must be even.
        """
        for name, value in (("width", width), ("heads", heads)):
            check_positive(name, value)
        for name, optional in (("key_value_heads", key_value_heads), ("head_dim", head_dim)):
            if optional is not None:
                check_positive(name, optional)
        if head_dim is None:
            if width % heads:
                raise ArgumentError(
                    "width", f"must be a multiple of heads unless head_dim is given; got {width} and {heads}"
                )
            head_dim = width // heads
        if key_value_heads is None:
            key_value_heads = heads
        if heads % key_value_heads:
            raise ArgumentError("heads", f"must be a multiple of key_value_heads; got {heads} and {key_value_heads}")
        if in_pairs and head_dim % 2:
            raise ArgumentError(
                "head_dim", f"must be even for rotary or vector gating, which act on pairs; got {head_dim}"
            )
        return cls(heads, key_value_heads, head_dim)


def acts_on_pairs(gating: str, rotary: str) -> bool:
    """Whether a gate or rotation of these kinds acts on pairs of entries of a head."""
    return rotary != "none" or gating == "vector"
