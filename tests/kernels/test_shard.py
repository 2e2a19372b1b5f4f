"""The steps of a shard, one after the other on one device: two shards are one sequence."""

import pytest
import torch
from torch.autograd.function import once_differentiable

from support import assert_close, gradients, interpreted, random_inputs, run, run_plain

pytest.importorskip("triton", reason="needs Triton")

from kernels.test_fused_gpu import compare, make_inputs

from sympow.kernels import shard
from sympow.kernels.packing import pack, unpack


class TwoShards(torch.autograd.Function):
    """Attention to turned keys in two shards: a state goes from the first to the second, its gradient back."""

    @staticmethod
    def forward(ctx, q, k, v, log_gamma, border, chunk):
        ctx.plans = shard.Plan(chunk, initial=False, final=True), shard.Plan(chunk, initial=True, final=False)
        ctx.parts = [
            [None if x is None else x[:, part] for x in (q, k, v, log_gamma)]
            for part in (slice(0, border), slice(border, None))
        ]
        folded = [shard.fold(*part[1:], plan) for part, plan in zip(ctx.parts, ctx.plans, strict=True)]
        states = None, unpack(*pack(folded[0].end), k.shape[-1])
        found = [shard.attend(*part[:3], *rest) for part, *rest in zip(ctx.parts, folded, states, strict=True)]
        ctx.outputs, ctx.attended = zip(*found, strict=True)
        ctx.border = border
        return torch.cat(ctx.outputs, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        halves = dy[:, : ctx.border].contiguous(), dy[:, ctx.border :].contiguous()
        folded = [
            shard.fold_gradient(half, part[0], part[1], y, attended, plan)
            for half, part, y, attended, plan in zip(
                halves, ctx.parts, ctx.outputs, ctx.attended, ctx.plans, strict=True
            )
        ]
        states = unpack(*pack(folded[1].end), dy.shape[-1]), None
        found = []
        for state, (_, k, v, _), *rest in zip(states, ctx.parts, ctx.attended, folded, ctx.plans, strict=True):
            dq, rows = shard.query_gradient(k, v, *rest[:2])
            found.append((dq, *shard.key_gradient(state, rows, k, v, *rest)))
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
        (run(inputs, 2, "chunked", backend="torch", chunk_size=128), inputs),
        (run(exact, 2, "attention", backend="torch"), exact),
    ]
    results = [[y.detach(), *gradients(y, x)] for y, x in outputs]
    names = ["y", *(name for name, value in inputs.arguments().items() if value is not None)]
    for name, got, same, want in zip(names, *results, strict=True):
        measured = (same - want).abs().max().item() / max(1.0, want.abs().max().item())
        assert_close(got, want, max(2 * measured, 2e-6), name)


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
    )
