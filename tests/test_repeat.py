"""Several seeds of a simulation in one file: what a second start runs again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from edge_bench.reproductions import repeat

from edge_client.errors import ConfigError
from edge_client.methods.standalone import Standalone

pytest.importorskip("sklearn")
CONFIG = """
bundle = "digits"
rounds = {rounds}
cohort = 2
{more}
[data]
name = "digits"
devices = 2
samples = 100
[methods.fedavg]
lr = {lr}
[methods.standalone]
"""


def played(folder: Path, seeds: str, lr: float = 0.1, rounds: int = 2, more: str = "") -> dict[str, object]:
    (folder / "run.toml").write_text(CONFIG.format(lr=lr, rounds=rounds, more=more))
    repeat.main(folder / "run.toml", out=folder / "out.json", seeds=seeds, only=None, bundle=None)
    found: dict[str, object] = json.loads((folder / "out.json").read_text())
    return found


def test_a_second_start_runs_what_is_missing_or_has_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(played(tmp_path, "0")["runs"]) == {"fedavg/0", "standalone/0"}  # type: ignore[call-overload]
    capsys.readouterr()
    played(tmp_path, "0,1")
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["fedavg/1", "standalone/1"]
    found = played(tmp_path, "0,1", lr=0.2)
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["fedavg/0", "fedavg/1"]
    assert {run["settings"]["lr"] for name, run in found["runs"].items() if "fedavg" in name} == {0.2}  # type: ignore[attr-defined]
    found = played(tmp_path, "0", rounds=3)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert set(found["runs"]) == {"fedavg/0", "standalone/0"}  # type: ignore[call-overload]
    played(tmp_path, "0", rounds=3, more='personalise = "global"')
    assert len(capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(Standalone, "revision", 99)
    played(tmp_path, "0", rounds=3, more='personalise = "global"')
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == ["standalone/0"]


def test_the_summary_has_the_mean_of_the_seeds(tmp_path: Path) -> None:
    found = played(tmp_path, "0,1")
    runs, summary = found["runs"], found["summary"]["fedavg"]  # type: ignore[index]
    scores = [runs[f"fedavg/{seed}"]["score_mean"] for seed in (0, 1)]  # type: ignore[index]
    assert summary["score"] == scores
    assert summary["score_mean"] == pytest.approx(sum(scores) / 2)
    last = [runs[f"fedavg/{seed}"]["rounds"][-1]["bits_per_parameter_up"] for seed in (0, 1)]  # type: ignore[index]
    assert summary["last_round_bits_up"] == pytest.approx(sum(last) / 2)


@pytest.mark.parametrize("content", ["{", "[]", '{"runs": 3}', '{"runs": {"a/0": 3}, "summary": {}, "settings": {}}'])
def test_a_file_that_is_not_this_commands_is_refused_before_anything_runs(content: str, tmp_path: Path) -> None:
    (tmp_path / "out.json").write_text(content)
    with pytest.raises(ConfigError, match="not a file of this command"):
        played(tmp_path, "0")
    assert (tmp_path / "out.json").read_text() == content


@pytest.mark.parametrize("seeds", ["a", "0,0", "1.5", ""])
def test_seeds_that_are_no_numbers_or_named_twice_are_refused(seeds: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--seeds '.*': .*with commas between"):
        played(tmp_path, seeds)
