"""Which energy meter is taken, and why not the others; meters of other packages."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from edge_client.errors import ConfigError, MeterError
from edge_client.measure.energy import joules
from edge_client.measure.meters import Family, choose, families
from edge_client.measure.polling import Polled


def test_auto_takes_the_first_that_is_there_and_says_why_not_the_others() -> None:
    def absent(options: Any) -> Any:
        raise MeterError("not wired; run: wire it")

    here = Polled("b", "the board", lambda: 1.0, "W", 0.1)
    known = {
        "a": Family(absent, 1),
        "b": Family(lambda options: here, 2, options=("bus",)),
        "c": Family(lambda options: here, 3),
        "far": Family(lambda options: here, 0, "apart"),
        "phone": Family(lambda options: here, 0, "android"),
    }
    found = choose("auto", known=known)
    assert found.meter is here
    assert found.lines == [
        "meter b: the board",
        "  not a: not wired; run: wire it",
        "  not c: b comes first; ask for it with --meter c",
        "  not far: measures another device; ask for it with --meter far",
        "  not phone: measures a phone (--adb), not this machine",
    ]
    assert choose("auto", "android", known).others["c"] == "measures this machine, not a phone (--adb)"
    assert choose("none", known=known).meter is None
    assert choose("far", known=known).meter is here
    with pytest.raises(MeterError, match="wire it"):
        choose("a", known=known)
    with pytest.raises(ConfigError, match=r"no meter 'bb'; choose auto, none or one of .*did you mean 'b'"):
        choose("bb", known=known)
    with pytest.raises(ConfigError, match=r"meter b does not know 'x=1'; its options: bus=\.\.\."):
        choose("b:x=1", known=known)


def test_a_meter_that_measures_another_device_than_the_models_is_refused() -> None:
    meter = Polled("m", "m", lambda: 1.0, "W", 0.1)
    known = {
        "board": Family(lambda options: meter, 1),
        "phone": Family(lambda options: meter, 2, "android"),
        "supply": Family(lambda options: meter, 3, "apart"),
        "file": Family(lambda options: meter, 4, "apart", exported=True),
    }
    with pytest.raises(ConfigError, match=r"meter phone measures a phone .*and the model runs on this machine"):
        choose("phone", known=known)
    with pytest.raises(ConfigError, match="meter board measures this machine, and the model runs on a phone"):
        choose("board", "android", known)
    assert choose("phone", "android", known).meter is choose("supply", "android", known).meter is meter
    with pytest.raises(ConfigError, match="exported by hand"):
        choose("file", known=known)
    assert choose("file", known=known, exported=True).meter is meter


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (ZeroDivisionError("no volts"), "its code fails: ZeroDivisionError: no volts"),
        (ConfigError("give x="), "give x="),
    ],
)
def test_auto_goes_on_after_a_family_that_breaks_in_its_own_way(fault: Exception, said: str) -> None:
    def broken(options: Any) -> Any:
        raise fault

    meter = Polled("m", "m", lambda: 1.0, "W", 0.1)
    known = {"a": Family(broken, 1), "m": Family(lambda options: meter, 2)}
    found = choose("auto", known=known)
    assert found.meter is meter
    assert found.others["a"] == said
    with pytest.raises(ConfigError, match=said):
        choose("a", known=known)


def test_every_meter_of_this_project_is_an_entry_point_and_says_when_it_is_absent() -> None:
    found, faults = families()
    assert not faults
    assert set(found) >= {"jetson", "ina3221", "ina219", "hwmon", "rapl", "monsoon", "odpm", "battery", "csv"}
    chosen = choose("auto")
    assert set(chosen.others) | {chosen.meter.name if chosen.meter else ""} >= set(found)
    # What is not there says what was looked for or what to run.
    told = {"jetson": "INA3221", "ina3221": "i2c|smbus2|INA3221", "ina219": "i2c|smbus2|INA219", "rapl": "powercap",
            "hwmon": "hwmon|power|battery"}  # fmt: skip
    for name, why in chosen.others.items():
        assert re.search(f"{told.get(name, 'another device|measures a phone')}|comes first", why), (name, why)


def test_another_package_adds_a_meter_in_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "acme_supply.py").write_text(
        "from edge_client.measure.meters import Family, number\n"
        "from edge_client.measure.polling import Polled\n"
        "def find(options):\n"
        "    watts = number(options, 'watts', 1.5)\n"
        "    return Polled('supply', 'a bench supply', lambda: watts, 'W', 0.01)\n"
        "SUPPLY = Family(find, 1, options=('watts',))\n"
    )
    made = tmp_path / "acme-1.0.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (made / "entry_points.txt").write_text("[maskfleet.meters]\nsupply = acme_supply:SUPPLY\nodd = acme_supply:find\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MeterError, match="meter odd: it has the entry point 'acme_supply:find', which names no Family"):
        choose("odd")
    found = choose("auto")
    assert found.why == "meter supply: a bench supply"
    assert [line for line in found.lines if "odd" in line] == [
        "  not odd: it has the entry point 'acme_supply:find', which names no Family; mend it"
    ]
    (made / "entry_points.txt").write_text("[maskfleet.meters]\nsupply = acme_supply:SUPPLY\n")
    found = choose("auto")
    assert found.why == "meter supply: a bench supply"
    meter = choose("supply:watts=4").meter
    assert meter is not None
    meter.start()
    begin = time.monotonic()
    time.sleep(0.05)
    end = time.monotonic()
    assert joules(meter.stop(), begin, end).watts == pytest.approx(4.0)
