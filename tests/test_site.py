"""The docs as a site: it builds without a broken link, and nothing in it comes from outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
ROOT = Path(__file__).parents[1]
OUTSIDE = re.compile(r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//[^\"' >]*")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(root / "mkdocs.yml"),
        "--site-dir",
        str(out),
    ]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=1800, env=env)


def test_the_site_builds_and_works_offline(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    pages = [*(tmp_path / "site").rglob("*.html")]
    assert {"index.html", "contributing.html", "changelog.html", "extending.html"} <= {p.name for p in pages}
    assert len(pages) > len([*(ROOT / "docs").rglob("*.md")])
    for page in pages:
        assert not OUTSIDE.findall(page.read_text()), page
    tour = (tmp_path / "site" / "tour.html").read_text()
    (linked,) = set(re.findall(r'href="(repository/edge_client/bundle.py)"', tour))
    assert (tmp_path / "site" / linked).read_text() == (ROOT / "edge_client" / "bundle.py").read_text()


BROKEN = {
    "[a](operations.md#nowhere)": "does not contain an anchor '#nowhere'",
    "[a](nothing.md)": "'nothing.md', but the target is not found",
    "[a](../edge_client/nothing.py)": "nothing.py', but the target is not found",
}


def test_broken_links_fail(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs_site.py", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("edge_client", "coord_server", "benchmarks", "tests", "export", "kernels"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    with (tmp_path / "docs" / "devices.md").open("a") as page:
        page.write("\n" + " ".join(BROKEN) + "\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for said in BROKEN.values():
        assert said in done.stderr
    assert done.stderr.count("WARNING") == len(BROKEN)
