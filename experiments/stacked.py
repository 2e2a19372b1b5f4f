"""Many small models of one shape trained as one: their weights stacked, their batches side by side.

A model of two layers and width 128 keeps a GPU busy for a fraction of the time that it takes to launch its kernels.
Stacked, the weights of n models are (n, …), each linear map is one batched product, and attention, which has no
weights, takes the batches of all models as one. Every model has its own data, initialization and learning rate, and
learns what it would learn alone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm, pad

from sympow.errors import ArgumentError
from sympow.layers.mixers import Mixer
from sympow.layers.precision import FloatLinear
from sympow.layers.short_conv import ShortConvolution
from sympow.model.gpt import GPT
from sympow.ops.short_convolution import short_convolution
from sympow.train.optimizer import is_decayed

BETAS = (0.9, 0.99)
EPSILON = 1e-8
CLIP_NORM = 1.0


class Stacked(nn.Module):
    """n modules of one kind.

    Attributes:
        members: n.
        weight: those of all members, (n, …).
        bias: likewise; None: they have none.
    """

    def __init__(self, members: Sequence[Any]) -> None:
        # Not that of `ShortConvolution`, which makes a weight of its own.
        nn.Module.__init__(self)
        self.members = len(members)
        self.weight = nn.Parameter(torch.stack([member.weight.detach() for member in members]))
        self.bias = None
        if getattr(members[0], "bias", None) is not None:
            self.bias = nn.Parameter(torch.stack([member.bias.detach() for member in members]))


class StackedLinear(Stacked):
    """n linear maps: x (n · b, t, inputs) → (n · b, t, outputs), in float32 or better for a `FloatLinear`."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(self.members, -1, x.shape[-1])
        if self.bias is None:
            y = torch.bmm(rows, self.weight.mT)
        else:
            y = torch.baddbmm(self.bias.unsqueeze(1), rows, self.weight.mT)
        return y.reshape(*x.shape[:-1], -1)


class StackedNorm(Stacked):
    """n layer norms: x (n · b, t, width)."""

    def __init__(self, members: Sequence[nn.LayerNorm]) -> None:
        super().__init__(members)
        self.eps = members[0].eps

    def forward(self, x: Tensor) -> Tensor:
        rows = layer_norm(x, x.shape[-1:], eps=self.eps).reshape(self.members, -1, x.shape[-1])
        y = rows * self.weight.unsqueeze(1)
        if self.bias is not None:
            y = y + self.bias.unsqueeze(1)
        return y.view(x.shape)


class StackedEmbedding(Stacked):
    """n embeddings: tokens (n · b, t) → (n · b, t, width)."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = torch.arange(self.members, device=tokens.device) * self.weight.shape[1]
        ids = tokens.reshape(self.members, -1) + first.unsqueeze(1)
        return self.weight.flatten(0, 1)[ids].reshape(*tokens.shape, -1)


class _StackedConvolution(torch.autograd.Function):
    """Short convolutions of whole sequences, x (n, b, t, channels) with weights (n, width, channels).

    The gradient is written out: autograd's has a tensor as large as x for each tap, twice, and training of small
    models waits for memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        taps, length = weight.to(x.dtype)[:, :, None, None], x.shape[2]
        y = taps[:, 0] * x
        for j in range(1, min(weight.shape[1], length)):
            y[:, :, j:].addcmul_(taps[:, j], x[:, :, : length - j])
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (d_y,), (x, weight) = gradients, ctx.saved_tensors
        taps, length = weight.to(x.dtype)[:, :, None, None], x.shape[2]
        d_x, d_weight = taps[:, 0] * d_y, torch.zeros_like(weight)
        d_weight[:, 0] = (d_y * x).sum((1, 2), dtype=weight.dtype)
        for j in range(1, min(weight.shape[1], length)):
            later, earlier = d_y[:, :, j:], x[:, :, : length - j]
            d_x[:, :, : length - j].addcmul_(taps[:, j], later)
            d_weight[:, j] = (later * earlier).sum((1, 2), dtype=weight.dtype)
        return d_x, d_weight


class StackedShortConvolution(Stacked, ShortConvolution):
    """n short convolutions: x (n · b, t, channels), weights (n, width, channels)."""

    def forward(
        self, x: Tensor, past: Tensor | None = None, cu_seqlens: Tensor | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if cu_seqlens is not None:
            raise ArgumentError("cu_seqlens", "is not supported by stacked models with short_conv")
        rows = len(x) // self.members
        # The compiler fuses the operations of the general form and of its gradient by itself.
        if past is None and mask is None and not torch.compiler.is_compiling():
            y = cast("Tensor", _StackedConvolution.apply(x.unflatten(0, (self.members, rows)), self.weight))
            before = self.width - 1
            return y.flatten(0, 1), pad(x[:, -before:], (0, 0, max(0, before - x.shape[1]), 0))
        # (width, n · b, 1, channels)
        taps = self.weight.transpose(0, 1).repeat_interleave(rows, dim=1).unsqueeze(2)
        return short_convolution(x, taps, past, mask=mask)


_STACKED: dict[type[nn.Module], Callable[[Any], nn.Module]] = {
    nn.Linear: StackedLinear,
    FloatLinear: StackedLinear,
    nn.LayerNorm: StackedNorm,
    nn.Embedding: StackedEmbedding,
    ShortConvolution: StackedShortConvolution,
}


def stack(models: Sequence[GPT]) -> GPT:
    """One model that computes all of them: `features` takes tokens (n · b, t), the rows of each model together.

    Raises:
        ValueError: there are no models, or they differ in shape, or have parameters outside linear maps, norms,
            embeddings and short convolutions.
    """
    if not models:
        raise ArgumentError("models", "must hold at least one model, got none")
    if any(model.config != models[0].config for model in models):
        raise ArgumentError("models", "must have the same config")
    stacked = copy.deepcopy(models[0])
    for name, module in models[0].named_modules():
        if type(module) in _STACKED:
            members = [model.get_submodule(name) for model in models]
            stacked.set_submodule(name, _STACKED[type(module)](members))
    alone = dict(models[0].named_parameters())
    left = [name for name, x in stacked.named_parameters() if x.ndim != alone[name].ndim + 1]
    if left:
        raise ArgumentError(
            "models", f"cannot be stacked: {left[0]} is not of a linear map, norm, embedding or convolution"
        )
    return stacked


def member_of(stacked: GPT, number: int) -> GPT:
    """One of the stacked models, on its own."""
    model = GPT(stacked.config).to(stacked.embedding.weight)
    model.load_state_dict({name: x[number] for name, x in stacked.state_dict().items()})
    return model


def stacked_logits(stacked: GPT, inputs: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits of each model, (n, b · t, vocabulary), in float32 or better.

    Args:
        inputs: (n, b, t).
        positions: (n, b, a) of those tokens of each row whose logits are wanted: then (n, b · a, vocabulary). With a
            large vocabulary these products are most of the work.
    """
    features, _ = stacked.features(inputs.flatten(0, 1), return_state=False)
    if positions is not None:
        places = positions.flatten(0, 1).unsqueeze(-1).expand(-1, -1, features.shape[-1])
        features = features.gather(1, places)
    rows = features.reshape(len(inputs), -1, features.shape[-1])
    logits = torch.bmm(rows, stacked.embedding.weight.mT)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def stacked_losses(stacked: GPT, inputs: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """The mean loss of each model over the labels that count, (n,).

    Args:
        inputs: (n, b, t).
        labels: (n, b, t), or (n, b, a) with positions.
        positions: of the labels, (n, b, a); None: every token has one.
    """
    logits = stacked_logits(stacked, inputs, positions)
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(len(inputs), -1)
    return losses.sum(1) / (labels.flatten(1) >= 0).sum(1).clamp(min=1)


def compiled_losses(stacked: GPT, inputs: Tensor, labels: Tensor, positions: Tensor | None = None) -> Tensor:
    """`stacked_losses`, compiled once for rows of all lengths, with any number of labels."""
    for x in (inputs, labels, positions):
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, 2)
    return _compiled()(stacked, inputs, labels, positions)


@cache
def _compiled() -> Callable[..., Tensor]:
    # Not when this module is imported: that would import the compiler.
    return torch.compile(stacked_losses)


class KeyNoise:
    """Scales the keys of each token by the exponential of normal noise in training, alike in all heads of a layer.

    What a token holds is a share of a row's scores, and the share shrinks as the row grows. A model that has been
    trained on rows of one length expects the shares of that length: it reads a parity off the share of the first token,
    and fails where that falls below its threshold. Under noise a share varies by the factors that other lengths bring.

    Attributes:
        deviation: of the logarithm, 0 at first: no noise. A score has p times as much.
    """

    def __init__(self, model: nn.Module) -> None:
        self.deviation = 0.0
        for module in model.modules():
            if isinstance(module, Mixer):
                module.qkv_proj.register_forward_hook(lambda _, __, y, mixer=module: self._scale_keys(mixer, y))

    def _scale_keys(self, mixer: Mixer, projected: Tensor) -> Tensor:
        if not (self.deviation and mixer.training):
            return projected
        queries, size = mixer.heads * mixer.head_dim, mixer.key_value_heads * mixer.head_dim
        q, k, v = projected.split([queries, size, size], dim=-1)
        # In all heads, as length does: what several heads see of one token stays comparable.
        noise = torch.randn(*k.shape[:-1], 1, dtype=k.dtype, device=k.device)
        return torch.cat([q, k * (self.deviation * noise).exp(), v], dim=-1)


class StackedAdam:
    """AdamW for stacked models: a learning rate and a clipped gradient norm of its own for each.

    Gradients and moments of all parameters lie side by side, so that an update is few kernels: for small models,
    launching them takes longer than running them.

    Args:
        named: parameters by name, (n, …) each.
        rates: the learning rate of each model, (n,).
        clip_norm: largest norm of a model's gradient.
        weight_decay: of those parameters that `sympow.train.optimizer` decays.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], rates: Tensor, clip_norm: float, weight_decay: float = 0.0
    ) -> None:
        parameters: dict[str, Tensor] = dict(named)
        self._parameters = list(parameters.values())
        members = len(self._parameters[0])
        self._decayed = [x for name, x in parameters.items() if is_decayed(name, x.ndim - 1)] if weight_decay else []
        self._rates, self._clip_norm, self._weight_decay, self._step = rates, clip_norm, weight_decay, 0
        self._sizes = [x[0].numel() for x in self._parameters]
        self._first, self._second = (self._parameters[0].new_zeros(members, sum(self._sizes)) for _ in range(2))

    @torch.no_grad()
    def step(self, schedule: float) -> None:
        """One update, the learning rates multiplied by `schedule`; clears the gradients."""
        gradients = [x.grad.flatten(1) for x in self._parameters if x.grad is not None]
        if missing := len(self._parameters) - len(gradients):
            raise ValueError(f"every parameter must have a gradient, {missing} of {len(self._parameters)} have none")
        self._step += 1
        first_bias, second_bias = (1 - beta**self._step for beta in BETAS)
        gradient = torch.cat(gradients, dim=1)
        norm = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
        gradient.mul_((self._clip_norm / (norm + 1e-6)).clamp(max=1.0))
        self._first.lerp_(gradient, 1 - BETAS[0])
        self._second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        change = self._first * (-schedule / first_bias * self._rates).unsqueeze(1)
        change.div_((self._second / second_bias).sqrt_().add_(EPSILON))
        if self._decayed:
            kept = 1 - self._weight_decay * schedule * self._rates
            for x in self._decayed:
                x.mul_(kept.view(-1, *[1] * (x.ndim - 1)))
        parts = change.split(self._sizes, dim=1)
        torch._foreach_add_(
            self._parameters, [part.view_as(x) for part, x in zip(parts, self._parameters, strict=True)]
        )
        for x in self._parameters:
            x.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "first": self._first, "second": self._second}

    @torch.no_grad()
    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self._step = saved["step"]
        self._first.copy_(saved["first"])
        self._second.copy_(saved["second"])


def schedule(step: int, steps: int, warmup: int) -> float:
    """The factor on learning rates: linear warm-up, then a cosine; `step` counts from 0.

    The cosine is zero at `step` = `steps`, one step after the last, so that the last one still learns:
    `OptimizerConfig.rate_at` reaches its end at the last step instead.
    """
    if step < warmup:
        return (step + 1) / (warmup + 1)
    return (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup))) / 2


class StackedTraining:
    """Training of stacked models, one update at a time, which can be saved and continued.

    A model whose loss is not finite is left to itself: it does not touch the others.

    Args:
        rates: learning rates, (n,).
        steps: updates in all, for the schedule.
        warmup: steps over which learning rates rise.
        weight_decay: as in `StackedAdam`.
        key_noise: deviation of the noise on keys (`KeyNoise`). It rises from 0 over the first half of the steps, since
            a task is learned much faster without it.
        autocast: whether to compute in bfloat16 on a GPU.
        compile: whether to compile the losses on a GPU (`compiled_losses`), which takes about a minute. Small models
            wait for memory, and less so with the operations between their products fused.
        log_every: steps between two losses that are kept.

    Attributes:
        stacked: the models.
        step: updates so far.
    """

    def __init__(
        self,
        stacked: GPT,
        rates: Tensor,
        steps: int,
        *,
        warmup: int,
        weight_decay: float = 0.0,
        key_noise: float = 0.0,
        autocast: bool = False,
        compile: bool = False,
        log_every: int = 50,
    ) -> None:
        self.stacked, self.step = stacked, 0
        self._steps, self._warmup, self._log_every, self._key_noise = steps, warmup, log_every, key_noise
        self._autocast = autocast and stacked.embedding.weight.is_cuda
        self._losses_of = stacked_losses
        if compile and stacked.embedding.weight.is_cuda:
            # Models of another shape that this process has trained count toward torch's limit of recompilations.
            torch.compiler.reset()
            self._losses_of = compiled_losses
        rates = rates.to(stacked.embedding.weight)
        self._optimizer = StackedAdam(stacked.named_parameters(), rates, CLIP_NORM, weight_decay)
        self._noise = KeyNoise(stacked) if key_noise else None
        self._logged: list[int] = []
        self._losses: list[Tensor] = []

    def update(self, inputs: Tensor, labels: Tensor, positions: Tensor | None = None) -> None:
        """One update of every model; arguments as in `stacked_losses`, on the device of the models."""
        if self._noise is not None:
            self._noise.deviation = self._key_noise * min(1.0, 2 * self.step / self._steps)
        with self.computing():
            loss = self._losses_of(self.stacked, inputs, labels, positions)
        loss.sum().backward()
        self._optimizer.step(schedule(self.step, self._steps, self._warmup))
        self.step += 1
        if self.step % self._log_every == 0 or self.step == self._steps:
            self._logged.append(self.step)
            self._losses.append(loss.detach())

    def computing(self) -> AbstractContextManager[Any]:
        """The context in which the models compute."""
        return torch.autocast("cuda", torch.bfloat16) if self._autocast else nullcontext()

    def losses(self) -> tuple[list[int], Tensor]:
        """The steps that were logged, and the losses of each model there, (n, logged) on the CPU."""
        members = len(self.stacked.embedding.weight)
        return self._logged, torch.stack(self._losses, dim=1).cpu() if self._losses else torch.zeros(members, 0)

    def state_dict(self) -> dict[str, Any]:
        device = self.stacked.embedding.weight.device
        return {
            "step": self.step,
            "stacked": self.stacked.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "logged": self._logged,
            "losses": self.losses()[1],
            "random": torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        weight = self.stacked.embedding.weight
        self.step = saved["step"]
        self.stacked.load_state_dict(saved["stacked"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._logged, self._losses = list(saved["logged"]), list(saved["losses"].to(weight.device).unbind(1))
        restore = torch.cuda.set_rng_state if weight.is_cuda else torch.set_rng_state
        restore(saved["random"].cpu())
