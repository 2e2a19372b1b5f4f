"""The package as a whole: the direction of imports, and what an import loads."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import source_map

import sympow
from sympow.extras import require

SOURCE = Path(sympow.__file__).parent
# Layers of imports: a package imports only from layers above its own here. Packages of one layer do not import each
# other.
LAYERS = (
    ("errors", "extras", "invocation"),
    ("checks", "files", "kernels"),
    ("locks", "parsing", "settings", "tensor_file"),
    ("ops", "data"),
    ("parallel",),
    ("layers",),
    ("model",),
    ("generation", "train"),
    ("evaluate", "hf", "check"),
    ("report", "serving"),
    ("convert",),
    ("cli",),
    ("__main__",),
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}


def imported_parts(path: Path) -> set[str]:
    """Top-level packages of sympow that a source file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    inside = {name.split(".")[1] for name in names if name.startswith("sympow.")}
    return inside & RANK.keys()


def part_of(path: Path) -> str:
    """The top-level package of a source file. Entry points (`python -m sympow.train`) may import everything."""
    return path.stem if path.stem == "__main__" else path.relative_to(SOURCE).parts[0].removesuffix(".py")


SOURCES = sorted(SOURCE.rglob("*.py"))
KERNEL_OPERATORS = {
    ".".join(("sympow", *path.relative_to(SOURCE).with_suffix("").parts))
    for path in SOURCES
    if "op" in path.stem.split("_")
}


def reads_in_locale_encoding(path: Path) -> list[int]:
    """Lines that open a text file without an encoding, so that Python uses that of the locale."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if not isinstance(node, ast.Call) or any(keyword.arg == "encoding" for keyword in node.keywords):
            continue
        _, of_something, name = ast.unparse(node.func).rpartition(".")
        modes = [x.value for x in node.args if isinstance(x, ast.Constant) and x.value in ("r", "w", "a", "x")]
        if (name == "read_text" and of_something and not node.args) or (name == "open" and modes):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_text_files_are_utf8_in_every_locale(path):
    assert reads_in_locale_encoding(path) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    part = part_of(path)
    if part == "__init__":
        return
    assert part in RANK, f"{part} has no place in the order of imports"
    for imported in imported_parts(path) - {part}:
        assert RANK[imported] < RANK[part], f"{part} must not import {imported}"


def test_operators_are_above_all_kernels():
    """What makes operators of kernels (`op.py`) is imported by the packages above alone."""
    for path in (SOURCE / "kernels").rglob("*.py"):
        imported = source_map.imports(ast.parse(path.read_text("utf-8")), KERNEL_OPERATORS)
        assert not set(imported), f"{path} must not import {imported}"


def test_there_is_no_floor_too_many():
    """Each layer has a package that imports from the layer right before: otherwise the two could be one."""
    highest = {}
    for path in SOURCES:
        part = part_of(path)
        if part != "__init__":
            below = [RANK[imported] for imported in imported_parts(path) - {part}]
            highest[part] = max([highest.get(part, -1), *below])
    for rank, parts in enumerate(LAYERS):
        assert max(highest[part] for part in parts) == rank - 1, parts


def test_the_reference_shares_no_code_with_what_it_checks():
    assert imported_parts(SOURCE / "ops" / "reference.py") == set()


def test_importing_sympow_needs_no_optional_package():
    # Optional packages may be searched for, but not loaded.
    code = """
import sys
from importlib.machinery import ModuleSpec
class Refuse:
    refused = {"triton", "transformers", "zarr", "matplotlib", "typer", "rich", "numpy", "tokenizers"}
    refused |= {"fastapi", "pydantic"}
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.split(".")[0] in self.refused - self.loaded else None
    def create_module(self, spec):
        raise ModuleNotFoundError(f"{spec.name} was imported", name=spec.name)
    def exec_module(self, module):
        raise AssertionError
import torch
Refuse.loaded = {name.split(".")[0] for name in sys.modules}
sys.meta_path.insert(0, Refuse())
import sympow
q = torch.randn(1, 8, 2, 4)
sympow.attention(q, q, q)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_import_leaves_torchs_compiler_alone():
    """torch._dynamo takes as long to import as torch itself, and only torch.compile needs it."""
    code = "import sys, sympow, sympow.cli.app, sympow.evaluate, sympow.parallel, sympow.train; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True, text=True)
    assert "torch._dynamo" not in result.stdout.split()


def test_a_missing_extra_is_named():
    message = r"^nothere is not installed; it comes with: pip install 'conformal-sympow\[report\]'$"
    with pytest.raises(ModuleNotFoundError, match=message):
        require("nothere.within", "report")


def test_the_command_without_its_extra_says_so():
    code = "import sys; sys.modules['typer'] = None; from sympow.__main__ import main; main()"
    result = subprocess.run([sys.executable, "-c", code], check=False, timeout=120, capture_output=True, text=True)
    assert result.returncode == 1
    said = "sympow: error: typer is not installed; it comes with: pip install 'conformal-sympow[cli]'\n"
    assert result.stderr == said


def test_public_names_are_documented():
    for name in sympow.__all__:
        assert getattr(sympow, name).__doc__, f"{name} has no docstring"


def test_modules_do_not_import_each_other_in_a_circle():
    """Lazy imports and those for type checking count as well."""
    trees = {
        ".".join(("sympow", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): ast.parse(
            path.read_text("utf-8")
        )
        for path in SOURCES
    }
    graph = {module: set(source_map.imports(tree, trees.keys())) - {module} for module, tree in trees.items()}
    assert source_map.circles(graph) == []
