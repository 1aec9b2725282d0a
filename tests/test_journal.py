"""The journal: an identity made once, updates that survive any instant, damaged files recognised."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.commands.exit_codes import ExitCode, exit_code
from edge_client.device.journal import Journal, Pending
from edge_client.errors import ConfigError, LostError, StateError
from edge_client.files import write_whole
from edge_client.protocol.messages import Enrolled


def test_two_clients_on_one_state_folder_are_refused(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(StateError, match="another maskfleet client"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_the_device_name_and_credential_are_made_once_and_are_private(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        first = journal.identity("token", None)
    with Journal(tmp_path) as journal:
        assert journal.identity("token", None) == first
    assert "token" not in (tmp_path / "device.json").read_text().replace('"token"', "")
    assert (tmp_path / "device.json").stat().st_mode & 0o077 == 0
    Enrolled(federation="f", device=first.device, bundle="0" * 64, method={}, rounds=1, cohort=1, seed=0)


def test_the_secret_is_drawn_once_unless_it_is_given(tmp_path: Path) -> None:
    secrets = set()
    for name in ("a", "b"):
        with Journal(tmp_path / name) as journal:
            secrets.add(journal.identity("token", None).secret)
            assert journal.identity("token", None).secret in secrets
    assert len(secrets) == 2
    with Journal(tmp_path / "c") as journal:
        assert journal.identity("token", None, secret=7).secret == 7
        assert journal.identity("token", None).secret == 7
    assert all(0 <= s < 2**64 for s in secrets)


def test_a_state_folder_of_another_enrolment_is_refused_with_its_name(tmp_path: Path) -> None:
    enrolled = Enrolled(federation="f1", device="dev", bundle="0" * 64, method={}, rounds=1, cohort=1, seed=0)
    with Journal(tmp_path) as journal:
        mine = journal.identity("token", "dev")
        # Before the enrolment the name, the token and the secret may still change.
        assert journal.identity("newer", "dev2").credential == mine.credential
        journal.store_identity(journal.identity("token", "dev").model_copy(update={"enrolled": enrolled}))
        with pytest.raises(ConfigError, match="'f1'"):
            journal.identity("other", None)
        with pytest.raises(ConfigError, match="'dev'"):
            journal.identity("token", "dev3")
        with pytest.raises(ConfigError, match="another secret"):
            journal.identity("token", "dev", secret=mine.secret ^ 1)


@given(cut=st.integers(0, 400), flip=st.integers(0, 399), byte=st.integers(1, 255))
@settings(max_examples=60, deadline=None)
def test_a_decayed_pending_update_is_trained_again_never_sent(
    tmp_path_factory: pytest.TempPathFactory, cut: int, flip: int, byte: int
) -> None:
    with Journal(tmp_path_factory.mktemp("state")) as journal:
        update = Pending(1, "lease", "0" * 64, bytes(200))
        journal.trained({"a": np.ones(3, np.float32)}, update)
        assert journal.pending() == update
        path = journal.folder / "pending-0000001"
        data = bytearray(path.read_bytes())
        data[flip % len(data)] ^= byte
        path.write_bytes(bytes(data))
        found = journal.pending()
        assert found is None or found.update == update.update
        path.write_bytes(bytes(data)[: cut % len(data)])
        assert journal.pending() is None


def test_what_is_kept_counts_only_once_its_update_is_acknowledged(tmp_path: Path) -> None:
    def update(round_: int) -> Pending:
        return Pending(round_, "lease", "0" * 64, b"update")

    with Journal(tmp_path) as journal:
        journal.trained({"a": np.array([1])}, update(1))
        assert journal.kept(before=2) == {}
        journal.acknowledge(1)
        assert journal.kept(before=2)["a"].tolist() == [1]
        journal.trained({"a": np.array([2])}, update(2))
        journal.drop_pending()
        journal.trained({"a": np.array([3])}, update(3))
        journal.acknowledge(3)
        assert journal.kept(before=3)["a"].tolist() == [1]
        assert journal.kept(before=9)["a"].tolist() == [3]
        assert journal.pending() is None


def test_two_rounds_are_kept_and_nothing_else_is_left(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for r in range(1, 6):
            journal.trained({"a": np.array([r])}, Pending(r, "lease", "0" * 64, bytes([r]) * (100 - r)))
            found = journal.pending()
            assert found is not None
            assert (found.round, found.update) == (r, bytes([r]) * (100 - r))
            journal.acknowledge(r)
        assert journal.kept(before=5)["a"].tolist() == [4]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["kept-0000004", "kept-0000005", "lock"]
        (tmp_path / "kept-0000005").rename(tmp_path / "pending-0000006")
        assert journal.pending() is None  # its header names another round
        (tmp_path / "pending-0000007.new").write_bytes(b"torn")
    with Journal(tmp_path) as journal:
        assert not (tmp_path / "pending-0000007.new").exists()


def test_rounds_that_a_restored_coordinator_runs_again_count_before_those_that_it_has_lost(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        for r, value in ((48, 0), (49, 0), (3, 3), (4, 4), (5, 5)):
            journal.trained({"a": np.array([value])}, Pending(r, "lease", "0" * 64, b"update"))
            journal.acknowledge(r)
            assert journal.kept(before=r + 1)["a"].tolist() == [value]
        assert journal.kept(before=5)["a"].tolist() == [4]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["kept-0000004", "kept-0000005", "lock"]


def test_a_damaged_file_of_what_was_kept_is_taken_for_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Journal(tmp_path) as journal:
        for r in (1, 2):
            journal.trained({"a": np.array([r])}, Pending(r, "lease", "0" * 64, b"update"))
            journal.acknowledge(r)
        (tmp_path / "kept-\u00b2").touch()  # a digit to Python, no number of a round
        assert journal.kept(before=3)["a"].tolist() == [2]
        for r in (2, 1):
            path = tmp_path / f"kept-{r:07d}"
            whole = path.read_bytes()
            path.write_bytes(whole.replace(b"\x02" if r == 2 else b"\x01", b"\x07"))
            if r == 2:
                assert journal.kept(before=3)["a"].tolist() == [1]
                assert "kept-0000002 is damaged" in caplog.text
        with pytest.raises(LostError, match="is damaged"):
            journal.kept(before=3)
        assert journal.kept(before=3) == {}  # reported once, then the device goes on like a new one


def test_a_folder_in_place_of_a_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in (Path(), tmp_path, Path("/")):
        with pytest.raises(StateError, match=f"cannot use {folder}: .*; another"):
            write_whole(folder, b"x", elsewhere="another")
    assert not any(tmp_path.iterdir())


def test_a_link_and_a_pipe_stay_what_they_are(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    os.mkfifo(pipe)
    write_whole(link, b"one")
    assert link.is_symlink()
    assert target.read_bytes() == b"one"
    with pytest.raises(StateError, match="pipe: it is no ordinary file; another"):
        write_whole(pipe, b"two", elsewhere="another")
    assert pipe.is_fifo()


def test_a_link_that_leads_to_itself_is_replaced(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    write_whole(link, b"one")
    assert link.read_bytes() == b"one"


def test_a_full_disk_is_a_sentence_and_loses_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE makes the kernel refuse the write, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Journal(tmp_path) as journal:
        journal.trained({"a": np.array([1])}, Pending(1, "lease", "0" * 64, b"small"))
        journal.acknowledge(1)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
            with pytest.raises(StateError, match="free some space") as full:
                journal.trained({}, Pending(2, "lease", "0" * 64, bytes(100_000)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert exit_code(full.value) == ExitCode.STATE
        pending = journal.pending()
        assert pending is None  # trained again: from the same values to the same bytes
        assert [p.name for p in tmp_path.iterdir() if p.name != "lock"] == ["kept-0000001"]
        assert journal.kept(before=2)["a"].tolist() == [1]


def test_what_was_kept_is_read_once_and_not_copied(tmp_path: Path) -> None:
    size = 1_000_000
    with Journal(tmp_path) as journal:
        journal.trained({"w": np.ones(size, np.uint8)}, Pending(1, "lease", "0" * 64, bytes(size)))
        journal.acknowledge(1)
        tracemalloc.start()
        try:
            journal.kept(before=2)
            assert tracemalloc.get_traced_memory()[1] < 2.1 * size
        finally:
            tracemalloc.stop()


def test_a_damaged_length_of_what_was_kept_takes_no_memory(tmp_path: Path) -> None:
    with Journal(tmp_path) as journal:
        journal.trained({"w": np.ones(10, np.uint8)}, Pending(1, "lease", "0" * 64, b"update"))
        path = tmp_path / "pending-0000001"
        head, _, rest = path.read_bytes().partition(b"\n")
        path.write_bytes(head.replace(b'"kept":', b'"kept":9000000000000000') + b"\n" + rest)
        assert journal.pending() is None
