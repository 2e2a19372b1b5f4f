"""The commands `sympow data prepare` and `sympow data info`."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from sympow.cli.app import app

runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, ["data", *map(str, arguments)], terminal_width=200)


def len_of_tokens(folder):
    return json.loads((folder / "manifest.json").read_text())["counts"]["tokens"]


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
    facts = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    assert ["vocabulary", "257 tokens"] in facts
    assert ["boundary token", "256, the id between documents"] in facts


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


def test_help_shows_the_default_fraction_once():
    text = " ".join(invoke("prepare", "--help").output.split())
    assert "by default 0.02" in text
    assert "(0.02)" not in text


def test_progress_fits_in_80_columns(corpus, tmp_path, monkeypatch):
    # As on a terminal of that width.
    for name, value in {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    options = ("--tokenizer", "bpe", "--vocab-size", "280", "--workers", "1")
    result = invoke("prepare", corpus, "--out", tmp_path / "out", *options)
    assert result.exit_code == 0, result.output
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", result.stderr).replace("\r", "\n").splitlines()
    last = {line[:14]: line.rstrip() for line in shown}
    size, tokens = r"(\d+\.\d)/\1 kB", rf"{len_of_tokens(tmp_path / 'out'):,} tokens"
    for stage, end in (("writing shards", f" {tokens}"), ("counting words", ""), ("merging pairs ", "")):
        assert re.fullmatch(rf"{stage} ━+ {size} \d:\d\d:\d\d{end}", last[stage]), last[stage]
    # Nothing is left out or wrapped, and there is room for a corpus of terabytes.
    longest = len(last["writing shards"]) - len(tokens) + len("123,456,789,012 tokens")
    assert longest + len("100.0/100.0") - len("12.3/12.3") <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "nowhere", "--out", "out"), "nowhere is neither a file nor a folder"),
        (("prepare", "a.txt", "--out", "out", "--heldout", "2"), "heldout must be at least 0 and below 1"),
        (("prepare", "a.txt", "--out", "out", "--workers", "0"), "--workers must be at least 1, got 0"),
        (
            ("prepare", "a.txt", "--out", "out", "--tokenizer", "bpe", "--vocab-size", "1000000000"),
            "--vocab-size must be at most 1,048,576, several times the largest vocabulary in use; got 1,000,000,000",
        ),
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


@pytest.mark.parametrize(
    ("address", "package"),
    [("gs://bucket/data", "gcsfs"), ("s3://bucket/data", "s3fs"), ("https://host/data/train.zarr", "aiohttp")],
)
@pytest.mark.parametrize(("command", "named"), [(("data", "info"), "source"), (("train", "--data"), "--data")])
def test_an_address_names_the_package_that_opens_it(monkeypatch, tmp_path, command, named, address, package):
    pytest.importorskip("zarr")
    registry = pytest.importorskip("fsspec.registry")
    # Not installed, nor imported before.
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "fsspec.implementations.http", raising=False)
    monkeypatch.delitem(registry._registry, address.partition(":")[0], raising=False)
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, [*command, address])
    assert result.exit_code == 2, result.output
    said = result.stderr.splitlines()[-1]
    assert said.startswith(f"Error: {named} needs the package {package} to open {address}")
    assert said.endswith(f": pip install {package}")


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_bad_line_is_explained_alike_by_any_number_of_processes(tmp_path, monkeypatch, workers):
    monkeypatch.chdir(tmp_path)
    # Two lines of more than a shard each, so that there is work for two processes.
    line = json.dumps({"text": "x" * 9_000_000})
    (tmp_path / "x.jsonl").write_text(f'{line}\n{{"text": 3}}\n{line}\n')
    result = invoke("prepare", "x.jsonl", "--out", "out", "--heldout", "0", "--workers", workers)
    assert result.exit_code == 2, result.output
    message = "Error: x.jsonl, row 1: column 'text' must be text, got int"
    assert result.stderr.splitlines()[-1] == message
