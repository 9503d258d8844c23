"""What ends a restore unfinished, and what another process makes of what is left."""

from __future__ import annotations

from contextlib import suppress

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import cutline.restore.run.loading
import cutline.snapshots.operations.leases
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.swap import end_sessions
from cutline.restore.targets.waits import TargetBlockedError
from cutline.storage.store import StoreUnreachableError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Watching
from tests.integration.refusing import execute
from tests.integration.restoring.ending import REQUEST, abandon, restore_left, resume
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    NoSession,
    Place,
    assert_old,
    assert_restored,
    old_databases,
    open_restores,
    plain_restore,
)
from tests.run.soak import first


def test_a_restore_that_loses_a_node_is_kept_and_says_how_to_go_on(place: Place) -> None:
    with old_databases(place):
        error = restore_left(place, RestoreCrashPoint.LOADING, 2)
        assert "snapshot restore-resume daily" in error.hint
        assert place.states() == ["old"] * SHARDS
        code, listed = run_here(place.fleet, "list")
        (one,) = listed["open_operations"]
        assert (code, one["kind"], one["operation"]) == (0, "restore", error.details["unfinished"])
        found = plain_restore(place)
        assert found
        assert str(error.details["unfinished"]) in found.message
        resume(place)
        assert_restored(place)


@pytest.mark.parametrize("changed", first(["parts", "version"]))
def test_another_machine_goes_on_with_the_same_tasks_and_another_version_with_none(
    place: Place, changed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another number of partitions, tasks of the same names would load other rows."""
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.ROWS_LOADED)
        if changed == "parts":
            monkeypatch.setattr("cutline.restore.rows.jobs.count_parts", lambda *_, **__: 7)
        else:
            monkeypatch.setattr("cutline.restore.run.run.version", lambda _package: "another")
        made_again = resume(place).count(str(RestoreCrashPoint.CREATED))
        # Once as a mark that they are to be made, once to rehearse the DDL, and once to be filled.
        assert made_again == (0 if changed == "parts" else 3 * SHARDS)
        assert_restored(place)


@pytest.mark.parametrize("point", first([RestoreCrashPoint.INDEXING, RestoreCrashPoint.FINISHED]))
def test_rows_that_are_loaded_are_neither_loaded_nor_counted_again(
    place: Place, point: RestoreCrashPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    with old_databases(place):
        restore_left(place, point, SHARDS)
        monkeypatch.setattr(cutline.restore.run.loading, "count_rows", lambda *_: pytest.fail("rows were counted"))
        watching = Watching()
        # There is no Spark for it.
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), NoSession(), watching)
        assert str(RestoreCrashPoint.CREATED) not in [one.point for one in watching.reached_points]
        assert_restored(place)


def test_an_index_that_a_killed_restore_is_building_is_built_once(place: Place) -> None:
    """Its statement would go on at the server, and the same one of the next process would fail."""
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.INDEXING)
        for node in place.target.primaries:
            # The others may have built theirs.
            (loading,) = [name for name in place.databases_of(node) if "_restoring_" in name]
            building = psycopg.connect(with_database(node, loading).dsn)
            with suppress(psycopg.errors.DuplicateTable):
                building.execute("CREATE INDEX item_n_idx ON item (n)")
                break
        else:
            pytest.fail("all have built theirs")
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), NoSession(), Silent())
        building.close()
        assert_restored(place)


@pytest.mark.parametrize(
    "point", first([RestoreCrashPoint.ROWS_LOADED, RestoreCrashPoint.DECIDED, RestoreCrashPoint.RENAMED])
)
def test_a_restore_without_a_record_in_the_store_is_ended_by_what_the_targets_have(
    place: Place, monkeypatch: pytest.MonkeyPatch, point: RestoreCrashPoint
) -> None:
    """A store that accepts no writes refuses the intent."""

    def refuse(*_: object) -> None:
        raise StoreUnreachableError(url="s3://x", reason="403 AccessDenied")

    monkeypatch.setattr(cutline.snapshots.operations.leases, "begin", refuse)
    with old_databases(place):
        restore_left(place, point)
        assert open_restores(place) == []
        assert plain_restore(place)
        resume(place)
        assert_restored(place)
    with old_databases(place):
        restore_left(place, point)
        abandon(place)
        assert_old(place)


def test_what_can_not_be_put_aside_is_named_before_anything_is_decided_and_the_rows_stay(place: Place) -> None:
    with old_databases(place):
        prepared = place.target.primaries[-1]
        execute(prepared.dsn, "BEGIN; INSERT INTO old VALUES (2); PREPARE TRANSACTION 'mine'")
        try:
            assert plan_lines(place) == [
                f"node {place.target.primaries[-1].id}: database {DATABASE} has 1 prepared transaction"
            ]
            for end in (restore_anew, resume):
                with pytest.raises(
                    TargetBlockedError, match=r"can't be renamed: it has 1 prepared transaction$"
                ) as raised:
                    end(place)
                assert f"to finish it: snapshot restore-resume {NAME}" in raised.value.hint
                # The old databases can be entered, to decide the transaction.
                assert place.states() == ["old"] * SHARDS
        finally:
            execute(prepared.dsn, "ROLLBACK PREPARED 'mine'")
        resume(place)
        assert_restored(place)


def test_a_transaction_prepared_by_a_session_that_is_ended_is_found_before_anything_is_decided(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two checks: an application that is ended between both phases of its commit leaves it."""
    last = place.target.primaries[-1]

    def prepare_and_end(connection: psycopg.Connection, database: str) -> None:
        if connection.info.host == conninfo_to_dict(last.dsn)["host"] and database == DATABASE:
            session = sessions.pop()
            session.execute("PREPARE TRANSACTION 'mine'")
        end_sessions(connection, database)

    monkeypatch.setattr("cutline.restore.targets.swap.end_sessions", prepare_and_end)
    with old_databases(place):
        sessions = [psycopg.connect(last.dsn)]
        sessions[0].execute("INSERT INTO old VALUES (2)")
        try:
            with pytest.raises(TargetBlockedError, match=r"it has 1 prepared transaction$"):
                restore_anew(place)
            assert not sessions
            assert place.states() == ["old"] * SHARDS
        finally:
            execute(last.dsn, "ROLLBACK PREPARED 'mine'")
        abandon(place)
        assert_old(place)


def plan_lines(place: Place) -> list[str]:
    """Return what the plan says of prepared transactions, without what to do."""
    preview = preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())
    # The number may change until the user has confirmed what is replaced.
    assert not any("prepared" in line for line in preview.replaces)
    lines = preview.warnings
    return [line.partition("; ")[0] for line in lines if "prepared" in line]


def restore_anew(place: Place) -> None:
    restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())


def test_a_restore_that_has_recorded_nothing_is_named_once_when_it_is_undone(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database was made, and its process killed before it wrote the comment."""

    def lose(*_: object, **__: object) -> None:
        raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    with old_databases(place):
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.run.run.write_record", lose)
            patch.setattr("cutline.restore.run.run.drop_database", lose)
            with pytest.raises(NodeUnreachableError) as raised:
                restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        # What it offers is accepted.
        assert "restore-resume" not in raised.value.hint
        assert f"snapshot restore-abandon {NAME}" in raised.value.hint
        (operation,) = open_restores(place)
        assert abandon(place).operations == [operation]
        assert_old(place)
        assert open_restores(place) == []
