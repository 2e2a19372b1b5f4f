"""Experiments from their names to their results: plans, skipping, resuming, several processes, the store."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean

import pytest
from experiment_settings import TINY, TINY_RECALL
from filelock import FileLock

from experiments import __main__ as laboratory
from experiments import figures
from experiments.figures import report_run
from experiments.runner import train_all
from experiments.store import Store, StoredResult
from experiments.text_run import PlannedRun, condense
from sympow.report.run_collection import collect
from sympow.train.config import TrainConfig
from sympow.train.metrics import read_metrics

ROOT = Path(__file__).parents[2]
# Seconds to wait for a process.
PATIENCE = 300


def pair(scale):
    """Two runs.

    And no more.
    """
    evaluation = replace(scale.evaluation, tokens=256, length=64, documents=2, pairs=(), distances=())
    return [scale.run(variant, context=32, evaluation=evaluation) for variant in ("gating", "conformal")]


SET = [word for name, value in TINY.items() if name != "context" for word in ("--set", f"{name}={value}")]


def command(tmp_path, *arguments):
    where = ["--out", tmp_path / "runs", "--results", tmp_path / "results", "--device", "cpu"]
    laboratory.main([*map(str, [*arguments, *where]), *SET])


def made_up(run, loss=1.0, **numbers):
    """A result of a run."""
    row = {"run": run.name, "variant": run.variant, "status": "done", "final_loss": loss, "heldout_loss": loss}
    return StoredResult({**row, "changes": run.changes, "config": asdict(run.config), **numbers}, {"metrics": {}})


def test_a_grid_grows_by_its_results(define, tmp_path, monkeypatch, capsys):
    def growing(scale):
        """The better of two rates, on another seed."""
        rates = [scale.run("gating", context=32, learning_rate=rate) for rate in (0.1, 0.2)]
        best = scale.best(rates)
        return rates if best is None else [*rates, scale.run("gating", context=32, seed=1, **best.changes)]

    def train(run, folder, device, command, say):
        return [made_up(run, 1 - run.config.optimizer.learning_rate)]

    define(growing)
    monkeypatch.setattr(PlannedRun, "train", train)
    names = [f"gating_p2_c32_learning_rate-{end}" for end in ("0.1_s0", "0.2_s0", "0.2_s1")]
    command(tmp_path, "growing", "--plan")
    assert [shlex.split(line)[7] for line in capsys.readouterr().out.splitlines()] == names[:2]
    with pytest.raises(SystemExit):
        command(tmp_path, "growing", "--only", "*_s1")
    assert "depend on the results of others" in capsys.readouterr().err, "the third run is not known yet"
    command(tmp_path, "growing")
    assert "3 of 3" in capsys.readouterr().err
    assert list(Store(tmp_path / "results").tables["growing"]) == names
    command(tmp_path, "growing", "--only", "*_s1")
    assert "0 of 1 left" in capsys.readouterr().err


@pytest.mark.slow
def test_an_experiment_from_its_name_to_its_results(define, tmp_path, capsys):
    define(pair)
    command(tmp_path, "pair")
    results = tmp_path / "results"
    assert sorted(path.name for path in results.iterdir()) == [".lock", "pair.curves.jsonl", "pair.jsonl"]
    stored = Store(results).tables["pair"]
    assert [result.row["variant"] for result in stored.values()] == ["gating", "conformal"]
    for name, result in stored.items():
        there, row = tmp_path / "runs" / name, result.row
        losses = [line["loss"] for line in read_metrics(there / "metrics.jsonl")]
        assert len(losses) == row["steps"] == 20
        assert row["final_loss"] == pytest.approx(fmean(losses[-2:]), abs=1e-4)
        assert (row["tokens"], row["status"], row["device"]) == (20 * 64, "done", "cpu")
        assert f"--only {name}" in row["command"]
        assert "--set steps=20" in row["command"]
        assert TrainConfig.from_yaml(json.dumps(row["config"])) == TrainConfig.read(there / "config.yaml")
        # Everything that figures use, equal to the content of the run's folder.
        (of_folder,), of_table = collect([there]).runs, report_run(result)
        assert of_table.settings == of_folder.settings
        assert of_table.heads == of_folder.heads is not None
        assert of_table.evaluation.by_context == pytest.approx(of_folder.evaluation.by_context, abs=1e-4)
        assert of_table.evaluation.documents == of_folder.evaluation.documents == 2
        assert [line["loss"] for line in of_table.metrics] == pytest.approx(losses, rel=1e-5)
        assert list(row["by_context"]) == ["1", "2", "4", "8", "16", "32", "64"]
        assert (there / "model" / "model.safetensors").is_file()
        assert not (there / "checkpoints").exists()

    # The same command again changes nothing, with the runs' folders and without.
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    command(tmp_path, "pair")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before

    # Runs are taken over by another experiment that has them.
    def one(scale):
        return pair(scale)[1:]

    define(one)
    command(tmp_path, "one")
    assert Store(results).tables["one"] == {"conformal_p2_c32_s0": stored["conformal_p2_c32_s0"]}

    # Other settings are another experiment.
    with pytest.raises(SystemExit):
        command(tmp_path, "pair", "--set", "learning_rate=1e-4")
    assert "has other settings: learning_rate 0.003 and 0.0001" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_stopped_goes_on_where_it_was(tmp_path):
    """The resumed run has the same losses as a run that was never stopped."""
    run = "conformal_p2_c256_s0"

    def start(name):
        # In processes of their own, of one thread each: what a process did before can change how products round.
        words = ["ablation", "--only", run, "--device", "cpu", *SET, "--set", "steps=60"]
        words += ["--set", "batch_tokens=256", "--out", tmp_path / name, "--results", tmp_path / name / "results"]
        return subprocess.Popen(
            [sys.executable, "-m", "experiments", *map(str, words)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.DEVNULL,
            cwd=ROOT,
        )

    process = start("stopped")
    metrics, end = tmp_path / "stopped" / run / "metrics.jsonl", time.monotonic() + PATIENCE
    while not metrics.is_file() or metrics.read_bytes().count(b"\n") < 3:
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    if process.wait(PATIENCE) != 0:  # else it was faster
        assert Store(tmp_path / "stopped" / "results").tables == {}
        assert 3 <= len(read_metrics(metrics)) < 60
        assert start("stopped").wait(PATIENCE) == 0
    assert start("whole").wait(PATIENCE) == 0
    losses = [
        [line["loss"] for line in read_metrics(tmp_path / name / run / "metrics.jsonl")]
        for name in ("stopped", "whole")
    ]
    assert losses[0] == losses[1]
    rows = [Store(tmp_path / name / "results").tables["ablation"][run].row for name in ("stopped", "whole")]
    same = ("final_loss", "heldout_loss", "by_context", "recall", "passkey")
    assert [rows[0][name] for name in same] == [rows[1][name] for name in same]
    assert rows[1]["recall"][0]["pairs"] == 4
    assert rows[1]["passkey"][0]["distance"] == 64


def test_a_run_that_diverges_is_a_result(scale, tmp_path):
    run, said = scale.run("gating", context=32, learning_rate=1e30), []
    (found,) = run.train(tmp_path, "cpu", "a command", said.append)
    assert (found.row["status"], found.row["final_loss"]) == ("diverged", None)
    assert "not finite" in found.row["problem"].lower()
    assert said == [f"{run.name}: diverged"]
    assert report_run(found).evaluation is None


def test_a_run_that_was_begun_with_other_settings_is_refused(scale, tmp_path):
    run = scale.run("gating", context=32)
    other = run.config.changed(learning_rate=0.5, vocab_size=300, save_every=7)
    (tmp_path / "config.yaml").write_text(other.to_yaml())
    with pytest.raises(ValueError, match=r"has a run with other settings: learning_rate 0.5 and 0.003. Choose another"):
        run.train(tmp_path, "cpu", "a command", print)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_what_another_process_trains_is_left_to_it(tmp_path, monkeypatch):
    """And what it has finished meanwhile is not trained again."""
    other, said, out = replace(TINY_RECALL, name="other"), [], tmp_path / "out"

    def train(works):
        return train_all("mine", works, tmp_path, out, "cpu", str, said.append)

    out.mkdir()
    with FileLock(out / "mine_tiny.lock"):
        assert train(lambda _: [TINY_RECALL, other])
    assert list(Store(tmp_path).tables["mine"]) == ["recall_other"]
    assert "tiny: another process is training it" in said
    finished = TINY_RECALL.train(tmp_path / "elsewhere", "cpu", "a command", said.append)
    monkeypatch.setattr(type(TINY_RECALL), "train", None)

    def finish(store):
        # After the results were read, and before the sweep is claimed.
        Store(tmp_path).add("mine", finished)
        return [TINY_RECALL, other]

    assert train(finish)
    assert list(Store(tmp_path).tables["mine"]) == ["recall_other", "recall_tiny"]


@pytest.mark.slow
def test_two_processes_share_an_experiment(tmp_path):
    """Each run or sweep is trained once, and all results are kept."""
    words = ["recall", "--results", tmp_path / "results", "--out", tmp_path / "out", "--device", "cpu"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "experiments", *map(str, words)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = "".join(process.communicate(timeout=PATIENCE)[1] for process in started)
    assert [process.returncode for process in started] == [0, 0]
    assert len(Store(tmp_path / "results").tables["recall"]) == 2
    assert said.count(" models in ") == 2


def test_results_that_are_added_at_the_same_time_are_all_kept(tmp_path):
    def add(first):
        store = Store(tmp_path)
        for number in range(first, first + 20):
            store.add("mine", [StoredResult({"run": str(number)}, {"loss": number})])

    threads = [threading.Thread(target=add, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stored = Store(tmp_path).tables["mine"]
    assert stored.keys() == {str(n) for n in (*range(20), *range(100, 120))}
    assert all(result.curves == {"loss": int(name)} for name, result in stored.items())


def test_a_run_of_another_table_counts_if_its_settings_are_the_same(scale, tmp_path):
    run = scale.run("gating", context=32, title="x")
    Store(tmp_path).add("other", [made_up(run)])
    assert Store(tmp_path).find("mine", run) == [made_up(run)]
    faster = scale.run("gating", context=32, title="x", learning_rate=0.5)
    assert Store(tmp_path).find("mine", faster) is None
    with pytest.raises(
        ValueError, match=rf"{run.name} in .*other.jsonl has other settings: learning_rate 0.003 and 0.5"
    ):
        Store(tmp_path).find("other", faster)


def test_tables_that_disagree_are_refused(scale, tmp_path):
    run = scale.run("gating", context=32)
    for table, loss in (("one", 2.5), ("another", 2.25)):
        Store(tmp_path).add(table, [made_up(run, loss)])
    with pytest.raises(ValueError, match=rf"another.jsonl and one.jsonl in .* have different results of {run.name}"):
        Store(tmp_path).rows()


def test_damaged_results_are_named(tmp_path):
    for second in ('{"run"', '{"name": "a run"}', "[]"):
        for ending in (".jsonl", ".curves.jsonl"):
            (tmp_path / f"mine{ending}").write_text('{"run": "a"}\n' + second + "\n")
        with pytest.raises(ValueError, match=r"mine.jsonl: line 2 is not a result"):
            Store(tmp_path)
    (tmp_path / "mine.jsonl").write_text('{"run": "a"}\n{"run": "b"}\n')
    (tmp_path / "mine.curves.jsonl").write_text('{"run": "a"}\n')
    with pytest.raises(ValueError, match=r"mine.jsonl has b, and mine.curves.jsonl has no curves of it"):
        Store(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 10**7}, r"an evaluation with length=10,000,000 needs a held-out document of 10,000,000 tokens"),
        ({"distances": (16, 10**7)}, r"distances must fit into .* 10,000,000 needs 10,000,0\d\d$"),
        ({"pairs": (2, 1_000)}, r"pairs must be at most \d+, the number of keys; got 1000"),
    ],
)
def test_an_evaluation_that_documents_have_too_little_for_is_refused_before_training(scale, tmp_path, changes, message):
    run = scale.run("gating", context=32, evaluation=replace(scale.evaluation, **changes))
    with pytest.raises(ValueError, match=message):
        run.train(tmp_path, "cpu", "a command", print)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_a_command_for_each_run_that_is_left(define, tmp_path, capsys):
    define(pair)
    laboratory.main(["pair", "--set", "data=a b", "--set", "steps=3", "--results", str(tmp_path), "--plan"])
    first, _ = capsys.readouterr().out.splitlines()
    words = ["pair", "--scale", "cpu", "--only", "gating_p2_c32_s0", "--results", str(tmp_path)]
    assert shlex.split(first) == ["python", "-m", "experiments", *words, "--set", 'data="a b"', "--set", "steps=3"]
    # Each command plans itself.
    laboratory.main([*shlex.split(first)[3:], "--plan"])
    assert capsys.readouterr().out.splitlines() == [first]
    laboratory.main(["figure1", "--scale", "paper", "--results", str(tmp_path), "--plan"])
    assert "torchrun --standalone --nproc-per-node 8 -m experiments figure1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "invalid choice: 'nothing'"),
        (("pair", "--only", "none*"), "--only must match some of gating_p2_c32_s0, conformal_p2_c32_s0"),
        (("pair", "--set", "nonsense"), "must be NAME=VALUE, got 'nonsense'"),
        (("pair", "--set", "speed=1"), "speed is a field of no section of a TrainConfig"),
        (("pair", "--set", "power=4"), "--set cannot change power: the experiment chooses it for gating_p2_c32_s0"),
        (("pair", "--scale", "paper"), "at scale paper torchrun trains one run at a time"),
    ],
)
def test_mistakes_are_named(define, tmp_path, capsys, arguments, message):
    define(pair)
    with pytest.raises(SystemExit) as error:
        laboratory.main([*arguments, "--results", str(tmp_path / "results")])
    assert error.value.code == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_a_name_experiments_are_listed(define, capsys):
    define(pair)
    laboratory.main([])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["pair", "Two", "runs."]


def test_the_committed_results_are_of_todays_experiments(capsys):
    """Six runs on text and the models of recall that rotate a part of the pairs have not been trained."""
    for name, left in (("figure1", 0), ("text_rotation", 6), ("recall", 12), ("tracking_longer", 0)):
        where = ["--results", str(ROOT / "experiments" / "results" / "small")]
        laboratory.main([name, "--scale", "small", *where, "--plan"])
        assert len(capsys.readouterr().out.splitlines()) == left


@pytest.mark.slow
def test_committed_results_are_drawn(tmp_path):
    pytest.importorskip("plotly")
    results = ROOT / "experiments" / "results" / "small"
    written = figures.draw(["learning_rate", "ablation"], results, tmp_path)
    assert {"index.html", "final_losses.csv", "training_curves_p2.png"} <= {path.name for path in written}
    assert "conformal_p2_c4096_s0" in (tmp_path / "index.html").read_text()
    with pytest.raises(ValueError, match="has no results of nothing"):
        figures.draw(["nothing"], results, tmp_path)


def test_the_library_does_without_the_laboratory():
    for path in (ROOT / "src").rglob("*.py"):
        assert not re.search(r"^\s*(from|import) experiments\b", path.read_text("utf-8"), re.MULTILINE), path


def test_condensed_metrics_keep_the_means():
    lines = [{"step": n, "loss": float(n), **({"rate": 2.0 * n} if n % 100 == 0 else {})} for n in range(1, 1_001)]
    found = condense(lines, points=100)
    assert [line["step"] for line in found] == list(range(10, 1_001, 10))
    last = [line["loss"] for line in found[-10:]]
    assert sum(last) / 10 == pytest.approx(sum(range(901, 1_001)) / 100)
    assert [line["rate"] for line in found if "rate" in line] == [200.0 * n for n in range(1, 11)]
    assert condense(lines[:7], points=100) == lines[:7]
