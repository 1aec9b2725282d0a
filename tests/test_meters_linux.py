"""Meters of this machine against emulated devices: registers on an I2C bus, files of hwmon, Jetson and RAPL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from emulated_power import SECONDS, SHAPES, Truth, VirtualClock, pulses, ramp, record

from edge_client.errors import ConfigError, MeterError
from edge_client.measure import hwmon, ina, rapl
from edge_client.measure.energy import Trace, joules
from edge_client.measure.polling import Polled

VOLTS = 5.0


def within_one_per_cent(trace: Trace, truth: Truth) -> None:
    found, due = joules(trace, 2.0, SECONDS - 2), truth.energy(2.0, SECONDS - 2)
    assert found.joules == pytest.approx(due, rel=0.01)
    assert abs(found.joules - due) <= 3 * found.error


# --- INA219 and INA3221: registers


@dataclass
class Conversions:
    """Results of `seconds` each: the watts of the last complete one, before the first those of the setting before.

    With them whether one was completed since the flag was cleared last; a new setting leaves the flag as it was.
    """

    seconds: float
    start: float = -1.0
    before: float = 0.0
    on: bool = True
    cleared: int = -1

    def at(self, t: float, truth: Truth, clear: bool = False) -> tuple[float, bool]:
        done = int((t - self.start) / self.seconds) if self.on else 0
        ready = done > self.cleared
        self.cleared = done if clear else self.cleared
        if not done:
            return self.before, ready
        end = self.start + done * self.seconds
        return truth.energy(end - self.seconds, end) / self.seconds, ready

    def begin(self, t: float, truth: Truth, seconds: float, on: bool) -> None:
        self.before = self.at(t, truth)[0]
        self.seconds, self.start, self.on, self.cleared = seconds, t, on, -1


@dataclass
class Chip219:
    """An INA219's registers by its data sheet. A result is the mean over its conversion, and stays until the next."""

    truth: Truth
    now: Callable[[], float]
    shunt: float
    config: int = 0x399F
    calibration: int = 0
    conversions: Conversions = field(default_factory=lambda: Conversions(0.00106))

    def write(self, register: int, value: int) -> None:
        if register == 5:
            self.calibration = value & 0xFFFE
        if register == 0:
            self.conversions.begin(self.now(), self.truth, 0.01702 if value & 0x40 else 0.00106, value & 7 == 7)
            self.config = 0x399F if value & 0x8000 else value

    def read(self, register: int) -> int:
        power, ready = self.conversions.at(self.now(), self.truth, clear=register == 0x03)
        most = 4000 << (self.config >> 11 & 3)
        shunt = max(-most, min(most, round(power / VOLTS * self.shunt / 10e-6)))
        volts, current = round(VOLTS / 4e-3), shunt * self.calibration >> 12
        watts = current * volts // 5000
        overflow = not (-0x8000 <= current < 0x8000 and abs(watts) < 0x10000)
        return {
            0: self.config, 1: shunt & 0xFFFF, 2: volts << 3 | 2 * ready | overflow, 3: abs(watts) & 0xFFFF,
            4: current & 0xFFFF, 5: self.calibration,
        }.get(register, 0)  # fmt: skip


@dataclass
class Chip3221:
    """An INA3221: three channels that share the power in fixed parts, means over their conversion."""

    truth: Truth
    now: Callable[[], float]
    shunt: float
    shares: tuple[float, float, float] = (0.5, 0.3, 0.2)
    config: int = 0x7127
    conversions: Conversions = field(default_factory=lambda: Conversions(0.0066))

    def write(self, register: int, value: int) -> None:
        if register == 0:
            self.conversions.begin(self.now(), self.truth, 0.0141 if value & 0xE00 else 0.0066, value & 7 == 7)
            self.config = 0x7127 if value & 0x8000 else value

    def read(self, register: int) -> int:
        power, ready = self.conversions.at(self.now(), self.truth, clear=register == 0x0F)
        marks = {0xFE: 0x5449, 0xFF: 0x3220, 0x00: self.config, 0x0F: int(ready)}
        if register in marks:
            return marks[register]
        channel, volts = divmod(register - 1, 2)
        if not self.config >> (14 - channel) & 1:
            return 0
        if volts:
            return round(VOLTS / 8e-3) << 3
        counts = round(power * self.shares[channel] / VOLTS * self.shunt / 40e-6)
        return (max(-4096, min(4095, counts)) << 3) & 0xFFFF


@dataclass
class EmulatedBus:
    """What smbus2.SMBus is to the chips on it: a transfer takes time, and an address without a chip does not answer."""

    chips: dict[int, Chip219 | Chip3221]
    clock: VirtualClock
    fail_at: tuple[float, float] = (-1.0, -1.0)
    closed: bool = False

    def _chip(self, address: int) -> Chip219 | Chip3221:
        self.clock.pass_(0.0002)
        if address not in self.chips or self.fail_at[0] <= self.clock.t < self.fail_at[1]:
            raise OSError(121, "Remote I/O error")
        return self.chips[address]

    def read_i2c_block_data(self, i2c_addr: int, register: int, length: int) -> list[int]:
        assert length == 2
        return list(self._chip(i2c_addr).read(register).to_bytes(2, "big"))

    def write_i2c_block_data(self, i2c_addr: int, register: int, data: Sequence[int]) -> None:
        self._chip(i2c_addr).write(register, int.from_bytes(bytes(data), "big"))

    def close(self) -> None:
        self.closed = True


def bus_with(truth: Truth, address: int = 0x40, kind: type[Chip219 | Chip3221] = Chip219, shunt: float = 0.1, **more):  # type: ignore[no-untyped-def]
    clock = VirtualClock(SECONDS, jitter=0.002)
    return EmulatedBus({address: kind(truth, clock.now, shunt)}, clock, **more)


def found_219(bus: EmulatedBus, **options: str) -> Polled:
    return _on(bus, ina.find_ina219(options, lambda number: bus))


def found_3221(bus: EmulatedBus, **options: str) -> Polled:
    return _on(bus, ina.find_ina3221(options, lambda number: bus))


def _on(bus: EmulatedBus, meter: object) -> Polled:
    assert isinstance(meter, Polled)
    meter.now = bus.clock.now
    meter.at_start()
    return meter


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shunt", ["0.1", "0.01"])
def test_an_ina219_measures_each_shape(shape: str, shunt: str) -> None:
    truth = SHAPES[shape]
    bus = bus_with(truth, shunt=float(shunt))
    meter = found_219(bus, shunt=shunt)
    assert "INA219 at 0x40 of I2C bus 1" in meter.what
    within_one_per_cent(record(meter, bus.clock), truth)


def test_an_ina219_measures_up_to_its_widest_range_and_loses_nothing() -> None:
    truth = pulses(0.01, 15.5, 2.0, 0.5, SECONDS + 5)  # 3.1 A of 3.2
    bus = bus_with(truth)
    trace = record(found_219(bus), bus.clock)
    within_one_per_cent(trace, truth)
    assert trace.clipped == 0


@pytest.mark.parametrize("kind", [Chip219, Chip3221])
def test_the_first_sample_is_of_a_conversion_after_the_set_up(kind: type[Chip219 | Chip3221]) -> None:
    """A chip that was switched off holds the result from before."""
    truth = SHAPES["constant"]
    bus = bus_with(truth, kind=kind)
    bus.chips[0x40].conversions.on = False
    find = found_219 if kind is Chip219 else found_3221
    trace = record(find(bus, address="0x40"), bus.clock)
    assert trace.values[:3] == pytest.approx([4.0] * 3, rel=0.01)
    assert joules(trace, trace.times[0], trace.times[0] + 0.2).joules == pytest.approx(0.8, rel=0.01)


def test_a_chip_that_converts_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    bus = bus_with(SHAPES["constant"])
    monkeypatch.setattr(Conversions, "at", lambda self, t, truth, clear=False: (0.0, False))
    meter = ina.find_ina219({}, lambda number: bus)
    with pytest.raises(MeterError, match="does not start: the chip at 0x40 finishes no conversion"):
        meter.start()


def test_a_shunt_wired_the_wrong_way_round_is_an_error_and_never_lowers_a_sum() -> None:
    clock = VirtualClock(1.0)
    back = Chip219(SHAPES["constant"], clock.now, -0.1)
    with pytest.raises(MeterError, match=r"the chip reads -4 W, .* is positive; swap the two wires"):
        record(found_219(EmulatedBus({0x40: back}, clock)), clock)
    one = Chip3221(SHAPES["constant"], clock.now, 0.1, shares=(0.5, 0.8, -0.3))
    bus = EmulatedBus({0x40: one}, clock)
    with pytest.raises(MeterError, match=r"channel 3 reads -1\.2 W"):
        record(found_3221(bus), clock)
    assert record(found_3221(bus, channels="12"), clock).values[0] == pytest.approx(5.2, rel=0.01)


def test_a_calibration_with_which_the_chips_own_product_overflows_changes_no_figure() -> None:
    truth = SHAPES["pulses"]
    bus = bus_with(truth)
    bus.chips[0x40].write(5, 0xFFFE)
    before = bus.chips[0x40].read(5)
    assert ina.Chip(bus, 0x40).unsigned(2) & 1, "the overflow bit is set"
    trace = record(found_219(bus), bus.clock)
    within_one_per_cent(trace, truth)
    assert (trace.lost, trace.clipped) == (0, 0)
    assert bus.chips[0x40].read(5) == before


@pytest.mark.parametrize("kind", [Chip219, Chip3221])
def test_a_shunt_at_the_end_of_its_range_is_a_lost_sample_and_no_value(kind: type[Chip219 | Chip3221]) -> None:
    bus = bus_with(ramp(1.0, 40.0, SECONDS + 5), kind=kind)  # 8 A at the end; 3.2 A fit, or 1.6 on the largest channel
    trace = record((found_219 if kind is Chip219 else found_3221)(bus), bus.clock)
    limit = 3.2 * VOLTS if kind is Chip219 else 1.638 / 0.5 * VOLTS
    assert trace.values.max() < limit
    assert trace.clipped > 100
    assert trace.lost >= trace.clipped
    with pytest.raises(MeterError, match="the meter's recording covers"):
        joules(trace, 2.0, SECONDS - 2)


@pytest.mark.parametrize("kind", [Chip219, Chip3221])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_shunt_that_is_always_at_its_end_says_what_to_do(kind: type[Chip219 | Chip3221], sign: int) -> None:
    bus = bus_with(SHAPES["constant"], kind=kind, shunt=sign * 2.0)
    what = "the chip is at the end of its range, 320 mV" if kind is Chip219 else "channel 1 is at .*, 164 mV"
    with pytest.raises(MeterError, match=f"gave no reading: {what} over the shunt; use a shunt of fewer ohms"):
        record((found_219 if kind is Chip219 else found_3221)(bus), bus.clock)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_ina3221_adds_its_channels(shape: str) -> None:
    truth = SHAPES[shape]
    bus = bus_with(truth, 0x41, Chip3221)
    within_one_per_cent(record(found_3221(bus), bus.clock), truth)
    half = record(found_3221(bus_one := bus_with(truth, 0x41, Chip3221), channels="1"), bus_one.clock)
    assert joules(half, 2, 38).joules == pytest.approx(0.5 * truth.energy(2, 38), rel=0.01)


def test_a_bus_that_fails_for_a_while_loses_samples_and_keeps_the_rest() -> None:
    truth = SHAPES["ramp"]
    bus = bus_with(truth, fail_at=(20.0, 23.0))
    trace = record(found_219(bus), bus.clock)
    assert 120 <= trace.lost <= 160
    within_one_per_cent(trace, truth)
    assert joules(trace, 15, 30).lost >= 120


def test_chips_are_known_by_their_marks_and_nothing_else_is_touched() -> None:
    clock = VirtualClock(1.0)
    busy = Chip219(SHAPES["constant"], clock.now, 0.1, 0x1234)  # in use by somebody else
    fresh, three = Chip219(SHAPES["constant"], clock.now, 0.1), Chip3221(SHAPES["constant"], clock.now, 0.1)
    bus = EmulatedBus({0x40: busy, 0x41: three, 0x44: fresh}, clock)
    assert "at 0x44" in found_219(bus).what
    assert "at 0x41" in found_3221(bus).what
    assert busy.config == 0x1234
    assert "at 0x40" in ina.find_ina219({"address": "0x40"}, lambda number: bus).what  # named: taken as it is
    with pytest.raises(MeterError, match=r"chips answer at 0x40; .* name it: --meter ina219:address=0x40"):
        ina.find_ina219({}, lambda number: EmulatedBus({0x40: busy}, clock))
    empty = EmulatedBus({}, clock)
    with pytest.raises(MeterError, match=r"no INA219 answers on I2C bus 1.*i2cdetect -y 1"):
        found_219(empty)
    assert empty.closed
    with pytest.raises(MeterError, match=r"no INA3221 answers on I2C bus 1 at address 0x40"):
        found_3221(EmulatedBus({}, clock), address="0x40")
    with pytest.raises(ConfigError, match="shunt=0: give a number above 0"):
        found_219(bus, shunt="0")


@pytest.mark.parametrize("kind", [Chip219, Chip3221])
def test_looking_writes_nothing_and_a_measurement_leaves_the_chip_as_it_was(kind: type[Chip219 | Chip3221]) -> None:
    clock = VirtualClock(1.0)
    chip = kind(SHAPES["constant"], clock.now, 0.1)
    bus = EmulatedBus({0x40: chip}, clock)
    before = chip.config
    find = ina.find_ina219 if kind is Chip219 else ina.find_ina3221
    for _ in range(2):  # an INA219 that was measured is found again
        meter = find({}, lambda number: bus)
        assert isinstance(meter, Polled)
        assert chip.config == before
        meter.start()
        assert chip.config != before
        meter.stop()
        assert chip.config == before


def test_a_chip_is_found_after_a_measurement_that_was_killed() -> None:
    clock = VirtualClock(1.0)
    bus = EmulatedBus({0x40: Chip219(SHAPES["constant"], clock.now, 0.1)}, clock)
    found_219(bus)  # which begins, and never ends
    assert "at 0x40" in found_219(bus).what


def test_an_address_that_a_driver_holds_leads_to_hwmon() -> None:
    class Held(EmulatedBus):
        def read_i2c_block_data(self, i2c_addr: int, register: int, length: int) -> list[int]:
            raise OSError(*((16, "Device or resource busy") if i2c_addr == 0x45 else (121, "Remote I/O error")))

    with pytest.raises(MeterError, match="a driver of the kernel holds 0x45 on I2C bus 1; use --meter hwmon"):
        ina.find_ina219({}, lambda number: Held({}, VirtualClock(1.0)))


@pytest.mark.parametrize("option", ["bus=inf", "address=inf", "address=0x1000", "shunt=nan"])
def test_options_out_of_range_are_refused_in_a_sentence(option: str) -> None:
    key, _, value = option.partition("=")
    with pytest.raises(ConfigError, match=rf"{option}: give a number above "):
        ina.find_ina219({key: value}, lambda number: bus_with(SHAPES["constant"]))


def test_readings_at_the_end_of_the_range_count_for_their_own_recording() -> None:
    clipped = [0]

    def watts() -> float:
        clipped[0] += 1
        return 1.0

    meter = Polled("m", "m", watts, "W", 0.001, clipped=lambda: clipped[0])
    for _ in range(2):
        meter.start()
        trace = meter.stop()
        assert trace.clipped <= len(trace.times) + 1


def test_an_agx_orins_rails_are_added_and_its_peripheral_rail_is_no_total(tmp_path: Path) -> None:
    folder = tmp_path / hwmon.JETSON_NEW / "1-0040/hwmon/hwmon3"
    write(folder / "name", "ina3221")
    for n, (label, watts) in enumerate([("VDD_GPU_SOC", 9.5), ("VDD_CPU_CV", 13.3), ("VIN_SYS_5V0", 4.0)], 1):
        write(folder / f"in{n}_label", label)
        write(folder / f"in{n}_input", 5000)
        write(folder / f"curr{n}_input", round(watts / 5 * 1000))
    # The driver's sum of currents, and a shunt's voltage in the same place.
    write(folder / "curr4_input", 5360)
    write(folder / "in4_input", 19)
    meter = hwmon.find_jetson({}, tmp_path)
    assert isinstance(meter, Polled)
    assert meter.read() == pytest.approx(26.8)


def test_a_graphics_card_is_not_taken_for_the_machine_unless_it_is_named(tmp_path: Path) -> None:
    write(tmp_path / hwmon.CLASS / "hwmon0/name", "amdgpu")
    write(tmp_path / hwmon.CLASS / "hwmon0/power1_input", 11_000_000)
    with pytest.raises(MeterError, match="amdgpu is a graphics card"):
        hwmon.find_hwmon({}, tmp_path)
    assert hwmon.find_hwmon({"name": "amdgpu"}, tmp_path).what.startswith("hwmon0 (amdgpu)")
    assert rapl.RAPL.rank < hwmon.HWMON.rank


def test_a_bus_that_is_missing_or_closed_to_the_user_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(MeterError, match="raspi-config"):
        ina.open_bus(1, tmp_path)
    (tmp_path / "dev").mkdir()
    device = tmp_path / "dev" / "i2c-1"
    device.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(MeterError, match=r"sudo usermod -aG i2c \$USER"):
            ina.open_bus(1, tmp_path)


# --- files


def write(path: Path, value: object) -> None:
    """One line, in place: a file that is cut first is slow to write on some disks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "r+" if path.exists() else "w") as file:
        file.write(f"{value!s:<24}\n")


def recorded(meter: object, clock: VirtualClock) -> Trace:
    assert isinstance(meter, Polled)
    meter.now = clock.now
    return record(meter, clock)


@pytest.mark.parametrize("shape", SHAPES)
def test_hwmon_power_is_summed_over_rails_or_taken_from_the_whole_boards(tmp_path: Path, shape: str) -> None:
    truth, folder = SHAPES[shape], tmp_path / hwmon.CLASS / "hwmon3"
    write(folder / "name", "ina226")

    def moved(t: float) -> None:
        write(folder / "power1_input", round(0.7 * truth.power(t) * 1e6))
        write(folder / "power2_input", round(0.3 * truth.power(t) * 1e6))

    moved(0)
    clock = VirtualClock(SECONDS, jitter=0.005, moved=moved)
    within_one_per_cent(recorded(hwmon.find_hwmon({}, tmp_path), clock), truth)
    write(folder / "power2_label", "Total board power")
    meter = hwmon.find_hwmon({}, tmp_path)
    assert meter.what == "hwmon3 (ina226), Total board power"


def test_an_average_over_seconds_is_no_power(tmp_path: Path) -> None:
    write(tmp_path / hwmon.CLASS / "hwmon0/name", "power_meter")
    write(tmp_path / hwmon.CLASS / "hwmon0/power1_average", 11_000_000)
    with pytest.raises(MeterError, match="power_meter has no power but an average over some time"):
        hwmon.find_hwmon({}, tmp_path)


def test_a_power_supplys_input_is_taken_alone_and_its_outputs_are_not_added(tmp_path: Path) -> None:
    folder = tmp_path / hwmon.CLASS / "hwmon0"
    write(folder / "name", "pmbus")
    for n, label, watts in ((1, "pin", 10), (2, "pout1", 6), (3, "pout2", 3)):
        write(folder / f"power{n}_label", label)
        write(folder / f"power{n}_input", watts * 1_000_000)
    trace = recorded(hwmon.find_hwmon({}, tmp_path), VirtualClock(5.0))
    assert joules(trace, 1, 4).watts == pytest.approx(10.0)
    write(folder / "power3_label", "Pin2")
    trace = recorded(hwmon.find_hwmon({}, tmp_path), VirtualClock(5.0))
    assert joules(trace, 1, 4).watts == pytest.approx(13.0)


@pytest.mark.parametrize("labels", [True, False])
def test_hwmon_current_and_voltage_are_paired_by_label_or_number(tmp_path: Path, labels: bool) -> None:
    truth, folder = SHAPES["ramp"], tmp_path / hwmon.CLASS / "hwmon0"
    write(folder / "name", "ltc2947")
    volts = 2 if labels else 1
    write(folder / "in0_input", 900)
    if labels:
        write(folder / "in1_input", 3300)
        write(folder / "curr1_label", "VDD")
        write(folder / "in2_label", "VDD")
    write(folder / f"in{volts}_input", 5000)

    def moved(t: float) -> None:
        write(folder / "curr1_input", round(truth.power(t) / 5.0 * 1e3))

    moved(0)
    clock = VirtualClock(SECONDS, jitter=0.005, moved=moved)
    within_one_per_cent(recorded(hwmon.find_hwmon({}, tmp_path), clock), truth)


def test_hwmon_passes_over_batteries_and_temperatures_and_says_so(tmp_path: Path) -> None:
    write(tmp_path / hwmon.CLASS / "hwmon0" / "name", "coretemp")
    write(tmp_path / hwmon.CLASS / "hwmon0" / "temp1_input", 41000)
    write(tmp_path / hwmon.CLASS / "hwmon1" / "name", "BAT0")
    write(tmp_path / hwmon.CLASS / "hwmon1" / "power1_input", 7_000_000)
    with pytest.raises(MeterError, match=r"coretemp has no power; BAT0 is a battery.*--meter hwmon:name=BAT0"):
        hwmon.find_hwmon({}, tmp_path)
    assert "BAT0" in hwmon.find_hwmon({"name": "BAT0"}, tmp_path).what
    with pytest.raises(MeterError, match=r"no sensor 'ina' in .*; there are: coretemp, BAT0"):
        hwmon.find_hwmon({"name": "ina"}, tmp_path)
    with pytest.raises(MeterError, match="there is no sensor"):
        hwmon.find_hwmon({}, tmp_path / "nowhere")


@pytest.mark.parametrize("system", ["new", "old"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_jetsons_input_rail_is_taken_alone(tmp_path: Path, shape: str, system: str) -> None:
    truth = SHAPES[shape]
    new = tmp_path / hwmon.JETSON_NEW / "1-0040" / "hwmon" / "hwmon2"
    old = tmp_path / hwmon.JETSON_OLD / "6-0040" / "iio:device0"
    rails = ("VDD_IN", "VDD_CPU_GPU_CV", "VDD_SOC")
    for i, label in enumerate(rails):
        if system == "new":
            write(new / f"in{i + 1}_label", label)
            write(new / f"in{i + 1}_input", 5000)
        else:
            write(old / f"rail_name_{i}", label)

    def moved(t: float) -> None:
        for i, share in enumerate((1.0, 0.5, 0.25)):
            if system == "new":
                write(new / f"curr{i + 1}_input", round(share * truth.power(t) / 5 * 1e3))
            else:
                write(old / f"in_power{i}_input", round(share * truth.power(t) * 1e3))

    moved(0)
    meter = hwmon.find_jetson({}, tmp_path)
    assert meter.what == "INA3221 of the board, VDD_IN"
    within_one_per_cent(recorded(meter, VirtualClock(SECONDS, jitter=0.005, moved=moved)), truth)


def test_a_jetson_without_a_labelled_input_has_its_rails_added(tmp_path: Path) -> None:
    folder = tmp_path / hwmon.JETSON_OLD / "6-0040" / "iio:device0"
    for i, (label, milliwatts) in enumerate((("GPU", 1200), ("CPU", 800))):
        write(folder / f"rail_name_{i}", label)
        write(folder / f"in_power{i}_input", milliwatts)
    trace = recorded(hwmon.find_jetson({}, tmp_path), VirtualClock(5.0))
    assert joules(trace, 1, 4).joules == pytest.approx(6.0)
    with pytest.raises(MeterError, match="not a Jetson"):
        hwmon.find_jetson({}, tmp_path / "nowhere")


@dataclass
class Rapl:
    """Two packages and one memory domain that share the power; each counter wraps at its range."""

    root: Path
    truth: Truth
    span: int

    def __post_init__(self) -> None:
        self.parts = {"0": ("package-0", 0.5), "1": ("package-1", 0.3), "0:1": ("dram", 0.2), "0:0": ("core", 0.4)}
        for key, (name, _) in self.parts.items():
            write(self.folder(key) / "name", name)
            write(self.folder(key) / "max_energy_range_uj", self.span)
        self.moved(0.0)

    def folder(self, key: str) -> Path:
        return self.root / rapl.CLASS / f"intel-rapl:{key}"

    def moved(self, t: float) -> None:
        for key, (_, share) in self.parts.items():
            first = 0.9 * self.span
            write(self.folder(key) / "energy_uj", int(first + share * self.truth.energy(0, t) * 1e6) % self.span)


@pytest.mark.parametrize("shape", SHAPES)
def test_rapl_adds_packages_and_memory_and_survives_wraps(tmp_path: Path, shape: str) -> None:
    truth = SHAPES[shape]
    emulated = Rapl(tmp_path, truth, 5_000_000)  # wraps every few seconds
    meter = rapl.find({}, tmp_path)
    assert meter.what == "processor counters: package-0, dram, package-1"
    trace = recorded(meter, VirtualClock(SECONDS, jitter=0.005, moved=emulated.moved))
    within_one_per_cent(trace, truth)
    assert joules(trace, 2, 38).joules == pytest.approx(truth.energy(2, 38), rel=1e-3)


def test_rapl_survives_a_stall_of_the_machine(tmp_path: Path) -> None:
    truth = SHAPES["pulses"]
    emulated = Rapl(tmp_path, truth, 262_143_328_850)
    clock = VirtualClock(SECONDS, moved=emulated.moved, stalls={20.0: 4.0})
    trace = recorded(rapl.find({}, tmp_path), clock)
    found = joules(trace, 2, 38)
    assert found.joules == pytest.approx(truth.energy(2, 38), rel=1e-3)  # a counter forgets nothing
    assert 75 <= trace.lost <= 85


def test_rapls_platform_domain_is_taken_alone(tmp_path: Path) -> None:
    Rapl(tmp_path, SHAPES["constant"], 10**9)
    write(tmp_path / rapl.CLASS / "intel-rapl:2" / "name", "psys")
    write(tmp_path / rapl.CLASS / "intel-rapl:2" / "max_energy_range_uj", 10**9)
    write(tmp_path / rapl.CLASS / "intel-rapl:2" / "energy_uj", 5)
    assert rapl.find({}, tmp_path).what == "processor counters: psys"


def test_rapl_that_may_not_be_read_prints_the_command_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MeterError, match="virtual machine, or a processor without RAPL"):
        rapl.find({}, tmp_path)
    Rapl(tmp_path, SHAPES["constant"], 10**9)
    plain = Path.read_text

    def read_text(self: Path, *args: object, **more: object) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return plain(self)

    monkeypatch.setattr(Path, "read_text", read_text)
    with pytest.raises(MeterError, match=r"may not be read; run: sudo chmod a\+r .*intel-rapl:\*/energy_uj"):
        rapl.find({}, tmp_path)
