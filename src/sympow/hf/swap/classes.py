"""The classes of swapped models and of their configs, made from those of the softmax models.

`SympowLlamaForCausalLM` is a `LlamaForCausalLM`, and has a `SympowLlamaConfig`. All these configs have one model type,
"sympow_swapped", and a field `sympow_attention` that says which layers were swapped and with what. So transformers
without sympow refuses a saved folder, instead of loading a softmax model with the same weights. One model type and not
one for each architecture, because it can then be registered without importing any of them: the stand-in
`SwappedConfig` makes the classes when a folder is loaded.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from sympow.errors import UserError
from sympow.hf.model.modeling import initialize_own_module
from sympow.hf.swap.attention_parts import attention_modules, read_attention
from sympow.hf.swap.record import SwapRecord
from sympow.hf.swap.state_layer import state_layer
from sympow.hf.swap.swapped_attention import SwappedAttention, install_hooks
from sympow.hf.transformers_module import SWAPPED_TYPE, publish

AUTO_CLASSES = (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification)


class SwappedConfig(PreTrainedConfig):
    """The class that transformers loads configs of swapped models with.

    Loading one returns a config of another class, which the field `sympow_attention` determines (`SympowLlamaConfig`
    for a swapped Llama), and registers the model classes that belong to it.
    """

    model_type = SWAPPED_TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """A config of the class that `sympow_attention` determines.

        Raises:
            ValueError: `sympow_attention` is missing or does not name the type of the original model.
        """
        record = config_dict.get("sympow_attention")
        kind = record.get("base_model_type") if isinstance(record, dict) else None
        if not isinstance(kind, str) or kind not in CONFIG_MAPPING or kind == SWAPPED_TYPE:
            raise UserError(
                f"config.json must say in sympow_attention of which base_model_type the model was; got {kind!r}"
            )
        return swapped_config_class(CONFIG_MAPPING[kind]).from_dict(config_dict, **kwargs)


def __getattr__(name: str) -> Any:
    """Classes of swapped models by their names, for `pickle` and for imports: SympowLlamaForCausalLM and others."""
    base = getattr(transformers, name.removeprefix("Sympow"), None) if name.startswith("Sympow") else None
    if isinstance(base, type) and issubclass(base, PreTrainedModel) and base.config_class is not None:
        return swapped_model_class(base)
    if isinstance(base, type) and issubclass(base, PreTrainedConfig):
        return swapped_config_class(base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# Classes made so far, by those that they were made from.
_MADE: dict[type, type[Any]] = {}


def swapped_config_class(base: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The config class of swapped models with configs of class `base`, registered with the Auto classes."""
    if base in _MADE:
        return _MADE[base]
    _MADE[base] = made = type(f"Sympow{base.__name__}", (base,), {"model_type": SWAPPED_TYPE, "__module__": __name__})
    for auto in AUTO_CLASSES:
        kind: Any = auto._model_mapping.get(base, None)
        # Where an architecture has several classes for a task, the first is the usual one.
        kind = kind[0] if isinstance(kind, tuple | list) else kind
        if kind is not None:
            auto.register(made, swapped_model_class(kind), exist_ok=True)
    return made


def swapped_model_class(base: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """The class of swapped models of class `base`."""
    assert base.config_class is not None
    config_class = swapped_config_class(base.config_class)
    if base in _MADE:
        return _MADE[base]

    def initialize(self: PreTrainedModel, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        _swap_by_record(self, SwapRecord.of(config))

    def initialize_weights(self: PreTrainedModel, module: nn.Module) -> None:
        if not initialize_own_module(module):
            base._init_weights(self, module)

    def prepare_cache(
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *others: Any, **named: Any
    ) -> Any:
        """What `generate` calls to make a cache."""
        result = base._prepare_cache_for_generation(self, generation_config, model_kwargs, *others, **named)  # type: ignore[attr-defined]
        cache = model_kwargs.get("past_key_values")
        if cache is not None:
            # Before the first token, since assisted generation asks the layers of a cache to record then.
            record = SwapRecord.of(self.config)
            # With `assistant_early_exit`, the config has for a while only the layers up to the exit.
            layers = self.config.get_text_config().num_hidden_layers
            for index in (index for index in record.layers if index < layers):
                layer = state_layer(cache, index, record.cache_policy)
                if generation_config.is_assistant:
                    layer.activate_past_recording()
        return result

    # transformers answers these from the source of a class's module, which is that of the base.
    asked = ("_can_set_attn_implementation", "_can_set_experts_implementation")
    answers = {name: classmethod(lambda cls, ask=ask: ask()) for name in asked if (ask := getattr(base, name, None))}
    _MADE[base] = made = type(
        f"Sympow{base.__name__}",
        (base,),
        {
            "__init__": initialize,
            "_init_weights": torch.no_grad()(initialize_weights),
            "__module__": __name__,
            "__doc__": f"`{base.__name__}` with symmetric power attention in some or all layers (`swap_attention`).",
            "config_class": config_class,
            **answers,
            **({"_prepare_cache_for_generation": prepare_cache} if issubclass(base, GenerationMixin) else {}),
            # transformers would copy this package's source into every saved folder.
            "register_for_auto_class": classmethod(lambda cls, auto_class=None: None),
        },
    )
    # Where `__init__` registers what a class of model records (hidden states, and attentions of the layers that keep
    # softmax), which it does not do for a model whose class is changed. The key is the name of the class; an assignment
    # takes that name in some versions of transformers and a model in others.
    dict.__setitem__(getattr(modeling_utils, "_CAN_RECORD_REGISTRY", {}), str(made), base._can_record_outputs)
    publish(made)
    return made


def _swap_by_record(model: PreTrainedModel, record: SwapRecord) -> None:
    """Swaps the layers of a new model that is to be loaded or initialized, usually on the meta device."""
    found = attention_modules(model)
    missing = [index for index in record.layers if index not in found]
    if missing:
        raise UserError(
            f"sympow_attention in the config must name layers of the model, 0 to {len(found) - 1}; got {missing}"
        )
    # The base model of some classes is made by an Auto class, which has swapped its layers.
    chosen = [index for index in record.layers if not isinstance(found[index], SwappedAttention)]
    made = {index: record.layer(index, read_attention(model, index, found[index])) for index in chosen}
    put_layers(model, made)
    change_classes(model)


def put_layers(model: PreTrainedModel, made: dict[int, SwappedAttention]) -> None:
    """Puts layers in the place of those that they take over from."""
    found = attention_modules(model)
    places = {id(module): name for name, module in model.named_modules()}
    for index, layer in made.items():
        before = found[index]
        parent, _, name = places[id(before)].rpartition(".")
        setattr(model.get_submodule(parent), name, layer.train(before.training))
    whole = all(isinstance(module, SwappedAttention) for module in attention_modules(model).values())
    install_hooks(model, model.base_model, whole=whole)


def change_classes(model: PreTrainedModel) -> None:
    """Gives a model and its base model the classes of swapped models, and says which modules stay in float32.

    Errors of gates and rotations accumulate over a sequence; in float32 these small modules cost nothing. They are
    named with their parent, since transformers also finds a name inside of others, such as gate in gate_proj.
    """
    for module in list(model.modules()):
        layers = [layer for layer in module.modules() if isinstance(layer, SwappedAttention)]
        if not isinstance(module, PreTrainedModel) or not layers:
            continue
        if type(module) not in _MADE.values():
            module.__class__ = swapped_model_class(type(module))
        parameters = [
            f"{part}.{name.partition('.')[0]}"
            for layer in layers
            for part in ("gate", "rotation")
            for name, _ in layer.get_submodule(part).named_parameters()
        ]
        module._keep_in_fp32_modules_strict = {*(module._keep_in_fp32_modules_strict or ()), *parameters}
