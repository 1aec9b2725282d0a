"""INA219 and INA3221 current sensors on an I2C bus of this machine, through smbus2 (extra `meters`).

Registers are two bytes, the higher first. Both chips measure the voltage over a shunt resistor and that of the supply.
They are multiplied here: the INA219's own product has no sign and overflows. Its calibration register scales that
product alone, and its overflow bit is that product's; neither is used. A shunt voltage at the end of the range is an
overflow: the reading is lost, and counted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edge_client.errors import ConfigError, MeterError
from edge_client.measure.energy import Accuracy, Meter, added
from edge_client.measure.meters import Family, Options, number
from edge_client.measure.polling import Polled

CONFIG = 0x00
PERIOD = 0.02  # seconds: both chips are set to average for 14 to 17 ms
MOST_READS = 2000  # of a flag, each a tenth of a millisecond at least
ADDRESS_MOST, BUS_MOST, OHMS_MOST = 0x77, 999, 100.0
SUPPLY = 5.0  # volts assumed where an error of the shunt voltage is given in watts


class Bus(Protocol):
    """What is used of smbus2.SMBus. Raises OSError when a chip does not answer."""

    def read_i2c_block_data(self, i2c_addr: int, register: int, length: int) -> list[int]: ...

    def write_i2c_block_data(self, i2c_addr: int, register: int, data: Sequence[int]) -> None: ...

    def close(self) -> None: ...


@dataclass
class Chip:
    """One chip's registers, and how many readings were at the end of the range."""

    bus: Bus
    address: int
    clipped: int = field(default=0, init=False)

    def unsigned(self, register: int) -> int:
        high, low = self.bus.read_i2c_block_data(self.address, register, 2)
        return high << 8 | low

    def signed(self, register: int) -> int:
        value = self.unsigned(register)
        return value - 0x10000 if value & 0x8000 else value

    def write(self, register: int, value: int) -> None:
        self.bus.write_i2c_block_data(self.address, register, [value >> 8, value & 0xFF])

    def convert(self, config: int, clears: int, flags: int, ready: int) -> None:
        """Set the configuration, and wait until its first result replaces the one before. Raises OSError.

        Reading register `clears` clears the bit `ready` of `flags`, which the end of a conversion sets.
        """
        self.write(CONFIG, config)
        self.unsigned(clears)
        for _ in range(MOST_READS):
            if self.unsigned(flags) & ready:
                return
        raise OSError(f"the chip at {self.address:#x} finishes no conversion")

    def over_shunt(self, rail: str, steps: int, step: float, full: int) -> float:
        """Volts of so many steps. Raises OSError where they reach `full`, the end of the range."""
        if abs(steps) < full:
            return steps * step
        self.clipped += 1
        most = f"{1e3 * full * step:.0f} mV over the shunt"
        raise OSError(f"{rail} is at the end of its range, {most}; use a shunt of fewer ohms")


# --- INA219

SHUNT, BUS, POWER, READY = 0x01, 0x02, 0x03, 0x0002
AT_RESET = 0x399F  # the configuration after a reset: the chip has no other mark
SHUNT_STEP, BUS_STEP = 10e-6, 4e-3  # volts
FULL = 31_999  # steps of the widest range, 320 mV; a step is the same in all ranges
CONFIGURATION = 0x2000 | 0b11 << 11 | 0b1100 << 7 | 0b1100 << 3 | 0b111  # 32 V, 320 mV, 16 readings averaged, on and on


@dataclass
class Ina219:
    """Watts of one INA219 over a shunt of `shunt` ohms."""

    chip: Chip
    shunt: float
    zero: float

    def set_up(self) -> None:
        """Measure without end. Raises OSError."""
        self.chip.convert(CONFIGURATION, POWER, BUS, READY)

    def watts(self) -> float:
        """Power now. Raises OSError when it is negative or the shunt at the end of its range."""
        shunt = self.chip.over_shunt("the chip", self.chip.signed(SHUNT), SHUNT_STEP, FULL)
        volts = (self.chip.unsigned(BUS) >> 3) * BUS_STEP
        return added([("the chip", shunt / self.shunt * volts)], self.zero)


# --- INA3221

MAKER, MAKER_IS, DIE, DIE_IS = 0xFE, 0x5449, 0xFF, 0x3220
CHANNELS = (1, 2, 3)
FLAGS, READY3 = 0x0F, 0x0001
SHUNT3_STEP, BUS3_STEP, FULL3 = 40e-6, 8e-3, 4095
CONFIGURATION3 = 0b111 << 12 | 0b001 << 9 | 0b011 << 6 | 0b011 << 3 | 0b111  # 4 readings of 588 us, all channels


@dataclass
class Ina3221:
    """Watts of an INA3221's `channels` together, each over a shunt of `shunt` ohms."""

    chip: Chip
    shunt: float
    zero: float
    channels: tuple[int, ...] = CHANNELS

    def set_up(self) -> None:
        """Measure all channels without end. Raises OSError."""
        self.chip.convert(CONFIGURATION3, FLAGS, FLAGS, READY3)

    def watts(self) -> float:
        """Power now, of all channels. Raises OSError when one is negative or its shunt at the end of its range."""
        rails = []
        for channel in self.channels:
            rail = f"channel {channel}"
            shunt = self.chip.over_shunt(rail, self.chip.signed(2 * channel - 1) >> 3, SHUNT3_STEP, FULL3)
            volts = (self.chip.signed(2 * channel) >> 3) * BUS3_STEP
            rails.append((rail, shunt / self.shunt * volts))
        return added(rails, self.zero)


# --- finding them


def open_bus(number: int, root: Path = Path("/")) -> Bus:
    """I2C bus `number`. Raises MeterError when there is none, it may not be used, or smbus2 is missing."""
    path = root / "dev" / f"i2c-{number}"
    if not path.exists():
        raise MeterError(f"there is no {path}; switch I2C on (Raspberry Pi: sudo raspi-config nonint do_i2c 0)")
    if not os.access(path, os.R_OK | os.W_OK):
        raise MeterError(f"{path} may not be used; run: sudo usermod -aG i2c $USER, and log in again")
    try:
        from smbus2 import SMBus
    except ImportError:
        raise MeterError("smbus2 is not installed; run: pip install 'maskfleet[meters]'") from None
    try:
        bus: Bus = SMBus(number)
    except OSError as error:
        raise MeterError(f"{path} does not open: {error.strerror}") from None
    return bus


def _bus(options: Options) -> int:
    return int(number(options, "bus", 1, -1, BUS_MOST))


def _look(
    name: str, options: Options, opens: Callable[[int], Bus], addresses: range, known: Callable[[Chip], bool]
) -> Chip:
    """The first chip that is known by its marks, or the one whose address is given. It only reads.

    Raises MeterError without any.
    """
    number_of_bus = _bus(options)
    asked = int(number(options, "address", 0, 0, ADDRESS_MOST)) if "address" in options else None
    bus = opens(number_of_bus)
    others, held = [], []
    for address in addresses if asked is None else (asked,):
        chip = Chip(bus, address)
        try:
            if known(chip):
                return chip
            others.append(f"{address:#x}")
        except OSError as error:  # mostly: no chip answers there
            if error.errno == errno.EBUSY:
                held.append(f"{address:#x}")
    bus.close()
    where = f"on I2C bus {number_of_bus}" + ("" if asked is None else f" at address {options['address']}")
    if held:
        raise MeterError(f"a driver of the kernel holds {', '.join(held)} {where}; use --meter hwmon")
    if others and asked is None and name == "ina219":
        raise MeterError(
            f"no INA219 {where} is in its state after a reset, and chips answer at {', '.join(others)}; if one is an "
            f"INA219, name it: --meter ina219:address={others[0]}"
        )
    raise MeterError(f"no {name.upper()} answers {where}; check the wiring with: i2cdetect -y {number_of_bus}")


def _meter(name: str, sensor: Ina219 | Ina3221, more: str, accuracy: Accuracy) -> Meter:
    kept: list[int] = []

    def begin() -> None:
        kept[:] = [sensor.chip.unsigned(CONFIG)]
        sensor.set_up()

    def end() -> None:  # as it was: an INA219 is known by its state after a reset, another program may use the chip
        sensor.chip.write(CONFIG, *kept)

    what = f"{name.upper()} at {sensor.chip.address:#x} of I2C bus {more}, shunt {sensor.shunt:g} ohm"
    return Polled(
        name, what, sensor.watts, "W", PERIOD, accuracy, clipped=lambda: sensor.chip.clipped, at_start=begin, at_end=end
    )


def find_ina219(options: Options, opens: Callable[[int], Bus] = open_bus) -> Meter:
    """An INA219 at `address`, else the first of 0x40 to 0x4F in its state after a reset or a measurement."""
    shunt = number(options, "shunt", 0.1, most=OHMS_MOST)

    def known(chip: Chip) -> bool:
        state = chip.unsigned(CONFIG)  # an OSError where no chip answers
        return "address" in options or (state in (AT_RESET, CONFIGURATION) and chip.unsigned(MAKER) != MAKER_IS)

    chip = _look("ina219", options, opens, range(0x40, 0x50), known)
    zero = 1e-4 / shunt * SUPPLY
    step = SHUNT_STEP / shunt * SUPPLY
    return _meter("ina219", Ina219(chip, shunt, zero), str(_bus(options)), Accuracy(0.012, zero, step))


def find_ina3221(options: Options, opens: Callable[[int], Bus] = open_bus) -> Meter:
    """An INA3221 at `address`, else at 0x40 to 0x43, known by its maker's and die's numbers."""
    shunt = number(options, "shunt", 0.1, most=OHMS_MOST)
    text = options.get("channels", "123")
    if not text or set(text) - set("123"):
        raise ConfigError(f"channels={text}: give some of 1, 2 and 3, like 13")
    channels = tuple(sorted({int(c) for c in text}))

    def known(chip: Chip) -> bool:
        return (chip.unsigned(MAKER), chip.unsigned(DIE)) == (MAKER_IS, DIE_IS)

    chip = _look("ina3221", options, opens, range(0x40, 0x44), known)
    where = f"{_bus(options)}, channels {', '.join(map(str, channels))}"
    zero = 8e-5 / shunt * SUPPLY
    sensor = Ina3221(chip, shunt, zero, channels)
    return _meter("ina3221", sensor, where, Accuracy(0.012, zero, SHUNT3_STEP / shunt * SUPPLY))


INA219 = Family(find_ina219, 30, options=("bus", "address", "shunt"))
INA3221 = Family(find_ina3221, 20, options=("bus", "address", "shunt", "channels"))
