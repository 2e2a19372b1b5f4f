"""The choice of a backend, the one module that makes it, and the way from `sympow.attention` to a kernel launch."""

import ast
import importlib
import pkgutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sympow
from support import interpreted, on_hopper, random_inputs, run
from sympow.ops import dispatch
from sympow.ops.dispatch import Request, choose_backend

TYPICAL = Request(device="cuda", dtype=torch.bfloat16, power=2, key_dim=64, value_dim=64)


@pytest.fixture
def choose(monkeypatch):
    """`choose_backend` for a typical call with some changes, with Triton compiled, interpreted or missing."""

    def choose(backend: str, available: bool = True, interpreted: bool = False, **changes) -> str:
        monkeypatch.setattr(dispatch, "triton_available", lambda: available)
        monkeypatch.setattr(dispatch, "triton_interpreted", lambda: interpreted)
        return choose_backend(backend, replace(TYPICAL, **changes))

    return choose


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"power": 4},
        {"form": "attention"},
        {"form": "chunked", "chunk_size": 256},
        {"form": "chunked", "power": 4, "key_dim": 32},
        {"form": "chunked", "key_dim": 128, "value_dim": 128},
        {"key_dim": 128, "value_dim": 16},
        {"dtype": torch.float16},
        {"dtype": torch.float16, "form": "chunked"},
        {"dtype": torch.float32},
        {"dtype": torch.float32, "form": "chunked", "power": 4, "key_dim": 32},
        {"step": True},
        {"step": True, "form": "chunked", "chunk_size": 64},
        {"step": True, "form": "recurrent"},
        {"step": True, "power": 4, "form": "chunked"},
    ],
)
def test_auto_takes_the_kernels_on_a_gpu(choose, changes):
    assert choose("auto", **changes) == "triton"
    assert choose("triton", **changes) == "triton"
    assert choose("torch", **changes) == "torch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"available": False}, "riton is not installed"),
        ({"device": "cpu"}, "kernels need a CUDA device, and q is on cpu"),
        (
            {"dtype": torch.float64},
            "kernels support torch.bfloat16, torch.float16 and torch.float32, not torch.float64",
        ),
        (
            {"dtype": torch.float16, "form": "chunked", "power": 4, "key_dim": 16},
            "power 4 do not support torch.float16",
        ),
        ({"dtype": torch.float16, "vector_gate": True}, r"rotated pair for torch\.bfloat16, not torch\.float16"),
        ({"dtype": torch.float32, "vector_gate": True}, r"rotated pair for torch\.bfloat16, not torch\.float32"),
        ({"power": 10}, "powers up to 8, not 10"),
        ({"key_dim": 256}, "head dims up to 128, not 2"),
        ({"value_dim": 200}, "head dims up to 128, not 2"),
        ({"vector_gate": True, "power": 4}, "gate per rotated pair for power 2, not 4"),
        ({"vector_gate": True, "step": True}, "decoding step support one gate per head"),
        ({"form": "recurrent"}, "only for one token after a given state, without gradients"),
        ({"form": "chunked", "power": 6}, "not power 6 with key dim 64"),
        ({"form": "chunked", "power": 4}, "not power 4 with key dim 64"),
        ({"chunk_size": 100}, "multiples of 128 as chunk_size, not 100"),
    ],
)
def test_what_kernels_cannot_serve_goes_to_torch_or_is_refused_with_the_reason(choose, changes, reason):
    assert choose("auto", **changes) == "torch"
    with pytest.raises(ValueError, match=rf"backend='triton' does not support this call\. [TK].*{reason}.*\.$"):
        choose("triton", **changes)


def test_high_powers_take_the_kernels_only_when_asked(choose):
    assert choose("auto", power=6) == "torch"
    assert choose("triton", power=6) == "triton"


@pytest.fixture
def gpu(monkeypatch):
    """Makes torch report a GPU of a compute capability, of NVIDIA or AMD."""

    def gpu(capability, hip=None):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.version, "hip", hip)

    return gpu


@pytest.mark.parametrize("changes", [{}, {"power": 4}, {"form": "chunked"}, {"step": True}, {"vector_gate": True}])
def test_gpus_before_ampere_are_refused_with_the_reason(choose, gpu, changes):
    gpu((7, 5))
    assert choose("auto", **changes) == "torch"
    with pytest.raises(ValueError, match=r"need a GPU of compute capability 8\.0 or higher, and this one has 7\.5\."):
        choose("triton", **changes)


@pytest.mark.parametrize(
    ("capability", "hip"), [((8, 0), None), ((8, 9), None), ((10, 0), None), ((12, 1), None), ((9, 4), "6.4")]
)
def test_later_gpus_run_the_kernels(choose, gpu, capability, hip):
    gpu(capability, hip)
    assert choose("auto") == choose("triton") == "triton"


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((10, 0), None), ((12, 0), None), ((9, 0), "6.4")])
@pytest.mark.parametrize("changes", [{"key_dim": 128}, {"value_dim": 80, "form": "chunked"}])
def test_wide_float32_heads_are_refused_except_on_hopper(choose, gpu, capability, hip, changes):
    gpu(capability, hip)
    assert choose("auto", dtype=torch.float32, **changes) == "torch"
    with pytest.raises(ValueError, match=r"heads of up to 64 in torch\.float32, and of up to 128 only on Hopper GPUs"):
        choose("triton", dtype=torch.float32, **changes)
    # Other heads, other dtypes, and decoding, which multiplies no matrices.
    assert choose("auto", dtype=torch.float32) == choose("auto", **changes) == "triton"
    assert choose("auto", dtype=torch.float32, key_dim=128, step=True) == "triton"
    gpu((9, 0))
    assert choose("auto", dtype=torch.float32, **changes) == "triton"


def test_the_interpreter_serves_those_who_ask_on_a_cpu(choose):
    assert choose("auto", device="cpu", dtype=torch.float32, interpreted=True) == "torch"
    assert choose("triton", device="cpu", dtype=torch.float32, interpreted=True) == "triton"
    with pytest.raises(ValueError, match=r"kernels support torch\.float16 and torch\.float32, not torch\.bfloat16"):
        choose("triton", device="cpu", interpreted=True)


SOURCE = Path(sympow.__file__).parent
SOURCES = [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "ops" / "dispatch.py"]
# What a decision would be made from. Kernels assert their own limits; these modules ask about CUDA for other reasons.
LIMITS = {name for name in vars(dispatch) if name.isupper() and not name.startswith("_")} - {
    "CPU",
    "GPU",
    "TYPE_CHECKING",
}
ABOUT_TRITON = {"TRITON_INTERPRET", "get_device_capability", *LIMITS}
ABOUT_CUDA = {
    "generation/decoder.py",  # CUDA graphs
    "generation/sampling.py",  # CUDA events
    "layers/precision.py",  # cuBLAS
    "model/gpt.py",  # cuBLAS
    "model/losses.py",  # cuBLAS
    "ops/key_value_cache.py",  # waiting for the device
    "serving/engine/engine.py",  # sizes of segments and steps
    "serving/engine/prefill_graphs.py",  # CUDA graphs
    "serving/engine/row_sampling.py",  # CUDA graphs and events
    "train/optimizer.py",  # PyTorch's fused optimizers
}


def names_in(path: Path) -> set[str]:
    """Names, attributes and short strings of a source file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_other_module_decides_what_a_kernel_supports(path):
    """Whoever launches a kernel asks `dispatch`; nobody else compares dtypes, powers, dims or devices for it."""
    where = path.relative_to(SOURCE).as_posix()
    if where.startswith(("kernels/", "check/", "data/")):
        return
    names = names_in(path)
    assert not names & ABOUT_TRITON
    assert "is_cuda" not in names or where in ABOUT_CUDA
    launches = any(name.startswith("sympow.kernels") for name in names)
    assert not launches or any("unsupported_reason" in name or "backend" in name for name in names)


def frames_of_launches(monkeypatch) -> list[list[tuple[str, str]]]:
    """A list that grows with each launch by the function and the file of each frame from `attention` to `launch`.

    No kernel runs: which are launched does not depend on their numbers.
    """
    pytest.importorskip("triton", reason="needs Triton")
    import sympow.kernels

    found = []

    def launch(*arguments, **constants):
        frames, frame = [], sys._getframe()
        while not frames or frames[0] != ("attention", "interface.py"):
            assert frame is not None
            frames.insert(0, (frame.f_code.co_name, Path(frame.f_code.co_filename).name))
            frame = frame.f_back
        found.append(frames)

    modules = pkgutil.walk_packages(sympow.kernels.__path__, "sympow.kernels.")
    for module in [importlib.import_module(info.name) for info in modules]:
        if callable(getattr(module, "launch", None)):
            monkeypatch.setattr(module, "launch", launch)
    return found


@interpreted
@pytest.mark.parametrize(
    ("power", "gate", "form", "states", "tokens"),
    [
        (2, "scalar", "attention", False, 130),
        (2, "vector", "attention", False, 30),
        (2, "vector", "chunked", True, 140),
        (2, "scalar", "attention", True, 130),
        (2, "scalar", "chunked", False, 300),
        (2, "scalar", "chunked", True, 300),
        (2, "scalar", "auto", True, 1),
        (4, "scalar", "attention", False, 130),
        (4, "scalar", "chunked", True, 140),
        (4, "scalar", "auto", True, 1),
    ],
)
def test_from_the_operator_to_a_launch_there_are_at_most_seven_frames(monkeypatch, power, gate, form, states, tokens):
    inputs = random_inputs(3, batch=1, length=tokens + 1, heads=2, dim=16, value_dim=16, gate=gate,
                           dtype=torch.float32)  # fmt: skip
    before, after = inputs.time(0, 1), inputs.time(1, tokens + 1)
    state = run(before, power, "auto", return_state=True)[1] if states else None
    found = frames_of_launches(monkeypatch)
    options = {"chunk_size": 128} if form == "chunked" else {}
    run(after, power, form, backend="triton", initial_state=state, return_state=states, **options)
    assert found
    # Those of torch count, too.
    for frames in found:
        assert len(frames) <= 7, frames


@interpreted
@pytest.mark.parametrize(("form", "dim"), [("attention", 64), ("attention", 128), ("chunked", 128)])
def test_on_hopper_there_are_at_most_nine(monkeypatch, form, dim):
    found = frames_of_launches(monkeypatch)
    inputs = random_inputs(3, batch=1, length=300, heads=2, dim=dim, value_dim=dim, dtype=torch.float32)
    with on_hopper():
        run(inputs.rounded(torch.bfloat16), 2, form, backend="triton", chunk_size=128 if form == "chunked" else None)
    assert any(frames[-2][1] in ("forward.py", "short_forward.py") for frames in found)
    for frames in found:
        assert len(frames) <= 9, frames
