"""The objective of each stage, which runs forward and backward passes and returns the detached loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sympow.convert.distillation import linear_kl_divergence, rows_in_memory
from sympow.convert.models import decoder_layers, features, output_weight
from sympow.data.loader import Batch
from sympow.model.losses import linear_cross_entropy

# The metric of stage 1 for a layer is named by this and the layer's index.
LAYER_ERROR = "match_loss/layer_"


class Objective(Protocol):
    """The loss of one stage."""

    def trainable(self) -> list[nn.Parameter]:
        """Parameters of the student that the stage trains; all others are frozen."""
        ...

    def backward(self, batch: Batch, weight: float) -> Tensor:
        """Adds `weight` times the gradient of a micro-batch's mean loss, and returns `weight` times that loss."""
        ...

    def details(self) -> dict[str, Tensor]:
        """Further numbers of the last micro-batch, by the names of metrics."""
        ...

    def compile(self) -> None:
        """Compiles the layers of the models."""
        ...


class Matching:
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

        self.teacher, self.dtype = teacher, dtype
        of_teacher, of_student = decoder_layers(teacher), decoder_layers(student)
        self.pairs = {n: (of_teacher[n][1], of_student[n][1]) for n in swapped_layers(student)}
        self.layers = {n: of_teacher[n][0] for n in self.pairs}
        self._last: dict[str, Tensor] = {}

    def trainable(self) -> list[nn.Parameter]:
        return [parameter for _, attention in self.pairs.values() for parameter in attention.parameters()]

    def backward(self, batch: Batch, weight: float) -> Tensor:
        losses: dict[int, Tensor] = {}

        def match(number: int, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            expected = _first(output).detach()
            expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
            with torch.enable_grad():
                if self.dtype is None:
                    # The student is trained in float32, whatever the teacher's dtype. Autocast would cast the inputs.
                    args, kwargs = _cast((args, kwargs), _dtype(attention))
                difference = _first(attention(*args, **kwargs)) - expected
                loss = (_energy(difference) / _energy(expected)).mean()
                with torch.autocast(expected.device.type, enabled=False):
                    (loss * (weight / len(self.pairs))).backward()
            losses[number] = loss.detach()

        with ExitStack() as held:
            for number, (of_teacher, of_student) in self.pairs.items():
                held.enter_context(_after_forward(of_teacher, _bound(match, number, of_student)))
            held.enter_context(torch.no_grad())
            held.enter_context(_autocast(batch.inputs, self.dtype))
            features(self.teacher, batch.inputs)
        self._last = {f"{LAYER_ERROR}{number}": loss for number, loss in sorted(losses.items())}
        return torch.stack(list(losses.values())).mean() * weight

    def details(self) -> dict[str, Tensor]:
        return self._last

    def compile(self) -> None:
        """Compiles the teacher's layers in parts: hooks on attention would not run inside compiled layers."""
        for number, (of_teacher, of_student) in self.pairs.items():
            of_student.compile(dynamic=False)
            for child in self.layers[number].children():
                if child is not of_teacher:
                    child.compile(dynamic=False)


class Distillation:
    """Stage 2: the KL divergence from the teacher's predictions. Arguments as for `Matching`."""

    def __init__(self, teacher: Any, student: Any, dtype: torch.dtype | None) -> None:
        self.teacher, self.student, self.dtype = teacher, student, dtype

    def trainable(self) -> list[nn.Parameter]:
        return list(self.student.parameters())

    def backward(self, batch: Batch, weight: float) -> Tensor:
        with _autocast(batch.inputs, self.dtype):
            with torch.no_grad():
                taught = features(self.teacher, batch.inputs)
            learned = features(self.student, batch.inputs)
        loss = linear_kl_divergence(
            learned, output_weight(self.student), taught, output_weight(self.teacher), dtype=self.dtype
        )
        (loss * weight).backward()
        return loss.detach() * weight

    def details(self) -> dict[str, Tensor]:
        return {}

    def compile(self) -> None:
        for model in (self.teacher, self.student):
            _compile_layers(model)


class NextToken:
    """Stage 3: cross-entropy of the next tokens.

    Args:
        student: model to train.
        dtype: dtype of autocast; None: no autocast.
    """

    def __init__(self, student: Any, dtype: torch.dtype | None) -> None:
        self.student, self.dtype = student, dtype

    def trainable(self) -> list[nn.Parameter]:
        return list(self.student.parameters())

    def backward(self, batch: Batch, weight: float) -> Tensor:
        with _autocast(batch.inputs, self.dtype):
            learned = features(self.student, batch.inputs)
        table = output_weight(self.student)
        loss = linear_cross_entropy(learned, table, batch.targets, tokens=rows_in_memory(table), dtype=self.dtype)
        (loss * weight).backward()
        return loss.detach() * weight

    def details(self) -> dict[str, Tensor]:
        return {}

    def compile(self) -> None:
        _compile_layers(self.student)


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


def _dtype(module: nn.Module) -> torch.dtype:
    return next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in a nested structure of arguments."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: _cast(one, dtype) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_cast(one, dtype) for one in value)
    return value


def _bound(call: Callable[..., None], number: int, attention: nn.Module) -> Callable[..., None]:
    return lambda _, args, kwargs, output: call(number, attention, args, kwargs, output)


@contextmanager
def _after_forward(module: nn.Module, call: Callable[..., None]) -> Iterator[None]:
    handle = module.register_forward_hook(call, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
