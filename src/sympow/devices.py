"""Which device a call computes on."""

from __future__ import annotations

from sympow.checks import check_choice

DEVICES = ("cuda", "cpu")


def choose_device(device: str | None) -> str:
    """The device asked for, or by default a GPU if torch finds one.

    Args:
        device: "cuda", "cpu" or None.

    Raises:
        ValueError: it is another name, or there is no GPU.
    """
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_choice("device", device, DEVICES)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device must be 'cpu' here: torch finds no GPU it can use; got 'cuda'")
    return device
