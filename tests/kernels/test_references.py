"""Every kernel in float32 in Triton's interpreter against its plain PyTorch reference in float64."""

import pytest
import torch

from support import Inputs, interpreted, random_inputs

pytest.importorskip("triton", reason="needs Triton")

from sympow.kernels.attention.op import fused_attention, query_scales
from sympow.kernels.attention.reference import attention_reference
from sympow.kernels.common import Documents, close_gates, locate
from sympow.kernels.cross_entropy import cross_entropy_in_place
from sympow.kernels.decode.op import fused_decode, fused_fold, fused_softmax_step, fused_window_step
from sympow.kernels.decode.reference import (
    decode_step_reference,
    softmax_step_reference,
    state_copy_reference,
    window_fold_reference,
    window_step_reference,
)
from sympow.kernels.decode.softmax_step import softmax_workspace
from sympow.kernels.decode.window_step import window_workspace
from sympow.kernels.reference import cross_entropy_reference, rotation_reference, running_sum_reference
from sympow.kernels.rotary import fused_rotation
from sympow.kernels.running_sums import gate_sums, running_sum
from sympow.kernels.states.full_state import FullState
from sympow.kernels.states.message_packing import pack, unpack
from sympow.kernels.states.quadratic import chunk_sums, scan_sums
from sympow.kernels.states.reference import chunk_states_reference, pack_reference, unpack_reference
from sympow.ops.symmetric import feature_indices, multinomial_weights

pytestmark = interpreted
POWER = 2


def close(actual, expected, what: str, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}"
    )


def double(*tensors):
    return [None if x is None else x.double() for x in tensors]


def token_of(inputs: Inputs) -> list:
    """Vectors, gate and rotation of the first token."""
    first = [inputs.q, inputs.k, inputs.v, inputs.log_gamma, inputs.beta]
    return [*(None if x is None else x[:, 0] for x in first), inputs.theta]


def state_of(inputs: Inputs):
    """A state made of the tokens after the first, and the tables of its features."""
    index = feature_indices(inputs.k.shape[-1], POWER, inputs.k.device)
    weight = multinomial_weights(inputs.k.shape[-1], POWER, torch.float32, inputs.k.device)
    phi = inputs.k[:, 1:, :, index.long()].prod(-1) * weight
    return torch.einsum("bthD,bthe->bhDe", phi, inputs.v[:, 1:]), phi.sum(1), index, weight


@pytest.mark.parametrize("reverse", [False, True])
def test_running_sums(reverse):
    x = torch.randn(2, 1030, 3, generator=torch.Generator().manual_seed(0))
    close(running_sum(x, reverse=reverse), running_sum_reference(x, reverse=reverse), "sums", 1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rotation", ["fixed", "scale", "pairs"])
def test_rotations(rotation, packed):
    inputs = random_inputs(0, length=40, heads=4, key_heads=2, dim=6, rotation=rotation, dtype=torch.float32)
    start = None if packed else torch.rand(1, 2, 3, dtype=torch.float64)
    documents = locate(torch.tensor([0, 13, 40]), 40) if packed else None
    found = fused_rotation(inputs.q, inputs.k, inputs.beta, inputs.theta, start, documents)
    expected = rotation_reference(
        *double(inputs.q, inputs.k, inputs.beta, inputs.theta), start, None if documents is None else documents.start
    )
    for name, got, want in zip("qk", found, expected, strict=True):
        close(got, want, name)


def test_cross_entropy():
    logits, targets = torch.randn(3, 40), torch.tensor([0, 32, 7])
    expected = cross_entropy_reference(logits.double(), targets, 33, 0.5)
    losses = cross_entropy_in_place(logits, targets, 33, 0.5, block=16)
    close(losses, expected[0], "losses")
    close(logits, expected[1], "gradient")


@pytest.mark.parametrize(("power", "gate", "chunk", "packed"), [(2, "scalar", 0, True), (4, "none", 128, False)])
def test_attention(power, gate, chunk, packed):
    inputs = random_inputs(1, length=150, heads=2, key_heads=1, dim=8, value_dim=5, gate=gate, rotation="none",
                           dtype=torch.float32)  # fmt: skip
    documents, log_gamma = None, inputs.log_gamma
    if packed:
        documents = Documents(*locate(torch.tensor([0, 40, 110, 150]), 150))
        log_gamma = close_gates(log_gamma, documents, 1)
    given = (inputs.q, inputs.k, inputs.v, log_gamma, *(documents or (None, None)), None, None)
    y, weight, *_ = fused_attention(*given, power, chunk, given[0].shape[-1], False, False, False)
    expected_y, expected_weight = attention_reference(
        *double(inputs.q, inputs.k, inputs.v, inputs.log_gamma), power, chunk=chunk,
        document_start=None if documents is None else documents.start,
    )  # fmt: skip
    close(y, expected_y, "y")
    scales = query_scales(inputs.q).double() ** power
    close(weight / scales, expected_weight, "weights")


@pytest.mark.parametrize("gate", ["scalar", "none"])
def test_chunk_states(gate):
    inputs = random_inputs(2, length=300, heads=1, dim=16, value_dim=16, gate=gate, rotation="none",
                           dtype=torch.float32)  # fmt: skip
    gates = None if inputs.log_gamma is None else gate_sums(inputs.log_gamma)
    states, _, _ = scan_sums(chunk_sums(inputs.k, inputs.v, 1, gates, 128, full=True))
    kv, normalizer = chunk_states_reference(*double(inputs.k, inputs.v, inputs.log_gamma), 128)
    close(torch.cat([states.first_half, states.second_half], dim=3), kv, "S")
    close(states.normalizer, normalizer, "Z")


def test_messages():
    generator = torch.Generator().manual_seed(3)
    state = FullState(
        torch.randn(2, 3, 16, 32, 16, generator=generator), torch.randn(2, 3, 16, 16, generator=generator)
    )
    sums = -torch.rand(2, 3, 7, dtype=torch.float64, generator=generator)
    message = pack(state, sums)
    expected = pack_reference(*state, sums[..., -1] / 2)
    numbers = len(message) - 2 * 6
    close(message[:numbers], expected[:numbers], "message")
    assert torch.equal(message[numbers:].view(torch.int32), expected[numbers:].view(torch.int32)), "bits of decays"
    found = unpack(message.unsqueeze(0), (2, 3, 16, 32), decays=True)
    kv, normalizer, log_decay = unpack_reference(expected, (2, 3, 16, 32))
    close(found.kv, kv, "kv")
    close(found.normalizer, normalizer, "normalizer")
    assert torch.equal(log_decay, sums[..., -1] / 2)


@pytest.mark.parametrize(("gate", "rotation"), [("scalar", "scale"), ("none", "pairs"), ("scalar", "none")])
def test_one_token_from_a_state(gate, rotation):
    inputs = random_inputs(4, batch=2, heads=4, key_heads=2, dim=6, value_dim=5, gate=gate, rotation=rotation,
                           dtype=torch.float32)  # fmt: skip
    kv, normalizer, index, weight = state_of(inputs)
    phase = None if rotation == "none" else torch.rand(2, 2, 3, dtype=torch.float64)
    token = token_of(inputs)
    found = fused_decode(*token, kv, normalizer, phase, index, weight)
    expected = decode_step_reference(*double(*token, kv, normalizer), phase, index, weight.double())
    for name, got, want in zip(("y", "kv", "normalizer", "phase"), found, expected, strict=True):
        if want is not None:
            close(got, want, name)


@pytest.mark.parametrize(("with_state", "copied"), [(True, False), (True, True), (False, False)])
def test_steps_and_folds_of_a_window(with_state, copied):
    inputs = random_inputs(5, batch=2, length=9, heads=4, key_heads=2, dim=6, value_dim=5, dtype=torch.float32)
    state = kv, normalizer, index, weight = state_of(inputs)
    capacity, count = 8, 3
    keys, values = torch.zeros(2, 2, 6, capacity), torch.zeros(2, 2, capacity, 5)
    sums = torch.zeros(2, 2, capacity, dtype=torch.float64)
    keys[..., :count] = inputs.k[:, 1 : count + 1].permute(0, 2, 3, 1)
    values[..., :count, :] = inputs.v[:, 1 : count + 1].transpose(1, 2)
    sums[..., :count] = inputs.log_gamma[:, 1 : count + 1].transpose(1, 2).double().cumsum(-1) / POWER
    phase, length = torch.rand(2, 2, 3, dtype=torch.float64), torch.full((2, 2), count, dtype=torch.int32)
    token = token_of(inputs)
    held = (keys[..., :count].double(), values[..., :count, :].double(), sums[..., :count].clone())
    given = (kv, normalizer, index, weight) if with_state else (None,) * 4
    copy, scale = state_copy_reference(kv) if copied else (None, None)
    read = copy if copied else given[0]
    if copied:
        given = (copy.double() * scale.unsqueeze(-1), *given[1:])
    expected = window_step_reference(
        *double(*token, *given[:2]), *held, phase.clone(), given[2], *double(given[3]), POWER
    )  # fmt: skip
    arrivals = torch.zeros(2, 2, dtype=torch.int32)
    features = 0 if not with_state else len(weight)
    workspace = torch.empty(window_workspace(2, 2, 2, 6, 5, features, capacity, has_state=with_state, copied=copied))
    y = fused_window_step(
        *token, read, given[1], scale, keys, values, sums, length, phase, arrivals, workspace, *given[2:], POWER
    )  # fmt: skip
    found = (y, keys[..., : count + 1], values[..., : count + 1, :], sums[..., : count + 1], phase)
    for name, got, want in zip(("y", "keys", "values", "sums", "phase"), found, expected, strict=True):
        close(got, want, name)
    assert (length == count + 1).all()
    folded = window_fold_reference(*double(kv, normalizer), *expected[1:4], index, weight.double())
    kv, normalizer = state[0].clone(), state[1].clone()
    fused_fold(kv, normalizer, copy, scale, keys, values, sums, length, arrivals, index, weight)
    close(kv, folded[0], "kv")
    if copied:
        rounded, scales = state_copy_reference(kv)
        assert torch.equal(copy, rounded)
        assert torch.equal(scale, scales)
    close(normalizer, folded[1], "normalizer")
    assert not length.any()


@pytest.mark.parametrize("gate", ["scalar", "none"])
def test_steps_of_softmax(gate):
    inputs = random_inputs(6, batch=2, length=9, heads=4, key_heads=2, dim=6, value_dim=5, gate=gate,
                           dtype=torch.float32)  # fmt: skip
    capacity, count = 8, 3
    keys, values = torch.zeros(2, 2, capacity, 6), torch.zeros(2, 2, capacity, 5)
    keys[:, :, :count] = inputs.k[:, 1 : count + 1].transpose(1, 2)
    values[:, :, :count] = inputs.v[:, 1 : count + 1].transpose(1, 2)
    sums = None
    if gate == "scalar":
        sums = torch.zeros(2, 2, capacity, dtype=torch.float64)
        sums[..., :count] = inputs.log_gamma[:, 1 : count + 1].transpose(1, 2).double().cumsum(-1)
    phase, length = torch.rand(2, 2, 3, dtype=torch.float64), torch.full((2, 2), count, dtype=torch.int32)
    token = token_of(inputs)
    held = (keys[:, :, :count].double(), values[:, :, :count].double())
    expected = softmax_step_reference(
        *double(*token), *held, None if sums is None else sums[..., :count].clone(), phase.clone()
    )
    workspace = torch.empty(softmax_workspace(4, 2, 5, capacity))
    arrivals = torch.zeros(2, 2, dtype=torch.int32)
    y = fused_softmax_step(*token, keys, values, sums, length, phase, arrivals, workspace)
    found = (y, keys[:, :, : count + 1], values[:, :, : count + 1], None if sums is None else sums[..., : count + 1])
    for name, got, want in zip(("y", "keys", "values", "sums", "phase"), (*found, phase), expected, strict=True):
        if want is not None:
            close(got, want, name)
