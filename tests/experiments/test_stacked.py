"""Stacked models compute and learn what each of them does alone."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from experiments.stacked import (
    KeyNoise,
    StackedAdam,
    StackedTraining,
    compiled_losses,
    member_of,
    schedule,
    stack,
    stacked_losses,
)
from experiments.tasks import TASKS, VOCABULARY
from sympow.model.config import VARIANTS, GPTConfig
from sympow.model.gpt import GPT
from sympow.train.config import OptimizerConfig
from sympow.train.optimizer import make_optimizer, set_rate

VARIANT_NAMES = ("softmax", "sympow", "gating", "conformal", "pair-rotation", "vector-gate")


def models_of(variant: str, count: int = 3, **changes) -> list[GPT]:
    shape = {"vocab_size": VOCABULARY, "layers": 2, "width": 16, "heads": 2}
    config = GPTConfig(**{**shape, **VARIANTS[variant], **changes})
    models = []
    for seed in range(count):
        torch.manual_seed(seed)
        models.append(GPT(config).double())
        # Gates and rotations are zero at first.
        for parameter in models[-1].parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return models


def rows_for(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = [TASKS["copy"].batch([member], 4, 20) for member in range(count)]
    inputs, labels = (torch.stack([torch.from_numpy(pair[i]) for pair in drawn]) for i in range(2))
    return inputs, labels


def loss_alone(model: GPT, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits, _ = model(inputs, return_state=False)
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("changes", [{"short_conv": 4}, {"bias": False}], ids=str)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_losses_and_gradients_are_those_of_each_model_alone(variant, changes):
    models = models_of(variant, **changes)
    inputs, labels = rows_for(3)
    stacked = stack(models)
    losses = stacked_losses(stacked, inputs, labels)
    losses.sum().backward()
    for number, model in enumerate(models):
        alone = loss_alone(model, inputs[number], labels[number])
        alone.backward()
        torch.testing.assert_close(losses[number], alone, rtol=1e-10, atol=1e-10)
        for name, parameter in model.named_parameters():
            gradient = stacked.get_parameter(name).grad[number]
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_compiled_losses_are_the_same_for_rows_of_all_lengths(monkeypatch):
    # The graphs are what is tested; machine code of a CPU, which takes most of the time, is not what a GPU runs.
    monkeypatch.setattr("experiments.stacked._compiled", lambda: torch.compile(stacked_losses, backend="aot_eager"))
    stacked = stack(models_of("gating", short_conv=4, layers=1))
    torch.compiler.reset()
    compiled = torch._dynamo.utils.counters["stats"]
    compiled.clear()
    for length, answers in ((16, 2), (24, 5), (20, 3)):
        inputs = torch.randint(VOCABULARY, (3, 4, length))
        labels, positions = torch.randint(VOCABULARY, (3, 4, answers)), torch.randint(length, (3, 4, answers))
        found = []
        for losses_of in (stacked_losses, compiled_losses):
            losses = losses_of(stacked, inputs, labels, positions)
            losses.sum().backward()
            found.append([losses.detach(), *[x.grad for x in stacked.parameters()]])
            stacked.zero_grad()
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)
    assert compiled["unique_graphs"] == 1


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_each_model_has_its_own_rate_clipping_and_decay(decay):
    models = models_of("conformal", short_conv=2)
    inputs, labels = rows_for(3)
    rates = torch.tensor([1e-3, 3e-3, 1e-2], dtype=torch.float64)
    stacked = stack(models)
    optimizer = StackedAdam(stacked.named_parameters(), rates, clip_norm=0.5, weight_decay=decay)
    for factor in (1.0, 0.5, 0.25):
        stacked_losses(stacked, inputs, labels).sum().backward()
        optimizer.step(factor)
    for number, (model, rate) in enumerate(zip(models, rates.tolist(), strict=True)):
        alone = make_optimizer(model, OptimizerConfig(beta1=0.9, beta2=0.99, epsilon=1e-8, weight_decay=decay))
        for factor in (1.0, 0.5, 0.25):
            loss_alone(model, inputs[number], labels[number]).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            assert norm > 0.5
            set_rate(alone, factor * rate)
            alone.step()
            alone.zero_grad()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(stacked.get_parameter(name)[number], parameter, rtol=1e-7, atol=1e-9)


def test_a_parameter_without_a_gradient_is_refused():
    stacked = stack(models_of("gating"))
    optimizer = StackedAdam(stacked.named_parameters(), torch.ones(3), 1.0)
    with pytest.raises(ValueError, match=r"every parameter must have a gradient, (\d+) of \1 have none"):
        optimizer.step(1.0)


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_stacked_convolutions_of_rows_are_those_of_segments(length):
    models = models_of("gating", short_conv=4)
    inputs = torch.randint(VOCABULARY, (6, length + 2), generator=torch.Generator().manual_seed(0))
    stacked = stack(models)
    whole, _ = stacked.features(inputs, return_state=False)
    first, state = stacked.features(inputs[:, :length])
    second, _ = stacked.features(inputs[:, length:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-10, atol=1e-10)


def test_a_member_is_the_model_on_its_own():
    models = models_of("pair-rotation", short_conv=4)
    inputs, _ = rows_for(3)
    stacked = stack(models)
    for number, model in enumerate(models):
        assert torch.equal(member_of(stacked, number)(inputs[0])[0], model(inputs[0])[0])


def test_a_model_that_diverges_leaves_the_others_alone():
    models = models_of("gating")
    with torch.no_grad():
        models[1].embedding.weight.fill_(float("nan"))
    inputs, labels = rows_for(3)
    stacked = stack(models)
    training = StackedTraining(stacked, torch.full((3,), 1e-2), 3, warmup=1)
    for _ in range(3):
        training.update(inputs, labels)
    assert stacked.embedding.weight[1].isnan().all()
    for number in (0, 2):
        assert all(x[number].isfinite().all() for x in stacked.parameters())


def test_training_learns():
    models = models_of("conformal")
    for model in models:
        model.reset_parameters()
    stacked = stack(models)
    inputs, labels = rows_for(3)
    training = StackedTraining(stacked, torch.full((3,), 1e-2), 30, warmup=5, log_every=10)
    for _ in range(30):
        training.update(inputs, labels)
    logged, losses = training.losses()
    assert logged == [10, 20, 30]
    assert losses.shape == (3, 3)
    assert (losses[:, -1] < 0.9 * losses[:, 0]).all()


def test_key_noise_scales_keys_alone_and_only_in_training():
    model = models_of("conformal", 1)[0]
    mixer = model.blocks[0].mixer
    x = torch.randn(64, 32, 16, dtype=torch.float64)
    expected = mixer.qkv_proj(x).unflatten(-1, (3, 2, 8))
    noise = KeyNoise(model)
    assert torch.equal(mixer.qkv_proj(x).unflatten(-1, (3, 2, 8)), expected)
    noise.deviation = 0.5
    ratio = mixer.qkv_proj(x).unflatten(-1, (3, 2, 8)) / expected
    assert torch.equal(ratio[..., 0, :, :], torch.ones_like(ratio[..., 0, :, :])), "queries"
    assert torch.equal(ratio[..., 2, :, :], torch.ones_like(ratio[..., 2, :, :])), "values"
    keys = ratio[..., 1, :, :]
    torch.testing.assert_close(keys, keys[..., :1, :1].expand_as(keys), rtol=1e-10, atol=0)
    logs = keys[..., 0, 0].log()
    assert logs.unique().numel() == 64 * 32, "one for each token"
    # 2,048 numbers: five standard errors.
    assert abs(logs.mean()) < 5 * 0.5 / 45
    assert logs.std().item() == pytest.approx(0.5, rel=5 / 64)
    model.eval()
    assert torch.equal(mixer.qkv_proj(x).unflatten(-1, (3, 2, 8)), expected)


def test_schedule_rises_and_falls_to_zero():
    rates = [schedule(step, 101, 10) for step in range(101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert max(rates) == rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5, abs=0.01)
    assert rates[100] < 1e-3
    # Zero is reached one step after the last.
    assert [schedule(step, 3, 1) for step in range(4)] == pytest.approx([0.5, 1.0, 0.5, 0.0])


def test_models_that_cannot_be_stacked_are_refused():
    with pytest.raises(ValueError, match="models must hold at least one model, got none"):
        stack([])
    with pytest.raises(ValueError, match="same config"):
        stack([*models_of("gating", 1), *models_of("conformal", 1)])
    with pytest.raises(ValueError, match=r"gate.logit is not of a linear map"):
        stack(models_of("learned-gate"))


@pytest.mark.gpu
def test_compiled_training_learns_what_it_does_otherwise():
    """In bfloat16, with the kernels, on rows of two lengths."""
    config = GPTConfig(vocab_size=512, layers=2, width=64, heads=4, short_conv=4, **VARIANTS["conformal"])
    losses = []
    for compile in (False, True):
        models = []
        for seed in range(2):
            torch.manual_seed(seed)
            models.append(GPT(config))
        rates = torch.tensor([1e-3, 3e-3])
        training = StackedTraining(
            stack(models).cuda(), rates, 40, warmup=4, autocast=True, compile=compile, log_every=10
        )
        torch.manual_seed(0)
        for step in range(40):
            length = (64, 128)[step % 2]
            # Of 512 tokens these rows have 8, which a model finds out first.
            inputs = torch.randint(8, (2, 8, length), device="cuda")
            training.update(inputs, inputs.roll(2, dims=-1))
        losses.append(training.losses()[1])
    assert (losses[0][:, -1] < 0.9 * losses[0][:, 0]).all()
    torch.testing.assert_close(losses[0], losses[1], rtol=0.02, atol=0.0)
