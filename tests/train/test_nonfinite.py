"""A loss that is not finite: the error message, and the checkpoints."""

import math
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sympow.data import Loader, open_dataset
from sympow.train import checkpoint as checkpoint_module
from sympow.train import loop, train
from sympow.train.loop import NonFiniteLossError
from sympow.train.optimizer import take_step


@pytest.fixture
def spoil(before_steps):
    """Modifies the model before a given step, counted from 1."""

    def before(step, how):
        def act(training):
            if training.step_number + 1 == step:
                with torch.no_grad():
                    how(training.objective.model)

        before_steps(act)

    return before


def put(value, *names):
    def how(model):
        for name in names:
            model.get_parameter(name).view(-1)[0] = value

    return how


def saved_tensors(out, step, tmp_path):
    dcp_to_torch_save(out / "checkpoints" / f"step-{step:09d}", tmp_path / "saved.pt")
    content = torch.load(tmp_path / "saved.pt", weights_only=True)
    return content["model"] | {
        f"{name} {key}": x for name, state in content["optimizer"]["state"].items() for key, x in state.items()
    }


def test_a_loss_that_is_not_a_number_is_reported_with_all_that_is_known(tiny, texts, tmp_path, spoil):
    name = "blocks.0.mlp.up_proj.weight"
    spoil(4, put(math.inf, name))
    with pytest.raises(NonFiniteLossError) as caught:
        train(tiny(layers=2), tmp_path / "run", device="cpu")
    message = str(caught.value)
    assert message.startswith("step 4: the loss is nan and the gradient's norm nan. Not finite: ")
    assert f"parameter {name}, output of blocks.0.mlp" in message
    dataset = open_dataset(texts)
    batches = iter(Loader(dataset, 32, 6, short="join"))
    documents = sorted(set([next(batches) for _ in range(4)][-1].document_ids.tolist()))
    batches.close()
    assert f"Documents of this batch: {', '.join(map(str, documents))} (" in message
    assert dataset.document_name(documents[0]) in message
    assert str(tmp_path / "run" / "checkpoints") in message


def test_the_last_good_checkpoint_is_kept_finite(tiny, losses, tmp_path, spoil, monkeypatch):
    spoil(4, put(math.nan, "blocks.0.mlp.out_proj.bias"))
    with pytest.raises(NonFiniteLossError):
        train(tiny(save_every=1, keep=1), tmp_path / "run", device="cpu")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000003"]
    saved = saved_tensors(tmp_path / "run", 3, tmp_path)
    assert len(saved) > 20
    assert all(tensor.isfinite().all() for tensor in saved.values())
    # Without the cause, the run continues.
    monkeypatch.undo()
    train(tiny(), tmp_path / "run", resume=True, device="cpu")
    assert all(map(math.isfinite, losses(tmp_path / "run")))


def test_a_checkpoint_that_was_begun_is_finished_although_the_run_stops(tiny, tmp_path, spoil, monkeypatch):
    save = checkpoint_module.async_save
    pool = ThreadPoolExecutor(1)

    def slow(*arguments, **options):
        def wait_for(future):
            time.sleep(0.3)
            return future.result()

        return pool.submit(wait_for, save(*arguments, **options))

    monkeypatch.setattr(checkpoint_module, "async_save", slow)
    spoil(4, put(math.inf, "embedding.weight"))
    with pool, pytest.raises(NonFiniteLossError):
        train(tiny(save_every=3), tmp_path / "run", device="cpu")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000003"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_gradient_that_is_not_finite_names_only_itself(tiny, tmp_path, spoil, device):
    """The loss is finite, but clipping by a norm that is not finite would spread it to all parameters."""

    def infinite_gradient(model):
        model.final_norm.bias.register_hook(lambda gradient: gradient * math.inf)

    spoil(2, infinite_gradient)
    with pytest.raises(NonFiniteLossError) as caught:
        train(tiny(clip_norm=1.0), tmp_path / "run", device=device)
    message = str(caught.value)
    assert message.startswith("step 2: the loss is 5.")
    assert "Not finite: gradient of final_norm.bias. Documents" in message


def test_no_checkpoint_is_made_of_parameters_that_are_not_finite(tiny, tmp_path, monkeypatch):
    """The last update can do this although the loss and gradients are finite."""
    original = loop.Training.step

    def overflowing(self, batch):
        numbers = original(self, batch)
        if self.step_number + 1 == 4:
            with torch.no_grad():
                self.objective.model.final_norm.weight[0] = math.inf
        return numbers

    monkeypatch.setattr(loop.Training, "step", overflowing)
    with pytest.raises(NonFiniteLossError, match=r"step 4 left parameter final_norm\.weight with values that are not"):
        train(tiny(), tmp_path / "run", device="cpu")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000002"]


def test_the_command_stops_with_a_message_and_exit_code_1(start, tmp_path):
    training = start(tmp_path / "run", learning_rate=1e30)
    assert training.wait() == [1]
    printed = training.log.read_text()
    assert "stopped: step 2: the loss is " in printed
    assert "Documents of this batch" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize("clip_norm", [0.0, 0.5])
def test_a_step_is_not_taken_where_the_device_says_so(clip_norm):
    torch.manual_seed(0)
    stays, moves, plain = (torch.nn.Parameter(torch.ones(5)) for _ in range(3))
    gradients = torch.randn(2, 5)
    snapshots = []
    for parameter, unless in ((stays, True), (moves, False), (plain, None)):
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        for number, gradient in enumerate(gradients):
            parameter.grad = gradient.clone()
            refuse = None if unless is None else torch.tensor(unless and number == 1)
            norm = gradient.norm() * (math.nan if unless and number == 1 else 1.0)
            take_step(optimizer, [parameter], norm, clip_norm, unless=refuse)
            state = {name: x.clone() for name, x in optimizer.state[parameter].items()}
            snapshots.append({"value": parameter.detach().clone(), "gradient": parameter.grad.clone(), **state})
    first, refused, _, second_moved = snapshots[:4]
    assert torch.equal(refused["gradient"], gradients[1])
    for name in ("value", "step", "exp_avg", "exp_avg_sq"):
        assert torch.equal(refused[name], first[name]), name
        assert not torch.equal(second_moved[name], first[name]), name
    for with_flag, without in zip(snapshots[2:4], snapshots[4:], strict=True):
        for name in with_flag:
            assert torch.equal(with_flag[name], without[name]), name
