"""The script of `make demo`: its folder, its texts, and a training that fails. `test_fresh_clone` runs all of it."""

import importlib
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    # The processes that it starts import it by its name.
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples"))
    yield importlib.import_module("demo")
    del sys.modules["demo"]


def test_without_a_folder_it_writes_to_build(script, monkeypatch):
    class FolderMadeError(Exception):
        pass

    def make_folder(out):
        raise FolderMadeError(out)

    monkeypatch.setattr(script, "make_folder", make_folder)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    with pytest.raises(FolderMadeError) as made:
        script.main()
    assert made.value.args == (Path("build/demo"),)


def test_a_folder_of_the_users_is_refused_and_left_as_it_is(script, tmp_path):
    kept = tmp_path / "runs" / "mine" / "config.yaml"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    with pytest.raises(SystemExit, match="--out must be a new folder"):
        script.make_folder(tmp_path)
    assert kept.read_text() == "mine"


def test_the_folder_of_an_earlier_demo_is_replaced(script, tmp_path):
    out = tmp_path / "demo"
    script.make_folder(out)
    (out / "data").mkdir()
    script.make_folder(out)
    assert not (out / "data").exists()


@pytest.mark.slow
def test_documentation_is_split_by_module_and_has_no_code(script, tmp_path):
    script.write_texts(tmp_path)
    train, heldout = ({path.name for path in (tmp_path / split).iterdir()} for split in ("train", "heldout"))
    assert not train & heldout
    assert 3 * len(heldout) < len(train) < 5 * len(heldout)
    assert {"json.txt", "argparse.txt"} <= train | heldout
    assert not any(">>>" in path.read_text("utf-8") for path in tmp_path.rglob("*.txt"))


def test_a_python_below_a_folder_named_test_has_documentation(script, tmp_path):
    library = tmp_path / "test" / "lib"
    (library / "package" / "tests").mkdir(parents=True)
    (library / "package" / "__init__.py").write_text('"""Kept."""')
    (library / "package" / "tests" / "case.py").write_text('"""Left out."""')
    assert list(script.docstrings(library, "package")) == ["Kept."]


@pytest.mark.slow
def test_a_training_that_fails_ends_the_demo_with_its_message(script, tmp_path):
    with pytest.raises(SystemExit, match=r"the training of \w+ failed:\n(.|\n)*source must be .*nothere"):
        script.train_all(tmp_path / "nothere", tmp_path / "runs", seconds=1e6)
