"""States at chunk boundaries, p = 2 and 4: kernels that fold tokens into them, query them, and pack them to be sent."""
