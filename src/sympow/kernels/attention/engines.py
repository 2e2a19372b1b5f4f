"""The engines of the attention and chunked forms: which kernels compute a call, forward and backward.

`engines` is a table. A row says why an engine does not support a call, and computes the steps that engines differ in:
queries against the keys of their chunk and the state before it, and backward the gradients of queries and of keys. The
first row without a reason serves the call. Rows for Hopper GPUs import Gluon, Triton's lower-level language, which
other releases of Triton lack or have changed, only when they serve a call.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sympow.kernels import float16_range
from sympow.kernels.attention import backward, forward, split_float32
from sympow.kernels.attention.tiles import tiles_for, tiles_in_pieces
from sympow.kernels.common import Documents, scale_queries
from sympow.kernels.device_limits import HOPPER_WIDTHS, is_hopper
from sympow.kernels.float16_range import KeyRange, RowGradients
from sympow.kernels.running_sums import Gates
from sympow.kernels.states import quadratic
from sympow.kernels.states.quadratic import ChunkStates

# With heads of 64 the warp-specialized kernels are faster from this length on. At 4,096 tokens they take 12 % longer
# forward and backward, at 16,384 3 % less, on an H200.
LONG = 16_384
# Longest sequence for which the keys' gradient of `hopper.short_backward` is faster than that of the portable kernel.
SHORT_KEY_GRADIENT_MAX_LENGTH = 8192
# Gluon changes between releases of Triton. These compile every kernel (`make triton-versions`).
RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")


class Call(NamedTuple):
    """What the choice of an engine depends on, and what its steps need to know besides tensors.

    Attributes:
        gpu: the one that holds all tensors; None: none, in Triton's interpreter.
        dtype: of queries, keys and values.
        key_dim, value_dim: d and e, as padded.
        length: t.
        power: p.
        chunk: tokens per chunk; 0: all in one.
        with_states: whether chunks see earlier ones through states (p = 2), and otherwise not at all.
        boundaries: the first and the last chunk boundary that has a state; boundary n lies after n chunks.
        documents: where documents begin and end; None: one document.
    """

    gpu: torch.device | None
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    length: int
    power: int
    chunk: int
    with_states: bool
    boundaries: tuple[int, int]
    documents: Documents | None

    @property
    def reads_states(self) -> bool:
        """Whether a chunk of this call reads a state."""
        return self.with_states and self.boundaries[0] <= self.boundaries[1]

    @property
    def separate_chunk(self) -> int:
        """Tokens per chunk if chunks are separate; 0: all in one, or states connect them."""
        return 0 if self.with_states else self.chunk


class Rows(NamedTuple):
    """What the gradients read of rows, keys and values.

    Attributes:
        scaled_q, scale: queries, scaled, (b, t, h, d), and their scales (b, h, t) float32.
        dy, minus_delta: dy' (b, t, h, e) and −δ (b, h, ≥ t) float32, as in `backward`.
        k, v: keys and values, as the engine reads them.
        row_gradients: queries and dy' in the range of float16, from which the others are; None: of other dtypes.
        key_range: of keys and values, likewise.
    """

    scaled_q: Tensor
    scale: Tensor
    dy: Tensor
    minus_delta: Tensor
    k: Tensor
    v: Tensor
    row_gradients: RowGradients | None
    key_range: KeyRange | None


class Blocks(NamedTuple):
    """Σ B_ij dB_ij of each key over the queries of each block, which corrects the drift of the gates' gradient.

    Attributes:
        terms: (b, h_kv, blocks, t) float32, which `key_gradient` writes; None: there is one block.
        size: queries per block.
    """

    terms: Tensor | None
    size: int


class Engine(NamedTuple):
    """A row of `engines`: the steps of a call that engines compute in ways of their own.

    Attributes:
        name: what `sympow check` calls it.
        unsupported_reason: why the engine does not support a call, a sentence; None: it does.
        attend: queries against the keys of their chunk and the state before it. Takes the call, q, k, v, gates, states
            and the range of keys; returns y (b, t, h, e), the rows' denominators, and φ(q) Z,
            which is None without states, (b, h, t) float32.
        prepare: what the gradients read, from the call, q, k, v, y, dy, the rows' denominators and their gradient (or
            None), the range of keys (or None) and the largest entries of the gradients of a final state (or None).
        query_gradient: takes the call, rows, gates, states and φ(q) Z; returns dq and q_i · dq_i (b, h, t).
        key_gradient: takes the call, rows, gates, the gradients of the states, and blocks; returns dk, dv and
            k_j · dk_j (b, h_kv, t).
        update: what computes S of each chunk (`states.quadratic.chunk_sums`), for tensors like a given one.
        in_pieces: whether it computes float32 as sums of float16.
    """

    name: str
    unsupported_reason: Callable[[Call], str | None]
    attend: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    prepare: Callable[..., Rows]
    query_gradient: Callable[..., tuple[Tensor, Tensor]]
    key_gradient: Callable[..., tuple[Tensor, Tensor, Tensor]]
    update: Callable[[Tensor], Callable[..., None]]
    in_pieces: bool = False


@cache
def engines() -> tuple[Engine, ...]:
    """The table. The functions that its rows name follow below."""
    portable, hopper = "Triton kernels", "Hopper kernels"
    return (
        Engine(hopper, _not_short, _attend_short, _prepare, _query_gradient_short, _key_gradient_short, _update),
        Engine(
            hopper, _not_one_chunk_on_hopper,
            _attend_on_hopper, _prepare, _query_gradient_on_hopper, _key_gradient_on_hopper, _update,
        ),
        Engine(
            hopper, _not_chunked_128_one_document,
            _attend_in_chunks, _prepare, _query_gradient_in_chunks, _key_gradient_in_chunks, _update_on_hopper,
        ),
        # Documents in chunks: only their sums are computed on Hopper's kernels.
        Engine(hopper, _not_chunked_128, _attend, _prepare, _query_gradient, _key_gradient, _update_on_hopper),
        Engine(
            portable, not_in_pieces,
            _attend_in_pieces, _prepare_in_pieces, _query_gradient_in_pieces, _key_gradient_in_pieces, _update,
            in_pieces=True,
        ),
        Engine(portable, lambda _: None, _attend, _prepare, _query_gradient, _key_gradient, _update),
    )  # fmt: skip


def engine_for(call: Call) -> Engine:
    """The first engine that supports a call."""
    return next(engine for engine in engines() if engine.unsupported_reason(call) is None)


# Any GPU --------------------------------------------------------------------------------------------------------------


def _attend(
    call: Call, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, states: ChunkStates | None,
    key_range: KeyRange | None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    return forward.attend(
        q, k, v, call.power, gates, states, chunk=call.separate_chunk, documents=call.documents, key_range=key_range,
        **tiles_for(q).forward,
    )  # fmt: skip


def _prepare(
    call: Call, q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, denominator: Tensor,
    d_denominator: Tensor | None, key_range: KeyRange | None, d_final: Tensor | None,
) -> Rows:  # fmt: skip
    if key_range is None:
        return Rows(*scale_queries(q), *backward.prepare(y, dy, denominator, d_denominator), k, v, None, None)
    found = float16_range.prepare_float16(q, y, dy, denominator, d_denominator, key_range, call.power, d_final)
    return Rows(found.q, found.scale, found.dy, found.minus_delta, k, v, found, key_range)


def _query_gradient(
    call: Call, rows: Rows, gates: Gates | None, states: ChunkStates | None, state_share: Tensor | None
) -> tuple[Tensor, Tensor]:
    return backward.query_gradient(
        rows.scaled_q, rows.scale, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates, states,
        state_share=state_share,
        chunk=call.separate_chunk, documents=call.documents, row_gradients=rows.row_gradients, key_range=rows.key_range,
        **tiles_for(rows.scaled_q).query,
    )  # fmt: skip


def _key_gradient(
    call: Call, rows: Rows, gates: Gates | None, d_states: ChunkStates | None, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    return backward.key_gradient(
        rows.scaled_q, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates, d_states,
        chunk=call.separate_chunk, documents=call.documents, block_terms=blocks.terms, query_block=blocks.size,
        row_gradients=rows.row_gradients, key_range=rows.key_range, **tiles_for(rows.scaled_q).key,
    )  # fmt: skip


def _update(x: Tensor) -> Callable[..., None]:
    return partial(quadratic.update, **tiles_for(x).states)


# float32 in pieces ----------------------------------------------------------------------------------------------------


def not_in_pieces(call: Call) -> str | None:
    """Why a call is not computed in pieces of float16."""
    if call.dtype != torch.float32:
        return f"It computes torch.float32, not {call.dtype}."
    if call.gpu is None and not split_float32.ON_CPU:
        return "It needs a GPU."
    if max(call.key_dim, call.value_dim) > split_float32.LARGEST_DIM:
        return f"It supports heads of up to {split_float32.LARGEST_DIM}."
    return _not_one_chunk(call)


def _not_one_chunk(call: Call) -> str | None:
    if call.chunk:
        return "It computes the attention form."
    return None if call.documents is None else "It computes one document."


def _attend_in_pieces(
    call: Call, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, states: None, key_range: KeyRange
) -> tuple[Tensor, Tensor, None]:
    return *split_float32.attend(q, k, v, call.power, gates, key_range, **tiles_in_pieces(q).forward), None


def _prepare_in_pieces(
    call: Call, q: Tensor, k: Tensor, v: Tensor, y: Tensor, dy: Tensor, denominator: Tensor,
    d_denominator: Tensor | None, key_range: KeyRange, d_final: None,
) -> Rows:  # fmt: skip
    found = float16_range.prepare_float16(q, y, dy, denominator, d_denominator, key_range, call.power, split=True)
    pieces = split_float32.split_keys(k, v, key_range)
    return Rows(found.q, found.scale, found.dy, found.minus_delta, *pieces, found, key_range)


def _query_gradient_in_pieces(
    call: Call, rows: Rows, gates: Gates | None, states: None, state_share: None
) -> tuple[Tensor, Tensor]:
    assert rows.row_gradients is not None and rows.key_range is not None
    return split_float32.query_gradient(
        rows.row_gradients, rows.k, rows.v, call.power, gates, rows.key_range, **tiles_in_pieces(rows.scaled_q).query
    )


def _key_gradient_in_pieces(
    call: Call, rows: Rows, gates: Gates | None, d_states: None, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    assert rows.row_gradients is not None and rows.key_range is not None
    return split_float32.key_gradient(
        rows.row_gradients, rows.k, rows.v, call.power, gates, rows.key_range, block_terms=blocks.terms,
        query_block=blocks.size, **tiles_in_pieces(rows.scaled_q).key,
    )  # fmt: skip


# Hopper GPUs ----------------------------------------------------------------------------------------------------------


def _not_on_hopper(call: Call) -> str | None:
    """Why none of the engines for Hopper supports the heads and the GPU of a call."""
    if call.gpu is None or not is_hopper(call.gpu):
        return "It needs a Hopper GPU (sm_90)."
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"It supports torch.bfloat16 and torch.float16, not {call.dtype}."
    if not all(HOPPER_WIDTHS[0] <= dim <= HOPPER_WIDTHS[-1] for dim in (call.key_dim, call.value_dim)):
        return f"It supports heads from {HOPPER_WIDTHS[0]} to {HOPPER_WIDTHS[-1]}."
    return None if _compiled_by_this_release() else f"It needs Triton {', '.join(name + 'x' for name in RELEASES)}."


def _not_one_chunk_on_hopper(call: Call) -> str | None:
    return _not_one_chunk(call) or _not_on_hopper(call)


def _not_short(call: Call) -> str | None:
    if not call.key_dim == call.value_dim == HOPPER_WIDTHS[0] or call.length >= LONG:
        return f"It is for heads of {HOPPER_WIDTHS[0]} and fewer than {LONG} tokens."
    return _not_one_chunk_on_hopper(call)


def _attend_short(
    call: Call, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, states: None, key_range: KeyRange | None
) -> tuple[Tensor, Tensor, None]:
    from sympow.kernels.hopper import short_forward

    return *short_forward.attend(q, k, v, call.power, gates, key_range=key_range), None


def _query_gradient_short(
    call: Call, rows: Rows, gates: Gates | None, states: None, state_share: None
) -> tuple[Tensor, Tensor]:
    from sympow.kernels.hopper import short_backward

    return short_backward.query_gradient(
        rows.scaled_q, rows.scale, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates,
        row_gradients=rows.row_gradients, key_range=rows.key_range,
    )  # fmt: skip


def _key_gradient_short(
    call: Call, rows: Rows, gates: Gates | None, d_states: None, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    if rows.row_gradients is not None:
        # The kernel below has no registers left for float16.
        return _key_gradient_on_hopper(call, rows, gates, d_states, blocks)
    if blocks.terms is not None or call.length > SHORT_KEY_GRADIENT_MAX_LENGTH:
        return _key_gradient(call, rows, gates, d_states, blocks)
    from sympow.kernels.hopper import short_backward

    return short_backward.key_gradient(rows.scaled_q, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates)


def _attend_on_hopper(
    call: Call, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, states: None, key_range: KeyRange | None
) -> tuple[Tensor, Tensor, None]:
    from sympow.kernels.hopper import forward as hopper_forward

    return *hopper_forward.attend(q, k, v, call.power, gates, key_range=key_range), None


def _query_gradient_on_hopper(
    call: Call, rows: Rows, gates: Gates | None, states: None, state_share: None
) -> tuple[Tensor, Tensor]:
    from sympow.kernels.hopper import backward as hopper_backward

    return hopper_backward.query_gradient(
        rows.scaled_q, rows.scale, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates,
        row_gradients=rows.row_gradients, key_range=rows.key_range,
    )  # fmt: skip


def _key_gradient_on_hopper(
    call: Call, rows: Rows, gates: Gates | None, d_states: None, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    from sympow.kernels.hopper import backward as hopper_backward

    return hopper_backward.key_gradient(
        rows.scaled_q, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates,
        block_terms=blocks.terms, query_block=blocks.size, row_gradients=rows.row_gradients,
    )  # fmt: skip


def _not_chunked_128(call: Call) -> str | None:
    if not call.reads_states:
        return "It computes chunks that read states."
    if call.dtype != torch.bfloat16:
        return f"It supports torch.bfloat16, since it knows no scales of states, not {call.dtype}."
    if not call.key_dim == call.value_dim == HOPPER_WIDTHS[-1]:
        return f"It supports heads of {HOPPER_WIDTHS[-1]}."
    return _not_on_hopper(call)


def _not_chunked_128_one_document(call: Call) -> str | None:
    return _not_chunked_128(call) if call.documents is None else "It computes one document."


def _attend_in_chunks(
    call: Call, q: Tensor, k: Tensor, v: Tensor, gates: Gates | None, states: ChunkStates, key_range: None
) -> tuple[Tensor, Tensor, Tensor]:
    from sympow.kernels.hopper import forward as hopper_forward
    from sympow.kernels.hopper.states import features_times_state, state_shares

    scaled_q, _ = scale_queries(q)
    state_share = state_shares(scaled_q, states)
    y, denominator = hopper_forward.attend(
        scaled_q, k, v, call.power, gates, chunk=states.chunk, first_boundary=states.first, state_share=state_share,
        from_state=features_times_state(scaled_q, states),
    )  # fmt: skip
    return y, denominator, state_share


def _query_gradient_in_chunks(
    call: Call, rows: Rows, gates: Gates | None, states: ChunkStates, state_share: Tensor
) -> tuple[Tensor, Tensor]:
    from sympow.kernels.hopper import backward as hopper_backward
    from sympow.kernels.hopper.states import vector_times_state

    return hopper_backward.query_gradient(
        rows.scaled_q, rows.scale, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates,
        chunk=states.chunk, first_boundary=states.first,
        dq_from_state=vector_times_state(rows.scaled_q, rows.dy, states, rows.minus_delta, state_share),
    )  # fmt: skip


def _key_gradient_in_chunks(
    call: Call, rows: Rows, gates: Gates | None, d_states: ChunkStates, blocks: Blocks
) -> tuple[Tensor, Tensor, Tensor]:
    from sympow.kernels.hopper import backward as hopper_backward
    from sympow.kernels.hopper.states import features_times_state, vector_times_state

    dk_over_p = vector_times_state(rows.k, rows.v, d_states, keys=True)
    return hopper_backward.key_gradient(
        rows.scaled_q, rows.k, rows.v, rows.dy, rows.minus_delta, call.power, gates,
        chunk=d_states.chunk, last_boundary=d_states.first + d_states.count - 1,
        from_later_chunks=(dk_over_p, features_times_state(rows.k, d_states, keys=True)),
    )  # fmt: skip


def _update_on_hopper(x: Tensor) -> Callable[..., None]:
    from sympow.kernels.hopper import states

    return states.update


@cache
def _compiled_by_this_release() -> bool:
    """Whether the installed Triton is one of `RELEASES`; warns, once, if it is not."""
    if triton.__version__.startswith(RELEASES):
        return True
    warnings.warn(
        f"the Hopper kernels are not used with Triton {triton.__version__}, for which they are not known to compile:"
        f" they need one of {', '.join(name + 'x' for name in RELEASES)}. The portable kernels compute the same; on an"
        " H200 they took 8 to 15 % longer forward with heads of 64, and with heads of 128 1.4 times as long forward and"
        " 1.6 times as long forward and backward.",
        stacklevel=2,
    )
    return False
