"""`SwapRecord`: what the config of a swapped model says about the swap, and the layers that it makes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from transformers import PreTrainedConfig

from sympow.errors import ArgumentError, UserError
from sympow.generation.cache import CachePolicy
from sympow.hf.swap.swapped_attention import SwappedAttention
from sympow.settings import LEARNED_GATES, Backend, Form


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

    def layer(self, index: int, parts: dict[str, Any]) -> SwappedAttention:
        """The swapped layer `index`, of what `read_attention` found of the softmax layer in its place."""
        if self.rotary != "none" and parts["rates"] is None:
            raise ArgumentError("rotary", f"must be 'none' for a model without a rotary embedding, got {self.rotary!r}")
        return SwappedAttention.from_projections(
            **{**parts, "rates": None if self.rotary == "none" else parts["rates"]},
            rotary=self.rotary,
            power=self.power,
            gating=self.gating,
            initial_gate=self.initial_gate if self.gating in LEARNED_GATES else None,
            form=self.form,
            backend=self.backend,
            chunk_size=self.chunk_size,
            layer_idx=index,
            cache_policy=self.cache_policy,
        )
