"""The commands `sympow data prepare` and `sympow data info`."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from sympow.cli.app import app

runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, ["data", *map(str, arguments)], terminal_width=200)


def test_prepare_then_info(corpus, tmp_path):
    out = tmp_path / "out"
    result = invoke("prepare", corpus, "--out", out, "--heldout", "0.3", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert "42 documents" in result.output
    assert "1 file of unknown types, such as" in result.output
    assert " in 1 shard\n" in result.output
    result = invoke("info", out, "--verify", "--tokens", "5")
    assert result.exit_code == 0, result.output
    assert "heldout" in result.output
    assert "257 tokens, 256 between documents" in result.output


def test_info_as_json_is_complete(corpus, tmp_path):
    out = tmp_path / "out"
    invoke("prepare", corpus, "--out", out, "--tokenizer", "bpe", "--vocab-size", "280", "--workers", "1")
    described = json.loads(invoke("info", out, "--json", "--tokens", "4").output)
    assert described["vocab_size"] == 280
    # Of so few documents, one is held out by default.
    assert [described["splits"][split]["documents"] for split in ("train", "heldout")] == [41, 1]
    assert described["counts"]["documents"] == 42
    first = described["splits"]["train"]["beginnings"][0]
    assert first["document"].endswith("a.txt")
    assert len(first["tokens"]) == 4
    assert "first document".startswith(first["text"])


def test_info_describes_the_standard_library_by_default():
    result = invoke("info")
    assert result.exit_code == 0, result.output
    assert "stdlib" in result.output
    assert "heldout" in result.output


@pytest.mark.parametrize("command", [("data", "info"), ("train",)])
def test_help_names_every_kind_of_dataset(command):
    text = runner.invoke(app, [*command, "--help"], terminal_width=200).output
    for kind in ("stdlib", "prepare", "LongCrawl64", "mqar:pairs=32,length=256"):
        assert kind in text


def test_info_describes_associative_recall():
    described = json.loads(invoke("info", "mqar:pairs=8,documents=30", "--json").output)
    assert described["splits"]["train"]["documents"] == 30


def test_info_describes_longcrawl64(tmp_path):
    zarr, numcodecs = pytest.importorskip("zarr"), pytest.importorskip("numcodecs")
    options = {"chunks": (2, 2), "zarr_format": 2, "compressors": numcodecs.Blosc(cname="lz4")}
    for name, rows in (("train.zarr", 3), ("heldout.zarr", 2)):
        array = zarr.create_array(
            str(tmp_path / name),
            shape=(rows, 2),
            dtype="uint16",
            fill_value=0,
            attributes={"encoder": "tiktoken-gpt2"},
            **options,
        )
        array[:] = np.array([[15496, 995]] * rows)
    described = json.loads(invoke("info", tmp_path, "--json").output)
    assert {split: content["documents"] for split, content in described["splits"].items()} == {"train": 3, "heldout": 2}
    assert described["splits"]["train"]["beginnings"][2]["text"] == "Hello world"
    assert list(json.loads(invoke("info", tmp_path / "heldout.zarr", "--json").output)["splits"]) == ["heldout"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "nowhere", "--out", "out"), "nowhere is neither a file nor a folder"),
        (("prepare", "a.txt", "--out", "out", "--heldout", "2"), "heldout must be at least 0 and below 1"),
        (("info", "nowhere"), "source must be 'stdlib'"),
        (("info", "stdlib", "--verify"), "verify compares hashes of prepared shards"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_line_is_explained_alike_by_any_number_of_processes(tmp_path, monkeypatch, workers):
    monkeypatch.chdir(tmp_path)
    # Two lines of more than a shard each, so that there is work for two processes.
    line = json.dumps({"text": "x" * 9_000_000})
    (tmp_path / "x.jsonl").write_text(f'{line}\n{{"text": 3}}\n{line}\n')
    result = invoke("prepare", "x.jsonl", "--out", "out", "--heldout", "0", "--workers", workers)
    assert result.exit_code == 2, result.output
    message = "Error: x.jsonl, line at byte 9,000,013: field 'text' must be text, got int"
    assert result.stderr.splitlines()[-1] == message
