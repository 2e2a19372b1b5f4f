"""MkDocs hook: makes links that leave docs/ work on the site as they do in the repository.

CHANGELOG.md, CONTRIBUTING.md and SECURITY.md become pages of the site, README.md is replaced by the start page, images
are copied, and a link to any other file of the repository becomes a link to `repo_url`, or plain text without one.
Broken links are left as they are, so that MkDocs reports them.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

# Files of the repository that are pages of the site: their path there and their page's source path.
PUBLISHED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "security.md"}
REPLACED = {"README.md": "index.md"}
IMAGES = (".gif", ".jpg", ".png", ".svg", ".webp")
# A link or an image, and code, in which brackets are no links.
LINK = re.compile(r"(?P<code>^ *```.*?^ *```|`[^`\n]*`)|(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)", re.M | re.S)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the published files of the repository as pages."""
    root = Path(config.config_file_path).parent
    for source, page in PUBLISHED.items():
        files.append(File.generated(config, page, abs_src_path=str(root / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page that lead out of docs/, or, on a published page, into it."""
    root = Path(config.config_file_path).parent
    at = page.file.src_uri
    sources = {uri: source for source, uri in PUBLISHED.items()}
    folder = PurePosixPath(sources.get(at, f"docs/{at}")).parent

    def rewritten(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"]
        path, hash_sign, anchor = (target or "").partition("#")
        if found["code"] or not path or re.match(r"[a-z]+:", path):
            return found[0]
        named = os.path.normpath(folder / path)
        if named.startswith("..") or not (root / named).exists():
            return found[0]
        if named in REPLACED:
            uri, hash_sign, anchor = REPLACED[named], "", ""
        elif named in PUBLISHED:
            uri = PUBLISHED[named]
        elif named.startswith("docs/"):
            uri = named.removeprefix("docs/")
        elif named.endswith(IMAGES):
            uri = named
            if files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(root / named)))
        elif config.repo_url:
            return f"{text}({config.repo_url.rstrip('/')}/blob/main/{named}{hash_sign}{anchor})"
        else:
            return text[1:-1]
        return f"{text}({os.path.relpath(uri, PurePosixPath(at).parent)}{hash_sign}{anchor})"

    return LINK.sub(rewritten, markdown)
