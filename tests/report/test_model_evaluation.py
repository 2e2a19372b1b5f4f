"""`sympow evaluate`: losses of exported models on held-out documents, as a table, JSON and a figure."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from support import assert_close
from sympow import GPT, GPTConfig
from sympow.cli.app import app
from sympow.data import load_tokenizer, open_dataset, prepare
from sympow.data.provenance import TrainedOn
from sympow.data.tokenizer import ByteTokenizer, train_bpe
from sympow.evaluate import document_sequences
from sympow.evaluate.evaluation_file import contexts_up_to
from sympow.model.storage import load_model, save_model

LENGTH = 48


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_model(folder / "first" / "model", "stdlib", context=64)
    make_model(folder / "second" / "model", "stdlib", mixer="softmax", context=64)
    return folder


def trained_on(data, **changes):
    folder = None if data == "stdlib" else str(Path(data).resolve())
    fingerprint = open_dataset(data).fingerprint
    made = {"context": 8, "short": "join", "tokenizer": "file", "fingerprint": fingerprint, "name": str(data)}
    return TrainedOn(**{"data": str(data), "folder": folder, **made, **changes})


def make_model(folder, data=None, mixer="sympow", **changes):
    """A run's model folder, with or without a record of what it was trained on."""
    config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2, mixer=mixer, rotary="scale")
    save_model(folder, config, GPT(config).state_dict())
    ByteTokenizer().save(folder)
    if data is not None:
        trained_on(data, **changes).save(folder)
    return folder


@pytest.fixture
def texts(tmp_path):
    """Prepared documents of about 90 tokens each."""
    (tmp_path / "texts").mkdir()
    for n in range(5):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"Text number {n} speaks of another thing. " * 2)
    prepare([tmp_path / "texts"], tmp_path / "data", workers=1)
    return tmp_path / "data"


def evaluate(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def evaluated(*arguments):
    result = evaluate(*arguments)
    assert result.exit_code == 0, result.output
    return result


def models_in(folder):
    return json.loads((folder / "evaluation.json").read_text())["models"]


def said(result):
    return " ".join(result.output.replace("│", " ").split())


def refusal(result):
    assert result.exit_code == 2, result.output
    return said(result)


def test_a_model_is_evaluated_on_what_it_was_trained_on(texts, tmp_path, monkeypatch):
    model = make_model(tmp_path / "run" / "model", texts, tokenizer="bytes")
    result = evaluated(model, "--out", tmp_path / "found", "--device", "cpu")
    assert f"evaluating on held-out documents of {texts}, 32 tokens (which are bytes) at a time" in said(result)
    content = json.loads((tmp_path / "found" / "evaluation.json").read_text())
    assert content["data"] == str(texts)
    # 86 tokens of one document in two sequences of four times the context.
    assert content["models"]["run"]["documents"] == 2
    assert content["models"]["run"]["trained_at"] == 8
    heldout = open_dataset(texts, "heldout")
    inputs = torch.tensor([[256, *heldout.read(0, 0, 31).tolist()]])
    logits, _ = load_model(model)(inputs)
    targets = torch.from_numpy(heldout.read(0, 0, 32).astype("int64"))
    evaluated(model, "--out", tmp_path / "alone", "--device", "cpu", "--documents", 1)
    found = models_in(tmp_path / "alone")["run"]["mean"]
    expected = cross_entropy(logits[0], targets, reduction="none").detach()
    torch.testing.assert_close(torch.tensor(found), expected, rtol=0, atol=2e-5)


def test_a_copied_model_knows_its_data_from_anywhere(texts, tmp_path, monkeypatch):
    monkeypatch.chdir(texts.parent)
    model = make_model(tmp_path / "run" / "model", "data")
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copied)
    assert "of data, 32 tokens" in said(evaluate(model, "--device", "cpu"))
    (tmp_path / "other" / "data").mkdir(parents=True)  # a folder of the same name that is another
    monkeypatch.chdir(tmp_path / "other")
    assert f"of {texts}, 32 tokens" in said(evaluated(copied, "--device", "cpu"))
    # Run and data have moved together.
    (tmp_path / "project").mkdir()
    texts.rename(tmp_path / "project" / "data")
    monkeypatch.chdir(tmp_path / "project")
    assert "of data, 32 tokens" in said(evaluated(copied, "--device", "cpu"))


def test_data_that_is_unknown_gone_or_different_is_to_be_named(runs, texts, tmp_path):
    assert f"checkpoints must be model folders, and {tmp_path / 'gone'} is not there" in said(
        evaluate(tmp_path / "gone")
    )
    unknown = make_model(tmp_path / "unknown")
    assert "does not say what it was trained on; name the data with --data" in said(evaluate(unknown))
    assert evaluate(unknown, "--data", texts, "--length", 8, "--device", "cpu").exit_code == 0
    moved = make_model(tmp_path / "moved" / "model", texts)
    texts.rename(tmp_path / "there")
    message = refusal(evaluate(moved))
    assert f"trained on {texts}, and {texts} is not there any more; name the data with --data" in message
    assert evaluate(moved, "--data", tmp_path / "there", "--device", "cpu").exit_code == 0
    here = make_model(tmp_path / "here" / "model", tmp_path / "there")
    message = refusal(evaluate(runs / "first" / "model", here))
    assert "trained on different data" in message
    assert "name what to compare them on with --data" in message
    given = make_model(tmp_path / "given" / "model")
    TrainedOn(None, None, 8, "join", "file", "random", "random tokens").save(given)
    assert "trained on random tokens, a dataset object that cannot be opened" in said(evaluate(given))


def test_data_prepared_again_otherwise_is_mentioned(texts, tmp_path):
    fingerprint = open_dataset(texts).fingerprint
    model = make_model(tmp_path / "run" / "model", texts, fingerprint=fingerprint)
    assert "has changed" not in said(evaluate(model, "--device", "cpu"))
    prepare([tmp_path / "texts"], texts, heldout=0.5, overwrite=True, workers=1)
    assert f"{texts} has changed since the training" in said(evaluated(model, "--device", "cpu"))


def test_documents_shorter_than_wanted_are_read_to_the_end_of_the_longest(texts, tmp_path):
    model = make_model(tmp_path / "run" / "model", texts, context=1_000)
    result = evaluated(model, "--device", "cpu", "--out", tmp_path / "found")
    length = int(open_dataset(texts, "heldout").lengths.max())
    assert f"no held-out document has 4,000 tokens, 4 times the training context: reading {length}" in said(result)
    found = models_in(tmp_path / "found")["run"]
    assert len(found["mean"]) == length


def test_it_says_how_many_sequences_of_how_many_documents_there_are(texts, tmp_path):
    prepare([tmp_path / "texts"], texts, heldout=0.5, overwrite=True, workers=1)
    lengths = open_dataset(texts, "heldout").lengths
    sequences = int((lengths // 32).sum())
    assert 3 == len(lengths) < sequences < 16
    model = make_model(tmp_path / "run" / "model", texts)
    result = evaluate(model, "--device", "cpu")
    assert f"at a time: {sequences} sequences of 3 documents" in said(result)
    assert f"nats per byte, over {sequences} sequences of 3 documents" in said(result)
    note = f"only {sequences} sequences of 32 tokens, fewer than the 16 of --documents; a smaller --length finds more"
    assert note in " ".join(result.stderr.split())
    result = evaluate(model, "--documents", 1, "--device", "cpu")
    assert "over 1 sequence of 1 document " in said(result)
    assert "only" not in said(result)


def test_data_that_holds_nothing_out_says_how_to(texts, tmp_path):
    prepare([tmp_path / "texts"], texts, heldout=0, overwrite=True, workers=1)
    message = refusal(evaluate(make_model(tmp_path / "run" / "model", texts)))
    assert "has no split 'heldout': prepare it again with some held out (--heldout, --overwrite)" in message


def test_data_of_another_vocabulary_is_refused(texts, tmp_path):
    config = GPTConfig(vocab_size=100, layers=1, width=16, heads=2)
    save_model(tmp_path / "small", config, GPT(config).state_dict())
    message = refusal(evaluate(tmp_path / "small", "--data", texts, "--length", 8, "--device", "cpu"))
    assert "has a vocabulary of 257 tokens, more than the 100 of" in message


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    """A model with a byte-pair encoding, prepared texts in its tokens, and the texts."""
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "texts").mkdir()
    for n in range(5):
        (folder / "texts" / f"{n}.txt").write_text(f"Text number {n} speaks of another thing. " * 4)
    tokenizer = train_bpe(["Text number speaks of another thing. " * 4], 280)
    config = GPTConfig(vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2)
    save_model(folder / "model", config, GPT(config).state_dict())
    tokenizer.save(folder / "model")
    prepare([folder / "texts"], folder / "data", tokenizer=str(folder / "model"), workers=1)
    return folder


def evaluate_on(data, *models):
    return evaluate(*models, "--data", data, "--length", 8, "--documents", 1, "--device", "cpu")


def test_data_of_the_models_tokenizer_is_accepted_under_every_name(bpe, tmp_path):
    file = tmp_path / "other-name.json"
    # As another program writes it: the order of entries and the indentation differ.
    content = json.loads((bpe / "model" / "tokenizer.json").read_text())
    file.write_text(json.dumps(dict(reversed(content.items())), indent=3))
    prepare([bpe / "texts"], tmp_path / "data", tokenizer=str(file), workers=1)
    assert open_dataset(tmp_path / "data").load_tokenizer().kind == "file"
    for data in (bpe / "data", tmp_path / "data"):
        assert evaluate_on(data, bpe / "model").exit_code == 0


def test_data_of_another_tokenizer_is_refused_before_any_model_is_loaded(bpe, texts, tmp_path, monkeypatch):
    """Bytes have fewer ids than the model, and another encoding of the same size has as many."""
    other = train_bpe(["Wholly different merges come from words like these! " * 9], 280)
    assert other.vocab_size == load_tokenizer(bpe / "model").vocab_size
    other.save(tmp_path / "other")
    prepare([bpe / "texts"], tmp_path / "again", tokenizer=str(tmp_path / "other"), workers=1)
    monkeypatch.setattr("sympow.evaluate.model_evaluation.load_model", None)
    bytes_model = make_model(tmp_path / "bytes")
    for data, models in ((texts, [bytes_model, bpe / "model"]), ("stdlib", [bpe / "model"]),
                         (tmp_path / "again", [bpe / "model"])):  # fmt: skip
        message = refusal(evaluate_on(data, *models))
        assert f"--data must be tokenized by the tokenizer of {bpe / 'model'}, and {data} is not" in message
        advice = f"Prepare it with the model's tokenizer: sympow data prepare … --tokenizer {bpe / 'model'}"
        assert advice in message


def test_data_with_another_token_between_documents_is_refused(bpe, tmp_path):
    content = json.loads((bpe / "model" / "tokenizer.json").read_text())
    (boundary,) = content["added_tokens"]
    first_free = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"].append({**boundary, "id": first_free, "content": "</s>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    for name, token in (("model", "<|endoftext|>"), ("data", "</s>")):
        how = {"tokenizer": str(tmp_path / "tokenizer.json"), "boundary_token": token, "workers": 1}
        prepare([bpe / "texts"], tmp_path / name, **how)
    config = GPTConfig(vocab_size=first_free + 1, layers=1, width=16, heads=2)
    save_model(tmp_path / "model", config, GPT(config).state_dict())
    assert evaluate_on(tmp_path / "model", tmp_path / "model").exit_code == 0
    message = refusal(evaluate_on(tmp_path / "data", tmp_path / "model"))
    assert f"between documents, id {boundary['id']}; {tmp_path / 'data'} has id {first_free}" in message


def test_without_a_tokenizer_there_is_nothing_to_compare(bpe, tmp_path):
    model, data = tmp_path / "model", tmp_path / "data"
    shutil.copytree(bpe / "model", model)
    shutil.copytree(bpe / "data", data)
    (data / "sympow_tokenizer.json").unlink()
    assert evaluate_on(data, model).exit_code == 0
    (model / "sympow_tokenizer.json").unlink()
    assert evaluate_on("stdlib", model).exit_code == 0
    message = refusal(evaluate(model, "--data", "stdlib", "--length", 8, "--probe", "passkey"))
    assert f"the probe passkey needs the model's tokenizer, and {model} has none" in message


@pytest.fixture(scope="module")
def converted(bpe):
    """The model in Hugging Face format."""
    pytest.importorskip("transformers", reason="needs transformers, which comes with the extra hf")
    from sympow.hf.model.conversion import convert_to_transformers

    convert_to_transformers(bpe / "model", bpe / "converted")
    return bpe / "converted"


def test_a_model_of_transformers_is_evaluated_on_data_of_its_own_tokenizer(bpe, converted, texts, tmp_path):
    prepare([bpe / "texts"], tmp_path / "again", tokenizer=str(converted / "tokenizer.json"), workers=1)
    for data in (bpe / "data", tmp_path / "again"):
        assert evaluate_on(data, converted).exit_code == 0
    message = refusal(evaluate_on(texts, converted))
    assert f"--data must be tokenized by the tokenizer of {converted}, and {texts} is not" in message
    assert f"--tokenizer {converted / 'tokenizer.json'}" in message


def test_bytes_of_transformers_are_bytes(texts, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers, which comes with the extra hf")
    from sympow.hf.model.conversion import convert_to_transformers

    convert_to_transformers(make_model(tmp_path / "native"), tmp_path / "converted")
    prepare([tmp_path / "texts"], tmp_path / "again", tokenizer=str(tmp_path / "converted/tokenizer.json"), workers=1)
    for data in (texts, tmp_path / "again", "stdlib"):
        assert evaluate_on(data, tmp_path / "converted", tmp_path / "native").exit_code == 0


def test_a_model_of_transformers_without_a_tokenizer_is_evaluated_without_the_probe_of_text(bpe, converted, tmp_path):
    model = tmp_path / "converted"
    shutil.copytree(converted, model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    assert evaluate_on(bpe / "data", model).exit_code == 0
    message = refusal(evaluate(model, "--data", "stdlib", "--length", 8, "--probe", "passkey"))
    assert "the probe passkey needs the model's tokenizer" in message


def test_progress_is_shown_in_lines_without_a_terminal(runs, monkeypatch):
    models = [runs / "first" / "model", runs / "second" / "model"]
    options = ("--length", LENGTH, "--documents", 3, "--device", "cpu")
    # The last line always comes.
    assert evaluate(*models, *options).stderr.splitlines() == [f"{model}: 3 of 3 sequences" for model in models]
    monkeypatch.setattr("sympow.evaluate.model_evaluation.LINE_EVERY", 0)
    lines = evaluate(models[0], *options, "--probe", "recall", "--pairs", 2).stderr.splitlines()
    assert [re.sub(r"[0-9,]+ s left", "N s left", line) for line in lines] == [
        f"{models[0]}: 1 of 3 sequences, N s left",
        f"{models[0]}: 2 of 3 sequences, N s left",
        f"{models[0]}: 3 of 3 sequences",
        f"{models[0]}: probing recall",
    ]


def test_models_are_compared_on_the_same_documents(runs, tmp_path):
    result = evaluated(
        runs / "first" / "model",
        runs / "second" / "model",
        "--length",
        LENGTH,
        "--documents",
        2,
        "--out",
        tmp_path,
        "--device",
        "cpu",
    )
    assert "first" in result.stdout
    assert "second" in result.stdout
    # Without a terminal there is neither a progress bar nor the blank lines in its place.
    assert "" not in result.stderr.splitlines()
    # These models read bytes.
    assert "Average loss within a context (bytes), nats per byte" in " ".join(result.stdout.split())
    content = json.loads((tmp_path / "evaluation.json").read_text())
    assert (tmp_path / "loss_by_position.png").stat().st_size > 0
    assert content["models"].keys() == {"first", "second"}
    for found in content["models"].values():
        assert found["documents"] == 2
        assert len(found["mean"]) == LENGTH
        assert found["by_context"][str(LENGTH)] == pytest.approx(sum(found["mean"]) / LENGTH, abs=1e-4)


def test_the_losses_are_those_of_the_model(runs, tmp_path):
    evaluate(runs / "first" / "model", "--length", LENGTH, "--documents", 1, "--out", tmp_path, "--device", "cpu")
    found = models_in(tmp_path)["first"]["mean"]
    ((inputs, targets),) = document_sequences(open_dataset("stdlib", "heldout"), LENGTH, 1)
    logits, _ = load_model(runs / "first" / "model")(inputs)
    expected = cross_entropy(logits[0], targets[0], reduction="none").detach()
    assert_close(found, expected, 2e-5, "losses")


def test_contexts_grow_to_the_length():
    assert contexts_up_to(48) == [1, 4, 16, 48]
    assert contexts_up_to(64) == [1, 4, 16, 64]
    assert contexts_up_to(12, 2) == [1, 2, 4, 8, 12]
    assert contexts_up_to(1) == [1]


def test_probes_are_part_of_an_evaluation(runs, tmp_path):
    probes = ("--probe", "recall", "--pairs", 2, "--pairs", 4, "--probe", "passkey", "--distance", 40)
    short = ("--length", LENGTH, "--documents", 1, "--device", "cpu")
    result = evaluated(runs / "first" / "model", *short, *probes, "--out", tmp_path)
    found = models_in(tmp_path)["first"]
    assert {point["pairs"] for point in found["recall"]} == {2, 4}
    assert [point["distance"] for point in found["passkey"]] == [40]
    # An untrained model can only guess.
    assert all(point["loss"] == pytest.approx(5.5, abs=0.5) for point in found["recall"])
    assert (tmp_path / "probes.png").stat().st_size > 0
    assert (tmp_path / "loss_by_context.png").stat().st_size > 0
    assert "Associative recall" in result.stdout
    assert "Passkey" in result.stdout


def test_passkeys_are_by_default_as_far_as_documents_are_long(texts, tmp_path):
    (tmp_path / "texts" / "long.txt").write_text("A longer text about a thing. " * 20)
    prepare([tmp_path / "texts"], texts, heldout=0.99, overwrite=True, workers=1)
    model = make_model(tmp_path / "run" / "model", texts)
    evaluated(model, "--probe", "passkey", "--out", tmp_path / "found", "--device", "cpu")
    found = models_in(tmp_path / "found")["run"]
    assert [point["distance"] for point in found["passkey"]] == [64, 256]


def test_documents_too_short_for_any_passkey_are_refused_before_a_model_is_loaded(texts, tmp_path, monkeypatch):
    monkeypatch.setattr("sympow.evaluate.model_evaluation.load_model", None)
    message = refusal(evaluate(make_model(tmp_path / "run" / "model", texts), "--probe", "passkey"))
    longest = open_dataset(texts, "heldout").lengths.max()
    assert f"the longest of which has {longest} tokens; a distance of 64 needs 129" in message


def test_the_length_is_four_times_the_training_context(tmp_path):
    model = make_model(tmp_path / "first" / "model", "stdlib", context=8)
    evaluate(model, "--documents", 1, "--device", "cpu", "--out", tmp_path)
    found = models_in(tmp_path)["first"]
    assert found["trained_at"] == 8
    assert list(found["by_context"]) == ["1", "2", "4", "8", "16", "32"]


def test_runs_of_one_name_are_told_apart(runs):
    message = refusal(evaluate(runs / "first" / "model", runs / "first" / "model"))
    assert "runs with different names, got first, first" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--probe", "recall", "--pairs", 1_000), "--pairs must be at most "),
        (("--probe", "passkey", "--distance", 64, "--distance", 10**7), "--distance must fit into a document of "),
        (
            ("--probe", "passkey", "--data", "mqar:pairs=4", "--length", 8),
            "the probe passkey needs documents of text; mqar has none",
        ),
        (("--length", 0), "length must be at least 1, got 0"),
        (("--documents", 0), "documents must be at least 1, got 0"),
        (("--length", 10**9), "got 1,000,000,000"),
        (("--data", "nowhere", "--length", 8), "Error: --data must be"),
        (("--probe", "sight"), "probe must be one of 'recall', 'passkey'; got 'sight'"),
        (("--probe", "recall", "--pairs", 0, "--length", 8), "pairs must be numbers of at least 1, got (0,)"),
        (("--pairs", 4), "--pairs must be given with the probe recall, got (4,) without it"),
        (
            ("--distance", 64, "--probe", "recall"),
            "--distance must be given with the probe passkey, got (64,) without it",
        ),
    ],
)
def test_mistakes_are_named_before_a_model_is_loaded(runs, monkeypatch, arguments, message):
    monkeypatch.setattr("sympow.evaluate.model_evaluation.load_model", None)
    assert message in refusal(evaluate(runs / "first" / "model", *arguments))
