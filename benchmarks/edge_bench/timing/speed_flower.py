"""Flower's simulator on a case of `speed`: its FedAvg strategy, Ray backend, one processor a client."""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from edge_bench.timing.speed_case import Case, train


def flower_seconds(case: Case) -> float:
    """Seconds of the rounds after the first."""
    client, server, stamps = ClientApp(), ServerApp(), list[float]()

    @client.train()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
    def fit(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        net = case.network()
        net.load_state_dict(message.content["arrays"].to_torch_state_dict())
        train(net, case, int(context.node_config["partition-id"]), int(message.content["config"]["server-round"]))
        metrics = MetricRecord({"num-examples": case.samples})
        content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
        return Message(content=content, reply_to=message)

    class Timed(FedAvg):  # type: ignore[misc]
        def aggregate_train(self, *given: Any) -> Any:
            replies = list(given[1])
            failed = [m for m in replies if m.has_error()]
            if failed or len(replies) != case.cohort:
                raise RuntimeError(f"{len(replies)} of {case.cohort} clients answered, {len(failed)} failed")
            result = super().aggregate_train(given[0], replies)
            stamps.append(time.perf_counter())
            return result

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(
            fraction_train=case.cohort / case.devices, fraction_evaluate=0.0, min_train_nodes=case.cohort,
            min_available_nodes=case.devices,
        )  # fmt: skip
        arrays = ArrayRecord(case.network().state_dict())
        strategy.start(grid=grid, initial_arrays=arrays, num_rounds=case.rounds)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=case.devices, backend_config=resources)
    if len(stamps) != case.rounds:
        raise RuntimeError(f"Flower ended after {len(stamps)} of {case.rounds} rounds")
    return stamps[-1] - stamps[0]
