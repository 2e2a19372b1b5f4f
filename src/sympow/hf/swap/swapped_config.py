"""`SwappedConfig`: registered for the model type of saved swapped models, it finds their config and model classes."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

MODEL_TYPE = "sympow_swapped"


class SwappedConfig(PreTrainedConfig):
    """The class that transformers loads configs of swapped models with.

    Loading one returns a config of another class, which the field `sympow_attention` determines (`SympowLlamaConfig`
    for a swapped Llama), and registers the model classes that belong to it.
    """

    model_type = MODEL_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A config of the class that `sympow_attention` determines.

        Raises:
            ValueError: `sympow_attention` is missing or does not name the type of the original model.
        """
        from sympow.hf.swap.swapping import swapped_config_class

        record = config_dict.get("sympow_attention")
        kind = record.get("base_model_type") if isinstance(record, dict) else None
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind == MODEL_TYPE:
            raise ValueError(
                f"config.json must say in sympow_attention of which base_model_type the model was; got {kind!r}"
            )
        return swapped_config_class(CONFIG_MAPPING[kind]).from_dict(config_dict, **kwargs)


AutoConfig.register(MODEL_TYPE, SwappedConfig, exist_ok=True)
