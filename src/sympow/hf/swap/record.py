"""`SwapRecord`: what the config of a swapped model says about the swap."""

from __future__ import annotations

from dataclasses import dataclass, fields

from transformers import PreTrainedConfig

from sympow.errors import UserError
from sympow.generation.cache import CachePolicy
from sympow.settings import Backend, Form


@dataclass(frozen=True)
class SwapRecord:
    """What a config says about a swap, as its field `sympow_attention`.

    Attributes:
        base_model_type: the model type of the softmax model.
        layers: indices of the layers that were swapped.
        others: as in `swap_attention`.
    """

    base_model_type: str
    layers: tuple[int, ...]
    power: int
    gating: str
    rotary: str
    initial_gate: float
    form: Form
    backend: Backend
    chunk_size: int | None
    cache_policy: CachePolicy

    @classmethod
    def of(cls, config: PreTrainedConfig) -> SwapRecord:
        """The record in a config.

        Raises:
            ValueError: there is none, or it is damaged.
        """
        values = getattr(config, "sympow_attention", None)
        names = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or values.keys() != names:
            raise UserError(f"sympow_attention in the config must have {', '.join(sorted(names))}; got {values!r}")
        return cls(**{**values, "layers": tuple(values["layers"])})
