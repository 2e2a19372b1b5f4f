"""`sympow report`: what it writes, and the numbers in it."""

import csv
import errno
import json
import os
import re
import shutil
import sys
from html import unescape

import pytest
from report.made_up import VARIANTS, groups_of, write_run
from typer.testing import CliRunner

from sympow.cli.app import app
from sympow.data.provenance import TrainedOn
from sympow.data.tokenizer import ByteTokenizer
from sympow.model.config import GPTConfig
from sympow.model.gpt import GPT
from sympow.model.storage import save_model
from sympow.report.run_collection import collect
from sympow.report.run_page import build_report_page, report_data
from sympow.report.run_report import measure_missing_heads, write_report

pytestmark = pytest.mark.slow  # reports of several runs
plotly = pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")


def report(*arguments, code=0):
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def add_model(run, data, vocab_size=257, **changes):
    """Adds a model that knows its data to a run."""
    config = GPTConfig(vocab_size=vocab_size, **{"layers": 1, "width": 16, "heads": 2, "rotary": "scale", **changes})
    save_model(run / "model", config, GPT(config).state_dict())
    TrainedOn(data, None, 32, "join", "bytes", "a fingerprint", data).save(run / "model")


def embedded(page):
    return json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL)[1])


def notes_of(page):
    return [unescape(note) for note in re.findall("<li>(.*?)</li>", page)]


def curves(data, section, choice, name):
    """The curves of a run in a section, as [[x, y], …]."""
    panels = data["views"][section][choice]["panels"]
    seeds = [seed for panel in panels for line in panel["lines"] for config in line["configs"] for seed in config]
    found = [seed for seed in seeds if data["runs"][seed["run"]]["name"] == name]
    return [list(map(list, zip(data["grids"][seed["grid"]], seed["y"], strict=True))) for seed in found]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two variants at two contexts, one of them with a model."""
    folder = tmp_path_factory.mktemp("small")
    for name in ("softmax", "conformal"):
        for context in (32, 64):
            for seed in (0, 1):
                write_run(
                    folder / f"{name}-{context}" / f"seed{seed}",
                    [3.0, 2.5 + seed / 2],
                    lines={2: {"tokens_per_second": 500.0}},
                    evaluation=[2.0 + seed] * 128,
                    seed=seed,
                    context=context,
                    layers=1,
                    width=16,
                    heads=2,
                    vocab_size=257,
                    **VARIANTS[name],
                )
    add_model(folder / "conformal-32" / "seed0", "stdlib")
    ByteTokenizer().save(folder / "conformal-32" / "seed0" / "model")
    return folder


@pytest.fixture(scope="module")
def written(small, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "new"
    report(small, "-o", out, "--title", "A <title>", "--device", "cpu")
    return out


def test_every_figure_of_the_paper_is_drawn_twice(written):
    names = {path.relative_to(written / "figures").as_posix() for path in (written / "figures").rglob("*.*")}
    figures = [
        "final_loss_by_training_context",
        "throughput_by_training_context",
        "training_curves_p2",
        "loss_by_evaluation_context_p2_trained_at_32",
        "loss_by_evaluation_context_p2_trained_at_64",
        "heads/conformal-32_seed0",
    ]
    assert names == {f"{name}.{suffix}" for name in figures for suffix in ("png", "svg")}
    for path in (written / "figures").rglob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    drawn = (written / "figures" / "final_loss_by_training_context.svg").read_text()
    # A vocabulary of 257 is that of bytes.
    assert "training loss (nats per byte)" in drawn
    assert "conformal" in drawn
    assert ">64<" in drawn


def test_the_same_runs_give_the_same_figures(small, written, tmp_path):
    # In another folder, and without files that these curves do not use.
    again = shutil.copytree(small, tmp_path / "again", ignore=shutil.ignore_patterns("evaluation.json", "model"))
    report(again, "-o", tmp_path / "out", "--no-heads")
    name = "figures/training_curves_p2.svg"
    assert (tmp_path / "out" / name).read_bytes() == (written / name).read_bytes()


def test_final_losses_are_in_a_table(written):
    with (written / "final_losses.csv").open() as file:
        rows = {(row["series"], row["context"]): row for row in csv.DictReader(file)}
    assert set(rows) == {(name, context) for name in ("softmax", "conformal") for context in ("32", "64")}
    row = rows["conformal", "64"]
    # The last tenth of two steps is the last one: 2.5 and 3.
    assert (row["final_loss_mean"], row["final_loss_low"], row["final_loss_high"]) == ("2.75", "2.5", "3")
    assert (row["seeds"], row["finished"], row["power"], row["final_heldout_loss_mean"]) == ("0 1", "2", "2", "")


def test_the_page_stands_alone(written):
    page = (written / "index.html").read_text("utf-8")
    library = plotly.offline.get_plotlyjs()
    # plotly.js begins with its name and version.
    assert page.count(library) == page.count("* plotly.js v") == 1
    assert "</script" not in library
    ours = page.replace(library, "")
    assert not re.findall(r"""<(?:script|link|img)[^>]*(?:src|href)=""", ours)
    assert "://" not in ours
    # The policy forbids what plotly.js could load for maps.
    assert "default-src &#x27;none&#x27;" in ours
    assert "connect-src" not in ours
    assert "<h1>A &lt;title&gt;</h1>" in ours


def test_figures_and_numbers_are_written_without_plotly(small, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'conformal-sympow\[report\]'"):
        write_report([small / "softmax-32"], tmp_path, heads=False)
    assert {path.name for path in tmp_path.iterdir()} == {"figures", "final_losses.csv"}


def test_heads_are_measured_once_and_kept(small, written):
    kept = json.loads((small / "conformal-32" / "seed0" / "heads.json").read_text())
    # As every gate and rotation starts: γ = σ(6.906768) and β = 1.
    assert kept["quantities"]["half_life"] == [pytest.approx([692.8, 692.8], rel=1e-3)]
    assert kept["quantities"]["beta_mean"] == [[1.0, 1.0]]
    data = embedded((written / "index.html").read_text())
    (heads,) = data["heads"]
    assert data["runs"][heads["run"]]["name"] == "conformal-32/seed0"
    assert heads["maps"]["beta_mean"]["panels"][0]["plot"]["traces"][0]["z"] == [[1.0, 1.0]]


def test_a_run_whose_data_is_gone_is_noted(tmp_path):
    folder = write_run(tmp_path / "run", [3.0], data="gone", layers=1, width=16, heads=2)
    add_model(folder, "gone", vocab_size=256)
    report(tmp_path, "-o", tmp_path / "out", "--device", "cpu")
    (note,) = notes_of((tmp_path / "out" / "index.html").read_text())
    assert note.startswith("The heads of run were not measured: the model was trained on gone, and there is no")


def test_heads_that_cannot_be_saved_are_shown_and_noted(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", [3.0], data="stdlib", layers=1, width=16, heads=2, vocab_size=257)
    add_model(folder, "stdlib")

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("sympow.report.run_report.write_heads", refuse)
    measured = measure_missing_heads(collect([tmp_path]), "cpu")
    assert measured.runs[0].heads is not None
    assert measured.notes == ["The heads of run were measured, but not saved: Read-only file system."]


def test_a_rotation_without_a_scale_is_noted_and_not_measured(tmp_path):
    changes = {"layers": 1, "width": 16, "heads": 2, "gating": "none", "rotary": "grid"}
    folder = write_run(tmp_path / "run", [3.0], data="stdlib", **changes)
    add_model(folder, "stdlib", **changes)
    write_report([tmp_path], tmp_path / "out", device="cpu")
    page = (tmp_path / "out" / "index.html").read_text()
    assert notes_of(page) == [
        "Rotations of run turn half of the pairs by angles of their own and have no scale β to show."
    ]
    assert embedded(page)["heads"] == []
    assert not (folder / "heads.json").exists()


def test_the_page_reads_what_the_runs_hold(experiment):
    data = report_data(groups_of(experiment))
    assert [style["label"] for style in data["series"]] == ["softmax", "sympow", "sympow + gating", "conformal"]
    assert [panel["title"] for panel in data["views"]["final"]["final_loss"]["panels"]] == ["p = 4", "p = 2"]
    name = "conformal-p2-256/seed1"
    base = 3 - 0.3 - 0.1 + 0.02
    last = [base + 3 / step + 0.05 * (-1) ** step for step in range(37, 41)]
    assert curves(data, "final", "final_loss", name) == [[[256, pytest.approx(sum(last) / 4, rel=1e-5)]]]
    assert curves(data, "final", "final_heldout_loss", name) == [[[256, pytest.approx(base + 0.5, rel=1e-5)]]]
    assert curves(data, "speed", "", name) == [[[256, 4000]]]
    (losses,) = curves(data, "curves", "loss", name)
    assert [step for step, _ in losses] == list(range(1, 41))
    assert losses[0][1] == pytest.approx(base + 3 - 0.05, rel=1e-5)
    panels = data["views"]["curves"]["loss"]["panels"]
    seed = panels[0]["lines"][-1]["configs"][0][0]
    # 40 steps of 1,024 tokens at 4,000 a second.
    assert data["grids"][seed["time"]][-1] == pytest.approx(40 * 1024 / 4000, rel=1e-5)
    (heads,) = (run for run in data["heads"] if data["runs"][run["run"]]["name"] == name)
    learned, over_training = (panel["plot"]["traces"][0] for panel in heads["maps"]["half_life"]["panels"])
    assert over_training["x"] == ["10", "20", "30", "40"]
    assert over_training["text"] == [["500"] * 4, ["20"] * 4]
    assert learned["text"] == [["700", "30"], ["–", "2.5"]]
    (by_context,) = curves(data, "beyond", "by_context", name)
    # From 1/16 of the training context on.
    assert by_context[0] == [16, pytest.approx(base + sum(1 / n for n in range(1, 17)) / 16, rel=1e-5)]


def test_the_table_of_runs_has_the_settings_that_differ(experiment):
    page = build_report_page("title", groups_of(experiment), [])
    head = re.search("<thead>(.*?)</thead>", page, re.DOTALL)[1]
    shown = [
        name for mark, name in re.findall(r'<th([^>]*)><button type="button">([^<]*)<', head) if "same" not in mark
    ]
    assert shown[-6:] == ["mixer", "power", "gating", "rotary", "context", "seed"]


def test_runs_of_two_kinds_with_equal_losses_are_report(tmp_path):
    for seed in range(3):
        # The mean of three such losses rounds to more than each of them.
        write_run(tmp_path / "runs" / f"seed{seed}", [0.1], seed=seed)
    config = write_run(tmp_path / "runs" / "newer", [0.1]) / "config.yaml"
    config.write_text(config.read_text().replace("optimizer:", "optimizer:\n  momentum: 0.5"))
    # Without a terminal there is neither a progress bar nor the blank lines in its place.
    assert re.fullmatch(r"wrote .+ figures\n", report(tmp_path / "runs", "--out", tmp_path / "report"))
    (line,) = [row for row in (tmp_path / "report" / "final_losses.csv").read_text().splitlines() if "0.5" in row]
    assert "momentum 0.5" in line


def test_mistakes_are_explained(tmp_path):
    assert "runs must be folders" in report(tmp_path / "nowhere", "-o", tmp_path, code=2)


def test_losses_that_are_not_numbers_are_left_out(tmp_path):
    """Of one seed some, of another all."""
    lost = {"passkey": [{"distance": 64, "accuracy": 0.0, "loss": 3.0, "control": None}]}
    for seed, mean in enumerate(([2.0] * 20 + [None] * 20, [None] * 40)):
        write_run(tmp_path / "runs" / f"seed{seed}", [3.0, 2.5], evaluation=mean, probes=lost, seed=seed)
    write_run(tmp_path / "runs" / "other", [3.0, 2.5], evaluation=[None] * 40, context=32)
    report(tmp_path / "runs", "-o", tmp_path / "report", "--no-heads")
    assert any((tmp_path / "report" / "figures").glob("loss_by_evaluation_context*.png"))
    data = embedded((tmp_path / "report" / "index.html").read_text())
    (first,) = curves(data, "beyond", "by_context", "seed0")
    # From 1/16 of the training context on.
    assert first[:2] == [[4, 2], [8, 2]]
    assert first[-1] == [40, None]
    (second,) = curves(data, "beyond", "by_position", "seed1")
    assert all(y is None for _, y in second)
