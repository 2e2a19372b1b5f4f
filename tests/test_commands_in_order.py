"""The README's commands in order, from text to a report, on very few books."""

import json

import pytest
from typer.testing import CliRunner

from sympow.cli.app import app

SENTENCES = ("The king had three daughters. ", "The youngest went into the wood! ", "Nobody knew the way back, ")
# A tiny model and run; held-out text is shorter than four times the context, or than the context.
SMALL = ("--layers", 1, "--width", 16, "--heads", 2, "--steps", 2, "--batch-tokens", 512, "--no-tensorboard")


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("books", "heldout"), [(1, "1 document, 193 tokens"), (3, "1 document, 9,")])
def test_books_are_prepared_trained_on_evaluated_and_reported(tmp_path, monkeypatch, books, heldout):
    pytest.importorskip("plotly", reason="needs plotly, which comes with the extra report")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "books").mkdir()
    for n in range(books):
        text = "".join(SENTENCES[(n + m * m) % 3] for m in range(300))
        (tmp_path / "books" / f"{n}.txt").write_text(text)
    prepared = run("data", "prepare", *sorted((tmp_path / "books").iterdir()), "--out", "data/books", "--workers", 1)
    assert f"heldout: {heldout}" in prepared.stdout
    assert ("the end of the only document is held out" in prepared.stdout) == (books == 1)
    kind = ("--power", 2, "--gating", "scalar", "--rotary", "scale")
    device = ("--device", "cpu")
    run("train", "--data", "data/books", "--context", 256, *kind, *SMALL, "--out", "runs/first", *device)
    metrics = (tmp_path / "runs/first/metrics.jsonl").read_text()
    run("train", "--resume", "--out", "runs/first", *device)
    assert (tmp_path / "runs/first/metrics.jsonl").read_text() == metrics, "resuming a finished run changes nothing"
    if books == 1:
        flags = [*kind, *SMALL, *device, "--evaluate-every", 1, "--context", 256, "--data", "data/books"]
        result = CliRunner().invoke(app, ["train", *map(str, flags)])
        assert result.exit_code == 2
        assert "--evaluate-every needs more held-out text: data/books (heldout) has 193 tokens (" in result.output
    written = run("generate", "runs/first/model", "--prompt", "Once upon a time", "--tokens", 5, *device)
    assert written.stdout.startswith("Once upon a time")
    evaluated = run("evaluate", "runs/first/model", "--out", "evaluation", *device)
    assert "evaluating on held-out documents of data/books" in evaluated.stdout
    assert json.loads((tmp_path / "evaluation/evaluation.json").read_text())["data"] == "data/books"
    run("report", "runs/", "-o", "report", *device)
    assert "half_life" in json.loads((tmp_path / "runs/first/heads.json").read_text())["quantities"]
    assert "were not measured" not in (tmp_path / "report/index.html").read_text("utf-8")
    assert list((tmp_path / "report/figures/heads").iterdir())
    # From another working directory: the model's folder records where its data is.
    (tmp_path / "runs/first/heads.json").unlink()
    monkeypatch.chdir(tmp_path / "books")
    run("report", "../runs/", "-o", "../again", *device)
    assert (tmp_path / "runs/first/heads.json").is_file()
    monkeypatch.chdir(tmp_path)
    run("inspect", "runs/first/model", "books/0.txt", "-o", "book.html", *device)
    assert "0.txt, as runs/first/model reads it" in (tmp_path / "book.html").read_text("utf-8")
