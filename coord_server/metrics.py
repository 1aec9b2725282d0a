"""What this process counts and times, and what stands at the moment, in Prometheus' form.

Counters and histograms are of this process, gauges of the whole data folder. A label's values are bounded: routes by
their templates, problems by their table, federations by LABELLED.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from edge_client.protocol.messages import Federation

LABELLED = 100  # federations that have figures of their own: the oldest that are not over
OVER = ("finished", "stopped")
_MINUTES = (1, 5, 15, 60, 300, 900, 3600, 14400, 86400)
_SYNCS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10)

REGISTRY = CollectorRegistry()
REQUESTS = Counter("maskfleet_requests", "Answered requests.", ["method", "route", "status"], registry=REGISTRY)
ACCEPTED = Counter("maskfleet_updates_accepted", "Updates that became durable here.", registry=REGISTRY)
REFUSED = Counter("maskfleet_updates_refused", "Updates that were refused here.", ["problem"], registry=REGISTRY)
BYTES = Counter("maskfleet_bytes", "Bodies of devices' messages.", ["direction", "kind"], registry=REGISTRY)
ROUND = Histogram("maskfleet_round_seconds", "From a round's first attempt to its record, of rounds folded here.",
                  buckets=_MINUTES, registry=REGISTRY)  # fmt: skip
COMMIT = Histogram("maskfleet_commit_seconds", "A transaction that changes a federation.", buckets=_SYNCS,
                   registry=REGISTRY)  # fmt: skip


class _Standing(Collector):
    """The gauges: read when they are asked for."""

    def __init__(self, federations: Callable[[], list[tuple[Federation, int]]]) -> None:
        self._federations = federations

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Each gauge with its values."""
        found = self._federations()
        phases = GaugeMetricFamily("maskfleet_federations", "Federations by phase.", labels=["phase"])
        for phase, n in Count(f.phase or "not loaded" for f, _ in found).items():
            phases.add_metric([phase], n)
        yield phases
        going = [(f, present) for f, present in found if f.phase not in OVER and f.config is not None]
        yield GaugeMetricFamily(
            "maskfleet_federations_unlabelled", "Federations without figures of their own.",
            max(len(going) - LABELLED, 0),
        )  # fmt: skip
        of_each: dict[str, tuple[str, Callable[[Federation, int], float]]] = {
            "round": ("The round under way.", lambda f, _: f.round),
            "devices": ("Devices that have asked for work.", lambda f, _: f.devices),
            "devices_present": (
                "Devices that made a request lately, as this process knows.",
                lambda _, present: present,
            ),
            "updates": ("Updates of the round under way.", lambda f, _: f.updates),
            "faulty": ("1 when something keeps it from going on.", lambda f, _: int(f.fault is not None)),
        }
        for name, (text, value) in of_each.items():
            gauge = GaugeMetricFamily(f"maskfleet_federation_{name}", text, labels=["federation"])
            for f, present in going[:LABELLED]:
                gauge.add_metric([f.id], value(f, present))
            yield gauge


def text(federations: Callable[[], list[tuple[Federation, int]]]) -> bytes:
    """Everything in Prometheus' text format; `federations` gives each with the number of devices present."""
    standing = CollectorRegistry()
    standing.register(_Standing(federations))
    return generate_latest(REGISTRY) + generate_latest(standing)
