"""Projections of gates and rotations in one product: nearly float32 from bfloat16 operands."""

import pytest
import torch

from support import assert_close, within
from sympow.layers.gates import ScalarGate
from sympow.layers.mixers import ConformalAttention
from sympow.layers.precision import multiply_precisely, project_together
from sympow.layers.rotations import ScaledRotation
from sympow.ops.rotary import rotary_rates
from sympow.ops.window import Window

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def problem(device):
    torch.manual_seed(0)
    x = torch.randn(2, 50, 96, device=device).bfloat16().requires_grad_()
    return x, torch.randn(7, 96, device=device).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
def test_only_x_is_rounded(device):
    x, weight = problem(device)
    exact = x.double() @ weight.double().mT
    result = multiply_precisely(x, weight)
    assert result.dtype == torch.float32
    # A weight in bfloat16 would have a relative error of 2⁻⁹.
    rounded = x.double() @ weight.bfloat16().double().mT
    assert_close(result, exact, 2e-5, "product", relative=True)
    within((result - exact).abs().max() / (rounded - exact).abs().max(), 0.02, "product, beside a rounded weight")


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_are_those_of_a_linear_map_under_autocast(device):
    x, weight = problem(device)
    gradient = torch.randn(2, 50, 7, device=device)
    actual = torch.autograd.grad(multiply_precisely(x, weight), (x, weight), gradient)
    exact = torch.autograd.grad(x.double() @ weight.double().mT, (x, weight), gradient.double())
    assert actual[1].dtype == torch.float32
    assert_close(actual[0].double(), exact[0].double(), 4e-2, "gradient of x")
    assert_close(actual[1].double(), exact[1].double(), 2e-2, "gradient of weight")


def test_pytorch_accepts_the_operator():
    x, weight = problem("cpu")
    terms = torch.cat([weight.detach().bfloat16()] * 2)
    torch.library.opcheck(torch.ops.sympow.multiply_terms, (x.flatten(0, 1).detach(), terms, weight.detach()))


def test_elsewhere_every_projection_speaks_for_itself():
    gate, rotation = ScalarGate(16, 3), ScaledRotation(16, 3, rotary_rates(8, 100))
    for projection in (gate.projection, rotation.projection):
        torch.nn.init.normal_(projection.weight)
    x = torch.randn(2, 5, 16)
    first, none, second = project_together(x, [gate.projection, None, rotation.projection], torch.float32)
    assert none is None
    assert torch.equal(gate(x, first), gate(x))
    assert torch.equal(rotation(x, second)[1], rotation(x)[1])


@pytest.mark.gpu
@pytest.mark.parametrize(("gating", "rotary"), [("scalar", "scale"), ("vector", "pairs"), ("none", "scale")])
def test_gates_and_scales_of_a_layer_under_autocast_are_nearly_float32(gating, rotary):
    torch.manual_seed(1)
    layer = ConformalAttention(128, 2, gating=gating, rotary=rotary).cuda()
    found = {}
    for name, module in (("gate", layer.gate), ("rotation", layer.rotation)):
        if module.projection is not None:
            torch.nn.init.normal_(module.projection.weight, std=0.1)
        module.register_forward_hook(lambda _, __, output, name=name: found.update({name: output}))
    x = torch.randn(2, 64, 128, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        layer(x, return_state=False)
    together = dict(found)
    rounded = x.bfloat16().float()
    alone = {"gate": layer.gate(rounded), "rotation": layer.rotation(rounded)}
    if alone["gate"] is not None:
        assert_close(together["gate"], alone["gate"], 1e-4, "log γ")
    assert_close(together["rotation"][1], alone["rotation"][1], 1e-4, "β")


class Adapter(torch.nn.Module):
    """Wraps a projection as peft does: it exposes the projection's weight, and adds its own output."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside
        self.weight, self.bias = inside.weight, inside.bias
        self.more = torch.nn.Linear(inside.in_features, inside.out_features, bias=False, device=inside.weight.device)
        torch.nn.init.normal_(self.more.weight, std=0.1)

    def forward(self, x):
        return self.inside(x) + self.more(x)


def test_projections_are_linear_maps_to_tools():
    gate, rotation = ScalarGate(16, 3), ScaledRotation(16, 3, rotary_rates(8, 100))
    for projection, bias in ((gate.projection, 6.906768), (rotation.projection, None)):
        assert isinstance(projection, torch.nn.Linear)
        assert (projection.in_features, projection.out_features) == (16, 3)
        assert not projection.weight.any()
        assert bias is None or projection.bias.tolist() == pytest.approx([bias] * 3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("steps", [1, 20])
@torch.no_grad()
def test_adapters_count_in_every_path(device, steps):
    """Also in the fused projection and in the decoding kernel, which use weights and do not call modules."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.manual_seed(1)
    layer = ConformalAttention(128, 2, rotary="scale").to(device)
    layer.qkv_proj.to(dtype), layer.out_proj.to(dtype)
    x = torch.randn(2, 20, 128, device=device).to(dtype)

    def run():
        _, state = layer(x[:, :-1])
        if steps > 1:
            return layer(x)[0]
        return layer.step(x[:, -1:], Window.open(state, dtype=dtype))

    plain = run()
    layer.gate.gamma_proj, layer.rotation.beta_proj = Adapter(layer.gate.gamma_proj), Adapter(layer.rotation.beta_proj)
    adapted = run()
    for adapter in (layer.gate.gamma_proj, layer.rotation.beta_proj):
        adapter.inside.weight += adapter.more.weight
    layer.gate.gamma_proj, layer.rotation.beta_proj = layer.gate.gamma_proj.inside, layer.rotation.beta_proj.inside
    assert (adapted - run()).abs().max() < 0.05 * (adapted - plain).abs().max()
