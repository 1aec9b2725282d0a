"""A phone behind `adb`: commands on it, files to and from it, whatever they are for."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from edge_client.errors import ConfigError

SECONDS = 60.0  # a command may take


class AdbError(ConfigError):
    """The phone does not answer, or a command on it failed."""


@dataclass(frozen=True)
class Adb:
    """One phone. `serial` is as `adb devices` lists it."""

    serial: str
    program: str = "adb"

    def shell(self, command: str | Sequence[str], seconds: float = SECONDS) -> str:
        """What a command prints; a sequence is quoted. Raises AdbError when it fails."""
        words = command if isinstance(command, str) else shlex.join(command)
        return self._run(["shell", words], seconds)

    def push(self, files: Sequence[Path], folder: str) -> None:
        """Copy files into a folder of the phone, which is made. Raises AdbError."""
        self.shell(["mkdir", "-p", folder])
        self._run(["push", *map(str, files), folder], 10 * SECONDS)

    def pull(self, path: str) -> str:
        """The text of a file. Raises AdbError."""
        return self.shell(["cat", path])

    def devices(self) -> dict[str, str]:
        """Every device by serial and its state. Raises AdbError."""
        rows = [line.split() for line in self._run(["devices"], SECONDS).splitlines()[1:]]
        return {row[0]: row[1] for row in rows if len(row) >= 2}

    def _run(self, words: Sequence[str], seconds: float) -> str:
        command = [self.program, *(["-s", self.serial] if self.serial else []), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds)
        except subprocess.TimeoutExpired:
            raise AdbError(f"`{shlex.join(command)}` took more than {seconds:.0f} s; check the cable") from None
        except OSError as error:
            raise AdbError(f"{self.program} does not run: {error.strerror}; install Android's platform tools") from None
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise AdbError(f"`{shlex.join(command)}` failed: {said[-1] if said else f'exit {done.returncode}'}")
        return done.stdout


def connect(serial: str | None = None) -> Adb:
    """The phone `serial`, else the only one; `ADB` in the environment names another program.

    Raises AdbError with what to do when there is none, it is not authorised, or there are several.
    """
    program = os.environ.get("ADB") or shutil.which("adb")
    if program is None:
        raise AdbError("adb is not installed; run: sudo apt install adb")
    found = Adb("", program).devices()
    if serial is None and len(found) > 1:
        raise AdbError(f"adb lists several devices, {', '.join(found)}; choose one with --adb SERIAL")
    chosen = serial or next(iter(found), None)
    if chosen is None or chosen not in found:
        raise AdbError(f"adb lists {', '.join(found) or 'no device'}; connect the phone and switch on USB debugging")
    if found[chosen] != "device":
        raise AdbError(
            f"{chosen} is {found[chosen]}; confirm this computer on the phone's screen, then run: adb devices"
        )
    return Adb(chosen, program)
