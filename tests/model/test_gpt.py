import copy
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from support import assert_close
from sympow import GPT, ConformalAttention, GPTConfig, rotary_rates
from sympow.layers import gates
from sympow.layers.precision import ConstantTable
from sympow.layers.rotations import FixedRotation
from sympow.model import accounting
from sympow.model.accounting import (
    count_parameters,
    crossover,
    key_value_elements,
    mixing_operations,
    other_operations,
    state_elements,
)
from sympow.model.config import PRESETS

SMALL = {"vocab_size": 50, "layers": 2, "width": 16, "heads": 4, "max_document": 100}
# With every kind of parameter that the paper's models have.
CONFORMAL = {**SMALL, "rotary": "scale"}


def make(**changes) -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**CONFORMAL, **changes})).double()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def tokens(batch=2, length=20):
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
@pytest.mark.parametrize("power", [2, 4])
def test_the_state_threads_through(mixer, power):
    model, x = make(mixer=mixer, **({"power": power} if mixer == "sympow" else {})), tokens()
    whole, none = model(x, return_state=False)
    assert none is None
    assert whole.shape == (2, 20, 50)
    outputs, state = [], None
    for part in x.split([13, *[1] * 7], dim=1):
        logits, state = model(part, state)
        outputs.append(logits)
    assert_close(torch.cat(outputs, dim=1), whole, 1e-9, "logits")


@pytest.mark.parametrize("rotary", ["scale", "pairs", "grid"])
@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
def test_rotations_with_slower_rates_continue_from_a_state(mixer, rotary):
    model, x = make(mixer=mixer, rotary=rotary, max_rate=1), tokens()
    assert {block.mixer.rotation.rates.values[0] for block in model.blocks} == {1.0}
    whole, _ = model(x, return_state=False)
    first, state = model(x[:, :13])
    assert_close(torch.cat([first, model(x[:, 13:], state)[0]], dim=1), whole, 1e-9, "logits")


@pytest.mark.parametrize("rotary", ["scale", "pairs"])
def test_a_fresh_model_is_that_of_fixed_rotary_with_the_same_seed(rotary):
    """Parameters, logits and, of what both have, gradients."""
    models = []
    for changes in ({"rotary": rotary}, {"rotary": "fixed"}):
        torch.manual_seed(0)
        models.append(GPT(GPTConfig(**SMALL, **changes)).double())
        models[-1](tokens())[0].square().sum().backward()
    moving, fixed = models
    for name, parameter in fixed.named_parameters():
        assert torch.equal(moving.get_parameter(name), parameter)
        torch.testing.assert_close(moving.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-12)
    assert torch.equal(moving(tokens())[0], fixed(tokens())[0])


def test_every_parameter_learns():
    model = make()
    logits, _ = model(tokens())
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), f"{name} learns nothing"


def test_documents_do_not_see_each_other():
    model, x = make(), tokens(batch=1)
    packed, _ = model(x, cu_seqlens=torch.tensor([0, 8, 20]), return_state=False)
    assert_close(packed[:, 8:], model(x[:, 8:])[0], 1e-9, "second document")


@pytest.mark.parametrize("mixer", ["sympow", "softmax"])
def test_padding_is_as_if_it_were_not_there(mixer):
    model, x = make(mixer=mixer), tokens()
    mask = torch.arange(20) >= torch.tensor([[6], [0]])
    padded, state = model(x, mask=mask)
    alone, own = model(x[:1, 6:])
    assert_close(padded[0, 6:], alone[0], 1e-9, "padded")
    assert_close(padded[1], model(x[1:])[0][0], 1e-9, "whole")
    now = tokens(length=1)
    assert_close(model(now, state)[0][:1], model(now[:1], own)[0], 1e-9, "what follows")


def test_the_future_is_not_seen():
    model, x = make(), tokens()
    changed = x.clone()
    changed[:, 10:] = 0
    assert_close(model(x)[0][:, :10], model(changed)[0][:, :10], 1e-12, "logits")


def test_logits_are_features_times_the_tied_embedding():
    model, x = make(), tokens()
    features, _ = model.features(x)
    assert_close(features @ model.embedding.weight.T, model(x)[0], 1e-12, "logits")


def test_a_model_learns_to_repeat():
    """A period longer than a bigram can predict, learned through attention within a few steps."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=4, layers=2, width=32, heads=2, rotary="scale", max_document=64))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(120):
        pattern = torch.randint(4, (8, 5))
        x = pattern.repeat(1, 6)
        logits, _ = model(x[:, :-1])
        # From the second period on every token is determined by what came before.
        loss = torch.nn.functional.cross_entropy(logits[:, 9:].flatten(0, 1), x[:, 10:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 1.3
    assert min(losses[-10:]) < 0.7


def test_initialization_follows_gpt2():
    model = GPT(GPTConfig(vocab_size=256, layers=4, width=128, heads=4, rotary="scale"))
    block = model.blocks[0]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mixer.qkv_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mixer.out_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert block.mlp.out_proj.weight.std().item() == pytest.approx(0.02 / 8**0.5, rel=0.05)
    assert not block.mixer.rotation.beta_proj.weight.any()
    assert not block.mixer.qkv_proj.bias.any()


def test_a_state_dict_holds_parameters_alone():
    model = make()
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


class OpenGate(gates.Gate):
    """A gate as someone may add it, with linear maps of PyTorch."""

    def __init__(self, width, heads):
        super().__init__()
        self.proj, self.scale = torch.nn.Linear(width, heads), torch.nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self):
        for parameter, value in ((self.proj.weight, 0.0), (self.proj.bias, 7.0), (self.scale, 2.0)):
            torch.nn.init.constant_(parameter, value)

    def forward(self, x, projected=None):
        return torch.nn.functional.logsigmoid(self.scale * self.proj(x))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_gates_that_are_added_start_as_they_say(monkeypatch, device):
    monkeypatch.setitem(gates._MAKERS, "scalar", lambda width, heads, *_: OpenGate(width, heads))
    with torch.device(device):
        model = GPT(GPTConfig(**SMALL))
    if device == "meta":
        model.to_empty(device="cpu").reset_parameters()
    for block in model.blocks:
        values = [parameter.unique().tolist() for parameter in block.mixer.gate.parameters()]
        assert values == [[2.0], [0.0], [7.0]]


def test_a_model_made_on_the_meta_device_starts_like_any_other():
    config = GPTConfig(**SMALL, gating="learned", rotary="learned")
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    model.reset_parameters()
    gate, rotation = model.blocks[0].mixer.gate, model.blocks[0].mixer.rotation
    assert torch.equal(gate.logit.detach(), torch.full((4,), 6.906768))
    assert torch.equal(rotation.theta.detach(), rotary_rates(4, 100, dtype=torch.float32))
    assert torch.equal(model.final_norm.weight, torch.ones(16))
    assert torch.isfinite(model(tokens())[0]).all()


@pytest.mark.parametrize("assign", [False, True])
def test_weights_load_into_a_model_made_on_the_meta_device(assign):
    config = GPTConfig(**CONFORMAL, gating="fixed")
    original = GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(original.state_dict(), assign=assign)
    assert torch.equal(model(tokens())[0], original(tokens())[0])


def test_constants_survive_copies_and_casts():
    model = GPT(GPTConfig(**CONFORMAL))
    model(tokens())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model).half().float()):
        rates = other.blocks[0].mixer.rotation.rates(torch.device("cpu"))
        assert torch.equal(rates, rotary_rates(4, 100))


def test_constants_do_not_outlive_a_trace():
    table = ConstantTable(rotary_rates(4, 100))
    with FakeTensorMode():
        table(torch.device("cpu"))
    assert type(table(torch.device("cpu"))) is torch.Tensor


def test_shapes_can_be_found_without_numbers():
    with torch.device("meta"):
        model = GPT(GPTConfig(**CONFORMAL))
        logits, state = model(torch.zeros(2, 7, dtype=torch.int64))
    assert logits.shape == (2, 7, 50)
    assert state[0].kv.shape == (2, 4, 10, 4)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["auto", "attention", "chunked"])
@torch.no_grad()
def test_a_model_compiles_into_one_graph(form):
    model, x = make(form=form), tokens()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    logits, state = compiled(x)
    expected, expected_state = model(x)
    assert_close(logits, expected, 1e-12, "logits")
    assert_close(state[1].kv, expected_state[1].kv, 1e-12, "state")


class TestTheNumbersOfThePaper:
    """Design numbers: parameters, state sizes and overheads of the 124M model."""

    def test_parameters_of_gpt2_124m(self):
        count = count_parameters(GPTConfig.preset("gpt2-124m"))
        gpt2_without_positions = 124_439_808 - 1024 * 768
        assert count.base == gpt2_without_positions + 2 * 768  # the LayerNorm after the embedding

    def test_overheads_of_gating_and_rotary(self):
        count = count_parameters(GPTConfig.preset("gpt2-124m", rotary="scale"))
        assert round(100 * count.gating_overhead, 2) == 0.09
        assert round(100 * count.total_overhead, 2) == 0.18

    @pytest.mark.parametrize(("power", "size"), [(2, 39e6), (4, 14e9)])
    def test_state_sizes(self, power, size):
        config = GPTConfig.preset("gpt2-124m", power=power)
        assert 2 * state_elements(config) == pytest.approx(size, rel=0.03)

    def test_the_state_counted_is_the_state_made(self):
        model = make()
        _, state = model(tokens(batch=1), return_state=True)
        made = sum(layer.kv.numel() + layer.normalizer.numel() for layer in state)
        assert made == state_elements(model.config)

    def test_the_cache_counted_is_the_cache_made(self):
        model = make(mixer="softmax", gating="none")
        _, state = model(tokens(batch=1), return_state=True)
        assert sum(layer.k.numel() + layer.v.numel() for layer in state) == key_value_elements(model.config, 20)

    def test_operations_cross_where_said(self):
        config = GPTConfig.preset("gpt2-124m")
        at = crossover(config)
        below, above = mixing_operations(config, at // 2), mixing_operations(config, 2 * at)
        assert below.attention < below.recurrent
        assert above.attention > above.recurrent
        assert mixing_operations(config, at).attention == pytest.approx(
            mixing_operations(config, at).recurrent, rel=0.01
        )

    def test_operations_outside_attention_are_two_per_weight(self):
        assert other_operations(GPTConfig.preset("gpt2-124m")) == pytest.approx(2 * 123.8e6, rel=0.01)

    def test_operations_are_counted_once_for_each_config(self, monkeypatch):
        """The scheduler of experiments asks for those of all waiting runs several times a second."""
        built = []
        monkeypatch.setattr(accounting, "GPT", lambda config: built.append(config) or GPT(config))
        for vocab_size in (7, 11, 7):
            other_operations(GPTConfig(vocab_size=vocab_size, layers=1, width=8, heads=2, max_document=77))
        assert len(built) == 2


class TestConfig:
    def test_rope_is_the_default(self):
        assert GPTConfig().rotary == "fixed"
        assert isinstance(ConformalAttention(16, 2).rotation, FixedRotation)

    def test_presets_build_what_their_names_say(self):
        for name, size in (("gpt2-124m", 124e6), ("byte-11m", 11e6), ("byte-400k", 0.4e6)):
            assert count_parameters(PRESETS[name]).total == pytest.approx(size, rel=0.1)

    def test_presets_take_changes(self):
        assert GPTConfig.preset("byte-400k", power=4).power == 4

    def test_the_mlp_may_have_any_size(self):
        config = GPTConfig(width=768, mlp_ratio=2048 / 768)
        assert config.mlp_width == 2048
        assert GPTConfig(**{**SMALL, "mlp_ratio": 43 / 16}).mlp_width == 43
        # Configs are compared as text: 4.0, as parsed from the command line, must equal 4.
        assert repr(GPTConfig(mlp_ratio=4.0)) == repr(GPTConfig(mlp_ratio=4))

    def test_a_config_is_frozen(self):
        with pytest.raises(AttributeError):
            GPTConfig().power = 4

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"power": 5}, ValueError, "power must be even"),
            ({"layers": 0}, ValueError, "layers must be at least 1, got 0"),
            ({"width": 7.5}, TypeError, "width must be an int, got float"),
            ({"heads": True}, TypeError, "heads must be an int, got bool"),
            ({"heads": 5}, ValueError, "width must be a multiple of heads"),
            ({"mlp_ratio": "4"}, TypeError, "mlp_ratio must be a number, got str"),
            (
                {"mlp_ratio": 1e-6},
                ValueError,
                "mlp_ratio must give the MLP at least 1 hidden unit and at most .*; got 1e-06",
            ),
            ({"mlp_ratio": float("nan")}, ValueError, "mlp_ratio must be finite, got nan"),
            ({"mlp_ratio": 1e308}, ValueError, "mlp_ratio must give"),
            ({"bias": "no"}, TypeError, "bias must be True or False, got 'no'"),
            ({"mixer": "softmax", "power": 4}, ValueError, "power is for mixer='sympow'; got 4"),
            ({"mixer": "softmax", "form": "chunked"}, ValueError, "form is for mixer='sympow'"),
            ({"mixer": "softmax", "chunk_size": 8}, ValueError, "chunk_size is for mixer='sympow'"),
            ({"heads": 4, "key_value_heads": 3}, ValueError, "multiple of key_value_heads"),
            ({"head_dim": 5}, ValueError, "head_dim must be even"),
            (
                {"gating": "half", "key_value_heads": 1},
                ValueError,
                "key_value_heads must be at least 2 for gating='half', got 1",
            ),
            ({"rotary": "grid", "head_dim": 2}, ValueError, "head_dim must be at least 4 for rotary='grid'.*; got 2"),
            ({"max_rate": 0}, ValueError, "max_rate must be above 0 radians per token, got 0"),
            ({"max_rate": "1"}, TypeError, "max_rate must be a number, got str"),
            ({"max_rate": 1, "rotary": "none"}, ValueError, "max_rate is for .*; got 1 with rotary='none'"),
            ({"mixer": "linear"}, ValueError, "mixer must be one of 'sympow', 'softmax'; got 'linear'"),
            ({"gating": "on"}, ValueError, "gating must be one of"),
            ({"rotary": "on"}, ValueError, "rotary must be one of"),
            ({"form": "fast"}, ValueError, "form must be one of"),
            ({"backend": "fast"}, ValueError, "backend must be one of"),
            ({"form": "attention", "chunk_size": 4}, ValueError, "chunk_size is for"),
        ],
    )
    def test_mistakes_are_named(self, changes, error, message):
        with pytest.raises(error, match=message):
            GPTConfig(**{**SMALL, **changes})

    def test_an_unknown_preset_or_field_is_named(self):
        with pytest.raises(ValueError, match=r"name must be one of 'gpt2-124m'.*got 'gpt3'"):
            GPTConfig.preset("gpt3")
        with pytest.raises(TypeError, match="no field 'depth'"):
            GPTConfig.preset("byte-400k", depth=3)

    @pytest.mark.parametrize(
        ("call", "error", "message"),
        [
            (lambda m: m(torch.zeros(3, dtype=torch.int64)), ValueError, r"tokens must be \(batch, time\)"),
            (lambda m: m(torch.zeros(1, 3)), TypeError, "tokens must be int32 or int64, got torch.float32"),
            (lambda m: m(torch.zeros(1, 3, dtype=torch.int64), ()), ValueError, "each of 2 layers, got 0"),
            (lambda m: m([1, 2]), TypeError, "tokens must be a tensor, got list"),
            (lambda m: m(torch.tensor([[1, 50]])), ValueError, "tokens must lie between 0 and 49; got 50"),
            (lambda m: m(torch.tensor([[1, -1]])), ValueError, "tokens must lie between 0 and 49; got -1"),
            (lambda m: m(torch.zeros(1, 3, dtype=torch.int64), m(tokens())[1][0]), TypeError, "state must be a tuple"),
            (lambda m: m.step([1], ()), TypeError, "tokens must be a tensor, got list"),
            (lambda m: m.step(tokens(), ()), ValueError, r"tokens must be \(batch,\), one for each sequence"),
            (lambda m: m.step(tokens()[:, 0], 3), TypeError, "caches must be a list with an entry for each layer"),
            (lambda m: m.step(tokens()[:, 0], m(tokens())[1]), TypeError, "cache must be a Window .* got State"),
            (lambda m: GPT(None), TypeError, "config must be a GPTConfig, got NoneType"),
        ],
    )
    def test_bad_tokens_and_states_are_named(self, call, error, message):
        with pytest.raises(error, match=message):
            call(make())
