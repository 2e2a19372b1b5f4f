"""Extracts code blocks and commands from README.md and other Markdown pages, in order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
# README and the commands of a first project, in order; and the pages of all commands that a user types.
FIRST_PROJECT = (README, ROOT / "docs" / "commands.md")
PAGES = (*FIRST_PROJECT, ROOT / "docs" / "benchmarks.md")
PROGRAMS = ("sympow", "make", "pip", "python", "pytest", "torchrun")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        language: the language of the fence; "": shell commands.
        text: its lines.
    """

    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands, one per line, without trailing comments; a backslash continues a line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        found = [re.sub(r"\s+#.*$", "", line).strip() for line in lines]
        return [line for line in found if line]


def pages(paths: Iterable[Path] = PAGES) -> str:
    """The text of pages, one after the other."""
    return "\n".join(path.read_text("utf-8") for path in paths)


def blocks(text: str | None = None) -> list[Block]:
    """All fenced blocks of `PAGES`, or of a text."""
    text = pages() if text is None else text
    return [Block(*found) for found in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S)]


def shell_commands(text: str | None = None) -> list[str]:
    """The commands of all shell blocks of `PAGES`, or of a text."""
    return [command for block in blocks(text) if not block.language for command in block.commands]


def commands_in_sentences(text: str | None = None) -> list[str]:
    """Complete inline commands in running text; those with an ellipsis are left out."""
    text = pages() if text is None else text
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    spans = (" ".join(span.split()) for span in re.findall(r"`([^`]+)`", without_blocks))
    return [span for span in spans if span.split()[0] in PROGRAMS and " " in span and "…" not in span]
