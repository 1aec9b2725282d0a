"""`maskfleet tune`: which trials are made, that they are kept, and what is written at the end."""

from __future__ import annotations

import json
import signal
import sqlite3
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from edge_bench import toml_text
from edge_bench.data import datasets
from edge_bench.own_model import ExportConfig
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import open_simulation
from edge_bench.simulation.simulate import RoundRow
from edge_bench.simulation.trials import Plan, Trial, best, open_trials, search
from edge_bench.simulation.tune import federation_toml, open_plan, read_size, tune
from edge_bench.simulation.workers import WorkerEndedError
from hypothesis import given
from hypothesis import strategies as st

from edge_client import toml
from edge_client.errors import ConfigError, StateError
from edge_client.methods import Range, make_method
from edge_client.methods.fedavg import FedAvg
from edge_client.protocol.messages import FederationConfig

optuna = pytest.importorskip("optuna")
pytest.importorskip("sklearn")
NAMES = sorted(e.name for e in entry_points(group="maskfleet.methods"))
FILE = """
bundle = "digits"
rounds = 3
cohort = 3
[data]
name = "digits"
devices = 3
samples = 240
[methods.fedavg]
lr = 0.0001
epochs = 1
[methods.standalone]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(FILE)
    return path


def plan(file: Path, trials: int = 5, most_bytes: float | None = None, methods: str = "fedavg") -> Plan:
    return open_plan(file, methods, trials, most_bytes)[0]


def storage(path: Path) -> Any:
    return optuna.storages.RDBStorage(f"sqlite:///{path}")


@pytest.mark.parametrize("name", NAMES)
def test_every_method_names_settings_to_search_that_it_takes(name: str) -> None:
    method = make_method({"name": name})
    assert method.search
    for setting, values in method.search.items():
        for value in (values.low, values.high) if isinstance(values, Range) else values:
            assert getattr(make_method({"name": name, setting: value}), setting) == value


def test_a_search_finds_better_settings_and_writes_files_that_run(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = file.parent / "best.toml"
    file.write_text('guard = "drop"\n' + FILE)
    tune(file, method="fedavg", trials=5, out=out, json_file=file.parent / "r.json")
    record = json.loads((file.parent / "r.json").read_text())["methods"]["fedavg"]
    first, top = record["trials"][0], record["best"]
    assert first["settings"] == {}
    assert first["score"] < 0.2 < 0.4 < top["score"]
    assert top["score"] == max(t["score"] for t in record["trials"] if t["score"] is not None)
    config, _, _ = open_simulation(out)
    assert config.methods == {"fedavg": {"lr": top["settings"]["lr"], "epochs": top["settings"]["epochs"]}}
    assert config.data.evaluate == "test"
    federation = toml.loads((file.parent / "best.federation.toml").read_text())
    assert federation.pop("bundle") == "digits"
    created = FederationConfig(bundle="0" * 64, **federation)
    assert created.method == {"name": "fedavg", **config.methods["fedavg"]}
    assert (created.min_devices, created.guard, created.personalise) == (3, "drop", "best")
    said = capsys.readouterr().out
    assert f"{first['score']:.3f} at" in said
    assert f"{top['score']:.3f} at" in said
    lines = [line for line in said.splitlines() if " trial " in line]
    assert lines[0].endswith(" s  fedavg trial 1/5  begins: as configured")  # at once, also in a log
    ends = [line for line in lines if line.startswith("fedavg trial")]  # other lines begin with the time
    assert [line.split()[2] for line in ends] == [f"{n}/5" for n in range(1, 6)]


def test_a_file_s_name_that_no_federation_can_have_is_made_so_and_quoted_in_commands(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = file.parent / "mein läuf.toml"
    tune(file, method="fedavg", trials=1, out=out)
    written = toml.loads((file.parent / "mein läuf.federation.toml").read_text("utf-8"))
    assert FederationConfig.model_validate({**written, "bundle": "0" * 64}).name == "mein-l-uf"
    said = capsys.readouterr().out
    assert f"maskfleet simulate '{out}'" in said
    assert f"maskfleet federation create '{out.with_suffix('.federation.toml')}'" in said


def test_one_trial_of_one_round_is_not_printed_as_many(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(FILE.replace("rounds = 3", "rounds = 1"))
    tune(file, method="standalone", trials=1)
    assert "1 trial of standalone; 1 round on 3 devices, " in capsys.readouterr().out


def test_a_bundle_of_the_cache_is_named_with_the_command_that_writes_one(file: Path) -> None:
    found, trial = plan(file), Trial(0, {}, "ended", 0.5, 9.0, 3)
    assert "#" not in federation_toml("best", found, "fedavg", trial)
    own = found.config.model_copy(
        update={"bundle": "/x/my model.py:build", "export": ExportConfig.model_validate({"seed": 1})}
    )
    lines = federation_toml("best", replace(found, config=own), "fedavg", trial).splitlines()
    assert lines[1] == (
        "# maskfleet export '/x/my model.py:build' --input 64 --seed 1 --about devices/about.toml -o bundle"
    )
    assert lines[2] == "# `maskfleet data split` writes devices/about.toml."
    built = found.config.model_copy(update={"bundle": "mlp-har"})
    text = federation_toml("best", replace(found, config=built), "fedavg", trial)
    assert text.startswith("# The bundle 'mlp-har', built into the cache.\nname = ")


@pytest.mark.parametrize("name", ["run.toml", "best.toml", "best.trials", "best.federation.toml"])
def test_a_record_that_would_overwrite_what_the_search_reads_or_writes_is_refused(file: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"--json .*{name} would overwrite"):
        tune(file, trials=1, out=file.parent / "best.toml", json_file=file.parent / name)


def test_files_of_the_search_are_not_one_another_or_the_one_that_is_read(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--out .*best\.trials: the trials lie in best\.trials, .*choose another"):
        tune(file, trials=1, out=file.parent / "best.trials")
    read = file.rename(file.parent / "best.federation.toml")
    with pytest.raises(ConfigError, match=r"--out .*best\.toml: .*the federation in best\.federation\.toml; choose"):
        tune(read, trials=1, out=file.parent / "best.toml")
    assert read.read_text() == FILE
    with pytest.raises(ConfigError, match=r"--out \. is a folder"):
        tune(read, trials=1, out=Path())
    with pytest.raises(ConfigError, match=r"\. cannot be read"):
        tune(Path(), trials=1)


def test_stored_trials_that_cannot_be_read_are_named_with_what_to_do(file: Path) -> None:
    (file.parent / "run.tuned.trials").write_bytes(b"no database at all, but long enough for its header" * 90)
    with pytest.raises(ConfigError, match=r"run\.tuned\.trials holds no trials: .*; delete it, or give another --out"):
        tune(file, trials=1)


def test_a_full_disk_does_not_ask_to_delete_the_trials(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = sqlite3.OperationalError("database or disk is full")
    connect = sqlite3.connect

    class Full(sqlite3.Connection):
        def commit(self) -> None:
            raise full

    monkeypatch.setattr(sqlite3, "connect", lambda *given, **named: connect(*given, **named, factory=Full))
    with pytest.raises(StateError, match=r"cannot use .*run\.tuned\.trials: database or disk is full; mend its disk"):
        tune(file, trials=1)


def test_trials_of_a_version_that_compared_more_are_refused_by_what_it_compared(file: Path) -> None:
    tune(file, method="fedavg", trials=1)
    with sqlite3.connect(file.parent / "run.tuned.trials") as stored:
        ((asked,),) = stored.execute("SELECT value_json FROM study_user_attributes WHERE key = 'asked'")
        older = json.dumps(json.dumps({**json.loads(json.loads(asked)), "weather": 1}))
        stored.execute("UPDATE study_user_attributes SET value_json = ? WHERE key = 'asked'", (older,))
    with pytest.raises(ConfigError, match=r"trials of 'fedavg' are of another weather; give another --out"):
        tune(file, method="fedavg", trials=1)


def test_a_second_search_on_the_same_trials_is_refused_and_the_first_one_goes_on(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def second(*given: Any, **named: Any) -> Any:
        with pytest.raises(ConfigError, match=r"another search is using .*run\.tuned\.trials; wait for it"):
            tune(file, trials=1)
        return run_all(*given, **named)

    monkeypatch.setattr("edge_bench.simulation.trials.run_all", second)
    tune(file, method="fedavg", trials=1)
    assert "wrote" in capsys.readouterr().out


def test_trials_lie_beside_the_output_also_in_a_folder_whose_name_has_signs_of_a_url(tmp_path: Path) -> None:
    file = tmp_path / "what?x=50%25{a}.trials"
    open_trials(file)
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_no_trial_sees_a_test_sample(file: Path) -> None:
    config, bundle, tested = open_simulation(file)
    assert config.data.evaluate == "test"
    assert datasets.load(config.data, config.seed, bundle.manifest).keys() == tested.keys()
    for name, device in plan(file).devices.items():
        used = {x.tobytes() for x in np.concatenate([device.x, device.x_test])}
        assert not used & {x.tobytes() for x in tested[name].x_test} - {x.tobytes() for x in tested[name].x}
        assert len(device.y) + len(device.y_test) == len(tested[name].y)


def test_the_same_seed_gives_the_same_trials_however_often_the_search_is_interrupted(
    file: Path, tmp_path: Path
) -> None:
    whole = search("fedavg", plan(file, 7), storage(tmp_path / "whole"))
    heard: list[Trial] = []

    def stop(_: Trial, row: RoundRow | None) -> None:
        if len(heard) in (2, 6) and row is not None and row.record.round == 2:
            heard.append(heard[-1])
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            search("fedavg", plan(file, 7), storage(tmp_path / "parts"), stop, heard.append)
    assert search("fedavg", plan(file, 7), storage(tmp_path / "parts")) == whole
    file.write_text(f"seed = 1\n{file.read_text()}")
    other = plan(file, 2)
    assert search("fedavg", other, storage(tmp_path / "other"))[1].settings != whole[1].settings


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_search_that_is_stopped_says_that_the_same_command_goes_on(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    monkeypatch.setattr("edge_bench.simulation.trials.run_all", lambda *given, **named: signal.raise_signal(number))
    with pytest.raises(typer.Exit) as stopped:
        tune(file, method="fedavg", trials=1)
    assert stopped.value.exit_code == code
    assert "stopped; the same command goes on" in capsys.readouterr().out


def test_a_worker_that_ends_says_nothing_of_the_settings_and_its_trial_is_made_again(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: Any, **named: Any) -> Any:
        raise WorkerEndedError("a worker process ended")

    with monkeypatch.context() as patch:
        patch.setattr("edge_bench.simulation.trials.run_all", killed)
        with pytest.raises(WorkerEndedError):
            search("fedavg", plan(file, 1), storage(tmp_path / "t"))
    (trial,) = search("fedavg", plan(file, 1), storage(tmp_path / "t"))
    assert (trial.number, trial.settings, trial.state) == (0, {}, "ended")


def test_a_larger_number_of_trials_adds_to_those_that_are_stored(file: Path, tmp_path: Path) -> None:
    few = search("fedavg", plan(file, 3), storage(tmp_path / "t"))
    heard: list[Trial] = []
    more = search("fedavg", plan(file, 5), storage(tmp_path / "t"), said=heard.append)
    assert more[:3] == few
    assert more[3:] == heard
    assert [t.number for t in more] == [0, 1, 2, 3, 4]


def test_stored_trials_of_another_configuration_or_method_are_refused(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search("fedavg", plan(file, 1), storage(tmp_path / "t"))
    with monkeypatch.context() as patch:
        patch.setattr(FedAvg, "revision", 2)
        with pytest.raises(ConfigError, match=r"of another revision; give another --out"):
            search("fedavg", plan(file, 1), storage(tmp_path / "t"))
    file.write_text(FILE.replace("rounds = 3", "rounds = 2"))
    with pytest.raises(ConfigError, match=r"of another config; give another --out"):
        search("fedavg", plan(file, 2), storage(tmp_path / "t"))


def test_trials_belong_to_the_samples_and_not_to_the_path_of_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.random.default_rng(0).random((120, 64), np.float32), np.arange(120) % 10
    np.savez(tmp_path / "mine.npz", x=x, y=y)
    data = 'name = "npz"\npath = "mine.npz"\ndevices = 3\n'
    (tmp_path / "run.toml").write_text(FILE.replace('name = "digits"\ndevices = 3\nsamples = 240\n', data))
    search("fedavg", plan(tmp_path / "run.toml", 1), storage(tmp_path / "t"))
    monkeypatch.chdir(tmp_path)
    assert len(search("fedavg", plan(Path("run.toml"), 2), storage(tmp_path / "t"))) == 2
    np.savez(tmp_path / "mine.npz", x=1 - x, y=y)
    with pytest.raises(ConfigError, match=r"of another data; give another --out"):
        search("fedavg", plan(tmp_path / "run.toml", 3), storage(tmp_path / "t"))


def test_settings_that_make_training_fail_are_told_and_the_search_goes_on(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(make_method({"name": "fedavg"}))
    monkeypatch.setattr(kind, "search", {"lr": Range(900.0, 1000.0)})
    trials = search("fedavg", plan(file, 3), storage(tmp_path / "t"))
    assert [t.state for t in trials] == ["ended", "failed", "failed"]
    assert "lower `lr`" in trials[1].reason
    assert best(trials) == trials[0]
    monkeypatch.setattr(kind, "search", {})
    with pytest.raises(ConfigError, match="names no settings to search"):
        search("fedavg", plan(file, 3), storage(tmp_path / "u"))


def test_a_trial_behind_the_others_is_given_up_and_an_equal_one_is_not(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type(make_method({"name": "fedavg"}))
    file.write_text(FILE.replace("lr = 0.0001", "lr = 0.05"))
    monkeypatch.setattr(kind, "search", {"lr": (0.05,)})
    same = search("fedavg", plan(file, 6), storage(tmp_path / "t"))
    assert {t.state for t in same} == {"ended"}
    rates = "edge_bench.simulation.trials.suggested"
    monkeypatch.setattr(rates, lambda trial, _: {"lr": 0.05 if trial.number < 5 else 1e-6})
    worse = search("fedavg", plan(file, 7), storage(tmp_path / "u"))
    assert [t.state for t in worse] == ["ended"] * 5 + ["given up"] * 2


def test_devices_without_validation_samples_are_refused_before_a_trial_runs(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        FILE.replace("samples = 240", 'split = "classes"\nper_class = 9\nvalidation_per_class = 0\ntest_per_class = 9')
    )
    monkeypatch.setattr("edge_bench.simulation.trials.run_all", lambda *given, **named: pytest.fail("ran a trial"))
    with pytest.raises(ConfigError, match="no device has validation samples to score on; give the devices more data"):
        tune(file, method="fedavg", trials=1)


def ended(number: int, score: float, size: float) -> Trial:
    return Trial(number, {}, "ended", score, size, 3)


def test_the_best_trial_is_within_the_bytes_and_of_equal_ones_the_cheapest() -> None:
    trials = [ended(0, 0.9, 500), ended(1, 0.8, 90), ended(2, 0.8, 80), Trial(3, {}, "given up", None, None, 1)]
    assert best(trials).number == 0
    assert best(trials, 100).number == 2
    with pytest.raises(ConfigError, match="the fewest bytes were 80 B"):
        best(trials, 10)
    with pytest.raises(ConfigError, match="the last reason: diverged"):
        best([Trial(0, {}, "failed", None, None, 1, "diverged")])


def test_a_method_without_a_trial_within_the_bytes_is_named_and_the_others_are_written(
    file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "best.toml"
    with pytest.raises(ConfigError, match=r"^fedavg: no trial stays within 10\.0 kB; the fewest bytes were "):
        tune(file, trials=1, out=out, most_bytes="10kB")
    assert list(toml.loads(out.read_text())["methods"]) == ["standalone"]
    with pytest.raises(ConfigError, match=r"^fedavg: no trial"):
        tune(file, method="fedavg", trials=1, out=tmp_path / "none.toml", most_bytes="10kB")
    assert not (tmp_path / "none.toml").exists()


def test_paths_in_the_written_file_are_those_of_the_tuned_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    np.savez(tmp_path / "in" / "mine.npz", x=rng.random((120, 64), np.float32), y=np.arange(120) % 10)
    file = tmp_path / "in" / "run.toml"
    data = 'name = "npz"\npath = "mine.npz"\ndevices = 3\n'
    file.write_text(f'bundle = "digits"\nrounds = 1\ncohort = 3\n[data]\n{data}[methods.fedavg]\n')
    for folder in ("in", "out"):
        out = tmp_path / folder / "best.toml"
        tune(file, trials=1, out=out)
        assert open_simulation(out)[0].data.path == tmp_path / "in" / "mine.npz"
    assert toml.loads((tmp_path / "in" / "best.toml").read_text())["data"]["path"] == "mine.npz"
    monkeypatch.chdir(tmp_path / "in")
    tune(Path("run.toml"), trials=1, out=Path("../out/from-beside.toml"))
    assert open_simulation(tmp_path / "out" / "from-beside.toml")[0].data.path == tmp_path / "in" / "mine.npz"
    with pytest.raises(ConfigError, match=r"no folder .*nowhere for --out"):
        tune(Path("run.toml"), trials=1, out=Path("nowhere/best.toml"))


SIZES = {"200": 200, "200kB": 2e5, "1.5 MB": 1.5e6, "2 bags": None, "0": None, "-1": None, "kB": None}


@pytest.mark.parametrize(("text", "size"), SIZES.items())
def test_sizes(text: str, size: float | None) -> None:
    if size is not None:
        assert read_size(text) == size
        return
    with pytest.raises(ConfigError, match="200kB"):
        read_size(text)


VALUES = st.recursive(
    st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | st.text() | st.datetimes() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_toml_text_is_read_back_as_it_was(table: dict[str, Any]) -> None:
    assert toml.loads(toml_text.dumps(table)) == table


def test_the_file_itself_is_not_overwritten(file: Path) -> None:
    with pytest.raises(ConfigError, match="overwrite"):
        tune(file, out=file)
