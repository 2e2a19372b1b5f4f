"""Accuracy of every kernel on this machine (`sympow check`): outputs and gradients against plain PyTorch in float64.

Plain PyTorch is the kernels' references (`reference.py` beside them), which share no code with what is checked.
The tolerance of a tensor is four times the error of plain PyTorch in the kernels' dtype on the same inputs. The test
suite allows twice that error, on fixed seeds; a check that accepts any seed needs the wider margin. Where kernels
cannot run, the portable forms are checked instead, in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sympow.checks import check_seed
from sympow.kernels.attention.reference import attention_reference
from sympow.kernels.decode.reference import softmax_step_reference, step_gates_reference
from sympow.kernels.pair_gates.reference import pair_attention_reference
from sympow.kernels.reference import cross_entropy_reference, rotation_reference, running_sum_reference
from sympow.kernels.states.reference import pack_reference, unpack_reference
from sympow.model.losses import linear_cross_entropy
from sympow.ops.dispatch import triton_available, triton_interpreted
from sympow.ops.interface import attention
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.rotary import rotary_rates
from sympow.ops.torch.softmax import softmax_attention
from sympow.ops.window import Window
from sympow.settings import Backend, Form, symmetric_dim

# The largest error that passes, as a multiple of the error of plain PyTorch.
FACTOR = 4
# Errors below these pass: they are rounding, even where plain PyTorch happens to have a smaller one.
FLOORS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 1e-5}
# Tensors by name; Any, since they are passed as keyword arguments of several types.
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What is checked, and on which device.

    Attributes:
        device: "cuda" or "cpu".
        backend: "triton" for the kernels, "torch" for the portable forms.
        dtype: dtype of queries, keys and values.
        length: tokens of a sequence.
        dim: default head dimension.
        seed: seed of the random inputs.
    """

    device: str
    backend: Backend
    dtype: torch.dtype
    length: int
    dim: int
    seed: int

    def __post_init__(self) -> None:
        check_seed(self.seed)

    @classmethod
    def find(cls, device: str, seed: int = 0) -> Machine:
        """The kernels if they can run on the device, otherwise the portable forms."""
        if triton_available() and triton_interpreted():
            # Small, since the interpreter takes milliseconds for an operation on a tile.
            return cls(device, "triton", torch.float32, length=135, dim=16, seed=seed)
        if triton_available() and device == "cuda":
            return cls(device, "triton", torch.bfloat16, length=700, dim=64, seed=seed)
        return cls(device, "torch", torch.float32, length=300, dim=64, seed=seed)

    @property
    def on_kernels(self) -> bool:
        return self.backend == "triton"


@dataclass(frozen=True)
class Outcome:
    """The result of one check.

    Attributes:
        name: what was checked.
        tensor: the output or gradient with the largest ratio of error to tolerance.
        error: its relative error, ‖x − exact‖ / ‖exact‖.
        bar: its tolerance.
        problem: why nothing was computed: the kernel did not compile, or could not be launched.
    """

    name: str
    tensor: str = ""
    error: float = 0.0
    bar: float = 0.0
    problem: str | None = None

    @property
    def passed(self) -> bool:
        return self.problem is None and self.error <= self.bar


@dataclass(frozen=True)
class Comparison:
    """The outputs and gradients of one computation: by the kernels, in float64, and by plain PyTorch in their dtype."""

    actual: Tensors
    exact: Tensors
    plain: Tensors

    def outcome(self, name: str, floor: float) -> Outcome:
        found = []
        for tensor, exact in self.exact.items():
            bar = max(FACTOR * relative_error(self.plain[tensor], exact), floor)
            found.append(Outcome(name, tensor, relative_error(self.actual[tensor], exact), bar))
        return max(found, key=lambda outcome: outcome.error / outcome.bar)


def relative_error(x: Tensor, exact: Tensor) -> float:
    """‖x − exact‖ / ‖exact‖; infinite where x is not finite."""
    if not bool(x.isfinite().all()):
        return float("inf")
    return ((x.double() - exact).norm() / exact.norm()).item()


@dataclass(frozen=True)
class OperatorCall:
    """A call of `sympow.attention`, with its gradients.

    Attributes:
        form: form that the kernels compute; plain PyTorch always computes the attention form.
        power: p.
        dim, value_dim: d and e; None: the machine's d, and e = d.
        heads, key_heads: h and h_kv.
        gated: whether each head has a gate, or each of its rotated pairs.
        vector_gate: whether each rotated pair has its own gate.
        rotation: "none", "fixed", "scale" (β per head) or "pairs" (β per rotated pair).
        packed: whether the sequence is several packed documents.
        continued: whether the sequence is computed in two calls, with a state passed between them.
        times: multiple of the machine's sequence length.
        dtype: of queries, keys and values; None: the machine's.
    """

    form: Form
    power: int = 2
    dim: int | None = None
    value_dim: int | None = None
    heads: int = 2
    key_heads: int = 2
    gated: bool = True
    vector_gate: bool = False
    rotation: str = "scale"
    packed: bool = False
    continued: bool = False
    times: int = 1
    dtype: torch.dtype | None = None

    def compare(self, machine: Machine) -> Comparison:
        machine = replace(machine, dtype=self.dtype or machine.dtype)
        length = self.times * machine.length
        sizes = (1, length // 3, length // 4)
        documents = (*sizes, length - sum(sizes)) if self.packed else None
        inputs = self.inputs(machine, length)
        seed = torch.randn(1, length, self.heads, inputs["v"].shape[-1], generator=_generator(machine))

        def plain(x: Tensors) -> Tensor:
            return plain_attention(**x, power=self.power, documents=documents)

        actual = _with_gradients(inputs, lambda x: self._call(machine, x, documents), seed)
        return Comparison(actual, *(_with_gradients(x, plain, seed) for x in _in_both_dtypes(inputs, machine)))

    def _call(self, machine: Machine, inputs: Tensors, documents: tuple[int, ...] | None) -> Tensor:
        # Short chunks, so that several states are carried between chunks.
        options: dict[str, Any] = {"power": self.power, "form": self.form, "backend": machine.backend}
        if self.form == "chunked":
            options["chunk_size"] = 128 if machine.on_kernels else 64
        if documents is not None:
            options["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(documents)], device=machine.device)
        if not self.continued:
            return attention(**inputs, **options)
        border = machine.length // 3
        head, tail = _tokens(inputs, 0, border), _tokens(inputs, border, None)
        first, state = attention(**head, **options, return_state=True)
        return torch.cat([first, attention(**tail, **options, initial_state=state)], dim=1)

    def inputs(self, machine: Machine, length: int) -> Tensors:
        """Normal queries, keys and values, gates near γ = 0.98, and the paper's rotation rates."""
        generator, dim = _generator(machine), self.dim or machine.dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(1, length, *shape, generator=generator)

        made = {
            "q": normal(self.heads, dim),
            "k": normal(self.key_heads, dim),
            "v": normal(self.key_heads, self.value_dim or dim),
        }
        if machine.dtype == torch.float16:
            # Outputs do not depend on it, but plain PyTorch in float16 would leave its range.
            made["q"] /= dim**0.5
        made = {name: x.to(machine.dtype) for name, x in made.items()}
        if self.gated:
            pairs = (dim // 2,) if self.vector_gate else ()
            made["log_gamma"] = torch.nn.functional.logsigmoid(normal(self.key_heads, *pairs) + 4)
        if self.rotation != "none":
            made["theta"] = rotary_rates(dim, 65_536).float()
        if self.rotation in ("scale", "pairs"):
            scales = (dim // 2,) if self.rotation == "pairs" else ()
            made["beta"] = 1 + torch.tanh(normal(self.key_heads, *scales))
        return {name: x.to(machine.device) for name, x in made.items()}


def decoding(machine: Machine, *, power: int, dim: int | None = None, window: bool = False) -> Comparison:
    """Decoding token by token: from a state alone, or with a window that is folded into the state several times."""
    operator = OperatorCall("attention", power=power, dim=dim, heads=4)
    length, prompt = 48, 16
    inputs = operator.inputs(machine, length)
    _, state = attention(**_tokens(inputs, 0, prompt), power=power, return_state=True, backend=machine.backend)
    steps = [_tokens(inputs, i, i + 1) for i in range(prompt, length)]
    outputs = []
    if window:
        held = Window.open(state, capacity=8, dtype=machine.dtype)
        outputs = [held.step(**token, backend=machine.backend) for token in steps]
    else:
        for token in steps:
            y, state = attention(
                **token, power=power, initial_state=state, return_state=True, form="recurrent", backend=machine.backend
            )
            outputs.append(y)
    return _compare_rows(torch.cat(outputs, dim=1), inputs, partial(plain_attention, power=power), prompt, machine)


def decode_softmax(machine: Machine) -> Comparison:
    """Decoding with the softmax baseline and its KV cache."""
    inputs = OperatorCall("attention", heads=4).inputs(machine, 48)
    prompt = 16
    _, state = softmax_attention(**_tokens(inputs, 0, prompt), return_state=True)
    cache = KeyValueCache.open(state, capacity=48)
    tokens = [_tokens(inputs, i, i + 1) for i in range(prompt, 48)]
    y = torch.cat([cache.step(**token, backend=machine.backend) for token in tokens], dim=1)
    return _compare_rows(y, inputs, plain_softmax_attention, prompt, machine)


def _compare_rows(y: Tensor, inputs: Tensors, plain: Callable[..., Tensor], first: int, machine: Machine) -> Comparison:
    """Outputs from position `first` on, without gradients."""
    return Comparison({"y": y}, *({"y": plain(**x)[:, first:]} for x in _in_both_dtypes(inputs, machine)))


def cross_entropy(machine: Machine) -> Comparison:
    """The fused linear cross-entropy, and its gradients."""
    generator = _generator(machine)
    features, weight = torch.randn(60, 32, generator=generator), torch.randn(1_003, 32, generator=generator)
    targets = torch.randint(1_003, (60,), generator=generator).to(machine.device)
    inputs = {"features": features, "weight": weight}
    inputs = {name: x.to(machine.device, machine.dtype) for name, x in inputs.items()}

    def plain(x: Tensors) -> Tensor:
        logits = x["features"] @ x["weight"].mT
        return torch.nn.functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)

    return Comparison(
        _with_gradients(inputs, lambda x: linear_cross_entropy(x["features"], x["weight"], targets), None),
        _with_gradients({name: x.double() for name, x in inputs.items()}, plain, None),
        _with_gradients(inputs, plain, None),
    )


def in_place_cross_entropy(machine: Machine) -> Comparison:
    """Cross-entropy that overwrites the logits with their gradient; the last columns pad the vocabulary."""
    from sympow.kernels.cross_entropy import cross_entropy_in_place

    rows, vocabulary = 20, 1_003
    generator = _generator(machine)
    logits = torch.randn(rows, 1_024, generator=generator).to(machine.device, machine.dtype)
    targets = torch.randint(vocabulary, (rows,), generator=generator).to(machine.device)

    def plain(dtype: torch.dtype) -> Tensors:
        # As in PyTorch, half precision is computed in float32, and the gradient rounded.
        wide = logits.to(torch.promote_types(dtype, torch.float32))
        losses, gradient = cross_entropy_reference(wide, targets, vocabulary, 1 / rows)
        return {"y": losses.mean(), "gradient of logits": gradient.to(dtype)}

    gradient = logits.clone()
    losses = cross_entropy_in_place(gradient, targets, vocabulary, 1 / rows)
    actual = {"y": losses.mean(), "gradient of logits": gradient}
    return Comparison(actual, plain(torch.float64), plain(machine.dtype))


def running_gate_sums(machine: Machine) -> Comparison:
    """Running sums of log γ over more tokens than one program instance adds up, whole and split."""
    from sympow.kernels.running_sums import gate_sums

    log_gamma = torch.nn.functional.logsigmoid(torch.randn(2, 2_500, 3, generator=_generator(machine)) + 4)
    log_gamma = log_gamma.to(machine.device)

    gates = gate_sums(log_gamma)
    split = math.log(2) * (gates.split.whole.double() + gates.split.rest)[..., : log_gamma.shape[1]]
    exact, in_float32 = running_sum_reference(log_gamma), log_gamma.cumsum(1).transpose(1, 2)
    return Comparison(
        {"sums": gates.sums, "split": split}, {"sums": exact, "split": exact}, {"sums": in_float32, "split": in_float32}
    )


def gates_of_one_token(machine: Machine) -> Comparison:
    """log γ and β of one token, projected from the layer's input."""
    from sympow.kernels.decode.gate_projection import step_gates

    generator = _generator(machine)
    shapes = {"x": (5, 96), "gate_weight": (12, 96), "gate_bias": (12,), "rotation_weight": (12, 96)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    made = {name: (0.1 * x if "weight" in name else x).to(machine.device) for name, x in made.items()}
    made["x"] = made["x"].to(machine.dtype)

    def named(pair: tuple[Tensor, Tensor]) -> Tensors:
        return {"log_gamma": pair[0], "beta": pair[1]}

    return Comparison(
        named(step_gates(*made.values())),
        named(step_gates_reference(**{name: x.double() for name, x in made.items()})),
        named(step_gates_reference(**{name: x.float() for name, x in made.items()})),
    )


def state_messages(machine: Machine) -> Comparison:
    """Message packing of states for context parallelism: from the kernels' layout to a message and back."""
    from sympow.kernels.states.full_state import FullState
    from sympow.kernels.states.message_packing import pack, unpack

    batch, heads, dim, value_dim = shape = (2, 3, 32, 32)
    numbers = batch * heads * symmetric_dim(dim, 2) * (value_dim + 1)
    made = torch.randn(numbers, generator=_generator(machine), dtype=torch.float64).to(machine.device)

    def plain(dtype: torch.dtype) -> Tensors:
        kv, normalizer, _ = unpack_reference(made.to(dtype), shape)
        return {"unpacked": kv, "message": pack_reference(kv, normalizer)}

    kv, normalizer, _ = unpack_reference(made.float(), shape)
    message = pack(FullState(kv, normalizer))
    unpacked = unpack(message.unsqueeze(0), shape)
    return Comparison({"unpacked": unpacked.kv, "message": message}, plain(torch.float64), plain(torch.float32))


def in_pieces(machine: Machine) -> Comparison:
    """The attention form for float32 by products of float16; on a GPU, what such calls run on."""
    from sympow.kernels.attention import split_float32

    on_cpu, split_float32.ON_CPU = split_float32.ON_CPU, True
    try:
        return OperatorCall("attention", dtype=torch.float32, key_heads=1).compare(machine)
    finally:
        split_float32.ON_CPU = on_cpu


def cases(machine: Machine) -> dict[str, Callable[[Machine], Comparison]]:
    """All checks of a machine, by name."""
    operators = {
        "attention form, p = 2": OperatorCall("attention"),
        "attention form, p = 4": OperatorCall("attention", power=4, dim=machine.dim // 2),
        "attention form, no gates, RoPE": OperatorCall("attention", gated=False, rotation="fixed"),
        f"attention form, heads of {3 * machine.dim // 4}, β per pair": OperatorCall(
            "attention", dim=3 * machine.dim // 4, value_dim=24, rotation="pairs"
        ),
        f"attention form, heads of {2 * machine.dim}, grouped": OperatorCall(
            "attention", dim=2 * machine.dim, heads=4, key_heads=1
        ),
        "attention form, packed documents": OperatorCall("attention", packed=True),
        "attention form, a gate per pair": OperatorCall("attention", vector_gate=True, heads=4),
        "chunked form, p = 2": OperatorCall("chunked", heads=4),
        "chunked form, p = 2, no gates": OperatorCall("chunked", gated=False, rotation="none"),
        "chunked form, p = 2, a state between two calls": OperatorCall("chunked", continued=True),
        "chunked form, p = 2, packed documents": OperatorCall("chunked", packed=True, dim=machine.dim // 2),
        "chunked form, a gate per pair": OperatorCall("chunked", vector_gate=True, times=2),
        # Three chunks at least: the gradient of a gate is corrected at each state carried between two of them.
        "chunked form, p = 4": OperatorCall("chunked", power=4, dim=16, heads=1, key_heads=1, times=2),
    }
    if machine.on_kernels:
        operators |= {
            f"float16, {name}": replace(operators[name], dtype=torch.float16)
            for name in ("attention form, p = 2", "attention form, p = 4", "chunked form, p = 2")
        }
    if machine.device == "cuda":
        others = (
            "attention form, p = 2",
            "attention form, p = 4",
            f"attention form, heads of {2 * machine.dim}, grouped",
            "attention form, packed documents",
            "chunked form, p = 2",
            "chunked form, p = 2, a state between two calls",
            "chunked form, p = 4",
        )
        operators |= {f"float32, {name}": replace(operators[name], dtype=torch.float32) for name in others}
        continued = replace(operators["chunked form, p = 2, a state between two calls"], dtype=torch.float16)
        operators |= {"float16, chunked form, p = 2, a state between two calls": continued}
        operators |= {
            "attention form, p = 4, heads of 64": OperatorCall("attention", power=4),
            # Beyond 4,096 tokens the drift of the gates' gradient is corrected at several positions.
            "attention form, p = 2, long": OperatorCall("attention", times=7),
            "chunked form, p = 2, heads of 128, grouped": OperatorCall("chunked", dim=128, heads=4, key_heads=1),
            "chunked form, p = 4, heads of 32": OperatorCall("chunked", power=4, dim=32),
        }
    if not machine.on_kernels:
        operators["recurrent form, p = 2"] = OperatorCall("recurrent", dim=16)
    found: dict[str, Callable[[Machine], Comparison]] = {name: case.compare for name, case in operators.items()}
    found |= {
        "decoding, p = 2": lambda m: decoding(m, power=2),
        "decoding, p = 4": lambda m: decoding(m, power=4, dim=min(16, m.dim // 2)),
        "decoding with a window, p = 2": lambda m: decoding(m, power=2, window=True),
        "decoding with a window, p = 4": lambda m: decoding(m, power=4, dim=min(16, m.dim // 2), window=True),
        "decoding with softmax and a KV cache": decode_softmax,
        "cross-entropy of a vocabulary": cross_entropy,
    }
    if machine.on_kernels:
        found |= {
            "float32 in pieces, attention form": in_pieces,
            "cross-entropy, in place": in_place_cross_entropy,
            "gates of one token": gates_of_one_token,
            "running sums of gates": running_gate_sums,
            "states in messages between ranks": state_messages,
        }
    return found


def check_accuracy(machine: Machine) -> Iterator[Outcome]:
    """Runs all cases, one after the other."""
    failures = _launch_failures(machine)
    for name, case in cases(machine).items():
        try:
            yield case(machine).outcome(name, FLOORS[_dtype(name, machine)])
        except failures as error:
            yield Outcome(name, problem=f"{type(error).__name__}: {error}".splitlines()[0])


def _dtype(name: str, machine: Machine) -> torch.dtype:
    """The dtype of a check: that which its name begins with, or the machine's."""
    named = (dtype for dtype in FLOORS if name.startswith(str(dtype).removeprefix("torch.")))
    return next(named, machine.dtype)


def _launch_failures(machine: Machine) -> tuple[type[Exception], ...]:
    """Exceptions of a kernel that does not compile, needs more resources than the GPU has, or cannot be launched."""
    if not machine.on_kernels:
        return (RuntimeError,)
    from triton.errors import TritonError

    return RuntimeError, TritonError


def _with_gradients(inputs: Tensors, call: Callable[[Tensors], Tensor], seed: Tensor | None) -> Tensors:
    """y, and its vector-Jacobian product with `seed` for each input; seed None: y is a scalar."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    with torch.enable_grad():
        y = call(leaves)
        weights = None if seed is None else seed.to(y.device, y.dtype)
        found = torch.autograd.grad(y, list(leaves.values()), weights)
    return {"y": y.detach(), **{f"gradient of {name}": x for name, x in zip(leaves, found, strict=True)}}


def _in_both_dtypes(inputs: Tensors, machine: Machine) -> Iterator[Tensors]:
    """The inputs in float64, and with queries, keys and values in the machine's dtype."""
    for dtype in (torch.float64, machine.dtype):
        yield {name: x.to(dtype) if name in "qkv" else x.double() for name, x in inputs.items()}


def _tokens(inputs: Tensors, start: int, stop: int | None) -> Tensors:
    return {name: x if name == "theta" else x[:, start:stop] for name, x in inputs.items()}


def _generator(machine: Machine) -> torch.Generator:
    return torch.Generator().manual_seed(machine.seed)


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> Tensor:
    """Y_i = Σ_j B_ij V_j / Σ_j B_ij with B_ij = b_ij (R(c_ij θ) Q_i · K_j)^p (paper §3.3), in the dtype of q.

    Args:
        q, k, v, log_gamma, beta, theta: as in `sympow.attention`.
        power: p.
        documents: lengths of packed documents; None: one document.
    """
    document_start = None
    if documents is not None:
        starts = itertools.accumulate(documents[:-1], initial=0)
        document_start = torch.tensor(list(starts)).repeat_interleave(torch.tensor(documents)).to(q.device)
    if theta is not None:
        q, k = rotation_reference(q, k, beta, theta, document_start=document_start)
    if log_gamma is not None and log_gamma.ndim == 4:
        return pair_attention_reference(q, k, v, log_gamma, power, document_start=document_start)[0]
    return attention_reference(q, k, v, log_gamma, power, document_start=document_start)[0]


def plain_softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
) -> Tensor:
    """Softmax attention token by token: B_ij = b_ij exp(R(c_ij θ) Q_i · K_j / √d), in the dtype of q."""
    keys, values = k[:, :0].transpose(1, 2), v[:, :0].transpose(1, 2)
    sums = None if log_gamma is None else log_gamma[:, :0].transpose(1, 2).double()
    phase = None if theta is None else theta.new_zeros(*k[:, 0, :, 0].shape, len(theta), dtype=torch.float64)
    rows = []
    for i in range(q.shape[1]):
        gate, scale = (None if x is None else x[:, i] for x in (log_gamma, beta))
        y, keys, values, sums, phase = softmax_step_reference(
            q[:, i], k[:, i], v[:, i], gate, scale, theta, keys, values, sums, phase
        )
        rows.append(y)
    return torch.stack(rows, dim=1)
