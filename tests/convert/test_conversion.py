"""Whole conversions of a small teacher: every stage learns, is resumed exactly, and can be left out."""

import json
import math
import os
import signal

import pytest
import torch
from convert.tiny import TINY, learns, losses_of, make_gpt2, make_llama, same_weights, weights_of
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.convert import ConvertConfig, convert
from sympow.convert.evaluation import ModelLosses, held_out_sequences, measure_losses
from sympow.data import open_dataset
from sympow.train.loop import Training


def before_steps(monkeypatch, act):
    """Calls a function with the name of the stage's folder and the number of steps made, before each step."""
    step = Training.step

    def changed(self, batch):
        act(self.folder.name, self.step_number)
        return step(self, batch)

    monkeypatch.setattr(Training, "step", changed)


def read(folder, name):
    return ModelLosses.read(folder / "evaluations" / f"{name}.json")


@pytest.fixture(scope="module")
def whole(teacher, texts, tmp_path_factory):
    """A conversion in three stages, and a second without the first."""
    out = tmp_path_factory.mktemp("conversions") / "whole"
    # Not multiples of a batch, whose remainders would make another.
    tokens = {"match_tokens": 8 * 128 + 100, "distill_tokens": 8 * 128 + 50, "extend_tokens": 8 * 128 + 127}
    changes = {"data": str(texts), **tokens, "extend_context": 32, "without_match": True}
    config = ConvertConfig().changed(**{**TINY, **changes})
    assert convert(teacher, config, out, device="cpu")
    return out, config


@pytest.mark.slow
def test_every_stage_reduces_its_loss(whole):
    out, _ = whole
    for stage in ("match", "distill", "extend", "distill-without-match", "extend-without-match"):
        assert len(losses_of(out, stage)) == (16 if stage == "distill-without-match" else 8)
        assert learns(out, stage), stage


@pytest.mark.slow
def test_stage_1_is_evaluated_against_the_teacher_at_every_context(whole):
    out, _ = whole
    teacher, start, match, distill = (read(out, name) for name in ("teacher", "start", "match", "distill"))
    assert set(teacher.by_context) == {16, 64, 256}
    for one in (start, match, distill):
        assert set(one.by_context) == set(teacher.by_context)
        assert len(one.by_context[16].of_each) == 16
    assert (start.tokens, match.tokens, distill.tokens) == (0, 1_024, 2_048)
    assert read(out, "distill-without-match").tokens == 2_048
    assert [read(out, f"extend{ending}").tokens for ending in ("", "-without-match")] == [3_072, 3_072]


@pytest.mark.slow
def test_matching_trains_only_the_converted_attention(whole, teacher):
    out, _ = whole
    before, after = weights_of(teacher), weights_of(out / "stages" / "match" / "model")
    assert set(before) < set(after)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == ("self_attn" not in name), name


@pytest.mark.slow
def test_the_result_is_the_last_stage_and_generates(whole):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from sympow.hf import swapped_layers

    out, _ = whole
    assert same_weights(out / "model", out / "stages" / "extend" / "model")
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert swapped_layers(model) == [0, 1]
    ids = AutoTokenizer.from_pretrained(out / "model")("1 and 2", return_tensors="pt")
    assert model.generate(**ids, max_new_tokens=3, do_sample=False).shape[1] == ids["input_ids"].shape[1] + 3


@pytest.mark.slow
def test_the_result_is_evaluated_on_the_held_out_documents_of_its_data(whole, texts, tmp_path):
    """By `sympow evaluate`, which reads segments and carries the state: the same losses as in the conversion."""
    out, _ = whole
    arguments = ["evaluate", str(out / "model"), "--length", "64", "--documents", "4", "--segment-size", "24"]
    ended = CliRunner().invoke(app, [*arguments, "--probe", "passkey", "--distance", "64", "--out", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert f"held-out documents of {texts}, 64 tokens" in ended.output
    (found,) = json.loads((tmp_path / "evaluation.json").read_text())["models"].values()
    # Both files round to five digits.
    assert found["by_context"]["64"] == pytest.approx(read(out, "extend").by_context[64].loss, abs=1e-3)
    assert found["trained_at"] == 32
    assert len(found["passkey"]) == 1


@pytest.mark.slow
def test_the_result_is_not_evaluated_by_several_processes(whole, monkeypatch):
    monkeypatch.setattr("sympow.cli.evaluate.under_torchrun", lambda: True)
    out, _ = whole
    ended = CliRunner().invoke(app, ["evaluate", str(out / "model")])
    assert ended.exit_code == 2
    assert "evaluate it in one process, without torchrun" in " ".join(ended.output.split())


@pytest.mark.slow
def test_the_report_has_every_model_and_figure(whole):
    out, _ = whole
    text, page = (out / "report.md").read_text(), (out / "report.html").read_text()
    names = ("teacher", "student, untrained", "student after matching", "student after distillation, without stage 1")
    for name in names:
        assert f"| {name} |" in text
        assert f"<td>{name}</td>" in page
    assert f"{read(out, 'distill').by_context[64].loss:.4f}" in text
    last = json.loads((out / "stages" / "match" / "metrics.jsonl").read_text().splitlines()[-1])
    for layer in range(2):
        assert f"| {layer} | {last[f'match_loss/layer_{layer}']:.4f} |" in text
    for figure in ("loss_by_position", "loss_by_context", "training"):
        assert (out / "figures" / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
    assert page.count("data:image/png;base64,") == 3


@pytest.mark.slow
def test_a_complete_conversion_is_not_repeated(whole, teacher, monkeypatch):
    out, config = whole
    monkeypatch.setattr(Training, "run", lambda *_: pytest.fail("a stage ran again"))
    assert convert(teacher, config, out, device="cpu")


@pytest.mark.slow
def test_an_interrupted_conversion_continues_exactly(whole, teacher, tmp_path, monkeypatch):
    """A signal in each stage, between two checkpoints: the same command gives the same weights bit for bit."""
    reference, config = whole
    config = config.changed(without_match=False, save_every=3)
    out = tmp_path / "interrupted"
    for stopped_in in ("match", "distill", "extend"):

        def stop(folder, step, stopped_in=stopped_in):
            if (folder, step) == (stopped_in, 4):
                os.kill(os.getpid(), signal.SIGTERM)

        with monkeypatch.context() as patch:
            before_steps(patch, stop)
            assert not convert(teacher, config, out, device="cpu")
        assert not (out / "evaluations" / f"{stopped_in}.json").exists()
    assert convert(teacher, config, out, device="cpu")
    for stage in ("match", "distill", "extend"):
        assert losses_of(out, stage) == losses_of(reference, stage)
        assert same_weights(out / "stages" / stage / "model", reference / "stages" / stage / "model"), stage
        assert not (out / "stages" / stage / "checkpoints").exists()


@pytest.mark.slow
def test_a_killed_conversion_continues_from_its_checkpoint(whole, teacher, tmp_path, monkeypatch):
    """As after a crash: nothing is saved at the end, and the steps since the last checkpoint are repeated."""
    reference, config = whole
    config = config.changed(without_match=False, save_every=3)
    out = tmp_path / "killed"

    def die(folder, step):
        if (folder, step) == ("distill", 5):
            raise MemoryError

    with monkeypatch.context() as patch:
        before_steps(patch, die)
        with pytest.raises(MemoryError):
            convert(teacher, config, out, device="cpu")
    repeated = []
    before_steps(monkeypatch, lambda *place: repeated.append(place))
    assert convert(teacher, config, out, device="cpu")
    assert repeated[0] == ("distill", 3)
    assert same_weights(out / "model", reference / "model")


@pytest.mark.slow
def test_a_conversion_killed_in_an_evaluation_does_not_train_again(teacher, settings, tmp_path, monkeypatch):
    config, out = settings(match_tokens=0, save_every=0), tmp_path / "killed"
    evaluated = []

    def dying(*arguments):
        evaluated.append(arguments)
        # After the teacher and the untrained student.
        if len(evaluated) == 3:
            raise MemoryError
        return measure_losses(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("sympow.convert.conversion.measure_losses", dying)
        with pytest.raises(MemoryError):
            convert(teacher, config, out, device="cpu")
    trained = weights_of(out / "stages" / "distill" / "model")
    monkeypatch.setattr(Training, "run", lambda *_: pytest.fail("the stage ran again"))
    assert convert(teacher, config, out, device="cpu")
    result = weights_of(out / "model")
    assert all(torch.equal(result[name], trained[name]) for name in trained)


@pytest.mark.slow
def test_more_contexts_are_evaluated_without_training_again(teacher, settings, tmp_path, monkeypatch):
    short, out = {"match_tokens": 0, "distill_tokens": 128}, tmp_path / "out"
    assert convert(teacher, settings(**short, evaluate_factors="1,4"), out, device="cpu")
    before = {name: read(out, name).by_context for name in ("teacher", "start", "distill")}
    monkeypatch.setattr(Training, "run", lambda *_: pytest.fail("the stage ran again"))
    assert convert(teacher, settings(**short, evaluate_factors="1,2"), out, device="cpu")
    for name, found in before.items():
        after = read(out, name).by_context
        assert list(after) == [16, 32, 64]
        assert {length: after[length] for length in found} == found
    # The numbers are those of a conversion that asked for them at once.
    fresh = tmp_path / "fresh"
    monkeypatch.undo()
    assert convert(teacher, settings(**short, evaluate_factors="1,2"), fresh, device="cpu")
    assert read(fresh, "distill").by_context[32] == read(out, "distill").by_context[32]
    assert "context 32" in (out / "report.md").read_text("utf-8")


@pytest.mark.slow
def test_stages_without_tokens_are_left_out(teacher, settings, tmp_path):
    assert convert(teacher, settings(match_tokens=0), tmp_path / "distilled", device="cpu")
    assert [path.name for path in (tmp_path / "distilled" / "stages").iterdir()] == ["distill"]
    assert convert(teacher, settings(match_tokens=0, distill_tokens=0), tmp_path / "swapped", device="cpu")
    assert not (tmp_path / "swapped" / "stages").exists()
    before, after = weights_of(teacher), weights_of(tmp_path / "swapped" / "model")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_in_a_hybrid_only_the_chosen_layers_change_in_stage_1(teacher, settings, tmp_path):
    assert convert(teacher, settings(layers="1", distill_tokens=0), tmp_path / "out", device="cpu")
    before, after = weights_of(teacher), weights_of(tmp_path / "out" / "model")
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == ("layers.1.self_attn" not in name), name


@pytest.mark.slow
def test_lora_changes_weights_by_a_low_rank_and_trains_gates(teacher, settings, tmp_path):
    pytest.importorskip("peft", reason="needs peft")
    config = settings(match_tokens=0, lora=2, save_every=3)
    assert convert(teacher, config, tmp_path / "out", device="cpu")
    losses = losses_of(tmp_path / "out", "distill")
    assert losses[-1] < losses[0]
    before, after = weights_of(teacher), weights_of(tmp_path / "out" / "model")
    for name, weight in before.items():
        change = (after[name] - weight).double()
        if "proj" in name:
            # Merging rounds to float32, and adds a little of every rank.
            assert torch.linalg.matrix_rank(change, rtol=1e-3) == 2, name
        else:
            assert not change.any(), name
    gates = [weight for name, weight in after.items() if name.endswith("gamma_proj.weight")]
    assert len(gates) == 2
    assert all(gate.any() for gate in gates)


@pytest.mark.slow
def test_a_teacher_with_learned_positions(settings, tmp_path, capsys):
    """GPT-2, which has no rotary embedding: contexts beyond its positions are not evaluated, and that is said."""
    make_gpt2().save_pretrained(tmp_path / "gpt2")
    assert convert(tmp_path / "gpt2", settings(), tmp_path / "out", device="cpu")
    assert learns(tmp_path / "out", "match", "distill")
    assert set(read(tmp_path / "out", "distill").by_context) == {16, 64}
    note = "not evaluated at 256 tokens: the teacher has embeddings of 64 positions"
    assert note in capsys.readouterr().err


@pytest.mark.slow
def test_activation_checkpointing_runs_layers_again_and_changes_nothing(teacher, settings, tmp_path, monkeypatch):
    from sympow.hf.swap.swapped_attention import SwappedAttention

    forward = SwappedAttention.forward
    calls = []

    def counting(self, *args, **kwargs):
        # ModelLosses has no gradients.
        if torch.is_grad_enabled():
            calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(SwappedAttention, "forward", counting)
    counts = {}
    for name, recompute in (("plain", False), ("recomputed", True)):
        calls.clear()
        assert convert(teacher, settings(match_tokens=0, recompute=recompute), tmp_path / name, device="cpu")
        counts[name] = len(calls)
    # 2 layers in 8 steps of 2 micro-batches, and once more in each backward pass.
    assert counts == {"plain": 32, "recomputed": 64}
    assert same_weights(tmp_path / "plain" / "model", tmp_path / "recomputed" / "model")


@pytest.mark.slow
def test_evaluations_are_of_held_out_text(whole, teacher, texts):
    """Each file has the losses of its own model on the held-out documents, which training does not read."""
    from transformers import AutoModelForCausalLM

    out, config = whole
    sequences, _ = held_out_sequences(open_dataset(texts, "heldout"), config.text, config.execution.micro_batch_tokens)
    read_in_training, _ = held_out_sequences(open_dataset(texts), config.text, config.execution.micro_batch_tokens)
    for name, folder in (("teacher", teacher), ("distill", out / "stages" / "distill" / "model")):
        model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert read(out, name).by_context == measure_losses(model, sequences, None)
        assert read(out, name).by_context != measure_losses(model, read_in_training, None)


def test_the_optimizer_is_the_one_asked_for(teacher, settings, tmp_path, monkeypatch):
    """Learning rates by step, Adam's decay, weight decay of matrices alone, and the clipped gradient."""
    chosen = {"warmup": 0.25, "final_rate": 0.2, "beta2": 0.9, "weight_decay": 0.125, "clip_norm": 1e-3}
    step = Training.step
    clipped, groups = [], []

    def watched(self, batch):
        def look(optimizer, args, kwargs):
            gradients = [p.grad.double() for group in optimizer.param_groups for p in group["params"]]
            clipped.append(float(torch.nn.utils.get_total_norm(gradients)))

        groups[:] = self.optimizer.param_groups
        handle = self.optimizer.register_step_pre_hook(look)
        try:
            return step(self, batch)
        finally:
            handle.remove()

    monkeypatch.setattr(Training, "step", watched)
    config = settings(match_tokens=0, distill_rate=1e-2, **chosen)
    assert convert(teacher, config, tmp_path / "out", device="cpu")
    lines = [json.loads(line) for line in (tmp_path / "out/stages/distill/metrics.jsonl").read_text().splitlines()]
    # 2 steps up to the peak, and 6 from it down a cosine, to the final rate.
    rising = [1e-2 / 3, 2e-2 / 3]
    falling = [1e-2 * (0.2 + 0.8 * (1 + math.cos(math.pi * n / 5)) / 2) for n in range(6)]
    assert [line["learning_rate"] for line in lines] == pytest.approx(rising + falling, rel=1e-12)
    assert {group["betas"][1] for group in groups} == {0.9}
    decayed = [(group["weight_decay"], {p.ndim for p in group["params"]}) for group in groups]
    assert decayed[0] == (0.125, {2})
    assert {decay for decay, _ in decayed[1:]} == {0.0}
    assert all(line["gradient_norm"] > 1e-2 for line in lines)
    assert all(0.9e-3 < norm <= 1e-3 for norm in clipped)
    assert len(clipped) == 8


@pytest.mark.slow
def test_a_teacher_in_bfloat16_gives_a_student_in_bfloat16_trained_in_float32(settings, tmp_path, monkeypatch):
    """In both stages that run the teacher: its hidden states are in bfloat16, the student's parameters in float32."""
    from transformers import AutoModelForCausalLM

    make_llama().bfloat16().save_pretrained(tmp_path / "teacher")
    # Restored after the test: where oneDNN cannot compute a product in bfloat16, PyTorch stops using it for the rest of
    # the process, and float32 would round otherwise in later tests.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", torch.backends.mkldnn.enabled)
    assert convert(tmp_path / "teacher", settings(rotary="learned"), tmp_path / "out", device="cpu")
    assert learns(tmp_path / "out", "match")
    result, stage = weights_of(tmp_path / "out" / "model"), weights_of(tmp_path / "out" / "stages/distill/model")
    assert result.keys() == stage.keys()
    # Gates and rotations stay exact; the first has a weight and a bias in each layer, the second here θ.
    exact = {name for name in result if ".gate." in name or ".rotation." in name}
    assert len(exact) == 6
    for name, weight in result.items():
        assert stage[name].dtype == torch.float32
        assert weight.dtype == (torch.float32 if name in exact else torch.bfloat16), name
        assert torch.equal(weight, stage[name].to(weight.dtype)), name
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(stage[name], stage[name].bfloat16().float())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(parameter, result[name]) for name, parameter in loaded.named_parameters() if name in exact)


@pytest.mark.gpu
def test_on_a_gpu_compiled_in_bf16(teacher, settings, tmp_path):
    config = settings(layers="1", compile=True, extend_tokens=8 * 128, extend_context=32, save_every=3)
    assert convert(teacher, config, tmp_path / "out", device="cuda")
    assert learns(tmp_path / "out", "match", "distill", "extend")
