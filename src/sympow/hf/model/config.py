"""`SympowConfig`: the config of a model in transformers, and its mapping to `GPTConfig`."""

from __future__ import annotations

import re
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from sympow.checks import check_at_least
from sympow.model.config import GPTConfig
from sympow.settings import MAX_RATE

# Fields of `GPTConfig` → those of `SympowConfig`. The size of the MLP is missing: `GPTConfig` has a ratio.
TRANSFORMERS_NAMES = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mixer": "mixer",
    "power": "power",
    "gating": "gating",
    "rotary": "rotary",
    "max_document": "max_position_embeddings",
    "max_rate": "max_rate",
    "rotary_fraction": "partial_rotary_factor",
    "bias": "use_bias",
    "short_conv": "short_conv",
    "form": "form",
    "backend": "backend",
    "chunk_size": "chunk_size",
}


# Where transformers finds the classes if sympow is installed but not imported, with trust_remote_code=True.
AUTO_MODULE = "modeling_sympow"
AUTO_MAP = {
    auto_class: f"{AUTO_MODULE}.{name}"
    for auto_class, name in (
        ("AutoConfig", "SympowConfig"),
        ("AutoModel", "SympowModel"),
        ("AutoModelForCausalLM", "SympowForCausalLM"),
        ("AutoModelForSequenceClassification", "SympowForSequenceClassification"),
    )
}
AUTO_SOURCE = '''"""Where transformers finds this model's classes. They come with: pip install 'conformal-sympow[hf]'"""

from sympow.hf import SympowConfig, SympowForCausalLM, SympowForSequenceClassification, SympowModel
'''


class SympowConfig(PreTrainedConfig):
    """The config of a model in transformers: the values of `GPTConfig` under transformers' names, saved as config.json.

    Args:
        vocab_size: number of tokens.
        hidden_size: size of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads of a layer.
        num_key_value_heads: key/value heads of a layer, a divisor of num_attention_heads; None: as many, which is
            filled in.
        head_dim: size of a query, key and value; None: hidden_size / num_attention_heads, which is filled in.
        intermediate_size: hidden size of the MLP; None: 4 times hidden_size.
        mixer, power, gating, rotary, max_rate, short_conv, form, backend, chunk_size: as in `GPTConfig`.
        partial_rotary_factor: `rotary_fraction` of `GPTConfig`: the fastest pairs rotate.
        max_position_embeddings: N of the rotation rates, the longest document expected; not a limit.
        use_bias: whether linear maps and norms have biases.
        initializer_range: standard deviation of initial weights.
        use_cache: whether calls outside training return the state.
        bos_token_id, eos_token_id, pad_token_id: as in `PreTrainedConfig`.
        tie_word_embeddings: whether logits come from the embedding, as in all native models.
        others: as in `PreTrainedConfig`.

    Example:
        >>> config = SympowConfig(vocab_size=257, hidden_size=128, num_hidden_layers=2, num_attention_heads=4)
    """

    model_type = "sympow"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    def __init__(
        self,
        vocab_size: int = 50_257,
        hidden_size: int = 768,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        mixer: str = "sympow",
        power: int = 2,
        gating: str = "scalar",
        rotary: str = "fixed",
        max_position_embeddings: int = 65_536,
        max_rate: float = MAX_RATE,
        partial_rotary_factor: float = 1.0,
        use_bias: bool = True,
        short_conv: int = 0,
        form: str = "auto",
        backend: str = "auto",
        chunk_size: int | None = None,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        tie_word_embeddings: bool = True,
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.intermediate_size = 4 * hidden_size if intermediate_size is None else intermediate_size
        self.mixer = mixer
        self.power = power
        self.gating = gating
        self.rotary = rotary
        self.max_position_embeddings = max_position_embeddings
        self.max_rate = max_rate
        self.partial_rotary_factor = partial_rotary_factor
        self.use_bias = use_bias
        self.short_conv = short_conv
        self.form = form
        self.backend = backend
        self.chunk_size = chunk_size
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.pad_token_id = pad_token_id
        self.tie_word_embeddings = tie_word_embeddings
        # A loaded auto_map may name the repository that a model came from.
        super().__init__(**{**others, "auto_map": dict(AUTO_MAP)})
        shape = self.to_native().head_shape  # which checks all values
        self.num_key_value_heads, self.head_dim = shape.key_value_heads, shape.head_dim

    def save_pretrained(self, save_directory: str | PathLike[str], push_to_hub: bool = False, **others: Any) -> None:
        """Writes config.json, and the file that `auto_map` names in it."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{AUTO_MODULE}.py").write_text(AUTO_SOURCE, "utf-8")
        super().save_pretrained(save_directory, push_to_hub=push_to_hub, **others)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = None) -> None:
        """Does nothing: transformers would copy this package's source into every saved folder."""

    @classmethod
    def from_native(cls, config: GPTConfig, **others: Any) -> SympowConfig:
        """Converts a native config; `others` are fields that only transformers has, such as token ids."""
        values = {name: getattr(config, native) for native, name in TRANSFORMERS_NAMES.items()}
        return cls(**values, intermediate_size=config.mlp_width, **others)

    def to_native(self) -> GPTConfig:
        """Converts to a native config, with None for fields that have their default.

        Raises:
            ValueError, TypeError: a value is invalid; the message has the field's name in this config.
        """
        for name in ("hidden_size", "intermediate_size"):
            check_at_least(name, getattr(self, name), 1)
        values = {native: getattr(self, name) for native, name in TRANSFORMERS_NAMES.items()}
        if values["key_value_heads"] == values["heads"]:
            values["key_value_heads"] = None
        try:
            native = GPTConfig(**values, mlp_ratio=self.intermediate_size / self.hidden_size)
            return replace(native, head_dim=None) if native.head_dim == native.width / native.heads else native
        except (ValueError, TypeError) as error:
            words = "|".join(map(re.escape, TRANSFORMERS_NAMES))
            raise type(error)(
                *(re.sub(rf"\b({words})\b", lambda match: TRANSFORMERS_NAMES[match[1]], part) for part in error.args)
            ) from error
