"""Training configs: validation, YAML, and changes."""

import math
from dataclasses import asdict, fields

import pytest

from sympow.model.config import GPTConfig
from sympow.train import DataConfig, OptimizerConfig, RunConfig, TrainConfig, train
from sympow.train.config import PRESETS, SECTIONS, field_help
from sympow.train.optimizer import rate_at


def test_yaml_gives_the_same_config_back():
    config = TrainConfig().changed(
        mixer="softmax", gating="fixed", context=64, short="pack", learning_rate=1e-5, compile=True, wandb="größe"
    )
    assert TrainConfig.from_yaml(config.to_yaml()) == config
    assert TrainConfig.from_yaml(TrainConfig().to_yaml()) == TrainConfig()


def test_what_yaml_leaves_out_has_its_default():
    config = TrainConfig.from_yaml("run: {steps: 3}\noptimizer:\n")
    assert config == TrainConfig().changed(steps=3)


def test_numbers_with_an_exponent_and_no_point_are_numbers():
    """YAML parses them as strings."""
    config = TrainConfig.from_yaml("optimizer: {learning_rate: 6e-4, epsilon: 1e-10}")
    assert (config.optimizer.learning_rate, config.optimizer.epsilon) == (6e-4, 1e-10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer: {}", "a config has the sections model, data, optimizer, run; got 'trainer'"),
        ("run: {stepz: 3, keap: 1}", "run has no field keap, stepz"),
        ("model: {depth: 3}", "model has no field depth"),
        ("run: {1: 2}", "run has no field 1"),
        ("run: 5", "run must map fields to values, got int"),
        ("run: []", "run must map fields to values, got list"),
        ("- run", "a config must map sections to fields, got list"),
        ("", "a config must have sections (model, data, optimizer, run), but this one is empty"),
        ("run: {steps: 3", "not YAML: while parsing"),
        ("run: {steps: 0}", "steps must be at least 1, got 0"),
        ("run: {steps: 1.5}", "steps must be an int, got float"),
        ("run: {seed: 1.5}", "seed must be an int, got float"),
        ("run: {save_every: -1}", "save_every must be at least 0, got -1"),
        ("run: {compile: 1}", "compile must be True or False, got 1"),
        ("run: {precision: fp16}", "precision must be one of 'bf16', 'fp32'; got 'fp16'"),
        ("run: {wandb: no}", "wandb must be a string, got bool"),
        ("optimizer: {learning_rate: fast}", "learning_rate must be a number, got 'fast'"),
        ("optimizer: {learning_rate: true}", "learning_rate must be a number, got bool"),
        ("optimizer: {learning_rate: .inf}", "learning_rate must be finite, got inf"),
        ("optimizer: {beta2: 1}", "beta2 must be at least 0 and below 1, got 1"),
        ("optimizer: {beta1: null}", "beta1 must be a number, got NoneType"),
        ("optimizer: {warmup_steps: 2.5}", "warmup_steps must be an int, got float"),
        ("optimizer: {schedule: step}", "schedule must be one of 'constant', 'linear', 'cosine'; got 'step'"),
        ("data: {context: 48}", "batch_tokens must be a multiple of the context, 48; got 65536"),
        ("data: {data: 3}", "data must be a string, got int"),
        ("data: {short: pad}", "short must be one of"),
        ("model: {power: 3}", "power must be even"),
        (
            "model: {}",
            "model must have fields, such as layers and width, or be left out for the default model; got none",
        ),
        ("run: {steps: 3}\nmodel:\n", "model must have fields, such as layers and width, or be left out"),
    ],
)
def test_mistakes_in_a_file_are_named_with_the_file(tmp_path, text, message):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError) as caught:
        TrainConfig.read(tmp_path / "config.yaml")
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'}: {message}")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.yaml cannot be read: No such file"):
        TrainConfig.read(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize(
    ("kind", "values", "error", "message"),
    [
        (RunConfig, {"batch_tokens": 0}, ValueError, "batch_tokens must be at least 1, got 0"),
        (RunConfig, {"keep": 0}, ValueError, "keep must be at least 1, got 0"),
        (RunConfig, {"log_every": "1"}, TypeError, "log_every must be an int, got str"),
        (RunConfig, {"parallel": "tp"}, ValueError, "parallel must be one of 'ddp', 'fsdp'; got 'tp'"),
        (OptimizerConfig, {"weight_decay": -0.1}, ValueError, "weight_decay must be at least 0, got -0.1"),
        (OptimizerConfig, {"rotation_gradient": -1.0}, ValueError, "rotation_gradient must be at least 0, got -1"),
        (OptimizerConfig, {"rotation_init": -1.0}, ValueError, "rotation_init must be at least 0, got -1"),
        (OptimizerConfig, {"clip_norm": math.nan}, ValueError, "clip_norm must be finite, got nan"),
        (OptimizerConfig, {"epsilon": "1"}, TypeError, "epsilon must be a number, got str"),
        (DataConfig, {"context": 0}, ValueError, "context must be at least 1, got 0"),
    ],
)
def test_bad_values_are_refused_with_the_name_of_the_field(kind, values, error, message):
    with pytest.raises(error, match=message):
        kind(**values)


def test_changes_find_their_part():
    config = TrainConfig().changed(layers=3, context=128, learning_rate=0.1, steps=7)
    assert (config.model.layers, config.data.context) == (3, 128)
    assert (config.optimizer.learning_rate, config.run.steps) == (0.1, 7)
    assert config.batch_rows == config.run.batch_tokens // 128
    with pytest.raises(TypeError, match="data must be a DataConfig, got str"):
        TrainConfig(data="books")
    with pytest.raises(TypeError, match="config must be a TrainConfig, got str"):
        train("laptop")
    for name in ("dataset", "heldout"):
        with pytest.raises(TypeError, match=f"{name} must be a dataset, .*; got str"):
            train(config, **{name: "books"})
    with pytest.raises(TypeError, match="stepz is a field of no section of a TrainConfig"):
        config.changed(stepz=3)


def test_no_field_is_in_two_parts():
    """Flags and changes are named without their section."""
    names = [field.name for kind in (GPTConfig, DataConfig, OptimizerConfig, RunConfig) for field in fields(kind)]
    assert len(names) == len(set(names))


def test_every_field_has_a_line_of_help():
    for kind in SECTIONS.values():
        assert field_help(kind).keys() == {field.name for field in fields(kind)}


def test_the_preset_of_the_paper_is_its_recipe():
    config = PRESETS["paper"]()
    assert config.model == GPTConfig.preset("gpt2-124m", rotary="scale")
    assert (config.model.layers, config.model.heads, config.model.width) == (12, 12, 768)
    assert (config.model.power, config.model.gating, config.model.rotary) == (2, "scalar", "scale")
    assert (config.run.batch_tokens, config.run.precision, config.run.steps) == (524_288, "bf16", 100_000)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.warmup_steps) == (6e-4, "constant", 0)
    # Adam, not AdamW, and PyTorch's defaults for what the paper does not say.
    assert (optimizer.weight_decay, optimizer.clip_norm, optimizer.rotation_rate) == (0, 0, 1)
    assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.999, 1e-8)
    assert {rate_at(optimizer, step, 100_000) for step in (0, 1, 50_000, 99_999)} == {6e-4}
    # Every context of the paper's figures divides the batch.
    for context in (256, 1_024, 4_096, 8_192, 16_384, 65_536):
        assert config.changed(context=context).batch_rows * context == 524_288


@pytest.mark.parametrize("name", PRESETS)
def test_presets_survive_yaml(name):
    assert TrainConfig.from_yaml(PRESETS[name]().to_yaml()) == PRESETS[name]()
    assert asdict(PRESETS[name]()).keys() == {"model", "data", "optimizer", "run"}


def test_a_constant_rate_stays():
    schedule = OptimizerConfig(learning_rate=0.5)
    assert [rate_at(schedule, step, 10) for step in (0, 5, 9)] == [0.5, 0.5, 0.5]


def test_a_rate_warms_up_from_zero():
    schedule = OptimizerConfig(learning_rate=1.0, warmup_steps=4)
    assert [rate_at(schedule, step, 10) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_a_linear_schedule_falls_to_what_is_left():
    schedule = OptimizerConfig(learning_rate=2.0, warmup_steps=2, schedule="linear", final_rate=0.1)
    assert rate_at(schedule, 2, 13) == 2.0
    assert rate_at(schedule, 7, 13) == pytest.approx(2.0 * 0.55)
    # The last of 13.
    assert rate_at(schedule, 12, 13) == pytest.approx(0.2)
    assert rate_at(schedule, 50, 13) == pytest.approx(0.2)


def test_a_cosine_schedule_falls_to_what_is_left():
    schedule = OptimizerConfig(learning_rate=1.0, schedule="cosine", final_rate=0.2)
    assert rate_at(schedule, 0, 9) == 1.0
    assert rate_at(schedule, 2, 9) == pytest.approx(0.2 + 0.8 * (1 + math.cos(math.pi / 4)) / 2)
    assert rate_at(schedule, 4, 9) == pytest.approx(0.6)
    assert rate_at(schedule, 8, 9) == pytest.approx(0.2)
    rates = [rate_at(schedule, step, 9) for step in range(9)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_run_shorter_than_its_warm_up_has_rates(schedule):
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, schedule=schedule)
    assert [rate_at(config, step, 3) for step in range(3)] == pytest.approx([1 / 11, 2 / 11, 3 / 11])
