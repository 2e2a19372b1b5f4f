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


@triton.jit
def past_weights_kernel(
    q_desc, normalizer_desc, weight_ptr, document_start_ptr, length, heads, chunk, slots, first_boundary,
    GROUP: tl.constexpr, D: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """φ(q) Z for a tile of queries, scaled by their powers of two; 0 where they see nothing."""
    first = tl.program_id(0) * ROWS
    sequence = tl.program_id(1)
    batch, head = sequence // heads, sequence % heads
    kv_sequence = batch * (heads // GROUP) + head // GROUP
    rows = first + tl.arange(0, ROWS)
    boundary = first // chunk
    document_start = tl.load(document_start_ptr + first) if DOCUMENTS else 0
    weight = tl.zeros((ROWS,), tl.float32)
    # A document that began in this chunk has nothing in the state.
    if (boundary >= first_boundary) & (document_start <= boundary * chunk):
        q = q_desc.load([batch, head, first, 0]).reshape(ROWS, D)
        q = (q * power_of_two_scale(q)[:, None]).to(q_desc.dtype)
        normalizer = normalizer_desc.load([kv_sequence * slots + boundary - first_boundary, 0, 0]).reshape(D, D)
        found = tl.sum(tl.dot(q, normalizer, input_precision=PRECISION) * q.to(tl.float32), axis=1)
        size = tl.abs(q)
        sizes = tl.dot(size, tl.abs(normalizer), input_precision=PRECISION) * size.to(tl.float32)
        epsilon = STATE_EPSILON if q_desc.dtype == tl.bfloat16 else EPSILON
        # NaN is not below anything, and stays visible.
        weight = tl.where(found < epsilon * tl.sum(sizes, axis=1), 0.0, found)
    tl.store(weight_ptr + sequence.to(tl.int64) * length + rows, weight, mask=rows < length)


def past_weights(q: Tensor, states: ChunkStates, documents: Documents | None, rows: int = 128) -> Tensor:
    """φ(q) Z, (b, h, t) float32, of queries (b, t, h, d); 0 for those that see nothing of a state."""
    batch, length, heads, dim = q.shape
    kv_heads, slots = states.normalizer.shape[1:3]
    weight = q.new_empty(batch, heads, length, dtype=torch.float32)
    past_weights_kernel[(triton.cdiv(length, rows), batch * heads)](
        head_major(q, (rows, dim)), TensorDescriptor.from_tensor(states.normalizer.flatten(0, 2), [1, dim, dim]),
        weight, documents and documents.start, length, heads, states.chunk, slots, states.first,
        GROUP=heads // kv_heads, D=dim, DOCUMENTS=documents is not None, PRECISION=dot_precision(q.dtype), ROWS=rows,
        num_warps=4,
    )  # fmt: skip
    return weight
