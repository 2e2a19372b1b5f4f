"""Runs transformers' common model tests (`mixin_suite.py`) in a process of their own."""

import os
import re
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers")

# The classes of the suite, with how many of their tests pass at least.
SUITES = {"TestSympow": 70, "TestWhole": 80, "TestHybrid": 80}
# Accepted reasons for skipped tests of the mixin.
REASONS = {
    r"accelerators?$|requires (MPS|deepspeed|Flash Attention|the kernels library)": "the machine or another package",
    r"does not (output|support) (output_)?attentions": "weights are not formed",
    r"don't support sdpa|support (grouped|batched)_mm|capture_outputs": "an implementation that models may choose",
    r"does not have position embeddings|RoPE|partial rope": "positions follow from what was read",
    r"Cannot capture hidden states": "hidden states come from all layers or none",
    r"No conversion found": "checkpoints have the names of modules",
    r"rates that depend on the length": "a state holds rotated keys",
    r"not composite|No subconfigs|sparse experts|router_logits|TP plan|sequence-to-sequence": "other kinds of model",
}


@pytest.fixture
def source(tmp_path_factory):
    """The source package of the installed version of transformers."""
    folder = tmp_path_factory.mktemp("transformers")
    version = metadata.version("transformers")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary=:all:"]
    done = subprocess.run([*command, f"transformers=={version}", "--dest", folder], capture_output=True, text=True)
    if re.search("NewConnectionError|NameResolutionError|ProxyError|ConnectTimeoutError", done.stderr):
        pytest.skip("the package index cannot be reached, from which transformers' source comes")
    assert done.returncode == 0, done.stderr
    with tarfile.open(folder / f"transformers-{version}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"transformers-{version}"


@pytest.mark.slow
def test_transformers_own_tests_of_a_model_pass(source, tmp_path):
    import sympow

    report = tmp_path / "report.xml"
    paths = [str(Path(sympow.__file__).parent.parent), str(source)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "RUN_SLOW": "1"}
    options = ["-c", os.devnull, "--rootdir", tmp_path, "-p", "no:cacheprovider", "--import-mode=importlib"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        *options,
        f"--junitxml={report}",
        Path(__file__).with_name("mixin_suite.py"),
    ]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1_200)
    assert report.is_file(), done.stdout + done.stderr
    (found,) = ElementTree.parse(report).getroot().iter("testsuite")
    counts = {name: int(found.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    assert (counts["failures"], counts["errors"]) == (0, 0), done.stdout
    passed = Counter(
        case.get("classname").rpartition(".")[2] for case in found.iter("testcase") if case.find("skipped") is None
    )
    assert all(passed[name] >= least for name, least in SUITES.items()), passed
    skips = {skip.get("message") for skip in found.iter("skipped")}
    assert [text for text in skips if not any(re.search(reason, text) for reason in REASONS)] == []
