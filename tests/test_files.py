"""Files are written whole or not at all, and an error names the file."""

import errno
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sympow import GPT, GPTConfig
from sympow.cli.app import app
from sympow.data.tokenizer import ByteTokenizer
from sympow.files import replacing, write_atomically
from sympow.model.storage import save_model

FULL = Path("/dev/full")
needs_full_device = pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")


def no_space(*arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("call", ["os.fsync", "pathlib.Path.replace"])
def test_a_write_that_fails_names_the_file_and_leaves_the_earlier_one(tmp_path, monkeypatch, call):
    path = tmp_path / "found.json"
    write_atomically(path, b"earlier")
    monkeypatch.setattr(call, no_space)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_atomically(path, b"later")
    assert caught.value.filename == str(path)
    assert caught.value.errno == errno.ENOSPC
    monkeypatch.undo()
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_gone_is_told_with_the_name_of_the_file_and_not_of_a_temporary_one(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "gone" / "found.json"):
        pass
    assert caught.value.filename == str(tmp_path / "gone" / "found.json")


def test_an_error_about_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "found.json") as file:
        file.write((tmp_path / "other.json").read_bytes())
    assert caught.value.filename == str(tmp_path / "other.json")
    with pytest.raises(OSError, match=r"^in words alone$"), replacing(tmp_path / "found.json"):
        raise OSError("in words alone")
    assert not list(tmp_path.iterdir())


@needs_full_device
def test_a_command_names_the_file_that_did_not_fit_on_the_disk(tmp_path):
    config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2)
    save_model(tmp_path / "model", config, GPT(config).state_dict())
    ByteTokenizer().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("text")
    words = ["state", str(tmp_path / "model"), str(tmp_path / "text.txt"), "--device", "cpu", "--out", str(FULL)]
    result = CliRunner().invoke(app, words, prog_name="sympow")
    assert result.exit_code == 1, result.output
    assert result.stderr == f"sympow state: error: {FULL}: No space left on device\n"


@needs_full_device
def test_a_figure_that_did_not_fit_on_the_disk_is_named(tmp_path):
    figure = pytest.importorskip("matplotlib.figure", reason="needs matplotlib, which comes with the extra report")
    from sympow.report.plotting import save_figure

    (tmp_path / "figure.png").symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_figure(figure.Figure(), tmp_path / "figure.png")
    assert caught.value.filename == str(tmp_path / "figure.png")


def test_a_model_that_did_not_fit_is_named(tmp_path, monkeypatch):
    config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2)
    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(OSError, match="No space left on device") as caught:
        save_model(tmp_path, config, GPT(config).state_dict())
    assert caught.value.filename == str(tmp_path / "model.safetensors")
