"""The pages in docs/: their links, their code, the site's pages and what docstrings say of arguments."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import torch
import yaml

import sympow
from assemble import assemble

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md", "experiments/README.md")
PAGES = [*(ROOT / name for name in OUTSIDE), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text):
    """A page without code blocks and inline code, in which brackets are not links and # is not a heading."""
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


def test_every_page_can_be_reached_from_the_readme_or_the_start_page():
    reached, waiting = set(), [ROOT / "README.md", DOCS / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in reached or not page.is_file():
            continue
        reached.add(page)
        links = [link.partition("#")[0] for link in LINK.findall(without_code(page.read_text("utf-8")))]
        waiting += [(page.parent / link).resolve() for link in links if link.endswith(".md")]
    assert {page for page in PAGES if page.is_relative_to(DOCS)} <= reached


def test_anchors_are_those_of_headings(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One: `two`\n\n```\n# no heading\n```\n\n## Again\n\n## Again\n")
    assert anchors(page) == {"one-two", "again", "again-1"}


@pytest.mark.parametrize("name", ["index.md", "operator.md", "layer.md"])
def test_code_of_the_first_pages_runs_in_order(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for block in readme.blocks((DOCS / name).read_text("utf-8")):
        if block.language == "python":
            exec(compile(block.text, name, "exec"), names)
    assert names["y"].isfinite().all()


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    loaded = re.compile(r"""<(?:script|link|img|iframe|source)[^>]+(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")
    pages = {page.name: loaded.findall(page.read_text("utf-8")) for page in site.rglob("*.html")}
    assert {name: found for name, found in pages.items() if found} == {}


@pytest.mark.slow
def test_the_site_shows_what_lies_outside_docs(site):
    assert (site / "changelog.html").exists()
    assert (site / "benchmarks/results/h200_p2.png").exists()
    assert 'href="security.html"' in (site / "training.html").read_text("utf-8")
    assert "attention" in (site / "api/sympow.html").read_text("utf-8")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation site, built as `make docs` does."""
    pytest.importorskip("zensical", reason="needs the extra docs")
    project = tmp_path_factory.mktemp("project")
    # Paths in mkdocs.yml are relative to it.
    shutil.copy(ROOT / "mkdocs.yml", project)
    (project / "src").symlink_to(ROOT / "src")
    assemble(project / "build" / "docs")
    subprocess.run([sys.executable, "-m", "zensical", "build", "--strict"], cwd=project, check=True, timeout=600)
    return project / "build" / "site"


def test_the_site_has_every_page_in_its_navigation():
    """The build does not say which pages it lacks or leaves out."""
    listed = re.findall(r"^ +- [^:]+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    published = {"changelog.md", "contributing.md", "security.md"}
    assert sorted(listed) == sorted({page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")} | published)


def test_docstrings_name_arguments_that_exist(caplog):
    """The build does not fail on docstrings, and Griffe's check of arguments does not support an entry for several."""
    griffe = pytest.importorskip("griffe", reason="needs the extra docs")
    package = griffe.load("sympow", search_paths=[ROOT / "src"])
    wrong = []
    for documented in with_arguments(package):
        known = {parameter.name.lstrip("*") for parameter in documented.parameters} | {"the rest"}
        for section in documented.docstring.parse("google", warn_unknown_params=False, warn_missing_types=False):
            if section.kind is griffe.DocstringSectionKind.parameters:
                names = [name.strip() for entry in section.value for name in entry.name.split(",")]
                wrong += [f"{documented.path}: {name}" for name in names if name not in known]
    assert wrong == []
    assert caplog.messages == []


def with_arguments(module):
    """All classes, functions and methods of a package that are defined in it and have a docstring."""
    for member in module.members.values():
        if member.is_alias:
            continue
        if (member.is_function or member.is_class) and member.docstring:
            yield member
        if member.is_module or member.is_class:
            yield from with_arguments(member)


def test_the_citation_has_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == sympow.__version__
