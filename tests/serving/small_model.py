"""A model that takes no time, and all of whose parameters matter."""

import torch

from sympow.model import GPT, GPTConfig


def small_model(seed: int = 0, dtype: torch.dtype = torch.float64, **config) -> GPT:
    torch.manual_seed(seed)
    shape = {"vocab_size": 257, "layers": 2, "width": 16, "heads": 2, "key_value_heads": 1, "rotary": "scale"}
    model = GPT(GPTConfig(**(shape | config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.5 if name == "embedding.weight" else 2 / parameter.shape[-1] ** 0.5
            parameter += std * torch.randn_like(parameter)
    return model.to(dtype).eval()
