"""Every earlier name still works: it warns once with the new name, and is the new object."""

import pkgutil
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch

import sympow
from sympow import deprecated
from sympow.deprecated import accepts_old_arguments
from sympow.generation.decoder import Decoder
from sympow.generation.prefix import Prefix
from sympow.generation.sampling import Sampling, generate
from sympow.generation.text import TextModel
from sympow.ops.dispatch import triton_available

NAMES = [(module, old, new) for module, names in deprecated.NAMES.items() for old, new in names.items()]
ATTRIBUTES = [(owner, old, new) for owner, names in deprecated.ATTRIBUTES.items() for old, new in names.items()]


def caught(action):
    """The result of an action, and its only warning."""
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = action()
    (warning,) = given
    assert warning.category is DeprecationWarning
    # The warning points at the line that uses the earlier name.
    assert warning.filename == __file__
    return result, str(warning.message)


@pytest.mark.slow
def test_modules_are_found_by_their_earlier_names():
    """In a process that has not imported them yet: an import warns once."""
    modules = {old: new for old, new in deprecated.MODULES.items() if triton_available() or ".kernels." not in new}
    code = f"""
import sys, warnings
from importlib import import_module
for old, new in {modules!r}.items():
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        exec(f"import {{old}}")
        exec(f"import {{old}} as again")
    present = import_module(new)
    assert sys.modules[old] is again is present, again
    assert present.__name__ == present.__spec__.name == new
    print(*(f"{{w.filename}} {{w.category.__name__}} {{w.message}}" for w in given))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=300, capture_output=True, text=True)
    said = [f"<string> DeprecationWarning {old} is deprecated; use {new}" for old, new in modules.items()]
    assert done.stdout.splitlines() == said


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_name_that_version_0_1_documented_is_found():
    """public_names.txt lists what README, CHANGELOG, docs and experiment files of that version named."""
    names = (Path(__file__).parent / "fixtures" / "version_0_1" / "public_names.txt").read_text("utf-8").split()
    assert len(names) > 50
    for name in names:
        if ".kernels." in name and not triton_available():
            continue
        assert pkgutil.resolve_name(name) is not None


@pytest.mark.parametrize(("module", "old", "new"), NAMES)
def test_a_name_is_found_by_its_earlier_one(module, old, new):
    present = import_module(module)
    found, message = caught(lambda: getattr(present, old))
    assert found is getattr(present, new)
    assert message == f"{module}.{old} is deprecated; use {module}.{new}"


@pytest.mark.parametrize(("owner", "old", "new"), ATTRIBUTES)
def test_an_attribute_is_found_by_its_earlier_name(owner, old, new):
    module, _, name = owner.rpartition(".")
    if ".hf" in module:
        pytest.importorskip("transformers")
    instance = INSTANCES[name]()
    found, message = caught(lambda: getattr(instance, old))
    assert found == getattr(instance, new)
    assert message == f"{name}.{old} is deprecated; use {name}.{new}"


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return sympow.GPT(sympow.GPTConfig(vocab_size=11, layers=1, width=8, heads=1)).eval()


def make_prefix():
    return Prefix(torch.zeros(1, 11), (), 0)


def make_text_model():
    return TextModel(None, None)


def make_cache():
    return import_module("sympow.hf").SympowCache("keys")


def make_window():
    return sympow.Window.empty(1, 1, 4, 4, 2, rotated=False)


INSTANCES = {"Prefix": make_prefix, "SympowCache": make_cache, "TextModel": make_text_model, "Window": make_window}


def test_an_unknown_name_is_missing():
    for module in deprecated.NAMES:
        with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
            import_module(module).nothing  # noqa: B018


def test_version_0_1_as_it_was_documented(model):
    """The lines of its docs/generation.md, in one program."""
    tokens = torch.tensor([[1, 2, 3, 4]])
    expected = Prefix.prefill(model, tokens, segment_size=3, cache_policy="state")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reading_module, decoding, generating = map(
            import_module, ("sympow.reading", "sympow.decoding", "sympow.generate")
        )
    with pytest.warns(DeprecationWarning, match=r"prefix\.Reading is deprecated; use .*prefix\.Prefix$"):
        old_class = reading_module.Reading
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        reading = old_class.start(model, tokens[:, :2], piece=3, memory="state")
        reading = reading.more(model, tokens[:, 2:], piece=3, memory="state")
    assert sorted({str(w.message).partition(" is ")[0] for w in given}) == [
        "Prefix.more",
        "Prefix.start",
        "the argument memory of Prefix.extend",
        "the argument memory of Prefix.prefill",
        "the argument piece of Prefix.extend",
        "the argument piece of Prefix.prefill",
    ]
    torch.testing.assert_close(reading.logits, expected.logits)
    with pytest.warns(DeprecationWarning, match="the argument memory of Decoder.__init__ is deprecated"):
        decoding.Decoder(model, reading, memory="state")
    greedy = Sampling(temperature=0)
    with pytest.warns(DeprecationWarning, match="the argument reading of generate is deprecated; use prefix"):
        found = list(generating.generate(model, 3, greedy, reading=reading))
    assert torch.equal(torch.stack(found), torch.stack(list(generate(model, 3, greedy, prefix=expected))))
    assert decoding.Decoder is Decoder


def test_an_argument_cannot_have_both_names(model):
    with pytest.raises(TypeError, match=r"Prefix\.prefill got both segment_size and piece, its deprecated name"):
        Prefix.prefill(model, torch.ones(1, 1, dtype=torch.int64), piece=3, segment_size=3)


def test_an_argument_warns_where_it_is_passed():
    @accepts_old_arguments
    def function(x, *, segment_size=1, cache_policy="auto"):
        """What it does."""
        return x, segment_size, cache_policy

    result, message = caught(lambda: function(1, piece=2))
    assert result == (1, 2, "auto")
    assert message.startswith("the argument piece of ")
    assert message.endswith("function is deprecated; use segment_size")
    assert function.__doc__ == "What it does."
