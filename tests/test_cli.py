import json

import pytest
from typer.testing import CliRunner

from sympow.cli import app

runner = CliRunner()


def invoke(*arguments: str):
    return runner.invoke(app, ["info", *arguments], terminal_width=200)


@pytest.mark.parametrize(("power", "state"), [("2", "39 MB"), ("4", "14 GB")])
def test_info_prints_the_papers_numbers(power, state):
    result = invoke("gpt2-124m", "--power", power)
    assert result.exit_code == 0, result.output
    assert state in result.output
    assert "+0.09 %" in result.output
    assert "+0.18 %" in result.output


def test_info_as_json_is_complete():
    result = invoke("--json", "--context", "1024", "--context", "65536")
    info = json.loads(result.output)
    assert info["features"] == 2080
    assert info["state_bytes"]["bfloat16"] == 12 * 12 * 2080 * 65 * 2
    assert info["crossover_context"] == 4192
    rows = info["attention_flops_per_token"]
    assert [row["context"] for row in rows] == [1024, 65_536]
    assert rows[1]["chunked"] < rows[1]["attention"]
    assert info["config"]["gating"] == "scalar"


def test_info_takes_options():
    result = invoke("byte-400k", "--json", "--heads", "2", "--gating", "none", "--rotary", "none", "--layers", "3")
    info = json.loads(result.output)
    assert info["config"]["heads"] == 2
    assert info["parameters"]["gating_and_rotary_overhead_percent"] == 0


def test_info_describes_softmax_without_a_state():
    result = invoke("--mixer", "softmax")
    assert result.exit_code == 0
    assert "softmax" in result.output
    assert "features" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--power", "3"), "Error: --power must be even"),
        (("--heads", "7"), "Error: --width must be a multiple of heads"),
        (("gpt5",), "gpt5"),
        (("--context", "0"), "Error: --context must be at least 1"),
    ],
)
def test_mistakes_are_explained_without_a_traceback(arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_bench_prints_a_table_and_writes_json_and_a_figure(tmp_path):
    out = tmp_path / "result.json"
    arguments = ["--tokens", "64", "--context", "32", "--context", "64", "--heads", "1", "--dim", "4", "--runs", "2"]
    result = runner.invoke(
        app, ["bench", *arguments, "--dtype", "float32", "--device", "cpu", "--backend", "torch", "--out", str(out)]
    )
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["setting"] == {
        "tokens": 64, "heads": 1, "dim": 4, "power": 2, "dtype": "float32", "device": "cpu"
    }  # fmt: skip
    assert content["environment"]["torch"]
    methods = {(row["method"], row["context"]) for row in content["rows"]}
    assert methods == {
        (method, context)
        for method in ("softmax", "attention form, torch", "chunked form, torch")
        for context in (32, 64)
    }
    for row in content["rows"]:
        assert 0 < row["forward"]["fastest"] <= row["forward"]["median"] <= row["forward"]["slowest"]
        assert row["forward_and_backward"]["median"] > 0
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "100", "--tokens", "64"), "Error: --context must divide tokens, 64; got 100"),
        (("--power", "3"), "power must be even"),
        (("--dtype", "int8"), "Error: --dtype must be one of"),
        (("--backend", "cuda"), "Error: --backend must be one of"),
    ],
)
def test_bench_explains_mistakes(arguments, message):
    result = runner.invoke(app, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
