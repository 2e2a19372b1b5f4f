import pytest
import torch

import sympow
from support import assert_close
from sympow.layers import GATES, ROTATIONS, ConformalAttention, SoftmaxAttention
from sympow.layers.gates import ScalarGate
from sympow.layers.rotations import ScaledRotation
from sympow.ops import reference
from sympow.ops.window import Window

WIDTH = 16


def make(kind, **options):
    """A layer in float64 whose gates and rotations depend on the data."""
    torch.manual_seed(0)
    layer = kind(WIDTH, 4, **{"rotary": "scale", **options}).double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def sample(length=12, batch=2):
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
@pytest.mark.parametrize("gating", GATES)
@pytest.mark.parametrize("rotary", ROTATIONS)
def test_every_gate_and_rotation_trains_and_continues(kind, gating, rotary):
    layer = make(kind, gating=gating, rotary=rotary, key_value_heads=2)
    x = sample()
    whole, none = layer(x, return_state=False)
    assert none is None
    assert whole.shape == x.shape
    head, state = layer(x[:, :7])
    tail, state = layer(x[:, 7:], state)
    assert state is not None
    assert_close(torch.cat([head, tail], dim=1), whole, 1e-9, "y")
    whole.square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), f"{name} learns nothing"


def test_the_layer_is_the_papers_equation():
    layer = make(ConformalAttention, power=4, max_document=100)
    x = sample()
    q, k, v = layer.qkv_proj(x).unflatten(-1, (12, 4)).split(4, dim=2)
    gamma = torch.sigmoid(x @ layer.gate.gamma_proj.weight.T + layer.gate.gamma_proj.bias)
    beta = 1 + torch.tanh(x @ layer.rotation.beta_proj.weight.T)
    theta = sympow.rotary_rates(4, 100)
    expected = reference.attention(q, k, v, 4, gamma.log(), beta, theta)
    actual, _ = layer(x)
    assert_close(actual, layer.out_proj(expected.flatten(2)), 1e-9, "y")


@pytest.mark.parametrize("rotary", ["scale", "pairs"])
def test_a_fresh_layer_is_its_gated_rotary_self(rotary):
    """Also in the parameters that both have, at the same seed."""
    layers = []
    for kind in (rotary, "fixed"):
        torch.manual_seed(0)
        layers.append(ConformalAttention(WIDTH, 4, gating="learned", rotary=kind, max_rate=1.0).double())
    moving, fixed = layers
    assert all(torch.equal(parameter, moving.get_parameter(name)) for name, parameter in fixed.named_parameters())
    assert torch.equal(moving(sample())[0], fixed(sample())[0])


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_documents_do_not_see_each_other(kind):
    layer = make(kind)
    x = sample(batch=1)
    packed, _ = layer(x, cu_seqlens=torch.tensor([0, 5, 12]), return_state=False)
    assert_close(packed[:, 5:], layer(x[:, 5:])[0], 1e-9, "second document")


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
@pytest.mark.parametrize("gating", GATES)
@pytest.mark.parametrize("rotary", ROTATIONS)
def test_padding_is_as_if_it_were_not_there(kind, gating, rotary):
    """Padding on the left, between tokens and on the right, for the output and for the state."""
    layer = make(kind, gating=gating, rotary=rotary, key_value_heads=2)
    x, later = sample(), sample(length=3)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 0], [1] * 12], dtype=torch.bool)
    y, state = layer(x, mask=mask)
    assert torch.isfinite(y).all()
    after, _ = layer(later, state)
    for row in range(2):
        kept = mask[row]
        alone, own = layer(x[row : row + 1, kept])
        assert_close(y[row, kept], alone[0], 1e-9, "y")
        assert_close(after[row], layer(later[row : row + 1], own)[0][0], 1e-9, "what follows")
        if own.phase is not None:
            assert_close(state.phase[row], own.phase[0], 1e-9, "phase")
        if kind is ConformalAttention:
            assert_close(state.kv[row], own.kv[0], 1e-9, "state")
            assert_close(state.normalizer[row], own.normalizer[0], 1e-9, "normalizer")


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_padding_gets_no_gradient_and_gives_none(kind):
    layer, x = make(kind), sample().requires_grad_()
    mask = torch.arange(12) >= torch.tensor([[3], [0]])
    y, _ = layer(x, mask=mask, return_state=False)
    y[mask].square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert not x.grad[~mask].any()
    assert x.grad[mask].any(dim=1).all()


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_a_padded_state_takes_tokens_and_more_padding(kind):
    layer, x = make(kind), sample()
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1], [1] * 12], dtype=torch.bool)
    whole, _ = layer(x, mask=mask)
    head, state = layer(x[:, :4], mask=mask[:, :4])
    middle, state = layer(x[:, 4:7], state)
    tail, _ = layer(x[:, 7:], state, mask=mask[:, 7:])
    assert_close(torch.cat([head, middle, tail], dim=1)[mask], whole[mask], 1e-9, "y")


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"mask": torch.ones(1, 12)}, TypeError, r"mask must be bool, .* got torch.float32"),
        (
            {"mask": torch.ones(2, 12, dtype=torch.bool)},
            ValueError,
            r"mask must be \(batch, time\), \(1, 12\); got \(2, 12\)",
        ),
        ({"mask": [True] * 12}, TypeError, r"mask must be a tensor, got list"),
        (
            {"mask": torch.ones(1, 12, dtype=torch.bool), "cu_seqlens": torch.tensor([0, 12]), "return_state": False},
            ValueError,
            r"mask cannot be combined with cu_seqlens",
        ),
    ],
)
def test_masks_that_do_not_fit_are_named(kind, options, error, message):
    with pytest.raises(error, match=message):
        make(kind)(sample(batch=1), **options)


def test_head_dims_may_differ_from_width_over_heads():
    layer = make(ConformalAttention, head_dim=6, key_value_heads=1)
    assert layer(sample())[0].shape == (2, 12, WIDTH)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_run_in_lower_precision(dtype):
    layer = make(ConformalAttention).to(dtype)
    y, state = layer(sample().to(dtype), return_state=True)
    assert y.dtype == dtype
    assert state.kv.dtype == torch.float32


def test_autocast_changes_the_projections_but_not_the_state():
    layer = make(ConformalAttention).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = layer(sample(length=4).float(), return_state=True)
    assert y.dtype == torch.bfloat16
    assert state.kv.dtype == torch.float32


@pytest.mark.parametrize("shape", [(3, WIDTH), (1, 3, WIDTH + 1)])
def test_inputs_of_another_shape_are_named(shape):
    with pytest.raises(ValueError, match=r"x must be \(batch, time, 16\)"):
        make(ConformalAttention)(torch.randn(shape, dtype=torch.float64))


@pytest.mark.parametrize("kind", [ConformalAttention, SoftmaxAttention])
def test_inputs_and_caches_of_another_type_are_named(kind):
    layer = make(kind)
    with pytest.raises(TypeError, match="x must be a tensor, got list"):
        layer([0.0])
    _, state = layer(sample())
    with pytest.raises(TypeError, match=f"cache must be a Window or a KeyValueCache, got {type(state).__name__}"):
        layer.step(sample(length=1), state)


def test_a_step_takes_one_token_at_the_width_of_the_layer():
    layer = make(ConformalAttention)
    with torch.no_grad():
        _, state = layer(sample())
        window = Window.open(state, dtype=torch.float64)
        with pytest.raises(TypeError, match="x must be a tensor, got str"):
            layer.step("a", window)
        for length in (0, 2):
            with pytest.raises(ValueError, match=r"x must be \(batch, 1, 16\), the width of the layer; got"):
                layer.step(sample(length=length), window)
        with pytest.raises(ValueError, match=r"x must be \(batch, 1, 16\)"):
            layer.step(sample(length=1)[0], window)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 3}, ValueError, "width must be a multiple of heads"),
        ({"heads": 0}, ValueError, "heads must be at least 1, got 0"),
        ({"heads": 2.0}, TypeError, "heads must be an int, got float"),
        ({"heads": 4, "head_dim": 0}, ValueError, "head_dim must be at least 1"),
        ({"heads": 4, "key_value_heads": 0}, ValueError, "key_value_heads must be at least 1"),
        ({"heads": 4, "max_document": 0, "rotary": "none"}, ValueError, "max_document must be at least 1"),
        ({"heads": 4, "key_value_heads": 3}, ValueError, "multiple of key_value_heads"),
        ({"heads": 4, "head_dim": 3}, ValueError, "head_dim must be even"),
        ({"heads": 4, "power": 3}, ValueError, "power must be even"),
        ({"heads": 4, "gating": "hard"}, ValueError, "gating must be one of"),
        ({"heads": 4, "gating": "none", "initial_gate": 0.9}, ValueError, "initial_gate is for gates that are learned"),
        ({"heads": 4, "gating": "fixed", "initial_gate": 0.9}, ValueError, "got 0.9 with gating='fixed'"),
        ({"heads": 4, "bias": "no"}, TypeError, "bias must be True or False, got 'no'"),
        ({"heads": 4, "form": "quick"}, ValueError, "form must be one of"),
        ({"heads": 4, "backend": "quick"}, ValueError, "backend must be one of"),
        ({"heads": 4, "form": "recurrent", "chunk_size": 4}, ValueError, "chunk_size is for"),
    ],
)
def test_mistakes_are_named_when_the_layer_is_made(options, error, message):
    with pytest.raises(error, match=message):
        ConformalAttention(WIDTH, **options)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize(
    ("gating", "rotary"),
    [("clamped", "grid"), ("half", "signed"), ("scalar", "pairs"), ("none", "scale")],
)
def test_decoding_has_the_gates_and_rotations_of_the_forward_pass(monkeypatch, gating, rotary, kernel):
    """Also where a kernel projects them, in whose place is its reference here."""
    layer = make(ConformalAttention, gating=gating, rotary=rotary, key_value_heads=2)
    calls = project_by_reference(monkeypatch) if kernel else []
    check_steps(layer)
    assert len(calls) == 5 * kernel


class SlowGate(ScalarGate):
    def forward(self, x, projected=None):
        return super().forward(x, projected) / 4


class SlowRotation(ScaledRotation):
    def forward(self, x, projected=None):
        theta, beta = super().forward(x, projected)
        return theta, beta / 4


def test_decoding_has_what_subclasses_compute(monkeypatch):
    layer = make(ConformalAttention, rotary="scale", key_value_heads=2)
    calls = project_by_reference(monkeypatch)
    gate, rotation = layer.gate, layer.rotation
    for gate_class, rotation_class in ((SlowGate, ScaledRotation), (ScalarGate, SlowRotation)):
        gate.__class__, rotation.__class__ = gate_class, rotation_class
        check_steps(layer)
    assert not calls


def project_by_reference(monkeypatch):
    """Projects gates and rotations of steps as on a GPU, with the kernel's reference; returns its calls."""
    pytest.importorskip("triton", reason="needs Triton")
    from sympow.kernels.decode.reference import step_gates_reference

    calls = []

    def project(*arguments):
        calls.append(arguments)
        return step_gates_reference(*arguments)

    monkeypatch.setattr("sympow.kernels.decode.gate_projection.step_gates", project)
    monkeypatch.setattr("sympow.layers.mixers.step_gates_unsupported_reason", lambda *_: None)
    return calls


def check_steps(layer):
    """Compares five steps after a prompt with the forward pass."""
    x = sample()
    whole, _ = layer(x, return_state=False)
    _, state = layer(x[:, :7])
    window = Window.open(state, dtype=torch.float64)
    with torch.no_grad():
        for i in range(7, 12):
            assert_close(layer.step(x[:, i : i + 1], window), whole[:, i : i + 1], 1e-9, f"token {i}")


@pytest.mark.parametrize("form", ["attention", "chunked", "recurrent"])
@pytest.mark.parametrize(("gating", "rotary"), [("clamped", "grid"), ("half", "signed")])
def test_every_form_has_the_same_gates_and_rotations(form, gating, rotary):
    layer = make(ConformalAttention, gating=gating, rotary=rotary, key_value_heads=2)
    x = sample().requires_grad_()
    expected, _ = layer(x, return_state=False)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    layer.form, layer.chunk_size = form, 5 if form == "chunked" else None
    y, _ = layer(x, return_state=False)
    (gradient,) = torch.autograd.grad(y.square().sum(), x)
    assert_close(y, expected, 1e-9, "y")
    assert_close(gradient, wanted, 1e-9, "gradient")
