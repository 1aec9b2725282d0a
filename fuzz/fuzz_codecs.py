"""Fuzzes every decoder: for any bytes, it returns or raises its error, in bounded time and memory.

    python fuzz/fuzz_codecs.py codecs|coupling|container --mutations 1000000    a seeded mutator, no extra package
    python fuzz/fuzz_codecs.py codecs|coupling|container --atheris 60           guided by coverage, for 60 seconds

Either prints its counts; `--json FILE` adds them to a file of results. The targets are in fuzz_targets.py.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import json
import os
import random
import signal
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import fuzz_targets
from edge_kernels.codecs.streams import varint
from fuzz_targets import Target

SLOWEST = 5.0  # processor seconds per payload, thousands of times what a small one takes
STUCK = 300.0  # seconds after which the process ends if compiled code does not return
CONSTANT = 256 << 10  # bytes that a decoder may allocate beside four times its result, at small d
CONSTANT_LARGE = 2 << 20  # the same at large d, where its tiles are full
SEGMENT = 16 << 20  # the same for `counts`, which decodes up to 2**20 values at once, and for `qsgd`, which uses it
_LARGE = 2000  # one payload in so many goes to a large target
_MEASURED = 16  # one payload in so many is decoded under the memory tracer, and all crafted and large ones


class HungError(Exception):
    """A decoder took too long and was interrupted."""


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """`data` with one, two or four random changes, some of which splice in `other`."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(9)
        at = rng.randrange(len(out) + 1)
        if kind == 0 and out:
            out[at - 1] ^= 1 << rng.randrange(8)
        elif kind == 1 and out:
            out[at - 1] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        elif kind == 2:
            del out[at:]
        elif kind == 3:
            out[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
        elif kind == 4:
            del out[at : at + rng.choice((1, 2, 8))]
        elif kind == 5:
            out[at:] = other[at:]
        elif kind == 6:
            out[:at] = other[:at]
        elif kind == 7:  # a number in the header, near the front
            at = rng.randrange(min(len(out), 40) + 1)
            number = rng.choice((0, 1 << rng.randrange(36), (1 << rng.randrange(36)) - 1))
            out[at : at + 4] = rng.choice((varint(number), (number & 0xFFFFFFFF).to_bytes(4, "little")))
        elif rng.random() < 0.3:
            out = bytearray(rng.randbytes(rng.randrange(64)))
        else:
            out += rng.choice((b"\0", b"\xff", b"\xaa")) * rng.randrange(1, 40)
    return bytes(out)


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise HungError inside the block after so many seconds of this process's processor time."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise HungError(f"still decoding after {seconds} s")

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(target: Target, data: bytes, measured: bool) -> bool:
    """Decode once. True if the payload decoded, False if it was refused.

    Raises for any other exception, and for too much time or memory. `measured`: under the memory tracer, three times
    slower.
    """
    result: Any = None
    if measured:
        tracemalloc.start()
    try:
        with alarm(SLOWEST):
            result = target.decode(data)
        accepted = True
    except target.refusal as error:
        if not str(error):
            raise AssertionError(f"a {target.refusal.__name__} without a message") from error
        accepted = False
    finally:
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    if measured and peak > allowance(target, result):
        raise AssertionError(f"{target.name} allocated {peak} bytes, more than {allowance(target, result)}")
    return accepted


def allowance(target: Target, result: Any) -> int:
    """The bytes that the target may allocate: four times its result, and its tiles."""
    decoded = max(target.decoded, int(getattr(result, "nbytes", 0)))
    if target.name.startswith("klms"):  # a payload of one block fills the tile at any d
        return 4 * decoded + CONSTANT_LARGE
    if target.decoded < fuzz_targets.LARGE:
        return 4 * decoded + CONSTANT
    return 4 * decoded + (SEGMENT if target.name.startswith(("counts", "qsgd")) else CONSTANT_LARGE)


def run_mutations(group: str, count: int, seed: int) -> dict[str, Any]:
    """Decode `count` mutated payloads of a group's targets and return the counts. Raises at the first failure."""
    rng = random.Random(seed)
    make = fuzz_targets.GROUPS[group]
    small, large = make(False), make(True)
    crafting = [target for target in large if target.craft is not None]
    for target in (*small, *large):
        if not attempt(target, target.seed, measured=True):
            raise AssertionError(f"{target.name} refuses its own payload")
    decoded, slowest = 0, (0.0, "")
    began = time.perf_counter()
    for i in range(count):
        if i % 1000 == 0:
            faulthandler.dump_traceback_later(STUCK, exit=True)
        known = large if i % _LARGE == _LARGE - 1 else small
        target = rng.choice(known)
        if known is large and crafting and rng.random() < 0.5:  # false claims in headers matter most at large d
            target = rng.choice(crafting)
        crafted = target.craft is not None and rng.random() < (0.9 if known is large else 0.3)
        if target.craft is not None and crafted:
            data = target.craft(rng)
        else:
            data = mutate(target.seed, rng.choice(known).seed, rng)
        measured = crafted or known is large or i % _MEASURED == 0
        start = time.process_time()
        try:
            decoded += attempt(target, data, measured)
        except BaseException as error:
            print(f"{target.name}, payload {i} of seed {seed}: {type(error).__name__}: {error}\n"
                  f"{data[:2000].hex()}", file=sys.stderr)  # fmt: skip
            raise
        slowest = max(slowest, (time.process_time() - start, target.name))
    faulthandler.cancel_dump_traceback_later()
    seconds = time.perf_counter() - began
    print(f"{count} mutated payloads of {len(small) + len(large)} targets ({group}) in {seconds:.0f} s: {decoded} "
          f"decoded, {count - decoded} refused with a {small[0].refusal.__name__}, none crashed, hung or allocated too "
          f"much; the slowest took {slowest[0] * 1e3:.0f} ms ({slowest[1]})")  # fmt: skip
    return {
        "mutations": count, "seed": seed, "targets": len(small) + len(large), "decoded": decoded,
        "refused": count - decoded, "crashed_hung_or_over_allocated": 0, "seconds": round(seconds),
        "slowest_ms": round(slowest[0] * 1e3), "slowest": slowest[1],
    }  # fmt: skip


def run_atheris(group: str, seconds: int, seed: int) -> dict[str, Any]:
    """Fuzz a group for so many seconds, guided by coverage, starting from valid payloads, and return the counts.

    libFuzzer ends its process, so it runs in a child process, which reports through a pipe. The first byte of an input
    selects the target; the rest is the payload.
    """
    known = fuzz_targets.GROUPS[group](False)
    reader, writer = os.pipe()
    with tempfile.TemporaryDirectory() as folder:
        for i, target in enumerate(known):
            (Path(folder) / f"{i:03}").write_bytes(bytes([i]) + target.seed)
        child = os.fork()
        if not child:
            os.close(reader)
            _fuzz(known, writer, [f"-max_total_time={seconds}", f"-seed={seed + 1}", "-timeout=60", "-max_len=4096",
                                  f"-artifact_prefix={tempfile.gettempdir()}/", folder])  # fmt: skip
        os.close(writer)
        with os.fdopen(reader) as pipe:
            lines = pipe.read().split()
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status or not lines:
        raise AssertionError(f"atheris exited with status {status}; its report is above")
    tried, decoded = (int(word) for word in lines[-2:])
    print(f"{tried} payloads of {len(known)} targets ({group}) guided by coverage in {seconds} s: {decoded} decoded, "
          f"{tried - decoded} refused with a {known[0].refusal.__name__}, none crashed or hung")  # fmt: skip
    return {"payloads": tried, "targets": len(known), "decoded": decoded, "refused": tried - decoded,
            "crashed_or_hung": 0, "seconds": seconds}  # fmt: skip


def _fuzz(known: Sequence[Target], report: int, options: list[str]) -> None:
    """Run libFuzzer in this process."""
    import atheris

    tally = [0, 0]

    def one_input(data: bytes) -> None:
        if data:
            tally[1] += attempt(known[data[0] % len(known)], data[1:], measured=False)
            tally[0] += 1
            if tally[0] % 100 == 0:
                os.write(report, f"{tally[0]} {tally[1]}\n".encode())

    for name, module in list(sys.modules.items()):
        if name.startswith(("edge_kernels.", "edge_client.protocol")):
            for function in list(vars(module).values()):
                if inspect.isfunction(function) and function.__module__ == name:
                    atheris.instrument_func(function)  # changes the function itself, also for its importers
    atheris.Setup([sys.argv[0], *options], one_input)
    atheris.Fuzz()


def main() -> int:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=list(fuzz_targets.GROUPS))
    parser.add_argument("--mutations", type=int, help="try so many mutated payloads")
    parser.add_argument("--atheris", type=int, metavar="SECONDS", help="guided by coverage, with `pip install atheris`")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the counts to this file")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.mutations is not None:
        found["mutations"] = run_mutations(options.group, options.mutations, options.seed)
    if options.atheris is not None:
        found["atheris"] = run_atheris(options.group, options.atheris, options.seed)
    if not found:
        parser.error("pass --mutations COUNT or --atheris SECONDS")
    if options.json is not None:
        record(options.json, options.group, found)
    return 0


def record(path: Path, group: str, found: dict[str, Any]) -> None:
    """Write one group's results into a file, beside those of the other groups."""
    from edge_bench.provenance import commit, machine

    results = json.loads(path.read_text()) if path.is_file() else {}
    results[group] = {**results.get(group, {}), **found, "commit": commit(), "machine": machine()}
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
