"""Packed documents, one after the other: exact by construction, and each in the form that suits its length."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from sympow.ops.sequence import Sequence
from sympow.ops.state import State


def run_documents(
    sequence: Sequence,
    offsets: list[int],
    initial_state: State | None,
    run: Callable[[Sequence, State | None], tuple[Tensor, State | None]],
) -> tuple[Tensor, State | None]:
    """Applies `run` to each document with its own initial state, and joins what comes out.

    Args:
        sequence: batch 1, all documents along time.
        offsets: where documents begin and, last, where they end.
        initial_state: one batch entry per document, or None.
        run: takes a document and its initial state, returns y and, if it makes one, the final state.
    """
    outputs, states = [], []
    for document, (start, stop) in enumerate(pairwise(offsets)):
        before = None if initial_state is None else initial_state.select(slice(document, document + 1))
        y, after = run(sequence[start:stop], before)
        outputs.append(y)
        if after is not None:
            states.append(after)
    return torch.cat(outputs, dim=1), State.cat(states) if states else None
