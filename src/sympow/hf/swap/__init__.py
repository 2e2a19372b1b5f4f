"""Symmetric power attention in pretrained models of transformers.

`swapping.py` has `swap_attention`. It reads a softmax layer's parts (`attention_parts.py`), makes a layer of them
(`swapped_attention.py`), whose past is an entry of transformers' cache (`state_layer.py`), and changes the classes of
model and config (`classes.py`). `swapped_gpt.py` gives such a model the interface of `sympow.GPT`;
`attention_function.py` is `attn_implementation="sympow"`, which changes nothing else in a model.
"""

from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig

from sympow.hf.swap.attention_function import NAME, power_attention, power_attention_mask
from sympow.hf.swap.attention_parts import attention_modules
from sympow.hf.swap.classes import SwappedConfig
from sympow.hf.swap.state_layer import StateLayer
from sympow.hf.swap.swapped_gpt import SwappedGPT
from sympow.hf.swap.swapping import swap_attention, swapped_layers

__all__ = ["StateLayer", "SwappedGPT", "attention_modules", "swap_attention", "swapped_layers"]

AutoConfig.register(SwappedConfig.model_type, SwappedConfig, exist_ok=True)
AttentionInterface.register(NAME, power_attention)
AttentionMaskInterface.register(NAME, power_attention_mask)
