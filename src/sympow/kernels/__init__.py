"""Fused Triton kernels and the PyTorch operators made of them, each with its plain PyTorch reference (`reference`).

Importing any module but the references and `device_limits` needs Triton.
"""
