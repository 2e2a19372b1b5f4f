"""The attention and chunked forms on a GPU: forward and backward kernels, PyTorch operators, and their reference."""
