"""A call in plain PyTorch: in the form asked for, or in the cheaper one."""

from __future__ import annotations

from torch import Tensor

from sympow.ops.chunked import chunked_form
from sympow.ops.cost import CPU, GPU, Workload, best_chunk_size, cheaper_form
from sympow.ops.recurrent import recurrent_form
from sympow.ops.sequence import Sequence
from sympow.ops.state import State


def run_portable(
    sequence: Sequence,
    initial_state: State | None,
    return_state: bool,
    form: str,
    chunk_size: int | None,
    needs_grad: bool,
) -> tuple[Tensor, State | None]:
    """y (b, t, h, e) of at least one token, and the state after the last if asked for.

    Args:
        form, chunk_size: as in `sympow.attention`.
        needs_grad: whether the backward pass will be run.
    """
    if form == "recurrent":
        return recurrent_form(sequence, initial_state, return_state, needs_grad)
    if form == "attention":
        return chunked_form(sequence, initial_state, return_state, None, needs_grad)
    work = Workload(
        length=sequence.length,
        key_dim=sequence.key_dim,
        value_dim=sequence.value_dim,
        power=sequence.power,
        group=sequence.group,
        parallel=sequence.batch * sequence.key_heads,
        initial_state=initial_state is not None,
        return_state=return_state,
    )
    machine = CPU if sequence.q.device.type == "cpu" else GPU
    if form == "auto" and chunk_size is None and cheaper_form(work, machine) == "attention":
        return chunked_form(sequence, initial_state, return_state, None, needs_grad)
    size = chunk_size or best_chunk_size(work, machine)
    return chunked_form(sequence, initial_state, return_state, size, needs_grad)
