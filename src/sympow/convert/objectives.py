"""The objective of each stage, which `sympow.train.loop` minimizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sympow.convert.distillation import linear_kl_divergence, rows_in_memory
from sympow.convert.models import decoder_layers, features, output_weight
from sympow.data.loader import Batch
from sympow.model.losses import linear_cross_entropy
from sympow.train.objective import Objective

# The metric of stage 1 for a layer is named by this and the layer's index.
LAYER_ERROR = "match_loss/layer_"


class StageObjective(Objective):
    """The objective of a stage; a subclass has its loss.

    Args:
        student: model to train.
        dtype: dtype of autocast; None: no autocast.
    """

    def __init__(self, student: Any, dtype: torch.dtype | None) -> None:
        super().__init__(student)
        self.dtype = dtype

    def compile(self) -> None:
        """Compiles the layers of the models."""
        _compile_layers(self.model)


class Matching(StageObjective):
    """Stage 1: matches the attention outputs of converted layers, each given the teacher's inputs of that layer.

    The loss of a layer is the relative squared error of its output, |student − teacher|² / |teacher|², for each
    sequence; the stage minimizes its mean over sequences and layers. The ratio is taken per sequence, so that the loss
    of a batch does not depend on how it is split into micro-batches.

    The teacher runs forward once, without gradients. After each of its attention modules, a hook runs the student's
    module forward and backward on the same inputs, so that only one layer's activations are in memory.

    Args:
        teacher: model with softmax attention.
        student: the same model with the attention of some layers replaced.
        dtype: dtype of autocast; None: no autocast.
    """

    def __init__(self, teacher: Any, student: Any, dtype: torch.dtype | None) -> None:
        from sympow.hf import swapped_layers

        super().__init__(student, dtype)
        self.teacher = teacher
        of_teacher, of_student = decoder_layers(teacher), decoder_layers(student)
        self.pairs = {n: (of_teacher[n][1], of_student[n][1]) for n in swapped_layers(student)}
        self.trained = [parameter for _, attention in self.pairs.values() for parameter in attention.parameters()]
        self._last: dict[int, Tensor] = {}

    def loss(self, batch: Batch) -> Tensor:
        return self._match(batch, lambda loss: None)

    def backward(self, batch: Batch, weight: float) -> Tensor:
        return self._match(batch, lambda loss: (loss * (weight / len(self.pairs))).backward()) * weight

    def _match(self, batch: Batch, use: Callable[[Tensor], None]) -> Tensor:
        """The mean loss of the layers, each given to `use` while only its own activations are in memory."""
        losses: dict[int, Tensor] = {}

        def match(number: int, attention: nn.Module, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            expected = _first(output).detach()
            expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
            with torch.enable_grad():
                if self.dtype is None:
                    # The student is trained in float32, whatever the teacher's dtype. Autocast would cast the inputs.
                    args, kwargs = _cast((args, kwargs), attention)
                difference = _first(attention(*args, **kwargs)) - expected
                loss = (_energy(difference) / _energy(expected)).mean()
                with torch.autocast(expected.device.type, enabled=False):
                    use(loss)
            losses[number] = loss.detach()

        with ExitStack() as held:
            for number, (of_teacher, of_student) in self.pairs.items():
                call = partial(match, number, of_student)
                held.enter_context(of_teacher.register_forward_hook(call, with_kwargs=True))
            held.enter_context(torch.no_grad())
            held.enter_context(_autocast(batch.inputs, self.dtype))
            features(self.teacher, batch.inputs)
        self._last = dict(sorted(losses.items()))
        return torch.stack(list(losses.values())).mean()

    def details(self, batch: Batch) -> dict[str, float]:
        """The loss of each layer, of the last micro-batch."""
        return {f"{LAYER_ERROR}{number}": loss.item() for number, loss in self._last.items()}

    def compile(self) -> None:
        """Compiles the teacher's layers in parts: hooks on attention would not run inside compiled layers."""
        layers = decoder_layers(self.teacher)
        for number, (of_teacher, of_student) in self.pairs.items():
            of_student.compile(dynamic=False)
            for child in layers[number][0].children():
                if child is not of_teacher:
                    child.compile(dynamic=False)


class Distillation(StageObjective):
    """Stage 2: the KL divergence from the teacher's predictions. Arguments as for `Matching`."""

    def __init__(self, teacher: Any, student: Any, dtype: torch.dtype | None) -> None:
        super().__init__(student, dtype)
        self.teacher = teacher

    def loss(self, batch: Batch) -> Tensor:
        with _autocast(batch.inputs, self.dtype):
            with torch.no_grad():
                taught = features(self.teacher, batch.inputs)
            learned = features(self.model, batch.inputs)
        table, teachers = output_weight(self.model), output_weight(self.teacher)
        return linear_kl_divergence(learned, table, taught, teachers, dtype=self.dtype)

    def compile(self) -> None:
        super().compile()
        _compile_layers(self.teacher)


class NextToken(StageObjective):
    """Stage 3: cross-entropy of the next tokens."""

    def loss(self, batch: Batch) -> Tensor:
        with _autocast(batch.inputs, self.dtype):
            learned = features(self.model, batch.inputs)
        table = output_weight(self.model)
        return linear_cross_entropy(learned, table, batch.targets, tokens=rows_in_memory(table), dtype=self.dtype)


def _compile_layers(model: Any) -> None:
    """Compiles decoder layers for static shapes: all batches of a stage have one shape, which all layers share."""
    for layer, _ in decoder_layers(model).values():
        layer.compile(dynamic=False)


def _autocast(inputs: Tensor, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return torch.autocast(inputs.device.type, dtype=dtype, enabled=dtype is not None)


def _first(output: Any) -> Tensor:
    """The output tensor of an attention module, which is the first of a tuple or alone."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _energy(output: Tensor) -> Tensor:
    """Squared norm of each sequence, (b,), of (b, t, width)."""
    return output.square().sum((1, 2))


def _cast(arguments: Any, module: nn.Module) -> Any:
    """The arguments of a module with floating-point tensors in the dtype of its parameters."""
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, arguments)
