"""What a restore recorded is gone, or somebody else wrote it: nothing is acted on, and nothing is called undone."""

from __future__ import annotations

import psycopg
import pytest

from fleet.nodes.connections import NodeUnreachableError, with_database
from fleet.progress import Silent
from restore.crash_points import RestoreCrashPoint
from restore.plan import plan_restore
from restore.restore import restore_fleet
from restore.undoing.abandoning import abandon_restore
from restore.unfinished import UnfinishedRestoreError
from snapshots.records.operation_records import read_outcome
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Watching
from tests.integration.refusing import execute
from tests.integration.restoring.ending import REQUEST, abandon, restore_left, resume
from tests.integration.restoring.filled import assert_empty, leave, tables_to_fill
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    old_databases,
    open_restores,
)


def maintenance_of(place: Place, shard: int) -> str:
    return with_database(place.target.primaries[shard], "postgres").dsn


def loading_of(place: Place, shard: int) -> str:
    (name,) = [one for one in place.databases_of(place.target.primaries[shard]) if "_restoring_" in one]
    return name


def test_the_record_of_a_database_of_another_role_is_not_read(place: Place) -> None:
    """Anybody with CREATEDB may make a database of any name, and what is in it runs as who restores."""
    own = maintenance_of(place, 0)
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.LOADING, SHARDS)
        record = place.comments
        with psycopg.connect(own) as connection:
            ((text,),) = connection.execute(
                "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = %s",
                (loading_of(place, 0),),
            ).fetchall()
        assert '"phase": "loading"' in text
        abandon(place)
        assert record() == []
        theirs = f"{DATABASE}_restoring_0123456789"
        text = text.replace("loading", "finished").replace("'", "''")
        execute(own, "CREATE ROLE mallory LOGIN CREATEDB", f"CREATE DATABASE {theirs} OWNER mallory")
        execute(own, f"COMMENT ON DATABASE {theirs} IS '{text}'")
        execute(own, f"ALTER DATABASE {DATABASE} OWNER TO mallory", f"COMMENT ON DATABASE {DATABASE} IS '{text}'")
        try:
            with pytest.raises(UnfinishedRestoreError, match="no restore"):
                resume(place)
            watching = Watching()
            restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), watching)
            notes = [one for one in watching.notes if "belongs to role mallory, and is left alone" in one]
            assert [one.split()[2] for one in notes] == [DATABASE, theirs]
            assert place.states() == ["new"] * SHARDS
            assert theirs in place.databases()
        finally:
            execute(own, f"DROP DATABASE {theirs}", "REASSIGN OWNED BY mallory TO CURRENT_USER", "DROP ROLE mallory")


def test_a_published_database_without_its_record_keeps_both_ends_from_lying(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, 2)
        shard = place.states().index("new")
        execute(maintenance_of(place, shard), f"COMMENT ON DATABASE {DATABASE} IS 'production'")
        before = place.databases()
        for end in (abandon, resume):
            with pytest.raises(UnfinishedRestoreError, match="its comment is gone, which was its record") as raised:
                end(place)
        assert place.databases() == before
        assert len(open_restores(place)) == 1
        (aside,) = [one for one in place.databases_of(place.target.primaries[shard]) if "_before_" in one]
        assert f"give {aside} its name again" in raised.value.hint
        execute(
            maintenance_of(place, shard), f"DROP DATABASE {DATABASE}", f"ALTER DATABASE {aside} RENAME TO {DATABASE}"
        )
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_old(place)


def test_an_undo_opens_databases_also_where_nothing_else_is_left(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CLOSED)
        for shard in range(SHARDS):
            # As after a kill: the process that loses a node opens them.
            execute(maintenance_of(place, shard), f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        execute(maintenance_of(place, 1), f'DROP DATABASE "{loading_of(place, 1)}"')
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_old(place)


def test_an_undo_that_is_cut_off_at_the_end_is_no_restore_that_has_published(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision to publish stays in the store, whatever becomes of the databases."""

    def lose(*_: object) -> None:
        raise NodeUnreachableError("node s2: it is gone")

    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, 2)
        (operation,) = open_restores(place)
        with monkeypatch.context() as patch:
            patch.setattr("restore.undoing.abandoning.drop_database", lose)
            with pytest.raises(NodeUnreachableError):
                abandon_restore(place.fleet, place.target, NAME, print, Silent())
        outcome = read_outcome(place.fleet.store.open(), operation)
        assert outcome is not None
        assert (outcome.state, outcome.reason) == ("failed", "abandoned")
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_old(place)


def test_a_filled_database_that_is_gone_keeps_both_ends_from_lying(place: Place) -> None:
    with tables_to_fill(place):
        leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
        execute(maintenance_of(place, 1), f"ALTER DATABASE {DATABASE} RENAME TO hidden", f"CREATE DATABASE {DATABASE}")
        try:
            for end in (abandon, resume):
                with pytest.raises(UnfinishedRestoreError, match=f"kept in database {DATABASE} is gone"):
                    end(place)
            assert len(open_restores(place)) == 1
        finally:
            execute(
                maintenance_of(place, 1), f"DROP DATABASE {DATABASE}", f"ALTER DATABASE hidden RENAME TO {DATABASE}"
            )
        abandon(place)
        assert_empty(place)
