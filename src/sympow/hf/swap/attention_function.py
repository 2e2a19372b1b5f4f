"""`attn_implementation="sympow"`: symmetric power attention in place of softmax, in an otherwise unchanged model.

It is for a quick look. There are no gates and no state: the function computes (q·k)^p with all keys of the model's KV
cache, so it saves no memory, and a model that was trained with softmax predicts worse. To train a model, use
`sympow.hf.swap_attention`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from sympow.errors import ArgumentError, UserError
from sympow.ops.interface import attention

try:
    # Holds the extra outputs that the outermost call of a model was asked for; None outside of calls.
    from transformers.utils.output_capturing import _active_collector
except ImportError:
    _active_collector = None  # type: ignore[assignment]

NAME = "sympow"
# Arguments of attention functions of transformers that would change what is computed.
UNSUPPORTED = ("softcap", "position_bias", "s_aux", "cache", "cu_seq_lens_q")


def power_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: returns y (b, t, h, d), and None for the weights, never materialized.

    Args:
        module: the attention module; p is `sympow_power` of its config, by default 2.
        query: rotated queries of the last t tokens, (b, h, t, d).
        key, value: rotated keys, and values, of all n tokens, (b, h_kv, n, d).
        attention_mask: (b, n) bool, False for padding; None: no padding.
        dropout: must be 0.
        others: arguments that models pass to attention functions. `scaling` is ignored: normalizing cancels it.

    Raises:
        ValueError: an argument asks for something that this function does not support; the message names it.
    """
    if dropout:
        raise UserError(f"attention dropout must be 0 with attn_implementation='{NAME}', got {dropout}")
    if _weights_asked_for(module, others):
        raise ArgumentError(
            "output_attentions",
            f"must not be set with attn_implementation='{NAME}': attention weights are never materialized",
        )
    if asked := [name for name in UNSUPPORTED if others.get(name) is not None]:
        raise UserError(f"attn_implementation='{NAME}' does not support {', '.join(asked)}")
    if not (others.get("is_causal") is not False and getattr(module, "is_causal", True)):
        raise UserError(f"attn_implementation='{NAME}' is for causal attention; {type(module).__name__} is not")
    if attention_mask is not None:
        if attention_mask.ndim != 2:
            raise ArgumentError(
                "attention_mask",
                f"must be 2-D, 0 for padding, with attn_implementation='{NAME}'; got {tuple(attention_mask.shape)}",
            )
        padding = ~attention_mask.to(torch.bool)[:, None, :, None]
        # Keys of zero have no score.
        key, value = key.masked_fill(padding, 0.0), value.masked_fill(padding, 0.0)
    power = getattr(module.config, "sympow_power", 2)
    return attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), power), None


def _weights_asked_for(module: nn.Module, others: dict[str, Any]) -> bool:
    """Whether a caller of the model set output_attentions, which not all models pass on to their layers."""
    if _active_collector is not None and not torch.compiler.is_compiling():
        collected = _active_collector.get()
        if collected is not None:
            return "attentions" in collected
    asked = others.get("output_attentions")
    return bool(getattr(module.config, "output_attentions", False) if asked is None else asked)


def power_attention_mask(
    batch_size: int,
    q_length: int = 0,
    kv_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    cache_position: Tensor | None = None,
    **others: Any,
) -> Tensor | None:
    """A mask of the keys, (b, n) bool, False for padding; None: no padding.

    Args:
        local_size: the size of a sliding window, which must have room for all tokens.
        cache_position: positions of the queries; earlier versions of transformers pass them in place of q_length and
            q_offset.
        others: ignored, but for the device.

    Raises:
        ValueError: the mask is not plain causal attention to all earlier tokens.
    """
    if cache_position is not None:
        q_length, q_offset = len(cache_position), int(cache_position[0])
    if isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length:
        raise ArgumentError("past_key_values", f"must be a DynamicCache with attn_implementation='{NAME}'")
    if local_size is not None and kv_offset + kv_length > local_size:
        raise UserError(
            f"attn_implementation='{NAME}' attends to all tokens: a sliding window of {local_size} is too small for "
            f"{kv_offset + kv_length}"
        )
    if mask_function is not causal_mask_function:
        where: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "device": others.get("device")}
        _check_attends_to_all(mask_function, (batch_size, q_length), sliding=local_size is not None, **where)
    if attention_mask is None or bool(attention_mask.all()):
        return None
    if attention_mask.shape[1] < kv_offset + kv_length:
        raise ArgumentError(
            "attention_mask",
            f"must cover all {kv_offset + kv_length} tokens with attn_implementation='{NAME}'; "
            f"got {tuple(attention_mask.shape)}",
        )
    # The mask may have columns for later tokens.
    return attention_mask[:, kv_offset : kv_offset + kv_length]


def _check_attends_to_all(
    mask_function: Any, shape: tuple[int, int], *, sliding: bool, q_offset: int, kv_offset: int, device: Any
) -> None:
    """Raises unless queries (b, t) from position q_offset on attend to all keys from kv_offset on that are not later.

    A sliding window has a mask function of its own, however long it is, and so has any call without a cache under
    torch.compile, for which transformers assumes packed documents. These functions are evaluated, for the first key and
    for the key after each query; others are refused.
    """
    message = f"attn_implementation='{NAME}' attends to all earlier tokens: it takes no packed documents"
    compiling = torch.compiler.is_compiling()
    if not (sliding or compiling):
        raise UserError(message)
    batch, length = shape
    if length == 1:
        # One token is in one document: decoding steps need not wait for the device.
        return
    rows, queries = torch.arange(batch, device=device).unsqueeze(1), q_offset + torch.arange(length, device=device)
    # After the last query there is no key that a function could look up.
    inner = queries[:-1]
    attends = mask_function(rows, 0, queries, torch.full_like(queries, kv_offset)).all()
    attends &= ~mask_function(rows, 0, inner, inner + 1).any()
    if compiling:
        torch._assert_async(attends, message)
    elif not attends:
        raise UserError(message)
