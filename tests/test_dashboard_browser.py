"""The dashboard in headless Chromium: a federation of three devices from its creation to its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from browser import chromium, tab
from federation import OPERATOR, Federation

from edge_client.bundle import Bundle

BUNDLE = Path(__file__).parent.parent / "benchmarks" / "edge_bench" / "bundles" / "digits"
DEVICES = ("attic", "hall", "kitchen")
PHONE, DESK = 390, 1280
PAGE = "/federations/digits"
ROUNDS = 3


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def log_in(page: Any, url: str) -> None:
    page.goto(url)
    page.get_by_label("Token").fill(OPERATOR)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", level=1).wait_for()


def create(fed: Federation, **more: Any) -> None:
    method = {"name": "fedavg", "lr": 0.05}
    config = {"name": "digits", "method": method, "rounds": ROUNDS, "cohort": 3, "min_devices": 3, "start": "manual"}
    fed.create(Bundle.open(BUNDLE), {**config, **more})


def samples(fed: Federation, name: str, seed: int) -> Path:
    """Random samples of the bundle's shape."""
    drawn = np.random.default_rng(seed)
    file = fed.folder / f"{name}.npz"
    x, y = drawn.random((60, 64), np.float32), drawn.integers(0, 10, 60)
    np.savez(file, x=x, y=y)
    return file


def width(page: Any) -> int:
    """Pixels that the page is wide, with all that overflows it."""
    found: int = page.evaluate("document.documentElement.scrollWidth")
    return found


def test_a_federation_of_three_devices_from_creation_to_end(browser: Any, tmp_path: Path) -> None:
    with Federation(tmp_path) as fed, tab(browser, DESK) as page:
        log_in(page, fed.url)
        page.get_by_text("There is no federation yet").wait_for()
        create(fed)
        page.reload()
        page.get_by_role("link", name="digits").click()

        page.get_by_role("spinbutton", name="Devices").fill("3")
        page.get_by_role("button", name="Make a token").click()
        command = page.locator("#command").inner_text().split()
        assert command[:4] == ["maskfleet", "join", fed.url, "--token"]
        fed.token = command[4]
        page.get_by_role("button", name="Copy the command").click()
        assert page.evaluate("getSelection().toString()").split() == command
        page.get_by_role("link", name="Back to digits").click()

        for seed, name in enumerate(DEVICES):
            fed.join(name, samples(fed, name, seed), "--meter", "none")
        # From here on the page updates itself.
        page.get_by_role("link", name="ready 3").wait_for()
        page.get_by_role("link", name="Start…").click()
        page.get_by_text("Round 1 begins with the devices that are present now").wait_for()
        page.get_by_role("button", name="Start").click()
        page.get_by_text("3 of 3 devices have reported their own model").wait_for()
        for name in DEVICES:
            row = page.get_by_role("row", name=re.compile(name))
            assert row.get_by_role("cell").first.inner_text().strip() == "done"
            assert row.locator("[data-label=updates]").inner_text() == str(ROUNDS)
        for title in ("Score", "Bytes", "Time"):
            plot = page.get_by_role("img", name=f"{title} ")
            assert f"over {ROUNDS} rounds" in plot.get_attribute("aria-label")
        assert page.get_by_role("link", name="Stop…").count() == 0

        with page.expect_download() as download:
            page.get_by_role("link", name="Export state").click()
        assert Path(download.value.path()).read_bytes() == fed.state()
        page.get_by_role("button", name="Export ONNX").click()
        page.get_by_text("the global model after round 3 of 3").wait_for()  # the page updates itself
        with page.expect_download() as download:
            page.get_by_role("link", name="Download").click()
        assert download.value.suggested_filename == "digits-round-3.onnx"
        model = ort.InferenceSession(download.value.path())
        assert model.run(None, {"x": np.zeros((2, 64), np.float32)})[0].shape == (2, 10)
        assert page.problems == []


def test_a_device_that_fails_is_named_with_its_reason_until_the_operator_stops(browser: Any, tmp_path: Path) -> None:
    with Federation(tmp_path) as fed, tab(browser, PHONE) as page:
        create(fed, rounds=1000, start="auto", min_updates=1)
        for seed, name in enumerate(DEVICES):
            file = samples(fed, name, seed)
            if name == "attic":
                np.savez(file, x=np.full((60, 64), 1e30, np.float32), y=np.zeros(60, np.int64))
            fed.join(name, file, "--meter", "none")
        log_in(page, f"{fed.url}/login?next={PAGE}")
        page.locator(".troubles, .names .why").get_by_text(re.compile("downlink|diverged|data")).first.wait_for()
        assert width(page) == PHONE
        page.get_by_role("button", name="Pause").click()
        page.locator("h1 .badge.paused").wait_for()
        page.get_by_role("button", name="Resume").click()
        page.locator("h1 .badge.running").wait_for()
        page.get_by_role("link", name="Stop…").click()
        page.get_by_role("button", name="Stop").click()
        page.locator("h1 .badge.stopped").wait_for()
        assert page.problems == []


def test_a_page_follows_the_federations_events(browser: Any, tmp_path: Path) -> None:
    with Federation(tmp_path) as fed, tab(browser, DESK) as page:
        create(fed)
        log_in(page, f"{fed.url}/login?next={PAGE}")
        page.wait_for_function("stream.readyState === EventSource.OPEN")
        page.get_by_label("Name").fill("half a na")
        page.get_by_text("Settings").click()
        page.evaluate("clearTimeout(timer); wait = 3600; last = -1e9")  # no more looks by the clock
        fed.ask("POST", "/v1/federations/digits/stop")
        page.locator("h1 .badge.stopped").wait_for()
        assert page.get_by_label("Name").input_value() == "half a na"
        assert page.locator("#config").get_attribute("open") is not None
        assert page.locator("#stale").is_hidden()
        fed.coordinator.kill()
        page.evaluate("update()")
        page.get_by_text("The coordinator does not answer").wait_for()


def test_pages_fit_a_phone_and_have_contrast_in_light_and_dark(browser: Any, tmp_path: Path) -> None:
    with Federation(tmp_path) as fed, tab(browser, PHONE) as page:
        create(fed)
        page.goto(fed.url)
        assert width(page) == PHONE
        log_in(page, fed.url)
        for address in ("/", PAGE, f"{PAGE}/stop", "/docs", "/federations/none"):
            page.goto(fed.url + address)
            for summary in page.locator("summary").all()[:6]:
                summary.click()
            assert width(page) == PHONE, address
            grounds = set()
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)
                assert page.evaluate(CONTRAST) == [], (address, scheme)
                grounds.add(page.evaluate("getComputedStyle(document.documentElement).backgroundColor"))
            assert len(grounds) == 2
        assert [p for p in page.problems if "404" not in p] == []


def test_everything_can_be_reached_by_keyboard_and_without_a_script(browser: Any, tmp_path: Path) -> None:
    with Federation(tmp_path) as fed, tab(browser, DESK, script=False) as page:
        create(fed)
        page.goto(fed.url)
        page.locator("#token:focus").wait_for()
        page.keyboard.type(OPERATOR)
        page.keyboard.press("Enter")
        page.get_by_role("heading", name="Federations").wait_for()
        page.keyboard.press("Tab")
        assert page.locator(":focus").inner_text() == "Skip to content"
        page.goto(fed.url + PAGE)
        page.get_by_role("button", name="Make a token").focus()
        page.keyboard.press("Enter")
        page.get_by_text("It is shown here once").wait_for()
        assert not page.get_by_role("button", name="Copy the command").is_visible()
        page.goto(f"{fed.url}{PAGE}/stop")
        page.get_by_role("button", name="Stop").press("Enter")
        page.locator("h1 .badge.stopped").wait_for()


# Texts whose contrast with the background under them is below WCAG's 4.5 (AA).
CONTRAST = """() => {
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => {
    const linear = (v) => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    const [r, g, b] = c.slice(0, 3).map((v) => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const under = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  const bad = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const e = walk.currentNode.parentElement, text = walk.currentNode.textContent.trim();
    if (!text || !e.checkVisibility() || ["TITLE", "OPTION", "SCRIPT"].includes(e.tagName.toUpperCase())) continue;
    const s = getComputedStyle(e), ground = light(under(e));
    const ink = light(parse(e instanceof SVGElement ? s.fill : s.color));
    const ratio = (Math.max(ink, ground) + .05) / (Math.min(ink, ground) + .05);
    if (ratio < 4.5) bad.push(`${e.tagName} ${text.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return bad;
}"""
