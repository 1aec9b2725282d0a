"""The only writer of a federation: group commit, two writers over one database, commits that fail in every way."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import databases
import pytest
from coordination import settings

from coord_server import engine
from coord_server.events import (
    Acknowledge,
    Aggregate,
    Aggregated,
    Decision,
    Failed,
    OpenRound,
    Paused,
    Present,
    Removed,
    Resumed,
    Updated,
)
from coord_server.live import commits as live_commits
from coord_server.live.commits import Commits, Followers
from coord_server.live.status import Faults
from coord_server.problems import Refusal
from coord_server.store.metadata import Metadata
from coord_server.store.rows import Rows
from coord_server.store.tables import Head
from coord_server.store.values import Content
from edge_client.errors import StateError, StorageDamagedError, StorageFullError, StorageUnreachableError
from edge_client.methods import Influence
from edge_client.protocol.messages import FederationConfig

pytestmark = pytest.mark.usefixtures("each_database")

LIMIT = 600.0  # seconds until a wait is a failure
NAMES = ("a", "b", "c")


def config(**more: Any) -> FederationConfig:
    return FederationConfig.model_validate(settings(bundle="0" * 64, cohort=3, min_devices=3, min_updates=3, **more))


class Process:
    """The commits of one coordinator, and what followed from them."""

    def __init__(self, metadata: Metadata, c: FederationConfig, clock: Callable[[], float] = lambda: 1.0) -> None:
        self.metadata, self.config, self.faults = metadata, c, Faults()
        self.decided: list[Decision] = []
        self.committed: list[engine.State] = []
        self.heads: list[Head] = []
        followers = Followers(self.present, self.committed.append, self.decided.extend, self.heads.append)
        self.commits = Commits(metadata, "fed", c, metadata.head("fed"), followers, self.faults, clock)

    async def present(self, now: float) -> Present:
        return Present(now, NAMES, len(NAMES))

    async def update(self, device: str, sha256: str = "5" * 64, round_: int = 1) -> tuple[Decision, ...]:
        event = Updated(1.0, round_, device, engine.lease(self.config, engine.State(round=round_), device), sha256)
        return await self.commits.submit(event, add(device, sha256, round_))

    async def open(self) -> None:
        await self.commits.submit(Present(1.0, NAMES, len(NAMES)))


def add(device: str, sha256: str = "5" * 64, round_: int = 1) -> Callable[[Rows], None]:
    return lambda rows: rows.add_update(round_, device, Content(sha256, b"u"), 1, 1.0, Influence(0.5, 2.0))


def database(folder: Path, c: FederationConfig) -> Metadata:
    found = Metadata(databases.url_of(folder) or f"sqlite:///{folder / 'x.db'}")
    values = Content("0" * 64, b"g")
    found.add_bundle(c.bundle, 1.0)
    if found.add_federation("fed", c.model_dump_json(), c.bundle, engine.dump(engine.State()), values, 1.0) == "added":
        found.add_token("t" * 64, "fed", 9, 100.0)
        for name in NAMES:
            found.enrol("fed", name, name * 64, "t" * 64, 1.0, valid=True)
    return found


def play(folder: Path, script: Callable[..., Any], processes: int = 1, **more: Any) -> Any:
    """Run a script over processes that share a database, each with connections of its own."""
    c = config(**more)

    async def main() -> Any:
        shared = [Process(database(folder, c), c) for _ in range(processes)]
        try:
            return await script(*shared)
        finally:
            for process in shared:
                await process.commits.close()
                process.metadata.close()

    return asyncio.run(main())


def test_an_event_is_written_before_its_decisions_are_given(tmp_path: Path) -> None:
    async def script(p: Process) -> None:
        await p.open()
        assert await p.update("a") == (Acknowledge(1, "a", "5" * 64, False),)
        head = p.metadata.head("fed")
        assert (head.version, engine.load(head.state)) == (2, p.commits.state)
        assert p.metadata.acknowledged("fed", 1, "a") == ("5" * 64, 1)
        assert p.metadata.influences("fed", 1) == {"a": Influence(0.5, 2.0)}
        assert [type(d) for d in p.decided] == [OpenRound, Acknowledge]

    play(tmp_path, script)


def test_what_waits_together_is_one_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(p: Process) -> None:
        await p.open()
        sizes: list[int] = []
        commit = Metadata.commit

        def counted(self: Metadata, *given: Any) -> bool:
            sizes.append(len(given[-1]))
            return commit(self, *given)

        monkeypatch.setattr(Metadata, "commit", counted)
        answers = await asyncio.gather(*(p.update(name) for name in NAMES))
        assert sum(sizes) == 3
        assert len(sizes) == 1
        assert [type(a[0]) for a in answers] == [Acknowledge] * 3
        assert p.decided[-1] == Aggregate(1, 1, NAMES)
        assert p.commits.version == 2

    play(tmp_path, script)


def test_an_event_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    async def script(p: Process) -> None:
        await p.open()
        await p.update("a")
        before = p.metadata.head("fed")
        assert await p.update("a") == (Acknowledge(1, "a", "5" * 64, True),)
        with pytest.raises(Refusal) as refused:
            await p.update("a", "6" * 64)
        assert refused.value.kind == "conflicting-update"
        await p.commits.submit(Present(2.0, NAMES, len(NAMES)))
        assert p.metadata.head("fed") == before

    play(tmp_path, script)


def test_a_refused_event_does_not_disturb_those_that_wait_with_it(tmp_path: Path) -> None:
    async def script(p: Process) -> None:
        await p.open()
        foreign = Updated(1.0, 7, "b", "0" * 16, "5" * 64)
        first, second, third = await asyncio.gather(
            p.update("a"), p.commits.submit(foreign, add("b", round_=7)), p.update("c"), return_exceptions=True
        )
        assert isinstance(second, Refusal)
        assert [type(d) for d in (first[0], third[0])] == [Acknowledge] * 2  # type: ignore[index]
        assert set(p.metadata.influences("fed", 1)) == {"a", "c"}

    play(tmp_path, script)


def test_no_cohort_is_drawn_in_the_transaction_that_removes_a_device(tmp_path: Path) -> None:
    async def script(p: Process) -> None:
        await p.open()
        await asyncio.gather(p.update("a"), p.update("b"))
        failed = Failed(1.0, 1, "c", engine.lease(p.config, engine.State(round=1), "c"), "lost", "disk")
        await asyncio.gather(p.commits.submit(Removed(1.0, "z")), p.commits.submit(failed))
        assert (p.commits.state.stage, p.commits.state.cohort) == ("drawing", ())
        await p.commits.submit(await p.present(2.0))
        assert p.commits.state.stage == "collecting"

    play(tmp_path, script)


def test_a_cohort_is_drawn_in_the_transaction_that_asks_for_it(tmp_path: Path) -> None:
    async def script(p: Process) -> None:
        await p.open()
        await asyncio.gather(*(p.update(name) for name in NAMES))
        closed = (1, "{}", Content("1" * 64, b"h"), {"a": Content("2" * 64, b"r")})
        await p.commits.submit(Aggregated(2.0, 1, 1), lambda rows: rows.close_round(*closed))
        state = engine.load(p.metadata.head("fed").state)
        assert (state.round, state.stage, state.cohort) == (2, "collecting", NAMES)
        assert p.metadata.values("fed") == (1, Content("1" * 64, b"h"))
        assert p.metadata.update_content("fed", 1, "a") == Content("5" * 64, None)
        assert p.metadata.record("fed", "a") == (1, Content("2" * 64, b"r"))

    play(tmp_path, script)


def test_two_processes_take_updates_in_turn_and_each_is_counted_once(tmp_path: Path) -> None:
    async def script(p: Process, q: Process) -> None:
        await p.open()
        await q.update("a")  # q still stands at version 0
        assert q.commits.version == 2
        assert await p.update("a") == (Acknowledge(1, "a", "5" * 64, True),)
        assert [type(d) for d in await p.update("b")] == [Acknowledge]
        assert [type(d) for d in await q.update("c")] == [Acknowledge, Aggregate]
        assert await p.commits.refresh()
        assert p.commits.state == q.commits.state
        assert p.heads[-1].version == q.commits.version
        assert not await p.commits.refresh()

    play(tmp_path, script, 2)


def test_a_refusal_of_an_old_memory_is_decided_again(tmp_path: Path) -> None:
    async def script(p: Process, q: Process) -> None:
        await p.open()
        assert q.commits.state.phase == "recruiting"
        event = Updated(1.0, 1, "a", engine.lease(q.config, engine.State(round=1), "a"), "5" * 64)
        assert isinstance(await q.commits.ask(event), Acknowledge)
        await p.commits.submit(Paused(2.0))
        await q.commits.submit(Resumed(3.0))
        with pytest.raises(Refusal):
            await q.commits.submit(Resumed(3.0))

    play(tmp_path, script, 2)


@pytest.mark.parametrize("seed", range(5))
def test_many_processes_that_write_at_once_lose_nothing(tmp_path: Path, seed: int) -> None:
    names = tuple(f"d{i:02}" for i in range(20))
    dice = random.Random(seed)

    async def script(*processes: Process) -> None:
        for p in processes:
            p.config = p.commits.initial_config = config().model_copy(update={"cohort": 20, "min_updates": 20})
        await processes[0].commits.submit(Present(1.0, names, len(names)))
        said = await asyncio.gather(
            *(dice.choice(processes).update(name) for name in names for _ in range(3)), return_exceptions=True
        )
        assert not [s for s in said if isinstance(s, Exception)]
        first = [s for s in said if isinstance(s, tuple) and isinstance(s[0], Acknowledge) and not s[0].duplicate]
        assert sorted(s[0].device for s in first) == list(names)  # type: ignore[union-attr]
        assert set(processes[0].metadata.influences("fed", 1)) == set(names)
        for p in processes:
            await p.commits.refresh()
            assert set(p.commits.state.received) == set(names)
        aggregates = [d for p in processes for d in p.decided if isinstance(d, Aggregate)]
        assert aggregates == [Aggregate(1, 1, names)]

    play(tmp_path, script, 3)


@pytest.mark.parametrize("error", [StorageFullError("full"), StorageDamagedError("odd"), StorageUnreachableError("?")])
def test_a_commit_that_fails_changes_nothing_and_is_told_to_all_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: StateError
) -> None:
    async def script(p: Process) -> None:
        await p.open()
        before = p.commits.state, p.metadata.head("fed")

        def fails(*_: object) -> bool:
            raise error

        with monkeypatch.context() as m:
            m.setattr(Metadata, "commit", fails)
            said = await asyncio.gather(p.update("a"), p.update("b"), return_exceptions=True)
            assert said == [error, error]
            assert p.faults.text == str(error)
        assert (p.commits.state, p.metadata.head("fed")) == before
        await p.update("a")
        assert p.faults.text is None

    play(tmp_path, script)


def test_a_commit_whose_confirmation_was_lost_counts_and_is_acknowledged_when_it_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(p: Process) -> None:
        await p.open()
        commit = Metadata.commit

        def lost(self: Metadata, *given: Any) -> bool:
            commit(self, *given)
            raise StorageUnreachableError("the connection broke")

        with monkeypatch.context() as m:
            m.setattr(Metadata, "commit", lost)
            with pytest.raises(StorageUnreachableError):
                await p.update("a")
        assert "a" not in p.commits.state.received  # memory stands where it stood
        assert await p.update("a") == (Acknowledge(1, "a", "5" * 64, True),)
        await p.update("b")
        assert set(p.commits.state.received) == {"a", "b"}

    play(tmp_path, script)


def test_an_event_is_committed_although_its_caller_goes_away(tmp_path: Path) -> None:
    async def script(p: Process) -> None:
        await p.open()
        caller, beside = asyncio.create_task(p.update("a")), asyncio.create_task(p.update("b"))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        await asyncio.wait_for(beside, LIMIT)  # in the same transaction
        assert set(p.commits.state.received) == {"a", "b"}

    play(tmp_path, script)


def test_a_paused_round_has_no_timer_and_what_is_being_written_is_finished_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(p: Process) -> None:
        await p.open()
        assert p.commits._timer is not None
        await p.commits.submit(Paused(1.0))
        assert p.commits._timer is None
        commit, writing, go_on = Metadata.commit, threading.Event(), threading.Event()

        def slow(self: Metadata, *given: Any) -> bool:
            writing.set()
            assert go_on.wait(LIMIT)
            return commit(self, *given)

        monkeypatch.setattr(Metadata, "commit", slow)
        update = asyncio.create_task(p.update("a"))
        await asyncio.to_thread(writing.wait, LIMIT)
        ending = asyncio.create_task(p.commits.close())
        await asyncio.sleep(0)
        go_on.set()
        await ending
        assert "a" in p.commits.state.received
        await update

    play(tmp_path, script)


def test_refreshes_that_wait_together_share_a_read_that_begins_after_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def script(one: Process, other: Process) -> None:
        reads: list[int] = []
        head = Metadata.head

        def noted(self: Metadata, federation: str) -> Head:
            reads.append(1)
            return head(self, federation)

        monkeypatch.setattr(Metadata, "head", noted)
        before = one.commits.version
        async with one.commits._memory:  # something is being written meanwhile
            waiting = [asyncio.create_task(one.commits.refresh()) for _ in range(20)]
            await asyncio.sleep(0)
            waiting[0].cancel()  # its caller goes away; the others still get their answer
            await other.open()
            assert reads == []
        assert all(await asyncio.gather(*waiting[1:]))
        assert (len(reads), one.commits.version) == (1, before + 1)
        assert not await one.commits.refresh()
        assert len(reads) == 2

    play(tmp_path, script, processes=2)


def test_a_federation_that_another_one_has_replaced_takes_no_event(tmp_path: Path) -> None:
    async def script(one: Process, other: Process) -> None:
        version, row = one.commits.version, (one.config.model_dump_json(), one.config.bundle)
        assert other.metadata.delete_federation("fed", version)
        state, values = engine.dump(engine.State()), Content("0" * 64, b"g")
        assert other.metadata.add_federation("fed", *row, state, values, 1.0, version + 7) == "added"
        for asked in (one.open(), one.commits.refresh()):
            with pytest.raises(Refusal, match="another one has its name now"):
                await asked
        assert one.commits.version == version
        assert other.metadata.head("fed").state == state

    play(tmp_path, script, processes=2)


def test_a_refresh_that_is_asked_for_during_a_read_reads_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(one: Process, other: Process) -> None:
        head, read, go_on = Metadata.head, threading.Event(), threading.Event()

        def slow(self: Metadata, federation: str) -> Head:
            found = head(self, federation)
            read.set()
            assert go_on.wait(LIMIT)
            return found

        with monkeypatch.context() as m:
            m.setattr(Metadata, "head", slow)
            first = asyncio.create_task(one.commits.refresh())
            await asyncio.to_thread(read.wait, LIMIT)
        await other.open()
        second = asyncio.create_task(one.commits.refresh())
        await asyncio.sleep(0)
        go_on.set()
        assert [await first, await second] == [False, True]
        assert one.commits.version == other.commits.version

    play(tmp_path, script, processes=2)


def test_rows_without_a_change_of_state_are_a_commit_that_others_notice(tmp_path: Path) -> None:
    async def script(p: Process, q: Process) -> None:
        await p.commits.submit(Removed(1.0, "a"), lambda rows: rows.arrive("a", 1.0))
        assert p.commits.version == 1
        assert await q.commits.refresh()
        assert q.heads[-1].ready == 1

    play(tmp_path, script, 2)


def test_the_deadline_is_acted_upon_and_tried_again_while_the_database_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_commits, "RETRY", 0.05)
    monkeypatch.setattr(live_commits, "LOOK_MOST", 0.02)
    c = config(deadline_seconds=0.5).model_copy(update={"min_updates": 1})
    failures: list[float] = []
    commit = Metadata.commit

    def fails(self: Metadata, federation: str, version: int, state: str, *rest: Any) -> bool:
        if engine.load(state).stage == "aggregating" and len(failures) < 2:
            failures.append(time.monotonic())
            raise StorageFullError("full")
        return commit(self, federation, version, state, *rest)

    async def main() -> None:
        now = [1.0]  # it stands still unless the test sets it
        p = Process(database(tmp_path, c), c, lambda: now[0])
        p.commits.begin()
        await p.open()
        await p.update("a")
        monkeypatch.setattr(Metadata, "commit", fails)
        now[0] += 1.0
        end = time.monotonic() + LIMIT
        while p.commits.state.stage != "aggregating":
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert p.decided[-1] == Aggregate(1, 1, ("a",))
        assert failures[1] - failures[0] >= live_commits.RETRY
        await p.commits.close()
        with pytest.raises(StorageUnreachableError):
            await p.update("b")
        p.metadata.close()

    asyncio.run(main())


def test_a_writer_that_never_wins_gives_up_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def script(p: Process) -> None:
        await p.open()
        monkeypatch.setattr(Metadata, "commit", lambda *_: False)
        with pytest.raises(StorageUnreachableError, match="send the request again"):
            await p.update("a")

    play(tmp_path, script)
