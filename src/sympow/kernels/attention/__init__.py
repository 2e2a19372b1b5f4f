"""Attention and chunked form on a GPU: the forward and backward kernels, and the PyTorch operators made of them."""
