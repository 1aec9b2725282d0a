"""Headless Chromium for tests: the system's own, so that nothing is downloaded."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 180_000.0  # milliseconds


@contextmanager
def chromium() -> Iterator[Any]:
    """Playwright's browser object; skips the test, with the reason, where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'maskfleet[browser]' drives Chromium")
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def tab(browser: Any, width: int, script: bool = True) -> Iterator[Any]:
    """A page of a fresh profile in `browser`; `problems` collects what its console says and requests to elsewhere."""
    context = browser.new_context(viewport={"width": width, "height": 844}, java_script_enabled=script)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda m: page.problems.append(m.text) if m.type in ("error", "warning") else None)
    left = "net::ERR_ABORTED"  # by leaving the page
    page.on("requestfailed", lambda r: r.failure == left or page.problems.append(f"{r.url}: {r.failure}"))
    try:
        yield page
    finally:
        context.close()
