"""mkdocs hooks: README and three other files of the repository are pages of the site; links to its other files stay.

The pages of methods are in the order in which README links to them.

A link that leaves docs/ is pointed at a copy of its file under `repository/`; one to a folder becomes its words. What
is not there stays as it is, so that mkdocs refuses it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent
DOCS = ROOT / "docs"
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "changelog.md": "CHANGELOG.md",
}
URIS = {source: uri for uri, source in PAGES.items()}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:|#)([^)#\s]*)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of methods into the navigation."""
    linked = dict.fromkeys(re.findall(r"\(docs/(methods/\w+\.md)\)", (ROOT / "README.md").read_text("utf-8")))
    (section,) = (part for part in config.nav or [] if "Methods" in part)
    section["Methods"][:0] = linked
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of PAGES, and every file outside docs/ that a page links to."""
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text("utf-8")))
    for file in list(files.documentation_pages()):
        for _, _, target, _ in LINK.findall(file.content_string):
            place = _place(file.src_uri, target)
            uri = f"repository/{place.relative_to(ROOT)}" if place.is_relative_to(ROOT) else ""
            if place.is_file() and not _uri(place) and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(place)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files, **_: Any) -> str:
    """The page's text with links as they are in the site."""
    here = os.path.dirname(page.file.src_uri) or "."

    def turned(m: re.Match[str]) -> str:
        image, words, target, anchor = m[1], m[2], m[3], m[4] or ""
        place = _place(page.file.src_uri, target)
        if place.is_dir() and not place.is_relative_to(DOCS):
            return words
        if not place.is_file():
            return m[0]
        uri = _uri(place) or f"repository/{place.relative_to(ROOT)}"
        return f"{image}[{words}]({os.path.relpath(uri, here)}{anchor})"

    return LINK.sub(turned, markdown)


def _place(uri: str, target: str) -> Path:
    """The file that a link of the page `uri` names."""
    folder = (ROOT / PAGES[uri] if uri in PAGES else DOCS / uri).parent
    return Path(os.path.normpath(folder / target))


def _uri(place: Path) -> str:
    """Where a file of the docs is in the site; empty for others."""
    if place.is_relative_to(DOCS):
        return str(place.relative_to(DOCS))
    return URIS.get(str(place.relative_to(ROOT)), "") if place.is_relative_to(ROOT) else ""
