"""Nothing is called undone or done, and no database is dropped, because what another role or store has is not seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from cutline.fleet.config import Node
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.target import TargetUnfitError
from cutline.restore.unfinished.undoing import OldDatabaseMissingError, abandon_restore, discard_old
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.create.initialise import initialise
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready
from tests.integration.refusing import execute
from tests.integration.restoring.ending import abandon, restore_left, resume
from tests.integration.restoring.filled import assert_filled, leave, tables_to_fill
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    beside,
    maintenance_of,
    old_databases,
    open_restores,
)


@contextmanager
def role_guest(place: Place) -> Iterator[None]:
    for shard in range(SHARDS):
        execute(maintenance_of(place, shard), "CREATE ROLE guest")
    try:
        yield
    finally:
        for shard in range(SHARDS):
            execute(maintenance_of(place, shard), "REASSIGN OWNED BY guest TO postgres", "DROP ROLE guest")


def give(place: Place, shard: int, database: str, owner: str) -> None:
    execute(maintenance_of(place, shard), f'ALTER DATABASE "{database}" OWNER TO {owner}')


def test_a_restore_of_another_role_is_neither_undone_nor_done(place: Place) -> None:
    with role_guest(place), old_databases(place):
        restore_left(place, RestoreCrashPoint.CLOSED)
        (operation,) = open_restores(place)
        names = [beside(place, shard, "_restoring_") for shard in range(SHARDS)]
        for shard, name in enumerate(names):
            give(place, shard, name, "guest")
        before = place.databases()
        for end in (abandon, resume):
            with pytest.raises(UnfinishedRestoreError, match="there is no unfinished restore into these databases"):
                end(place)
        assert (place.databases(), open_restores(place)) == (before, [operation])
        # One of its databases is ours: what the other is, is not known.
        give(place, 0, names[0], "postgres")
        for end in (abandon, resume):
            with pytest.raises(UnfinishedRestoreError, match=f"{names[1]} on s2 belongs to role guest"):
                end(place)
        assert place.databases() == before
        for shard, name in enumerate(names):
            give(place, shard, name, "postgres")
        abandon(place)
        assert_old(place)


def test_an_old_database_that_another_role_needs_is_not_dropped(place: Place) -> None:
    with role_guest(place), old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED)
        states = place.states()
        names = [
            DATABASE if state == "new" else beside(place, shard, "_restoring_") for shard, state in enumerate(states)
        ]
        for shard, name in enumerate(names):
            give(place, shard, name, "guest")
        before = place.databases()
        with pytest.raises(UnfinishedRestoreError, match="by a restore that never finished"):
            discard_old(place.fleet, place.target, print, Silent())
        assert place.databases() == before
        for shard, name in enumerate(names):
            give(place, shard, name, "postgres")
        abandon(place)
        assert_old(place)


@pytest.mark.parametrize("is_filling", [False, True], ids=["databases", "data-only"])
def test_another_store_does_not_know_the_decision(place: Place, tmp_path: Path, *, is_filling: bool) -> None:
    other = replace(place.fleet, store=StoreLocation(f"file://{tmp_path}/store"))
    initialise(other, Silent())
    made = tables_to_fill(place) if is_filling else old_databases(place)
    with made:
        if is_filling:
            leave(place, RestoreCrashPoint.DECIDED, 1)
        else:
            restore_left(place, RestoreCrashPoint.RENAMED)
        with pytest.raises(UnfinishedRestoreError, match="belongs to a different store") as raised:
            abandon_restore(other, place.target, NAME, print, Silent())
        assert "pass the --fleet FILE" in raised.value.hint
        resume(place)
        if is_filling:
            assert_filled(place)
        else:
            assert_restored(place)


def test_a_copied_record_is_not_taken_for_one_that_a_rename_brought(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CLOSED)
        loading = beside(place, 0, "_restoring_")
        with psycopg.connect(maintenance_of(place, 0), autocommit=True) as connection:
            query = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = %s"
            (comment,) = connection.execute(query, (loading,)).fetchone() or ("",)
            connection.execute(f"COMMENT ON DATABASE {DATABASE} IS '{comment}'".encode())
        for end in (abandon, resume):
            with pytest.raises(
                UnfinishedRestoreError, match=f"two databases with its record: the comment of {DATABASE}"
            ) as raised:
                end(place)
        assert place.states() == ["old"] * SHARDS
        execute(maintenance_of(place, 0), raised.value.hint.partition(": ")[2])
        resume(place)
        assert_restored(place)


def test_a_prepared_transaction_in_a_published_database_is_named_before_it_is_undone(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED)
        shard = place.states().index("new")
        dsn = place.dsns()[shard]
        execute(dsn, "BEGIN; CREATE TABLE mine (id int); PREPARE TRANSACTION 'mine'")
        for _ in range(2):
            with pytest.raises(TargetUnfitError, match=r"it has 1 prepared transaction$"):
                abandon_restore(place.fleet, place.target, NAME, print, Silent())
        # It can be entered, to be decided; and nothing is marked, so that it can still be finished.
        execute(dsn, "ROLLBACK PREPARED 'mine'")
        resume(place)
        assert_restored(place)


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_old_database_that_is_lost_while_it_is_put_back_can_be_replaced(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, is_begun: bool
) -> None:
    def lose(*_: object) -> None:
        raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED)
        shard = place.states().index("new")
        if is_begun:
            with monkeypatch.context() as patch:
                patch.setattr("cutline.restore.unfinished.undoing.put_back", lose)
                with pytest.raises(NodeUnreachableError):
                    abandon_restore(place.fleet, place.target, NAME, print, Silent())
        execute(maintenance_of(place, shard), f'DROP DATABASE "{beside(place, shard, "_before_")}"')
        with pytest.raises(OldDatabaseMissingError, match="is missing") as raised:
            abandon_restore(place.fleet, place.target, NAME, print, Silent())
        if is_begun:
            execute(maintenance_of(place, shard), raised.value.hint.partition(": ")[2])
            abandon_restore(place.fleet, place.target, NAME, print, Silent())
            assert (place.databases(), open_restores(place)) == ({DATABASE}, [])
        else:
            assert raised.value.hint == f"to finish the restore instead: snapshot restore-resume {NAME}"
            resume(place)
            assert_restored(place)


def test_a_restore_on_a_server_that_may_be_another_one_is_not_taken_for_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A physical copy has the system identifier of the server that the restore was begun on."""
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CREATED)
        for shard in range(SHARDS):
            for name in place.databases_of(place.target.primaries[shard]):
                if "_restoring_" in name:
                    execute(maintenance_of(place, shard), f'DROP DATABASE "{name}"')
        (operation,) = open_restores(place)
        moved = tuple(replace(node, dsn=at_another_address(node)) for node in place.target.nodes)
        target = replace(place.target, nodes=moved)
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.unfinished.unfinished.start_of", lambda _: "another time")
            with pytest.raises(UnfinishedRestoreError, match="no unfinished restore into these databases"):
                resume_restore(place.fleet, target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert open_restores(place) == [operation]
        with pytest.raises(UnfinishedRestoreError, match="no unfinished restore into these databases"):
            resume_restore(place.fleet, target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert open_restores(place) == []


def at_another_address(node: Node) -> str:
    """The same folder by another path."""
    parent = Path(str(conninfo_to_dict(node.dsn)["host"])).parent.name
    return node.dsn.replace(f"/{node.id}&", f"/../{parent}/{node.id}&")
