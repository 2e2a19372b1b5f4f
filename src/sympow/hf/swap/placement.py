"""Makes swapped layers of what was read from softmax layers, and puts them in their places in a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from sympow.errors import ArgumentError
from sympow.hf.swap.attention_parts import AttentionParts, attention_modules
from sympow.hf.swap.record import SwapRecord
from sympow.hf.swap.swapped_attention import SwappedAttention, install_hooks
from sympow.settings import LEARNED_GATES


def make_layer(parts: AttentionParts, index: int, record: SwapRecord) -> SwappedAttention:
    """The layer `index` of a swapped model, with the submodules of the softmax layer in its place."""
    how = parts.projections
    modules: dict[str, Any] = {"k": None, "v": None, **parts.modules}
    if record.rotary != "none" and parts.rates is None:
        raise ArgumentError("rotary", f"must be 'none' for a model without a rotary embedding, got {record.rotary!r}")
    return SwappedAttention.from_projections(
        **modules,
        width=parts.width,
        heads=how.heads,
        key_value_heads=how.key_value_heads,
        head_dim=how.head_dim,
        rates=None if record.rotary == "none" else parts.rates,
        rotary=record.rotary,
        pairs="half",
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
