"""Another package adds a method, codecs, a meter, a target, an engine and a data set: the blocks of docs/extending.md.

The package is written to a temporary folder with the page's entry points, as pip would install it. Nothing of
maskfleet changes; the federations run through the simulator, which shares engine and aggregation with the coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from edge_bench.data import datasets
from edge_bench.data.table import DataConfig
from edge_bench.simulation.simulate import Simulated, run
from edge_kernels import codecs
from edge_kernels.codecs import values
from numpy_mlp import mlp

from coord_server import catalogue
from edge_client import toml
from edge_client.bundle import MANIFEST, Bundle, parse_manifest
from edge_client.commands import method_inspection
from edge_client.data import DataFile, DeviceData, fit
from edge_client.errors import BundleError, ConfigError, DataError, MeterError
from edge_client.measure.meters import choose
from edge_client.methods import make_method
from edge_client.protocol.messages import FederationConfig
from edge_client.training import open_trainer

METHOD = '''
"""Federated averaging with a proximal term; devices that took part receive the change of the model only."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from edge_client.errors import LostError
from edge_client.methods import Method
from edge_client.protocol.payload import Payload
from edge_client.task import EpochLoss, Local, Personal


@dataclass(frozen=True)
class State:
    model: np.ndarray
    before: np.ndarray


@dataclass(frozen=True)
class Record:
    round: int


@dataclass(frozen=True)
class Kept:
    received: np.ndarray
    round: int


class Prox(Method):
    name: ClassVar[str] = "acme-prox"
    state_type: ClassVar[type] = State
    record_type: ClassVar[type] = Record
    kept_type: ClassVar[type] = Kept
    mu: float = 0.1
    lr: float = 0.1
    epochs: int = 2

    def start(self, course):
        return State(course.model.parameters, course.model.parameters)

    def audience(self, course, round_, record):
        return "took part" if record is not None and record.round == round_ - 1 else "others"

    def downlink(self, course, round_, state, record):
        if self.audience(course, round_, record) == "took part":
            return Payload({"change": state.model - state.before})
        return Payload({"model": state.model})

    def exchanged(self, course):
        return course.model.manifest.d

    def update_limit(self, course):
        return 4 * course.model.manifest.d

    def read_update(self, a, state, record, payload):
        return payload.arrays["model"]

    def fold(self, a, state, total, update, record):
        total = (0.0, 0) if total is None else total
        return (total[0] + update.astype(np.float64), total[1] + 1), Record(a.round)

    def finish(self, course, round_, took_part, state, total):
        return State((total[0] / total[1]).astype(np.float32), state.model), {}

    def receive(self, a, kept, downlink):
        if "model" in downlink.arrays:
            return downlink.arrays["model"]
        if kept is None or kept.round != a.round - 1:
            raise LostError("the change builds on a model that this device does not hold")
        return kept.received + downlink.arrays["change"]

    def local_round(self, task, kept, received):
        own, buffers, loss = received.copy(), task.assignment.model.buffers, EpochLoss()
        for batch in task.batches(self.epochs, 16):
            g = task.gradient(own, buffers, batch)
            loss.add(batch, g)
            own -= np.float32(self.lr) * (g.parameters + np.float32(self.mu) * (own - received))
        update = Payload({"model": own})
        return Local(Kept(received, task.assignment.round), update, Personal(own, buffers), loss.mean)

    def personal(self, task, kept, received):
        return Personal(received, task.assignment.model.buffers)
'''

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
BLOCKS = dict(re.findall(r"```\w+\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL))
MORE = {
    "maskfleet.methods": {
        "acme-prox": "acme_fleet.prox:Prox",
        "acme-broken": "acme_fleet.nowhere:Nothing",
        "acme-other": "acme_fleet.prox:Prox",
    },
    "maskfleet.codecs.values": {
        "acme-missing": "acme_fleet.codecs:missing",
        "acme-set": "acme_fleet.codecs:plain",
    },
}
"""Beside the page's own entry points: a method with records and audiences, two that do not load, one of two names."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The package, installed beside maskfleet."""
    folder = tmp_path_factory.mktemp("site-packages")
    info = folder / "acme_fleet-1.0.dist-info"
    info.mkdir()
    for name, source in {**BLOCKS, "acme_fleet/__init__.py": "", "acme_fleet/prox.py": METHOD}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)
    groups = toml.loads(BLOCKS["pyproject.toml"])["project"]["entry-points"]
    lines = [[f"[{g}]", *(f"{k} = {v}" for k, v in {**groups[g], **MORE.get(g, {})}.items())] for g in groups]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fleet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("\n".join(line for group in lines for line in group))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder


@pytest.fixture(scope="module")
def bundle(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle whose target is the package's; its trainer needs no parts."""
    folder = tmp_path_factory.mktemp("bundle")
    text = mlp(6, 12, 3).model_dump_json().replace('{"kind":"classification","classes":3,"loss":"cross_entropy"}',
                                                   '{"kind":"acme-ordinal","classes":3}')  # fmt: skip
    (folder / MANIFEST).write_text(text)
    return Bundle.open(folder)


@pytest.fixture(scope="module")
def devices(bundle: Bundle) -> dict[str, DeviceData]:
    """Three devices with data of three ordered classes."""
    rng = np.random.default_rng(0)
    found = {}
    for device in "abc":
        y = rng.integers(0, 3, 80)
        x = (y[:, None] + 0.3 * rng.standard_normal((80, 6))).astype(np.float32)
        found[device] = fit(DataFile(Path(device), {"x": x, "y": y}), bundle.manifest)
    return found


def federation(bundle: Bundle, devices: dict[str, DeviceData], cohort: int = 3, **table: object) -> Simulated:
    """Six rounds of a method on the package's trainer."""
    method = make_method(dict(table))
    address = bundle.sha256
    config = FederationConfig(name="acme", bundle=address, method=dict(table), rounds=6, cohort=cohort, min_devices=3)
    return run(config, method, bundle, open_trainer("acme-numpy", bundle), devices)


def test_a_method_with_records_kept_values_and_two_audiences(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    result = federation(bundle, devices, cohort=2, name="acme-prox", mu=0.2)
    assert result.final is not None
    assert result.final.mean > 0.8
    kinds = [set(row.record.traffic.down) - {"header"} for row in result.rows]
    assert kinds[0] == {"model"}
    assert {"model", "change"} in kinds


def test_a_set_codec(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    positions = np.array([1, 5, 7], np.uint32)
    assert codecs.encode("acme-plain", positions, 9) == positions.tobytes()
    assert codecs.decode("acme-plain", positions.tobytes(), 9).tolist() == [1, 5, 7]
    with pytest.raises(codecs.CodecError, match="sorted"):
        codecs.decode("acme-plain", positions[::-1].tobytes(), 9)
    with pytest.raises(codecs.CodecError, match=r"'acme-plain' failed \(ValueError: .*is the payload whole"):
        codecs.decode("acme-plain", b"abc", 9)
    result = federation(bundle, devices, name="fedpm", codec="acme-plain", epochs=2)
    assert "mask.acme-plain" in result.rows[-1].record.traffic.up
    exact = federation(bundle, devices, name="fedpm", epochs=2)
    assert result.state_sha256 == exact.state_sha256


def test_a_value_codec(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    assert values.decode("acme-brain", values.encode("acme-brain", np.array([1.0, -2.0]), 0), 2, 0).tolist() == [1, -2]
    with pytest.raises(codecs.CodecError, match=r"is it whole|is the payload whole"):
        values.decode("acme-brain", b"abc", 2, 0)
    result = federation(bundle, devices, name="fedavg", lr=0.1, up="acme-brain", down="acme-brain")
    d = bundle.manifest.d
    traffic = result.rows[-1].record.traffic
    assert traffic.up["change.acme-brain"] == traffic.down["parameters.acme-brain"] == 3 * 2 * d
    assert result.final is not None
    assert result.final.mean > 0.9


def test_a_target_checks_labels_and_scores(bundle: Bundle, devices: dict[str, DeviceData]) -> None:
    assert bundle.manifest.target.kind == "acme-ordinal"
    assert parse_manifest(bundle.manifest.to_bytes()) == bundle.manifest
    outputs, y = np.eye(3, dtype=np.float32)[[0, 1, 2]], np.array([0, 2, 0])
    assert bundle.manifest.target.score(outputs, y) == pytest.approx(1 - (0 + 1 + 2) / 3 / 2)
    with pytest.raises(DataError, match=r"grades are 0\.\.2"):
        fit(DataFile(Path("z"), {"x": np.zeros((4, 6)), "y": np.arange(4)}), bundle.manifest)


CHECKS = re.findall(r"def (test_\w+)\((\w*)\)", BLOCKS["tests/test_acme.py"])


@pytest.mark.parametrize(("name", "argument"), CHECKS)
def test_the_page_s_own_tests_pass(installed: Path, tmp_path: Path, name: str, argument: str) -> None:
    space: dict[str, Any] = {}
    exec(BLOCKS["tests/test_acme.py"], space)
    space[name](*([tmp_path] if argument else []))


def test_every_block_has_under_thirty_lines() -> None:
    assert len(CHECKS) == 4
    for name, source in BLOCKS.items():
        lines = [line for line in source.splitlines() if line.strip()]
        assert len(lines) < 30, (name, len(lines))


def test_the_page_s_method_trains_on_the_page_s_engine_and_is_described(
    bundle: Bundle, devices: dict[str, DeviceData], capsys: pytest.CaptureFixture[str]
) -> None:
    result = federation(bundle, devices, name="acme-avgm", lr=0.02, epochs=1)
    assert result.final is not None
    assert result.final.mean > 0.8
    assert "beta" in import_module("acme_fleet.method").AvgM.search
    method_inspection.methods()
    method_inspection.method("acme-avgm")
    said = " ".join(capsys.readouterr().out.split())
    assert "acme-avgm FedAvg whose server keeps a momentum: Hsu, Qi, Brown, arXiv 1909.06335, 2019." in said
    (shown,) = [m for m in catalogue.methods() if m.name == "acme-avgm"]
    assert f"acme-avgm {shown.description}" in said  # the coordinator and the command line say the same
    assert "The share of a round's step that the next round adds to its own." in said


def test_the_page_s_meter_is_found_by_name(installed: Path, tmp_path: Path) -> None:
    with pytest.raises(MeterError, match="start the UPS driver"):
        choose(f"acme-ups:path={tmp_path}/watts")
    (tmp_path / "watts").write_text("4.2")
    assert choose(f"acme-ups:path={tmp_path}/watts").meter is not None


def test_the_page_s_data_set_is_divided_by_its_owners(bundle: Bundle) -> None:
    config = DataConfig.model_validate({"name": "acme-machines", "arguments": {"machines": 4}})
    found = datasets.load(config, 0, bundle.manifest)
    assert list(found) == ["device-0", "device-1", "device-2", "device-3"]
    assert all(len(d.y) + len(d.y_test) == 60 and d.x.shape[1:] == (6,) for d in found.values())
    with pytest.raises(ConfigError, match=r"acme-machines' cannot be called with arguments = {'machine': 4}"):
        datasets.load(config.model_copy(update={"arguments": {"machine": 4}}), 0, bundle.manifest)


def test_what_does_not_load_or_is_not_installed_is_named_with_the_choices(installed: Path, bundle: Bundle) -> None:
    with pytest.raises(ConfigError, match=r"acme-broken' cannot be loaded \(ModuleNotFoundError"):
        make_method({"name": "acme-broken"})
    with pytest.raises(ConfigError, match=r"'acme-other' has name = 'acme-prox' in its class"):
        make_method({"name": "acme-other"})
    with pytest.raises(ConfigError, match=r"acme-missing' cannot be loaded \(AttributeError"):
        make_method({"name": "fedavg", "up": "acme-missing"})
    with pytest.raises(ConfigError, match=r"'acme-set' has an entry point that names no ValueCodec; mend it"):
        make_method({"name": "fedavg", "up": "acme-set"})
    with pytest.raises(ConfigError, match=r"'zip'; choose one of float32, float16, stochastic8, .*acme-brain"):
        make_method({"name": "fedavg", "up": "zip"})
    with pytest.raises(ConfigError, match=r"'zip'; choose one of bits, .*acme-plain"):
        make_method({"name": "deltamask", "codec": "zip"})
    with pytest.raises(ConfigError, match="acme-prox"):
        make_method({"name": "zip"})
    with pytest.raises(ConfigError, match="acme-numpy"):
        open_trainer("zip", bundle)
    with pytest.raises(BundleError, match="acme-ordinal"):
        parse_manifest(bundle.manifest.to_bytes().replace(b"acme-ordinal", b"acme-other"))
