"""sympow's own model in transformers, registered with the Auto classes.

`modeling.py` has the models, `config.py` their config, `cache.py` their past, and `conversion.py` the way from and to
`sympow.GPT`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from sympow.hf.model.cache import SympowCache
from sympow.hf.model.config import SympowConfig
from sympow.hf.model.conversion import (
    convert_to_native,
    convert_to_transformers,
    from_native,
    to_fast_tokenizer,
    to_native,
)
from sympow.hf.model.modeling import SympowForCausalLM, SympowForSequenceClassification, SympowModel
from sympow.hf.transformers_module import publish

__all__ = [
    "SympowCache",
    "SympowConfig",
    "SympowForCausalLM",
    "SympowForSequenceClassification",
    "SympowModel",
    "convert_to_native",
    "convert_to_transformers",
    "from_native",
    "to_fast_tokenizer",
    "to_native",
]

AutoConfig.register(SympowConfig.model_type, SympowConfig, exist_ok=True)
AutoModel.register(SympowConfig, SympowModel, exist_ok=True)
AutoModelForCausalLM.register(SympowConfig, SympowForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(SympowConfig, SympowForSequenceClassification, exist_ok=True)
publish(SympowConfig, SympowModel, SympowForCausalLM, SympowForSequenceClassification)
