"""An artifact in a process of its own, so that an engine which crashes ends in a sentence and not with its caller.

    python -m edge_client.artifacts.isolated KIND FILE

opens FILE, then reads arrays from standard input and writes the outputs of each to standard output: eight bytes of
size, least first, and the array in numpy's format.
"""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from edge_client.artifacts import ADVICE, Run, writer
from edge_client.errors import CompactionError, MaskfleetError

_FAILED = re.compile(r"KernelCall failed .* in operator (\S+?):? ")
"""ExecuTorch's line on the operator that failed; its exception has a number only."""


@contextmanager
def opened(kind: str, data: bytes) -> Iterator[Run]:
    """The artifact `data` as a call on a batch of at most `BATCH` samples, until the block ends.

    Raises CompactionError when the engine cannot open or run it, and when it ends the process.
    """
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "said").open("w+b") as said:
        file = Path(folder) / "artifact"
        file.write_bytes(data)
        command = [sys.executable, "-m", "edge_client.artifacts.isolated", kind, str(file)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said)
        assert process.stdin is not None
        assert process.stdout is not None
        to, back = process.stdin, process.stdout

        def run(x: NDArray[Any]) -> NDArray[Any]:
            made = None
            with suppress(OSError):  # of a process that has ended
                _send(to, x)
                made = _receive(back)
            if made is None:
                code = process.wait()
                said.seek(0)
                text = said.read().decode(errors="replace")
                raise CompactionError(f"the {kind} artifact does not run: {_cause(code, text)}; {ADVICE}")
            return made

        try:
            yield run
        finally:
            process.kill()
            process.wait()
            back.close()
            with suppress(OSError):  # of what the process has not read
                to.close()


def _send(to: IO[bytes], x: NDArray[Any]) -> None:
    whole = io.BytesIO()
    np.save(whole, x, allow_pickle=False)
    to.write(len(whole.getvalue()).to_bytes(8, "little") + whole.getvalue())
    to.flush()


def _receive(back: IO[bytes]) -> NDArray[Any] | None:
    """The next array, None at the end."""
    size = int.from_bytes(back.read(8), "little")
    return np.asarray(np.load(io.BytesIO(back.read(size)), allow_pickle=False)) if size else None


def _cause(code: int, said: str) -> str:
    """What ended the process, in words."""
    if code < 0:
        return f"its engine crashed with {signal.Signals(-code).name}"
    operator = _FAILED.search(said)
    last = (said.strip().splitlines() or [f"its process ended with code {code}"])[-1]
    return f"operator {operator[1]} fails: {last}" if operator else last


def main(kind: str, file: Path) -> None:
    """Answer each array until there are no more."""
    back = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what an engine prints is no array
    run = writer(kind).open(file.read_bytes())
    while (x := _receive(sys.stdin.buffer)) is not None:
        _send(back, run(x))


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except MaskfleetError as error:
        sys.exit(str(error))
    except Exception as error:  # engines' errors share no base class
        sys.exit(f"{type(error).__name__}: {error}")
