"""The trainer: models learn, and execution options do not change the result."""

import math
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from support import assert_close, assert_same_model
from sympow.data import open_dataset
from sympow.data.preparation import prepare
from sympow.data.provenance import TrainedOn
from sympow.data.tokenizer import load_tokenizer
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.model.storage import load_model
from sympow.train import TrainConfig, train, trainer
from sympow.train.config import OptimizerConfig
from sympow.train.metrics import Progress, read_metrics
from sympow.train.monitoring import (
    Throughput,
    find_nonfinite,
    gate_and_rotation_metrics,
    peak_flops,
    training_flops,
)
from sympow.train.optimizer import make_optimizer, set_rate


@pytest.fixture
def run(tiny, losses, tmp_path):
    """The losses of a run."""

    def make(name="run", **changes):
        return losses(train(tiny(**{"steps": 3, "save_every": 0, **changes}), tmp_path / name, device="cpu"))

    return make


def test_a_model_learns(run):
    found = run(steps=40, log_every=40, learning_rate=1e-2)
    assert found[0] == pytest.approx(math.log(257), abs=0.3)
    assert sum(found[-5:]) / 5 < 3.5


def test_parts_of_a_batch_add_up_to_it(run):
    whole = run("whole")
    # Micro-batches of two rows, of four (then two), and of one, the least; and the loss of a few tokens at a time.
    for change in (
        {"micro_batch_tokens": 64},
        {"micro_batch_tokens": 128},
        {"micro_batch_tokens": 1},
        {"loss_tokens": 7},
    ):
        assert_close(run(str(change), **change), whole, 2e-5, "losses")


def test_packed_parts_add_up_to_a_packed_batch(run):
    # Long and many rows, so that attention across documents would change the loss.
    changes = {"learning_rate": 0.01, "steps": 4, "context": 96, "batch_tokens": 768}
    whole = run("whole", short="pack", **changes)
    assert_close(run("parts", short="pack", micro_batch_tokens=192, **changes), whole, 4e-6, "losses")
    assert whole != pytest.approx(run("joined", short="join", **changes), abs=5e-5)


@pytest.mark.parametrize("short", ["join", "pack"])
def test_recomputing_changes_nothing(run, short):
    assert run("again", short=short, recompute=True, layers=2) == run("kept", short=short, layers=2)


def test_recomputing_keeps_less(tiny, tmp_path):
    """Compares the bytes that autograd saves for the backward pass."""

    def kept(recompute):
        total = 0

        def count(x):
            nonlocal total
            total += x.numel() * x.element_size()
            return x

        config = tiny(steps=1, layers=2, recompute=recompute, save_every=0)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            train(config, tmp_path / f"run-{recompute}", device="cpu")
        return total

    assert kept(True) < kept(False) / 2


def test_clipping_shortens_the_gradient_and_reports_its_norm_before(tiny, tmp_path, monkeypatch):
    lengths = []
    update = torch.optim.AdamW.step

    def measured(self, *arguments):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        lengths.append(torch.nn.utils.get_total_norm(gradients).item())
        return update(self, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", measured)
    plain = read_metrics(train(tiny(steps=2, save_every=0), tmp_path / "plain", device="cpu") / "metrics.jsonl")
    assert lengths[:2] == pytest.approx([line["gradient_norm"] for line in plain], rel=1e-4)
    lengths.clear()
    config = tiny(steps=2, clip_norm=0.01, save_every=0)
    clipped = read_metrics(train(config, tmp_path / "clipped", device="cpu") / "metrics.jsonl")
    assert lengths[:2] == pytest.approx([0.01, 0.01], rel=1e-3)
    assert clipped[0]["gradient_norm"] == plain[0]["gradient_norm"] > 0.1


@pytest.fixture
def graphs_only(monkeypatch):
    """Compiles with the backend "eager", since code generation takes a minute on a CPU; options of each call."""
    real, calls = nn.Module.compile, []

    def compiled(module, **options):
        calls.append(options)
        real(module, backend="eager", **options)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    return calls


def test_compiled_blocks_give_the_same(run, graphs_only):
    compiled = run("compiled", compile=True, recompute=True, form="attention")
    assert_close(compiled, run("plain", form="attention"), 2e-5, "losses")
    assert graphs_only == [{"fullgraph": True}]


@pytest.mark.slow
def test_packed_documents_compile_too(run, graphs_only):
    changes = {"short": "pack", "steps": 1, "save": False}
    assert run("compiled", compile=True, **changes) == run("plain", **changes)
    assert graphs_only == [{"fullgraph": False}]


def test_one_process_compiles_any_number_of_models(run, graphs_only):
    changes = {"compile": True, "form": "attention", "steps": 1, "save": False}
    with torch._dynamo.config.patch(recompile_limit=1):
        for heads in (1, 2):
            run(f"heads-{heads}", heads=heads, **changes)


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_blocks_give_the_same_on_a_gpu(tiny, losses, tmp_path, recompute):
    """On a CPU, compiling takes a minute."""
    config = tiny(layers=2, steps=4)
    plain = losses(train(config, tmp_path / "plain", device="cuda"))
    config = config.changed(compile=True, recompute=recompute)
    compiled = losses(train(config, tmp_path / "compiled", device="cuda"))
    assert compiled == pytest.approx(plain, abs=1e-3)


def test_bfloat16_keeps_parameters_in_float32(tiny, tmp_path, losses):
    out = train(tiny(precision="bf16", steps=3, save_every=0), tmp_path / "run", device="cpu")
    assert {p.dtype for p in load_model(out / "model").parameters()} == {torch.float32}
    single = losses(train(tiny(steps=3, save_every=0), tmp_path / "single", device="cpu"))
    assert losses(out) != single
    assert losses(out) == pytest.approx(single, abs=0.05)


@pytest.mark.parametrize("short", ["join", "pack"])
def test_metrics_have_gates_and_rotations_of_every_layer_at_log_steps(tiny, tmp_path, short):
    out = train(tiny(layers=2, log_every=3, steps=7, short=short, save_every=0), tmp_path / "run", device="cpu")
    lines = read_metrics(out / "metrics.jsonl")
    per_layer = {f"{kind}/layer_{n}" for kind in ("half_life", "beta_mean", "beta_deviation") for n in range(2)}
    for line in lines:
        always = {"step", "loss", "gradient_norm", "learning_rate"}
        logged = line["step"] in (3, 6, 7)
        assert line.keys() == always | (per_layer | {"tokens_per_second"} if logged else set())
        assert all(math.isfinite(value) for value in line.values())
    # Gates start at 0.999 and rotations at their fixed rates.
    assert lines[2]["half_life/layer_0"] == pytest.approx(math.log(0.5) / math.log(0.999), rel=0.2)
    assert lines[2]["beta_mean/layer_1"] == pytest.approx(1, abs=0.2)


def test_looking_at_gates_does_not_change_training(run):
    assert run("often", log_every=1) == run("seldom", log_every=100)


def test_a_state_that_forgets_nothing_has_no_half_life():
    model = GPT(GPTConfig(vocab_size=16, layers=1, width=16, heads=2, gating="learned", rotary="fixed"))
    tokens = torch.arange(8).unsqueeze(0)
    assert gate_and_rotation_metrics(model, lambda: model(tokens)).keys() == {"half_life/layer_0"}
    with torch.no_grad():
        model.get_parameter("blocks.0.mixer.gate.logit").fill_(200.0)
    assert gate_and_rotation_metrics(model, lambda: model(tokens)) == {}
    assert not model.blocks[0].mixer.gate._forward_hooks


def test_a_single_rotation_has_no_deviation():
    model = GPT(GPTConfig(vocab_size=16, layers=1, width=16, heads=1, gating="none", rotary="scale"))
    found = gate_and_rotation_metrics(model, lambda: model(torch.zeros(1, 1, dtype=torch.int64)))
    assert found == {"beta_mean/layer_0": 1.0}


def test_what_is_not_finite_is_named_in_the_order_it_came():
    model = GPT(GPTConfig(vocab_size=16, layers=2, width=16, heads=2))
    tokens = torch.arange(8).unsqueeze(0)
    assert find_nonfinite(model, lambda: model(tokens)) == []
    model.get_parameter("blocks.1.mlp.up_proj.bias").data[3] = math.nan
    model.final_norm.weight.grad = torch.full_like(model.final_norm.weight, math.nan)
    assert find_nonfinite(model, lambda: model(tokens)) == [
        "parameter blocks.1.mlp.up_proj.bias",
        "output of blocks.1.mlp.up_proj",
        "output of blocks.1.mlp.out_proj",
        "output of blocks.1.mlp",
        "gradient of final_norm.weight",
    ]


def test_held_out_losses_are_of_the_same_documents_each_time(tiny, tmp_path):
    config = tiny(evaluate_every=2, evaluate_tokens=320, learning_rate=0.0, save_every=0)
    lines = read_metrics(train(config, tmp_path / "run", device="cpu") / "metrics.jsonl")
    found = {line["step"]: line["heldout_loss"] for line in lines if "heldout_loss" in line}
    assert list(found) == [2, 4, 6]
    assert len(set(found.values())) == 1
    # With a rate of zero the exported model is the one that was evaluated.
    model = load_model(tmp_path / "run" / "model")
    dataset = open_dataset(config.data.data, "heldout")
    rows = trainer.Loader(dataset, 32, 10, short="join", shuffle=False, epochs=1)
    batch = next(iter(rows))
    logits, _ = model(batch.inputs)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    assert_close(found[2], expected.item(), 1e-5, "held-out loss")


def test_held_out_losses_by_default_change_nothing_else(tiny, losses, tmp_path):
    runs = {
        every: train(tiny(steps=7, evaluate_every=every), tmp_path / str(every), device="cpu") for every in (None, 0)
    }
    lines = read_metrics(runs[None] / "metrics.jsonl")
    assert [line["step"] for line in lines if "heldout_loss" in line] == [2, 4, 6, 7]
    assert losses(runs[None]) == losses(runs[0])


def test_data_without_held_out_documents_are_trained_on_without_evaluation(tiny, losses, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a document " * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "data", heldout=0, workers=1)
    train(tiny(data=str(tmp_path / "data"), evaluate_every=None), tmp_path / "run", device="cpu")
    assert len(losses(tmp_path / "run")) == 6
    assert f"no held-out loss: {tmp_path / 'data'} has no split 'heldout'" in capsys.readouterr().err
    for number in range(9):
        (tmp_path / f"{number}.txt").write_text("short" if number else "a document " * 100)
    prepare([*tmp_path.glob("?.txt")], tmp_path / "more", heldout=0.3, workers=1)
    train(tiny(data=str(tmp_path / "more"), evaluate_every=None, context=192), tmp_path / "other", device="cpu")
    assert "no held-out loss: " in capsys.readouterr().err
    assert not any("heldout_loss" in line for line in read_metrics(tmp_path / "other" / "metrics.jsonl"))


def test_damaged_held_out_documents_are_not_passed_over_silently(tiny, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("a document " * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "data", heldout=0.5, workers=1)
    open_dataset(tmp_path / "data")
    (damaged,) = (tmp_path / "data").glob("heldout-*.tokens.npy")
    damaged.write_bytes(b"")
    train(tiny(data=str(tmp_path / "data"), evaluate_every=None), tmp_path / "run", device="cpu")
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("no held-out loss: "))
    assert str(damaged) in line


def test_the_folder_and_the_first_step_are_shown_at_once(tiny, tmp_path, capsys):
    train(tiny(steps=4, log_every=10), tmp_path / "run", device="cpu")
    shown = capsys.readouterr().err.splitlines()
    assert shown[0] == f"run folder: {tmp_path / 'run'}"
    assert [line.split("  loss")[0] for line in shown if line.startswith("step ")] == ["step 1 of 4", "step 4 of 4"]


def test_a_missing_held_out_part_is_found_before_training(tiny, tmp_path):
    (tmp_path / "a.txt").write_text("a document " * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "data", heldout=0, workers=1)
    with pytest.raises(ValueError, match="heldout"):
        train(tiny(data=str(tmp_path / "data"), evaluate_every=4), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_dataset_is_evaluated_on_the_one_given_with_it(tiny, texts, tmp_path, monkeypatch):
    # The config names Python's sources, which are neither trained nor evaluated on.
    config = tiny(data="stdlib", evaluate_every=2, evaluate_tokens=320, steps=2)
    dataset, heldout = open_dataset(texts), open_dataset(texts, "heldout")
    with pytest.raises(ValueError, match=r"heldout must be given with dataset to evaluate.*evaluate_every of 2"):
        train(config, tmp_path / "run", device="cpu", dataset=dataset)
    train(config, tmp_path / "given", device="cpu", dataset=dataset, heldout=heldout)
    train(config.changed(data=str(texts)), tmp_path / "named", device="cpu")
    given, named = (read_metrics(tmp_path / name / "metrics.jsonl")[-1] for name in ("given", "named"))
    assert given["heldout_loss"] == named["heldout_loss"]
    with pytest.raises(ValueError, match="heldout must be None if evaluate_every is 0"):
        train(tiny(steps=1), tmp_path / "run", device="cpu", heldout=heldout)
    monkeypatch.setattr(heldout, "vocab_size", 300)
    with pytest.raises(ValueError, match="heldout must have the vocab_size of what is trained on, 257; got 300"):
        train(config, tmp_path / "run", device="cpu", dataset=dataset, heldout=heldout)
    # The tokenizer is needed at the end of a run only.
    monkeypatch.setattr(dataset, "load_tokenizer", lambda: None)
    with pytest.raises(TypeError, match=r"load_tokenizer of dataset must return a .*Tokenizer.* got NoneType"):
        train(tiny(steps=1), tmp_path / "run", device="cpu", dataset=dataset)
    assert not (tmp_path / "run").exists()


def test_the_model_folder_says_what_it_was_trained_on(tiny, texts, tmp_path, monkeypatch):
    monkeypatch.chdir(texts.parent)
    out = train(tiny(data=texts.name, steps=1), tmp_path / "named", device="cpu")
    record = TrainedOn.find(out / "model")
    dataset = open_dataset(texts)
    assert record == TrainedOn(
        texts.name, str(texts.resolve()), 32, "join", "bytes", dataset.fingerprint, f"{texts.name} (train)"
    )
    monkeypatch.chdir(tmp_path)
    assert record.source == str(texts.resolve())
    # The dataset of the config and the one that was passed instead differ.
    out = train(tiny(steps=1), tmp_path / "given", device="cpu", dataset=dataset)
    with pytest.raises(ValueError, match="a dataset object that cannot be opened"):
        _ = TrainedOn.find(out / "model").source


def test_tensorboard_has_the_same_numbers_also_after_resuming(tiny, tmp_path):
    out = train(tiny(tensorboard=True, steps=4, save_every=3), tmp_path / "run", device="cpu")
    assert len(list((out / "tensorboard").glob("events.out.tfevents.*"))) == 1
    # As if killed after step 4: only the checkpoint of step 3 is there.
    (out / "checkpoints" / "step-000000004" / "sealed.json").unlink()
    train(tiny(tensorboard=True, save_every=3), out, resume=True, device="cpu")
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    lines = read_metrics(out / "metrics.jsonl")
    for name in ("loss", "gradient_norm", "half_life/layer_0", "beta_mean/layer_0"):
        assert [event.step for event in events.Scalars(name)] == [1, 2, 3, 4, 5, 6]
        assert [event.value for event in events.Scalars(name)] == pytest.approx([line[name] for line in lines])


def test_a_resumed_run_goes_on_under_the_same_name_in_weights_and_biases(tiny, tmp_path, monkeypatch):
    made, logged, finished = [], [], []

    class Run:
        def log(self, numbers, step):
            logged.append(step)

        def finish(self):
            finished.append(True)

    class FakeWandb:
        @staticmethod
        def init(**options):
            made.append(options)
            return Run()

    monkeypatch.setitem(sys.modules, "wandb", FakeWandb)
    out = train(tiny(wandb="project", steps=2), tmp_path / "run", device="cpu")
    train(tiny(wandb="project", steps=4), out, resume=True, device="cpu")
    assert [options["project"] for options in made] == ["project", "project"]
    assert made[0]["id"] == made[1]["id"]
    assert made[0]["config"]["run"]["steps"] == 2
    assert (logged, len(finished)) == ([1, 2, 3, 4], 2)


@pytest.mark.parametrize("module", ["wandb", "tensorboard"])
def test_a_missing_extra_is_named(tiny, tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    extra = "wandb" if module == "wandb" else "train"
    with pytest.raises(ModuleNotFoundError, match=rf"{module} is not installed; .*\[{extra}\]"):
        train(tiny(wandb="project", tensorboard=module == "tensorboard"), tmp_path / "run", device="cpu")


def test_the_exported_model_is_the_trained_one(tiny, tmp_path, monkeypatch):
    seen = []
    build = trainer._build_model
    monkeypatch.setattr(trainer, "_build_model", lambda *how: seen.append(build(*how)) or seen[0])
    out = train(tiny(layers=2, gating="vector", steps=2), tmp_path / "run", device="cpu")
    model = load_model(out / "model")
    assert model.config == TrainConfig.read(out / "config.yaml").model
    assert model.config.vocab_size == 257
    assert_same_model(model, seen[0], torch.randint(257, (2, 40)))
    tokenizer = load_tokenizer(out / "model")
    assert tokenizer.decode(tokenizer.encode("state of the gate")) == "state of the gate"
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_run_folder_holds_what_it_should(tiny, tmp_path):
    out = train(tiny(tensorboard=True), tmp_path / "deep" / "run", device="cpu")
    names = {path.name for path in out.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "tensorboard", "checkpoints", "model"}
    assert {path.name for path in (out / "model").iterdir()} == {
        "model.json",
        "model.safetensors",
        "sympow_tokenizer.json",
        "training_data.json",
    }


def test_the_three_groups_of_parameters():
    model = GPT(GPTConfig(vocab_size=16, layers=1, width=16, heads=2, gating="scalar", rotary="scale"))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1, rotation_rate=0.5, beta1=0.8, epsilon=1e-6))
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices, rotation, others = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    assert len(matrices) + len(rotation) + len(others) == len(names)
    assert "embedding.weight" in matrices
    assert not [name for name in matrices if "gate" in name or "norm" in name or name.endswith("bias")]
    assert rotation
    assert all("rotation." in name for name in rotation)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0, 0]
    assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.999)}
    set_rate(optimizer, 0.2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1, 0.2]


def test_learned_rates_of_a_rotation_are_no_projection():
    """rotation_rate applies to W_β only: learned rates θ have the usual learning rate."""
    model = GPT(GPTConfig(vocab_size=16, layers=1, width=16, heads=2, rotary="learned"))
    optimizer = make_optimizer(model, OptimizerConfig(weight_decay=0.1, rotation_rate=0.5))
    set_rate(optimizer, 0.2)
    theta = model.blocks[0].mixer.rotation.theta
    (group,) = [group for group in optimizer.param_groups if any(p is theta for p in group["params"])]
    assert (group["lr"], group["weight_decay"]) == (0.2, 0)


def test_without_decay_it_is_adam():
    """Three steps of PyTorch's Adam on the same gradients."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    copy = nn.Linear(3, 2)
    copy.load_state_dict(model.state_dict())
    mine = make_optimizer(model, OptimizerConfig(learning_rate=0.1))
    theirs = torch.optim.Adam(copy.parameters(), lr=0.1)
    for step in range(3):
        for network, optimizer in ((model, mine), (copy, theirs)):
            optimizer.zero_grad()
            network(torch.ones(1, 3) * (step + 1)).square().sum().backward()
            optimizer.step()
    assert torch.equal(model.weight, copy.weight)
    assert torch.equal(model.bias, copy.bias)


def test_progress_says_how_long_it_takes_from_where_it_began(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr("sympow.train.metrics.time.monotonic", lambda: now)
    with Progress(20, quiet=False) as progress:
        progress.begin(10)
        # The first step begins with a compilation.
        now = 200.0
        progress.step(11, "loss 3.2")
        now = 202.0
        progress.step(12, "loss 3.1")
    assert capsys.readouterr().err == "step 11 of 20  loss 3.2\nstep 12 of 20  loss 3.1  0:00:16 left\n"
    with Progress(20, quiet=True) as progress:
        progress.begin(0)
        progress.step(1, "loss 3.1")
        progress.say("a line")
    assert capsys.readouterr().err == ""


def test_progress_is_a_bar_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress(20, quiet=False) as progress:
        progress.begin(10)
        progress.say("a line [that] stays")
        progress.step(12, "loss 3.1")
        assert progress._bar.tasks[0].completed == 12
    printed = capsys.readouterr().err
    assert "a line [that] stays" in printed
    assert "12/20" in printed
    assert "loss 3.1" in printed


def test_tokens_a_second(monkeypatch):
    now = 0.0
    monkeypatch.setattr("sympow.train.monitoring.time.monotonic", lambda: now)
    throughput = Throughput()
    throughput.count(100)
    throughput.count(200)
    now = 2.0
    assert throughput.read() == 150
    now = 5.0
    throughput.read()
    throughput.count(100)
    now = 6.0
    assert throughput.read() == 100


def test_operations_of_a_step():
    config = GPTConfig.preset("gpt2-124m")
    assert peak_flops(torch.device("cpu")) is None
    # Six FLOPs per weight and token, and those of attention, which a state bounds.
    weights = 6 * 124e6
    assert weights < training_flops(config, 1_024) < 1.2 * weights
    assert training_flops(config, 65_536) < training_flops(config.preset("gpt2-124m", mixer="softmax"), 65_536)
