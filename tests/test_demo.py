"""`maskfleet demo` with real processes: the figures it writes, and that an interrupt leaves nothing behind."""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from edge_bench.advice import warn, warnings
from edge_bench.curves import Point, amount, curve, mean, shown, sketch
from edge_bench.federation import demo, demo_report
from edge_bench.federation.demo import SETTINGS, choose_data, settings
from edge_bench.federation.demo_report import CHOICE
from edge_bench.federation.processes import ProcessError, children
from edge_bench.simulation.file import find_bundle
from federation import PATIENCE
from processes import ended
from rich.console import Console

from edge_client.bundle import Model
from edge_client.errors import ConfigError, DataError
from edge_client.methods import make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import Report, Round, Scores, Traffic
from edge_client.protocol.operator import Device

pytest.importorskip("sklearn")
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "demo"
FIGURES = {
    "score_mean",
    "score_worst",
    "bytes_up_per_device_round",
    "bytes_down_per_device_round",
    "bits_per_parameter_up",
    "bits_per_parameter_down",
    "seconds_per_round",
}


def test_the_demo_writes_every_figure_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder, plot = tmp_path / "demo.json", tmp_path / "files", tmp_path / "plot.png"
    methods = "lattice,fedavg,standalone"
    demo.demo("digits", devices=2, rounds=2, seed=1, methods=methods, json_file=out, plot=plot, keep_files=folder)
    written = json.loads(out.read_text())
    assert set(written) == {"command", "commit", "machine", "methods", "compaction", "settings"}
    assert set(written["methods"]) == {"lattice", "fedavg", "standalone"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    for record in written["methods"].values():
        assert record.keys() >= FIGURES
        assert 0 < record["score_worst"] <= record["score_mean"] <= 1
    starts = {record["score_start"] for record in written["methods"].values()}
    assert len(starts) == 1
    assert 0 <= starts.pop() < 0.5
    lattice, fedavg = written["methods"]["lattice"], written["methods"]["fedavg"]
    # In two rounds steps are finer than in longer runs.
    assert lattice["bytes_per_device"] < fedavg["bytes_per_device"] / 20
    assert lattice["bytes_up_per_device_round"] > written["methods"]["standalone"]["bytes_up_per_device_round"]
    compact = written["compaction"]
    assert compact["parameters_compact"] < 0.4 * compact["parameters_dense"]
    assert compact["parameters_dense"] == 249_930
    assert written["settings"]["methods"]["lattice"]["prune_after"] == 1  # of two rounds
    assert compact["latency_dense_ms"] > 0
    assert compact["latency_compact_ms"] > 0
    assert compact["max_abs_diff"] <= 1e-4
    assert written["settings"]["rounds"] == 2
    assert len(list(folder.glob("lattice/*/personal.onnx"))) == 2
    said = capsys.readouterr().out.splitlines()
    table = said[[line.startswith("digits: every device") for line in said].index(True) :]
    for name in written["methods"]:
        assert any(line.startswith(name + " ") for line in table)
    assert max(len(line) for line in table if str(tmp_path) not in line) <= 80
    text = " ".join(" ".join(table).split())
    assert "which to choose" in text
    assert "when devices have no network" in text
    times = fedavg["bytes_per_device"] / lattice["bytes_per_device"]
    assert f"fedavg at its best, at 1/{times:,.0f} of its bytes" in text
    assert text.count(f"1/{times:,.0f}") == 2
    ratio = compact["latency_dense_ms"] / compact["latency_compact_ms"]
    assert f"runs {ratio:.1f} times as fast" in text
    assert f"{compact['parameters_compact']:,.0f}" in text
    bases = lattice["score_start"], written["methods"]["standalone"]["score_mean"]
    assert text.count("warning: lattice") == sum(lattice["score_mean"] < base for base in bases)


def test_the_compact_latency_is_the_median_device_s_and_the_dense_one_the_whole_model_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = find_bundle("digits")
    names = ("a", "b", "c")
    reports = [
        Report(score=0.5, test_samples=4, parameters_dense=6570, parameters_compact=size, max_abs_diff=size / 1e9)
        for size in (900, 500, 600)
    ]
    devices = [
        Device(device=name, enrolled_at=0, last_seen_at=0, updates=1, bytes_up=0, bytes_down=0, report=report)
        for name, report in zip(names, reports, strict=True)
    ]
    models = {name: tmp_path / f"{name}.onnx" for name in names}
    took = {"dense.onnx": 9.0, "a.onnx": 4.0, "b.onnx": 1.0, "c.onnx": 2.0}
    monkeypatch.setattr(demo, "latency", lambda files, sample: tuple(took[f.name] for f in files))
    sample = np.zeros((1, *bundle.manifest.input.shape), np.float32)
    found = demo.compaction(bundle, demo.Ended([], devices, b"", models), sample, tmp_path)
    assert found == {
        "parameters_dense": 6570,
        "parameters_compact": 600,
        "latency_dense_ms": 9.0,
        "latency_compact_ms": 2.0,
        "max_abs_diff": 9e-7,
    }
    assert (tmp_path / "dense.onnx").is_file()


def test_the_demo_compares_ours_with_fedavg_and_training_alone() -> None:
    default = inspect.signature(demo.demo).parameters["methods"].default
    assert default == "lattice,fedavg,standalone"
    assert all(name in CHOICE for name in default.split(","))


@pytest.mark.parametrize("data", ["digits", "har"])
def test_the_committed_runs_keep_the_demo_s_promise(data: str) -> None:
    run = json.loads((RESULTS / f"{data}.json").read_text())
    lattice, fedavg, alone = (run["methods"][name] for name in ("lattice", "fedavg", "standalone"))
    compact, best = run["compaction"], max(fedavg["score_mean"], fedavg["score_mean_after_local_epochs"])
    assert lattice["score_mean"] > best - 0.0105  # a point, as it is printed
    assert lattice["score_mean"] > alone["score_mean"]
    assert lattice["bytes_per_device"] < fedavg["bytes_per_device"] / 30
    assert compact["parameters_compact"] <= 0.4 * compact["parameters_dense"]
    assert compact["latency_dense_ms"] >= 1.5 * compact["latency_compact_ms"]


def test_the_readme_shows_the_end_of_the_committed_run() -> None:
    run, out = json.loads((RESULTS / "digits.json").read_text()), io.StringIO()
    made = {name: make_method(table) for name, table in run["settings"]["methods"].items()}
    console = Console(file=out, width=80, highlight=False, soft_wrap=True)
    title = f"digits: every device's own model after {run['settings']['rounds']} rounds"
    console.print(demo_report.end(title, run["methods"], run["compaction"], made))
    shown = "\n".join(line.rstrip() for line in out.getvalue().splitlines())
    assert shown in (RESULTS.parents[2] / "README.md").read_text(), shown


@pytest.mark.parametrize(("rounds", "after"), [(2, 1), (5, 2), (100, 4)])
def test_a_short_demo_prunes_early_enough(rounds: int, after: int) -> None:
    for data in SETTINGS:
        assert settings("lattice", data, rounds)["prune_after"] == after
        assert make_method(settings("lattice", data, rounds)).name == "lattice"
    assert settings("fedpm", "har", rounds) == {"name": "fedpm"}


def test_a_method_below_its_start_or_below_training_alone_is_named_with_what_helps() -> None:
    methods = {"mine": make_method({"name": "coupled", "epochs": 5}), "standalone": make_method({"name": "standalone"})}
    good, bad = {"score_mean": 0.9, "score_start": 0.1}, {"score_mean": 0.05, "score_start": 0.1}
    assert warnings({"mine": {**good, "score_mean": 0.95}, "standalone": good}, methods) == []
    (alone,) = warnings({"mine": {**good, "score_mean": 0.5}, "standalone": good}, methods)
    assert warnings({"mine": {**good, "score_mean": 0.7}, "standalone": good}, methods, tested=12) == []
    assert len(warnings({"mine": {**good, "score_mean": 0.6}, "standalone": good}, methods, tested=12)) == 1
    assert len(warnings({"mine": {**good, "score_mean": 0.7}, "standalone": good}, methods, tested=200)) == 1
    steps = "batch = 32, as standalone has (here 64), then more epochs"
    hint = f"theta0 = 0.5 for weights from a seed, then {steps}, then lr and more rounds"
    assert alone == f"mine ends at 0.500, below training alone (0.900); what most often helps: {hint}"
    start, alone = warnings({"mine": bad, "standalone": good}, methods)
    assert "below the bundle's own start (0.100)" in start
    assert "below training alone (0.900)" in alone
    assert len(warnings({"mine": bad}, methods)) == 1  # without Standalone only the start is known
    assert warnings({"mine": {"score_mean": None, "score_start": None}}, methods) == []


def test_standalone_too_is_named_below_its_start_when_there_are_samples_enough_to_say_so() -> None:
    methods = {"standalone": make_method({"name": "standalone"})}

    def said(score: float, tested: int) -> list[str]:
        return warnings({"standalone": {"score_mean": score, "score_start": 77 / 96}}, methods, tested)

    (enough,) = said(76 / 96, 100)
    assert enough.startswith("standalone ends at 0.792, below the bundle's own start (0.802); ")
    assert said(76 / 96, 96) == []  # one sample of 96; two standard errors of a share are .102
    assert said(0.71, 96) == []
    assert len(said(0.69, 96)) == 1


def test_a_method_above_its_start_but_below_half_of_the_best_is_named() -> None:
    methods = {name: make_method({"name": name}) for name in ("fedpm", "fedavg", "coupled")}
    scores = {"fedpm": 0.186, "fedavg": 0.956, "coupled": 0.5}
    records = {name: {"score_mean": score, "score_start": 0.1} for name, score in scores.items()}
    (said,) = warnings(records, methods)
    assert said.startswith("fedpm ends at 0.186, below half of fedavg's score (0.956); what most often helps: ")
    records["fedpm"]["score_start"] = 0.3  # then that says it
    (said,) = warnings(records, methods)
    assert "below the bundle's own start (0.300)" in said


def test_lattice_is_named_when_it_ends_three_points_below_fedavg_and_other_methods_are_not() -> None:
    tables = ({"name": "lattice"}, {"name": "stc"}, {"name": "fedavg"}, {"name": "fedavg", "epochs": 1})
    methods = dict(zip(("mine", "stc", "fedavg", "short"), map(make_method, tables), strict=True))

    def said(mine: float, tested: int = 1000) -> list[str]:
        scores = {"mine": mine, "stc": 0.7, "fedavg": 0.9, "short": 0.8}
        return warnings({name: {"score_mean": s, "score_start": 0.1} for name, s in scores.items()}, methods, tested)

    assert said(0.88) == []
    (sentence,) = said(0.86)
    assert sentence.startswith("mine ends at 0.860, below fedavg's score (0.900); what most often helps: lr")
    assert "a smaller quantum" in sentence
    assert "budget = 1, for more bytes" in sentence
    assert said(0.86, tested=50) == []  # within two standard errors
    small = find_bundle("digits").model()
    assert make_method({"name": "lattice"}).hints(small) == ("lr", "more epochs", "a smaller quantum")
    assert make_method({"name": "lattice", "budget": 1, "prune": 0.4}).hints()[2:] == (
        "a larger prune",
        "a smaller quantum",
    )


def test_more_steps_are_advised_with_their_number_and_after_what_random_weights_need_first() -> None:
    record, trained = {"score_mean": 0.5, "score_start": 0.1}, find_bundle("digits").model()
    assert trained.manifest.seed is not None
    drawn, better = trained, {"score_mean": 0.9, "score_start": 0.1}
    trained = replace(drawn, manifest=drawn.manifest.model_copy(update={"seed": None}))

    def said(name: str, model: Model | None, **table: Any) -> str:
        methods = {"mine": make_method({"name": name, **table}), "alone": make_method({"name": "standalone"})}
        (sentence,) = warnings({"mine": record, "alone": better}, methods, model=model)
        return sentence.partition("most often helps: ")[2]

    steps = "epochs = 5 and batch = 32, as alone has (here 1 and 64), then "
    assert said("coupled", drawn) == f"theta0 = 0.5, then {steps}lr and more rounds"
    assert said("coupled", drawn, theta0=0.5) == said("coupled", trained) == f"{steps}lr and more rounds"
    assert said("coupled", drawn, theta0=0.5, epochs=5, batch=16) == "more epochs, then lr and more rounds"
    assert said("fedavg", None, epochs=1) == "epochs = 5, as alone has (here 1), then lr (here 0.01), then more rounds"
    assert said("fedavg", None, batch=64) == "batch = 32, as alone has (here 64), then lr (here 0.01), then more rounds"
    assert said("fedavg", None, batch=128, epochs=10).startswith(
        "epochs = 5 and batch = 32, as alone has (here 10 and 128)"
    )
    assert said("fedavg", None, batch=64, epochs=10) == "lr (here 0.01), then more rounds"  # as many steps


class Whole(FedAvg):
    """A method of another package, which trains on all samples at once."""

    batch: int = 0


def test_a_method_whose_batch_is_no_number_of_samples_has_no_advice_on_its_steps() -> None:
    methods = {"mine": Whole(), "alone": make_method({"name": "standalone", "epochs": 9, "batch": 4})}
    scores = {"mine": {"score_mean": 0.5, "score_start": 0.1}, "alone": {"score_mean": 0.9, "score_start": 0.1}}
    (said,) = warnings(scores, methods)
    assert said.endswith("what most often helps: lr (here 0.01), then more rounds")


def test_hermes_whose_devices_all_stay_whole_is_named_whatever_it_scores() -> None:
    methods = {"h": make_method({"name": "hermes"}), "fedavg": make_method({"name": "fedavg"})}
    scores = {"score_mean": 0.9, "score_start": 0.1}
    (said,) = warnings({"h": {**scores, "kept_share": 1.0}, "fedavg": {**scores, "kept_share": 1.0}}, methods)
    assert said.startswith("h: nothing was pruned: no validation score was above threshold = 0.5")
    out = io.StringIO()
    warn(Console(file=out), [f"{said} ([data] validation)"])
    assert "([data] validation)" in " ".join(out.getvalue().split())  # brackets are no markup
    assert warnings({"h": {**scores, "kept_share": 0.99}, "fedavg": scores}, methods) == []


def a_round(round_: int, up: int, before: float, last: int = 0) -> Round:
    same = Scores(mean=before, worst=before, p10=before, best=before)
    traffic = Traffic(up={"mask": up}, down={"mask": 20}, one_time_up={"structure": 10} if round_ == 1 else {})
    if last:
        traffic = traffic.model_copy(update={"last_down": {"mask": last}})
    return Round(
        round=round_, devices=["a", "b"], traffic=traffic, bits_per_parameter_up=1, bits_per_parameter_down=1, loss=1,
        score_before=same, score_after=same, seconds=1,
    )  # fmt: skip


def test_a_curve_has_the_bytes_up_to_each_round_and_the_score_after_it() -> None:
    points = curve([a_round(1, 30, 0.1), a_round(2, 50, 0.6, last=24)], 2, 0.8)
    # Down 20, up 30 + 10 once, down 20: 80 bytes of two devices led to 0.6; up 50, down 24 after the last round to 0.8.
    assert points == [Point(1, 40.0, 0.6), Point(2, 77.0, 0.8)]


def test_a_round_without_measurements_has_no_point_and_no_figures() -> None:
    silent = a_round(2, 0, 0.0).model_copy(update={"loss": None, "score_before": None, "score_after": None})
    points = curve([a_round(1, 30, 0.1), silent, a_round(3, 50, 0.6, last=24)], 2, 0.8)
    assert [p.round for p in points] == [2, 3]  # round 2 measured nothing, so round 1 has no score
    assert (shown(mean(silent.score_before), ".1%"), shown(silent.loss, ".3f"), shown(0.25, ".1%")) == (
        "-",
        "-",
        "25.0%",
    )


def test_the_sketch_has_every_method_at_its_bytes_and_score() -> None:
    text = sketch({"ours": [Point(1, 100, 0.5), Point(2, 1000, 1.0)], "theirs": [Point(1, 10_000, 1.0)]}, 47, 11)
    lines = text.splitlines()
    assert lines[0] == " 1.0 |" + " " * 20 + "o" + " " * 18 + "x"
    assert lines[10] == " 0.5 |o"
    assert lines[-1].split() == ["o", "ours", "x", "theirs"]
    assert lines[-2].split("  ")[-1].strip() == "10.0 kB"
    assert all(len(line) <= 47 for line in lines)
    alone = sketch({"one": [Point(1, 0, 0.0)]})
    assert alone.splitlines()[-1].strip() == "o one"
    assert "o" in alone.splitlines()[-4]
    hopeless = sketch({"one": [Point(1, 100, -5e5), Point(2, 1000, 0.4)]}).splitlines()  # R^2 has no lower bound
    assert hopeless[0].startswith(" 0.4 |")
    assert hopeless[13].startswith("-1.0 |o")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_400, "99.4 kB"),
        (99_500, "100 kB"),
        (2e6, "2.0 MB"),
        (3e9, "3.0 GB"),
    ],
)
def test_amounts_are_short(count: float, text: str) -> None:
    assert amount(count) == text


@pytest.mark.parametrize(("number", "due"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_every_process_and_removes_the_files(number: signal.Signals, due: int, tmp_path: Path) -> None:
    code = "from edge_client.cli import main; main()"
    arguments = ["demo", "--data", "digits", "--devices", "2", "--rounds", "500", "--method", "standalone"]
    running = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
    )
    try:
        parent, deadline = psutil.Process(running.pid), time.monotonic() + PATIENCE
        while len(parent.children()) < 3 and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        family = parent.children(recursive=True)  # with the process in which a device checks its graphs, if it runs
        assert len(parent.children()) == 3
        running.send_signal(number)
        out, _ = running.communicate(timeout=PATIENCE)
    finally:
        if running.poll() is None:
            running.terminate()
    assert running.returncode == due
    assert b"every process of the demo has ended" in out
    end = time.monotonic() + PATIENCE
    while not all(map(ended, family)):  # processes of the devices are reaped by the system, a moment later
        assert time.monotonic() < end, family
        time.sleep(0.05)
    assert not list(tmp_path.glob("maskfleet-demo-*"))


def test_ctrl_c_while_a_process_is_started_ends_that_process_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, begun = subprocess.Popen, []

    def interrupted(*given: Any, **more: Any) -> Any:
        begun.append(popen(*given, **more))
        os.kill(os.getpid(), signal.SIGINT)
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted)
    with pytest.raises(KeyboardInterrupt), children() as start:
        start("the coordinator", ["serve", "--port", "0", "--data", str(tmp_path / "c")], tmp_path / "log", {})
    assert begun[0].poll() is not None


def test_a_process_that_fails_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with children() as start:
        failing = start("a device", ["join", "nonsense", "--token", "x", "--data", "x.npz"], tmp_path / "log", {})
        failing.popen.wait(PATIENCE)
        with pytest.raises(ProcessError, match=r"a device ended with code [^0][\s\S]*nonsense"):
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
        demo.demo("digits", devices=2, rounds=1, seed=0, methods="fedavg", json_file=None, keep_files=tmp_path)
    with pytest.raises(ConfigError, match="once"):
        demo.demo("digits", devices=2, rounds=1, seed=0, methods="fedavg,fedavg", json_file=None, keep_files=None)
    with pytest.raises(ConfigError, match="alchemy"):
        demo.demo("digits", devices=2, rounds=1, seed=0, methods="alchemy", json_file=None, keep_files=None)
