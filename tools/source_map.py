"""Counts what makes a source tree hard to see through: lines, names that stand twice, circles, repeated lines.

Imports count wherever they stand: inside functions and for type checking alone, too.

python tools/source_map.py src/sympow experiments --names
"""

from __future__ import annotations

import argparse
import ast
import graphlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

# Lines in a row that count as repeated if they stand in two places.
REPEATED = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="packages, counted as one tree")
    parser.add_argument("--names", action="store_true", help="list the names that stand twice, and the circles")
    arguments = parser.parse_args()
    sources = {
        ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__"): path.read_text(
            "utf-8"
        )
        for folder in arguments.folders
        for path in sorted(folder.rglob("*.py"))
    }
    trees = {module: ast.parse(text) for module, text in sources.items()}
    graph = {module: set(imports(tree, sources.keys())) - {module} for module, tree in trees.items()}
    twice = {name: where for name, where in defined(trees).items() if len(where) > 1}
    found = circles(graph)
    lines = [line for text in sources.values() for line in text.splitlines()]
    print(f"lines {len(lines):,}, not blank {sum(bool(line.strip()) for line in lines):,}, files {len(sources):,}")
    print(f"public classes and functions that stand twice or more {len(twice):,}")
    print(f"floors of imports {floors(graph, found)}, circles {len(found)} with {sum(map(len, found))} modules")
    print(f"places with {REPEATED} lines that stand elsewhere too {len(list(repeated(sources)))}")
    if arguments.names:
        for name, where in sorted(twice.items(), key=lambda item: -len(item[1])):
            print(f"{name}: {', '.join(where)}")
        for circle in found:
            print(f"circle: {', '.join(sorted(circle))}")


def imports(tree: ast.Module, modules: Collection[str]) -> Iterator[str]:
    """The modules of the tree that a module imports."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in modules else node.module or "" for name in inside]
        yield from (name for name in names if name in modules)


def defined(trees: Mapping[str, ast.Module]) -> dict[str, list[str]]:
    """The modules that define each public class and function."""
    where: dict[str, list[str]] = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith(
                "_"
            ):
                where[node.name].append(module)
    return where


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Sets of modules that import each other, directly or not."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = set(graph[waiting.pop()]) - found
            found |= new
            waiting += new
        return found

    after = {module: reached(module) for module in graph}
    found = {frozenset(other for other in after[module] if module in after[other]) for module in graph}
    return [set(circle) for circle in sorted(found, key=sorted) if circle]


def floors(graph: Mapping[str, Iterable[str]], found: Iterable[set[str]]) -> int:
    """The longest way down from a module along its imports; a circle counts as one module."""
    name = {module: min(circle) for circle in found for module in circle}
    merged: dict[str, set[str]] = defaultdict(set)
    for module, others in graph.items():
        one = name.get(module, module)
        merged[one] |= {name.get(other, other) for other in others} - {one}
    depth: dict[str, int] = {}
    for module in graphlib.TopologicalSorter(merged).static_order():
        depth[module] = 1 + max((depth[other] for other in merged[module]), default=0)
    return max(depth.values())


def repeated(sources: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Module and line where lines begin that stand elsewhere too; imports and short lines do not count."""
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for module, text in sources.items():
        lines = [
            (number, line.strip())
            for number, line in enumerate(text.splitlines(), 1)
            if len(line.strip()) > 4 and not line.strip().startswith(("import ", "from ", "#"))
        ]
        for first in range(len(lines) - REPEATED + 1):
            window = lines[first : first + REPEATED]
            places[tuple(line for _, line in window)].append((module, window[0][0]))
    for where in places.values():
        if len(where) > 1:
            yield from where


if __name__ == "__main__":
    main()
