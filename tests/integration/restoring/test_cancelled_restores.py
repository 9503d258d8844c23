"""The walk with cancels: a restore that is stopped at a crash point leaves all as it was, or has published all.

The request is a real one, in the store. `make all` walks every point, with and without old databases.
"""

from __future__ import annotations

from contextlib import nullcontext

import psycopg
import pytest

from cutline.fleet.config import Node
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.snapshots.operations.open_operations import RESTORE
from tests.commands.snapshot_runs import Ready, Runs
from tests.faults.cancelled_command import CancelledRun, cancel_at, cancel_when
from tests.faults.points import RESTORE_PER_NODE
from tests.integration.refusing import execute
from tests.integration.restoring.ending import abandon, restore_left
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    old_databases,
    open_restores,
)
from tests.run.soak import first

# Much longer than it takes: the machine may be busy.
CANCEL_SECONDS_MAX = 20.0
# Before the intent is stored nobody can name the operation. After the outcome nothing is under way.
POINTS = [
    (point, count)
    for point in RestoreCrashPoint
    if point not in (RestoreCrashPoint.LOCKED, RestoreCrashPoint.OUTCOME_STORED, RestoreCrashPoint.ABANDONED)
    for count in ((1, SHARDS) if point in RESTORE_PER_NODE else (1,))
]
# In the source it takes no time, in a restored database for ever.
SLOW_INDEX = """
CREATE FUNCTION slow(n int) RETURNS int IMMUTABLE LANGUAGE plpgsql AS
  $$BEGIN IF current_database() <> 'bank' THEN PERFORM pg_sleep(300); END IF; RETURN n; END$$;
CREATE INDEX slow ON item (slow(id))
"""
DECIDED = [*RestoreCrashPoint].index(RestoreCrashPoint.DECIDED)
BEFORE = [one for one in POINTS if [*RestoreCrashPoint].index(one[0]) < DECIDED]
AFTER = [one for one in POINTS if one not in BEFORE]
# No role has to be created.
REACHED_BEFORE = [one for one in BEFORE if one[0] != RestoreCrashPoint.ROLES_CREATED]


def cancelled(place: Place, point: RestoreCrashPoint, count: int, *words: str) -> CancelledRun:
    command, *options = words
    line = (command, NAME, "--to", str(place.target.path), *options)
    return cancel_at(place.fleet, (str(point), count), *line, spark=place.spark)


@pytest.mark.parametrize("how", first(["--replace", "--analyze"]))
@pytest.mark.parametrize(("point", "count"), first(REACHED_BEFORE))
def test_before_the_decision_all_is_removed(place: Place, point: RestoreCrashPoint, count: int, how: str) -> None:
    with old_databases(place) if how == "--replace" else nullcontext():
        run = cancelled(place, point, count, "restore", how, "--yes")
        assert (run.code, run.document["error"], run.results) == (8, "cancelled", ["cancelled"]), run.document
        assert run.seconds < CANCEL_SECONDS_MAX
        assert open_restores(place) == []
        if how == "--replace":
            assert_old(place)
        else:
            assert place.databases() == set()


@pytest.mark.parametrize(("point", "count"), first(AFTER))
def test_what_is_publishing_goes_on_and_cancel_says_so(place: Place, point: RestoreCrashPoint, count: int) -> None:
    with old_databases(place):
        run = cancelled(place, point, count, "restore", "--replace", "--yes")
        assert (run.code, run.results) == (0, ["refused"]), run.document
        assert "it can't be stopped, only undone" in run.answers[0].text
        assert_restored(place)


def test_a_resumed_restore_that_is_stopped_stays_open_and_cancel_says_how_to_end_it(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.FINISHED, 1)
        run = cancelled(place, RestoreCrashPoint.CLOSED, 1, "restore-resume")
        assert (run.code, run.results) == (8, ["unfinished"]), run.document
        assert run.answers[0].operation.kind == RESTORE
        assert f"snapshot restore-resume {NAME}" in run.answers[0].text
        assert open_restores(place) == [run.answers[0].operation.id]
        abandon(place)
        assert_old(place)


def is_there(node: Node, condition: str) -> bool:
    """Whether Cutline has a session on the node of which the condition holds."""
    query = f"SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'cutline%' AND {condition}"
    with psycopg.connect(node.dsn.replace(f"/{DATABASE}", "/postgres")) as connection:
        return connection.execute(query.encode()).fetchone() != (0,)


def test_an_index_that_takes_for_ever_ends_within_seconds(place: Place) -> None:
    source, target = place.fleet.primaries[0], place.target.primaries[0]
    execute(source.dsn, SLOW_INDEX)
    try:
        Runs(place.fleet, Ready(place.spark)).full("slow")
    finally:
        execute(source.dsn, "DROP INDEX slow; DROP FUNCTION slow")
    words = ("restore", "slow", "--to", str(place.target.path), "--yes")
    run = cancel_when(
        place.fleet, lambda: is_there(target, "query LIKE '%CREATE INDEX%' AND wait_event = 'PgSleep'"), *words,
        spark=place.spark,
    )  # fmt: skip
    print(f"index: {run.seconds:.1f} s")  # noqa: T201  # the figures
    assert (run.code, run.results) == (8, ["cancelled"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    assert place.databases() == set()


def test_a_wait_for_writers_of_the_tables_ends_within_seconds(place: Place, filled: Node) -> None:
    with psycopg.connect(filled.dsn) as writer:
        writer.execute("LOCK TABLE log IN ROW EXCLUSIVE MODE")
        words = ("restore", NAME, "--to", str(place.target.path), "--data-only")
        # The fleet's lock is looked for in pg_locks, too.
        waits = "query LIKE '%DISTINCT virtualtransaction%'"
        run = cancel_when(place.fleet, lambda: is_there(filled, waits), *words, spark=place.spark)
        writer.rollback()
    print(f"lock: {run.seconds:.1f} s")  # noqa: T201  # the figures
    assert (run.code, run.results) == (8, ["cancelled"]), run.document
    assert run.seconds < CANCEL_SECONDS_MAX
    assert open_restores(place) == []
