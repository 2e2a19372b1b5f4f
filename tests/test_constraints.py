"""constraints.txt: its pins agree with each other, and pip can install them from the package index alone."""

import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
LINUX = {"platform_system": "Linux", "sys_platform": "linux", "os_name": "posix"}


def pins():
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def test_every_dependency_of_the_project_admits_its_pin():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = [Requirement(text) for texts in (project["dependencies"], *extras.values()) for text in texts]
    pinned = pins()
    assert pinned.keys() >= {"torch", "triton", "numpy"}
    unmet = [str(r) for r in requirements if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0!999"))]
    # Only wandb is not pinned, since no test imports it. Extras that name this project have no version.
    assert [text for text in unmet if not text.startswith("wandb")] == []


def test_pinned_packages_admit_each_others_pins():
    pinned = pins()
    conflicts = []
    for name, version in pinned.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if installed.version.split("+")[0] != version:
            continue
        for text in installed.requires or ():
            requirement = Requirement(text)
            pin = pinned.get(canonicalize_name(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate(LINUX | {"extra": ""})
            if applies and pin is not None and not requirement.specifier.contains(pin):
                conflicts.append(f"{name} {version} requires {text}")
    assert conflicts == []


@pytest.fixture(scope="module")
def pip(tmp_path_factory):
    """Runs a recent pip with the default index only: no configuration, no local wheels, no other index.

    An older pip downloads gigabytes for a dry run; this one reads the metadata out of the wheels.
    """
    folder = tmp_path_factory.mktemp("pip")
    hiding = ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_REQUIREMENT", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in hiding}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), "pip>=26"]
    made = subprocess.run(command, env=environment, capture_output=True, text=True)
    if re.search("NewConnectionError|NameResolutionError|ProxyError|ConnectTimeoutError", made.stderr):
        pytest.skip("the package index cannot be reached")
    assert made.returncode == 0, made.stderr
    environment["PYTHONPATH"] = str(folder)

    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "-m", "pip", *map(str, arguments)],
            env=environment,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done

    return run


@pytest.mark.index
@pytest.mark.parametrize("extra", ["all", "dev"])
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_pip_resolves_the_constraints_from_the_plain_index(pip, tmp_path, machine, python, extra):
    # For other platforms pip accepts wheels only, and this package has none.
    pip("wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "wheels", "future==0.18.3")
    # Platform tags that a machine with glibc 2.35 accepts.
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(35, 4, -1)] + [f"manylinux2014_{machine}"]
    pip(
        "install", "--dry-run", "--use-feature=fast-deps", "--ignore-installed", "--target", tmp_path / "target",
        "--only-binary=:all:", "--python-version", python, *(part for tag in tags for part in ("--platform", tag)),
        "--find-links", tmp_path / "wheels", "--report", tmp_path / "report.json", "-c", CONSTRAINTS, f".[{extra}]",
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())["install"]
    chosen = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in report}
    pinned = pins()
    assert chosen.keys() >= {"torch", "triton", "numpy"}
    assert {name: version for name, version in chosen.items() if pinned.get(name, version) != version} == {}
    # The wheel with CUDA, which depends on Triton, not the one for CPUs.
    [torch_metadata] = [item["metadata"] for item in report if item["metadata"]["name"] == "torch"]
    assert any(Requirement(text).name == "triton" for text in torch_metadata["requires_dist"])


@pytest.mark.index
@pytest.mark.skipif(platform.system() != "Linux", reason="the command that README gives for Linux")
def test_the_documented_command_resolves_on_this_machine(pip):
    pip("install", "--dry-run", "--use-feature=fast-deps", "--ignore-installed", "-c", CONSTRAINTS, ".[all]")
