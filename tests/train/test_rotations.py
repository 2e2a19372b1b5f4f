"""Initialization, learning rate and gradient scale of data-dependent rotations."""

import pytest
import torch

from sympow import GPT, GPTConfig
from sympow.layers import make_rotation
from sympow.model.storage import load_model
from sympow.train import train
from sympow.train.config import OptimizerConfig, TrainConfig
from sympow.train.optimizer import set_up_rotations


def model(rotary="scale"):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=17, layers=2, width=16, heads=2, rotary=rotary))


def gradients(rotary, scale):
    """β, and the gradients of its input and of its parameters."""
    torch.manual_seed(1)
    rotation = make_rotation(rotary, 12, 3, 4, 1_000).double()
    torch.nn.init.normal_(rotation.beta_proj.weight)
    rotation.gradient_scale = scale
    x = torch.randn(2, 5, 12, dtype=torch.float64, requires_grad=True)
    beta = rotation(x)[1]
    (beta * torch.randn_like(beta)).sum().backward()
    return beta.detach(), x.grad, *(parameter.grad for parameter in rotation.parameters())


@pytest.mark.parametrize("rotary", ["scale", "pairs", "grid"])
@pytest.mark.parametrize("scale", [0.0, 0.25])
def test_the_gradient_is_scaled_and_the_output_is_not(rotary, scale):
    plain, scaled = gradients(rotary, 1.0), gradients(rotary, scale)
    assert torch.equal(plain[0], scaled[0])
    for one, other in zip(plain[1:], scaled[1:], strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(other, scale * one)


@pytest.mark.parametrize("rotary", ["scale", "pairs"])
def test_projections_start_with_the_deviation_asked_for_and_nothing_else_changes(rotary):
    plain, changed = model(rotary), model(rotary)
    set_up_rotations(changed, OptimizerConfig(rotation_init=0.5))
    for (name, one), other in zip(plain.named_parameters(), changed.parameters(), strict=True):
        if "beta_proj" in name:
            assert (one == 0).all()
            assert other.std().item() == pytest.approx(0.5, rel=0.4)
        else:
            assert torch.equal(one, other)
    weights = [block.mixer.rotation.beta_proj.weight for block in changed.blocks]
    assert not torch.equal(*weights)


def test_a_model_without_such_rotations_is_left_as_it_is():
    plain, changed = model("learned"), model("learned")
    set_up_rotations(changed, OptimizerConfig(rotation_init=0.5, rotation_gradient=0.0))
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), changed.parameters(), strict=True))


@pytest.mark.parametrize("rotary", ["none", "fixed", "learned"])
@pytest.mark.parametrize("setting", [{"rotation_rate": 0.1}, {"rotation_gradient": 0.01}, {"rotation_init": 0.5}])
def test_settings_of_data_dependent_rotations_are_refused_for_others(rotary, setting):
    ((name, value),) = setting.items()
    with pytest.raises(
        ValueError, match=rf"{name} is for rotations that depend on the data.*; got {value} with rotary="
    ):
        TrainConfig().changed(rotary=rotary, **setting)
    for kind in ("scale", "pairs", "grid"):
        assert TrainConfig().changed(rotary=kind, **setting).settings()[name] == value


def test_training_uses_the_settings(tiny, tmp_path):
    still = train(tiny(steps=3, rotation_gradient=0.0), tmp_path / "still", device="cpu")
    learned = train(tiny(steps=3), tmp_path / "learned", device="cpu")
    started = train(tiny(steps=1, rotation_init=0.5, learning_rate=0.0), tmp_path / "started", device="cpu")
    weights = [
        load_model(folder / "model").blocks[0].mixer.rotation.beta_proj.weight for folder in (still, learned, started)
    ]
    assert (weights[0] == 0).all()
    assert (weights[1] != 0).any()
    assert weights[2].std().item() == pytest.approx(0.5, rel=0.4)
