"""Hooks that look at what modules of a model compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


@contextmanager
def forward_hooks(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], call: Callable[[str, nn.Module, Any], None]
) -> Iterator[None]:
    """While the block runs, calls `call(name, module, output)` after each forward pass of a module of these kinds."""

    def hook(name: str, module: nn.Module, _: Any, output: Any) -> None:
        call(name, module, output)

    chosen = [(name, module) for name, module in model.named_modules() if isinstance(module, kinds)]
    handles = [module.register_forward_hook(partial(hook, name)) for name, module in chosen]
    try:
        # Compiled graphs would not run the hooks.
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()
