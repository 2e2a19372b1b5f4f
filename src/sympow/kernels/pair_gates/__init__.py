"""The attention and chunked forms of p = 2 with a gate per rotated pair of entries (paper §5, "vector gating")."""
