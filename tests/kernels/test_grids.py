"""No launch depends on how many CTAs CUDA takes along the second and third axis of a grid.

A grid has up to 2³¹ − 1 CTAs along its first axis and 65,535 along the others. Triton's interpreter has no such limit,
so the first tests look at the grids of all launches; those marked `gpu` launch more CTAs than fit on a second axis.
"""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")

from triton.runtime import KernelInterface

import sympow
import sympow.kernels
from support import Inputs, assert_close, float32_tolerance, gradients, interpreted, on_hopper, random_inputs, run
from sympow.kernels import launch as launches
from sympow.kernels.attention import shard, split_float32
from sympow.kernels.cross_entropy import cross_entropy_in_place
from sympow.kernels.decode.gate_projection import step_gates
from sympow.kernels.decode.softmax_step import split_keys
from sympow.kernels.decode.state_step import split_state
from sympow.kernels.decode.window_step import split_window
from sympow.kernels.launch import MOST_PROGRAMS, flat_grid, two_axis_grid
from sympow.kernels.pair_gates.op import fused_pair_attention
from sympow.kernels.reference import cross_entropy_reference
from sympow.kernels.rotary import fused_rotation
from sympow.kernels.running_sums import gate_sums, running_sum
from sympow.kernels.states.full_state import FullState
from sympow.kernels.states.message_packing import pack, unpack
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.rotary import rotary_rates
from sympow.ops.torch.softmax import softmax_attention
from sympow.ops.window import Window

# 16,384 sequences with 8 heads of 8 pairs: twice as many sequences × heads as CTAs fit on a second axis, and a million
# columns of β.
BATCH, HEADS, PAIRS = 16_384, 8, 8
# Sequences at both ends of the batch, and around the 65,536th pair of a sequence and a head.
SAMPLED = [0, 1, 8190, 8191, 8192, BATCH - 2, BATCH - 1]


class Recorder:
    """Replaces a kernel: records the grids of its launches, and computes nothing."""

    def __init__(self):
        self.grids = []

    def __getitem__(self, grid):
        self.grids.append(tuple(grid))
        return lambda *args, **kwargs: None


def launched_kernels():
    """Module and name of every kernel that a module of `sympow.kernels` launches, read off its source."""
    found = []
    for info in pkgutil.walk_packages(sympow.kernels.__path__, "sympow.kernels."):
        module = importlib.import_module(info.name)
        for node in ast.walk(ast.parse(Path(module.__file__).read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "launch":
                name = getattr(node.args[0], "id", "")
                if isinstance(getattr(module, name, None), KernelInterface):
                    found.append((module, name))
    return found


@pytest.fixture
def recorders(monkeypatch):
    """A recorder in the place of every kernel, by module and name."""
    found = {}
    for module, name in launched_kernels():
        key = f"{module.__name__.removeprefix('sympow.kernels.')}.{name}"
        if key not in found:
            found[key] = Recorder()
            monkeypatch.setattr(module, name, found[key])
    return found


def attend(batch, heads, chunks, power, form, *, states=False, dtype=torch.float32, dim=16):
    """Forward and backward pass with everything that has a kernel of its own."""
    x = random_inputs(0, batch=batch, heads=2 * heads, key_heads=heads, length=128 * chunks + 1, dim=dim, value_dim=dim,
                      rotation="pairs", dtype=torch.float32).rounded(dtype).requires_grad()  # fmt: skip
    initial = sympow.State.zeros(batch, heads, 16, 16, power=power, rotated=True) if states else None
    chunk = {"chunk_size": 128} if form == "chunked" else {}
    result = sympow.attention(
        **x.arguments(), power=power, form=form, backend="triton", initial_state=initial, return_state=states, **chunk
    )
    (result[0] if states else result).sum().backward()


def attend_on_hopper(batch, heads, chunks, form, dim, dtype=torch.bfloat16):
    with on_hopper():
        attend(batch, heads, chunks, 2, form, dtype=dtype, dim=dim)


def attend_in_pieces(batch, heads, chunks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_float32, "ON_CPU", True)
        attend(batch, heads, chunks, 2, "attention")


def attend_with_pair_gates(batch, heads, chunks):
    q, k = (torch.empty(batch, 128 * chunks + 1, n * heads, 16, requires_grad=True) for n in (2, 1))
    log_gamma = torch.empty(batch, q.shape[1], heads, 8, requires_grad=True)
    for chunk in (0, 128):
        y, *_ = fused_pair_attention(q, k, k, log_gamma, None, None, 2, chunk, True)
        y.sum().backward()


def attend_to_shard(batch, heads, chunks):
    x = random_inputs(0, batch=batch, heads=heads, length=128 * chunks + 1, dim=32, value_dim=32, rotation="none",
                      dtype=torch.float32)  # fmt: skip
    plan = shard.Plan(128, initial=True, return_state=True)
    gates = shard.gate_sums(x.log_gamma)
    state = unpack(pack(shard.fold(x.k, x.v, gates, plan).end).unsqueeze(0), (batch, heads, 32, 32))
    out = shard.Outputs.new(x.q, x.v, plan)
    shard.attend(x.q, x.k, x.v, gates, shard.fold(x.k, x.v, gates, plan).chunks, state, out)
    rows = shard.prepare_gradient(x.v, x.q, out)
    shard.fold_gradient(rows, x.k, gates, out.state_share, plan)


def decode(batch, heads, chunks):
    x = random_inputs(0, batch=batch, heads=2 * heads, key_heads=heads, length=2, dim=16, value_dim=16,
                      dtype=torch.float32)  # fmt: skip
    first, token = x.time(0, 1), x.time(1, 2)
    _, state = run(first, 2, "chunked", backend="torch", return_state=True)
    run(token, 2, "recurrent", backend="triton", initial_state=state)
    window = Window.open(state, capacity=128 * chunks)
    window.step(**token.arguments(), backend="triton")
    window.fold("triton")
    _, keys = softmax_attention(**first.arguments(), return_state=True)
    KeyValueCache.open(keys, capacity=128 * chunks).step(**token.arguments(), backend="triton")
    width = torch.empty(heads * 8, 32)
    step_gates(torch.empty(batch, 32), width, torch.empty(heads * 8), width)


def cross_entropy(batch, heads, chunks):
    cross_entropy_in_place(torch.empty(batch * chunks, heads), torch.zeros(batch * chunks, dtype=torch.int64), 1, 1.0)


# Every family of kernels, as functions of batch size, key heads and chunks.
FAMILIES = {
    "attention": lambda *sizes: attend(*sizes, 2, "attention"),
    "chunked": lambda *sizes: attend(*sizes, 2, "chunked", states=True),
    "float16": lambda *sizes: attend(*sizes, 2, "chunked", states=True, dtype=torch.float16),
    "float32 in pieces": attend_in_pieces,
    "quartic": lambda *sizes: attend(*sizes, 4, "chunked"),
    "hopper": lambda *sizes: attend_on_hopper(*sizes, "attention", 128),
    "hopper, chunked": lambda *sizes: attend_on_hopper(*sizes, "chunked", 128),
    "hopper, float16": lambda *sizes: attend_on_hopper(*sizes, "attention", 64, torch.float16),
    "hopper, short sequences": lambda *sizes: attend_on_hopper(*sizes, "attention", 64),
    "running sums": lambda batch, heads, chunks: gate_sums(torch.empty(batch, 1024 * chunks, heads)),
    "a gate per pair": attend_with_pair_gates,
    "shard": attend_to_shard,
    "decode": decode,
    "cross entropy": cross_entropy,
}


@interpreted
def test_only_the_first_axis_of_a_grid_grows(recorders, monkeypatch):
    """With batch, heads and chunks; and no kernel is left out."""
    # Makes `two_axis_grid` flat, as it is for many sequences.
    monkeypatch.setattr(launches, "MOST_ON_SECOND_AXIS", 0)
    grids = []
    for sizes in [(2, 3, 3), (4, 3, 3), (2, 6, 3), (2, 3, 6)]:
        for family in FAMILIES.values():
            family(*sizes)
        grids.append({name: list(recorder.grids) for name, recorder in recorders.items()})
        for recorder in recorders.values():
            recorder.grids.clear()
    assert [name for name, launches in grids[0].items() if not launches] == []
    for name in recorders:
        assert sum(grid[0] for grid in grids[1][name]) > sum(grid[0] for grid in grids[0][name]), name
        for first, *larger in zip(*(of_sizes[name] for of_sizes in grids), strict=True):
            # More keys in a window or a cache are split among more CTAs: `test_splits_are_few`.
            compared = larger[:2] if name.startswith("decode.") else larger
            assert all(axis <= most for grid in compared for axis, most in zip(grid[1:], first[1:], strict=True)), name


def test_splits_are_few():
    """A decoding step has an axis for the CTAs that share a head: as many as run at once, however large the cache."""
    for sequences in (1, 1000, 2**20):
        window = split_window(sequences, 10**7, 64, 1, 10**7, has_state=True)
        assert window.window_splits + window.count <= 10_000
        assert split_keys(sequences, 10**9)[0] <= 10_000
        assert split_state(sequences, 10**7, 64, 1).count <= 10_000


def test_a_grid_that_cuda_cannot_launch_is_refused():
    assert flat_grid(2, 3, 5) == (30,)
    assert flat_grid(MOST_PROGRAMS) == (2**31 - 1,)
    with pytest.raises(ValueError, match=r"65,536 × 32,768 = 2,147,483,648 CTAs, and CUDA .* 2,147,483,647: split"):
        flat_grid(65_536, 32_768)


def test_a_second_axis_is_used_where_it_fits():
    assert two_axis_grid(3, 65_535) == (3, 65_535)
    assert two_axis_grid(3, 65_536) == (196_608,)
    with pytest.raises(ValueError, match="CTAs"):
        two_axis_grid(2**26, 32)


@interpreted
def test_programs_find_their_tokens_and_columns():
    """With several token blocks, columns and sequences, a wrong grid index would mix them up."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2050, 3, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(running_sum(x), x.cumsum(1).transpose(1, 2), rtol=0, atol=1e-10)
    later = x.flip(1).cumsum(1).flip(1).transpose(1, 2)
    torch.testing.assert_close(running_sum(x, reverse=True), later, rtol=0, atol=1e-10)


@interpreted
@pytest.mark.parametrize("form", ["attention", pytest.param("chunked", marks=pytest.mark.slow)])
def test_programs_find_their_tiles_heads_and_sequences(form):
    """Each of them more than one, and different in number."""
    x = random_inputs(0, batch=2, heads=3, length=260 if form == "attention" else 132, dim=16, value_dim=16,
                      rotation="pairs", dtype=torch.float32)  # fmt: skip
    found, exact = x.requires_grad(), x.map(torch.Tensor.double).requires_grad()
    chunk = {"chunk_size": 128} if form == "chunked" else {}
    y = run(found, 2, form, backend="triton", **chunk)
    expected = run(exact, 2, "attention", backend="torch")
    assert_close(y, expected, float32_tolerance("y", 260), "y")
    for name, got, wanted in zip(found.arguments(), gradients(y, found), gradients(expected, exact), strict=True):
        assert_close(got, wanted, float32_tolerance(name, 260), name)


# On a GPU ------------------------------------------------------------------------------------------------------------


def many_sequences(length, dim=2 * PAIRS, *, pairs=True) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (BATCH, length, HEADS)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator, dtype=torch.bfloat16)

    scales = torch.rand(*shape, *((dim // 2,) if pairs else ()), device="cuda", generator=generator)
    log_gamma = -torch.rand(shape, device="cuda", generator=generator)
    theta = rotary_rates(dim, 100, device="cuda")
    return Inputs(*(normal(*shape, dim) for _ in range(3)), log_gamma, scales, theta)


def sampled(x: Inputs) -> Inputs:
    """Some of the sequences, in float64."""
    return x.map(lambda t: (t[SAMPLED] if t.ndim > 1 else t).double())


def relative_error(found, expected):
    """About 1 for the results of another sequence; below 0.1 for those of bfloat16."""
    return ((found.double() - expected).norm() / expected.norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("power", "form", "length", "dim"),
    [
        (2, "attention", 3, 16),
        (2, "attention", 3, 64),  # the Hopper kernels, on Hopper
        (2, "attention", 3, 128),
        (4, "attention", 3, 16),
        (2, "chunked", 130, 16),
        (4, "chunked", 130, 16),
    ],
)
def test_a_million_columns_give_what_each_sequence_gives_alone(power, form, length, dim):
    x = many_sequences(length, dim)

    def outputs_and_gradients(rows):
        leaves = x.map(lambda t: (t[rows] if t.ndim > 1 else t).clone().requires_grad_())
        y = run(leaves, power, form, backend="triton", **({"chunk_size": 128} if form == "chunked" else {}))
        y.float().square().sum().backward()
        # The gradient of theta is a sum over all sequences.
        return {"y": y} | {name: leaf.grad for name, leaf in leaves.arguments().items() if name != "theta"}

    alone = outputs_and_gradients(SAMPLED)
    for name, together in outputs_and_gradients(slice(None)).items():
        assert torch.equal(together[SAMPLED], alone[name]), name


@pytest.mark.gpu
def test_more_chunks_than_a_second_axis_has_ctas():
    generator = torch.Generator("cuda").manual_seed(0)
    length, tail = 65_537 * 128, 4096
    q, k, v = (torch.randn(1, length, 1, 16, device="cuda", generator=generator).bfloat16() for _ in range(3))
    # Nothing is left of a token 2,000 tokens later, so that the last tokens can be compared without the others.
    x = Inputs(q, k, v, torch.full((1, length, 1), -0.05, device="cuda")).requires_grad()
    exact = x.time(-tail).map(torch.Tensor.double).requires_grad()
    y = run(x, 2, "chunked", chunk_size=128, backend="triton")
    expected = run(exact, 2, "attention", backend="torch")
    late = slice(-1024, None)
    assert relative_error(y[:, late], expected[:, late]) < 2e-2
    found = torch.autograd.grad(y[:, late].float().square().sum(), x.tensors())
    wanted = torch.autograd.grad(expected[:, late].square().sum(), exact.tensors())
    for name, gradient, exact_gradient in zip("qkv", found, wanted, strict=False):
        assert relative_error(gradient[:, late], exact_gradient[:, late]) < 0.1, name


@pytest.mark.gpu
@pytest.mark.parametrize("pairs", [True, False])
def test_many_sequences_are_rotated_as_if_alone(pairs):
    """More columns of β, and more sequences times heads, than CTAs fit along a second axis."""
    x = many_sequences(3, pairs=pairs)

    def rotated(rows):
        scales = x.beta[rows].clone().requires_grad_()
        q, k = fused_rotation(x.q[rows], x.k[rows], scales, x.theta, None, relative=True)
        (q.float().sum() + k.float().sum()).backward()
        return q, k, scales.grad

    for together, alone in zip(rotated(slice(None)), rotated(SAMPLED), strict=True):
        assert torch.equal(together[SAMPLED], alone)


@pytest.mark.gpu
def test_many_sequences_decode_as_if_alone():
    x = many_sequences(2)
    first, token = x.time(0, 1), x.time(1, 2)
    expected = run(sampled(x), 2, "attention", backend="torch")[:, 1:]
    _, state = run(first, 2, "chunked", chunk_size=128, backend="triton", return_state=True)
    assert relative_error(run(token, 2, "recurrent", backend="triton", initial_state=state)[SAMPLED], expected) < 2e-2
    window = Window.open(state, capacity=4, dtype=torch.bfloat16)
    assert relative_error(window.step(**token.arguments(), backend="triton")[SAMPLED], expected) < 2e-2
    window.fold("triton")
    exact = run(sampled(x), 2, "attention", backend="torch", return_state=True)[1]
    assert relative_error(window.close("triton").kv[SAMPLED], exact.kv) < 2e-2


@pytest.mark.gpu
def test_many_sequences_decode_with_softmax_as_if_alone():
    x = many_sequences(2, pairs=False)
    _, keys = softmax_attention(**x.time(0, 1).arguments(), return_state=True)
    y = KeyValueCache.open(keys, capacity=4).step(**x.time(1, 2).arguments(), backend="triton")
    expected = softmax_attention(**sampled(x).arguments())[:, 1:]
    assert relative_error(y[SAMPLED], expected) < 2e-2


@pytest.mark.gpu
def test_many_states_survive_a_message():
    generator = torch.Generator("cuda").manual_seed(0)
    kv = torch.randn(BATCH, HEADS * PAIRS, 4, 4, 4, device="cuda", generator=generator)
    normalizer = torch.randn(BATCH, HEADS * PAIRS, 4, 4, device="cuda", generator=generator)
    symmetric = FullState((kv + kv.transpose(2, 4)) / 2, (normalizer + normalizer.mT) / 2)
    found = unpack(pack(symmetric).unsqueeze(0), (BATCH, HEADS * PAIRS, 4, 4))
    torch.testing.assert_close(found.kv, symmetric.kv)
    torch.testing.assert_close(found.normalizer, symmetric.normalizer)


@pytest.mark.gpu
def test_the_loss_of_a_million_rows():
    generator = torch.Generator("cuda").manual_seed(0)
    rows = BATCH * HEADS * PAIRS
    logits = torch.randn(rows, 24, device="cuda", generator=generator)
    targets = torch.randint(0, 20, (rows,), device="cuda", generator=generator)
    expected = cross_entropy_reference(logits.clone(), targets, 20, 0.5)
    losses = cross_entropy_in_place(logits, targets, 20, 0.5)
    torch.testing.assert_close(losses, expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, expected[1], rtol=1e-4, atol=1e-5)
