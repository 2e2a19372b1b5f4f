"""Benchmarks: timing with its spread, peak memory, and the operator beside other attention."""
