"""The operator in plain PyTorch: every form, on any device, in any floating-point dtype."""
