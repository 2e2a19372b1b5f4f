"""`GPTConfig`: the hyperparameters of a model, validated, with presets and the paper's variants."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from sympow.checks import PositiveInt, Range, check_at_most, check_choice, check_fields, check_str
from sympow.errors import ArgumentError
from sympow.settings import (
    MAX_RATE,
    Backend,
    Form,
    Gating,
    HeadShape,
    Rotary,
    acts_on_pairs,
    check_chunk_size,
    check_features,
    check_gate_heads,
    check_power,
    check_rotation_dim,
    check_rotation_settings,
    check_short_conv,
)

# Configs come from files: a typing mistake there should raise an error instead of exhausting the memory.
Layers = Annotated[int, Range(1, largest=4_096, why="since each is built and launched by Python")]
Positions = Annotated[int, Range(1, largest=2**53, why="the most positions that float64 tells apart")]
MOST_WEIGHTS = 10**12
# Fields that choose how the same numbers are computed. They may change from run to run of one model.
EXECUTION_OPTIONS = ("form", "backend", "chunk_size")


@dataclass(frozen=True)
class GPTConfig:
    """A decoder-only transformer with symmetric power or softmax attention (paper §4).

    Attributes:
        vocab_size: number of tokens.
        layers: number of blocks.
        width: size of the residual stream.
        heads: query heads of a layer.
        key_value_heads: key/value heads of a layer, a divisor of heads; None: as many as heads.
        head_dim: size of a query, key and value; None: width / heads.
        mlp_ratio: hidden size of the MLP over width; the product is rounded to an integer.
        mixer: "sympow" or "softmax".
        power: p of the sympow mixer: 2, 4, 6 or 8.
        gating: "none", "fixed", "learned", "scalar" (the paper's), "vector", "clamped" or "half".
        rotary: "none", "fixed" (RoPE), "learned", "scale" (the paper's), "pairs", "signed" or "grid".
        max_document: N of the rotation rates, the longest document expected.
        max_rate: the fastest rotation rate, in radians per token; the paper's is 2π.
        rotary_fraction: the part of the pairs of a head that is rotated, the fastest ones.
        bias: whether linear maps have biases, as in GPT-2.
        short_conv: taps of a causal convolution over the queries, keys and values of the last tokens; 0: none.
        form: algorithm of the sympow mixer, as in `sympow.attention`.
        backend: implementation of the sympow mixer, as in `sympow.attention`; "torch" also rules out other Triton
            kernels, such as that of the training loss.
        chunk_size: tokens of a chunk of its chunked form; None: chosen by cost.
    """

    vocab_size: PositiveInt = 50_257
    layers: Layers = 12
    width: int = 768
    heads: int = 12
    key_value_heads: int | None = None
    head_dim: int | None = None
    mlp_ratio: float = 4
    mixer: Literal["sympow", "softmax"] = "sympow"
    power: int = 2
    gating: Gating = "scalar"
    rotary: Rotary = "fixed"
    max_document: Positions = 65_536
    max_rate: float = MAX_RATE
    rotary_fraction: float = 1.0
    bias: bool = True
    short_conv: int = 0
    form: Form = "auto"
    backend: Backend = "auto"
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_rotation_settings(self.rotary, self.max_rate, self.rotary_fraction)
        # A config has one spelling, as for mlp_ratio.
        for name in ("max_rate", "rotary_fraction"):
            object.__setattr__(self, name, float(getattr(self, name)))
        check_power(self.power)
        check_short_conv(self.short_conv)
        check_chunk_size(self.chunk_size, self.form)
        if self.mixer == "softmax":
            for name in ("power", *EXECUTION_OPTIONS):
                default = GPTConfig.__dataclass_fields__[name].default
                if getattr(self, name) != default:
                    raise ArgumentError(
                        name, f"is for mixer='sympow'; got {getattr(self, name)!r} with mixer='softmax'"
                    )
        check_gate_heads(self.gating, self.head_shape.key_value_heads)
        check_rotation_dim(self.rotary, self.head_shape.head_dim, self.rotary_fraction)
        self._check_mlp_ratio()
        check_at_most("the number of weights", self.weights, MOST_WEIGHTS, "which is 4 TB in float32")
        if self.mixer == "sympow" and self.form in ("chunked", "recurrent"):
            check_features(self.head_shape.head_dim, self.power)

    @property
    def head_shape(self) -> HeadShape:
        """Query heads, key/value heads and head dim, defaults filled in."""
        in_pairs = acts_on_pairs(self.gating, self.rotary)
        return HeadShape.resolve(self.width, self.heads, self.key_value_heads, self.head_dim, in_pairs=in_pairs)

    @property
    def weights(self) -> int:
        """Entries of the large matrices: the parameters, without biases, norms, gates and rotations."""
        shape = self.head_shape
        projections = 2 * (shape.heads + shape.key_value_heads) * shape.head_dim * self.width
        return self.vocab_size * self.width + self.layers * (projections + 2 * self.mlp_width * self.width)

    @property
    def mlp_width(self) -> int:
        """Hidden size of the MLP."""
        return round(self.mlp_ratio * self.width)

    def _check_mlp_ratio(self) -> None:
        if not 0.5 < self.mlp_ratio * self.width <= MOST_WEIGHTS:
            raise ArgumentError(
                "mlp_ratio",
                f"must give the MLP at least 1 hidden unit and at most {MOST_WEIGHTS:.0e}; got {self.mlp_ratio}",
            )
        if self.mlp_ratio == int(self.mlp_ratio):
            # A config has one spelling: its JSON is hashed to tell models apart.
            object.__setattr__(self, "mlp_ratio", int(self.mlp_ratio))

    @classmethod
    def preset(cls, name: str, **changes: Any) -> GPTConfig:
        """The model called `name` (one of `PRESETS`), with some fields changed.

        Example:
            >>> GPTConfig.preset("gpt2-124m", power=4, gating="none").power
            4
        """
        check_str("name", name)
        check_choice("name", name, PRESETS)
        unknown = set(changes) - {field.name for field in fields(cls)}
        if unknown:
            raise TypeError(f"GPTConfig has no field {', '.join(map(repr, sorted(unknown)))}")
        return replace(PRESETS[name], **changes)


PRESETS: dict[str, GPTConfig] = {
    # The paper's model (§4): GPT-2 small with rotary positions and a LayerNorm after the embedding. Its rotation is
    # that of all models here; the paper's curves are VARIANTS.
    "gpt2-124m": GPTConfig(),
    # Byte-level models for a laptop or a quick look: about 11M and 0.4M parameters.
    "byte-11m": GPTConfig(vocab_size=256, layers=6, width=384, heads=6),
    "byte-400k": GPTConfig(vocab_size=256, layers=2, width=128, heads=4),
}


# The paper's curves (§4).
PAPER_VARIANTS: dict[str, dict[str, Any]] = {
    "softmax": {"mixer": "softmax", "gating": "none", "rotary": "fixed"},
    "sympow": {"mixer": "sympow", "gating": "none", "rotary": "fixed"},
    "gating": {"mixer": "sympow", "gating": "scalar", "rotary": "fixed"},
    "conformal": {"mixer": "sympow", "gating": "scalar", "rotary": "scale"},
}
# The paper's curves, its ablations (§4.2.1), and variants that its conclusion leaves to future work.
VARIANTS: dict[str, dict[str, Any]] = {
    **PAPER_VARIANTS,
    "rotation": {"mixer": "sympow", "gating": "none", "rotary": "scale"},
    "fixed-gate": {"mixer": "sympow", "gating": "fixed", "rotary": "fixed"},
    "learned-gate": {"mixer": "sympow", "gating": "learned", "rotary": "fixed"},
    "vector-gate": {"mixer": "sympow", "gating": "vector", "rotary": "fixed"},
    "learned-rates": {"mixer": "sympow", "gating": "scalar", "rotary": "learned"},
    "pair-rotation": {"mixer": "sympow", "gating": "scalar", "rotary": "pairs"},
    "unrotated": {"mixer": "sympow", "gating": "scalar", "rotary": "none"},
}
