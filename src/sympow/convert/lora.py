"""LoRA adapters for the stages that otherwise train all parameters; gates, which are new, are trained in full."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sympow.extras import require


class Adapters:
    """Low-rank adapters of a student's linear maps, added in place and merged at the end.

    Args:
        student: model to adapt.
        rank: of the adapters.
        new: names of parameters that the teacher does not have; they are trained as they are.
        seed: of the adapters' initial values.
    """

    def __init__(self, student: Any, rank: int, new: set[str], seed: int) -> None:
        peft = require("peft", "lora")
        # Modules that hold new parameters, such as the projection of gates.
        own = sorted({name.rpartition(".")[0] for name in new})
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules="all-linear", exclude_modules=own or None, bias="none"
        )
        parameters = {name: parameter for name, parameter in student.named_parameters() if name in new}
        self._wrapped = peft.get_peft_model(student, config)
        self.new = list(parameters.values())

    def trainable(self) -> list[nn.Parameter]:
        """The adapters and the new parameters."""
        adapters = [parameter for name, parameter in self._wrapped.named_parameters() if ".lora_" in name]
        return adapters + self.new

    def merge(self) -> Any:
        """The student with the adapters added to its weights."""
        return self._wrapped.merge_and_unload()
