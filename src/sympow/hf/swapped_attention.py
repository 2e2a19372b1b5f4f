"""`SwappedAttention`: symmetric power attention in place of a transformers model's self-attention.

The layer needs the 2-D attention mask, from which it takes padding. transformers' models turn it into the mask of their
attention function, in another form for each (4-D, None where there is no padding, a block mask), before any layer sees
it. So a hook before the base model (`read_inputs`) passes it on as a keyword argument, which the models pass through
all layers to their attention modules. Unlike a value that the hook would keep somewhere, an argument is right for
gradient checkpointing, which calls a layer again later, for several devices, and for torch.compile.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from sympow.generation.cache import CachePolicy
from sympow.hf.packing import check_continuation, packed_offsets
from sympow.hf.state_layer import prefetch_next, state_layer
from sympow.layers.mixers import ConformalAttention
from sympow.ops.state import State
from sympow.ops.window import Window

# Names of the keyword arguments by which the hook passes on padding, (b, t) bool, and offsets of packed documents.
MASK = "sympow_mask"
OFFSETS = "sympow_offsets"


class SwappedAttention(ConformalAttention):
    """`ConformalAttention` that is called as transformers calls self-attention.

    It attends to all earlier tokens, with or without a sliding window in the model's config.

    Args:
        layer_idx: the index of the layer in the model, and so of its entry in a cache.
        cache_policy: as in `sympow.hf.SympowCache`.
        others: as in `ConformalAttention`, which `from_projections` fills in.
    """

    is_causal = True

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
            others: of these, the padding and offsets of packed documents that `read_inputs` passes on. Positions are
                counted by the layer itself, and the mask of the attention function is not needed.

        Returns:
            (b, t, width) and None, since attention weights are never materialised.
        """
        if others.get("cache") is not None:
            raise ValueError("cache must not be given: swapped layers have no paged cache, for continuous batching")
        x, mask, offsets = hidden_states, others.get(MASK), others.get(OFFSETS)
        if past_key_values is None:
            if offsets is None:
                return super().forward(x, return_state=False, mask=mask)[0], None
            # All rows as one sequence of documents; each padding token is a separate document.
            y, _ = super().forward(x.flatten(0, 1).unsqueeze(0), return_state=False, cu_seqlens=offsets)
            return y.reshape(x.shape), None
        if offsets is not None:
            raise ValueError("use_cache and past_key_values are not supported with packed documents")
        layer = state_layer(past_key_values, self.layer_idx, self.cache_policy)
        prefetch_next(past_key_values, self.layer_idx, x.device)
        if layer.pending is not None:
            again = layer.pending
            _, after = super().forward(again.inputs, layer.start(self, again.inputs), mask=again.mask)
            assert isinstance(after, State | Window)
            layer.catch_up(after)
        if x.shape[1] == 1 and mask is None and layer.can_step and not torch.is_grad_enabled():
            return self.step(x, layer.step(self, x)), None
        y, after = super().forward(x, layer.start(self, x), return_state=True, mask=mask)
        assert isinstance(after, State | Window)
        layer.advance(after, x, mask)
        return y, None


# Marks base models all of whose attention was swapped.
WHOLE = "_sympow_swapped_whole"


def install_hooks(model: nn.Module, base: nn.Module, *, whole: bool) -> None:
    """Makes a base model pass padding and packed documents on to its swapped layers, and none make a cache in training.

    Args:
        model: the model around the base model, or that itself.
        whole: whether all layers were swapped.
    """
    setattr(base, WHOLE, whole)
    if read_inputs not in base._forward_pre_hooks.values():
        base.register_forward_pre_hook(read_inputs, with_kwargs=True)
    if model is not base and without_cache_in_training not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(without_cache_in_training, with_kwargs=True)


def read_inputs(base: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Adds padding and offsets of packed documents to the arguments of a base model; a forward pre-hook.

    A function and not a closure, so that copies of a model have it too.

    Raises:
        ValueError: attention weights are asked for, the attention mask is not 2-D, or positions have gaps.
    """
    # Without arguments by position, which models themselves do not pass, nothing is looked up.
    named = {**(dict(zip(_parameters(type(base)), arguments, strict=False)) if arguments else {}), **named}
    asked = named.get("output_attentions")
    if asked or (asked is None and base.config.output_attentions):
        raise ValueError("output_attentions must not be set: swapped layers never materialise attention weights")
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
    if offsets is not None and mask is not None:
        raise ValueError("attention_mask must not have padding where cu_seq_lens_q is given")
    if offsets is None:
        offsets = packed_offsets(named.get("position_ids"), named.get("seq_idx"), mask, shape)
    if cache is None:
        if offsets is not None:
            named[OFFSETS] = offsets
        if named.get("use_cache") is None and (offsets is not None or base.training):
            # A state would be made, and differentiated, for nothing.
            named["use_cache"] = False
        if given is not None and given.shape[1] > shape[1]:
            # Softmax layers would expect a key for every column.
            named["attention_mask"] = given[:, : shape[1]]
    elif offsets is not None:
        raise ValueError("use_cache and past_key_values are not supported with packed documents")
    elif seen and named.get("position_ids") is not None:
        check_continuation(named["position_ids"], given, mask, seen, shape)
    if getattr(base, WHOLE):
        # No layer reads the mask that the model makes, which has t² entries where there is padding. It leaves a 4-D
        # mask as it is.
        named["attention_mask"] = tokens.new_zeros(1, 1, 1, 1, dtype=torch.bool)
    return (), named


def without_cache_in_training(
    model: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Makes no cache where labels are given and gradients are enabled, unless one is asked for; a forward pre-hook.

    The base model, which does the same in training, does not get the labels.
    """
    named = {**(dict(zip(_parameters(type(model)), arguments, strict=False)) if arguments else {}), **named}
    asked = named.get("use_cache") is not None or named.get("past_key_values") is not None
    if named.get("labels") is not None and torch.is_grad_enabled() and not asked:
        named["use_cache"] = False
    return (), named


def _real_tokens(attention_mask: Tensor | None, shape: torch.Size, seen: int) -> Tensor | None:
    """Which of the new tokens are not padding, (b, t) bool; None: all.

    Args:
        attention_mask: (b, n), of all tokens, with or without columns for tokens to come; or of the new tokens only.
        seen: the number of tokens before them.
    """
    if attention_mask is None:
        return None
    batch, length = shape
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        came = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ValueError(
            f"attention_mask must be (batch, tokens so far), 0 for padding, in a swapped model; got {came}"
        )
    width = attention_mask.shape[1]
    if attention_mask.shape[0] != batch or width < length:
        raise ValueError(
            f"attention_mask must be ({batch}, at least {length}), 0 for padding; got {tuple(attention_mask.shape)}"
        )
    first = seen if width >= seen + length else width - length
    mask = attention_mask[:, first : first + length] != 0
    if not torch.compiler.is_compiling() and not mask.is_meta and bool(mask.all()):
        return None
    return mask


def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """The names of a base model's arguments, in their order."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
