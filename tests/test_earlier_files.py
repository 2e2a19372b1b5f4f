"""Files that version 0.1 wrote load with the present code and give the numbers that they gave then."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import sympow
from support import assert_close
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.generation.text import TextModel
from sympow.train import train
from sympow.train.checkpoint import read_seal
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics

FOLDER = Path(__file__).parent / "fixtures" / "version_0_1"
FACTS = json.loads((FOLDER / "expected.json").read_text("utf-8"))
# As in the script that wrote them, fixtures/version_0_1/write.py.
PROMPT = torch.tensor([list(b"A state of fixed size")])
NEXT = torch.tensor([list(b" holds it")])
GREEDY = Sampling(temperature=0)
# Tolerances: float64 across machines; float32 of two layers; float32 after a few training steps.
EXACT, ROUNDED, TRAINED = 1e-9, 1e-5, 2e-5
READINGS = sorted(path.stem for path in (FOLDER / "readings").iterdir())


@pytest.fixture(scope="module")
def numbers():
    return load_file(FOLDER / "expected.safetensors")


def greedy(model, tokens, **start):
    return [int(token) for token in generate(model, tokens, GREEDY, **start)]


@pytest.mark.parametrize("name", ["sympow", "softmax"])
def test_a_model_folder_gives_the_same_logits(name, numbers):
    text_model = TextModel.load(FOLDER / name, dtype=torch.float64)
    with torch.no_grad():
        logits, _ = text_model.model(PROMPT)
    assert_close(logits[0], numbers[f"{name}.logits"], EXACT, "logits")
    assert text_model.tokenizer.decode(PROMPT[0].tolist()) == "A state of fixed size"


@pytest.mark.parametrize("name", READINGS)
def test_a_prefilled_text_continues_as_before(name, numbers):
    facts = FACTS[name]
    model = TextModel.load(FOLDER / name.partition("-")[0]).model
    prefix = Prefix.load(FOLDER / "readings" / f"{name}.reading", model)
    assert sorted({type(layer).__name__ for layer in prefix.state}) == facts["kinds"]
    assert (prefix.tokens, prefix.batch, prefix.nbytes) == (facts["tokens"], facts["batch"], facts["nbytes"])
    assert torch.equal(prefix.logits, numbers[f"{name}.logits"])
    longer = prefix.extend(model, NEXT.expand(prefix.batch, -1))
    assert_close(longer.logits, numbers[f"{name}.continued"], ROUNDED, "logits")
    whole = Prefix.prefill(model, torch.cat([PROMPT, NEXT], dim=1))
    # The last text of the batch is the one that was prefilled here.
    last = longer.select(slice(-1, None))
    assert_close(last.logits, whole.logits, ROUNDED, "logits")
    assert greedy(model, 5, prefix=last) == greedy(model, 5, prefix=whole)


def test_a_prefilled_text_is_written_as_before(tmp_path):
    """So that version 0.1 can load files of the present version."""
    model = TextModel.load(FOLDER / "sympow").model
    for name in ("sympow-state", "sympow-keys"):
        path = FOLDER / "readings" / f"{name}.reading"
        Prefix.load(path, model).save(tmp_path / name, model)
        assert (tmp_path / name).read_bytes() == path.read_bytes()


def test_a_state_continues_as_before(numbers, tmp_path):
    state = sympow.State.load(FOLDER / "state.pt")
    q, k, v, log_gamma, theta, y = (numbers[f"state.{name}"] for name in ("q", "k", "v", "log_gamma", "theta", "y"))
    assert (state.power, state.key_dim) == (4, 4)
    assert_close(sympow.attention(q, k, v, 4, log_gamma, theta=theta, initial_state=state), y, EXACT, "y")
    state.save(tmp_path / "state.pt")
    assert (tmp_path / "state.pt").read_bytes() == (FOLDER / "state.pt").read_bytes()


def test_a_folder_of_transformers_gives_the_same_logits(numbers):
    transformers = pytest.importorskip("transformers")
    # As in programs that use only the Auto classes, which know "sympow" once it is imported.
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "transformers").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER / "transformers")
    tokens = tokenizer("A state of fixed size", return_tensors="pt")
    assert torch.equal(tokens["input_ids"], PROMPT)
    generated = model.generate(**tokens, max_new_tokens=5, do_sample=False)
    native = TextModel.load(FOLDER / "sympow").model
    assert generated[0, PROMPT.shape[1] :].tolist() == greedy(native, 5, prompt=PROMPT)
    with torch.no_grad():
        logits = model.double()(PROMPT).logits
    assert_close(logits[0], numbers["sympow.logits"], EXACT, "logits")


def test_a_training_run_resumes_with_the_same_losses(tmp_path):
    run = tmp_path / "run"
    shutil.copytree(FOLDER / "run", run)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert read_seal(checkpoint)
    train(TrainConfig.read(run / "config.yaml"), run, resume=True, device="cpu")
    losses = [line["loss"] for line in read_metrics(run / "metrics.jsonl")]
    assert_close(losses, FACTS["run"]["losses"], TRAINED, "losses")
    assert (run / "model" / "model.safetensors").is_file()
