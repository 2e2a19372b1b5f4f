"""Every invalid argument gets a message that names it, what was given and what was expected."""

import pytest
import torch

import sympow
from support import random_inputs
from sympow.ops.torch.softmax import KeyValueState, softmax_attention

T, H, D, E = 6, 2, 4, 3


def arguments(**changes):
    return {**random_inputs(0, length=T, heads=H, dim=D, value_dim=E).arguments(), "power": 2, **changes}


def zeros(*shape, **options):
    return torch.zeros(*shape, **{"dtype": torch.float64, **options})


def state(batch=1, heads=H, key_dim=D, value_dim=E, power=2, rotated=True):
    return sympow.State.zeros(batch, heads, key_dim, value_dim, power, rotated=rotated, dtype=torch.float64)


CASES = {
    "odd power": ({"power": 3}, ValueError, r"power must be even.*got 3.*distribution"),
    "zero power": ({"power": 0}, ValueError, r"power must be even and at least 2, got 0"),
    "negative power": ({"power": -2}, ValueError, r"power .*got -2"),
    "power of another type": ({"power": 2.0}, TypeError, r"power must be an int, got float"),
    "power as bool": ({"power": True}, TypeError, r"power must be an int, got bool"),
    "unknown form": ({"form": "parallel"}, ValueError, r"form must be one of .*'chunked'.*got 'parallel'"),
    "unknown backend": ({"backend": "cuda"}, ValueError, r"backend must be one of .*'torch'.*got 'cuda'"),
    "unavailable backend": (
        {"backend": "triton"},
        ValueError,
        r"does not support .*not torch.float64",
    ),
    "return_state of another type": (
        {"return_state": "no"},
        TypeError,
        r"return_state must be True or False",
    ),
    "zero chunk": ({"chunk_size": 0}, ValueError, r"chunk_size must be at least 1, got 0"),
    "chunk of another type": ({"chunk_size": 2.5}, TypeError, r"chunk_size must be an int, got float"),
    "chunk for another form": ({"chunk_size": 4, "form": "attention"}, ValueError, r"chunk_size.*form='attention'"),
    "q not a tensor": ({"q": [1.0]}, TypeError, r"q must be a tensor, got list"),
    "q without heads": (
        {"q": zeros(1, T, D)},
        ValueError,
        r"q must be \(batch, time, heads, dim\), got shape \(1, 6, 4\)",
    ),
    "integer q": ({"q": torch.zeros(1, T, H, D, dtype=torch.int64)}, TypeError, r"q must be float64.*got torch.int64"),
    "other dtype of k": (
        {"k": zeros(1, T, H, D, dtype=torch.float32)},
        TypeError,
        r"share a dtype.*k is torch.float32",
    ),
    "other device of v": ({"v": zeros(1, T, H, E, device="meta")}, ValueError, r"share a device.*v is on meta"),
    "other time of k": ({"k": zeros(1, T + 1, H, D)}, ValueError, r"share batch and time.*k has \(1, 7\)"),
    "other batch of v": ({"v": zeros(2, T, H, E)}, ValueError, r"share batch and time.*v has \(2, 6\)"),
    "other heads of v": ({"v": zeros(1, T, 1, E)}, ValueError, r"k and v must have the same heads; got 2 and 1"),
    "other dim of k": ({"k": zeros(1, T, H, 6)}, ValueError, r"q and k must have the same head dim; got 4 and 6"),
    "heads that do not divide": ({"q": zeros(1, T, 3, D)}, ValueError, r"heads of q must be a multiple.*got 3 and 2"),
    "no heads": ({"q": zeros(1, T, 0, D)}, ValueError, r"q must not be empty.*\(1, 6, 0, 4\)"),
    "positive log_gamma": ({"log_gamma": zeros(1, T, H) + 0.5}, ValueError, r"log_gamma must not be positive.*0.5"),
    "log_gamma shape": (
        {"log_gamma": zeros(1, T, 3)},
        ValueError,
        r"log_gamma must have shape \(1, 6, 2\) or .*\(1, 6, 3\)",
    ),
    "half log_gamma": (
        {"log_gamma": zeros(1, T, H, dtype=torch.bfloat16)},
        TypeError,
        r"log_gamma must be float32.*bfloat16",
    ),
    "log_gamma not a tensor": ({"log_gamma": -0.1}, TypeError, r"log_gamma must be a tensor, got float"),
    "log_gamma device": (
        {"log_gamma": zeros(1, T, H, device="meta")},
        ValueError,
        r"log_gamma must be on the device.*meta",
    ),
    "beta without theta": ({"theta": None}, ValueError, r"beta scales.*theta is None"),
    "beta shape": (
        {"beta": zeros(1, T)},
        ValueError,
        r"beta must have shape \(1, 6, 2\) or \(1, 6, 2, 2\).*got \(1, 6\)",
    ),
    "theta shape": ({"theta": zeros(D)}, ValueError, r"theta must have shape \(2,\).*got \(4,\)"),
    "half theta": ({"theta": zeros(2, dtype=torch.float16)}, TypeError, r"theta must be float32 or float64.*float16"),
    "rotation of an odd dim": (
        {"q": zeros(1, T, H, 3), "k": zeros(1, T, H, 3)},
        ValueError,
        r"theta rotates pairs.*even head dim; got 3",
    ),
    "documents not a tensor": ({"cu_seqlens": [0, T]}, TypeError, r"cu_seqlens must be a tensor, got list"),
    "documents as floats": (
        {"cu_seqlens": torch.tensor([0.0, T])},
        TypeError,
        r"cu_seqlens must be int32 or int64.*float32",
    ),
    "documents of two axes": (
        {"cu_seqlens": torch.tensor([[0, T]])},
        ValueError,
        r"cu_seqlens must be one axis.*\(1, 2\)",
    ),
    "documents without an end": ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens .*at least two"),
    "documents start late": ({"cu_seqlens": torch.tensor([1, T])}, ValueError, r"cu_seqlens must start at 0, got 1"),
    "documents end early": (
        {"cu_seqlens": torch.tensor([0, 4])},
        ValueError,
        r"cu_seqlens must end at the length, 6; got 4",
    ),
    "documents go back": (
        {"cu_seqlens": torch.tensor([0, 4, 2, T])},
        ValueError,
        r"cu_seqlens must increase.*2 after 4",
    ),
    "an empty document": (
        {"cu_seqlens": torch.tensor([0, 3, 3, T])},
        ValueError,
        r"cu_seqlens must increase.*3 after 3",
    ),
    "documents in a batch": (
        {**random_inputs(0, batch=2, length=T, dim=D).arguments(), "cu_seqlens": torch.tensor([0, T])},
        ValueError,
        r"batch must be 1; got 2",
    ),
    "state of another type": (
        {"initial_state": zeros(3)},
        TypeError,
        r"initial_state must be a sympow.State, got Tensor",
    ),
    "state of another power": (
        {"initial_state": state(power=4)},
        ValueError,
        r"initial_state has power 4, but power is 2",
    ),
    "state of another dim": ({"initial_state": state(key_dim=6)}, ValueError, r"key dim 6, but the head dim of k is 4"),
    "state of another value dim": ({"initial_state": state(value_dim=5)}, ValueError, r"value dim 5, but .* v is 3"),
    "state of other heads": ({"initial_state": state(heads=1)}, ValueError, r"heads 1, but the heads of k is 2"),
    "state of another batch": ({"initial_state": state(batch=3)}, ValueError, r"batch 3, but the batch is 1"),
    "state of other documents": (
        {"initial_state": state(), "cu_seqlens": torch.tensor([0, 2, T])},
        ValueError,
        r"batch 1, but the number of documents is 2",
    ),
    "state without phase": ({"initial_state": state(rotated=False)}, ValueError, r"initial_state has no phase"),
    "state with phase": (
        {"initial_state": state(), "theta": None, "beta": None},
        ValueError,
        r"initial_state has a phase.*theta is None",
    ),
    "state elsewhere": (
        {"initial_state": state().to("meta")},
        ValueError,
        r"initial_state is on meta, but q is on cpu",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_named(case):
    changes, error, message = CASES[case]
    with pytest.raises(error, match=message):
        sympow.attention(**arguments(**changes))


@pytest.mark.parametrize("gate", ["scalar", "vector"])
def test_gates_under_vmap_are_not_read(gate):
    """torch.vmap cannot decide by the values of a tensor, so the sign of gates is not checked there."""
    inputs = random_inputs(0, batch=3, gate=gate).arguments()
    theta = inputs.pop("theta")

    def one(tensors):
        return sympow.attention(**{name: x.unsqueeze(0) for name, x in tensors.items()}, theta=theta).squeeze(0)

    torch.testing.assert_close(torch.vmap(one)(inputs), sympow.attention(**inputs, theta=theta))


def test_minus_infinity_and_zero_are_gates():
    log_gamma = zeros(1, T, H)
    log_gamma[:, 3] = -torch.inf
    assert torch.isfinite(sympow.attention(**arguments(log_gamma=log_gamma))).all()


def softmax_arguments(**changes):
    made = arguments(**changes)
    del made["power"]
    return made


def cache(**changes):
    made = {"k": zeros(1, 2, H, D), "v": zeros(1, 2, H, E), "decay": zeros(1, 2, H), "phase": zeros(1, H, 2), **changes}
    return KeyValueState(**made)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"initial_state": state()}, TypeError, r"initial_state must be a KeyValueState, got State"),
        ({"initial_state": cache(k=zeros(2, 2, H, D))}, ValueError, r"holds keys of .*\(2, 2, 4\).*\(1, 2, 4\)"),
        ({"initial_state": cache(v=zeros(1, 2, H, E).float())}, ValueError, r"holds values in torch.float32"),
        ({"initial_state": cache(decay=None)}, ValueError, r"made without gates, but is used with"),
        (
            {"initial_state": cache(), "theta": None, "beta": None},
            ValueError,
            r"made with rotation, but is used without",
        ),
        ({"cu_seqlens": torch.tensor([0, T]), "return_state": True}, ValueError, r"cu_seqlens cannot be combined with"),
        ({"cu_seqlens": torch.tensor([0, 2])}, ValueError, r"cu_seqlens must end"),
        ({"log_gamma": zeros(1, T, H) + 1}, ValueError, r"log_gamma must not be positive"),
    ],
)
def test_softmax_names_mistakes_too(changes, error, message):
    with pytest.raises(error, match=message):
        softmax_attention(**softmax_arguments(**changes))
