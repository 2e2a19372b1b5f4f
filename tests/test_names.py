"""One name, one quantity: signatures of operator, kernels and layers against the table of names in CONTRIBUTING.md."""

import ast
import re
from pathlib import Path

import pytest

import sympow

SOURCE = Path(sympow.__file__).parent
TABLE = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8").split("## Names\n")[1].split("\n## ")[0]
LINES = [line for line in TABLE.splitlines() if line.startswith("| ") and "`" in line]
ROWS = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in LINES]
FILES = sorted(path for part in ("ops", "kernels", "parallel", "layers") for path in (SOURCE / part).rglob("*.py"))
# These have weights of linear layers.
LINEAR = ("layers/precision.py", "kernels/decode/gate_projection.py")
# A layer's projections, or their names, are called as what they compute.
UNCHECKED = ("", "None", "Any", "tl.constexpr", "gl.constexpr", "nn.Module", "str")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


# The type of each name: a tensor where the table has its shape.
TYPES = {
    name: "Tensor" if kind.startswith("(") else kind.split()[0].strip("`,;")
    for _, _, names, _, kind in ROWS
    for name in quoted(names)
}
BANNED = {other: quoted(names)[0] for _, _, names, others, _ in ROWS for other in quoted(others)}


def declared(path: Path) -> list[tuple[str, str, int]]:
    """Parameters of functions and annotated members of classes: name, type without None, and line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            # torch has names of its own where it passes a context.
            if all(x.arg != "ctx" for x in every):
                found += [(x.arg, x.annotation, x.lineno) for x in every]
        elif isinstance(node, ast.ClassDef):
            members = (x for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name))
            found += [(x.target.id, x.annotation, x.lineno) for x in members]
    kinds = (None if kind is None else ast.unparse(kind) for _, kind, _ in found)
    return [
        (name, "" if kind is None else kind.replace(" | None", ""), line)
        for (name, _, line), kind in zip(found, kinds, strict=True)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_name_has_one_meaning(path):
    for name, kind, line in declared(path):
        bare = name.removesuffix("_ptr")
        if bare == "weight" and path.as_posix().endswith(LINEAR):
            continue
        assert bare not in BANNED, f"{path}:{line}: {name} is called {BANNED[bare]}"
        if name in TYPES and kind not in UNCHECKED:
            assert re.sub(r"Literal\[(True|False)\]", "bool", kind) == TYPES[name], (
                f"{path}:{line}: {name} is a {kind}, and a {TYPES[name]} elsewhere"
            )


def test_every_name_of_the_table_is_in_use():
    names = {name.removesuffix("_ptr") for path in FILES for name, _, _ in declared(path)}
    assert TYPES.keys() - names == set()


def test_no_name_is_banned_that_the_table_gives():
    assert TYPES.keys() & BANNED.keys() == set()
