"""Symmetric power attention in pretrained models of transformers.

`swapping.py` has `swap_attention`. It reads a softmax layer's parts (`attention_parts.py`), makes a layer of them
(`swapped_attention.py`), whose past is an entry of transformers' cache (`state_layer.py`), and changes the classes of
model and config (`classes.py`). `swapped_gpt.py` gives such a model the interface of `sympow.GPT`;
`attention_function.py` is `attn_implementation="sympow"`, which changes nothing else in a model.
"""
