"""Decoding on a GPU: kernels for one token of every sequence, and the PyTorch operators made of them."""
