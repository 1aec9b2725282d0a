"""All methods of a simulation's file, one after the other, on the same devices, cohorts and seed."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from coord_server import aggregation
from edge_bench.simulation.file import SimulationConfig
from edge_bench.simulation.simulate import RoundRow, Simulated, run
from edge_client.authored import described, place_of
from edge_client.bundle import Bundle
from edge_client.data import DeviceData
from edge_client.errors import ConfigError, MaskfleetError
from edge_client.methods import Method
from edge_client.protocol.messages import Scores
from edge_client.task import Assignment, Course, Task
from edge_client.training import Trainer, open_trainer


class InterruptedRun(MaskfleetError):
    """Ctrl-C ended a simulation in the middle of a method."""


def run_all(
    config: SimulationConfig,
    bundle: Bundle,
    devices: Mapping[str, DeviceData],
    progress: Callable[[str, RoundRow], None] = lambda label, row: None,
    failed: Callable[[str, MaskfleetError], None] | None = None,
    models: bool = True,
    warn: Callable[[list[str]], None] = lambda sentences: None,
) -> dict[str, Simulated]:
    """Run every method of a simulation on the same devices, cohorts and seed; results by label.

    `warn` is called with the methods' warnings on their settings. With `failed`, an error of one method is given to
    it and the other methods still run; without, it is raised. Ctrl-C then counts as an error of the method under way,
    and ends the rest, if another one has ended.
    """
    methods = {label: config.method(label) for label in config.methods}
    trainer = open_trainer(config.backend, bundle)
    course = Course(bundle.model(), config.seed, config.rounds, config.cohort)
    warn([f"{label}: {said}" for label, method in methods.items() if (said := _caution(method, course))])
    address = bundle.sha256
    results = {}
    for label, method in methods.items():
        federation = config.federation(label, len(devices), address)
        shown, often = partial(progress, label), config.evaluate_every
        try:
            results[label] = run(
                federation, method, bundle, trainer, devices, often, config.final_epochs, shown,
                processes=config.processes, models=models,
            )  # fmt: skip
        except KeyboardInterrupt:
            if failed is None or not results:
                raise
            failed(label, InterruptedRun("stopped before its end; the methods before it are complete"))
            break
        except Exception as error:
            if failed is None:
                raise
            failed(label, error if isinstance(error, MaskfleetError) else _blamed(method, error))
    start = starting_scores(bundle, trainer, devices) if results else None
    return {label: replace(result, start=start) for label, result in results.items()}


def _caution(method: Method, course: Course) -> str | None:
    """The method's warning before round 1; None where it refuses the model, which its run then reports."""
    try:
        return method.caution(course)
    except ConfigError:
        return None


def _blamed(method: Method, error: Exception) -> MaskfleetError:
    """The error of a method whose code raised something that is none of the project's own errors."""
    if os.environ.get("MASKFLEET_DEBUG"):
        traceback.print_exception(error)
    package = type(method).__module__
    where = place_of(error) or ("maskfleet itself" if package.startswith("edge_client.") else package)
    return ConfigError(f"failed in {where}: {described(error)}; MASKFLEET_DEBUG=1 shows the traceback")


def starting_scores(bundle: Bundle, trainer: Trainer, devices: Mapping[str, DeviceData]) -> Scores | None:
    """What the bundle's own values score on every device's test samples; None when no device has any."""
    course = Course(bundle.model(), seed=0, rounds=1, cohort=1)
    tasks = [Task(Assignment(course, 1, name), trainer, data, 0) for name, data in devices.items()]
    return aggregation.scores([t.score_start() for t in tasks], [len(t.data.y_test) for t in tasks])
