"""What cannot be converted is refused with a message that says what is wrong."""

import json
import re
import shutil
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
import torch
from convert.tiny import make_gpt2, make_llama
from safetensors.torch import load_file, save_file

from sympow.convert import ConvertConfig, convert
from sympow.convert.models import find_teacher
from sympow.data.preparation import prepare
from sympow.data.tokenizer import train_bpe


def refused(teacher, config, out, message, kind=ValueError):
    with pytest.raises(kind, match=re.escape(message)):
        convert(teacher, config, out, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "odd"}, "layers must be 'all', 'every-other', or numbers from 0 as in '0,2,5'; got 'odd'"),
        (
            {"gating": "soft"},
            "gating must be one of 'none', 'fixed', 'learned', 'scalar', 'vector', 'clamped', 'half'; got 'soft'",
        ),
        (
            {"rotary": "soft"},
            "rotary must be one of 'auto', 'none', 'fixed', 'learned', 'scale', 'pairs'; got 'soft'",
        ),
        ({"rotary": "signed"}, "'signed' keeps every other rate, in half of the pairs, and stops the rest"),
        ({"rotary": "grid"}, "'grid' keeps every other rate, in half of the pairs, and stops the rest"),
        ({"initial_gate": 1.0}, "initial_gate must lie between 0 and 1, got 1.0"),
        ({"gating": "fixed", "initial_gate": 0.9}, "initial_gate is for gates that are learned; got 0.9 with gating"),
        ({"batch_tokens": 100}, "batch_tokens must be a multiple of the context, 2,048; got 100"),
        ({"match_tokens": -1}, "match_tokens must be at least 0, got -1"),
        ({"distill_rate": -1.0}, "distill_rate must be at least 0, got -1.0"),
        ({"layers": "0,2,0"}, "layers must name each layer once, got '0,2,0'"),
        ({"beta2": 1.5}, "beta2 must be at least 0 and below 1, got 1.5"),
        ({"warmup": 1.5}, "warmup must be a share of the steps, below 1; got 1.5"),
        ({"without_match": True, "match_tokens": 0}, "match_tokens must be above 0; got 0"),
        ({"short": "pack"}, "short must be one of 'refuse', 'drop', 'join'; got 'pack'"),
        (
            {"evaluate_factors": "1,-4"},
            "evaluate_factors must be 1 and whole numbers above it, as in '1,4,16'; got '1,-4'",
        ),
        (
            {"evaluate_factors": "4,16"},
            "evaluate_factors must be 1 and whole numbers above it, as in '1,4,16'; got '4,16'",
        ),
        ({"evaluate_factors": ""}, "evaluate_factors must be 1 and whole numbers above it, as in '1,4,16'; got ''"),
        ({"precision": "fp16"}, "precision must be one of 'auto', 'bf16', 'fp32'; got 'fp16'"),
        (
            {"extend_tokens": 1, "extend_context": 3_000},
            "batch_tokens must be a multiple of the extend_context, 3,000; got 65,536",
        ),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        ConvertConfig().changed(**changes)


@pytest.mark.parametrize("changes", [{"layers": [0]}, {"evaluate_factors": (1, 4)}, {"data": 3}])
def test_settings_of_another_type(changes):
    ((name, value),) = changes.items()
    with pytest.raises(TypeError, match=f"{name} must be a string, got {type(value).__name__}"):
        ConvertConfig().changed(**changes)


def test_an_unknown_setting():
    with pytest.raises(TypeError, match="step is a field of no section of a ConvertConfig"):
        ConvertConfig().changed(step=1)


def test_a_folder_without_a_model(settings, tmp_path):
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", settings(), tmp_path / "out", f"{tmp_path}/empty has no config.json")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on this machine that has no models; the paths that it was asked for."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield asked
        server.shutdown()


@pytest.mark.parametrize(
    "name",
    [
        "./missing",
        "../missing",
        "~/missing",
        "a/b/missing",
        "missing/",
        "/a/missing",
        "a b",
        "missing.git",
        "no--where",
    ],
)
def test_a_folder_that_is_not_there(settings, tmp_path, monkeypatch, hub, name):
    """What can only be a path is not looked for on the Hub."""
    monkeypatch.chdir(tmp_path)
    message = f"teacher must be a folder or the name of a model of transformers, got '{name}': there is no such folder"
    refused(name, settings(), tmp_path / "out", message)
    assert hub == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["missing", "someone/missing"])
def test_a_name_that_is_nowhere(settings, tmp_path, monkeypatch, hub, capsys, name):
    monkeypatch.chdir(tmp_path)
    message = f"got '{name}': there is no such folder, and the Hugging Face Hub has no such model that you can read"
    refused(name, settings(), tmp_path / "out", message)
    assert [path for path in hub if "missing" in path] == [f"/api/models/{name}"]
    assert capsys.readouterr().err == f"looking for {name} on the Hugging Face Hub\n"
    assert not (tmp_path / "out").exists()


def test_a_name_without_a_network(settings, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    message = "got 'missing': there is no such folder, and the Hugging Face Hub cannot be asked: "
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        # Nobody listens there.
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{free.getsockname()[1]}")
        refused("missing", settings(), tmp_path / "out", message)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused("missing", settings(), tmp_path / "out", message)


def test_a_name_in_the_cache_is_not_looked_for(tmp_path, monkeypatch, hub):
    repository = tmp_path / "cache" / "models--someone--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    said = []
    find_teacher("someone/model", said.append)
    assert hub == said == []


@pytest.mark.parametrize("content", ["{}", "[]", '{"hidden_size": 32}'])
def test_a_config_that_does_not_say_what_model_it_is_of(teacher, settings, tmp_path, content):
    shutil.copytree(teacher, tmp_path / "teacher")
    (tmp_path / "teacher" / "config.json").write_text(content)
    message = f"{tmp_path}/teacher/config.json must have a model_type, which says what model it is of, and has none"
    refused(tmp_path / "teacher", settings(), tmp_path / "out", message)


def test_a_model_that_is_converted_already(settings, tmp_path):
    from sympow.hf import swap_attention

    swap_attention(make_llama()).save_pretrained(tmp_path / "swapped")
    refused(tmp_path / "swapped", settings(), tmp_path / "out", "teacher must have softmax attention, and layers")


def test_logits_that_are_more_than_a_product(settings, tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    shape = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    torch.manual_seed(0)
    config = GraniteConfig(**shape, num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0)
    GraniteForCausalLM(config).save_pretrained(tmp_path / "scaled")
    refused(tmp_path / "scaled", settings(), tmp_path / "out", "GraniteForCausalLM of")


@pytest.mark.parametrize(
    ("changes", "name", "length"),
    [({"context": 128}, "context", 128), ({"extend_tokens": 1, "extend_context": 128}, "extend_context", 128)],
)
def test_a_context_beyond_learned_positions(settings, tmp_path, changes, name, length):
    make_gpt2().save_pretrained(tmp_path / "gpt2")
    message = f"{name} must be at most 64, the positions that the teacher has embeddings of; got {length}"
    refused(tmp_path / "gpt2", settings(**changes), tmp_path / "out", message)
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_larger_than_the_teachers(settings, tmp_path):
    make_llama(vocab_size=200, bos_token_id=0, eos_token_id=0, pad_token_id=0).save_pretrained(tmp_path / "few")
    message = "data must have the teacher's token ids, below 200; "
    refused(tmp_path / "few", settings(), tmp_path / "out", message)


@pytest.fixture
def source(tmp_path):
    """A folder of texts."""
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} and then " * 60)
    return tmp_path / "texts"


def test_data_of_another_tokenizer(teacher, settings, source, tmp_path):
    """The ids are all below the teacher's vocabulary size, and mean something else."""
    # Bytes and the boundary in the order of this encoding: the same number of ids as the tokenizer of bytes.
    train_bpe(["and then"], 257).save(tmp_path / "bpe")
    prepare([source], tmp_path / "data", heldout=0.3, tokenizer=str(tmp_path / "bpe" / "tokenizer.json"), workers=1)
    message = "data must be tokenized by the teacher's tokenizer, and"
    refused(teacher, settings(data=str(tmp_path / "data")), tmp_path / "out", message)


def test_data_that_begin_documents_with_another_token(settings, source, tmp_path):
    """As Llama-3 and Mistral, whose tokenizers begin every text with a token that ends none."""
    from tokenizers import Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "teacher"
    train_bpe(["and then"], 257).save(tmp_path / "bpe")
    tokenizer = Tokenizer.from_file(str(tmp_path / "bpe" / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|begin|>"])
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    make_llama(vocab_size=258).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|begin|>").save_pretrained(folder)
    for name, boundary in (("ended", None), ("begun", "<|begin|>")):
        file = str(folder / "tokenizer.json")
        prepare([source], tmp_path / name, heldout=0.3, tokenizer=file, boundary_token=boundary, workers=1)
    short = {"match_tokens": 0, "distill_tokens": 0}
    message = (
        "data must begin documents with the token that the teacher begins texts with, '<|begin|>' (257); "
        f"{tmp_path}/ended (train) begins them with 0. Prepare it with the teacher's tokenizer: "
        f"sympow data prepare … --tokenizer {folder}/tokenizer.json --boundary-token '<|begin|>'"
    )
    refused(folder, settings(**short, data=str(tmp_path / "ended")), tmp_path / "out", message)
    assert convert(folder, settings(**short, data=str(tmp_path / "begun")), tmp_path / "out", device="cpu")


def test_a_teacher_without_a_tokenizer_is_said(teacher, settings, tmp_path, capsys):
    shutil.copytree(teacher, tmp_path / "bare")
    for path in (tmp_path / "bare").glob("*token*"):
        path.unlink()
    assert convert(tmp_path / "bare", settings(match_tokens=0, distill_tokens=0), tmp_path / "out", device="cpu")
    assert f"{tmp_path}/bare has no tokenizer: whether" in capsys.readouterr().err
    assert not list((tmp_path / "out" / "model").glob("*token*"))


def test_a_folder_with_a_model_of_something_else(teacher, settings, tmp_path):
    """The result would replace it, and here it is the teacher itself."""
    shutil.copytree(teacher, tmp_path / "run" / "model")
    message = (
        f"out must be a new folder or that of a conversion, got {tmp_path}/run: the result would replace its model"
    )
    refused(tmp_path / "run" / "model", settings(), tmp_path / "run", message)
    assert sorted(path.name for path in (tmp_path / "run" / "model").iterdir()) == sorted(
        path.name for path in teacher.iterdir()
    )


@pytest.mark.parametrize("shape", [None, (3, 3)])
def test_a_teacher_without_one_of_its_tensors(teacher, settings, tmp_path, shape):
    shutil.copytree(teacher, tmp_path / "teacher")
    weights = tmp_path / "teacher" / "model.safetensors"
    tensors = load_file(weights)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors.pop(name)
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, weights, {"format": "pt"})
    message = f"{tmp_path}/teacher lacks {name} in the shapes that its config.json requires"
    refused(tmp_path / "teacher", settings(), tmp_path / "out", message)


def test_a_folder_with_another_conversion(teacher, settings, tmp_path):
    short = {"match_tokens": 0, "distill_tokens": 128}
    assert convert(teacher, settings(**short), tmp_path / "out", device="cpu")
    message = f"power must be that of the conversion in {tmp_path}/out, 2; got 4"
    refused(teacher, settings(**short, power=4), tmp_path / "out", message)
    # What does not change the result may differ.
    free = {"log_every": 5, "recompute": True, "micro_batch_tokens": 16}
    assert convert(teacher, settings(**short, **free), tmp_path / "out", device="cpu")
    path = tmp_path / "out" / "conversion.json"
    saved = json.loads(path.read_text("utf-8"))
    del saved["beta2"]
    path.write_text(json.dumps(saved), "utf-8")
    message = f"{path} must hold the settings of a conversion, and lacks beta2"
    refused(teacher, settings(**short), tmp_path / "out", message)


def test_a_teacher_that_was_replaced(teacher, settings, tmp_path):
    """The same path with other weights is another teacher; another path with the same weights is not."""
    config = settings(match_tokens=0, distill_tokens=0)
    shutil.copytree(teacher, tmp_path / "teacher")
    assert convert(tmp_path / "teacher", config, tmp_path / "out", device="cpu")
    assert convert(f"{tmp_path}/teacher/", config, tmp_path / "out", device="cpu")
    assert convert(teacher, config, tmp_path / "out", device="cpu")
    make_llama(seed=1).save_pretrained(tmp_path / "teacher")
    message = f"teacher_fingerprint must be that of the conversion in {tmp_path}/out, "
    refused(tmp_path / "teacher", config, tmp_path / "out", message)
    # The same weights, which rotate otherwise.
    make_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}).save_pretrained(tmp_path / "teacher")
    refused(tmp_path / "teacher", config, tmp_path / "out", message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "0,7"}, "layers must be among 0 to 1, got 7"),
        (
            {"context": 2_048, "batch_tokens": 65_536},
            "context must be short enough for batches of ",
        ),
        (
            {"extend_tokens": 1, "extend_context": 8_192, "batch_tokens": 8_192, "short": "drop"},
            "extend_context must be short enough for batches of ",
        ),
        ({"context": 1_200, "batch_tokens": 1_200}, "(heldout) gives 0 rows of context=1,200"),
    ],
)
def test_a_refusal_leaves_the_folder_free(teacher, settings, texts, tmp_path, changes, message):
    """Nothing is recorded, so that the corrected command runs in the same folder."""
    out = tmp_path / "out"
    refused(teacher, settings(**changes), out, message)
    assert not out.exists()


def test_lora_without_peft(teacher, settings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    message = "peft is not installed; it comes with: pip install 'conformal-sympow[lora]'"
    refused(teacher, settings(lora=2), tmp_path / "out", message, ModuleNotFoundError)
    assert not (tmp_path / "out").exists()


def test_several_processes(teacher, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    refused(teacher, settings(), tmp_path / "out", "convert runs in one process, on one device; it was started by")


def test_a_loss_that_is_not_finite(teacher, settings, tmp_path, monkeypatch):
    from sympow.convert.objectives import Distillation
    from sympow.train.loop import NonFiniteLossError

    backward = Distillation.backward
    calls = []

    def spoiled(self, batch, weight):
        calls.append(batch)
        return backward(self, batch, weight) * (torch.nan if len(calls) == 5 else 1)

    monkeypatch.setattr(Distillation, "backward", spoiled)
    message = "step 3 of stage distill: the loss is nan"
    refused(teacher, settings(match_tokens=0), tmp_path / "out", message, NonFiniteLossError)


def test_a_result_that_does_not_fit_on_the_disk(teacher, settings, tmp_path, monkeypatch):
    resource = pytest.importorskip("resource", reason="this system does not limit the size of files")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(student, dtype):
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        return student

    monkeypatch.setattr("sympow.convert.conversion.cast_weights", limited)
    config = settings(match_tokens=0, distill_tokens=0)
    try:
        refused(teacher, config, tmp_path / "out", f"{tmp_path}/out/model could not be written: ", OSError)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not (tmp_path / "out" / "model").exists()
