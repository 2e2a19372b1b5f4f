import os
import pickle
import resource
import signal
import subprocess
import sys

import pytest
import torch
from torch.utils._pytree import tree_map

import sympow
from support import FORMS, assert_close, flipped, random_inputs, run
from sympow import tensor_file
from sympow.ops.state import FORMAT


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
    (tmp_path / "empty.pt").write_bytes(b"")
    state.save(tmp_path / "whole.pt")
    (tmp_path / "torn.pt").write_bytes((tmp_path / "whole.pt").read_bytes()[:1000])
    os.mkfifo(tmp_path / "pipe.pt")
    for name in ("other.pt", "text.pt", "empty.pt", "torn.pt", "pipe.pt"):
        with pytest.raises(ValueError, match=rf"written by State\.save: .*{name}"):
            sympow.State.load(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        sympow.State.load(tmp_path / "missing.pt")


def small_state() -> sympow.State:
    kv, phase = torch.tensor([1.0, -2.0, 0.5]), torch.tensor([[[0.25]]], dtype=torch.float64)
    return sympow.State(kv.reshape(1, 1, 3, 1), kv.reshape(1, 1, 3).exp(), phase, power=2, key_dim=2)


def same(one, other):
    numbers = (one.power, one.key_dim) == (other.power, other.key_dim)
    return numbers and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in ("kv", "normalizer", "phase")
    )


@pytest.mark.slow
def test_every_flipped_bit_is_noticed(tmp_path):
    small_state().save(tmp_path / "small")
    content = (tmp_path / "small").read_bytes()
    assert same(sympow.State.load(tmp_path / "small"), small_state())
    for bit in range(8 * len(content)):
        (tmp_path / "small").write_bytes(flipped(content, bit))
        with pytest.raises(ValueError, match=r"written by State\.save"):
            sympow.State.load(tmp_path / "small")


def test_every_cut_is_noticed(tmp_path):
    small_state().save(tmp_path / "small")
    content = (tmp_path / "small").read_bytes()
    for length in range(len(content)):
        (tmp_path / "small").write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"written by State\.save"):
            sympow.State.load(tmp_path / "small")
    (tmp_path / "small").write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="is it cut off"):
        sympow.State.load(tmp_path / "small")


@pytest.mark.parametrize("part", ["kv", "normalizer", "power", "key_dim"])
def test_a_part_that_is_missing_in_a_file_is_named(tmp_path, part):
    small_state().save(tmp_path / "small")
    tensors, words = tensor_file.load(tmp_path / "small", FORMAT)
    kept = ({name: x for name, x in parts.items() if name != part} for parts in (tensors, words))
    tensor_file.save(tmp_path / "small", FORMAT, *kept)
    with pytest.raises(ValueError, match=rf"written by State\.save: .*small lacks {part}$"):
        sympow.State.load(tmp_path / "small")


def test_a_failed_save_leaves_the_earlier_file(state, tmp_path):
    small_state().save(tmp_path / "kept")
    # As on a full disk: only a few more bytes can be written.
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with pytest.raises(OSError, match="File too large"):
            state.save(tmp_path / "kept")
    finally:
        signal.signal(signal.SIGXFSZ, handler)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert same(sympow.State.load(tmp_path / "kept"), small_state())
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_file_may_be_cut_off_while_its_state_is_in_use(state, tmp_path):
    code = f"""
import os, sympow
state = sympow.State.load({str(tmp_path / "state")!r})
os.truncate({str(tmp_path / "state")!r}, 0)
print(state.kv.sum().isfinite().item())
"""
    state.save(tmp_path / "state")
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    assert result.stdout == "True\n"


def test_a_link_still_leads_to_what_was_saved(state, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "state")
    state.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert same(sympow.State.load(tmp_path / "there" / "state"), state)


@pytest.mark.parametrize(
    "header",
    [
        b"[1]",
        b"[" * 5000,
        b'{"__metadata__": [], "kv": {}}',
        b'{FORMAT, "x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{FORMAT, "x": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}',
        b'{FORMAT, "x": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4]}}',
        b'{FORMAT, "x": {"dtype": "F4", "shape": [0], "data_offsets": [0, 0]}}',
        b'{FORMAT, "x": {"dtype": "F32", "shape": [9223372036854775808, 0], "data_offsets": [0, 0]}}',
        b'{FORMAT, "x": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 0]}}' % b", ".join([b"0"] * 10**6),
        b'{FORMAT, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}, '
        b'"y": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}}' + bytes(12),
        # It claims four terabytes.
        b'{FORMAT, "x": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}',
    ],
)
def test_a_malformed_header_is_a_value_error(tmp_path, header):
    header = header.replace(b"FORMAT", b'"__metadata__": {"format": "sympow state 2"}')
    (tmp_path / "state").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"written by State\.save"):
        sympow.State.load(tmp_path / "state")


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
