"""The dashboard in Chromium with many devices: bytes of a page, seconds until it is drawn, seconds of an update.

    python -m edge_bench.overhead.dashboard --json benchmarks/results/dashboard.json

One coordinator, one federation of `idle_plugin`, devices that really enrol and report over HTTP. A page is loaded with
an empty cache in a new profile each time. Drawn is the largest contentful paint, counted from the start of the load;
bytes are those Chromium received, headers included, of the page and all that it refers to. An update is one request of
the page's script until the parts are replaced.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from coord_server.auth import OPERATOR_ENV, new_secret
from coord_server.operator.client import Operator
from edge_bench import provenance
from edge_bench.command_line import check_writable, run_module, write_json
from edge_bench.federation.processes import children, coordinator
from edge_bench.overhead.loopback import PATIENCE, create, plugin
from edge_client.errors import ConfigError
from edge_client.link.transport import content_digest
from edge_client.protocol.cost import COST_HEADER
from edge_client.protocol.messages import DeviceMetrics
from edge_client.protocol.metrics import with_metrics
from edge_client.protocol.payload import decode, encode

KIND, D = "mask", 1000
WIDTHS = {"desktop": 1280, "phone": 390}
FAILED = 5  # devices of the last round that report a failure
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync"]  # fmt: skip
DRAWN = """() => new Promise((done) => new PerformanceObserver((seen) => {
  const page = performance.getEntriesByType("navigation")[0];
  done({drawn: seen.getEntries().at(-1).startTime, answered: page.responseEnd, loaded: page.loadEventEnd});
}).observe({type: "largest-contentful-paint", buffered: true}))"""
UPDATED = """async () => { const begin = performance.now(); await update(); return performance.now() - begin; }"""
Figures = dict[str, float]


class Devices:
    """Devices of one federation: each has a credential, all of them share some connections."""

    def __init__(self, url: str, token: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/v1", timeout=PATIENCE, trust_env=False)
        self._path, self._token = f"/federations/{KIND}", token

    def _ask(self, device: str, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {sha256(device.encode()).hexdigest()}", **more.pop("headers", {})}
        answer = self._http.request(method, path, headers=headers, **more)
        answer.raise_for_status()
        return answer

    def enrol(self, device: str) -> None:
        """Enrol."""
        secret = sha256(device.encode()).hexdigest()
        self._ask(device, "POST", "/enrol", json={"token": self._token, "device": device, "credential": secret})

    def work(self, device: str) -> dict[str, Any]:
        """What the device is to do."""
        found: dict[str, Any] = self._ask(device, "GET", f"{self._path}/work").json()
        return found

    def train(self, device: str) -> bool:
        """Send an update if one is due; whether it was."""
        work = self.work(device)
        if work["status"] != "train":
            return False
        down = self._ask(device, "GET", f"{self._path}/payloads/{work['downlink']}").content
        score = min(0.98, 0.5 + 0.016 * work["round"]) - 0.002 * (sum(map(ord, device)) % 20)
        said = DeviceMetrics(samples=100, loss=1 - score, score_before=score - 0.05, score_after=score, test_samples=50)
        body = encode(with_metrics(decode(down), said))
        headers = {"Maskfleet-Lease": work["lease"], "Content-Digest": content_digest(body)}
        headers[COST_HEADER] = f"{10 + 10 * score:.3g},{20 + 40 * score:.3g},{180 + 10 * score:.3g},{50 + score:.3g},"
        self._ask(device, "PUT", f"{self._path}/rounds/{work['round']}/updates/{device}", content=body, headers=headers)
        return True

    def fail(self, device: str) -> bool:
        """Report a failure if the device is to train; whether it was."""
        work = self.work(device)
        if work["status"] == "train":
            path = f"{self._path}/rounds/{work['round']}/failures/{device}"
            reason = {"kind": "out-of-memory", "reason": "the step needs 340 MB, 212 MB are free"}
            self._ask(device, "PUT", path, json=reason, headers={"Maskfleet-Lease": work["lease"]})
        return bool(work["status"] == "train")


def prepare(fleet: Devices, devices: int, cohort: int, rounds: int) -> None:
    """Enrol the devices, close all rounds but the last, and leave that one half done with some failures."""
    names = [f"device-{i:05}" for i in range(devices)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(fleet.enrol, names))
        list(threads.map(fleet.work, names[:cohort]))  # only they are ready, so every cohort is theirs
        due = cohort * (rounds - 1)
        while due > 0:
            due -= sum(threads.map(fleet.train, names[:cohort]))
            print(f"{max(due, 0)} updates to come ", end="\r", file=sys.stderr, flush=True)
        while fleet.work(names[0])["status"] != "train":  # until the last round is open
            time.sleep(0.05)
        list(threads.map(fleet.fail, names[:FAILED]))
        list(threads.map(fleet.train, names[FAILED : cohort // 2]))
        list(threads.map(fleet.work, names[cohort:]))


@contextmanager
def chromium(path: str) -> Iterator[Any]:
    """A headless browser. Raises ConfigError."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise ConfigError("the browser is driven by playwright; run: pip install 'maskfleet[browser]'") from None
    found = shutil.which(path)
    if found is None:
        raise ConfigError(f"there is no browser {path}; install Chromium or name it with --browser")
    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=found, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


def load(browser: Any, cookies: list[Any], width: int, address: str) -> Figures:
    """One load of a page in a new profile."""
    context = browser.new_context(viewport={"width": width, "height": 844})
    context.add_cookies(cookies)
    page, sizes = context.new_page(), list[float]()
    devtools = context.new_cdp_session(page)
    devtools.send("Network.enable")
    devtools.on("Network.loadingFinished", lambda told: sizes.append(told["encodedDataLength"]))
    page.goto(address, wait_until="load")
    found: Figures = page.evaluate(DRAWN)
    bytes_ = sum(sizes)
    found["updated"] = page.evaluate(UPDATED)
    context.close()
    return {**{name: ms / 1000 for name, ms in found.items()}, "bytes": bytes_}


def measure(browser: Any, url: str, token: str, repeats: int, picture: Path | None) -> dict[str, dict[str, Figures]]:
    """Median and most of every figure, by page and width; `picture` gets the federation's page."""
    context = browser.new_context(viewport={"width": WIDTHS["desktop"], "height": 844})
    page = context.new_page()
    page.goto(f"{url}/login")
    page.fill("#token", token)
    page.press("#token", "Enter")
    page.wait_for_url(f"{url}/")
    cookies = context.cookies()
    if picture is not None:
        page.goto(f"{url}/federations/{KIND}")
        page.screenshot(path=str(picture), full_page=True)
    context.close()
    found = {}
    for name, address in {"federations": url, "federation": f"{url}/federations/{KIND}"}.items():
        for screen, width in WIDTHS.items():
            loads = [load(browser, cookies, width, address) for _ in range(repeats)]
            rows = {figure: [one[figure] for one in loads] for figure in loads[0]}
            found[f"{name}, {screen}"] = {
                figure: {"median": round(statistics.median(v), 4), "most": round(max(v), 4)}
                for figure, v in rows.items()
            }
    return found


def main(
    devices: Annotated[int, typer.Option(min=10, help="Devices enrolled.")] = 2000,
    cohort: Annotated[int, typer.Option(min=20, help="Devices asked in a round.")] = 100,
    rounds: Annotated[int, typer.Option(min=2, help="The last of which is under way.")] = 30,
    repeats: Annotated[int, typer.Option(min=1, help="Loads of each page.")] = 10,
    browser: Annotated[str, typer.Option(help="Chromium's command.")] = "chromium",
    picture: Annotated[Path | None, typer.Option(help="Write a picture of the federation's page here.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """The dashboard in Chromium with many devices: bytes, seconds until drawn, seconds of an update."""
    check_writable(json_file)
    origin = provenance.origin()
    with tempfile.TemporaryDirectory() as name, children() as start, chromium(browser) as started:
        folder = Path(name)
        token = new_secret()
        url = coordinator(start, folder, {**plugin(folder), OPERATOR_ENV: token})[1]
        with Operator(url, token) as operator:
            join = create(operator, folder, KIND, D, cohort, rounds=rounds, guard="none")
        prepare(Devices(url, join), devices, cohort, rounds)
        found = measure(started, url, token, repeats, picture)
    for page, figures in found.items():
        print(f"{page}: " + ", ".join(f"{k} {v['median']:.4g} (most {v['most']:.4g})" for k, v in figures.items()))
    units = {"drawn": "s", "answered": "s", "loaded": "s", "updated": "s", "bytes": "B, compressed, with headers"}
    settings = {"devices": devices, "cohort": cohort, "rounds": rounds, "repeats": repeats, "units": units}
    write_json(json_file, {**origin, **settings, "results": found})


if __name__ == "__main__":
    run_module(main)
