"""How much each query sees of the state that earlier chunks left, p = 2: φ(q) Z = Σ_ia q_i q_a Z_ia.

A sum of numbers of both signs. Where it is less than the rounding of Z explains, nothing is known about it, and to
divide by it could give outputs of any size: such a query sees nothing, and neither φ(q) S nor its gradients count.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sympow.kernels.chunk_states import ChunkStates
from sympow.kernels.common import EPSILON, STATE_EPSILON, dot_precision, head_major
from sympow.kernels.documents import Documents
from sympow.kernels.scaling import power_of_two_scale

# Tiles that share one load of Z. More leave too few programs to fill the device at the end.
TILES = 4


@triton.jit
def past_weights_kernel(
    q_desc, normalizer_desc, weight_ptr, document_start_ptr, length, heads, chunk, parts, slots, first_boundary,
    GROUP: tl.constexpr, D: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """φ(q) Z for a few tiles of queries of one chunk, scaled by their powers of two; 0 where they see nothing."""
    boundary = tl.program_id(0) // parts
    sequence = tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    first = boundary * chunk + tl.program_id(0) % parts * (TILES * ROWS)
    end = tl.minimum(tl.minimum(first + TILES * ROWS, (boundary + 1) * chunk), length)
    weight_ptr += sequence.to(tl.int64) * length
    if boundary < first_boundary:
        for start in range(first, end, ROWS):
            rows = start + tl.arange(0, ROWS)
            tl.store(weight_ptr + rows, tl.zeros((ROWS,), tl.float32), mask=rows < length)
    else:
        slot = (batch * (heads // GROUP) + head // GROUP) * slots + boundary - first_boundary
        normalizer = normalizer_desc.load([slot, 0, 0]).reshape(D, D)
        sizes = tl.abs(normalizer)
        epsilon = STATE_EPSILON if q_desc.dtype == tl.bfloat16 else EPSILON
        for start in tl.range(first, end, ROWS, num_stages=STAGES):
            rows = start + tl.arange(0, ROWS)
            q = q_desc.load([batch, head, start, 0]).reshape(ROWS, D)
            # A power of two changes no digit, so that the rounding back is none.
            q = q.to(tl.float32) * power_of_two_scale(q)[:, None]
            found = tl.sum(tl.dot(q.to(q_desc.dtype), normalizer, input_precision=PRECISION) * q, axis=1)
            size = tl.abs(q)
            most = tl.sum(tl.dot(size.to(q_desc.dtype), sizes, input_precision=PRECISION) * size, axis=1)
            # NaN is not below anything, and stays visible.
            weight = tl.where(found < epsilon * most, 0.0, found)
            if DOCUMENTS:
                # A document that began in this chunk has nothing in the state.
                weight = tl.where(tl.load(document_start_ptr + start) <= boundary * chunk, weight, 0.0)
            tl.store(weight_ptr + rows, weight, mask=rows < length)


def past_weights(
    q: Tensor, states: ChunkStates, documents: Documents | None, rows: int = 64, tiles: int = TILES, stages: int = 3
) -> Tensor:
    """φ(q) Z, (b, h, t) float32, of queries (b, t, h, d); 0 for those that see nothing of a state."""
    batch, length, heads, dim = q.shape
    kv_heads, slots = states.normalizer.shape[1:3]
    weight = q.new_empty(batch, heads, length, dtype=torch.float32)
    parts = triton.cdiv(states.chunk, tiles * rows)
    past_weights_kernel[(triton.cdiv(length, states.chunk) * parts, batch * heads)](
        head_major(q, (rows, dim)), TensorDescriptor.from_tensor(states.normalizer.flatten(0, 2), [1, dim, dim]),
        weight, documents and documents.start, length, heads, states.chunk, parts, slots, states.first,
        GROUP=heads // kv_heads, D=dim, DOCUMENTS=documents is not None, PRECISION=dot_precision(q.dtype), ROWS=rows,
        TILES=tiles, STAGES=stages, num_warps=4,
    )  # fmt: skip
    return weight
