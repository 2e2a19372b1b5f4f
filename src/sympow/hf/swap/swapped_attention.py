"""`SwappedAttention`: symmetric power attention in place of a transformers model's self-attention.

The layer reads padding from the 2-D attention mask. Before any layer sees it, transformers' models turn this mask into
that of their attention function, whose format depends on the function (4-D, None without padding, a block mask). So a
forward pre-hook of the base model (`read_inputs`) passes the padding on as a keyword argument, which the models pass
through all layers to their attention modules. An argument, unlike an attribute that the hook would set, is also right
with gradient checkpointing, which calls a layer again later, with several devices, and with torch.compile.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from sympow.errors import ArgumentError, ArgumentTypeError
from sympow.generation.cache import CachePolicy
from sympow.hf.model.packing import check_continuation, packed_offsets
from sympow.hf.past import uncompiled
from sympow.hf.swap.state_layer import StateLayer, prefetch_next, state_layer
from sympow.layers.mixers import ConformalAttention
from sympow.model.gpt import ModelState

# Names of the keyword arguments with which the hook passes on the padding mask, (b, t) bool, and the offsets of packed
# documents.
MASK = "sympow_mask"
OFFSETS = "sympow_offsets"


class SwappedAttention(ConformalAttention):
    """`ConformalAttention` with the call signature of self-attention in transformers.

    It attends to all earlier tokens, with or without a sliding window in the model's config.

    Args:
        layer_idx: the index of the layer in the model, and so of its entry in a cache.
        cache_policy: as in `sympow.hf.SympowCache`.
        others: as in `ConformalAttention`, which `from_projections` fills in.
    """

    is_causal = True
    _own_names = ConformalAttention._own_names | {"layer_idx", "cache_policy"}

    def __init__(
        self, width: int, heads: int, *, layer_idx: int, cache_policy: CachePolicy = "auto", **others: Any
    ) -> None:
        super().__init__(width, heads, **others)
        self.layer_idx, self.cache_policy = layer_idx, cache_policy

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, past_key_values: Any = None, **others: Any
    ) -> tuple[Tensor, None]:
        """Attends along time.

        Args:
            hidden_states: (b, t, width).
            past_key_values: the cache, whose entry for this layer is a `StateLayer`; updated in place.
            others: the padding mask and the offsets of packed documents, which `read_inputs` passes on. Position
                embeddings and the mask of the attention function are ignored; `cache` must not be given.

        Returns:
            (b, t, width) and None, since attention weights are never materialized.
        """
        if others.get("cache") is not None:
            raise ArgumentError(
                "cache", "must not be given: swapped layers have no paged cache, for continuous batching"
            )
        x, mask, offsets = hidden_states, others.get(MASK), others.get(OFFSETS)
        if past_key_values is None:
            if offsets is None:
                return super().forward(x, return_state=False, mask=mask)[0], None
            # All rows become one sequence of packed documents; each padding token is a separate document.
            y, _ = super().forward(x.flatten(0, 1).unsqueeze(0), return_state=False, cu_seqlens=offsets)
            return y.reshape(x.shape), None
        if offsets is not None:
            raise ArgumentError("use_cache", "and past_key_values are not supported with packed documents")
        layer = state_layer(past_key_values, self.layer_idx, self.cache_policy)
        prefetch_next(past_key_values, self.layer_idx, x.device)
        if layer.pending is not None:
            again = layer.pending
            layer.catch_up(self._prefill(again.inputs, again.mask, layer)[1])
        if x.shape[1] == 1 and mask is None and layer.can_step and not torch.is_grad_enabled():
            return uncompiled(self._decode, x, layer), None
        y, after = self._prefill(x, mask, layer)
        layer.advance(after, x, mask)
        return y, None

    def _prefill(self, x: Tensor, mask: Tensor | None, layer: StateLayer) -> tuple[Tensor, ModelState]:
        """(b, t, width) of tokens, x (b, t, width), and the layer's state after them."""
        # The weights may be offloaded, and x is where they will be.
        before = layer.start([self], x, x.device)
        y, after = super().forward(x, None if before is None else before[0], mask=mask)
        assert after is not None
        return y, (after,)

    def _decode(self, x: Tensor, layer: StateLayer) -> Tensor:
        """(b, 1, width) of one token, x (b, 1, width), which is added to the past."""
        return self.step(x, layer.step([self], x)[0])


# Attribute of base models that says whether all of their layers were swapped.
WHOLE = "_sympow_swapped_whole"


def install_hooks(model: nn.Module, base: nn.Module, *, whole: bool) -> None:
    """Makes a base model pass padding and packed documents on to its swapped layers, and make no cache in training.

    Args:
        model: the model around the base model, or the base model itself.
        base: the base model, whose attention modules were swapped.
        whole: whether all layers were swapped.
    """
    setattr(base, WHOLE, whole)
    if read_inputs not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(read_inputs, with_kwargs=True)
    if model is not base and without_cache_in_training not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(without_cache_in_training, with_kwargs=True)


def read_inputs(base: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook that adds padding and offsets of packed documents to the arguments of a base model.

    It is a function and not a closure, so that copies of a model have the hook too.

    Raises:
        ValueError, TypeError: attention weights are asked for and no layer has them, the attention mask is not 2-D, or
            positions have gaps.
    """
    # Models call their base model with keyword arguments only; positional ones get their names from the signature.
    named = {**(dict(zip(_parameters(type(base)), arguments, strict=False)) if arguments else {}), **named}
    asked = named.get("output_attentions")
    if getattr(base, WHOLE) and (base.config.output_attentions if asked is None else asked):
        raise ArgumentError(
            "output_attentions",
            "must not be set: swapped layers never materialize attention weights, and no layer keeps softmax",
        )
    tokens = named.get("input_ids") if named.get("input_ids") is not None else named.get("inputs_embeds")
    if tokens is None or MASK in named:
        return (), named
    shape = torch.Size(tokens.shape[:2])
    cache, given = named.get("past_key_values"), named.get("attention_mask")
    seen: Any = cache.get_seq_length() if isinstance(cache, Cache) else 0
    # Static caches, which swapped layers refuse, count in a tensor.
    seen = int(seen) if isinstance(seen, Tensor) else seen
    mask = _real_tokens(given, shape, seen)
    if mask is not None:
        named[MASK] = mask
    offsets = named.get("cu_seq_lens_q")
    if offsets is not None and not isinstance(offsets, Tensor):
        raise ArgumentTypeError("cu_seq_lens_q", f"must be a tensor, got {type(offsets).__name__}")
    if offsets is not None and mask is not None:
        raise ArgumentError("attention_mask", "must not have padding where cu_seq_lens_q is given")
    if offsets is None:
        offsets = packed_offsets(named.get("position_ids"), named.get("seq_idx"), mask, shape)
    if cache is None:
        if offsets is not None:
            named[OFFSETS] = offsets
            _mark_documents(named, offsets, mask, shape)
        if named.get("use_cache") is None and (offsets is not None or base.training):
            # Nobody would read the state, which takes time to compute and to differentiate.
            named["use_cache"] = False
        if offsets is None and given is not None and given.shape[1] > shape[1]:
            # Softmax layers would expect a key for every column.
            named["attention_mask"] = given[:, : shape[1]]
    elif offsets is not None:
        raise ArgumentError("use_cache", "and past_key_values are not supported with packed documents")
    elif seen and named.get("position_ids") is not None:
        check_continuation(named["position_ids"], given, mask, seen, shape)
    if getattr(base, WHOLE):
        # No layer reads the mask that the model would make, of t² entries if there is padding. The model passes a 4-D
        # mask on unchanged, so a small one replaces it.
        named["attention_mask"] = tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool)
    return (), named


def _mark_documents(named: dict[str, Any], offsets: Tensor, mask: Tensor | None, shape: torch.Size) -> None:
    """Lets softmax layers find the packed documents that swapped layers have the offsets of.

    They find them by positions that restart, in calls without an attention mask.

    Args:
        named: the arguments of a base model, which are changed.
        offsets: of documents in the concatenated rows, (n + 1,).
        mask: (b, t) bool, False for padding, none of which is inside of a document; None: no padding.
        shape: (b, t).
    """
    positions = named.get("position_ids")
    if positions is None:
        places = torch.arange(shape.numel(), device=offsets.device, dtype=offsets.dtype)
        first = offsets[torch.searchsorted(offsets, places, right=True) - 1]
        positions = (places - first).to(torch.int64).reshape(shape)
    if mask is not None:
        # A document that follows padding starts where the position does not increase.
        positions = positions.where(mask, positions.roll(-1, 1))
    named["position_ids"], named["attention_mask"] = positions, None


def without_cache_in_training(
    model: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A forward pre-hook: with labels and gradients, use_cache is False by default.

    The hook of the base model, which does the same in training mode, does not see the labels.
    """
    named = {**(dict(zip(_parameters(type(model)), arguments, strict=False)) if arguments else {}), **named}
    asked = named.get("use_cache") is not None or named.get("past_key_values") is not None
    if named.get("labels") is not None and torch.is_grad_enabled() and not asked:
        named["use_cache"] = False
    return (), named


def _real_tokens(attention_mask: Tensor | None, shape: torch.Size, seen: int) -> Tensor | None:
    """A mask of the new tokens, (b, t) bool, False for padding; None: no padding.

    Args:
        attention_mask: (b, n): of all tokens, possibly with columns for later tokens, or of the new tokens only.
        shape: (b, t) of the new tokens.
        seen: the number of tokens before them.
    """
    if attention_mask is None:
        return None
    batch, length = shape
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        came = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ArgumentError(
            "attention_mask", f"must be (batch, tokens so far), 0 for padding, in a swapped model; got {came}"
        )
    width = attention_mask.shape[1]
    if attention_mask.shape[0] != batch or width < length:
        raise ArgumentError(
            "attention_mask", f"must be ({batch}, at least {length}), 0 for padding; got {tuple(attention_mask.shape)}"
        )
    first = seen if width >= seen + length else width - length
    mask = attention_mask[:, first : first + length] != 0
    if not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all()):
        return None
    return mask


def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of a base model's arguments, in their order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
