"""Messages and exit codes of commands that fail."""

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from sympow import GPT, GPTConfig, __version__
from sympow.cli.app import app
from sympow.cli.common import in_flags
from sympow.cli.errors import BUG
from sympow.data.tokenizer import ByteTokenizer
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
    ("message", "expected"),
    [
        ("batch_tokens must be a multiple of the context", "--batch-tokens must be a multiple of the context"),
        ("context must be at least 1", "--context must be at least 1"),
        ("contexts must divide 64; got 100", "--context must divide 64; got 100"),
        ("source must be 'stdlib'", "--data must be 'stdlib'"),
        ("power is for mixer='sympow'", "--power is for --mixer='sympow'"),
        ("there is a power in it; batch_tokens says which", "there is a power in it; --batch-tokens says which"),
        ("runs/x/config.yaml: batch_tokens must be at least 1", "runs/x/config.yaml: batch_tokens must be at least 1"),
        ("other_name must be 1", "other_name must be 1"),
        ("cache_policy='keys' is not possible here", "--cache='keys' is not possible here"),
    ],
)
def test_messages_name_flags(message, expected):
    options = [Option("--batch-tokens"), Option("--context", multiple=True), Option("--data"), Option("--power")]
    assert in_flags(message, [*options, Option("--mixer"), Option("--cache"), Option("preset")]) == expected


@pytest.fixture
def run_without_torch(tmp_path):
    """Runs `python -m ...` where importing torch is interrupted."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise KeyboardInterrupt")

    def run(*arguments):
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        code += f"import runpy; sys.argv = {['sympow', *arguments[1:]]!r}\n"
        code += f"runpy.run_module({arguments[0]!r}, run_name='__main__', alter_sys=True)"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)

    return run


@pytest.mark.parametrize(
    ("arguments", "command"),
    [(("sympow", "info"), " info"), (("sympow", "train"), " train"), (("sympow.train",), "sympow.train")],
)
def test_ctrl_c_during_imports_is_one_line(run_without_torch, arguments, command):
    result = run_without_torch(*arguments)
    assert (result.returncode, result.stdout) == (130, "")
    assert result.stderr.endswith(f"{command}: interrupted\n")
    assert result.stderr.count("\n") == 1


def test_help_and_wrong_flags_do_not_wait_for_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('torch is imported', name='torch')")
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from typer.main import get_command
from typer.testing import CliRunner
from sympow.cli.app import app

def commands(command, path=()):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))

tried = [" ".join(words) for words in commands(get_command(app))]
assert {"", "train", "data", "data prepare"} < set(tried), tried
for words in tried:
    for flag, code in (("--help", 0), ("--no-such-flag", 2)):
        result = CliRunner().invoke(app, [*words.split(), flag])
        assert result.exit_code == code, (words, flag, result.output)
        assert "Usage: " in result.output, (words, flag, result.output)
for mistake in (["--lr", "1e-3"], ["--power", "two"]):
    assert CliRunner().invoke(app, ["train", *mistake]).exit_code == 2, mistake
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr


def test_the_version_does_not_wait_for_torch(run_without_torch):
    result = run_without_torch("sympow", "--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"sympow {__version__}\n", "")
    assert runner.invoke(app, ["--version"]).output == result.stdout


def test_python_m_sympow_is_the_command(tmp_path):
    command = [sys.executable, "-m", "sympow", "info", "byte-400k", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["config"]["layers"] == 2
