"""`maskfleet demo` with real processes: the figures it writes, and nothing left behind when it is interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from edge_bench import cli
from edge_bench.demo import DemoError, children, choose_data

from edge_client.errors import ConfigError, DataError

pytest.importorskip("sklearn")
FIGURES = {
    "accuracy_mean",
    "accuracy_worst",
    "bytes_up_per_device_round",
    "bytes_down_per_device_round",
    "bits_per_parameter_up",
    "bits_per_parameter_down",
    "seconds_per_round",
}


def test_the_demo_writes_every_figure_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "demo.json", tmp_path / "files"
    cli.demo("digits", devices=2, rounds=2, seed=1, methods="fedmask,standalone", json_file=out, keep_files=folder)
    written = json.loads(out.read_text())
    assert set(written) == {"methods", "compaction", "settings", "machine"}
    assert set(written["methods"]) == {"fedmask", "standalone"}
    for record in written["methods"].values():
        assert record.keys() >= FIGURES
        assert 0 < record["accuracy_worst"] <= record["accuracy_mean"] <= 1
    fedmask = written["methods"]["fedmask"]
    assert fedmask["bits_per_parameter_up"] < 32 * 0.06
    assert fedmask["bytes_up_per_device_round"] > written["methods"]["standalone"]["bytes_up_per_device_round"]
    compact = written["compaction"]
    assert compact["parameters_compact"] <= compact["parameters_dense"] == 6570
    assert compact["latency_dense_ms"] > 0
    assert compact["latency_compact_ms"] > 0
    assert compact["max_abs_diff"] <= 1e-5
    assert written["settings"]["rounds"] == 2
    assert len(list(folder.glob("fedmask/*/personal.onnx"))) == 2
    assert "fedmask" in capsys.readouterr().out


def test_ctrl_c_ends_every_process_and_removes_the_files(tmp_path: Path) -> None:
    code = "from edge_client.cli import main; main()"
    arguments = ["demo", "--data", "digits", "--devices", "2", "--rounds", "500", "--methods", "standalone"]
    running = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 60
    family: list[psutil.Process] = []
    while len(family) < 3 and time.monotonic() < deadline:
        time.sleep(0.2)
        family = psutil.Process(running.pid).children(recursive=True)
    assert len(family) == 3
    running.send_signal(signal.SIGINT)
    out, _ = running.communicate(timeout=30)
    assert running.returncode == 130
    assert b"every process of the demo has ended" in out
    assert not [p for p in family if p.is_running()]
    assert not list(tmp_path.glob("maskfleet-demo-*"))


def test_a_process_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with children() as start:
        failing = start("a device", ["join", "nonsense", "--token", "x", "--data", "x.npz"], tmp_path / "log", {})
        failing.popen.wait(30)
        with pytest.raises(DemoError, match=r"a device ended with code [^0][\s\S]*nonsense"):
            failing.check()


@pytest.mark.parametrize("text", ["cifar", "digits:somewhere", ""])
def test_unknown_data_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="give har"):
        choose_data(text, 3)


def test_a_wrong_path_says_where_it_looked(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        choose_data(f"har:{tmp_path}", 3)


def test_what_would_fail_late_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        cli.demo("digits", devices=2, rounds=1, seed=0, methods="fedavg", json_file=None, keep_files=tmp_path)
    with pytest.raises(ConfigError, match="once"):
        cli.demo("digits", devices=2, rounds=1, seed=0, methods="fedavg,fedavg", json_file=None, keep_files=None)
    with pytest.raises(ConfigError, match="alchemy"):
        cli.demo("digits", devices=2, rounds=1, seed=0, methods="alchemy", json_file=None, keep_files=None)
