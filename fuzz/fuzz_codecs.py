"""Fuzzes every decoder: whatever the bytes, it returns or raises its one error, soon and in bounded memory.

    python fuzz/fuzz_codecs.py --mutations 1000000 [--seed N]     a seeded mutator, no extra package; prints the count
    python fuzz/fuzz_codecs.py --container --mutations 1000000    the same for the payload container
    python fuzz/fuzz_codecs.py --write-seeds FOLDER               one file for each target, to start the next from
    python fuzz/fuzz_codecs.py FOLDER [libFuzzer options]         coverage-guided, with `pip install atheris`

The seeds are payloads that the encoders wrote. A target is a decoder with its d, contexts, prediction or prior; the
wrong d is tried by giving one target's payload to another.
"""

from __future__ import annotations

import argparse
import inspect
import random
import sys
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError, counts, klms, values

from edge_client.errors import PayloadError
from edge_client.protocol import payload as container

SLOWEST = 2.0  # seconds a payload of these sizes may take, thousands of times what it needs
CONSTANT = 4 << 20  # bytes a decoder may use beside four times what it decodes to
_MEASURED = 200  # one payload in so many is decoded under the memory tracer


@dataclass(frozen=True)
class Target:
    """A decoder, a payload it decodes, the bytes of the largest thing it can decode to, how it refuses others."""

    name: str
    decode: Callable[[bytes], object]
    seed: bytes
    decoded: int
    refusal: type[Exception] = CodecError


def container_targets() -> list[Target]:
    """The payload container around nothing, around every dtype, and around what methods send."""
    meta = {"samples": 40, "loss": 0.25, "structure": "00ff00ff", "round": 3}
    every = {
        d: (np.arange(6) % 2).astype(d).reshape(2, 3) for d in ("f2", "f4", "f8", "u1", "i1", "u2", "u4", "u8", "?")
    }
    made = {
        "empty": container.Payload(),
        "words": container.Payload({}, meta),
        "dtypes": container.Payload(every, meta),
        "mask": container.Payload({"mask": np.arange(200, dtype=np.uint8), "head": np.ones(5, np.float32)}, meta),
        "scalar": container.Payload({"one": np.array(3, np.int64), "none": np.zeros((0, 4), np.float32)}),
    }
    return [
        Target(f"container {name}", container.decode, container.encode(p), 4096, PayloadError)
        for name, p in made.items()
    ]


def targets() -> list[Target]:
    """All decoders, at small sizes mostly, so that many payloads fit in a minute."""
    out = []
    for d, rate in ((0, 0.5), (1, 0.5), (37, 0.3), (300, 0.02), (60, 0.6), (4000, 0.003), (70000, 0.0001)):
        mask = counter.uniform(counter.key("fuzz", d), d) < rate
        contexts = (counter.uint64(counter.key("fuzz contexts", d), d) % np.uint64(5)).astype(np.uint8)
        for name in codecs.names():
            if d <= 4000 or name in ("rice", "entropy", "auto"):
                out.append(_set_target(name, mask, None))
        if d <= 4000:
            out.append(_set_target("entropy", mask, contexts))
    for d, top in ((30, 3), (40, 10), (12, 1000)):
        prediction = (counter.uint64(counter.key("fuzz counts", d), d) % np.uint64(top + 1)).astype(
            counts.dtype_for(top)
        )
        now = np.minimum(prediction + (counter.uniform(5, d) < 0.1), top).astype(prediction.dtype)
        decode = partial(counts.decode, d=d, top=top, prediction=prediction)
        out.append(Target(f"counts d={d}", decode, counts.encode(now, top, prediction), 5 * d))
        out.append(Target(f"counts d={d} plain", partial(counts.decode, d=d, top=top), counts.encode(now, top), 5 * d))
    for d in (90, 1000):
        prior = counter.uniform(counter.key("fuzz prior", d), d)
        payload = klms.encode(np.clip(prior + 0.2, 0, 1), prior, 1, 2, bits=4)
        out.append(Target(f"klms d={d}", partial(klms.decode, prior=prior, stream=1), payload, d))
    signs = np.where(counter.uniform(3, 77) < 0.5, -1, 1)
    out.append(Target("signs", partial(values.decode_signs, d=77), values.encode_signs(signs), 77))
    for kind in ("float16", "float32"):
        payload = values.encode_floats(counter.uniform(4, 20), kind)
        out.append(Target(kind, partial(values.decode_floats, d=20, kind=kind), payload, len(payload)))
    return out


def _set_target(
    name: str, mask: np.ndarray[tuple[int], np.dtype[np.bool_]], contexts: codecs.Contexts | None
) -> Target:
    d = len(mask)
    payload = codecs.encode(name, mask, d, contexts)
    label = f"{name} d={d}" + (" with contexts" if contexts is not None else "")
    return Target(label, lambda data: codecs.decode(name, data, d, contexts), payload, 5 * d)


def mutate(data: bytes, other: bytes, rng: random.Random) -> bytes:
    """`data` with one to four small damages; `other` is spliced in now and then."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        kind = rng.randrange(8)
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
        else:
            out = (
                bytearray(rng.randbytes(rng.randrange(64))) if rng.random() < 0.3 else out + bytes(rng.randrange(1, 40))
            )
    return bytes(out)


def attempt(target: Target, data: bytes, measured: bool) -> bool:
    """Decode once. True if it decoded, False if it was refused; any other exception, or too much memory, escapes."""
    if measured:
        tracemalloc.start()
    try:
        target.decode(data)
        return True
    except target.refusal as error:
        if not str(error):
            raise AssertionError(f"a {target.refusal.__name__} without a sentence") from error
        return False
    finally:
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            if peak > 4 * target.decoded + CONSTANT:
                raise AssertionError(f"{target.name} allocated {peak} bytes for at most {target.decoded} decoded")


def run_mutations(known: list[Target], count: int, seed: int) -> int:
    """Try `count` mutated payloads of the targets; the exit status."""
    rng = random.Random(seed)
    for target in known:
        if not attempt(target, target.seed, measured=True):
            raise AssertionError(f"{target.name} refuses its own payload")
    decoded = 0
    slowest, slowest_name = 0.0, ""
    began = time.perf_counter()
    for i in range(count):
        target = rng.choice(known)
        data = mutate(target.seed, rng.choice(known).seed, rng)
        start = time.perf_counter()
        try:
            decoded += attempt(target, data, measured=i % _MEASURED == 0)
        except BaseException as error:
            print(f"{target.name}: {type(error).__name__}: {error}\npayload {data.hex()}", file=sys.stderr)
            raise
        took = time.perf_counter() - start
        if took > slowest:
            slowest, slowest_name = took, target.name
        if took > SLOWEST:
            print(f"{target.name} took {took:.1f} s\npayload {data.hex()}", file=sys.stderr)
            return 1
    took = time.perf_counter() - began
    print(f"{count} mutated payloads of {len(known)} targets in {took:.0f} s: {decoded} decoded, "
          f"{count - decoded} refused with a {known[0].refusal.__name__}, none crashed, hung or allocated too much; "
          f"the slowest took {slowest * 1e3:.0f} ms ({slowest_name})")  # fmt: skip
    return 0


def run_atheris(arguments: list[str]) -> None:
    """Coverage-guided fuzzing: the first byte chooses the target, the rest is the payload."""
    import atheris

    known = targets()

    def one_input(data: bytes) -> None:
        if data:
            attempt(known[data[0] % len(known)], data[1:], measured=False)

    for module in [m for name, m in sys.modules.items() if name.startswith("edge_kernels.codecs")]:
        for function in vars(module).values():
            if inspect.isfunction(function) and function.__module__ == module.__name__:
                atheris.instrument_func(function)  # in place: importers see it too
    atheris.Setup([sys.argv[0], *arguments], one_input)
    atheris.Fuzz()


def main() -> int:
    """Parse the command line and fuzz."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, help="try so many mutated payloads without atheris")
    parser.add_argument("--container", action="store_true", help="fuzz the payload container instead of the codecs")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations")
    parser.add_argument("--write-seeds", type=Path, metavar="FOLDER", help="write a corpus for atheris and end")
    options, rest = parser.parse_known_args()
    if options.write_seeds is not None:
        options.write_seeds.mkdir(parents=True, exist_ok=True)
        for i, target in enumerate(targets()):
            (options.write_seeds / f"{i:03}").write_bytes(bytes([i]) + target.seed)
        return 0
    if options.mutations is not None:
        return run_mutations(container_targets() if options.container else targets(), options.mutations, options.seed)
    run_atheris(rest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
