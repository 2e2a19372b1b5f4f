"""Folders of transformers that bring code of their own: it never runs, and nobody is asked whether it should."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
from server_process import save_tiny_model

pytest.importorskip("transformers", reason="needs transformers")

from convert.tiny import make_llama

import sympow
from sympow.convert.models import check_tokens, load_causal_model
from sympow.data.open import open_dataset
from sympow.data.preparation import prepare
from sympow.data.tokenizer import ByteTokenizer
from sympow.generation.load import load_tokenizer
from sympow.generation.text import TextModel
from sympow.hf import convert_to_native, convert_to_transformers, to_fast_tokenizer

CODE = """from pathlib import Path
Path({ran!r}).touch()
from transformers import LlamaConfig as Own
from transformers import LlamaForCausalLM as OwnModel
from transformers import PreTrainedTokenizerFast as OwnTokenizer
"""


@pytest.fixture
def asked(monkeypatch):
    """The questions that were asked on the terminal, each of which is answered with yes."""
    questions = []
    monkeypatch.setattr("builtins.input", lambda question="": questions.append(question) or "y")
    return questions


def bring_code(folder, ran):
    """Lets the config and the tokenizer of a folder name classes in a file of the folder."""
    (folder / "own.py").write_text(CODE.format(ran=str(ran)))
    for name, classes in (
        ("config.json", {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.OwnModel"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "own.OwnTokenizer"]}),
    ):
        content = json.loads((folder / name).read_text()) | {"auto_map": classes}
        if name == "tokenizer_config.json":
            content["tokenizer_class"] = "OwnTokenizer"
        (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model of this package and a Llama, as folders of transformers with the tokenizer of bytes."""
    root = tmp_path_factory.mktemp("saved")
    save_tiny_model(root / "native")
    convert_to_transformers(root / "native", root / "ours")
    make_llama().save_pretrained(root / "llama")
    to_fast_tokenizer(ByteTokenizer()).save_pretrained(root / "llama")
    return root


@pytest.mark.parametrize(
    "load",
    [
        TextModel.load,
        load_tokenizer,
        lambda folder: convert_to_native(folder, folder.parent / "converted"),
    ],
    ids=["serve", "evaluate", "to-native"],
)
def test_a_tokenizer_with_code_is_refused(load, saved, asked, tmp_path):
    folder = shutil.copytree(saved / "ours", tmp_path / "model")
    bring_code(folder, tmp_path / "ran")
    with pytest.raises(ValueError, match=re.escape(f"{folder} has code of its own (auto_map)")) as raised:
        load(folder)
    assert "\n" not in str(raised.value)
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_teacher_with_code_is_refused(saved, asked, tmp_path):
    folder = shutil.copytree(saved / "llama", tmp_path / "teacher")
    bring_code(folder, tmp_path / "ran")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    with pytest.raises(ValueError, match=re.escape(f"{folder} has code of its own (auto_map)")):
        load_causal_model(folder, "cpu")
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_a_teachers_tokenizer_with_code_is_refused(saved, asked, tmp_path):
    model = load_causal_model(saved / "llama", "cpu")
    folder = shutil.copytree(saved / "llama", tmp_path / "teacher")
    bring_code(folder, tmp_path / "ran")
    (tmp_path / "text.txt").write_text("a text of some length")
    prepare([tmp_path / "text.txt"], tmp_path / "data", tokenizer="bytes", workers=1)
    with pytest.raises(ValueError, match=re.escape(f"{folder} has code of its own (auto_map)")):
        check_tokens(model, folder, open_dataset(tmp_path / "data"))
    assert not asked
    assert not (tmp_path / "ran").exists()


def test_nothing_else_calls_from_pretrained():
    package = Path(sympow.__file__).parent
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    }
    assert found == {"hf/transformers_module.py"}
