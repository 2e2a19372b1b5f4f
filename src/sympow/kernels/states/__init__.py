"""States at chunk boundaries: kernels that accumulate and query them, for p = 2 and p = 4."""
