"""Fused Triton kernels and the PyTorch operators made of them, each with its plain PyTorch twin (`reference`).

Importing any module but the twins and `device_limits` needs Triton.
"""
