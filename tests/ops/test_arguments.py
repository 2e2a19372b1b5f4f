"""Wrong arguments of what is public beside `attention` are named, with what came and what was expected."""

import traceback

import pytest
import torch

import sympow
from sympow import tensor_file
from sympow.layers import ConformalAttention, SoftmaxAttention
from sympow.ops.key_value_cache import KeyValueCache
from sympow.ops.state import FORMAT
from sympow.ops.torch.softmax import softmax_attention

Q = torch.ones(1, 6, 2, 4)
THETA = torch.ones(2)


def zeros(batch=1, heads=1, key_dim=4, value_dim=4, power=2, rotated=True, **options):
    return sympow.State.zeros(batch, heads, key_dim, value_dim, power, rotated=rotated, **options)


def empty(batch=2, heads=1, key_dim=4, value_dim=4, power=2, rotated=True, **options):
    return sympow.Window.empty(batch, heads, key_dim, value_dim, power, rotated=rotated, **options)


def softmax_cache():
    return KeyValueCache.open(softmax_attention(Q, Q, Q, return_state=True)[1], capacity=8)


OF_ANOTHER_TYPE = {
    "no keys": (lambda: sympow.attention(Q, None, Q), "k must be a tensor, got NoneType"),
    "a list of keys": (lambda: sympow.attention(Q, [1.0], Q), "k must be a tensor, got list"),
    "a list of values": (lambda: sympow.attention(Q, Q, [1.0]), "v must be a tensor, got list"),
    "no keys for a window": (lambda: empty().extend(None, Q), "k must be a tensor, got NoneType"),
    "sparse queries": (
        lambda: sympow.attention(Q.to_sparse(), Q, Q),
        "q must be a dense tensor, got one with layout torch.sparse_coo",
    ),
    "sparse gates": (
        lambda: sympow.attention(Q, Q, Q, log_gamma=torch.zeros(1, 6, 2).to_sparse()),
        "log_gamma must be a dense tensor",
    ),
    "a matrix of integers": (
        lambda: sympow.symmetric_power_of_matrix(torch.tensor([[0, 1], [1, 0]]), 2),
        "matrix must be floating point, .*; got torch.int64",
    ),
    "no matrix": (lambda: sympow.symmetric_power_of_matrix([[1.0]], 2), "matrix must be a tensor, got list"),
    "no vector": (lambda: sympow.symmetric_power([1.0], 2), "x must be a tensor, got list"),
    "half an entry": (lambda: sympow.symmetric_dim(4.5, 2), "dim must be an int, got float"),
    "half a power": (lambda: sympow.symmetric_dim(4, 2.5), "power must be an int, got float"),
    "heads of a state": (lambda: zeros(heads=1.5), "heads must be an int, got float"),
    "dtype of a state": (lambda: zeros(dtype=torch.int64), "dtype must be one of .*; got torch.int64"),
    "row to put": (lambda: empty().put(1.5, zeros()), "row must be an int, got float"),
    "row to take": (lambda: empty().take("0"), "row must be an int, got str"),
    "row of a cache": (lambda: softmax_cache().put(0.5, None), "row must be an int, got float"),
    "tokens into a layer": (
        lambda: ConformalAttention(width=8, heads=2)(torch.ones(1, 3, 8, dtype=torch.int64)),
        "x must be floating point, .*; got torch.int64",
    ),
    "dim of rates": (lambda: sympow.rotary_rates("4", 8), "dim must be an int, got str"),
    "document of rates": (lambda: sympow.rotary_rates(4, "8"), "max_document must be a number, got str"),
    "dtype of rates": (lambda: sympow.rotary_rates(4, 8, dtype="float32"), "dtype must be a floating-point dtype"),
    "rates of phases": (lambda: sympow.accumulate_phase([1.0], length=3), "theta must be a tensor, got list"),
    "length of phases": (lambda: sympow.accumulate_phase(THETA, length=2.5), "length must be an int, got float"),
    "vector to rotate": (lambda: sympow.rotate([1.0, 2.0], THETA), "x must be a tensor, got list"),
    "name of a preset": (lambda: sympow.GPTConfig.preset(124), "name must be a string, got int"),
}

WRONG = {
    "keys of one axis": (lambda: sympow.attention(Q, torch.ones(4), Q), r"k must be \(batch, .*got shape \(4,\)"),
    "values of one axis": (lambda: sympow.attention(Q, Q, torch.ones(4)), r"v must be \(batch, .*got shape \(4,\)"),
    "documents without values": (
        lambda: sympow.attention(Q, Q, Q, cu_seqlens=torch.zeros(3, dtype=torch.int32, device="meta")),
        "cu_seqlens is on the meta device",
    ),
    "row beyond the batch": (lambda: empty().take(9), "row must be between 0 and 1, got 9"),
    "row before the batch": (lambda: empty().take(-1), "row must be between 0 and 1, got -1"),
    "odd power of a state": (lambda: zeros(power=3), "power must be even and at least 2, got 3"),
    "negative batch of a state": (lambda: zeros(batch=-1), "batch must be at least 1, got -1"),
    "no values in a state": (lambda: zeros(value_dim=0), "value_dim must be at least 1, got 0"),
    "odd rotated state": (lambda: zeros(key_dim=3), "key_dim must be even .*, got 3"),
    "no sequences in a window": (lambda: empty(batch=0), "batch must be at least 1, got 0"),
    "no heads in a window": (lambda: empty(heads=0), "heads must be at least 1, got 0"),
    "pairs of beta": (
        lambda: sympow.accumulate_phase(THETA, torch.ones(1, 3, 2, 5)),
        "beta must have a scale for each of the 2 pairs of theta, got 5",
    ),
    "phase of other pairs": (
        lambda: sympow.accumulate_phase(THETA, torch.ones(1, 3, 2), torch.zeros(1, 2, 5)),
        r"initial_phase must be \(1, 2, 2\), got shape \(1, 2, 5\)",
    ),
    "phase of other heads": (
        lambda: sympow.accumulate_phase(THETA, torch.ones(1, 3, 2), torch.zeros(1, 3, 2)),
        r"initial_phase must be \(1, 2, 2\), got shape \(1, 3, 2\)",
    ),
    "phase of one axis": (
        lambda: sympow.accumulate_phase(THETA, None, torch.zeros(2), length=3),
        r"initial_phase must be \(batch, heads, 2\), got shape \(2,\)",
    ),
    "negative length": (lambda: sympow.accumulate_phase(THETA, length=-1), "length must be at least 0, got -1"),
    "unknown preset": (lambda: sympow.GPTConfig.preset("nope"), "name must be one of 'gpt2-124m'.*got 'nope'"),
    "documents with a state": (
        lambda: SoftmaxAttention(width=8, heads=2)(torch.ones(1, 3, 8), cu_seqlens=torch.tensor([0, 1, 3])),
        r"cu_seqlens cannot be combined with return_state=True \(pass return_state=False\)",
    ),
}


@pytest.mark.parametrize("case", OF_ANOTHER_TYPE)
def test_an_argument_of_another_type_is_named(case):
    call, message = OF_ANOTHER_TYPE[case]
    with pytest.raises(sympow.errors.ArgumentTypeError, match=f"^{message}"):
        call()


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_argument_is_named(case):
    call, message = WRONG[case]
    with pytest.raises(sympow.errors.ArgumentError, match=f"^{message}"):
        call()


def test_documents_in_a_softmax_layer_without_a_state():
    layer = SoftmaxAttention(width=8, heads=2)
    y, state = layer(torch.ones(1, 3, 8), cu_seqlens=torch.tensor([0, 1, 3]), return_state=False)
    assert y.shape == (1, 3, 8)
    assert state is None


@pytest.mark.parametrize("angle", [float("nan"), 1e300, -4.0])
def test_a_file_whose_phase_is_no_angle_is_refused(tmp_path, angle):
    state = zeros()
    state.phase[0, 0, 1] = angle
    # With a right checksum, as a program makes one that changes a file on purpose.
    tensors = {"kv": state.kv, "normalizer": state.normalizer, "phase": state.phase}
    tensor_file.save(tmp_path / "state", FORMAT, tensors, {"power": "2", "key_dim": "4"})
    with pytest.raises(sympow.errors.ArgumentError, match=r"path must name .*: phase must lie within ±π, got"):
        sympow.State.load(tmp_path / "state")


def test_a_phase_of_half_a_turn_is_an_angle(tmp_path):
    state = zeros()
    state.phase[:] = torch.pi
    state.save(tmp_path / "state")
    assert torch.equal(sympow.State.load(tmp_path / "state").phase, state.phase)


def test_a_missing_folder_is_told_without_the_name_of_a_temporary_file(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        zeros().save(tmp_path / "missing" / "state")
    assert raised.value.filename == str(tmp_path / "missing" / "state")
    assert ".partial" not in "".join(traceback.format_exception(raised.value))
