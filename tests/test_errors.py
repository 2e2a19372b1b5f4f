"""Messages and exit codes of commands that fail."""

import json
import pickle

import pytest
import torch
from typer.testing import CliRunner

from sympow import GPT, GPTConfig
from sympow.cli.app import app
from sympow.cli.errors import BUG, in_flags
from sympow.data.tokenizer import ByteTokenizer
from sympow.errors import ArgumentError, ArgumentTypeError, UserError
from sympow.model.storage import save_model
from sympow.train.loop import NonFiniteLossError

runner = CliRunner()


def fail_with(monkeypatch, error):
    """Makes `sympow info` raise the exception while it runs."""

    def fail(*arguments):
        raise error

    monkeypatch.setattr("sympow.report.model_info.model_info", fail)
    return runner.invoke(app, ["info"], prog_name="sympow")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            OSError(28, "No space left on device", "out.json"),
            1,
            "sympow info: error: out.json: No space left on device",
        ),
        (MemoryError("too much"), 1, "sympow info: error: too much"),
        (MemoryError(), 1, "sympow info: error: MemoryError"),
        (
            torch.OutOfMemoryError("CUDA is full.\nAnd more"),
            1,
            "sympow info: error: CUDA is full.",
        ),
        (ModuleNotFoundError("x is not installed", name="x"), 1, "sympow info: error: x is not installed"),
        (NonFiniteLossError("step 3: the loss is nan"), 1, "stopped: step 3: the loss is nan"),
        (KeyboardInterrupt(), 130, "sympow info: interrupted"),
    ],
)
def test_a_failure_is_one_line_with_its_exit_code(monkeypatch, error, code, said):
    result = fail_with(monkeypatch, error)
    assert result.exit_code == code
    # One line without the usage, since the arguments were correct.
    assert result.stderr == f"{said}\n"


def test_a_mistake_comes_with_where_to_find_help():
    result = runner.invoke(app, ["info", "--layers", "0"], prog_name="sympow")
    assert result.exit_code == 2
    usage, hint, _, said = result.stderr.splitlines()
    assert usage.startswith("Usage: sympow info ")
    assert hint == "Try 'sympow info --help' for help."
    assert said == "Error: --layers must be at least 1, got 0"


@pytest.mark.parametrize(
    "command",
    [
        "generate nothere --prompt a",
        "generate model --file nothere",
        "generate model --prompt a --state nothere",
        "state nothere text.txt --out state",
        "state model nothere --out state",
        "state model text.txt --out state --after nothere",
        "serve nothere",
        "serve model --api-key-file nothere",
        "evaluate nothere --data stdlib",
        "evaluate model --data nothere --length 8",
        "report nothere --out page",
        "inspect nothere text.txt",
        "inspect model nothere",
        "info nothere",
        "data prepare nothere --out data",
        "data prepare text.txt --out data --tokenizer nothere",
        "data prepare text.txt --out data --heldout-source nothere",
        "data info nothere",
        "train --config nothere",
        "train --data nothere --out run",
    ],
)
def test_a_file_that_is_not_there_is_a_mistake_in_the_arguments(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    config = GPTConfig(vocab_size=257, layers=1, width=16, heads=2)
    save_model(tmp_path / "model", config, GPT(config).state_dict())
    ByteTokenizer().save(tmp_path / "model")
    (tmp_path / "text.txt").write_text("text")
    result = runner.invoke(app, command.split(), prog_name="sympow")
    assert result.exit_code == 2, result.output
    assert "nothere" in result.stderr.splitlines()[-1]


def test_help_says_what_exit_codes_mean():
    said = " ".join(runner.invoke(app, ["--help"]).stdout.split())
    assert (
        "0 if the work is done, 1 if it failed, 2 if the arguments are wrong, such as a file that is not there" in said
    )


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shapes"), TypeError("f() takes 1 argument"), ModuleNotFoundError("gone", name="sympow.gone")],
)
def test_a_bug_keeps_its_traceback(monkeypatch, error):
    result = fail_with(monkeypatch, error)
    assert result.exception is error
    assert error.__notes__ == [BUG]


def test_a_value_error_of_a_library_is_no_mistake_of_the_user(monkeypatch):
    def fail(*arguments):
        json.loads("{")

    monkeypatch.setattr("sympow.report.model_info.model_info", fail)
    result = runner.invoke(app, ["info"])
    assert isinstance(result.exception, json.JSONDecodeError)
    assert BUG in result.exception.__notes__


def test_only_the_first_process_of_a_machine_explains_a_mistake(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    result = runner.invoke(app, ["info", "--power", "3"])
    assert (result.exit_code, result.output) == (2, "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "--power must be even" in runner.invoke(app, ["info", "--power", "3"]).output


def test_every_process_says_what_happened_to_itself(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "9")
    result = fail_with(monkeypatch, OSError(5, "Input/output error", "shard"))
    assert result.stderr == "sympow info (process 9): error: shard: Input/output error\n"


class Option:
    def __init__(self, *opts, multiple=False):
        self.opts, self.multiple = opts, multiple


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            ArgumentError("batch_tokens", "must be a multiple of the context"),
            "--batch-tokens must be a multiple of the context",
        ),
        (ArgumentTypeError("context", "must be an int, got str"), "--context must be an int, got str"),
        (ArgumentError("contexts", "must divide 64; got 100"), "--context must divide 64; got 100"),
        (ArgumentError("powers", "must be even"), "powers must be even"),
        (ArgumentError("source", "must be 'stdlib'"), "--data must be 'stdlib'"),
        (ArgumentError("other_name", "must be 1"), "other_name must be 1"),
        (ArgumentError("cache_policy", "='keys' is not possible here"), "--cache='keys' is not possible here"),
        (UserError("power of the file must be 2"), "power of the file must be 2"),
    ],
)
def test_messages_name_flags(error, expected):
    options = [Option("--batch-tokens"), Option("--context", multiple=True), Option("--data"), Option("--power")]
    assert in_flags(error, [*options, Option("--cache"), Option("preset")]) == expected


def test_an_argument_error_says_the_same_in_another_process():
    error = pickle.loads(pickle.dumps(ArgumentTypeError("power", "must be an int, got str")))
    assert (type(error), error.name, str(error)) == (ArgumentTypeError, "power", "power must be an int, got str")
