"""The chunked form, p = 2, in steps between which a state can pass to and from other GPUs.

Forward: `fold` gives what a shard leaves by itself; with the state that came, `attend` gives outputs. Backward:
`fold_gradient` gives what a shard's own outputs want of the state that came; with the gradient of the state that left,
`attend_backward` gives the rest. A shard so sums over its tokens twice in either pass, nine products in place of seven.
"""

from __future__ import annotations

from torch import Tensor

from sympow.kernels.attention_backward import prepare
from sympow.kernels.attention_op import _attend, _attend_backward
from sympow.kernels.chunk_states import FullState, chunk_states
from sympow.kernels.gates import running_sums
from sympow.kernels.scaling import scale_queries
from sympow.kernels.tiles import COLUMNS, tiles_for


def fold(k: Tensor, v: Tensor, log_gamma: Tensor | None, chunk: int) -> FullState:
    """The state after turned keys and values, from nothing; float32.

    Args:
        k, v: (b, t, h_kv, d) and (b, t, h_kv, e).
        log_gamma: (b, t, h_kv) float32, or None.
        chunk: tokens that are summed up at a time.
    """
    sums = None if log_gamma is None else running_sums(log_gamma, COLUMNS).sums
    boundaries = (1, -(-k.shape[1] // chunk))
    _, end, _ = chunk_states(
        k, v, k.shape[2], sums, chunk, full=True, boundaries=boundaries, want_end=True, **tiles_for(k.shape[-1]).states
    )
    assert end is not None
    return end


def attend(
    q: Tensor, k: Tensor, v: Tensor, log_gamma: Tensor | None, chunk: int, initial: FullState | None, *, final: bool
) -> tuple[Tensor, list[Tensor]]:
    """y (b, t, h, e), and what the backward pass reads beside q, k, v and y.

    Args:
        initial: the state that came, or None.
        final: whether the state that leaves will have a gradient.
    """
    kv, normalizer = initial or (None, None)
    y, weight, _, _, *rest = _attend(q, k, v, log_gamma, None, None, kv, normalizer, 2, chunk, True, True, final)
    return y, [weight, *rest]


def fold_gradient(dy: Tensor, q: Tensor, k: Tensor, y: Tensor, saved: list[Tensor], chunk: int) -> FullState:
    """The gradient of the state that came, as far as it is due to this shard's outputs.

    Args:
        dy: of y, contiguous.
        saved: from `attend`.
    """
    weight, sums, *_, past = saved
    scaled, _ = scale_queries(q)
    divided, minus_delta = prepare(y, dy, weight)
    _, end, _ = chunk_states(
        scaled, divided, k.shape[2], sums if sums.numel() else None, chunk, full=True, factor=minus_delta, past=past,
        reverse=True, boundaries=(0, -(-k.shape[1] // chunk) - 1), want_end=True, **tiles_for(q.shape[-1]).states,
    )  # fmt: skip
    assert end is not None
    return end


def attend_backward(
    dy: Tensor,
    d_final: FullState | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    saved: list[Tensor],
    chunk: int,
    *,
    initial: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and log γ (empty without gates).

    Args:
        d_final: of the state that left; None if none did.
        initial: whether a state came.
    """
    kv, normalizer = d_final or (None, None)
    dq, dk, dv, d_log_gamma, _, _ = _attend_backward(
        dy, None, kv, normalizer, q, k, v, y, *saved, None, None, 2, chunk, True, initial, d_final is not None
    )
    return dq, dk, dv, d_log_gamma
