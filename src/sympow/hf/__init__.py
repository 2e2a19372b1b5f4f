"""sympow models in transformers: our own (`model/`), and pretrained ones with our attention (`swap/`).

Importing this package imports transformers and registers both with its Auto classes.
"""

from sympow.hf.transformers_module import check_version, transformers

check_version(transformers.__version__)

# After the check, whose message says more than that of an import that fails.
from sympow.hf.model import (  # noqa: E402
    SympowCache,
    SympowConfig,
    SympowForCausalLM,
    SympowForSequenceClassification,
    SympowModel,
    convert_to_native,
    convert_to_transformers,
    from_native,
    to_fast_tokenizer,
    to_native,
)
from sympow.hf.swap import StateLayer, SwappedGPT, attention_modules, swap_attention, swapped_layers  # noqa: E402

__all__ = [
    "StateLayer",
    "SwappedGPT",
    "SympowCache",
    "SympowConfig",
    "SympowForCausalLM",
    "SympowForSequenceClassification",
    "SympowModel",
    "attention_modules",
    "convert_to_native",
    "convert_to_transformers",
    "from_native",
    "swap_attention",
    "swapped_layers",
    "to_fast_tokenizer",
    "to_native",
]
