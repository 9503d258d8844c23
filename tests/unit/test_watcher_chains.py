"""Which chain `watch` goes on with, and when a full snapshot begins another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import cutline.cli.watch.watcher as module
from cutline.cli.output.failure import CommandFailure
from cutline.cli.watch.schedule import FINAL_FAILURES, FINAL_SECONDS, WAITING_SECONDS_MAX, TaskKind
from cutline.cli.watch.tasks import CommandFailedError, TaskResult
from cutline.fleet.config import NEVER, WatchTable
from cutline.fleet.messages import NEW_CHAIN
from cutline.fleet.units import Interval
from cutline.snapshots.create.archive_ahead import ArchivedAhead
from cutline.snapshots.operations.operation import current_time
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.end_marks import EndMark, mark_end
from cutline.snapshots.records.proven_chains import read_full
from cutline.snapshots.records.store_identity import FLEET_KEY
from cutline.snapshots.records.tombstones import SnapshotDeletedError, put_mark
from cutline.storage.clock import follow_machine, set_time, steady_seconds
from cutline.storage.errors import BusyError, ChainEnd, RefusedError, SnapshotError, UnreachableError, UsageError
from tests.unit.made_commits import mark
from tests.unit.made_fleets import new_fleet, store_chain
from tests.unit.watched import NAME, Watched, ending, fails, follow, new_watched, works

# What the tasks do, which `watched` replaces.
RUN = module.Watcher._run


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return new_watched(tmp_path, monkeypatch)


def test_a_chain_that_can_not_go_on_is_followed_by_a_full_snapshot_at_once(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.ended == "the slot is gone"
    assert watched.seconds_to(TaskKind.FULL) <= 0
    assert TaskKind.INCREMENT not in watched.watcher.following.possible(())
    assert watched.notices() == [("failed", "increment")]


def test_what_may_still_mend_the_chain_has_some_time_for_it(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for number in range(1, FINAL_FAILURES + 1):
        assert watched.watcher.chain is not None
        assert watched.watcher.chain.goes_on, number
        pass_hour(watched)
        watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.chain.goes_on


def pass_hour(watched: Watched) -> None:
    """Let the failures of all tasks so far be an hour older."""
    for doubt in watched.watcher.following.doubts.values():
        doubt.since_seconds -= FINAL_SECONDS
    tasks = watched.watcher.tasks
    for kind, task in tasks.items():
        if task.failing_since is not None:
            tasks[kind] = structs.replace(task, failing_since=task.failing_since - timedelta(seconds=FINAL_SECONDS))


def give_up(watched: Watched) -> None:
    """Let increments fail until the watch gives the chain up."""
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for _ in range(FINAL_FAILURES):
        pass_hour(watched)
        watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.following.goes_on


def test_many_failures_within_an_hour_end_no_chain(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for _ in range(3 * FINAL_FAILURES):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.following.goes_on
    pass_hour(watched)
    watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.following.goes_on


def test_a_change_of_the_file_gives_a_chain_its_time_anew(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for _ in range(FINAL_FAILURES):
        watched.run(TaskKind.INCREMENT)
    pass_hour(watched)
    follow(watched)
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.following.goes_on


def test_a_chain_that_was_given_up_is_tried_again_after_a_change_of_the_file(watched: Watched) -> None:
    give_up(watched)
    follow(watched)
    following = watched.watcher.following
    assert following.goes_on
    # The full snapshot is due when it would have been, and the next chain that ends gets one.
    assert watched.watcher.tasks[TaskKind.FULL].retry_at is None
    give_up(watched)
    assert watched.seconds_to(TaskKind.FULL) <= 0
    # That which ended for good, or in the store, is not tried again.
    follow(watched)
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    follow(watched)
    assert not following.goes_on


def test_the_failures_of_a_chain_do_not_count_for_the_next(watched: Watched) -> None:
    give_up(watched)
    store_chain(watched.watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    assert watched.watcher.following.follow_newest()
    pass_hour(watched)
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.following.goes_on


def test_failures_before_another_watch_had_the_turn_do_not_count(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for _ in range(FINAL_FAILURES):
        watched.run(TaskKind.INCREMENT)
    pass_hour(watched)
    watched.watcher.begin()
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.following.goes_on


def test_what_a_hint_says_of_a_new_chain_ends_none(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(RefusedError("the slot is gone", hint=NEW_CHAIN))
    for _ in range(FINAL_FAILURES + 1):
        watched.run(TaskKind.INCREMENT)
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.goes_on


def test_a_chain_ends_only_by_what_keeps_it_from_going_on(watched: Watched) -> None:
    watched.does[TaskKind.PRUNE] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.PRUNE)
    assert watched.watcher.chain is not None
    assert watched.watcher.chain.goes_on


def test_a_snapshot_that_somebody_takes_is_continued_and_replaces_the_one_before(watched: Watched) -> None:
    watcher = watched.watcher
    assert not watcher.following.follow_newest()
    store_chain(watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    assert watcher.following.follow_newest()
    assert watcher.chain is not None
    assert (watcher.chain.name, watcher.chain.replaced) == ("watch-2026-11-24-020000", (NAME,))
    assert TaskKind.REPLACE in {kind for kind, one in watcher.tasks.items() if one.interval_seconds}


@pytest.mark.parametrize(
    ("left", "rest"), [([], ""), (["b", "b-1"], "; its slot may remain on b, b-1: the next create will drop it")]
)
def test_nodes_on_which_a_replaced_chain_may_leave_its_slot_are_named(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, left: list[str], rest: str
) -> None:
    following, newest = watched.watcher.following, "watch-2026-11-24-020000"
    store_chain(watched.watcher.source.fleet, newest, "2026-11-24T02:00:00Z")
    assert following.follow_newest()
    monkeypatch.setattr("cutline.cli.watch.following.supersede", lambda *_: left)
    following.end_replaced()
    assert watched.said[-1] == f"snapshot {NAME} will get no more increments: {newest} has taken its place{rest}"


def test_full_never_means_never(watched: Watched) -> None:
    source = watched.watcher.source
    assert source.fleet.watch is not None
    source.fleet = replace(source.fleet, watch=WatchTable(every=Interval(60), full=NEVER, check=NEVER))
    watched.watcher.plan()
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    possible: dict[TaskKind, Any] = watched.watcher.following.possible(())
    assert not any(one.interval_seconds for kind, one in possible.items() if kind is TaskKind.FULL)
    assert "[watch] full is never" in watched.said[-1]


def test_what_has_failed_is_told_to_work_again_also_on_the_next_chain(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    store_chain(watched.watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    assert watched.watcher.following.follow_newest()
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


def test_the_primaries_are_asked_whether_a_cut_is_in_the_future(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine's clock may be behind, or a failed increment may have set it to the time of that cut."""
    right = datetime.fromisoformat("2026-11-25T01:00:00Z")

    @contextmanager
    def open_sessions(*_: object) -> Iterator[None]:
        set_time(right, steady_seconds())
        yield

    monkeypatch.setattr("cutline.cli.watch.following.open_sessions", open_sessions)
    store_chain(watched.watcher.source.fleet, "watch-2098-01-01-010000", "2098-01-01T01:00:00Z")
    try:
        set_time(datetime.fromisoformat("2098-01-01T01:00:00Z"), steady_seconds())
        watched.watcher.following.follow_newest()
    finally:
        follow_machine()
    assert watched.watcher.chain is not None
    assert (watched.watcher.chain.name, watched.watcher.chain.replaced) == (NAME, ("watch-2098-01-01-010000",))


def test_the_end_of_a_chain_counts_once_however_often_the_watch_begins_anew(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    due_at = watched.watcher.tasks[TaskKind.FULL].retry_at
    assert due_at is not None
    end_chain(watched)
    for _ in range(3):
        watched.watcher.begin()
    assert watched.watcher.tasks[TaskKind.FULL].retry_at == due_at


def end_chain(watched: Watched, name: str = NAME) -> None:
    store = watched.watcher.source.fleet.store.open()
    mark_end(store, EndMark(name, read_full(store, name).chain, 0, "", current_time()))


def test_no_increment_is_tried_of_a_newer_snapshot_whose_chain_has_ended(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has taken and ended it between two increments: that is no failure."""
    monkeypatch.setattr(module.Watcher, "_run", RUN)
    monkeypatch.setattr("cutline.cli.watch.tasks.take_increment", lambda *_: pytest.fail("an increment was tried"))
    name = "watch-2026-11-24-020000"
    store_chain(watched.watcher.source.fleet, name, "2026-11-24T02:00:00Z")
    end_chain(watched, name)
    watched.run(TaskKind.INCREMENT)
    assert watched.watcher.tasks[TaskKind.INCREMENT].failures == 0
    assert watched.notices() == []
    assert watched.seconds_to(TaskKind.FULL) <= 0


def test_a_full_snapshot_is_due_once_the_rules_ask_for_one(watched: Watched) -> None:
    follow(watched, full=NEVER)
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    follow(watched, full=Interval(7 * 86400))
    now = module.utc_now()
    due_at = watched.watcher.tasks[TaskKind.FULL].due_at(watched.watcher.begun_at, now)
    assert due_at is not None
    assert due_at <= now


def test_changed_tables_make_an_increment_due_unless_that_fails(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.cli.watch.tasks.archive_ahead", lambda *_: ArchivedAhead(needs_increment=True))
    # Whatever the date is, no full snapshot is due.
    follow(watched, full=NEVER)
    watcher = watched.watcher
    for kind in (TaskKind.INCREMENT, TaskKind.PRUNE, TaskKind.GC):
        watcher.tasks[kind] = watcher.tasks[kind].done(module.utc_now())
    assert "have changed" in watcher._archive_ahead(NAME).text
    found, _ = module.next_task(watcher.following.possible(()), watcher.begun_at, module.utc_now())
    assert found is not None
    assert found.kind is TaskKind.INCREMENT
    failed = watcher.tasks[TaskKind.INCREMENT].failed(module.utc_now(), "away")
    watcher.tasks[TaskKind.INCREMENT] = failed
    assert watcher._archive_ahead(NAME).text == ""
    assert watcher.tasks[TaskKind.INCREMENT] is failed


def test_a_chain_whose_newest_commit_stays_damaged_is_followed_by_a_full_snapshot(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ManifestError("object increments/1.json is damaged"))
    for _ in range(FINAL_FAILURES - 1):
        watched.run(TaskKind.INCREMENT)
        pass_hour(watched)
    assert watched.watcher.following.goes_on
    watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.following.goes_on
    assert "a full snapshot follows" in watched.said[-1]


def test_without_full_snapshots_a_chain_that_may_be_mended_is_tried_for_ever(watched: Watched) -> None:
    follow(watched, full=NEVER)
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for _ in range(2 * FINAL_FAILURES):
        watched.run(TaskKind.INCREMENT)
        pass_hour(watched)
    assert watched.watcher.following.goes_on
    watched.does[TaskKind.INCREMENT] = works
    watched.run(TaskKind.INCREMENT)
    assert watched.notices() == [("failed", "increment"), ("recovered", "increment")]


def test_a_replaced_chain_that_can_not_be_ended_keeps_its_pauses(watched: Watched) -> None:
    watcher = watched.watcher
    store_chain(watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    watcher.following.follow_newest()
    watched.does[TaskKind.REPLACE] = fails(UnreachableError("node a is away"))
    for _ in range(3):
        watched.run(TaskKind.REPLACE)
    store_chain(watcher.source.fleet, "watch-2026-11-24-030000", "2026-11-24T03:00:00Z")
    watcher.following.follow_newest()
    assert watcher.tasks[TaskKind.REPLACE].failures == 3
    assert watched.notices() == [("failed", "replace")]


@pytest.mark.parametrize("is_run", [True, False])
def test_a_replaced_chain_that_needs_no_end_any_more_has_recovered(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, *, is_run: bool
) -> None:
    watcher = watched.watcher
    store_chain(watcher.source.fleet, "watch-2026-11-24-020000", "2026-11-24T02:00:00Z")
    watcher.following.follow_newest()
    error: SnapshotError = ManifestError(
        "object x is damaged", hint="put it back", details={"object": f"snapshots/{NAME}/increments/1.json"}
    )

    def supersede(*_: object) -> list[str]:
        raise error

    monkeypatch.setattr("cutline.cli.watch.following.supersede", supersede)
    with pytest.raises(ManifestError) as raised:
        watcher.following.end_replaced()
    assert raised.value.hint.endswith(f"snapshot delete {NAME} --force")
    told = raised.value
    # What is wrong with anything else is no reason to give the chain up.
    error = ManifestError("object y is damaged", hint="put it back", details={"object": "baselines/1.json"})
    with pytest.raises(ManifestError) as raised:
        watcher.following.end_replaced()
    assert raised.value.hint == "put it back"
    watched.does[TaskKind.REPLACE] = fails(told)
    watched.run(TaskKind.REPLACE)
    assert watched.notices() == [("failed", "replace")]
    # Somebody has done so: the task finds it, or whoever looks for the newest snapshot.
    if is_run:
        error = SnapshotDeletedError("it was deleted")

        def end_replaced() -> TaskResult:
            watcher.following.end_replaced()
            return works()

        watched.does[TaskKind.REPLACE] = end_replaced
        watched.run(TaskKind.REPLACE)
    else:
        put_mark(watcher.source.open_store(), mark(NAME))
        watcher.following.follow_newest()
        assert "replace is no longer needed; it had failed: object x is damaged" in watched.said
    assert watcher.tasks[TaskKind.REPLACE].interval_seconds == 0
    assert watched.notices() == [("failed", "replace"), ("recovered", "replace")]


def test_a_watch_says_which_other_chains_nodes_keep_wal_for(watched: Watched) -> None:
    assert not [text for text in watched.said if "keep WAL" in text]
    store_chain(watched.watcher.source.fleet, "nightly", "2026-11-24T01:00:00Z")
    watched.watcher.begin()
    said = "nodes also retain WAL for snapshots that get no increments from this watch: nightly"
    assert watched.said[-1] == said
    # Deleting is the second possibility: a chain that ends keeps its restore points.
    first, second = watched.hints[-1].split("; or, ")
    assert first.endswith("snapshot end nightly")
    assert second.endswith("snapshot delete nightly")
    watched.watcher.begin()
    assert watched.said.count(said) == 1


@pytest.mark.parametrize("kind", [TaskKind.FULL, TaskKind.INCREMENT, TaskKind.CHECK])
def test_nothing_is_taken_in_another_store_than_that_of_the_beginning(watched: Watched, kind: TaskKind) -> None:
    source, own = watched.watcher.source, watched.watcher.source.fleet
    source.fleet = replace(own, store=new_fleet().store)
    watched.does[kind] = works
    watched.run(kind)
    assert "the store that was at" in watched.said[-1]
    assert watched.notices() == [("failed", kind)]
    assert watched.watcher.following.goes_on
    source.fleet = own
    if kind is not TaskKind.CHECK:
        watched.run(kind)
        assert watched.notices()[1:] == [("recovered", kind)]


def test_a_damaged_fleet_json_ends_no_chain(watched: Watched) -> None:
    error = ManifestError("object fleet.json is no document", hint="put it back", details={"object": FLEET_KEY})
    watched.does[TaskKind.INCREMENT] = fails(error)
    for _ in range(2 * FINAL_FAILURES):
        watched.run(TaskKind.INCREMENT)
        pass_hour(watched)
    assert watched.watcher.following.goes_on


def test_only_failures_that_may_end_a_chain_count_towards_its_end(watched: Watched) -> None:
    watched.does[TaskKind.INCREMENT] = fails(UnreachableError("the store is away"))
    for _ in range(2 * FINAL_FAILURES):
        watched.run(TaskKind.INCREMENT)
        pass_hour(watched)
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.PERHAPS))
    for number in range(1, FINAL_FAILURES + 1):
        assert watched.watcher.following.goes_on, number
        pass_hour(watched)
        watched.run(TaskKind.INCREMENT)
    assert not watched.watcher.following.goes_on


def failed_command(code: int, **details: object) -> CommandFailedError:
    return CommandFailedError(CommandFailure(code, "any-slug", "the command failed", "", details))


REFUSED = failed_command(UsageError.exit_code, operation="20261124T000000Z-0000000001")


@dataclass
class FailingFulls:
    """Full snapshots that fail; `give_up` says for each whether it would have given up an interrupted one."""

    watched: Watched
    error: SnapshotError = REFUSED
    give_up: list[bool] = field(default_factory=list)

    def take(self, *_: object, gives_up: bool) -> TaskResult:
        self.give_up.append(gives_up)
        raise self.error

    def try_often(self, error: SnapshotError = REFUSED) -> None:
        self.error = error
        for _ in range(2 * FINAL_FAILURES):
            self.watched.run(TaskKind.FULL)

    def gives_up_now(self) -> bool:
        self.error = REFUSED
        self.watched.run(TaskKind.FULL)
        return self.give_up[-1]


@pytest.fixture
def fulls(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> FailingFulls:
    found = FailingFulls(watched)
    monkeypatch.setattr("cutline.cli.watch.tasks.take_full", found.take)
    watched.does[TaskKind.FULL] = watched.watcher._take_full
    return found


def test_an_interrupted_full_snapshot_that_is_refused_is_given_up_after_an_hour(fulls: FailingFulls) -> None:
    fulls.try_often()
    assert not fulls.gives_up_now()
    pass_hour(fulls.watched)
    assert fulls.gives_up_now()


@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("the reader is away"),
        failed_command(UnreachableError.exit_code, operation="20261124T000000Z-0000000001"),
        failed_command(UsageError.exit_code),
    ],
    ids=["away", "other code", "other usage"],
)
def test_other_failures_give_up_no_interrupted_full_snapshot(fulls: FailingFulls, error: SnapshotError) -> None:
    """Those before the first refusal do not count, and those after it end the count."""
    fulls.try_often(error)
    pass_hour(fulls.watched)
    fulls.try_often()
    assert True not in fulls.give_up
    pass_hour(fulls.watched)
    assert fulls.gives_up_now()
    fulls.error = error
    fulls.watched.run(TaskKind.FULL)
    assert not fulls.gives_up_now()


def test_a_wait_for_another_operation_gives_up_no_interrupted_full_snapshot(fulls: FailingFulls) -> None:
    watched, tasks = fulls.watched, fulls.watched.watcher.tasks
    fulls.try_often(BusyError("another operation is running"))
    task = tasks[TaskKind.FULL]
    assert task.waiting_since is not None
    tasks[TaskKind.FULL] = structs.replace(task, waiting_since=task.waiting_since - timedelta(seconds=FINAL_SECONDS))
    watched.run(TaskKind.FULL)
    assert tasks[TaskKind.FULL].failing_since is not None
    fulls.try_often()
    assert not fulls.gives_up_now()


def test_a_change_of_the_file_gives_an_interrupted_full_snapshot_its_time_anew(fulls: FailingFulls) -> None:
    fulls.try_often()
    pass_hour(fulls.watched)
    follow(fulls.watched)
    fulls.try_often()
    assert not fulls.gives_up_now()
    pass_hour(fulls.watched)
    assert fulls.gives_up_now()


def test_a_full_snapshot_that_a_busy_fleet_keeps_waiting_is_told_as_soon_as_an_increment_would_be(
    watched: Watched,
) -> None:
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    watched.run(TaskKind.INCREMENT)
    watched.does[TaskKind.FULL] = fails(BusyError("another operation is running"))
    watched.run(TaskKind.FULL)
    assert watched.notices() == [("failed", "increment")]
    task = watched.watcher.tasks[TaskKind.FULL]
    assert task.waiting_since is not None
    waiting_since = task.waiting_since - timedelta(seconds=WAITING_SECONDS_MAX)
    watched.watcher.tasks[TaskKind.FULL] = structs.replace(task, waiting_since=waiting_since)
    watched.run(TaskKind.FULL)
    assert watched.notices() == [("failed", "increment"), ("failed", "full")]


def test_a_watch_whose_names_change_says_that_nodes_keep_wal_for_its_chain(watched: Watched) -> None:
    follow(watched, name="other-{n}")
    watched.watcher.following.follow_newest()
    said = "nodes also retain WAL for snapshots that get no increments from this watch: " + NAME
    assert said in watched.said
    assert not watched.watcher.following.goes_on


def test_a_changed_file_ends_the_pause_before_the_next_full_snapshot(watched: Watched) -> None:
    fleet, following = watched.watcher.source.fleet, watched.watcher.following
    watched.does[TaskKind.INCREMENT] = fails(ending(ChainEnd.FOR_GOOD))
    for number in range(3):
        began_at = module.utc_now() + timedelta(seconds=number)
        store_chain(fleet, f"watch-{began_at:%Y-%m-%d-%H%M%S}", f"{began_at:%Y-%m-%dT%H:%M:%SZ}")
        assert following.follow_newest()
        watched.run(TaskKind.INCREMENT)
    assert watched.seconds_to(TaskKind.FULL) > 0
    follow(watched)
    assert watched.seconds_to(TaskKind.FULL) <= 0
