"""The walk: kill a restore at its crash points; then all shards are old, or all new, or the next command says so.

Each case kills a restore over existing databases on three shards. Users ask every database all the time: they meet the
old one, none, or the new one. Then the restore is resumed, or undone: at every point in both ways by `make all`, in one
of them by `make test`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cutline.fleet.progress import Silent
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Watching
from tests.faults.points import RESTORE_PER_NODE
from tests.integration.restoring.target_place import (
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    await_sessions_over,
    old_databases,
    open_restores,
    plain_restore,
    restore_killed,
    state_of,
)
from tests.run.soak import first_of_each

POINTS = [
    (point, count)
    for point in RestoreCrashPoint
    if point != RestoreCrashPoint.ABANDONED
    for count in ((1, 2, SHARDS) if point in RESTORE_PER_NODE else (1,))
]
# By turns the one way or the other comes first.
CASES = [
    (*point, end)
    for number, point in enumerate(POINTS)
    for end in (("restore-resume", "restore-abandon") if number % 2 else ("restore-abandon", "restore-resume"))
]


@contextmanager
def asking_users(place: Place) -> Iterator[set[str]]:
    """Ask every database again and again; yield the states that were seen."""
    over, seen, failed = threading.Event(), set[str](), list[BaseException]()

    def ask(dsn: str) -> None:
        try:
            while not over.wait(0.02):
                seen.add(state_of(dsn))
        except BaseException as error:  # noqa: BLE001  # raised below
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(dsn,)) for dsn in place.dsns()]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        over.set()
        for thread in threads:
            thread.join()
        assert not failed, failed


def is_decided(point: RestoreCrashPoint) -> bool:
    return [*RestoreCrashPoint].index(point) >= [*RestoreCrashPoint].index(RestoreCrashPoint.DECIDED)


@pytest.mark.parametrize(
    ("point", "count", "ends"),
    # `make test` has no more than both ends, before and after the decision: a case takes up to a minute.
    first_of_each(CASES, lambda case: (is_decided(case[0]), case[2])),
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_a_killed_restore_ends_whole(place: Place, point: RestoreCrashPoint, count: int, ends: str) -> None:
    with old_databases(place):
        with asking_users(place) as seen:
            restore_killed(place, point, count)
        await_sessions_over(place)
        states = place.states()
        assert seen | set(states) <= {"old", "none", "new"}
        if not is_decided(point):
            assert "new" not in seen
        found = plain_restore(place)
        if found is None:
            # Nothing was made yet, or nothing is left to do.
            assert set(states) in ({"old"}, {"new"})
            assert set(states) == {"new"} or place.comments() == []
        else:
            assert found.exit_code == 3
        if ends == "restore-abandon" and (found is None or "restore-abandon" in found.hint):
            abandon_all(place)
            if found is not None or set(states) == {"old"}:
                assert_old(place)
        elif found is not None:
            resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Watching())
            assert_restored(place)
            assert len([name for name in place.databases() if "_before_" in name]) == 1
        else:
            with pytest.raises(UnfinishedRestoreError):
                resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
            abandon_all(place)
        assert open_restores(place) == []


def abandon_all(place: Place) -> None:
    """Undo what is unfinished, on the targets or in the store alone."""
    if open_restores(place):
        assert abandon_restore(place.fleet, place.target, NAME, print, Silent()).operations
    with pytest.raises(UnfinishedRestoreError):
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
