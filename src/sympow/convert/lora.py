"""LoRA adapters for stages 2 and 3, which otherwise train all parameters. Gates and rotations are new parameters and
are trained directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sympow.extras import require


class Adapters:
    """LoRA adapters of a student's linear layers, added in place and merged at the end.

    Args:
        student: model to adapt.
        rank: rank of the adapters.
        new: names of parameters that the teacher does not have; they are trained without adapters.
        seed: seed of the adapters' initial values.
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
        """The student with the adapters merged into its weights."""
        return self._wrapped.merge_and_unload()
