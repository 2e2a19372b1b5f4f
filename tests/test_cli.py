import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from sympow import GPT, GPTConfig
from sympow.check.operator import Setting, methods, run_bench
from sympow.cli import common
from sympow.cli.app import app
from sympow.model.gpt import SEGMENT_SIZE
from sympow.model.storage import save_model
from sympow.train.config import PRESETS as TRAIN_PRESETS

runner = CliRunner()
COMMANDS = (
    *("train", "convert", "data", "generate", "state", "serve", "evaluate", "report", "inspect", "info", "bench"),
    "check",
)


def invoke(*arguments: str):
    return runner.invoke(app, ["info", *arguments], terminal_width=200)


@pytest.mark.parametrize(("power", "sizes"), [("2", ("78 MB", "39 MB")), ("4", ("29 GB", "14 GB"))])
def test_info_prints_the_papers_numbers_and_what_is_kept(power, sizes):
    result = invoke("gpt2-124m", "--power", power, "--rotary", "scale")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "state per sequence" in line]
    for line, words, size in zip(lines, ("float32 (as kept in memory)", "bfloat16 (as the paper"), sizes, strict=True):
        assert words in line
        assert size in line
    assert "+0.09 %" in result.output
    assert "+0.18 %" in result.output


def test_info_as_json_is_complete():
    result = invoke("--json", "--context", "1024", "--context", "65536")
    info = json.loads(result.output)
    assert info["features"] == 2080
    assert info["state_bytes"] == {"bfloat16": 12 * 12 * 2080 * 65 * 2, "float32": 12 * 12 * 2080 * 65 * 4}
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


def test_info_takes_the_model_folder_of_a_run(tmp_path):
    config = GPTConfig.preset("byte-400k", layers=3, power=4)
    save_model(tmp_path / "model", config, GPT(config).state_dict())
    found = json.loads(invoke(str(tmp_path / "model"), "--json").output)
    assert found["config"] == asdict(config)
    assert found == json.loads(invoke("byte-400k", "--json", "--layers", "3", "--power", "4").output)
    changed = json.loads(invoke(str(tmp_path / "model"), "--json", "--power", "2").output)
    assert changed["config"] == asdict(replace(config, power=2))
    result = invoke(str(tmp_path))
    assert result.exit_code == 2
    assert "holds no model: model.json is missing; did you mean" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("../model", "first"),
        (".", "checkpoints"),
        ("../../first/model/", "first"),
        ("/model", "model"),
        ("link", "link"),
    ],
)
def test_a_model_has_the_name_of_its_run(tmp_path, monkeypatch, given, name):
    within = tmp_path / "first" / "checkpoints"
    within.mkdir(parents=True)
    (within / "link").symlink_to(tmp_path / "first")
    monkeypatch.chdir(within)
    assert common.name_of(Path(given)) == name


def test_info_takes_every_setting_of_a_model_that_changes_its_numbers():
    result = invoke("gpt2-124m", "--no-bias", "--mlp-ratio", "3", "--json")
    assert result.exit_code == 0
    config = json.loads(result.output)["config"]
    assert (config["bias"], config["mlp_ratio"]) == (False, 3)


def test_info_counts_the_parameters_of_rotations():
    found = json.loads(invoke("byte-400k", "--json", "--gating", "none", "--rotary", "pairs").output)["parameters"]
    # In each of two layers W_β, width × pairs of all heads.
    assert found["total"] - found["without_gating_and_data_dependent_rotary"] == 2 * 128 * 64


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
        "tokens": 64, "heads": 1, "dim": 4, "power": 2, "dtype": "float32", "device": "cpu", "kv_heads": 1,
        "shape": None, "gating": ["scalar"], "other_dtypes": [],
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


def test_an_interrupted_bench_keeps_what_it_has_timed(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        yield next(run_bench(*arguments, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr("sympow.check.operator.run_bench", interrupted)
    out = tmp_path / "result.json"
    arguments = ["--tokens", "32", "--context", "32", "--heads", "1", "--dim", "4", "--runs", "1", "--device", "cpu"]
    assert runner.invoke(app, ["bench", *arguments, "--out", str(out)]).exit_code != 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["method"], row["context"]) == ("softmax", 32)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--context", "100", "--tokens", "64"), "Error: --context must divide tokens, 64; got 100"),
        (("--power", "3"), "power must be even"),
        (("--dtype", "int8"), "Error: --dtype must be one of"),
        (
            ("--only", "foo"),
            "--only must be contained in the name of a method: softmax; attention form, auto; chunked",
        ),
        (("--heads", "0"), "Error: --heads must be at least 1, got 0"),
        (("--kv-heads", "0"), "Error: --kv-heads must be at least 1, got 0"),
        (("--heads", "6", "--kv-heads", "4"), "Error: --kv-heads must divide heads, 6; got 4"),
        (("--gating", "vector", "--dim", "7"), "Error: --dim must be even for a gate per rotated pair, got 7"),
        (("--shape", "gpt5"), "Error: --shape must be one of 'gpt2-124m', 'gpt2-xl',"),
        (("--shape", "phi-2", "--heads", "8"), "Error: --shape cannot be combined with --heads: phi-2 has its own"),
        (
            ("--shape", "phi-2", "--dim", "64", "--kv-heads", "8"),
            "Error: --shape cannot be combined with --kv-heads or --dim: phi-2 has its own",
        ),
        (("--power", "4", "--only", "chunked"), "Error: --only must leave a method to time: softmax; attention form"),
        (("--backend", "cuda"), "Error: --backend must be one of"),
    ],
)
def test_bench_explains_mistakes(arguments, message):
    result = runner.invoke(app, ["bench", "--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")


def test_bench_refuses_tensors_larger_than_the_memory(monkeypatch):
    result = runner.invoke(app, ["bench", "--device", "cpu", "--context", "10000000000"])
    assert result.exit_code == 2, result.output
    said = " ".join(result.stderr.split())
    # q, k, v, the output and their gradients: 2 heads of 64 in float32.
    assert "Error: --tokens must fit into memory: q, k, v and the output of 10,000,000,000 tokens take at least" in said
    assert "at least 40,960.0 GB with their gradients, and there are" in said
    sizes = ["--tokens", "64", "--context", "64", "--heads", "1", "--dim", "4", "--runs", "1", "--dtype", "float32"]
    for room, options, code in ((8_192, (), 0), (8_191, (), 2), (4_096, ("--no-backward",), 0)):
        monkeypatch.setattr("sympow.check.operator.host_memory", lambda room=room: room)
        assert runner.invoke(app, ["bench", "--device", "cpu", *sizes, *options]).exit_code == code


@pytest.fixture
def timed(monkeypatch):
    """Replaces the timing of `sympow bench`; collects what would be timed."""
    seen = SimpleNamespace()

    def remember(setting, contexts, backends, **options):
        seen.setting, seen.contexts, seen.options = setting, tuple(contexts), options
        return iter(())

    monkeypatch.setattr("sympow.check.operator.run_bench", remember)
    return seen


def test_bench_has_sizes_for_a_cpu(timed):
    """They are in float32: most CPUs emulate bfloat16, hundreds of times slower."""
    result = runner.invoke(app, ["bench", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert timed.setting.dtype is torch.float32
    assert timed.setting.tokens == max(timed.contexts) == 4_096
    assert (timed.setting.heads, timed.options["runs"]) == (2, 3)
    assert runner.invoke(app, ["bench", "--device", "cpu", "--context", "8192", "--heads", "3"]).exit_code == 0
    assert (timed.setting.tokens, timed.setting.heads, timed.contexts) == (8_192, 3, (8_192,))


@pytest.mark.parametrize(
    ("power", "dim", "backend", "chunked"),
    [
        (2, 64, "auto", True),
        (4, 32, "auto", True),
        (4, 32, "triton", True),
        (4, 64, "auto", False),
        (4, 64, "torch", True),
        (6, 16, "auto", False),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bench_times_the_chunked_form_where_it_has_kernels(power, dim, backend, chunked, device):
    names = methods(Setting(dim=dim, power=power, device=device), [backend])
    assert f"attention form, {backend}" in names
    assert (f"chunked form, {backend}" in names) == chunked


def test_bench_reports_progress():
    seen = []
    setting = Setting(64, 1, 4, 2, torch.float32, "cpu")
    report = lambda *arguments: seen.append(arguments)  # noqa: E731
    rows = list(run_bench(setting, (32, 64), ["torch"], runs=2, only=["softmax"], on_progress=report))
    assert len(rows) == 2
    # A warm-up round and two rounds, for forward and for both passes, at two contexts.
    assert [total for _, total in seen] == [12] * 12
    assert [what for what, _ in seen][::3] == [
        "32: forward", "32: forward and backward", "64: forward", "64: forward and backward"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "model", "--prompt", "a"),
        ("evaluate", "model"),
        ("state", "model", "text.txt", "--out", "state"),
        ("inspect", "model", "text.txt"),
        ("report", "runs", "--out", "page"),
        ("bench",),
        ("train",),
        ("convert", "model", "--out", "converted"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_before_anything_else(tmp_path, monkeypatch, arguments):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, [*arguments, "--device", "cuda"])
    assert result.exit_code == 2, result.output
    assert "Error: --device must be 'cpu' here: torch finds no GPU it can use; got 'cuda'" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("where", ["text.txt/below", "/proc/below/it"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("evaluate", "model"),
        ("state", "model", "text.txt"),
        ("inspect", "model", "text.txt"),
        ("report", "runs"),
        ("bench",),
        ("train",),
        ("convert", "model"),
        ("data", "prepare", "text.txt"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_work(tmp_path, monkeypatch, arguments, where):
    """The check comes before models or runs are opened, which do not exist here."""
    if where.startswith("/proc") and not Path("/proc/self").exists():
        pytest.skip("this system has no /proc, the folder that nobody can write to")
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, [*arguments, "--out", where])
    assert result.exit_code == 2, result.output
    assert "Error: --out must be a f" in result.output
    assert f"that can be written, and {where} cannot: No" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_bench_refuses_to_write_its_figure_over_its_results(tmp_path, timed):
    out = tmp_path / "result.png"
    out.mkdir()
    for given, message in (
        (tmp_path, f"must name a file, and {tmp_path} is a folder"),
        (out, "must name the JSON file, and"),
        (out.with_suffix(".json"), f"must name a file, and {out} is a folder"),
    ):
        result = runner.invoke(app, ["bench", "--device", "cpu", "--out", str(given)])
        assert result.exit_code == 2, result.output
        assert f"Error: --out {message}" in result.output


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("matplotlib", ("bench", "--device", "cpu")),
        ("matplotlib", ("evaluate", "model")),
        ("matplotlib", ("report", "runs")),
        ("plotly", ("report", "runs")),
        ("plotly", ("inspect", "model", "--text", "a")),
    ],
)
def test_a_missing_extra_is_named_before_the_work(tmp_path, monkeypatch, module, arguments):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("sympow.check.operator.run_bench", None)
    result = runner.invoke(app, [*arguments, "--out", str(tmp_path / "out")], prog_name="sympow")
    assert result.exit_code == 1
    said = f"error: {module} is not installed; it comes with: pip install 'conformal-sympow[report]'"
    assert result.stderr == f"sympow {arguments[0]}: {said}\n"


def test_help_has_the_librarys_names_and_defaults():
    """The size is a copy, so that help does not import torch."""
    assert common.SEGMENT_SIZE == SEGMENT_SIZE
    text = runner.invoke(app, ["train", "--help"], terminal_width=200).output
    assert f"Config to start from: {' or '.join(TRAIN_PRESETS)}." in text


def test_summaries_are_whole():
    result = runner.invoke(app, ["--help"], terminal_width=80)
    lines = result.output.partition("Commands:\n")[2].splitlines()
    summaries = {line.split()[0]: line for line in lines if line.strip()}
    assert set(COMMANDS) <= set(summaries)
    for line in summaries.values():
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize("command", [*COMMANDS, "data prepare", "data info"])
def test_help_fits_a_narrow_terminal(command):
    result = runner.invoke(app, [*command.split(), "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= 80
