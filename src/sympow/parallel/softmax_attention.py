"""The softmax baseline on a sequence whose tokens lie on several ranks, by an all-gather of keys and values.

Softmax has no state of fixed size to pass on: every rank collects keys, values and gates of all, and attends from its
own queries. What is sent grows with the context, and later ranks have more keys to attend to: this is for comparison.
torch's own context parallelism (`torch.distributed.tensor.experimental`) replaces only the CUDA kernels of
`scaled_dot_product_attention`, for one document in equal shards without gates; this serves every backend, documents,
uneven shards and gates.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from sympow.ops.sequence import Sequence, rotate_sequence
from sympow.ops.torch import softmax
from sympow.ops.torch.softmax import CLOSED_GATE, KeyValueState
from sympow.ops.validation import check_tensors
from sympow.parallel.collectives import along_time, attach
from sympow.parallel.shards import Shards, as_shards


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
            raise ValueError(
                f"{name} cannot go with shards in softmax attention: its state would be keys and values of all ranks"
            )
    if mask is not None:
        raise ValueError("mask cannot go with shards in softmax attention")
    if shards.size == 1:
        documents = None if shards.cu_seqlens is None else shards.cu_seqlens.to(q.device)
        return softmax.softmax_attention(q, k, v, log_gamma, beta, theta, documents)
    check_tensors(q, k, v, log_gamma, beta, theta)
    shards.check_length("q", q.shape[1])
    if log_gamma is not None and log_gamma.ndim == 4:
        log_gamma = log_gamma.mean(-1)
    k, v = along_time(k, shards), along_time(v, shards)
    log_gamma, beta = (None if x is None else along_time(x, shards) for x in (log_gamma, beta))
    # Keys in place of queries, which no other rank needs.
    everything = Sequence(k, k, v, log_gamma, beta, theta, power=1)
    portion, outputs = shards.portion(), []
    for number, (begin, end) in enumerate(pairwise(portion.offsets)):
        start, stop = shards.start + begin, shards.start + end
        past = None
        if number == 0 and portion.continues:
            past = _cache(everything[start - portion.before : start])
        own = everything[start:stop]
        outputs.append(
            softmax.softmax_attention(q[:, begin:end], own.k, own.v, own.log_gamma, own.beta, theta, initial_state=past)
        )
    gathered = [x for x in (k, v, log_gamma, beta) if x is not None]
    return attach(torch.cat(outputs, dim=1), *gathered)


def _cache(past: Sequence) -> KeyValueState:
    """The cache that these tokens leave."""
    _, k, phase = rotate_sequence(past, None)
    decay = None
    if past.log_gamma is not None:
        decay = past.log_gamma.to(torch.float64).clamp(min=CLOSED_GATE).cumsum(1)
    return KeyValueState(k, past.v, decay, phase)
