"""`swap_attention`: symmetric power attention in a pretrained softmax transformer, and how such a model is saved.

A swapped model is of a class of its own, made from the model's class, with a config class made from its config's:
`SympowLlamaForCausalLM` with `SympowLlamaConfig`. All these configs have one model type, "sympow_swapped", and a field
`sympow_attention` that says which layers were swapped and with what. So transformers without sympow refuses a saved
folder, instead of loading a softmax model with the same weights. One model type and not one for each architecture,
because it can then be registered without importing any of them: the stand-in `SwappedConfig` makes the classes when a
folder is loaded.
"""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

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

from sympow.checks import check_choice
from sympow.generation.cache import CACHE_POLICIES, CachePolicy
from sympow.hf.model.modeling import initialize_own_module
from sympow.hf.registration import publish
from sympow.hf.swap.attention_parts import AttentionParts, attention_modules, read_attention
from sympow.hf.swap.state_layer import state_layer
from sympow.hf.swap.swapped_attention import SwappedAttention, install_hooks
from sympow.hf.swap.swapped_config import MODEL_TYPE
from sympow.settings import GATES, INITIAL_GATE, LEARNED_GATES, Backend, Form, check_initial_gate

AUTO_CLASSES = (AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification)

Layers = Literal["all", "every-other"] | list[int] | tuple[int, ...] | range


@dataclass(frozen=True)
class SwapRecord:
    """What a config says about a swap, as its field `sympow_attention`.

    Attributes:
        base_model_type: the model type of the softmax model.
        layers: indices of the layers that were swapped.
        others: as in `swap_attention`.
    """

    base_model_type: str
    layers: tuple[int, ...]
    power: int
    gating: str
    rotary: str
    initial_gate: float
    form: Form
    backend: Backend
    chunk_size: int | None
    cache_policy: CachePolicy

    @classmethod
    def of(cls, config: PreTrainedConfig) -> SwapRecord:
        """The record in a config.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        values = getattr(config, "sympow_attention", None)
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise ValueError(f"sympow_attention in the config must have {', '.join(sorted(names))}; got {values!r}")
        return cls(**{**values, "layers": tuple(values["layers"])})


def swap_attention(
    model: PreTrainedModel,
    *,
    power: int = 2,
    layers: Layers = "all",
    gating: str = "scalar",
    rotary: str | None = None,
    initial_gate: float = INITIAL_GATE,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
    cache_policy: CachePolicy = "auto",
) -> PreTrainedModel:
    """Replaces softmax self-attention in a transformers model by symmetric power attention, in place.

    The new layers take over the projections with their biases, norms of queries and keys, the grouping of heads and the
    rotary embedding with its scaling; they add gates. The model must then be trained, since (q·k)^p weights tokens
    otherwise than exp(q·k) did: docs/convert.md. A sliding window and dropout of attention weights have no counterpart
    in the new layers, which attend to all earlier tokens.

    Args:
        model: a causal language model such as those of Llama, Mistral, Qwen2, Qwen3 and GPT-2, or a base model that is
            not inside of one. Its attention is recognized by its submodules, whatever the architecture is called. Its
            weights must not be offloaded: swap it first, save it, and load it with a device_map.
        power: p, even.
        layers: "all"; "every-other": layers 1, 3, 5, …; or indices. The others keep softmax, and the keys and values of
            all tokens in their cache.
        gating: as in `sympow.ConformalAttention`: "none", "fixed", "learned", "scalar", "vector", "clamped" or "half".
        rotary: "fixed": the model's own rotary embedding; "scale" or "pairs": with a learned scale β, which is 1 at
            first; "learned": with learned rates; "none". None: "fixed" where the model has a rotary embedding, else
            "none". Not "signed" or "grid", which would replace the model's own rates.
        initial_gate: γ at first, for gates that learn it. Any value but the default is refused for those that do not.
        form, backend, chunk_size: as in `sympow.attention`.
        cache_policy: as in `sympow.hf.SympowCache`.

    Returns:
        The model, whose class is now a subclass of what it was, and whose config, a copy, has `sympow_attention`.

    Raises:
        ValueError, TypeError: the model's attention is of another kind, or an argument is invalid; the message says
            which. The model is then as it was.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
        >>> model = swap_attention(LlamaForCausalLM(config))
        >>> type(model).__name__, swapped_layers(model)
        ('SympowLlamaForCausalLM', [0, 1])
    """
    record, made = _prepare(
        model,
        layers,
        power=power,
        gating=gating,
        rotary=rotary,
        initial_gate=initial_gate,
        form=form,
        backend=backend,
        chunk_size=chunk_size,
        cache_policy=cache_policy,
    )
    _put(model, made)
    before, after = model.config, copy.deepcopy(model.config)
    after.__class__ = swapped_config_class(type(before))
    after.sympow_attention = {**asdict(record), "layers": list(record.layers)}
    holders: list[Any] = [module for module in model.modules() if getattr(module, "config", None) is before]
    for module in holders:
        module.config = after
    _change_classes(model)
    return model


def check_swap(model: PreTrainedModel, **settings: Any) -> None:
    """Raises what `swap_attention` raises for the same arguments; the model stays as it is."""
    defaults = inspect.signature(swap_attention).parameters
    named = {name: defaults[name].default for name in defaults if name != "model"} | settings
    _prepare(model, **named)


def _prepare(
    model: PreTrainedModel, layers: Layers, *, gating: str, rotary: str | None, initial_gate: float, **others: Any
) -> tuple[SwapRecord, dict[int, SwappedAttention]]:
    """What `swap_attention` will put in place, by the index of a layer, and the record of it."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a model of transformers, got {type(model).__name__}")
    if hasattr(model.config, "sympow_attention"):
        raise ValueError(f"model was swapped already, in layers {swapped_layers(model)}: swap all layers in one call")
    check_choice("cache_policy", others["cache_policy"], CACHE_POLICIES)
    check_choice("gating", gating, GATES)
    if initial_gate != INITIAL_GATE:
        check_initial_gate(initial_gate, gating)
    if around := _models_around(model):
        raise ValueError(
            f"model is inside of a {' and a '.join(sorted(around))}, which would be saved with the config of a softmax "
            "model: swap the outermost model"
        )
    found = attention_modules(model)
    chosen = _chosen(layers, sorted(found))
    for index in chosen:
        if any(parameter.is_meta for parameter in found[index].parameters()):
            raise ValueError(
                f"model must have its weights in memory, but those of layer {index} are on the meta device, where "
                "offloaded ones are: swap first, save, then load with device_map"
            )
    parts = {index: read_attention(model, index, found[index]) for index in chosen}
    if rotary is None:
        rotary = "none" if parts[chosen[0]].rates is None else "fixed"
    if (dropout := max(part.dropout for part in parts.values())) > 0:
        warnings.warn(
            f"model has attention dropout {dropout}, which swapped layers do not apply: they never materialize "
            "attention weights",
            stacklevel=3,
        )
    record = SwapRecord(
        model.config.model_type,
        tuple(chosen),
        gating=gating,
        rotary=rotary,
        initial_gate=float(initial_gate),
        **others,
    )
    # All are made before any is put in place, so that an error leaves the model as it was.
    return record, {index: _make_layer(part, index, record) for index, part in parts.items()}


def swapped_layers(model: nn.Module) -> list[int]:
    """Indices of the layers whose attention was swapped; empty for another model.

    Args:
        model: a model of transformers, or one that wraps it, such as peft's.
    """
    return sorted(module.layer_idx for module in model.modules() if isinstance(module, SwappedAttention))


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
    _MADE[base] = made = type(f"Sympow{base.__name__}", (base,), {"model_type": MODEL_TYPE, "__module__": __name__})
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
        raise ValueError(
            f"sympow_attention in the config must name layers of the model, 0 to {len(found) - 1}; got {missing}"
        )
    # The base model of some classes is made by an Auto class, which has swapped its layers.
    chosen = [index for index in record.layers if not isinstance(found[index], SwappedAttention)]
    made = {index: _make_layer(read_attention(model, index, found[index]), index, record) for index in chosen}
    _put(model, made)
    _change_classes(model)


def _make_layer(parts: AttentionParts, index: int, record: SwapRecord) -> SwappedAttention:
    how = parts.projections
    if record.rotary != "none" and parts.rates is None:
        raise ValueError(f"rotary must be 'none' for a model without a rotary embedding, got {record.rotary!r}")
    return SwappedAttention.from_projections(
        parts.modules["q"],
        parts.modules.get("k"),
        parts.modules.get("v"),
        parts.modules["o"],
        width=parts.width,
        heads=how.heads,
        key_value_heads=how.key_value_heads,
        head_dim=how.head_dim,
        rates=None if record.rotary == "none" else parts.rates,
        rotary=record.rotary,
        pairs="half",
        q_norm=parts.modules.get("q_norm"),
        k_norm=parts.modules.get("k_norm"),
        out_dropout=parts.modules.get("out_dropout"),
        names=parts.names,
        power=record.power,
        gating=record.gating,
        initial_gate=record.initial_gate if record.gating in LEARNED_GATES else None,
        form=record.form,
        backend=record.backend,
        chunk_size=record.chunk_size,
        layer_idx=index,
        cache_policy=record.cache_policy,
    )


def _put(model: PreTrainedModel, made: dict[int, SwappedAttention]) -> None:
    """Puts layers in the place of those that they take over from."""
    found = attention_modules(model)
    places = {id(module): name for name, module in model.named_modules()}
    for index, layer in made.items():
        before = found[index]
        parent, _, name = places[id(before)].rpartition(".")
        setattr(model.get_submodule(parent), name, layer.train(before.training))
    whole = all(isinstance(module, SwappedAttention) for module in attention_modules(model).values())
    install_hooks(model, model.base_model, whole=whole)


def _change_classes(model: PreTrainedModel) -> None:
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


def _models_around(model: PreTrainedModel) -> set[str]:
    """Names of the classes of models that hold a base model.

    A module does not know its parents, so they are looked up among all objects. Only base models are held by others.
    """
    if model.base_model is not model:
        return set()
    # Without those that are about to be freed, such as the rest of a model of which only the base model was kept.
    gc.collect()
    # By type and not by isinstance, which some objects answer by importing a library.
    others = [x for x in gc.get_objects() if issubclass(type(x), PreTrainedModel) and x is not model]
    return {type(x).__name__ for x in others if any(module is model for module in x.modules())}


def _chosen(layers: Layers, present: list[int]) -> list[int]:
    """The indices of the layers to be swapped."""
    if layers == "all":
        return present
    if layers == "every-other":
        if len(present) < 2:
            raise ValueError("layers='every-other' is for models of at least two layers; the model has one")
        return present[1::2]
    given: Any = layers
    if not isinstance(given, list | tuple | range):
        raise ValueError(f"layers must be 'all', 'every-other' or a list of indices; got {layers!r}")
    for index in layers:
        if not isinstance(index, int) or isinstance(index, bool):
            raise TypeError(f"layers must hold integers, got {index!r}")
        if index not in present:
            raise ValueError(f"layers must be among {present[0]} to {present[-1]}, got {index}")
    if not layers or len(set(layers)) < len(layers):
        raise ValueError(f"layers must name at least one layer, and each once; got {list(layers)}")
    return sorted(layers)
