import pickle

import pytest
import torch
from torch.utils._pytree import tree_map

import sympow
from support import FORMS, assert_close, random_inputs, run


@pytest.fixture
def state() -> sympow.State:
    _, state = run(random_inputs(0, batch=3, length=7), 2, "chunked", return_state=True)
    return state


def test_bytes_are_those_of_the_tensors(state):
    features = sympow.symmetric_dim(4, 2)
    assert state.nbytes == 3 * 2 * (features * 3 + features + 2) * 8


def test_a_dtype_change_spares_the_phase(state):
    half = state.to(dtype=torch.bfloat16)
    assert half.kv.dtype == half.normalizer.dtype == torch.bfloat16
    assert half.phase.dtype == torch.float64
    assert torch.equal(half.phase, state.phase)
    assert (half.power, half.key_dim) == (2, 4)


@pytest.mark.parametrize("rotation", ["none", "fixed"])
def test_a_saved_state_continues_as_if_nothing_happened(rotation, tmp_path):
    inputs = random_inputs(1, length=12, rotation=rotation)
    expected = run(inputs, 2, "attention")
    _, before = run(inputs.time(0, 8), 2, "chunked", return_state=True)
    before.save(tmp_path / "state.pt")
    loaded = sympow.State.load(tmp_path / "state.pt")
    assert_close(run(inputs.time(8), 2, "recurrent", initial_state=loaded), expected[:, 8:], 1e-9, "y")


def test_saving_a_part_writes_only_that_part(state, tmp_path):
    state.save(tmp_path / "all.pt")
    state.select(slice(0, 1)).save(tmp_path / "one.pt")
    sizes = [(tmp_path / name).stat().st_size for name in ("one.pt", "all.pt")]
    assert sizes[0] < sizes[1]


@pytest.mark.parametrize("form", FORMS)
def test_a_state_keeps_nothing_alive_but_itself(form):
    inputs = random_inputs(0, length=100, heads=1)
    _, state = run(inputs, 2, form, return_state=True)
    for tensor in (state.kv, state.normalizer, state.phase):
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_another_file_is_refused(state, tmp_path):
    torch.save({"kv": torch.ones(1)}, tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("not a state")
    state.save(tmp_path / "whole.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:1000])
    for name in ("other.pt", "text.pt", "torn.pt"):
        with pytest.raises(ValueError, match=rf"written by State\.save; .*{name}"):
            sympow.State.load(tmp_path / name)


def test_select_and_cat_are_each_others_inverse(state):
    parts = [state.select(slice(i, i + 1)) for i in range(3)]
    joined = sympow.State.cat(parts)
    assert torch.equal(joined.kv, state.kv)
    assert torch.equal(joined.phase, state.phase)
    swapped = state.select(torch.tensor([2, 0, 0]))
    assert torch.equal(swapped.normalizer[1], state.normalizer[0])


def test_states_that_do_not_belong_together_are_not_joined(state):
    other = sympow.State.zeros(1, 2, 4, 3, 4, rotated=True)
    with pytest.raises(ValueError, match="must agree in"):
        sympow.State.cat([state, other])
    with pytest.raises(ValueError, match="at least one"):
        sympow.State.cat([])


def test_clone_and_detach_are_independent(state):
    copy = state.clone()
    copy.kv.zero_()
    assert state.kv.any()
    assert not state.requires_grad
    state.kv.requires_grad_()
    assert state.requires_grad
    assert not state.detach().requires_grad


def test_a_state_is_a_tree_to_torch(state):
    doubled = tree_map(lambda t: t * 2, state)
    assert isinstance(doubled, sympow.State)
    assert torch.equal(doubled.kv, state.kv * 2)
    assert doubled.power == state.power


def test_a_state_survives_pickling(state):
    assert torch.equal(pickle.loads(pickle.dumps(state)).kv, state.kv)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": torch.zeros(1, 2, 9, 3)}, "kv must be"),
        ({"normalizer": torch.zeros(1, 2, 9)}, "normalizer must be"),
        ({"phase": torch.zeros(1, 2, 3, dtype=torch.float64)}, "phase must be"),
        ({"phase": torch.zeros(1, 2, 2)}, "phase must be one of torch.float64; got torch.float32"),
        ({"kv": torch.zeros(1, 2, 10, 3, dtype=torch.int64)}, "kv must be one of"),
        ({"kv": [1.0]}, "kv must be a tensor, got list"),
        ({"normalizer": torch.zeros(1, 2, 10, device="meta")}, "normalizer must be on the device of kv, cpu; got meta"),
    ],
)
def test_inconsistent_parts_are_refused(changes, message):
    phase = torch.zeros(1, 2, 2, dtype=torch.float64)
    parts = {"kv": torch.zeros(1, 2, 10, 3), "normalizer": torch.zeros(1, 2, 10), "phase": phase}
    with pytest.raises((ValueError, TypeError), match=message):
        sympow.State(**{**parts, **changes}, power=2, key_dim=4)
