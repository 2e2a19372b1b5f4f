"""Fused kernels in Triton and the operators made of them. Importing any of this needs Triton."""
