"""INA219 and INA3221 current sensors on an I2C bus of this machine, through smbus2 (extra `meters`).

Registers are two bytes, the higher first. Both chips measure the voltage over a shunt resistor and that of the supply;
the INA219 also multiplies them, by a calibration that the shunt and the largest current give.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from edge_client.errors import ConfigError, MeterError
from edge_client.measure.energy import Accuracy, Meter
from edge_client.measure.meters import Family, Options, number
from edge_client.measure.polling import Polled

T = TypeVar("T", "Ina219", "Ina3221")
CONFIG = 0x00
PERIOD = 0.02  # seconds: both chips are set to average for 14 to 17 ms
ADDRESS_MOST, BUS_MOST, OHMS_MOST, AMPS_MOST = 0x77, 999, 100.0, 1000.0
SUPPLY = 5.0  # volts assumed where an error of the shunt voltage is given in watts


class Bus(Protocol):
    """What is used of smbus2.SMBus. Raises OSError when a chip does not answer."""

    def read_i2c_block_data(self, i2c_addr: int, register: int, length: int) -> list[int]: ...

    def write_i2c_block_data(self, i2c_addr: int, register: int, data: Sequence[int]) -> None: ...

    def close(self) -> None: ...


@dataclass
class Chip:
    """One chip's registers."""

    bus: Bus
    address: int

    def unsigned(self, register: int) -> int:
        high, low = self.bus.read_i2c_block_data(self.address, register, 2)
        return high << 8 | low

    def signed(self, register: int) -> int:
        value = self.unsigned(register)
        return value - 0x10000 if value & 0x8000 else value

    def write(self, register: int, value: int) -> None:
        self.bus.write_i2c_block_data(self.address, register, [value >> 8, value & 0xFF])


# --- INA219

SHUNT, BUS, POWER, CALIBRATION = 0x01, 0x02, 0x03, 0x05
AT_RESET = 0x399F  # the configuration after a reset: the chip has no other mark
OVERFLOW = 0x0001  # of the bus register: current or power left their 16 bits
SHUNT_STEP, BUS_STEP = 10e-6, 4e-3  # volts
SHUNT_MOST = (0.04, 0.08, 0.16, 0.32)  # volts of the amplifier's four ranges
CONFIGURATION = 0x2000 | 0b1100 << 7 | 0b1100 << 3 | 0b111  # 32 V, 16 readings averaged for each, without end


@dataclass
class Ina219:
    """Watts of one INA219. `amps` is the largest current expected: it is raised when the chip says that it was more."""

    chip: Chip
    shunt: float
    amps: float
    registers: ClassVar = (CONFIG, CALIBRATION)
    clipped: int = field(default=0, init=False)
    power_step: float = field(default=0.0, init=False)
    shunt_most: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._range()

    def _range(self) -> tuple[int, int]:
        """The amplifier's range and the calibration for `amps`."""
        volts = min(self.amps * self.shunt, SHUNT_MOST[-1])
        gain = next(i for i, most in enumerate(SHUNT_MOST) if most >= volts)
        self.shunt_most = SHUNT_MOST[gain]
        # 0.04096 is the datasheet's constant; the register's lowest bit is always 0.
        calibration = min(int(0.04096 * 2**15 / volts), 0xFFFE) & 0xFFFE
        self.power_step = 20 * 0.04096 / (calibration * self.shunt)
        return gain, calibration

    def set_up(self) -> None:
        """Range of the amplifier, calibration. Raises OSError."""
        gain, calibration = self._range()
        self.chip.write(CONFIG, CONFIGURATION | gain << 11)
        self.chip.write(CALIBRATION, calibration)

    def watts(self) -> float:
        """Power now. Where the multiplication overflowed it is done here, and the range is doubled for the next."""
        bus, power = self.chip.unsigned(BUS), self.chip.unsigned(POWER)
        shunt = self.chip.signed(SHUNT) * SHUNT_STEP
        full = abs(shunt) >= self.shunt_most - SHUNT_STEP
        if not (bus & OVERFLOW or full):
            return power * self.power_step
        self.clipped += full
        if self.amps * self.shunt < SHUNT_MOST[-1]:
            self.amps *= 2
            self.set_up()
        return abs(shunt) / self.shunt * (bus >> 3) * BUS_STEP


# --- INA3221

MAKER, MAKER_IS, DIE, DIE_IS = 0xFE, 0x5449, 0xFF, 0x3220
CHANNELS = (1, 2, 3)
SHUNT3_STEP, BUS3_STEP, FULL3 = 40e-6, 8e-3, 4095
CONFIGURATION3 = 0b111 << 12 | 0b001 << 9 | 0b011 << 6 | 0b011 << 3 | 0b111  # 4 readings of 588 us, all channels


@dataclass
class Ina3221:
    """Watts of an INA3221's `channels` together, each over a shunt of `shunt` ohms."""

    chip: Chip
    shunt: float
    channels: tuple[int, ...] = CHANNELS
    registers: ClassVar = (CONFIG,)
    clipped: int = field(default=0, init=False)

    def set_up(self) -> None:
        """Measure all channels without end. Raises OSError."""
        self.chip.write(CONFIG, CONFIGURATION3)

    def watts(self) -> float:
        """Power now, of all channels."""
        total, full = 0.0, False
        for channel in self.channels:
            shunt = self.chip.signed(2 * channel - 1) >> 3
            full |= abs(shunt) >= FULL3
            total += shunt * SHUNT3_STEP / self.shunt * (self.chip.signed(2 * channel) >> 3) * BUS3_STEP
        self.clipped += full
        return total


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


def _setting(options: Options) -> tuple[int, float]:
    return int(number(options, "bus", 1, -1, BUS_MOST)), number(options, "shunt", 0.1, most=OHMS_MOST)


def _look(
    bus: Bus, options: Options, addresses: range, known: Callable[[Chip], bool], make: Callable[[Chip], T]
) -> T | None:
    """The first chip that is known by its marks, or the one whose address is given; None without any. It only reads."""
    asked = "address" in options
    for address in (int(number(options, "address", 0, 0, ADDRESS_MOST)),) if asked else addresses:
        chip = Chip(bus, address)
        try:
            if known(chip):
                return make(chip)
        except OSError:  # no chip answers there
            continue
    bus.close()
    return None


def _meter(name: str, sensor: Ina219 | Ina3221, where: str, accuracy: Accuracy) -> Meter:
    kept: dict[int, int] = {}

    def begin() -> None:
        kept.update({register: sensor.chip.unsigned(register) for register in sensor.registers})
        sensor.set_up()

    def end() -> None:  # as it was: an INA219 is known by its state after a reset, another program may use the chip
        for register, value in kept.items():
            sensor.chip.write(register, value)

    what = f"{name.upper()} at {sensor.chip.address:#x} of I2C bus {where}, shunt {sensor.shunt:g} ohm"
    return Polled(
        name, what, sensor.watts, "W", PERIOD, accuracy, clipped=lambda: sensor.clipped, at_start=begin, at_end=end
    )


def find_ina219(options: Options, opens: Callable[[int], Bus] = open_bus) -> Meter:
    """An INA219 at `address`, else the first of 0x40 to 0x4F that is in its state after a reset."""
    number_of_bus, shunt = _setting(options)
    amps = number(options, "amps", 3.2, most=AMPS_MOST)

    def known(chip: Chip) -> bool:
        fresh = chip.unsigned(CONFIG) == AT_RESET  # an OSError where no chip answers
        return "address" in options or (fresh and chip.unsigned(MAKER) != MAKER_IS)

    found = _look(opens(number_of_bus), options, range(0x40, 0x50), known, lambda chip: Ina219(chip, shunt, amps))
    if found is None:
        raise MeterError(_absent("INA219", number_of_bus, options))
    return _meter("ina219", found, str(number_of_bus), Accuracy(0.012, 1e-4 / shunt * SUPPLY, found.power_step))


def find_ina3221(options: Options, opens: Callable[[int], Bus] = open_bus) -> Meter:
    """An INA3221 at `address`, else at 0x40 to 0x43, known by its maker's and die's numbers."""
    number_of_bus, shunt = _setting(options)
    text = options.get("channels", "123")
    if not text or set(text) - set("123"):
        raise ConfigError(f"channels={text}: some of 1, 2 and 3 are due, like 13")
    channels = tuple(sorted({int(c) for c in text}))

    def known(chip: Chip) -> bool:
        return (chip.unsigned(MAKER), chip.unsigned(DIE)) == (MAKER_IS, DIE_IS)

    bus = opens(number_of_bus)
    found = _look(bus, options, range(0x40, 0x44), known, lambda chip: Ina3221(chip, shunt, channels))
    if found is None:
        raise MeterError(_absent("INA3221", number_of_bus, options))
    where = f"{number_of_bus}, channels {', '.join(map(str, channels))}"
    step = SHUNT3_STEP / shunt * SUPPLY
    return _meter("ina3221", found, where, Accuracy(0.012, 8e-5 / shunt * SUPPLY, step))


def _absent(chip: str, bus: int, options: Options) -> str:
    where = f"at address {options['address']}" if "address" in options else "at its addresses"
    return f"no {chip} answers on I2C bus {bus} {where}; check the wiring with: i2cdetect -y {bus}"


INA219 = Family(find_ina219, 30, options=("bus", "address", "shunt", "amps"))
INA3221 = Family(find_ina3221, 20, options=("bus", "address", "shunt", "channels"))
