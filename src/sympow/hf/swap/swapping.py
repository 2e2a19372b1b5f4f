"""`swap_attention`: symmetric power attention in a pretrained softmax transformer."""

from __future__ import annotations

import copy
import inspect
import warnings
from dataclasses import asdict
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from sympow.checks import check_choice
from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.generation.cache import CACHE_POLICIES, CachePolicy
from sympow.hf.swap.attention_parts import attention_modules, read_attention, weights_dropout
from sympow.hf.swap.classes import change_classes, put_layers, swapped_config_class
from sympow.hf.swap.record import SwapRecord
from sympow.hf.swap.swapped_attention import SwappedAttention
from sympow.settings import GATES, INITIAL_GATE, Backend, Form, check_initial_gate

Layers = Literal["all", "every-other"] | list[int] | tuple[int, ...] | range


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
        model: a causal language model such as those of Llama, Mistral, Qwen2, Qwen3 and GPT-2, or a base model. Give
            the outermost one: around a base model, such as `model.model`, another would keep the config of a softmax
            model. Attention is recognized by its submodules, whatever the architecture is called. Weights must not be
            offloaded: swap the model first, save it, and load it with a device_map.
        power: p: 2, 4, 6 or 8.
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
    put_layers(model, made)
    before, after = model.config, copy.deepcopy(model.config)
    after.__class__ = swapped_config_class(type(before))
    after.sympow_attention = {**asdict(record), "layers": list(record.layers)}
    holders: list[Any] = [module for module in model.modules() if getattr(module, "config", None) is before]
    for module in holders:
        module.config = after
    change_classes(model)
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
        raise ArgumentTypeError("model", f"must be a model of transformers, got {type(model).__name__}")
    if hasattr(model.config, "sympow_attention"):
        raise ArgumentError(
            "model", f"was swapped already, in layers {swapped_layers(model)}: swap all layers in one call"
        )
    check_choice("cache_policy", others["cache_policy"], CACHE_POLICIES)
    check_choice("gating", gating, GATES)
    if initial_gate != INITIAL_GATE:
        check_initial_gate(initial_gate, gating)
    found = attention_modules(model)
    chosen = _chosen(layers, sorted(found))
    for index in chosen:
        if any(parameter.is_meta for parameter in found[index].parameters()):
            raise ArgumentError(
                "model",
                f"must have its weights in memory, but those of layer {index} are on the meta device, where "
                "offloaded ones are: swap first, save, then load with device_map",
            )
    parts = {index: read_attention(model, index, found[index]) for index in chosen}
    if rotary is None:
        rotary = "none" if parts[chosen[0]]["rates"] is None else "fixed"
    if (dropout := max(weights_dropout(found[index]) for index in chosen)) > 0:
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
    return record, {index: record.layer(index, part) for index, part in parts.items()}


def swapped_layers(model: nn.Module) -> list[int]:
    """Indices of the layers whose attention was swapped; empty for another model.

    Args:
        model: a model of transformers, or one that wraps it, such as peft's.
    """
    return sorted(module.layer_idx for module in model.modules() if isinstance(module, SwappedAttention))


def _chosen(layers: Layers, present: list[int]) -> list[int]:
    """The indices of the layers to be swapped."""
    if layers == "all":
        return present
    if layers == "every-other":
        if len(present) < 2:
            raise ArgumentError("layers", "='every-other' is for models of at least two layers; the model has one")
        return present[1::2]
    given: Any = layers
    if not isinstance(given, list | tuple | range):
        raise ArgumentError("layers", f"must be 'all', 'every-other' or a list of indices; got {layers!r}")
    for index in layers:
        if not isinstance(index, int) or isinstance(index, bool):
            raise ArgumentTypeError("layers", f"must hold integers, got {index!r}")
        if index not in present:
            raise ArgumentError("layers", f"must be among {present[0]} to {present[-1]}, got {index}")
    if not layers or len(set(layers)) < len(layers):
        raise ArgumentError("layers", f"must name at least one layer, and each once; got {list(layers)}")
    return sorted(layers)
