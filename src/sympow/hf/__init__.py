"""sympow models in transformers: our own (`model/`), and pretrained ones with our attention (`swap/`).

Importing this package imports transformers and registers both with its Auto classes.
"""

from sympow.hf.transformers_module import check_version, publish, transformers

check_version(transformers.__version__)

# After the check, whose message says more than that of an import that fails.
from sympow.hf.model.cache import SympowCache  # noqa: E402
from sympow.hf.model.config import SympowConfig  # noqa: E402
from sympow.hf.model.conversion import (  # noqa: E402
    convert_to_native,
    convert_to_transformers,
    from_native,
    to_fast_tokenizer,
    to_native,
)
from sympow.hf.model.modeling import SympowForCausalLM, SympowForSequenceClassification, SympowModel  # noqa: E402
from sympow.hf.swap.attention_function import NAME, power_attention, power_attention_mask  # noqa: E402
from sympow.hf.swap.attention_parts import attention_modules  # noqa: E402
from sympow.hf.swap.classes import SwappedConfig  # noqa: E402
from sympow.hf.swap.state_layer import StateLayer  # noqa: E402
from sympow.hf.swap.swapped_gpt import SwappedGPT  # noqa: E402
from sympow.hf.swap.swapping import swap_attention, swapped_layers  # noqa: E402

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

transformers.AutoConfig.register(SympowConfig.model_type, SympowConfig, exist_ok=True)
transformers.AutoConfig.register(SwappedConfig.model_type, SwappedConfig, exist_ok=True)
transformers.AutoModel.register(SympowConfig, SympowModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(SympowConfig, SympowForCausalLM, exist_ok=True)
transformers.AutoModelForSequenceClassification.register(SympowConfig, SympowForSequenceClassification, exist_ok=True)
publish(SympowConfig, SympowModel, SympowForCausalLM, SympowForSequenceClassification)
transformers.AttentionInterface.register(NAME, power_attention)
transformers.AttentionMaskInterface.register(NAME, power_attention_mask)
