"""Random inputs of the operator, its reference, tolerances and comparisons that the tests share."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import interpreter
import sympow
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.kernels import device_limits
from sympow.ops import dispatch, reference

FORMS = ("attention", "chunked", "recurrent")
# Comparisons in float64 have tolerances below this.
LARGEST_FLOAT64 = 1e-8
# Triton's interpreter runs the kernels in float32, a GPU in bfloat16: a test runs in one or the other.
interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="float32 runs in Triton's interpreter, without a GPU"
)


if os.environ.get("TRITON_INTERPRET") == "1":
    interpreter.install()


@dataclass(frozen=True)
class Inputs:
    """Arguments of `sympow.attention`, one batch of sequences."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_gamma: Tensor | None = None
    beta: Tensor | None = None
    theta: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        return [t for t in (getattr(self, f.name) for f in fields(self)) if t is not None]

    def map(self, function: Any) -> Inputs:
        members = {f.name: getattr(self, f.name) for f in fields(self)}
        return Inputs(**{name: None if t is None else function(t) for name, t in members.items()})

    def requires_grad(self) -> Inputs:
        return self.map(lambda t: t.detach().clone().requires_grad_())

    def time(self, start: int, stop: int | None = None) -> Inputs:
        cut = self.map(lambda t: t[:, start:stop] if t.ndim > 1 else t)
        return replace(cut, theta=self.theta)

    def rounded(self, dtype: torch.dtype) -> Inputs:
        """The same inputs with queries, keys and values in another dtype."""
        return replace(self, q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype))

    def arguments(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def rotated(self) -> Inputs:
        """The same with queries and keys rotated, and no rotation left to do.

        It needs one scale per head, and as many key heads as query heads (`with_all_heads`).
        """
        if self.theta is None or self.beta is None:
            return self
        phase = (self.beta.double().cumsum(1).unsqueeze(-1) * self.theta.double()).remainder(2 * torch.pi)
        return replace(self, q=sympow.rotate(self.q, phase), k=sympow.rotate(self.k, phase), beta=None, theta=None)

    def with_all_heads(self) -> Inputs:
        """The same inputs with key heads repeated to the number of query heads, as the reference expects."""
        group = self.q.shape[2] // self.k.shape[2]
        repeated = self.map(lambda t: t.repeat_interleave(group, dim=2) if t.ndim > 1 else t)
        return replace(repeated, q=self.q)


def random_inputs(
    seed: int,
    *,
    batch: int = 1,
    length: int = 9,
    heads: int = 2,
    key_heads: int | None = None,
    dim: int = 4,
    value_dim: int = 3,
    gate: str = "scalar",
    rotation: str = "scale",
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random inputs for which every form is well conditioned.

    Queries and keys share a common direction. Without it, all scores of a row may be tiny, and a state computes them as
    small differences of large numbers, with rounding errors that no implementation can avoid.

    Args:
        gate: "none", "scalar" or "vector".
        rotation: "none", "fixed", "scale" or "pairs".
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    key_heads = key_heads or heads
    pairs = (dim // 2,)
    log_gamma = beta = theta = None
    if gate != "none":
        log_gamma = -uniform(batch, length, key_heads, *(pairs if gate == "vector" else ()))
    if rotation != "none":
        theta = 0.2 * uniform(*pairs)
    if rotation in ("scale", "pairs"):
        beta = 2 * uniform(batch, length, key_heads, *(pairs if rotation == "pairs" else ()))
    inputs = Inputs(
        q=1 + 0.4 * normal(batch, length, heads, dim),
        k=1 + 0.4 * normal(batch, length, key_heads, dim),
        v=normal(batch, length, key_heads, value_dim),
        log_gamma=log_gamma,
        beta=beta,
        theta=theta,
    )
    return inputs.map(lambda t: t.to(dtype))


def with_orthogonal_rows(inputs: Inputs, every: int = 3) -> tuple[Inputs, Tensor]:
    """Inputs in which one row in `every` sees only its own key, to which its query is nearly orthogonal.

    There must be as many query heads as key heads. Also returns the cosines of those rows with their keys, from 1 down
    to 2^-12, and 1 for all other rows: (t,).
    """
    rows = slice(None, None, every)
    q, k = inputs.q.double(), inputs.k.double()
    cosines = torch.ones(q.shape[1], dtype=torch.float64, device=q.device)
    cosines[rows] = torch.logspace(0, -12, len(cosines[rows]), base=2, dtype=torch.float64, device=q.device)
    key = torch.nn.functional.normalize(k[:, rows], dim=-1)
    across = q[:, rows] - (q[:, rows] * key).sum(-1, keepdim=True) * key
    cosine = cosines[rows][:, None, None]
    q[:, rows] = torch.nn.functional.normalize(across, dim=-1) * (1 - cosine**2).sqrt() + key * cosine
    assert inputs.log_gamma is not None
    log_gamma = inputs.log_gamma.clone()
    log_gamma[:, rows] = -torch.inf
    return replace(inputs, q=q.to(inputs.q.dtype), log_gamma=log_gamma), cosines


def run(inputs: Inputs, power: int, form: str, **options: Any) -> Any:
    """Calls `sympow.attention`; the chunked form has chunks of 4, so that short inputs have several."""
    if form == "chunked":
        options.setdefault("chunk_size", 4)
    return sympow.attention(**inputs.arguments(), power=power, form=form, **options)


def run_reference(inputs: Inputs, power: int) -> Tensor:
    return reference.attention(**inputs.with_all_heads().arguments(), power=power)


def run_plain(inputs: Inputs, power: int, rows: int | None = None) -> Tensor:
    """The attention form in straightforward PyTorch: whole matrices, in the dtype of the inputs; scalar gates only.

    Its error is the yardstick for that of a fast path. `rows`: rows of the score matrix at a time, to save memory.
    """
    inputs = inputs.with_all_heads().rotated()
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    total = None
    if inputs.log_gamma is not None:
        total = inputs.log_gamma.double().clamp(min=-1000.0).cumsum(1).transpose(1, 2)
    length = q.shape[2]
    if rows is None or rows >= length:
        return _plain_rows(q, k, v, total, power, 0, length).transpose(1, 2)
    blocks = [
        checkpoint(_plain_rows, q, k, v, total, power, start, min(start + rows, length), use_reentrant=False)
        for start in range(0, length, rows)
    ]
    return torch.cat(blocks, dim=2).transpose(1, 2)


def _plain_rows(q: Tensor, k: Tensor, v: Tensor, total: Tensor | None, power: int, start: int, stop: int) -> Tensor:
    scores = (q[:, :, start:stop] @ k[:, :, :stop].mT) ** power
    if total is not None:
        decay = total[:, :, start:stop].unsqueeze(-1) - total[:, :, :stop].unsqueeze(-2)
        scores = scores * decay.tril(start).exp().to(scores.dtype)
    scores = scores.tril(start)
    return (scores / scores.sum(-1, keepdim=True)) @ v[:, :, :stop]


# Rounding errors of outputs and gradients in float32, in units of eps: at least four times the worst that margins.py
# measured.
ROUNDINGS = {"y": 60.0, "q": 160.0, "k": 200.0, "v": 60.0, "log_gamma": 160.0, "beta": 160.0}
# The same for the gradient of the rotation rates, per token of the sequence: the phase of a token, and so its weight in
# this gradient, grows with its position.
ROUNDINGS_OF_RATES = 16.0


def float32_tolerance(name: str, length: int) -> float:
    """How far attention in float32 may be from float64, for its output "y" or the gradient of an input.

    Args:
        length: number of tokens of the longest document.
    """
    roundings = ROUNDINGS_OF_RATES * max(length, 16) if name == "theta" else ROUNDINGS[name]
    return roundings * torch.finfo(torch.float32).eps


def gradients(y: Tensor, inputs: Inputs, seed: int = 0) -> list[Tensor]:
    """Gradients of a fixed random combination of the outputs with respect to every input."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.device, y.dtype)
    # The output may not depend on an input, as that of a single token does not on the rotation: its gradient is zero.
    return list(torch.autograd.grad(y, inputs.tensors(), weights, materialize_grads=True))


# Set by margins.py, which measures errors instead of asserting that they are small.
observe: Callable[[float, float, str], None] | None = None
# Set by margins.py. Tests that start processes add it to the seeds that they pass to them.
seed_shift = 0


def within(error: Tensor | float, tolerance: float, what: str) -> None:
    """Asserts that an error is at most its tolerance; every comparison that allows for float32 rounding calls this."""
    error = error.item() if isinstance(error, Tensor) else error
    if observe is not None and tolerance > LARGEST_FLOAT64:
        observe(error, tolerance, what)
        return
    assert error <= tolerance, f"{what} is off by {error:.2e}, more than {tolerance:.0e}"


def assert_close(
    actual: Tensor | Sequence[float] | float,
    expected: Tensor | Sequence[float] | float,
    tolerance: float,
    what: str = "tensor",
    *,
    relative: bool = False,
) -> None:
    """Asserts that the largest difference, divided by the largest expected entry or 1, is at most `tolerance`.

    Args:
        relative: divide by the largest expected entry even if it is below 1.
    """
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if not expected.numel():
        return
    finite = torch.isfinite(actual).all()
    largest = expected.abs().max().item()
    scale = largest if relative else max(1.0, largest)
    error = (actual.double() - expected.double()).abs().max() / scale
    within(error if finite else math.nan, tolerance, what)


def assert_same_model(actual: torch.nn.Module, expected: torch.nn.Module, tokens: Tensor) -> None:
    """Asserts that two models have the same weights, bit for bit, and the same outputs up to rounding in float64.

    Equal weights do not make equal outputs. How BLAS rounds depends on the alignment of its operands, and the
    alignment of weights that are mapped from a file on the length of the file's header.
    """
    weights, expected_weights = actual.state_dict(), expected.state_dict()
    assert weights.keys() == expected_weights.keys()
    for name, tensor in expected_weights.items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name
    with torch.no_grad():
        out, expected_out = actual(tokens)[0], expected(tokens)[0]
        assert out.dtype == expected_out.dtype
        if out.dtype != torch.float64:
            out, expected_out = (copy.deepcopy(model).double()(tokens)[0] for model in (actual, expected))
            assert out.dtype == torch.float64
    assert_close(out, expected_out, 1e-12, "outputs")


def assert_states_close(actual: sympow.State, expected: sympow.State, tolerance: float) -> None:
    assert_close(actual.kv, expected.kv, tolerance, "kv")
    assert_close(actual.normalizer, expected.normalizer, tolerance, "normalizer")
    assert (actual.phase is None) == (expected.phase is None)
    if actual.phase is not None and expected.phase is not None:
        # Phases are in float64 in any case.
        tolerance = min(tolerance, 1e-9)
        assert_close(torch.exp(1j * actual.phase).real, torch.exp(1j * expected.phase).real, tolerance, "phase")
        assert_close(torch.exp(1j * actual.phase).imag, torch.exp(1j * expected.phase).imag, tolerance, "phase")


def forget_devices() -> None:
    """Makes the kernels ask torch again which GPUs there are, for tests that replace its answers."""
    device_limits.device_limits.cache_clear()
    device_limits.is_hopper.cache_clear()


@contextmanager
def on_hopper() -> Iterator[None]:
    """Calls on the CPU take the way that they take on a Hopper GPU. Their kernels, in Gluon, must be replaced."""
    from sympow.kernels.attention import engines

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "_not_on_hopper", lambda call: None)
        patch.setattr(dispatch, "_kernel_dtypes", lambda: dispatch.KERNEL_DTYPES)
        yield


def flipped(content: bytes, bit: int) -> bytes:
    """A file's content with one bit flipped; bit 0 is the lowest of the first byte."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def decode(model: sympow.GPT, prefix: Prefix, tokens: Tensor, **options: Any) -> tuple[Tensor, Prefix]:
    """Decodes given tokens one at a time: logits after each, (b, t, vocabulary), and the prefix after the last.

    Args:
        tokens: (b, t).
        options: as in `Decoder`.
    """
    decoder = Decoder(model, prefix, tokens=tokens.shape[1], **options)
    logits = [decoder.step(token).clone() for token in tokens.unbind(1)]
    return torch.stack(logits, dim=1), decoder.close()
