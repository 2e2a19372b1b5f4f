"""Links between README.md and the pages in docs/ lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    """A page less its blocks and spans of code, in which brackets are not links and # is no heading."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page):
    """Anchors that GitHub gives a page's headings: lower case, without punctuation, hyphens for spaces."""
    text = re.sub(r"^ *```.*?^ *```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    found = []
    for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        repeats = sum(1 for other in found if re.fullmatch(rf"{re.escape(plain)}(-\d+)?", other))
        found.append(f"{plain}-{repeats}" if repeats else plain)
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(page):
    broken = []
    for link in LINK.findall(without_code(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_readme():
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(without_code(page.read_text("utf-8")))]
        waiting += [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert {page for page in PAGES if page.parent.name == "docs"} <= reached


def test_anchors_are_those_of_headings(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n\n```\n# no heading\n```\n\n## Again\n\n## Again\n")
    assert anchors(page) == {"one-two", "again", "again-1"}
