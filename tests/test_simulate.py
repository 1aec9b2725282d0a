"""The simulator: the same bits twice, the same bits as over HTTP; data sets divided as they say."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from edge_bench.bundles import UNSEEN
from edge_bench.data import datasets
from edge_bench.data.table import DataConfig
from edge_bench.federation.fleet import fleet
from edge_bench.federation.record import federation
from edge_bench.simulation import cli as simulate_cli
from edge_bench.simulation.comparison import run_all
from edge_bench.simulation.file import SimulationConfig, find_bundle, read_config, refuse_seen
from edge_bench.simulation.record import simulated
from edge_bench.simulation.simulate import RoundRow, Simulated, run
from edge_bench.tables import by_kind
from edge_kernels import counter

from edge_client.bundle import WARNINGS, Bundle, digest
from edge_client.commands.exit_codes import ExitCode, exit_code
from edge_client.data import DeviceData
from edge_client.errors import BundleError, ConfigError, LostError, MaskfleetError
from edge_client.methods import make_method
from edge_client.methods.coupled import Coupled
from edge_client.methods.fedavg import FedAvg
from edge_client.methods.lattice.method import Lattice
from edge_client.methods.lgfedavg import LGFedAvg
from edge_client.methods.shared.averaging import Weights
from edge_client.methods.standalone import Standalone
from edge_client.protocol.messages import FederationConfig
from edge_client.protocol.payload import HEADER_BYTES, Payload
from edge_client.task import Assignment, Course, Local, Task
from edge_client.training import open_trainer

pytest.importorskip("sklearn")
METHODS: dict[str, dict[str, Any]] = {
    "fedmask": {"keep": 0.5, "epochs": 1},
    "counted": {"name": "fedmask", "down": "count", "head": "local", "restart": "latent", "epochs": 1},
    "coupled": {"head": "mask", "theta0": 0.5, "epochs": 1},
    "lattice": {"quantum": 2.0},
    "fedavg": {"epochs": 1},
    "standalone": {"epochs": 1},
}
OWN = {"seconds", "cost"}
"""What a run measures of its own machine, and a simulation does not."""
DIGITS = DataConfig(name="digits", devices=4, split="dirichlet", samples=400)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return find_bundle("digits")


@pytest.fixture(scope="module")
def devices(bundle: Bundle) -> dict[str, DeviceData]:
    return datasets.load(DIGITS, 5, bundle.manifest)


def simulation(file: Path, rounds: int, methods: str) -> None:
    """Write a simulation's file: three devices of 200 digits, and the tables of methods."""
    data = '[data]\nname = "digits"\ndevices = 3\nsamples = 200\n'
    file.write_text(f'bundle = "digits"\nrounds = {rounds}\ncohort = 3\n{data}{methods}')


def config(**changes: Any) -> SimulationConfig:
    table = {
        "bundle": "digits",
        "data": DIGITS.model_dump(exclude_unset=True),
        "methods": METHODS,
        "rounds": 3,
        "cohort": 2,
        "seed": 5,
    }
    return read_config({**table, **changes})


@pytest.fixture(scope="module")
def results(bundle: Bundle, devices: dict[str, DeviceData]) -> dict[str, Simulated]:
    return run_all(config(evaluate_every=2), bundle, devices)


def test_the_same_seed_is_the_same_run_bit_for_bit(
    bundle: Bundle, devices: dict[str, DeviceData], results: dict[str, Simulated]
) -> None:
    again = run_all(config(evaluate_every=2), bundle, devices)
    for label, first in results.items():
        assert (first.state_sha256, first.personal_sha256) == (again[label].state_sha256, again[label].personal_sha256)
        assert first.final == again[label].final
    other = run_all(config(seed=6, methods={"fedmask": METHODS["fedmask"]}), bundle, devices)
    assert other["fedmask"].state_sha256 != results["fedmask"].state_sha256


def test_a_simulation_ends_with_the_same_bits_as_real_processes_over_http(
    tmp_path: Path, bundle: Bundle, devices: dict[str, DeviceData], results: dict[str, Simulated]
) -> None:
    with fleet(tmp_path, bundle, devices) as running:
        for label in ("fedmask", "counted", "coupled", "lattice"):
            keys = {device: counter.key(5, "secret", device) for device in devices}
            asked = FederationConfig(
                name=label, bundle=running.bundle, method={"name": label, **METHODS[label]}, rounds=3, cohort=2, seed=5,
                guard="clip",
            )  # fmt: skip
            real = running.run(asked, secrets_of=keys)
            assert digest(real.state) == results[label].state_sha256
            assert real.scores() == results[label].final
            carried = sum(d.bytes_up + d.bytes_down for d in real.devices) / len(devices)
            record = simulated(results[label])
            measured = federation(real)
            assert record["bytes_per_device"] == carried == measured["bytes_per_device"]
            assert record["bytes_by_kind"] == measured["bytes_by_kind"]
            assert sum(record["bytes_by_kind"]["last_down"].values()) == 4 * record["last_bytes_down_per_device"] > 0
            assert measured["uncounted_bytes_per_device"] == {"up": 0, "down": 0}
            again = [real.devices[0].model_copy(update={"bytes_down": real.devices[0].bytes_down + 400})]
            wasteful = federation(replace(real, devices=[*again, *real.devices[1:]]))
            assert wasteful["uncounted_bytes_per_device"] == {"up": 0, "down": 100}
            assert "again or in vain, 100 in all" in " ".join(by_kind({label: wasteful}).split())
            assert wasteful["bytes_per_device"] == carried
            assert record["curve"][-1]["bytes"] == carried
            for there, row in zip(real.rounds, results[label].rows, strict=True):
                assert there.model_dump(exclude=OWN) == row.record.model_dump(exclude=OWN)


def test_every_cohort_has_the_size_asked_for_and_methods_share_it(results: dict[str, Simulated]) -> None:
    cohorts = [[row.record.devices for row in r.rows] for r in results.values()]
    assert all(len(c) == 2 for c in cohorts[0])
    assert all(c == cohorts[0] for c in cohorts)


def test_the_record_counts_what_was_carried(bundle: Bundle, results: dict[str, Simulated]) -> None:
    d = bundle.manifest.d
    records = {label: simulated(r) for label, r in results.items()}
    json.dumps(records)
    fedavg = records["fedavg"]
    assert fedavg["bytes_by_kind"]["up"]["parameters"] == 3 * 2 * 4 * d
    assert fedavg["bits_per_parameter_up"] == 8 * fedavg["bytes_up_per_device_round"] / d
    assert records["standalone"]["bytes_by_kind"]["down"].keys() == {"header"}
    fedmask = records["fedmask"]
    live = round(0.5 * 64 * 32) + round(0.5 * 32 * 10) + 64 * 64
    assert 0 < fedmask["bytes_by_kind"]["up"]["changes.auto"] < 3 * 2 * -(-live // 8)
    turns = [device for row in results["fedmask"].rows for device in row.record.devices]
    assert fedmask["bytes_by_kind"]["one_time_up"] == {"structure.bits": len(set(turns)) * (64 * 32 + 32 * 10) // 8}
    assert fedmask["bytes_as_the_paper_counts"]["up"] == (64 * 64 + 64 * 32 + 32 * 10) // 8
    assert [row["round"] for row in fedmask["rounds"]] == [1, 2, 3]
    assert "score_of_all_devices" in fedmask["rounds"][1]
    assert "score_of_all_devices" not in fedmask["rounds"][2]


def test_the_command_writes_a_record_for_each_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    simulation(
        file,
        9,
        "[methods.fedmask]\nepochs = 1\n[methods.fast]\nname = 'fedavg'\nlr = 0.05\nepochs = 1\n[methods.standalone]\n",
    )
    simulate_cli.simulate(file, json_file=out, rounds=2, seed=None, method="fedmask,fast")
    written = json.loads(out.read_text())
    assert set(written["methods"]) == {"fedmask", "fast"}
    assert written["methods"]["fast"]["settings"]["lr"] == 0.05
    assert len(written["methods"]["fedmask"]["rounds"]) == 2
    assert 0 < written["methods"]["fedmask"]["score_worst"] <= written["methods"]["fedmask"]["score_mean"] <= 1
    assert "bits" in capsys.readouterr().out


def test_a_label_is_printed_as_it_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    simulation(file, 1, '[methods."[/] [red] :key:"]\nname = "fedavg"\nepochs = 1\n')
    simulate_cli.simulate(file)
    assert capsys.readouterr().out.count("[/] [red] :key:") >= 3  # the progress, the table, the bytes by kind


def test_a_damaged_bundle_ends_the_command_with_its_own_exit_code(tmp_path: Path) -> None:
    copy = shutil.copytree(find_bundle("digits").folder, tmp_path / "digits")
    (copy / "train.onnx").write_bytes(b"")
    file = tmp_path / "run.toml"
    file.write_text(
        f'bundle = "{copy}"\nrounds = 1\ncohort = 3\n[data]\nname = "digits"\ndevices = 3\n[methods.fedavg]\n'
    )
    with pytest.raises(BundleError, match=r"train\.onnx") as ended:
        simulate_cli.simulate(file)
    assert exit_code(ended.value) == ExitCode.MALFORMED
    with file.open("a") as more:
        more.write('[methods.coupled]\nlayers = ["8"]\n')
    with pytest.raises(ConfigError, match=r"(?s)train\.onnx.*layers"):
        simulate_cli.simulate(file)


def test_the_command_writes_what_succeeded_and_names_what_failed(tmp_path: Path) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    simulation(
        file,
        1,
        '[methods.fedpm]\nlayers = ["9"]\n[methods.coupled]\nlayers = ["8"]\n[methods.standalone]\nepochs = 1\n',
    )
    with pytest.raises(ConfigError, match=r"(?s)fedpm: layers = \['9'\].*\ncoupled: layers = \['8'\]"):
        simulate_cli.simulate(file, json_file=out)
    assert set(json.loads(out.read_text())["methods"]) == {"standalone"}


def test_ctrl_c_keeps_the_methods_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    simulation(file, 2, "[methods.standalone]\nepochs = 1\n[methods.fedavg]\nepochs = 1\n[methods.stc]\n")

    def step(_: object, text: str) -> None:
        if text.startswith("fedavg"):
            raise KeyboardInterrupt

    monkeypatch.setattr(simulate_cli.Steps, "step", step)
    with pytest.raises(typer.Exit) as ended:
        simulate_cli.simulate(file, json_file=out)
    assert ended.value.exit_code == 130
    written = json.loads(out.read_text())
    assert (set(written["methods"]), set(written["failed"])) == ({"standalone"}, {"fedavg"})
    capsys.readouterr()
    with pytest.raises(typer.Exit) as ended:
        simulate_cli.simulate(file, method="fedavg")
    assert ended.value.exit_code == 130
    assert "stopped before any method ended; there is no result" in capsys.readouterr().out


def test_sigterm_keeps_the_methods_that_have_ended_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    simulation(file, 1, "[methods.standalone]\nepochs = 1\n[methods.fedavg]\nepochs = 1\n")

    def step(_: object, text: str) -> None:
        if text.startswith("fedavg"):
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(simulate_cli.Steps, "step", step)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended:
        simulate_cli.simulate(file, json_file=out)
    assert ended.value.exit_code == 143
    assert set(json.loads(out.read_text())["methods"]) == {"standalone"}
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_method_that_ends_below_its_start_or_training_alone_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    simulation(
        file,
        2,
        '[methods.idle]\nname = "fedavg"\nlr = 1e-9\nepochs = 1\n[methods.standalone]\nlr = 0.05\n'
        "[methods.lgfedavg]\nnum_layers = 1\n",
    )
    simulate_cli.simulate(file, json_file=out)
    said, written = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())["methods"]
    start = written["idle"]["score_start"]
    assert start == written["standalone"]["score_start"] == pytest.approx(written["idle"]["score_mean"])
    assert f"warning: idle ends at {start:.3f}, below training alone (" in said
    assert "epochs = 5, as standalone has (here 1), then lr" in said
    assert "warning: standalone" not in said
    assert said.index("warning: lgfedavg: global_rounds = 10 covers all 2 rounds") < said.index("idle ends at")


@pytest.mark.parametrize(("keys", "chosen"), [("", False), ("validation = 0.2", True)])
def test_devices_that_chose_their_models_are_not_advised_to(
    keys: str, chosen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = f'bundle = "digits"\nrounds = 1\ncohort = 2\n[data]\nname = "digits"\ndevices = 2\nsamples = 100\n{keys}\n'
    (tmp_path / "run.toml").write_text(data + "[methods.standalone]\nepochs = 1\n")
    given: list[Any] = []
    monkeypatch.setattr(simulate_cli.advice, "warnings", lambda *all_: given.extend(all_) or [])
    simulate_cli.simulate(tmp_path / "run.toml")
    assert given[-1] is chosen


def test_honest_devices_count_as_their_samples_unless_a_guard_is_set_and_then_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    text = (
        'bundle = "digits"\nrounds = 2\ncohort = 10\n[data]\nname = "digits"\ndevices = 10\nsplit = "dirichlet"\n'
        "alpha = 0.1\n[methods.fedavg]\nepochs = 1\n"
    )
    for set_, limited in (("", False), ('guard = "clip"\n', True)):
        file.write_text(set_ + text)
        simulate_cli.simulate(file, json_file=out)
        said, fedavg = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())["methods"]["fedavg"]
        assert ("warning: fedavg: the guard limited" in said) is limited
        assert fedavg["guarded"] == sum(len(r["guarded"]) for r in fedavg["rounds"])
        assert (fedavg["guarded"] > 0) is limited


@pytest.mark.parametrize(("high", "devices"), [((1, 1), 0), ((255, 1), 1), ((255, 255), 2)])
def test_samples_far_from_the_model_s_scale_are_named_before_the_first_round(
    high: tuple[int, int], devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data.py").write_text(
        "import numpy as np\ndef load():\n    y, owner = np.arange(80) % 10, np.arange(80) // 40\n"
        f"    x = np.random.default_rng(0).random((80, 64)) * np.array({high})[owner][:, None]\n"
        "    return {'x': x.astype(np.float32), 'y': y, 'owner': owner}\n"
    )
    (tmp_path / "run.toml").write_text(
        'bundle = "digits"\nrounds = 1\ncohort = 1\n'
        '[data]\nname = "python"\nfactory = "data.py:load"\n[methods.fedavg]\n'
    )
    simulate_cli.simulate(tmp_path / "run.toml", labels=True)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("as the model takes them, samples lie between") == bool(devices)
    assert not devices or f"divided by 255 ({devices} of 2 devices)" in said


@pytest.mark.parametrize("folder", [False, True])
def test_bytes_where_the_model_takes_shares_of_one_are_named_once_before_the_first_round(
    folder: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own").mkdir()
    for name in "ab":
        x = np.random.default_rng(0).integers(0, 256, (80, 64)).astype(np.uint8)
        np.savez(tmp_path / "own" / f"{name}.npz", x=x, y=np.arange(80) % 10)
    (tmp_path / "run.toml").write_text(
        f'bundle = "digits"\nrounds = 1\ncohort = 2\n[data]\nname = "npz"\npath = "own{"" if folder else "/a.npz"}"\n'
        + ("" if folder else "devices = 2\n")
        + "[methods.fedavg]\n[methods.standalone]\n"
    )
    simulate_cli.simulate(tmp_path / "run.toml")
    said = " ".join(capsys.readouterr().out.split())
    first = "a" if folder else "device-0"
    doubt = f"warning: {first}: as the model takes them, samples lie between 0 and 255; it is made for 0 to 1: "
    assert said.count("samples lie between") == said.count(doubt) == 1
    assert said.index(doubt) < said.index("round 1/1")


def test_a_cohort_larger_than_the_devices_is_named_and_the_heading_says_how_many_take_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.toml"
    text = 'bundle = "digits"\nrounds = 1\ncohort = {}\n[data]\nname = "digits"\ndevices = 3\n[methods.fedavg]\n'
    for cohort, taking in ((1, "1 device"), (2, "2 devices"), (3, "3 devices"), (4, "3 devices")):
        file.write_text(text.format(cohort))
        simulate_cli.simulate(file, labels=True)
        said = " ".join(capsys.readouterr().out.split())
        assert f"rounds: 1 of {taking} " in said
        assert ("cohort = 4 is more than 3 devices" in said) == (cohort == 4)


def test_what_is_said_of_the_numbers_to_predict_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        simulate_cli.histogram, "uncentred", lambda devices: [f"{len(devices)} have numbers far from 0"]
    )
    file = tmp_path / "run.toml"
    file.write_text(
        'bundle = "digits"\nrounds = 1\ncohort = 1\n[data]\nname = "digits"\ndevices = 3\n[methods.fedavg]\n'
    )
    simulate_cli.simulate(file, labels=True)
    assert "3 have numbers far from 0" in capsys.readouterr().out


def test_names_that_are_not_there_are_refused_with_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('bundle = "digits"\nrounds = 1\ncohort = 1\n[data]\nname = "digits"\n[methods.fedavg]\n')
    with pytest.raises(ConfigError, match=r"there is no method 'fedavgg'; known are .*; did you mean 'fedavg'"):
        simulate_cli.simulate(file, method="fedavgg")
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        simulate_cli.simulate(file, bundle="dgits")


def test_a_result_that_could_not_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    for out, said in ((tmp_path / "none" / "x.json", "there is no folder"), (tmp_path, "is a folder")):
        with pytest.raises(ConfigError, match=said):  # not: the file of settings, which is not there
            simulate_cli.simulate(tmp_path / "run.toml", json_file=out)
    with pytest.raises(ConfigError, match=r"run\.toml would overwrite the file that is read"):
        simulate_cli.simulate(tmp_path / "run.toml", json_file=tmp_path / "." / "run.toml")
    with pytest.raises(ConfigError, match=r"--plot .*x\.png and --json are one file"):
        simulate_cli.simulate(tmp_path / "run.toml", json_file=tmp_path / "x.png", plot=tmp_path / "." / "x.png")
    (tmp_path / "folder.png").mkdir()
    for plot, said in (("folder.png", "is a folder"), ("x.jpg", "ends in .png"), ("none/x.png", "there is no folder")):
        with pytest.raises(ConfigError, match=said):
            simulate_cli.simulate(tmp_path / "run.toml", plot=tmp_path / plot)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rounds": 0}, "rounds = 0"),
        ({"methods": {}}, "methods"),
        ({"alchemy": 9}, "alchemy = 9: there is no such setting; there are bundle, data, "),
        ({"round": 9}, "round = 9: there is no such setting; did you mean 'rounds'\\?"),
        ({"method": {"name": "fedavg"}}, r"needs a table \[methods.NAME\] for each method"),
        ({"methods": [{"name": "fedavg"}]}, r"needs a table \[methods.NAME\] for each method"),
        ({"data": {"name": "imagenet"}}, "imagenet"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_a_misspelt_setting_is_named_and_not_the_one_that_is_missing_for_it() -> None:
    settings: dict[str, Any] = {"bundle": "digits", "runds": 9, "cohort": 3, "methods": {"fedavg": {}}}
    with pytest.raises(ConfigError, match=r"runds = 9: there is no such setting; did you mean 'rounds'\?"):
        read_config({**settings, "data": {"name": "digits"}})


def test_an_unknown_method_backend_or_bundle_is_refused(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    for changes in ({"methods": {"alchemy": {}}}, {"backend": "abacus"}):
        with pytest.raises(ConfigError, match=r"alchemy|abacus"):
            run_all(config(**changes), bundle, devices)
    with pytest.raises(ConfigError, match=r"nowhere.*digits.*mlp-har"):
        find_bundle("nowhere")
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        find_bundle("digit")


def test_a_folder_s_warnings_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(find_bundle("digits").folder, tmp_path / "digits")
    (folder / WARNINGS).write_text("the weights are drawn\n")
    capsys.readouterr()
    find_bundle(str(folder))
    assert capsys.readouterr() == ("", "warning: the weights are drawn\n")


def test_a_wrong_method_is_named_before_bundle_and_data_are_opened(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('bundle = "nowhere"\nrounds = 1\ncohort = 3\n[data]\nname = "digits"\n[methods.fedmask]\n')
    with pytest.raises(ConfigError, match="there is no method 'alchemy'"):
        simulate_cli.simulate(file, method="fedmask, alchemy")
    with pytest.raises(ConfigError, match=r"no method 'lattise'; known are .*did you mean 'lattice'"):
        simulate_cli.simulate(file, method="lattise")
    for twice_or_none in (" , ", "fedavg,fedavg"):
        with pytest.raises(ConfigError, match=r"--method .*name each one once"):
            simulate_cli.simulate(file, method=twice_or_none)
    with pytest.raises(ConfigError, match=r"name a TOML file; `maskfleet new FOLDER` writes one"):
        simulate_cli.simulate(method="fedmask")


def test_a_federation_that_cannot_run_says_where_it_stands(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    stuck = FederationConfig(
        name="x",
        bundle=bundle.sha256,
        method={"name": "fedavg"},
        rounds=1,
        cohort=9,
        min_devices=5,
    )
    with pytest.raises(ConfigError, match="recruiting"):
        run(stuck, make_method(stuck.method), bundle, open_trainer("onnxruntime", bundle), devices)


def test_progress_is_called_after_every_round(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    seen: list[tuple[str, int]] = []

    def note(label: str, row: RoundRow) -> None:
        seen.append((label, row.record.round))

    run_all(config(methods={"standalone": {"epochs": 1}}, final_epochs=False), bundle, devices, note)
    assert seen == [("standalone", 1), ("standalone", 2), ("standalone", 3)]


def test_an_error_of_one_method_leaves_the_others_results(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    both = config(methods={"fedpm": {"layers": ["9"]}, "standalone": {"epochs": 1}}, final_epochs=False)
    failures: dict[str, MaskfleetError] = {}
    assert set(run_all(both, bundle, devices, failed=failures.__setitem__)) == {"standalone"}
    assert "the layers that can be masked are" in str(failures["fedpm"])
    with pytest.raises(ConfigError, match="the layers that can be masked are"):
        run_all(both, bundle, devices)


def test_devices_have_secrets_of_their_own_that_follow_from_the_seed(
    bundle: Bundle, devices: dict[str, DeviceData], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}

    class Spy(Standalone):
        def local_round(self, task: Task, kept: Any, received: Any) -> Local:
            seen[task.assignment.device] = task.secret
            return super().local_round(task, kept, received)

    monkeypatch.setattr("edge_bench.simulation.file.make_method", lambda table: Spy(epochs=1))
    run_all(config(methods={"standalone": {}}, cohort=4, final_epochs=False), bundle, devices)
    assert seen == {d: counter.key(5, "secret", d) for d in devices}


def test_a_downlink_is_made_once_for_each_audience(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    made: list[tuple[int, str]] = []

    class Spy(Coupled):
        def downlink(self, course: Course, round_: int, state: Any, record: Any) -> Payload:
            made.append((round_, self.audience(course, round_, record)))
            return super().downlink(course, round_, state, record)

    method, address = Spy(), bundle.sha256
    federation = FederationConfig(name="x", bundle=address, method={}, rounds=4, cohort=3, min_devices=4)
    run(federation, method, bundle, open_trainer("onnxruntime", bundle), devices, evaluate_every=1)
    assert len(made) == len(set(made))
    assert {"whole", "whole+head", "short", "long"} >= {audience for _, audience in made} >= {"whole+head", "short"}


def test_scores_of_all_devices_between_the_rounds_change_nothing_of_a_run(
    bundle: Bundle, devices: dict[str, DeviceData]
) -> None:
    class Forgetful(LGFedAvg):
        """After round 1 devices keep their bodies and receive the head alone; one has lost its body at round 3."""

        def receive(self, a: Assignment, kept: Any, downlink: Payload) -> Weights:
            if (a.device, a.round) == ("device-0", 3) and "body" not in downlink.arrays:
                raise LostError("the body is gone")
            return super().receive(a, kept, downlink)

    method, address = Forgetful(num_layers=1, global_rounds=1), bundle.sha256
    federation = FederationConfig(name="x", bundle=address, method={}, rounds=4, cohort=4, min_devices=4)
    trainer = open_trainer("onnxruntime", bundle)
    plain, looked = (run(federation, method, bundle, trainer, devices, often) for often in (0, 1))
    assert all(row.everyone is not None for row in looked.rows)
    assert (looked.state_sha256, looked.personal_sha256) == (plain.state_sha256, plain.personal_sha256)
    for a, b in zip(plain.rows, looked.rows, strict=True):
        assert a.record.model_dump(exclude=OWN) == b.record.model_dump(exclude=OWN)
    third = plain.rows[2].record
    assert len(third.devices) == 3
    in_vain = sum(third.traffic.down.values()) / 3  # the others received the same bytes
    assert looked.vain_bytes == plain.vain_bytes == in_vain
    assert simulated(looked)["uncounted_bytes_per_device"] == {"up": 0, "down": in_vain / 4}


def test_methods_run_at_their_defaults_and_a_plot_is_there_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, plot, out = tmp_path / "run.toml", tmp_path / "x.png", tmp_path / "x.json"
    simulation(file, 2, "[methods.fedavg]\nlr = 0.05\n[methods.fedpm]\n")
    simulate_cli.simulate(file, out, method="fedavg,standalone", plot=plot)
    written = json.loads(out.read_text())["methods"]
    assert {label: r["settings"]["lr"] for label, r in written.items()} == {"fedavg": 0.05, "standalone": None}
    assert plot.read_bytes()[:4] == b"\x89PNG"
    said = capsys.readouterr().out
    assert said.count(" left\n") == 4
    file.write_text(file.read_text().partition("[methods")[0])  # no table at all
    simulate_cli.simulate(file, rounds=1, method="standalone")
    assert "standalone" in capsys.readouterr().out


def test_labels_are_printed_drawn_and_written_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, plot = tmp_path / "run.toml", tmp_path / "labels.png"
    file.write_text(
        'bundle = "digits"\nrounds = 1\ncohort = 3\n[data]\nname = "digits"\ndevices = 3\n[methods.standalone]\n'
    )
    simulate_cli.simulate(file, labels=True, plot=plot, json_file=tmp_path / "labels.json")
    written = json.loads((tmp_path / "labels.json").read_text())["devices"]["device-2"]
    assert sum(written["labels"]) == written["train"] + written["validation"]
    said = capsys.readouterr().out
    assert "device-2" in said
    assert "3 devices: " in said
    assert "bits" not in said
    assert plot.read_bytes()[:4] == b"\x89PNG"
    file.write_text(file.read_text().replace("[methods.standalone]\n", ""))
    simulate_cli.simulate(file, labels=True)
    assert "3 devices: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"needs a table \[methods\.NAME\] for each method; add one"):
        simulate_cli.simulate(file)


def test_the_result_file_has_the_form_of_the_schema_and_makes_a_data_frame_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "run.toml", tmp_path / "out.json"
    file.write_text(
        'bundle = "digits"\nrounds = 2\ncohort = 2\nevaluate_every = 1\n[data]\nname = "digits"\ndevices = 3\n'
        "samples = 200\n[methods.standalone]\nepochs = 1\n[methods.lattice]\nepochs = 1\n"
        '[methods.fedpm]\nlayers=["9"]\n'
    )
    with pytest.raises(ConfigError, match="fedpm"):
        simulate_cli.simulate(file, out)
    capsys.readouterr()
    simulate_cli.simulate(schema=True)
    schema = json.loads(capsys.readouterr().out)
    written = json.loads(out.read_text())
    assert set(written) == set(schema["required"])
    for table, entries in (("Row", written["rows"]), ("MethodResult", list(written["methods"].values()))):
        for entry in entries:
            assert set(schema["$defs"][table]["required"]) <= set(entry) <= set(schema["$defs"][table]["properties"])
    assert [(r["method"], r["round"]) for r in written["rows"]] == [
        ("standalone", 1), ("standalone", 2), ("lattice", 1), ("lattice", 2)
    ]  # fmt: skip
    last = written["rows"][-1]
    assert last["bytes_so_far"] == pytest.approx(written["methods"]["lattice"]["bytes_per_device"])
    assert last["bytes_up"] == pytest.approx(
        sum(written["methods"]["lattice"]["rounds"][1]["traffic"]["up"].values()) / 2
    )
    assert last["score_of_all_devices"] == written["methods"]["lattice"]["score_mean"]
    assert "layers = ['9']" in written["failed"]["fedpm"]
    assert written["settings"]["methods"]["lattice"] == {"epochs": 1}
    pandas = pytest.importorskip("pandas")
    frame = pandas.json_normalize(json.load(out.open()), "rows")
    assert frame.groupby("method")["score_after"].max().between(0, 1).all()


def test_an_update_that_a_coordinator_would_refuse_as_too_large_ends_the_method(
    bundle: Bundle, devices: dict[str, DeviceData], results: dict[str, Simulated], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = round(simulated(results["fedavg"])["bytes_up_per_device_round"])
    one = config(methods={"fedavg": METHODS["fedavg"]}, rounds=1)
    monkeypatch.setattr(FedAvg, "update_limit", lambda self, course: size - HEADER_BYTES)
    assert set(run_all(one, bundle, devices)) == {"fedavg"}
    monkeypatch.setattr(FedAvg, "update_limit", lambda self, course: size - HEADER_BYTES - 1)
    said = rf"in round 1 has {size} bytes, .* at most {size - 1} of 'fedavg'; choose settings that send less"
    with pytest.raises(ConfigError, match=said):
        run_all(one, bundle, devices)


def test_lattice_s_updates_are_within_their_limit_at_the_least_quantum() -> None:
    (least,) = (bound.ge for bound in Lattice.model_fields["quantum"].metadata if hasattr(bound, "ge"))
    wide = find_bundle("digits-wide")
    settings = {"quantum": least, "budget": 1}
    one = config(bundle="digits-wide", methods={"lattice": settings}, rounds=2, cohort=1, final_epochs=False)
    ended = run_all(one, wide, datasets.load(DIGITS, 5, wide.manifest))["lattice"]
    assert ended.rows[0].record.traffic.up["moves"] < 0.75 * Lattice().update_limit(ended.course)
    with pytest.raises(ConfigError, match=rf"quantum = .*greater than or equal to {least}"):
        make_method({"name": "lattice", "quantum": least / 2})


def test_a_method_whose_code_raises_leaves_the_others_results_and_names_its_line(
    bundle: Bundle, devices: dict[str, DeviceData], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Standalone, task: Task, kept: Any, received: Any) -> Local:
        raise ZeroDivisionError("nothing left")

    monkeypatch.setattr(Coupled, "local_round", broken)
    failures: dict[str, MaskfleetError] = {}
    two = config(methods={"coupled": {}, "standalone": {"epochs": 1}}, processes=1)
    assert set(run_all(two, bundle, devices, failed=failures.__setitem__)) == {"standalone"}
    said = str(failures["coupled"])
    assert said.startswith("failed in ")  # the label stands before it
    assert "test_simulate.py, line " in said
    assert "raise ZeroDivisionError(" in said
    assert said.count("nothing left") == 2


@pytest.mark.parametrize("keys", [{}, {"devices": 58}, {"devices": 10, "split": "iid"}])
def test_devices_with_samples_that_the_bundle_was_trained_on_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"trained on all samples of femnist's owners from 57 on.* devices = 57"):
        refuse_seen("cnn-femnist-pretrained", DataConfig(name="femnist", **keys))
    table = {"bundle": "cnn-femnist-pretrained", "rounds": 1, "cohort": 1, "methods": {"fedavg": {}}}
    with pytest.raises(ConfigError, match="trained on all samples of femnist's owners"):
        read_config({**table, "data": {"name": "femnist", **keys}})


def test_the_owners_that_pre_training_leaves_out_are_those_that_a_simulation_may_have() -> None:
    pretrain = pytest.importorskip("edge_bench.pretrain", exc_type=ImportError)
    refuse_seen("cnn-femnist-pretrained", DataConfig(name="femnist", devices=pretrain.FEDERATED_WRITERS))
    refuse_seen("cnn-femnist", DataConfig(name="femnist"))
    assert UNSEEN == {"cnn-femnist-pretrained": ("femnist", pretrain.FEDERATED_WRITERS)}
