"""The steps of `kernels.attention.shard` on one device: two shards give the result of one sequence."""

import pytest
import torch
from torch.autograd.function import once_differentiable

from support import assert_close, float32_tolerance, gradients, interpreted, random_inputs, run, run_plain

pytest.importorskip("triton", reason="needs Triton")

from kernels.test_fused_gpu import compare, make_inputs

from sympow.kernels.attention import shard
from sympow.kernels.states.message_packing import pack, unpack


def to_other(end):
    """A state, packed into a message and unpacked."""
    batch, heads, dim, value_dim, _ = end.kv.shape
    return unpack(pack(end).unsqueeze(0), (batch, heads, dim, value_dim))


class TwoShards(torch.autograd.Function):
    """Attention in two shards: the first passes its state to the second, whose gradient is passed back."""

    @staticmethod
    def forward(ctx, q, k, v, log_gamma, border, chunk):
        ctx.plans = (
            shard.Plan(chunk, initial=False, return_state=True),
            shard.Plan(chunk, initial=True, return_state=False),
        )
        ctx.parts = [
            [None if x is None else x[:, part] for x in (q, k, v, log_gamma)]
            for part in (slice(0, border), slice(border, None))
        ]
        ctx.gates = [shard.gate_sums(part[3]) for part in ctx.parts]
        folded = [shard.fold(*part[1:3], *rest) for part, *rest in zip(ctx.parts, ctx.gates, ctx.plans, strict=True)]
        ctx.outputs, ctx.states = [], []
        for part, gates, plan, state, (chunks, _) in zip(
            ctx.parts, ctx.gates, ctx.plans, (None, to_other(folded[0].end)), folded, strict=True
        ):
            ctx.outputs.append(shard.Outputs.new(part[0], part[2], plan))
            ctx.states.append(shard.attend(*part[:3], gates, chunks, state, ctx.outputs[-1]))
        ctx.border = border
        return torch.cat([out.y for out in ctx.outputs], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        halves = dy[:, : ctx.border].contiguous(), dy[:, ctx.border :].contiguous()
        rows, folded = [], []
        for half, (q, k, *_), gates, out, plan in zip(
            halves, ctx.parts, ctx.gates, ctx.outputs, ctx.plans, strict=True
        ):
            rows.append(shard.prepare_gradient(half, q, out))
            folded.append(shard.fold_gradient(rows[-1], k, gates, out.state_share, plan))
        found = []
        for n, state in enumerate((to_other(folded[1].end), None)):
            q, k, v, log_gamma = ctx.parts[n]
            known, gradients = (rows[n], k, v, ctx.gates[n], ctx.states[n]), shard.Gradients.new(q, k, v)
            shard.query_gradient(*known, ctx.outputs[n].state_share, gradients)
            crossing = shard.key_gradient(*known, folded[n].chunks, state, gradients)
            gate = None if log_gamma is None else shard.gates_gradient(k, gradients, crossing, ctx.plans[n])
            found.append((*gradients[:3], gate))
        joined = [None if pair[0] is None else torch.cat(pair, dim=1) for pair in zip(*found, strict=True)]
        return *joined, None, None


def in_two(x, border, chunk):
    return TwoShards.apply(x.q, x.k, x.v, x.log_gamma, border, chunk)


@interpreted
@pytest.mark.parametrize(("gate", "border", "heads"), [("scalar", 130, 2), ("none", 20, 1)])
def test_two_shards_are_one_sequence(gate, border, heads):
    inputs = random_inputs(0, length=160, heads=heads, key_heads=1, dim=32, value_dim=32, gate=gate, rotation="none",
                           dtype=torch.float32)  # fmt: skip
    exact, inputs = inputs.map(torch.Tensor.double).requires_grad(), inputs.requires_grad()
    outputs = [
        (in_two(inputs, border, 128), inputs),
        (run(exact, 2, "attention", backend="torch"), exact),
    ]
    results = [[y.detach(), *gradients(y, x)] for y, x in outputs]
    names = ["y", *(name for name, value in inputs.arguments().items() if value is not None)]
    for name, got, want in zip(names, *results, strict=True):
        assert_close(got, want, float32_tolerance(name, 160), name)


@pytest.mark.gpu
@pytest.mark.parametrize("gamma", ["weak", "strong", "closed"])
def test_two_shards_on_a_gpu(gamma):
    inputs = make_inputs(2500, gamma, heads=4, key_heads=2)
    inputs = type(inputs)(**{**inputs.arguments(), "beta": None, "theta": None})
    compare(
        inputs,
        wanted=lambda x: run(x, 2, "attention", backend="torch"),
        plain=lambda x: run_plain(x, 2),
        fused=lambda x: in_two(x, 1100, 512),
        # After a closed gate a state holds few keys, and single queries are almost orthogonal to all of them: their
        # rows show the rounding of the state to bfloat16.
        rows=gamma != "closed",
    )
