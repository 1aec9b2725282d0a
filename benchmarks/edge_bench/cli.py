"""The commands `maskfleet simulate` and `maskfleet demo`: arguments in, progress and tables out."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from edge_client.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from edge_bench.simulate import RoundRow


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's content. Raises ConfigError."""
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        return content
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a result file. Raises ConfigError when it cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def simulate(
    config: Annotated[Path, typer.Argument(help="The simulation's TOML file; see benchmarks/configs.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every method's record and its rounds here.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Instead of the file's `rounds`.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Instead of the file's `seed`.")] = None,
    only: Annotated[
        str | None, typer.Option(help="Only these of the file's methods, by label, comma-separated.")
    ] = None,
) -> None:
    """Run federations in one process, on the same engine and methods as the real thing, and compare them."""
    from rich.console import Console

    from edge_bench import datasets, report
    from edge_bench.simulate import find_bundle, read_config, run_all
    from edge_client.methods import make_method

    raw = read_toml(config)
    raw |= {k: v for k, v in (("rounds", rounds), ("seed", seed)) if v is not None}
    checked = read_config(raw)
    if only is not None:
        wanted = only.split(",")
        unknown = sorted(set(wanted) - checked.methods.keys())
        if unknown:
            raise ConfigError(f"{config} has no methods {unknown}; it has {sorted(checked.methods)}")
        checked = checked.model_copy(update={"methods": {k: checked.methods[k] for k in wanted}})
    bundle = find_bundle(checked.bundle)
    devices = datasets.load(checked.data, checked.seed, bundle.manifest)
    console = Console(highlight=False)
    train, test = (sum(len(getattr(d, k)) for d in devices.values()) for k in ("y", "y_test"))
    console.print(
        f"{bundle.manifest.name}: {bundle.manifest.d:,} parameters; {checked.data.name} on {len(devices)} devices, "
        f"{train} training and {test} {checked.data.evaluate} samples; {checked.rounds} rounds of {checked.cohort}"
    )
    started = time.monotonic()

    def said(label: str, row: RoundRow) -> None:
        r = row.record
        everyone = "" if row.everyone is None else f"  all devices {row.everyone.mean:.1%}"
        console.print(
            f"{time.monotonic() - started:7.1f} s  {label:12s} round {r.round:3d}/{checked.rounds}  loss {r.loss:.3f}  "
            f"cohort {r.accuracy_before.mean:.1%} -> {r.accuracy_after.mean:.1%}{everyone}"
        )

    results = run_all(checked, bundle, devices, said)
    model = bundle.model()
    records = {
        label: report.simulated(r, make_method({"name": label, **checked.methods[label]}), model)
        for label, r in results.items()
    }
    console.print(report.table(records, f"{checked.data.name}, every device's personal model from the final downlink"))
    if json_file is not None:
        settings = checked.model_dump(mode="json", exclude={"methods"})
        write_json(json_file, {"methods": records, "settings": settings, "machine": report.machine()})
