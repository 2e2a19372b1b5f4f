"""States at chunk boundaries: kernels that fold tokens into them and query them, p = 2 and 4, and messages between
ranks."""
