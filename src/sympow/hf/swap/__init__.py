"""Symmetric power attention in pretrained models of transformers: `swap_attention` and what it puts in place."""
