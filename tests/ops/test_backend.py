"""The choice of a backend: a pure function, so every case can be asked for without a GPU."""

from dataclasses import replace

import pytest
import torch

from sympow.ops.dispatch import Request, choose_backend

TYPICAL = Request(device="cuda", dtype=torch.bfloat16, power=2, key_dim=64, value_dim=64)


def choose(backend: str, available: bool = True, interpreted: bool = False, **changes) -> str:
    return choose_backend(backend, replace(TYPICAL, **changes), available=lambda: available, interpreted=interpreted)


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
        {"step": True},
        {"step": True, "form": "chunked", "chunk_size": 64},
        {"step": True, "form": "recurrent"},
        {"step": True, "power": 4, "form": "chunked"},
        {"step": True, "sequences": 65_536},
    ],
)
def test_auto_takes_the_kernels_on_a_gpu(changes):
    assert choose("auto", **changes) == "triton"
    assert choose("triton", **changes) == "triton"
    assert choose("torch", **changes) == "torch"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"available": False}, "Triton is not installed"),
        ({"device": "cpu"}, "kernels need a CUDA device, and q is on cpu"),
        ({"dtype": torch.float64}, "not torch.float64"),
        ({"dtype": torch.float16}, "not torch.float16"),
        ({"dtype": torch.float32}, "kernels take torch.bfloat16, not torch.float32"),
        ({"power": 10}, "powers up to 8, not 10"),
        ({"key_dim": 256}, "head dims up to 128"),
        ({"value_dim": 200}, "head dims up to 128"),
        ({"vector_gate": True}, "one gate per head"),
        ({"sequences": 65_536}, "at most 65,535 sequences times query heads"),
        ({"form": "recurrent"}, "one token from a state, without gradients, only"),
        ({"form": "chunked", "power": 6}, "not power 6 and 64"),
        ({"form": "chunked", "power": 4}, "not power 4 and 64"),
        ({"chunk_size": 100}, "multiples of 128, not 100"),
    ],
)
def test_what_kernels_cannot_serve_goes_to_torch_or_is_refused_with_the_reason(changes, reason):
    assert choose("auto", **changes) == "torch"
    with pytest.raises(ValueError, match=rf"backend='triton' cannot serve this call: .*{reason}"):
        choose("triton", **changes)


def test_high_powers_take_the_kernels_only_when_asked():
    assert choose("auto", power=6) == "torch"
    assert choose("triton", power=6) == "triton"


def test_the_interpreter_serves_those_who_ask_on_a_cpu():
    assert choose("auto", device="cpu", dtype=torch.float32, interpreted=True) == "torch"
    assert choose("triton", device="cpu", dtype=torch.float32, interpreted=True) == "triton"
    with pytest.raises(ValueError, match=r"kernels take torch\.float32, not torch\.bfloat16"):
        choose("triton", device="cpu", interpreted=True)
