"""The command that compares a simulation with the real federation, and its message when they differ."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from edge_bench.federation import over_http
from edge_bench.federation.over_http import Outcome, differences
from typer import Exit

from edge_client.errors import ConfigError
from edge_client.protocol.messages import Round, Scores

pytest.importorskip("sklearn")
CONFIG = """
bundle = "digits"
rounds = 9
cohort = 2
[data]
name = "digits"
devices = 2
samples = 200
[methods.ours]
name = "coupled"
head = "mask"
theta0 = 0.5
[methods.fedpm]
head = "mask"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(CONFIG)
    return file


def test_the_command_writes_the_outcome_of_both_sides(
    tmp_path: Path, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    over_http.main(config, method="ours", rounds=2, bundle=None, json_file=out)
    written = json.loads(out.read_text())
    assert written["settings"]["rounds"] == 2
    assert set(written["methods"]) == {"ours"}
    record = written["methods"]["ours"]
    assert (record["differences"], record["client_processes"], record["rounds"]) == ([], 2, 2)
    for kind in ("state_sha256", "models_sha256", "payload_bytes", "score_mean"):
        assert record[kind]["simulator"] == record[kind]["http"]
    said = capsys.readouterr().out
    assert said.count(record["state_sha256"]["http"]) == 2
    assert "the same, bit for bit" in said


def test_a_difference_is_named_and_ends_the_command_with_code_1(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = {"simulator": "aa", "http": "bb"}
    record = {
        "differences": ["state", "models"], "rounds": 1, "client_processes": 2, "state_sha256": both,
        "models_sha256": both, "payload_bytes": {side: {"up": 1, "down": 2} for side in both},
        "score_mean": dict.fromkeys(both, 0.5), "seconds": dict.fromkeys(both, 1.0),
    }  # fmt: skip
    monkeypatch.setattr(over_http, "fleet", lambda *given: nullcontext())
    monkeypatch.setattr(over_http, "compare", lambda *given: record)
    with pytest.raises(Exit) as ended:
        over_http.main(config, method="fedpm", rounds=1, bundle=None, json_file=None)
    assert ended.value.exit_code == 1
    assert "DIFFERENT: state, models\n" in capsys.readouterr().out


def test_a_method_that_is_not_there_is_refused_before_anything_runs(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no method 'our'; known are .*did you mean 'ours'"):
        over_http.main(config, method="our", rounds=None, bundle=None, json_file=None)


def test_outcomes_differ_in_what_is_not_equal_and_payload_bytes_count_what_is_sent_once() -> None:
    same = Scores(mean=0.5, worst=0.5, p10=0.5, best=0.5)
    traffic = {"up": {"mask": 7, "header": 2}, "down": {"theta": 40}, "one_time_up": {"head": 5}}
    traffic |= {"one_time_down": {"head": 3}, "last_down": {"theta": 40}}
    figures: dict[str, object] = dict.fromkeys(
        ("bits_per_parameter_up", "bits_per_parameter_down", "loss", "seconds"), 0.0
    )
    scores = "score_before", "score_after"
    record = Round.model_validate(
        {"round": 1, "devices": ["a"], "traffic": traffic, **figures, **dict.fromkeys(scores)}
    )
    one = Outcome("s", {"a": "m"}, [record] * 2, same)
    assert one.payload_bytes() == {"up": 28, "down": 166}
    assert differences(one, replace(one)) == []
    changed = replace(one, models={"a": "n"}, scores=same.model_copy(update={"worst": 0.4}))
    assert differences(one, changed) == ["models", "scores"]


UNEVEN = """
bundle = "digits"
rounds = 2
cohort = 3
personalise = "global"
[data]
name = "digits"
devices = 3
samples = 300
split = "dirichlet"
alpha = 0.2
validation = 0.2
[methods.fedavg]
lr = 0.1
"""


def test_both_sides_have_the_guard_and_the_choice_of_model_that_the_file_names(tmp_path: Path) -> None:
    """A federation's own defaults would limit the large device's update here, and keep models by their scores."""
    (tmp_path / "run.toml").write_text(UNEVEN)
    over_http.main(tmp_path / "run.toml", method=None, rounds=None, bundle=None, json_file=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["methods"]["fedavg"]["differences"] == []
