"""Context parallelism: `sympow.attention`, and the softmax baseline, on a sequence sharded over several ranks.

Every rank
1. learns the phase at its first token, the sum of the rotations of earlier ranks (one collective of d/2 numbers per
   head; none with a fixed rotation, whose phase follows from the position);
2. folds its own tokens into a state, starting from zero;
3. sends it on: an exclusive scan of (decay, S, Z) over the ranks (`sympow.parallel.scan`);
4. attends to its own tokens and to the received state, as any call with an `initial_state` does.
Steps 2 to 4 are done for each half of the batch, or of the heads (`sympow.parallel.overlap`), so that communication of
one half overlaps with compute of the other. The size of messages does not depend on the number of tokens. In the
backward pass gradients of states travel in the opposite direction, again overlapped: autograd runs the half that came
last in the forward pass first.

Softmax has no state of fixed size: every rank gathers keys, values and gates of all ranks, and attends to them with its
own queries. Communication grows with the context, and later ranks have more keys: this is for comparison. torch's own
context parallelism (`torch.distributed.tensor.experimental`) replaces only the CUDA kernels of
`scaled_dot_product_attention`, for one document in equal shards without gates; this supports every backend, packed
documents, uneven shards and gates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sympow.checks import check_bool
from sympow.errors import ArgumentError
from sympow.ops import interface as operator
from sympow.ops.inputs import Inputs
from sympow.ops.numerics import without_autocast
from sympow.ops.rotary import unwrapped_phase_after, wrap_angle
from sympow.ops.rotation import rotate_inputs
from sympow.ops.state import State
from sympow.ops.torch import softmax
from sympow.ops.torch.forms import fold
from sympow.ops.torch.softmax import CLOSED_GATE, KeyValueState
from sympow.ops.validation import check_state, check_tensors
from sympow.parallel.collectives import along_time, attach, from_last, sum_before
from sympow.parallel.fused_attention import fused_shard_attention, rotate_shard, runs_fused
from sympow.parallel.overlap import Half, halves_of, split
from sympow.parallel.scan import StateScan, passing_decay
from sympow.parallel.shards import Shard, Shards, as_shards
from sympow.settings import Backend, Form, check_power, symmetric_dim


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int = 2,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    *,
    shards: Shards | dist.ProcessGroup | DeviceMesh,
    initial_state: State | None = None,
    return_state: Literal[False] = False,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int = 2,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    *,
    shards: Shards | dist.ProcessGroup | DeviceMesh,
    initial_state: State | None = None,
    return_state: Literal[True],
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> tuple[Tensor, State]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    power: int = 2,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    *,
    shards: Shards | dist.ProcessGroup | DeviceMesh,
    initial_state: State | None = None,
    return_state: bool = False,
    form: Form = "auto",
    backend: Backend = "auto",
    chunk_size: int | None = None,
) -> Tensor | tuple[Tensor, State]:
    """`sympow.attention` of a sharded sequence: every rank passes and gets its own tokens.

    A collective: all ranks of the group make the call, and run its backward pass. Outputs and gradients are those of
    one call on the whole sequence, where the loss is the sum of the ranks' losses. Tensors that ranks have in common
    (`theta`, `initial_state`) get a partial gradient on each rank, to be summed, as parameters do in data parallelism.

    Args:
        q, k, v, power, log_gamma, beta, theta, form, backend, chunk_size: as in `sympow.attention`, this rank's tokens
            along the second axis.
        shards: which rank has which tokens and documents; or a process group or mesh, whose ranks then exchange their
            numbers of tokens.
        initial_state: before the whole sequence, the same on every rank; not with packed documents.
        return_state: whether to return (y, state), with the state after the whole sequence on every rank; not with
            packed documents.

    Returns:
        y (b, t, h, e) of this rank's tokens; with `return_state` also the state.

    Example:
        >>> shards = Shards.even(1_000_000, mesh["cp"])  # doctest: +SKIP
        >>> y = attention(q, k, v, log_gamma=log_gamma, shards=shards)  # doctest: +SKIP
    """
    states: dict[str, Any] = {"initial_state": initial_state, "return_state": return_state}
    execution: dict[str, Any] = {"form": form, "backend": backend, "chunk_size": chunk_size}
    # A single rank calls the operator directly. Not under torch.compile, which does not trace process groups.
    alone = isinstance(shards, Shards) and shards.size == 1 and shards.cu_seqlens is None
    if alone and not torch.compiler.is_compiling():
        return operator.attention(q, k, v, power, log_gamma, beta, theta, None, **states, **execution)
    return _attention_on_shards(Inputs(q, k, v, log_gamma, beta, theta, power), shards, states, execution)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention_on_shards(
    inputs: Inputs,
    shards: Shards | dist.ProcessGroup | DeviceMesh,
    states: dict[str, Any],
    execution: dict[str, Any],
) -> Tensor | tuple[Tensor, State]:
    """`attention`, its arguments not yet checked."""
    q, k, v, power, theta = inputs.q, inputs.k, inputs.v, inputs.power, inputs.theta
    initial_state, return_state = states["initial_state"], states["return_state"]
    shards = as_shards(shards, q.shape[1])
    if shards.cu_seqlens is not None and (initial_state is not None or return_state):
        raise ArgumentError("initial_state", "and return_state cannot be combined with shards of packed documents")
    if shards.size == 1:
        documents = None if shards.cu_seqlens is None else shards.cu_seqlens.to(q.device)
        return operator.attention(**_arguments(inputs), cu_seqlens=documents, **states, **execution)
    check_power(power)
    check_bool("return_state", return_state)
    check_tensors(q, k, v, inputs.log_gamma, inputs.beta, theta)
    shards.check_length("q", q.shape[1])
    if shards.cu_seqlens is not None and q.shape[0] != 1:
        raise ArgumentError("cu_seqlens", f"packs documents into one row, so the batch must be 1; got {q.shape[0]}")
    if initial_state is not None:
        check_state(initial_state, q, k, v, power, theta is not None, None)
    with without_autocast(q.device):
        y, state = _Call(inputs, shards, initial_state, return_state, execution).run()
    if not return_state:
        return y
    assert state is not None
    return y, state


@dataclass(frozen=True)
class _Call:
    """One call on more than one rank."""

    inputs: Inputs
    shards: Shards
    initial_state: State | None
    return_state: bool
    execution: dict[str, Any]

    @cached_property
    def shard(self) -> Shard:
        return self.shards.shard(preceded=self.initial_state is not None, followed=self.return_state)

    @property
    def own_start(self) -> State | None:
        """The initial state of the whole sequence, on the first rank."""
        return self.initial_state if self.shards.rank == 0 else None

    @cached_property
    def anchor(self) -> Tensor:
        """A tensor that requires a gradient if any tensor of the call does, on whichever rank it is used."""
        members = [*_arguments(self.inputs).values()]
        if self.initial_state is not None:
            members += self.initial_state._tensors().values()
        return next((x for x in members if isinstance(x, Tensor) and x.requires_grad), self.inputs.k)

    @cached_property
    def halves(self) -> list[Half]:
        return halves_of(self.inputs.batch, self.inputs.key_heads)

    def run(self) -> tuple[Tensor, State | None]:
        """y of this rank's tokens, and the state after the whole sequence if `return_state`."""
        phase = self._phase()
        plain = self.initial_state is None and not self.return_state
        if plain and runs_fused(self.inputs, self.shard, **self.execution):
            # Kernels wrap angles themselves.
            rotated, size = rotate_shard(self.inputs, phase), self.execution["chunk_size"]
            return fused_shard_attention(rotated, self.shard, self.shards, self.halves, size), None
        phase = None if phase is None else wrap_angle(phase)
        outputs, states = zip(*(end() for end in self._start(phase)), strict=True)
        # Every rank must take part in the backward pass of the phase, even if its outputs do not depend on it.
        y = torch.cat(outputs, dim=self.halves[0].token_dim)
        if phase is not None:
            y = attach(y, phase)
        if not self.return_state:
            return y, None
        after = self._from_last(states)
        return attach(y, after.kv, after.normalizer, *([] if after.phase is None else [after.phase])), after

    def _phase(self) -> Tensor | None:
        """μ before this rank's first token, not wrapped, (b, h_kv, d/2) float64; None without rotation."""
        inputs, theta, shard = self.inputs, self.inputs.theta, self.shard
        if theta is None:
            return None
        if inputs.beta is None:
            before = None if self.initial_state is None else self.initial_state.phase
            phase = unwrapped_phase_after(theta, None, before, shard.tokens_before)
            return phase.expand(inputs.batch, inputs.key_heads, -1)
        beta = inputs.beta[:, shard.last]
        own = None if self.own_start is None else self.own_start.phase
        advanced = unwrapped_phase_after(theta, beta, own, beta.shape[1])
        phase = sum_before(self.anchor, advanced, self.shards, preceded=self.initial_state is not None)
        return phase if own is None else attach(own, phase)

    def _start(self, phase: Tensor | None) -> list[Callable[[], tuple[Tensor, State | None]]]:
        """Folds the last slice of this rank's tokens and starts the scan, for each half.

        Returns:
            for each half a function that waits for the received state and returns outputs.
        """
        return [
            self._start_half(inputs, half, None if phase is None else half.heads(phase))
            for inputs, half in zip(split(self.inputs, self.halves), self.halves, strict=True)
        ]

    def _start_half(
        self, inputs: Inputs, half: Half, phase: Tensor | None
    ) -> Callable[[], tuple[Tensor, State | None]]:
        scan = self._fold(inputs, half, phase)
        return lambda: self._finish(inputs, half, phase, scan)

    def _fold(self, inputs: Inputs, half: Half, phase: Tensor | None) -> StateScan:
        shard, state = self.shard, half.state(self.own_start)
        last = inputs[shard.last]
        if not shard.continues_later or (last.length == 0 and state is None):
            state = _zero_state(inputs)
        elif last.length:
            whole = len(shard.offsets) == 2
            state = fold(last, state, phase if whole else None)
        assert state is not None
        log_decay = passing_decay(inputs, shard, self.shards)
        return StateScan(self.anchor, state.kv, state.normalizer, log_decay, inputs.power, self.shards)

    def _finish(self, inputs: Inputs, half: Half, phase: Tensor | None, scan: StateScan) -> tuple[Tensor, State | None]:
        """Outputs of this rank's tokens; with `return_state` also the state after them, used only on the last rank."""
        kv, normalizer = scan.wait()
        incoming = State(kv, normalizer, phase, power=inputs.power, key_dim=inputs.key_dim)
        state = incoming if self.shard.continues else half.state(self.own_start)
        after: State | None = incoming
        if self.return_state and self.shards.rank == self.shards.size - 1:
            y, after = operator.attention(
                **_arguments(inputs), initial_state=state, return_state=True, **self.execution
            )
        else:
            outputs = [
                operator.attention(**_arguments(inputs[tokens]), **options, **self.execution)
                for tokens, options in self._calls(state)
            ]
            y = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        # As for the phase: the first rank does not use the received state.
        return attach(y, kv, normalizer), after

    def _calls(self, state: State | None) -> list[tuple[slice, dict[str, Any]]]:
        """Tokens and arguments of each call: the first slice, perhaps with an initial state, and the others, packed."""
        first, *others = self.shard.offsets[1:]
        if not others:
            return [(slice(0, first), {"initial_state": state})]
        start = first if state is not None else 0
        offsets = [x - start for x in ((first, *others) if state is not None else (0, first, *others))]
        # On the host, where offsets are read if documents are computed one by one.
        packed = (slice(start, None), {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)})
        return [packed] if state is None else [(slice(0, first), {"initial_state": state}), packed]

    def _from_last(self, states: Iterable[State | None]) -> State:
        """Broadcasts the last rank's state, from the states of its halves; on other ranks only their shapes matter."""
        known, dim = [state for state in states if state is not None], self.halves[0].state_dim
        kv, normalizer = (
            from_last(torch.cat([getattr(state, name) for state in known], dim=dim), self.shards)
            for name in ("kv", "normalizer")
        )
        phases = [state.phase for state in known if state.phase is not None]
        phase = from_last(torch.cat(phases, dim=dim), self.shards) if phases else None
        return State(kv, normalizer, phase, power=self.inputs.power, key_dim=self.inputs.key_dim)


def _zero_state(inputs: Inputs) -> State:
    """The state of no tokens; without a phase, which is not used."""
    shape = (inputs.batch, inputs.key_heads, symmetric_dim(inputs.key_dim, inputs.power))
    kv = inputs.k.new_zeros(*shape, inputs.value_dim, dtype=inputs.compute_dtype)
    return State(kv, kv.new_zeros(shape), None, power=inputs.power, key_dim=inputs.key_dim)


def _arguments(inputs: Inputs) -> dict[str, Any]:
    return {field.name: getattr(inputs, field.name) for field in fields(inputs)}


@torch.compiler.disable  # type: ignore[untyped-decorator]
def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_gamma: Tensor | None = None,
    beta: Tensor | None = None,
    theta: Tensor | None = None,
    *,
    shards: Shards | dist.ProcessGroup | DeviceMesh,
    initial_state: KeyValueState | None = None,
    return_state: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Softmax attention of a whole sequence; arguments and shapes as in `sympow.parallel.attention`.

    Without states and masks: a cache of keys and values of the whole sequence would have to be on every rank.
    """
    shards = as_shards(shards, q.shape[1])
    for name, given in (("initial_state", initial_state is not None), ("return_state", return_state)):
        if given:
            raise ArgumentError(
                name,
                "cannot be combined with shards in softmax attention: its state would be the keys and values "
                "of all ranks",
            )
    if mask is not None:
        raise ArgumentError("mask", "cannot be combined with shards in softmax attention")
    if shards.size == 1:
        documents = None if shards.cu_seqlens is None else shards.cu_seqlens.to(q.device)
        return softmax.softmax_attention(q, k, v, log_gamma, beta, theta, documents)
    check_tensors(q, k, v, log_gamma, beta, theta)
    shards.check_length("q", q.shape[1])
    if log_gamma is not None and log_gamma.ndim == 4:
        log_gamma = log_gamma.mean(-1)
    k, v = along_time(k, shards), along_time(v, shards)
    log_gamma, beta = (None if x is None else along_time(x, shards) for x in (log_gamma, beta))
    # Keys in place of queries, of which a rank needs only its own.
    everything = Inputs(k, k, v, log_gamma, beta, theta, power=1)
    shard, outputs = shards.shard(), []
    for number, (begin, end) in enumerate(pairwise(shard.offsets)):
        start, stop = shards.start + begin, shards.start + end
        past = None
        if number == 0 and shard.continues:
            past = _cache(everything[start - shard.tokens_before : start])
        own = everything[start:stop]
        outputs.append(
            softmax.softmax_attention(q[:, begin:end], own.k, own.v, own.log_gamma, own.beta, theta, initial_state=past)
        )
    gathered = [x for x in (k, v, log_gamma, beta) if x is not None]
    return attach(torch.cat(outputs, dim=1), *gathered)


def _cache(inputs: Inputs) -> KeyValueState:
    """The key-value cache of these tokens."""
    _, k, phase = rotate_inputs(inputs, None)
    decay = None
    if inputs.log_gamma is not None:
        decay = inputs.log_gamma.to(torch.float64).clamp(min=CLOSED_GATE).cumsum(1)
    return KeyValueState(k, inputs.v, decay, phase)
