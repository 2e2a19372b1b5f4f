"""Assembles the pages of the documentation site in build/docs, with links that work there as they do in the repository.

CHANGELOG.md, CONTRIBUTING.md and SECURITY.md become pages of the site, README.md is replaced by the start page, images
are copied, and a link to any other file of the repository becomes plain text. Broken links are left as they are, so
that the build reports them.
"""

import os
import re
import shutil
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[1]
ASSEMBLED = ROOT / "build" / "docs"
# Files of the repository that are pages of the site: their path there and their page's path on the site.
PUBLISHED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
REPLACED = {"README.md": "index.md"}
IMAGES = (".gif", ".jpg", ".png", ".svg", ".webp")
# A link or an image, and code, in which brackets are no links.
LINK = re.compile(r"(?P<code>^ *```.*?^ *```|`[^`\n]*`)|(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)", re.M | re.S)


def assemble(folder: Path = ASSEMBLED) -> None:
    """Writes the pages and the images that they show into an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = {f"docs/{page.relative_to(ROOT / 'docs').as_posix()}": page for page in (ROOT / "docs").rglob("*.md")}
    for source in (*pages, *PUBLISHED):
        page = folder / _on_site(source)
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_rewritten((ROOT / source).read_text("utf-8"), source, folder), encoding="utf-8")


def _on_site(named: str) -> str:
    """The path on the site of a page or an image of the repository."""
    return REPLACED.get(named) or PUBLISHED.get(named) or named.removeprefix("docs/")


def _rewritten(markdown: str, source: str, folder: Path) -> str:
    """A page with the links that lead out of docs/ or, on a published page, into it."""

    def rewrite(found: re.Match[str]) -> str:
        path, hash_sign, anchor = (found["target"] or "").partition("#")
        if found["code"] or not path or re.match(r"[a-z]+:", path):
            return found[0]
        named = os.path.normpath(PurePosixPath(source).parent / path)
        if named.startswith("..") or not (ROOT / named).exists():
            return found[0]
        if named in REPLACED:
            hash_sign = anchor = ""
        elif named.endswith(IMAGES):
            image = folder / _on_site(named)
            image.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / named, image)
        elif named not in PUBLISHED and not named.startswith("docs/"):
            return found["text"][1:-1]
        target = os.path.relpath(_on_site(named), PurePosixPath(_on_site(source)).parent)
        return f"{found['text']}({target}{hash_sign}{anchor})"

    return LINK.sub(rewrite, markdown)


if __name__ == "__main__":
    assemble()
