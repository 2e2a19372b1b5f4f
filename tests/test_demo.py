"""The script of `make demo`: its folder, and a training that fails. `test_fresh_clone` runs all of it."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "examples" / "demo.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("demo_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    # `dataclass` looks up the module in sys.modules.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_without_a_folder_it_writes_to_build(script, monkeypatch):
    class FolderMadeError(Exception):
        pass

    def make_folder(out):
        raise FolderMadeError(out)

    monkeypatch.setattr(script, "make_folder", make_folder)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--tiny"])
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
def test_a_training_that_fails_ends_the_demo_with_its_message(script, tmp_path):
    endless = {"steps": 10**9, "data": "stdlib"}
    wrong = {"steps": 1, "power": 3}
    with pytest.raises(SystemExit, match=r"the training of conformal failed with code 2:\n(.|\n)*power must be even"):
        script.train_all({"softmax": endless, "conformal": wrong}, tmp_path / "runs")
