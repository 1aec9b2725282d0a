"""python measured.py FILE -m MODULE ARGUMENTS...: runs the module, then writes to FILE what this process cost.

Under qemu-user the peak of memory includes qemu and its translated code.
"""

import atexit
import json
import resource
import runpy
import sys
import time
from pathlib import Path


def write(file: Path, started: float) -> None:
    """Wall seconds since `started`, CPU seconds and the peak of resident memory in bytes, of this process alone."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {"seconds": time.monotonic() - started, "cpu_seconds": used.ru_utime + used.ru_stime}
    file.write_text(json.dumps({**cost, "peak_bytes": used.ru_maxrss * 1024}))


if __name__ == "__main__":
    _, file, _, module, *arguments = sys.argv
    atexit.register(write, Path(file), time.monotonic())
    sys.argv = [module, *arguments]
    sys.path.pop(0)  # this script's folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)
