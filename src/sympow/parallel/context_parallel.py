"""`sympow.attention` on a sequence whose tokens lie on several ranks.

Every rank
1. learns the phase at its first token: the sum of what earlier ranks turn (one exchange of d/2 numbers a head; none
   where the rotation is fixed, since then it follows from the position);
2. folds its own tokens into a state, starting from nothing;
3. passes it on: an exclusive scan of (decay, S, Z) over the ranks (`sympow.parallel.scan`);
4. attends to its own tokens and to the state that came, as any call that continues a sequence does.
Sequences go through 2 to 4 in two halves (`sympow.parallel.overlap`), so that states of one are on their way while the
other is folded or attended to.
What is sent does not depend on the number of tokens. In the backward pass gradients of states go the other way, again
behind the work on the other half: autograd runs what was recorded last first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sympow.ops import interface as operator
from sympow.ops.dispatch import Backend, Form
from sympow.ops.numerics import without_autocast
from sympow.ops.rotary import unwrapped_phase_after, wrap_angle
from sympow.ops.sequence import Sequence
from sympow.ops.state import State
from sympow.ops.symmetric import symmetric_dim
from sympow.ops.torch.forms import fold
from sympow.ops.validation import check_bool, check_power, check_state, check_tensors
from sympow.parallel.collectives import attach, from_last, sum_before
from sympow.parallel.fused_attention import fused_shard_attention, fused_shard_serves, turn
from sympow.parallel.overlap import Half, halves_of, split
from sympow.parallel.scan import StateScan, passing_decay
from sympow.parallel.shards import Portion, Shards, as_shards


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
    """`sympow.attention` of a whole sequence, of which every rank gives and gets its own tokens.

    All ranks of the group make the call together, and run its backward pass together. Outputs and gradients are those
    of one call on the whole sequence, where the loss is the sum of the ranks' losses. What ranks have in common
    (`theta`, `initial_state`) gets a share of its gradient on each, as parameters do in data-parallel training.

    Args:
        q, k, v, power, log_gamma, beta, theta, form, backend, chunk_size: as in `sympow.attention`, this rank's tokens
            along the second axis.
        shards: which tokens and documents are whose; or a process group or mesh whose ranks tell each other how many
            tokens they have.
        initial_state: what came before the whole sequence, the same on every rank; not with packed documents.
        return_state: whether to return (y, state), with the state after the whole sequence on every rank; not with
            packed documents.

    Returns:
        y (b, t, h, e) of this rank's tokens; with `return_state` also the state.

    Example:
        >>> shards = Shards.even(1_000_000, mesh["cp"])  # doctest: +SKIP
        >>> y = attention(q, k, v, log_gamma=log_gamma, shards=shards)  # doctest: +SKIP
    """
    states: dict[str, Any] = {"initial_state": initial_state, "return_state": return_state}
    how: dict[str, Any] = {"form": form, "backend": backend, "chunk_size": chunk_size}
    # One rank should not pay for what several need. A compiler that traces this has no business with process groups.
    alone = isinstance(shards, Shards) and shards.size == 1 and shards.cu_seqlens is None
    if alone and not torch.compiler.is_compiling():
        return operator.attention(q, k, v, power, log_gamma, beta, theta, None, **states, **how)
    return _attention_on_shards(Sequence(q, k, v, log_gamma, beta, theta, power), shards, states, how)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attention_on_shards(
    sequence: Sequence,
    shards: Shards | dist.ProcessGroup | DeviceMesh,
    states: dict[str, Any],
    how: dict[str, Any],
) -> Tensor | tuple[Tensor, State]:
    """`attention`, its arguments not yet checked."""
    q, k, v, power, theta = sequence.q, sequence.k, sequence.v, sequence.power, sequence.theta
    initial_state, return_state = states["initial_state"], states["return_state"]
    shards = as_shards(shards, q.shape[1])
    if shards.cu_seqlens is not None and (initial_state is not None or return_state):
        raise ValueError("initial_state and return_state cannot go with shards of packed documents")
    if shards.size == 1:
        documents = None if shards.cu_seqlens is None else shards.cu_seqlens.to(q.device)
        return operator.attention(**_arguments(sequence), cu_seqlens=documents, **states, **how)
    check_power(power)
    check_bool("return_state", return_state)
    check_tensors(q, k, v, sequence.log_gamma, sequence.beta, theta)
    shards.check_length("q", q.shape[1])
    if shards.cu_seqlens is not None and q.shape[0] != 1:
        raise ValueError(f"cu_seqlens packs documents into one row, so the batch must be 1; got {q.shape[0]}")
    if initial_state is not None:
        check_state(initial_state, q, k, v, power, theta is not None, None)
    with without_autocast(q.device):
        y, state = _Call(sequence, shards, initial_state, return_state, how).run()
    if not return_state:
        return y
    assert state is not None
    return y, state


@dataclass(frozen=True)
class _Call:
    """One call on more than one rank."""

    sequence: Sequence
    shards: Shards
    initial_state: State | None
    return_state: bool
    how: dict[str, Any]

    @cached_property
    def portion(self) -> Portion:
        return self.shards.portion(preceded=self.initial_state is not None, followed=self.return_state)

    @property
    def own_start(self) -> State | None:
        """What came before the whole sequence, where it is this rank's to begin with."""
        return self.initial_state if self.shards.rank == 0 else None

    @cached_property
    def halves(self) -> list[Half]:
        return halves_of(self.sequence.batch, self.sequence.key_heads)

    def run(self) -> tuple[Tensor, State | None]:
        """y of this rank's tokens, and the state after all ranks' if asked for."""
        phase = self._phase()
        plain = self.initial_state is None and not self.return_state
        if plain and fused_shard_serves(self.sequence, self.portion, **self.how):
            # Kernels leave whole turns out themselves.
            turned, size = turn(self.sequence, phase), self.how["chunk_size"]
            return fused_shard_attention(turned, self.portion, self.shards, self.halves, size), None
        phase = None if phase is None else wrap_angle(phase)
        outputs, states = zip(*(end() for end in self._start(phase)), strict=True)
        # Whether its outputs depend on it or not, every rank must take part in the backward pass of the phase.
        y = torch.cat(outputs, dim=self.halves[0].token_dim)
        if phase is not None:
            y = attach(y, phase)
        if not self.return_state:
            return y, None
        after = self._from_last(states)
        return attach(y, after.kv, after.normalizer, *([] if after.phase is None else [after.phase])), after

    def _phase(self) -> Tensor | None:
        """μ before this rank's first token, whole turns included, (b, h_kv, d/2) float64; None without rotation."""
        sequence, theta, portion = self.sequence, self.sequence.theta, self.portion
        if theta is None:
            return None
        if sequence.beta is None:
            before = None if self.initial_state is None else self.initial_state.phase
            phase = unwrapped_phase_after(theta, None, before, portion.before)
            return phase.expand(sequence.batch, sequence.key_heads, -1)
        beta = sequence.beta[:, portion.last]
        own = None if self.own_start is None else self.own_start.phase
        turned = unwrapped_phase_after(theta, beta, own, beta.shape[1])
        phase = sum_before(_anchor(sequence), turned, self.shards, preceded=self.initial_state is not None)
        return phase if own is None else attach(own, phase)

    def _start(self, phase: Tensor | None) -> list[Callable[[], tuple[Tensor, State | None]]]:
        """Folds the last piece of this rank's tokens and passes it on, half by half.

        Returns:
            for each half what waits for the state that comes, and gives outputs.
        """
        return [
            self._start_half(part, half, None if phase is None else half.heads(phase))
            for part, half in zip(split(self.sequence, self.halves), self.halves, strict=True)
        ]

    def _start_half(
        self, part: Sequence, half: Half, phase: Tensor | None
    ) -> Callable[[], tuple[Tensor, State | None]]:
        scan = self._fold(part, half, phase)
        return lambda: self._finish(part, half, phase, scan)

    def _fold(self, part: Sequence, half: Half, phase: Tensor | None) -> StateScan:
        portion, state = self.portion, half.state(self.own_start)
        last = part[portion.last]
        if not portion.goes_on or (last.length == 0 and state is None):
            state = _nothing(part)
        elif last.length:
            whole = len(portion.offsets) == 2
            state = fold(last, state, phase if whole else None)
        assert state is not None
        log_decay = passing_decay(part, portion, self.shards)
        return StateScan(_anchor(self.sequence), state.kv, state.normalizer, log_decay, part.power, self.shards)

    def _finish(self, part: Sequence, half: Half, phase: Tensor | None, scan: StateScan) -> tuple[Tensor, State | None]:
        """Outputs of this rank's tokens; if a state is asked for, the one they leave, which counts on the last rank."""
        kv, normalizer = scan.wait()
        incoming = State(kv, normalizer, phase, power=part.power, key_dim=part.key_dim)
        state = incoming if self.portion.continues else half.state(self.own_start)
        after: State | None = incoming
        if self.return_state and self.shards.rank == self.shards.size - 1:
            y, after = operator.attention(**_arguments(part), initial_state=state, return_state=True, **self.how)
        else:
            outputs = [
                operator.attention(**_arguments(part[stretch]), **options, **self.how)
                for stretch, options in self._stretches(state)
            ]
            y = torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]
        # As for the phase: the first rank, for one, has no use for what came.
        return attach(y, kv, normalizer), after

    def _stretches(self, state: State | None) -> list[tuple[slice, dict[str, Any]]]:
        """The first piece, which may go on from a state, and the others, which share a call."""
        first, *others = self.portion.offsets[1:]
        if not others:
            return [(slice(0, first), {"initial_state": state})]
        start = first if state is not None else 0
        offsets = [x - start for x in ((first, *others) if state is not None else (0, first, *others))]
        # On the host: where documents run one by one, that is where their offsets are read.
        packed = (slice(start, None), {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)})
        return [packed] if state is None else [(slice(0, first), {"initial_state": state}), packed]

    def _from_last(self, states: Iterable[State | None]) -> State:
        """The last rank's state on every rank, from those of the halves; on other ranks only their shapes count."""
        known, dim = [state for state in states if state is not None], self.halves[0].state_dim
        kv, normalizer = (
            from_last(torch.cat([getattr(state, name) for state in known], dim=dim), self.shards)
            for name in ("kv", "normalizer")
        )
        phases = [state.phase for state in known if state.phase is not None]
        phase = from_last(torch.cat(phases, dim=dim), self.shards) if phases else None
        return State(kv, normalizer, phase, power=self.sequence.power, key_dim=self.sequence.key_dim)


def _nothing(sequence: Sequence) -> State:
    """What no tokens leave; without a phase, which nobody reads."""
    shape = (sequence.batch, sequence.key_heads, symmetric_dim(sequence.key_dim, sequence.power))
    kv = sequence.k.new_zeros(*shape, sequence.value_dim, dtype=sequence.compute_dtype)
    return State(kv, kv.new_zeros(shape), None, power=sequence.power, key_dim=sequence.key_dim)


def _anchor(sequence: Sequence) -> Tensor:
    """A tensor that requires a gradient if any of them does."""
    tensors = [x for x in (getattr(sequence, field.name) for field in fields(sequence)) if isinstance(x, Tensor)]
    return next((x for x in tensors if x.requires_grad), sequence.k)


def _arguments(sequence: Sequence) -> dict[str, Any]:
    return {field.name: getattr(sequence, field.name) for field in fields(sequence)}
