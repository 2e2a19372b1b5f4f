"""`sympow bench` on the heads of known models, and on grouped keys."""

import json
import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from benchmarks.redraw import load_rows
from torch.nn.functional import scaled_dot_product_attention
from typer.testing import CliRunner

from sympow.check import SHAPES
from sympow.check import operator as bench
from sympow.check.operator import Setting, describe, methods, run_bench, unsupported_methods
from sympow.cli.app import app
from sympow.model.config import PRESETS

ROOT = Path(__file__).parents[2]
# hidden_size of the published configurations. All but one have heads × head_dim of it.
WIDTHS = {
    "gpt2-124m": 768,
    "gpt2-xl": 1600,
    "llama-1b": 2048,
    "llama-8b": 4096,
    "mistral-7b": 4096,
    "phi-2": 2560,
    "qwen3-0.6b": 2 * 1024,
    "qwen3-8b": 4096,
    "qwen3-14b": 5120,
    "smollm2-135m": 576,
    "starcoder2-3b": 3072,
}
TINY = ("--tokens", "64", "--context", "32", "--runs", "1", "--device", "cpu", "--no-backward")
GROUPED = Setting(32, 6, 4, dtype=torch.float32, device="cpu", kv_heads=2)


def run(*arguments: str, code: int = 0):
    result = CliRunner().invoke(app, ["bench", *TINY, *arguments])
    assert result.exit_code == code, result.output
    return result


def test_heads_fill_the_width_of_each_model():
    assert {name: shape.heads * shape.dim for name, shape in SHAPES.items()} == WIDTHS
    assert all(shape.heads % shape.kv_heads == 0 for shape in SHAPES.values())
    preset = PRESETS["gpt2-124m"]
    assert (preset.heads, preset.width // preset.heads) == SHAPES["gpt2-124m"][::2]


def test_docs_list_every_shape():
    page = (ROOT / "docs" / "kernels.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w.-]+)`[^|]* \| (\d+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert {name: tuple(map(int, sizes)) for name, *sizes in rows} == SHAPES


def test_dtypes_are_timed_in_turns_and_recorded(tmp_path, monkeypatch):
    seen = []
    attend = bench.attention
    monkeypatch.setattr(bench, "attention", lambda **inputs: (seen.append(inputs["q"].dtype), attend(**inputs))[1])
    out = tmp_path / "results.json"
    options = ("--heads", "2", "--dim", "4", "--backend", "torch", "--dtype", "float32", "--dtype", "float16")
    run(*options, "--only", "attention form", "--out", str(out))
    assert {*seen} == {torch.float32, torch.float16}
    rows, setting = load_rows(out)
    assert [row.method for row in rows] == ["attention form, torch", "attention form, torch, float16"]
    assert (setting.dtype, setting.other_dtypes) == (torch.float32, (torch.float16,))


def test_a_shape_is_timed_and_recorded(tmp_path):
    out = tmp_path / "results.json"
    result = run("--shape", "smollm2-135m", "--out", str(out))
    assert "smollm2-135m: 64 tokens a call, 9 query and 3 key heads of 64" in " ".join(result.output.split())
    content = json.loads(out.read_text())
    assert content["setting"]["shape"] == "smollm2-135m"
    assert [content["setting"][name] for name in ("heads", "kv_heads", "dim")] == [9, 3, 64]
    assert [row["method"] for row in content["rows"]] == ["softmax", "attention form, auto", "chunked form, auto"]
    assert content["unsupported"] == {}
    rows, setting = load_rows(out)
    assert (setting.shape, setting.kv_heads, len(rows)) == ("smollm2-135m", 3, 3)


def test_results_in_the_repository_have_a_whole_setting(tmp_path):
    path = ROOT / "benchmarks" / "results" / "h200_p2.json"
    _, setting = load_rows(path)
    assert (setting.heads, setting.kv_heads, setting.shape) == (12, 12, None)
    assert describe(setting).startswith("65,536 tokens a call, 12 heads of 64")
    content = json.loads(path.read_text("utf-8"))
    del content["setting"]["kv_heads"]
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"results\.json lacks kv_heads in its setting$"):
        load_rows(tmp_path / "results.json")


def test_a_method_that_has_no_kernels_for_the_heads_says_so(tmp_path):
    out = tmp_path / "results.json"
    result = run("--shape", "smollm2-135m", "--power", "4", "--out", str(out))
    (line,) = [line for line in result.output.splitlines() if line.startswith("chunked form, auto is not timed.")]
    assert line.endswith("not power 4 with key dim 64.")
    assert json.loads(out.read_text())["unsupported"] == {"chunked form, auto": line.partition("timed. ")[2]}
    assert unsupported_methods(Setting(power=4), ["torch"]) == {}


def test_a_package_that_refuses_the_heads_is_quoted(monkeypatch):
    def refuse(*args, **kwargs):
        for said in ("Flash attention has been runtime disabled.", "cuDNN not used because:", "d must divide by 8."):
            warnings.warn(f"{said} (Triggered internally at sdp.cpp:1.)", stacklevel=1)
        raise RuntimeError("No available\nkernel.")

    monkeypatch.setattr(bench, "scaled_dot_product_attention", refuse)
    said = []
    rows = run_bench(GROUPED, [16], ["torch"], runs=1, on_unsupported=lambda *pair: said.append(pair))
    assert [row.method for row in rows] == ["attention form, torch", "chunked form, torch"]
    assert said == [("softmax", "RuntimeError: No available kernel. d must divide by 8.")]


def test_softmax_takes_grouped_keys():
    inputs = GROUPED.inputs(16, grad=False)
    assert [tuple(x.shape) for x in inputs.values()] == [(2, 16, 6, 4), (2, 16, 2, 4), (2, 16, 2, 4), (2, 16, 2)]
    call, _ = methods(GROUPED, ["torch"])["softmax"](GROUPED, 16, inputs)
    q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
    expected = scaled_dot_product_attention(
        q, k.repeat_interleave(3, dim=1), v.repeat_interleave(3, dim=1), is_causal=True
    )
    torch.testing.assert_close(call(), expected)


def test_keys_are_repeated_for_a_package_without_groups(monkeypatch):
    seen = []
    package = SimpleNamespace(chunk_simple_gla=lambda *args: (seen.extend(args), (args[0], None))[1])
    monkeypatch.setattr(bench, "import_module", lambda name: package)
    monkeypatch.setattr(bench, "_importable", lambda module: True)
    on_gpu = Setting(32, 6, 4, dtype=torch.float32, kv_heads=2)
    assert "fla, simple GLA (p = 1), keys repeated" in methods(on_gpu, ["auto"])
    assert "fla, simple GLA (p = 1)" in methods(Setting(), ["auto"])
    inputs = GROUPED.inputs(16, grad=True)
    call, leaves = bench._simple_gla(GROUPED, 16, inputs)
    call()
    assert [x.shape[2] for x in seen] == [6, 6, 6, 6]
    torch.testing.assert_close(seen[1], inputs["k"].repeat_interleave(3, dim=2))
    assert all(x.is_leaf and x.requires_grad for x in leaves)


def test_kinds_of_gates_are_timed_side_by_side(tmp_path):
    out = tmp_path / "results.json"
    gates = ("--gating", "scalar", "--gating", "vector", "--gating", "none")
    run("--heads", "1", "--dim", "4", *gates, "--only", "attention form", "--out", str(out))
    rows, setting = load_rows(out)
    added = ["", ", a gate per pair", ", no gates"]
    assert [row.method for row in rows] == ["attention form, auto" + name for name in added]
    assert setting.gating == ("scalar", "vector", "none")
    refused = run("--gating", "pairs", code=2)
    assert "gating must be one of 'scalar', 'vector', 'none'" in refused.output
