import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from sympow.check.timing import Timing, environment, measure, save_results
from sympow.report.figure_files import plot_time_against_context
from sympow.report.model_info import format_bytes, format_count


def test_measure_warms_up_and_reports_the_spread():
    calls = []
    timing = measure(lambda: calls.append(1), runs=4, warmup=2)
    assert len(calls) == 6
    assert timing.runs == 4
    assert 0 <= timing.fastest <= timing.median <= timing.slowest
    with pytest.raises(ValueError, match="runs must be at least 1"):
        measure(lambda: None, runs=0)


def test_spread_is_relative_to_the_median():
    assert Timing(median=2.0, fastest=1.5, slowest=2.5, runs=3).spread == 0.5


def test_environment_names_versions():
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["triton"] == pytest.importorskip("triton", reason="needs Triton").__version__


def test_environment_names_the_processor():
    listed = Path("/proc/cpuinfo")
    if not listed.is_file() or "model name" not in listed.read_text():
        pytest.skip("the system does not tell the model of its processor")
    assert f": {environment()['device']}\n" in listed.read_text()


def test_environment_without_triton(monkeypatch):
    def nowhere(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr("sympow.check.timing.version", nowhere)
    assert "triton" not in environment()


def test_results_name_their_command_and_machine_first(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmarks/some.py", "--runs", "3"])
    path = tmp_path / "new" / "results.json"
    save_results(path, {"device": "abacus"}, shape={"heads": 2}, rows=[{"seconds": 0.5}])
    text = path.read_text()
    content = json.loads(text)
    assert list(content) == ["command", "environment", "shape", "rows"]
    assert content["command"] == "python benchmarks/some.py --runs 3"
    assert content["rows"] == [{"seconds": 0.5}]
    assert text == json.dumps(content, indent=2) + "\n"
    save_results(path, None, command="again", simulated=True)
    assert json.loads(path.read_text()) == {"command": "again", "simulated": True}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_figure_is_written_where_asked(suffix, tmp_path):
    timings = {
        "softmax": {512: Timing(0.01, 0.009, 0.02, 3), 1024: Timing(0.04, 0.03, 0.05, 3)},
        "chunked form": {512: Timing(0.02, 0.02, 0.02, 3), 1024: Timing(0.03, 0.03, 0.03, 3)},
        "a method without a style": {512: Timing(0.01, 0.01, 0.01, 3)},
    }
    path = tmp_path / "new" / f"figure.{suffix}"
    plot_time_against_context(timings, "title", path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    if suffix == "svg":
        assert b"chunked form" in content


@pytest.mark.parametrize(
    ("size", "text"),
    [(38_937_600, "39 MB"), (14_348_505_600, "14 GB"), (279_000, "279 kB"), (9_700_000, "9.7 MB"), (12, "12 B")],
)
def test_bytes_read_as_the_paper_writes_them(size, text):
    assert format_bytes(size) == text


@pytest.mark.parametrize(("count", "text"), [(77_875_200, "77.9 M"), (1.2e12, "1.2 T"), (950, "950")])
def test_counts_have_three_digits(count, text):
    assert format_count(count) == text
