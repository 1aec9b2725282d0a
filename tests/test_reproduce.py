"""Reproductions: data in a file, each cell run once, interrupted runs resumed, tables and a page from the results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from edge_bench.bundles import REVISIONS
from edge_bench.reproductions import reproduce as command
from edge_bench.reproductions import reproduction, results_page
from edge_bench.reproductions.reproduce import reproduce
from edge_bench.reproductions.reproduction import cells, changed, merged, parse
from edge_bench.reproductions.result_file import summary
from edge_bench.reproductions.stored_runs import known

from edge_client.commands.exit_codes import ExitCode
from edge_client.errors import ConfigError
from edge_client.methods.fedavg import FedAvg

TINY = """
title = "Digits"
reference = "An Author 1999, Table 0"
minutes = 1
seeds = [0, 1]
notes = "A note."
tried = [{ task = "digits", label = "fast", settings = { lr = 0.5 }, score_mean = 0.1 }]
[tasks.digits]
bundle = "digits"
data = { name = "digits", devices = 3, samples = 150 }
rounds = 2
cohort = 2
[tasks.digits.methods]
fast = { epochs = 1 }
[methods.fedavg]
epochs = 1
[methods.fast]
name = "fedavg"
lr = 0.05
[paper.digits]
fast = { score = 12.5, spread = 0.5, says = "3 bits" }
[full.tasks.digits]
rounds = 3
[full.methods.fast]
lr = 0.1
"""


@pytest.fixture(autouse=True)
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The only reproduction is `tiny`, and there are no results."""
    pytest.importorskip("sklearn")
    folder = tmp_path / "reproductions"
    folder.mkdir()
    (folder / "tiny.toml").write_text(TINY)
    monkeypatch.setattr(reproduction, "FOLDER", folder)
    (tmp_path / "results").mkdir()
    monkeypatch.setattr(command, "RESULTS", tmp_path / "results")


# --- the file


def test_full_replaces_values_and_keeps_the_rest() -> None:
    base, full = (reproduction.read("tiny", full=f) for f in (False, True))
    assert (base.tasks["digits"].rounds, full.tasks["digits"].rounds) == (2, 3)
    assert (base.methods["fast"]["lr"], full.methods["fast"]["lr"]) == (0.05, 0.1)
    assert full.tasks["digits"].data == base.tasks["digits"].data
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}, "d": [4]}) == {"a": {"b": 3, "c": 2}, "d": [4]}


def test_cells_are_every_task_method_and_seed_with_the_task_s_own_settings() -> None:
    found = list(cells(reproduction.read("tiny"), (0, 1)))
    assert [c.name for c in found] == ["digits/fedavg/0", "digits/fast/0", "digits/fedavg/1", "digits/fast/1"]
    assert found[1].config.methods == {"fast": {"name": "fedavg", "lr": 0.05, "epochs": 1}}
    assert {c.config.data.evaluate for c in cells(reproduction.read("tiny"), (0,), None, "validation")} == {
        "validation"
    }


def test_cells_score_the_model_of_the_last_downlink_whatever_validation_samples_there_are() -> None:
    own = parse(TINY.replace("samples = 150", "samples = 150, validation = 0.2"), "tiny")
    assert {cell.config.personalise for cell in cells(own, (0,))} == {"global"}


def test_a_cell_with_another_guard_is_another_cell() -> None:
    def first(guard: str) -> str:
        return reproduction.key(
            next(cells(parse(TINY.replace("minutes", f'guard = "{guard}"\nminutes'), "tiny"), (0,)))
        )

    assert len({first(guard) for guard in ("none", "clip", "drop")}) == 3
    assert first("none") == reproduction.key(next(cells(parse(TINY, "tiny"), (0,))))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("minutes = 1", "minutes = 0"), "minutes = 0"),
        (("fast = { score", "slow = { score"), "paper.digits names the methods"),
        (("[paper.digits]", "[paper.letters]"), "not among"),
        (("title", "titel"), "title"),
        (("[methods.fedavg]", "[methods.fedavg"), "not TOML"),
    ],
)
def test_a_wrong_file_is_refused_with_its_setting(change: tuple[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(TINY.replace(*change), "tiny")


def test_a_method_that_is_not_there_is_named_before_anything_runs(tmp_path: Path) -> None:
    (reproduction.FOLDER / "tiny.toml").write_text(TINY.replace('name = "fedavg"', 'name = "alchemy"'))
    with pytest.raises(ConfigError, match=r"'tiny' cannot run digits/fast/0: there is no method 'alchemy'"):
        reproduce("tiny", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="there is no reproduction 'huge'"):
        reproduce("huge")
    with pytest.raises(ConfigError, match="no reproduction 'tine'; did you mean 'tiny'\\? see --list"):
        reproduce("tine")


# --- runs


def test_a_run_writes_cells_a_result_a_table_and_plots_and_a_second_run_does_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    reproduce("tiny", out=out)
    result = json.loads((out / "result.json").read_text())
    assert set(result["runs"]) == {f"digits/{m}/{s}" for m in ("fedavg", "fast") for s in (0, 1)}
    row = result["summary"]["digits/fast"]
    scores = [result["runs"][f"digits/fast/{s}"]["score_mean"] for s in (0, 1)]
    assert row["score_mean"]["mean"] == pytest.approx(sum(scores) / 2, rel=1e-5)
    assert row["score_mean"]["std"] == pytest.approx(abs(scores[0] - scores[1]) / 2**0.5, rel=1e-4)
    run = result["runs"]["digits/fast/0"]
    assert run["bytes_of_all_devices"] == pytest.approx(run["bytes_per_device"] * 3, rel=1e-5)
    assert len(run["rounds"]["loss"]) == 2
    assert result["command"] == "maskfleet reproduce tiny"
    assert result["tried"] == [{"task": "digits", "label": "fast", "settings": {"lr": 0.5}, "score_mean": 0.1}]
    assert {"commit", "machine", "settings"} <= result.keys()
    table = (out / "table.md").read_text()
    assert "| fast | 12.5 ± 0.5; 3 bits | " in table
    assert (out / "digits.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(command, "run_all", lambda *given: pytest.fail("ran a finished cell"))
    reproduce("tiny", out=out)
    assert "4 cells, 0 to run" in capsys.readouterr().out


def test_a_start_that_runs_nothing_leaves_the_files_and_where_the_figures_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    reproduce("tiny", out=out, seeds=1)

    def files() -> dict[str, tuple[bytes, int]]:
        return {f.name: (f.read_bytes(), f.stat().st_mtime_ns) for f in out.iterdir() if f.is_file()}

    before = files()
    assert set(before) == {"result.json", "table.md", "digits.png"}
    monkeypatch.setattr(command.provenance, "commit", lambda: "another")
    monkeypatch.setattr(command.provenance, "machine", lambda: {"cores": 1000})
    (reproduction.FOLDER / "tiny.toml").write_text(TINY.replace("minutes = 1", "minutes = 2"))
    reproduce("tiny", out=out, seeds=1)
    assert files() == before
    (out / "digits.png").unlink()
    reproduce("tiny", out=out, seeds=1)
    assert (out / "digits.png").is_file()
    (reproduction.FOLDER / "tiny.toml").write_text(TINY.replace("score = 12.5", "score = 13.5"))
    reproduce("tiny", out=out, seeds=1)
    old, new = json.loads(before["result.json"][0]), json.loads((out / "result.json").read_text())
    assert new["paper"]["digits"]["fast"]["score"] == 13.5
    assert "| fast | 13.5 ± 0.5; 3 bits |" in (out / "table.md").read_text()
    assert {part for part in old if old[part] != new[part]} == {"paper"}
    reproduce("tiny", out=out, seeds=2)  # cells that this commit and this machine ran
    found = json.loads((out / "result.json").read_text())
    assert (found["commit"], found["machine"]) == ("another", {"cores": 1000})


def test_an_interrupted_run_goes_on_where_it_was_and_changed_settings_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = tmp_path / "out", list[str]()
    real = command.run_cell

    def interrupted(cell: reproduction.Cell, *rest: object) -> dict[str, object]:
        ran.append(cell.name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(cell, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(command, "run_cell", interrupted)
    with pytest.raises(typer.Exit) as stopped:
        reproduce("tiny", out=out)
    assert stopped.value.exit_code == ExitCode.INTERRUPTED
    assert len(known(out)) == 2
    reproduce("tiny", out=out)
    assert ran == ["digits/fedavg/0", "digits/fast/0", "digits/fedavg/1", "digits/fedavg/1", "digits/fast/1"]
    for file in (out / "cells").iterdir():  # as in a fresh checkout, which has the result only
        file.unlink()
    ran.clear()
    (reproduction.FOLDER / "tiny.toml").write_text(TINY.replace("lr = 0.05", "lr = 0.06"))
    reproduce("tiny", out=out, seeds=1)
    assert ran == ["digits/fast/0"]
    rows = json.loads((out / "result.json").read_text())["summary"]
    assert {name: row["seeds"] for name, row in rows.items()} == {"digits/fedavg": [0, 1], "digits/fast": [0]}


KILLED = """
import os, pathlib, signal
from edge_bench.reproductions import reproduce, reproduction
from edge_client import files

def half(path, chunks, mode, write=files._write):
    data = b"".join(chunks)
    write(path, [data[: len(data) // 2]] if path.name.startswith("result.json") else [data], mode)
    if path.name.startswith("result.json"):
        os.kill(os.getpid(), signal.SIGKILL)

files._write = half
reproduction.FOLDER, out = pathlib.Path("reproductions"), pathlib.Path("out")
reproduce.RESULTS = pathlib.Path("results")
reproduce.reproduce("tiny", out=out)
"""


@pytest.mark.parametrize("before", [True, False])
def test_a_start_that_is_killed_while_it_writes_the_result_leaves_none_or_the_old_one(
    before: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    reproduce("tiny", out=out, seeds=1)
    whole = (out / "result.json").read_bytes()
    if not before:
        (out / "result.json").unlink()
    done = subprocess.run([sys.executable, "-c", KILLED], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (out / "result.json").exists() == before
    assert not before or (out / "result.json").read_bytes() == whole
    assert len(known(out)) == 4  # the other seed's cells stand
    reproduce("tiny", out=out)
    after = json.loads((out / "result.json").read_text())
    assert {k: v for k, v in after["runs"].items() if k.endswith("/0")} == json.loads(whole)["runs"]
    assert len(after["runs"]) == 4


def test_a_cell_counts_while_its_method_s_settings_are_the_same_whatever_new_ones_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    reproduce("tiny", out=out, seeds=1, methods="fedavg")
    (file,) = (out / "cells").iterdir()
    old = json.loads(file.read_text())
    del old["settings"]["momentum"]  # as if it had run before there was such a setting
    file.write_text(json.dumps(old))
    monkeypatch.setattr(command, "run_cell", lambda *given: pytest.fail("ran a finished cell"))
    reproduce("tiny", out=out, seeds=1, methods="fedavg")
    old["settings"]["batch"] += 1  # as if the default had been another one
    file.write_text(json.dumps(old))
    ran = list[str]()
    monkeypatch.setattr(command, "run_cell", lambda cell, *given: ran.append(cell.name) or old)
    reproduce("tiny", out=out, seeds=1, methods="fedavg")
    assert ran == ["digits/fedavg/0"]


@pytest.mark.parametrize("of", ["the method", "the bundle"])
def test_cells_of_an_earlier_revision_run_again_and_until_then_are_marked_and_never_averaged_with_newer_ones(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, ran = tmp_path / "out", list[str]()
    reproduce("tiny", out=out)
    for file in (out / "cells").iterdir():  # a checkout has the result alone
        file.unlink()
    assert {(run["revision"], run["bundle_revision"]) for run in known(out).values()} == {(1, 1)}
    if of == "the method":
        monkeypatch.setattr(FedAvg, "revision", 2)
    else:
        monkeypatch.setitem(REVISIONS, "digits", 2)
    real = command.run_cell
    monkeypatch.setattr(command, "run_cell", lambda cell, *given: ran.append(cell.name) or real(cell, *given))
    reproduce("tiny", out=out, seeds=1, methods="fast")
    assert ran == ["digits/fast/0"]
    rows = json.loads((out / "result.json").read_text())["summary"]
    assert {name: row["seeds"] for name, row in rows.items()} == {"digits/fedavg": [0, 1], "digits/fast": [0]}
    table = (out / "table.md").read_text()
    assert "| fedavg (earlier version) |" in table
    assert "| fast (seed 0) |" in table
    reproduce("tiny", out=out)
    assert ran == ["digits/fast/0", "digits/fedavg/0", "digits/fedavg/1", "digits/fast/1"]
    assert "earlier version" not in (out / "table.md").read_text()


def test_a_result_without_revisions_is_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reproduce("tiny", seeds=1, methods="fast", out=tmp_path / "out")
    (run,) = known(tmp_path / "out").values()
    method = reproduction.method_of(next(iter(cells(reproduction.read("tiny"), (0,), {"fast"}))))
    del run["revision"]
    assert reproduction.stands(run, method, "digits")
    assert not reproduction.stands(run, method, "mlp-mnist04")  # its weights are of a later revision
    monkeypatch.setattr(FedAvg, "revision", 2)
    assert not reproduction.stands(run, method, "digits")


def test_a_damaged_cell_is_named_and_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, ran = tmp_path / "out", list[str]()
    reproduce("tiny", out=out, seeds=1)
    (out / "result.json").unlink()
    files = {known(out)[file.stem]["label"]: file for file in (out / "cells").iterdir()}
    whole = json.loads(files["fast"].read_text())
    real = command.run_cell
    monkeypatch.setattr(command, "run_cell", lambda cell, *given: ran.append(cell.label) or real(cell, *given))
    for text, why in ((files["fast"].read_text()[:99], "Unterminated"), ("[]", "a list"), ('{"seed": 0}', "'task'")):
        files["fast"].write_text(text)
        capsys.readouterr()
        reproduce("tiny", out=out, seeds=1)
        said = capsys.readouterr().out
        assert f"warning: {files['fast']} is damaged: " in " ".join(said.split())
        assert why in said
        assert "its cell runs again unless result.json has it" in " ".join(said.split())
        assert json.loads(files["fast"].read_text())["score_mean"] == whole["score_mean"]
        assert ran.pop() == "fast"
        assert not ran
        (out / "result.json").unlink()


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda text: text[: len(text) // 2], "Expecting|Unterminated"),
        (lambda text: "[1]", "a list in place of an object"),
        (lambda text: text.replace('"summary"', '"sum"', 1), "'summary' is absent"),
        (lambda text: text.replace('"cell"', '"sell"', 1), "'cell' is absent"),
    ],
)
def test_a_damaged_result_is_refused_with_what_to_do_before_anything_runs(
    damage: Callable[[str], str], why: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce("tiny", seeds=1, methods="fast")
    file = command.RESULTS / "tiny" / "result.json"
    file.write_text(damage(file.read_text()))
    monkeypatch.setattr(command, "run_all", lambda *given: pytest.fail("ran a cell"))
    with pytest.raises(ConfigError, match=rf"result\.json is damaged: .*({why}).*restore it, or delete it: then only"):
        reproduce("tiny", seeds=1, methods="fast")
    with pytest.raises(ConfigError, match=r"result\.json is damaged"):
        results_page.page(command.RESULTS)
    capsys.readouterr()
    reproduce(show=True)
    assert "result.json is damaged" in capsys.readouterr().out
    file.unlink()
    reproduce("tiny", seeds=1, methods="fast")  # from its cell file


def test_a_setting_of_the_command_stands_before_that_of_a_task() -> None:
    """The task `digits` has `epochs = 1` for `fast`."""
    (cell,) = cells(changed(reproduction.read("tiny"), ["fast.epochs=7"], ["fast"]), (0,), ["fast"])
    assert cell.config.methods["fast"] == {"name": "fedavg", "lr": 0.05, "epochs": 7}
    assert reproduction.read("tiny").tasks["digits"].methods["fast"] == {"epochs": 1}


def test_a_setting_of_a_method_that_does_not_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set 'fedavg\.lr=1': .*; the methods are \['fast'\]"):
        reproduce("tiny", methods="fast", validation=True, changes=["fedavg.lr=1"])


def test_a_folder_that_cannot_be_made_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "run_all", lambda *given, **named: pytest.fail("ran a cell"))
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=rf"--out {out}: {tmp_path}/file is a file; name a folder"):
            reproduce("tiny", out=out, seeds=1, methods="fast")


def test_the_result_of_another_reproduction_or_scale_is_not_overwritten(tmp_path: Path) -> None:
    (reproduction.FOLDER / "other.toml").write_text(TINY)
    out = tmp_path / "out"
    reproduce("tiny", out=out, seeds=1, methods="fast")
    before = (out / "result.json").read_bytes()
    for name, full in (("other", False), ("tiny", True)):
        with pytest.raises(ConfigError, match="holds the reduced result of 'tiny'; choose another --out"):
            reproduce(name, out=out, seeds=1, methods="fast", full=full)
    assert (out / "result.json").read_bytes() == before


def test_only_some_methods_leave_the_others_results(tmp_path: Path) -> None:
    out = tmp_path / "out"
    reproduce("tiny", out=out, seeds=1, methods="fedavg")
    reproduce("tiny", out=out, seeds=1, methods="fast")
    assert set(json.loads((out / "result.json").read_text())["summary"]) == {"digits/fedavg", "digits/fast"}
    with pytest.raises(ConfigError, match="slow"):
        reproduce("tiny", out=out, methods="slow")


def test_cells_that_another_start_runs_meanwhile_are_in_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, run_all = tmp_path / "out", command.run_all

    def while_another_runs(*given: Any, **options: Any) -> Any:
        monkeypatch.setattr(command, "run_all", run_all)
        reproduce("tiny", out=out, seeds=1, methods="fast")
        return run_all(*given, **options)

    monkeypatch.setattr(command, "run_all", while_another_runs)
    reproduce("tiny", out=out, seeds=1, methods="fedavg")
    assert set(json.loads((out / "result.json").read_text())["runs"]) == {"digits/fedavg/0", "digits/fast/0"}


def test_a_cell_that_fails_leaves_the_others_and_is_named_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (reproduction.FOLDER / "tiny.toml").write_text(
        TINY.replace("lr = 0.05", "lr = 1000.0\nepochs = 20").replace("fast = { epochs = 1 }", "")
    )
    with pytest.raises(ConfigError, match=r"digits/fast/0: .*smaller learning rate"):
        reproduce("tiny", out=out, seeds=1)
    assert set(json.loads((out / "result.json").read_text())["summary"]) == {"digits/fedavg"}


def test_what_was_tried_on_the_validation_part_is_kept_beside_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    reproduce("tiny", out=out, seeds=1, methods="fast", validation=True, changes=["fast.lr=0.02"])
    assert "on the validation part" in capsys.readouterr().out
    result = json.loads((out / "result.json").read_text())
    assert result["runs"] == {}
    assert result["tried"][-1]["settings"]["lr"] == 0.02
    with pytest.raises(ConfigError, match="use it with --validation"):
        reproduce("tiny", out=out, changes=["fast.lr=0.02"])
    with pytest.raises(ConfigError, match=r"METHOD\.SETTING=VALUE"):
        reproduce("tiny", out=out, validation=True, changes=["lr"])


def test_the_list_names_every_reproduction_and_whether_it_has_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reproduce(show=True)
    assert "none yet" in capsys.readouterr().out
    reproduce("tiny", seeds=1, methods="fast", validation=True)
    capsys.readouterr()
    reproduce(show=True)
    assert "none yet" in capsys.readouterr().out
    reproduce("tiny", seeds=1, methods="fedavg")
    capsys.readouterr()
    reproduce(show=True)
    said = capsys.readouterr().out
    assert "tiny" in said
    assert "1 seed" in said
    reproduce("tiny", seeds=2, methods="fedavg")
    capsys.readouterr()
    reproduce(show=True)
    assert "2 seeds" in capsys.readouterr().out


def test_a_summary_without_scores_has_bytes_still() -> None:
    run = {"task": "t", "label": "m", "seed": 3, "score_mean": None, "bytes_per_device": 8.0}
    run["rounds"] = {"score_before": [None, None]}
    assert summary([run]) == {
        "t/m": {"task": "t", "label": "m", "seeds": [3], "bytes_per_device": {"mean": 8.0, "std": 0.0}}
    }


def test_the_late_score_is_the_mean_of_the_last_ten_rounds_that_have_one() -> None:
    before = [0.0, 0.9, None, *[0.5] * 8]
    run = {"task": "t", "label": "m", "seed": 0, "rounds": {"score_before": before}}
    assert summary([run])["t/m"]["late_score"]["mean"] == pytest.approx((0.9 + 8 * 0.5) / 9, rel=1e-5)


def test_a_pruned_model_is_measured_beside_the_whole_network(tmp_path: Path) -> None:
    pruned = "[methods.lattice]\nprune = 0.25\nprune_after = 1\n[paper.digits]"
    text = TINY.replace("minutes = 1", "minutes = 1\nsmall = true").replace("[paper.digits]", pruned)
    (reproduction.FOLDER / "tiny.toml").write_text(text)
    reproduce("tiny", seeds=1, out=tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["summary"]
    assert "step_ms_small" not in rows["digits/fedavg"]
    row = {name: f["mean"] for name, f in rows["digits/lattice"].items() if isinstance(f, dict)}
    # digits is 64-64-32-10: a quarter of 64 and of 32 units stays
    assert (row["multiply_adds_whole"], row["multiply_adds_small"]) == (64 * 64 + 64 * 32 + 320, 64 * 16 + 16 * 8 + 80)
    assert row["parameters_small"] == row["multiply_adds_small"] + 16 + 8 + 10
    assert all(row[f"{what}_ms_{which}"] > 0 for what in ("inference", "step") for which in ("whole", "small"))
    assert "| lattice | 6,570 -> 1,266 (0.19) | 6,464 -> 1,232 (0.19) |" in (tmp_path / "out" / "table.md").read_text()


def test_a_method_that_ends_below_the_bundle_s_own_score_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = command.run_cell
    monkeypatch.setattr(command, "run_cell", lambda *given: {**real(*given), "score_start": 0.99})
    reproduce("tiny", seeds=1, methods="fast", out=tmp_path / "out")
    said = " ".join(capsys.readouterr().out.split())
    assert "fast ends at" in said
    assert "below the bundle's own start (0.990)" in said
    table = (tmp_path / "out" / "table.md").read_text()
    assert "The bundle's own weights score 99.0; below that end `fast`." in table


# --- the page


def test_the_page_has_each_result_and_names_what_was_not_run(tmp_path: Path) -> None:
    assert "## Not run yet\n\n* `tiny`: Digits" in results_page.page(tmp_path / "results")
    reproduce("tiny", seeds=1)
    page = results_page.page(tmp_path / "results")
    assert "Not run yet" not in page
    assert "## tiny: Digits" in page
    assert "![tiny, digits](../benchmarks/results/tiny/digits.png)" in page
    assert "A note." in page
    (tmp_path / "reproductions" / "tiny.toml").write_text(TINY.replace("A note.", "A newer note."))
    assert "A newer note." in results_page.page(tmp_path / "results")
    table = (tmp_path / "results" / "tiny" / "table.md").read_text()
    assert table.rstrip() in page
    fedavg = next(line for line in table.splitlines() if line.startswith("| fedavg |"))
    assert "| 1x |" in fedavg


def test_a_table_says_which_methods_were_not_run_and_which_have_other_seeds(tmp_path: Path) -> None:
    reproduce("tiny", seeds=2, methods="fedavg")
    assert "| fast | 12.5 ± 0.5; 3 bits | not run |" in (tmp_path / "results" / "tiny" / "table.md").read_text()
    reproduce("tiny", seeds=1, methods="fast")
    table = (tmp_path / "results" / "tiny" / "table.md").read_text()
    assert "| fast (seed 0) |" in table
    assert "| fedavg |" in table


def test_the_page_says_which_methods_settings_were_compared_and_how_many(tmp_path: Path) -> None:
    plain = TINY.replace(next(line for line in TINY.splitlines() if line.startswith("tried")), "")
    (tmp_path / "reproductions" / "tiny.toml").write_text(plain)
    for lr, compared in ((0.02, False), (0.03, True)):
        reproduce("tiny", seeds=1, methods="fast", validation=True, changes=[f"fast.lr={lr}"])
        page = results_page.page(tmp_path / "results")
        assert ("Settings compared on the validation part, listed in the file: `fast` 2." in page) == compared
        assert "compared on the validation part" not in page or compared
        assert "not run yet: digits" in page
        assert "digits.png" not in page
