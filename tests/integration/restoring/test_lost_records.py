"""What a restore recorded is gone, or somebody else wrote it: nothing is acted on, and nothing is called undone."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import psycopg
import pytest

import cutline.snapshots.operations.leases
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_resumed
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.swap import RestoredMissingError, publish_database
from cutline.restore.targets.target import Target, TargetExistsError
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import NothingUnfinishedError, UnfinishedRestoreError
from cutline.snapshots.records.operation_records import read_outcome
from cutline.storage.store import StoreUnreachableError
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.ending import REQUEST, abandon, restore_left, resume
from tests.integration.restoring.filled import assert_filled, leave, tables_to_fill
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    beside,
    drop_databases,
    maintenance_of,
    old_databases,
    open_restores,
)

WITHOUT_REPLACE = RestoreRequest(NAME)


def refuse_writes(*_: object) -> None:
    raise StoreUnreachableError(url="s3://x", reason="403 AccessDenied")


def drop_in(hint: str) -> str:
    """The statement of a hint that drops a database."""
    (statement,) = re.findall("DROP DATABASE .*?;", hint)
    return str(statement)


def leave_marked(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin to undo the restore, and end before anything is renamed."""
    with monkeypatch.context() as patch:
        patch.setattr("cutline.restore.unfinished.undoing.put_back", lose)
        with pytest.raises(NodeUnreachableError):
            abandon_restore(place.fleet, place.target, NAME, print, Silent())


def lose(*_: object) -> None:
    raise NodeUnreachableError("node s2: it is gone")


def test_the_record_of_a_database_of_another_role_is_not_read(place: Place) -> None:
    """Anybody with CREATEDB may make a database of any name, and what is in it runs as who restores."""
    own = maintenance_of(place, 0)
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.LOADING, SHARDS)
        record = place.comments
        with psycopg.connect(own) as connection:
            ((text,),) = connection.execute(
                "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = %s",
                (beside(place, 0, "_restoring_"),),
            ).fetchall()
        assert '"phase": "loading"' in text
        abandon(place)
        assert record() == []
        theirs = f"{DATABASE}_restoring_012345678a"
        text = text.replace("loading", "finished").replace("'", "''")
        execute(own, "CREATE ROLE mallory LOGIN CREATEDB", f"CREATE DATABASE {theirs} OWNER mallory")
        execute(own, f"COMMENT ON DATABASE {theirs} IS '{text}'")
        execute(own, f"ALTER DATABASE {DATABASE} OWNER TO mallory", f"COMMENT ON DATABASE {DATABASE} IS '{text}'")
        try:
            with pytest.raises(UnfinishedRestoreError, match="no unfinished restore"):
                resume(place)
            watching = Watching()
            restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), watching)
            notes = [one for one in watching.notes if "belongs to role mallory, so it is left alone" in one]
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
            with pytest.raises(UnfinishedRestoreError, match="has no record of the restore") as raised:
                end(place)
        assert place.databases() == before
        assert len(open_restores(place)) == 1
        (aside,) = [one for one in place.databases_of(place.target.primaries[shard]) if "_before_" in one]
        loading = aside.replace("_before_", "_restoring_")
        # Its name alone is no leave to drop what users may have written to.
        execute(maintenance_of(place, shard), f"ALTER DATABASE {DATABASE} RENAME TO {loading}")
        for end in (resume, abandon):
            with pytest.raises(UnfinishedRestoreError, match=f"{loading} is named like .* and is not empty") as raised:
                end(place)
        execute(maintenance_of(place, shard), drop_in(raised.value.hint))
        abandon(place)
        assert_old(place)


def test_a_published_database_without_its_record_is_loaded_again_as_the_hint_says(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, 2)
        shard = place.states().index("new")
        execute(maintenance_of(place, shard), f"COMMENT ON DATABASE {DATABASE} IS 'production'")
        with pytest.raises(UnfinishedRestoreError) as raised:
            resume(place)
        assert "will lose later writes" in raised.value.hint
        execute(maintenance_of(place, shard), *re.findall("(?:DROP|CREATE) DATABASE .*?;", raised.value.hint))
        report = resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
        assert_restored(place)
        # That of the shard, too, whose old database the first process has set aside.
        assert sorted(one.partition(":")[0] for one in report.aside) == ["s1", "s2", "s3"]


def test_an_undo_goes_on_only_if_what_is_published_is_known(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """An undo that ended after its first step has marked all records, and renamed nothing back."""
    try:
        restore_left(place, RestoreCrashPoint.RENAMED, 2, WITHOUT_REPLACE)
        shard = next(number for number, state in enumerate(place.states()) if state == "new")
        leave_marked(place, monkeypatch)
        execute(maintenance_of(place, shard), f"COMMENT ON DATABASE {DATABASE} IS 'production'")
        before = place.databases()
        with pytest.raises(UnfinishedRestoreError, match=f"{DATABASE} has no record of the restore") as raised:
            abandon(place)
        assert place.databases() == before
        execute(maintenance_of(place, shard), drop_in(raised.value.hint))
        abandon(place)
        assert (place.databases(), open_restores(place)) == (set(), [])
    finally:
        drop_databases(place)


def test_an_undo_says_which_databases_it_takes_for_old_ones(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, 2)
        shard = place.states().index("new")
        leave_marked(place, monkeypatch)
        own = maintenance_of(place, shard)
        execute(own, f"DROP DATABASE {beside(place, shard, '_before_')}", f"COMMENT ON DATABASE {DATABASE} IS NULL")
        watching = Watching()
        abandon_restore(place.fleet, place.target, NAME, print, watching)
        (note,) = [one for one in watching.notes if "assumed to be the previous database" in one]
        assert note.startswith(f"node s{shard + 1}: database {DATABASE} ")


def test_old_databases_that_a_restore_has_closed_are_opened_as_the_hint_says(place: Place) -> None:
    """Somebody has dropped all that it made, so that the targets know nothing of it any more."""
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CLOSED)
        for shard in range(SHARDS):
            own = maintenance_of(place, shard)
            execute(own, f'DROP DATABASE "{beside(place, shard, "_restoring_")}"')
            # As after a kill: the process that loses a node opens them.
            execute(own, f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        for end in (resume, abandon):
            with pytest.raises(
                NothingUnfinishedError, match=f"database {DATABASE} on s1 does not accept conn"
            ) as raised:
                end(place)
        for shard in range(SHARDS):
            (statement,) = re.findall(
                rf"to open database {DATABASE} on s{shard + 1}, .*?: (ALTER .*;)", raised.value.hint
            )
            execute(maintenance_of(place, shard), statement)
        abandon(place)
        assert_old(place)


def test_a_closed_database_without_its_record_is_dropped_as_the_hint_says(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CLOSED)
        loading = beside(place, 0, "_restoring_")
        for name in (loading, DATABASE):
            execute(maintenance_of(place, 0), f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        execute(maintenance_of(place, 0), f"COMMENT ON DATABASE {loading} IS NULL")
        with pytest.raises(UnfinishedRestoreError, match=f"{loading} is named like .* and is not empty") as raised:
            abandon(place)
        execute(maintenance_of(place, 0), drop_in(raised.value.hint))
        abandon(place)
        assert_old(place)


def test_an_undo_opens_databases_also_where_nothing_else_is_left(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.CLOSED)
        for shard in range(SHARDS):
            # As after a kill: the process that loses a node opens them.
            execute(maintenance_of(place, shard), f"ALTER DATABASE {DATABASE} ALLOW_CONNECTIONS false")
        execute(maintenance_of(place, 1), f'DROP DATABASE "{beside(place, 1, "_restoring_")}"')
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_old(place)


def test_an_undo_that_is_cut_off_at_the_end_is_no_restore_that_has_published(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision to publish stays in the store, whatever becomes of the databases."""
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, 2)
        (operation,) = open_restores(place)
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.unfinished.undoing.drop_database", lose)
            with pytest.raises(NodeUnreachableError):
                abandon_restore(place.fleet, place.target, NAME, print, Silent())
        outcome = read_outcome(place.fleet.store.open(), operation)
        assert outcome is not None
        assert (outcome.state, outcome.reason) == ("failed", "abandoned")
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert_old(place)


def test_a_published_database_without_its_record_where_none_was_put_aside(place: Place) -> None:
    try:
        restore_left(place, RestoreCrashPoint.RENAMED, 2, WITHOUT_REPLACE)
        shard = next(number for number, state in enumerate(place.states()) if state == "new")
        execute(maintenance_of(place, shard), f"COMMENT ON DATABASE {DATABASE} IS 'production'")
        before = place.databases()
        for end in (resume, abandon):
            with pytest.raises(UnfinishedRestoreError, match=f"{DATABASE} has no record of the restore") as raised:
                end(place)
        assert (place.databases(), len(open_restores(place))) == (before, 1)
        execute(maintenance_of(place, shard), drop_in(raised.value.hint))
        abandon_restore(place.fleet, place.target, NAME, print, Silent())
        assert (place.databases(), open_restores(place)) == (set(), [])
    finally:
        drop_databases(place)


def test_a_published_database_that_is_gone_keeps_a_restore_from_being_called_done(place: Place) -> None:
    """As after a disk that failed: the server that answers is another one."""
    try:
        restore_left(place, RestoreCrashPoint.PUBLISHED, SHARDS, WITHOUT_REPLACE)
        execute(maintenance_of(place, 1), f"ALTER DATABASE {DATABASE} RENAME TO hidden")
        with pytest.raises(UnfinishedRestoreError, match="has published all databases"):
            abandon(place)
        with pytest.raises(
            UnfinishedRestoreError, match=f"node s2: database {DATABASE}, which the restore created, is"
        ):
            resume(place)
        assert len(open_restores(place)) == 1
        execute(maintenance_of(place, 1), f"ALTER DATABASE hidden RENAME TO {DATABASE}")
        resume(place)
        assert (place.states(), open_restores(place)) == (["new"] * SHARDS, [])
    finally:
        drop_databases(place)


def test_a_published_database_that_is_lost_for_good_is_given_up_as_the_hint_says(place: Place) -> None:
    try:
        restore_left(place, RestoreCrashPoint.PUBLISHED, SHARDS, WITHOUT_REPLACE)
        execute(maintenance_of(place, 1), f"DROP DATABASE {DATABASE}")
        with pytest.raises(UnfinishedRestoreError) as raised:
            resume(place)
        statement = re.search(r"on all other nodes: (COMMENT .*?;)   then restore it alone: (.*)", raised.value.hint)
        assert statement is not None
        assert statement[2] == f"snapshot restore {NAME} --node s2"
        for shard in (0, 2):
            execute(maintenance_of(place, shard), statement[1])
        alone = RestoreRequest(NAME, scope=RestoreScope(nodes=("s2",)))
        restore_fleet(plan_restore(place.fleet, place.target, alone), Ready(place.spark), Silent())
        assert place.states() == ["new"] * SHARDS
        with pytest.raises(UnfinishedRestoreError, match="there is no unfinished restore into these databases"):
            resume(place)
        assert open_restores(place) == []
    finally:
        drop_databases(place)


@pytest.mark.parametrize("is_filling", [False, True], ids=["databases", "data-only"])
def test_nodes_that_have_exchanged_addresses_are_named(place: Place, *, is_filling: bool) -> None:
    """Else rows of one shard would be loaded into the database of the other, and published under its name."""
    first, second, third = place.target.primaries
    nodes = (replace(first, dsn=second.dsn), replace(second, dsn=first.dsn), third)
    exchanged = replace(place.target, nodes=nodes)
    with tables_to_fill(place) if is_filling else old_databases(place):
        if is_filling:
            leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
        else:
            restore_left(place, RestoreCrashPoint.FINISHED, SHARDS)
        before = place.databases()
        for end in (
            lambda: resume_restore(place.fleet, exchanged, RestoreRequest(NAME), Ready(place.spark), Silent()),
            lambda: abandon_restore(place.fleet, exchanged, NAME, print, Silent()),
        ):
            with pytest.raises(UnfinishedRestoreError, match=r"its database .* on s1 belongs to shard s2, not to s1"):
                end()
        assert place.databases() == before
        resume(place)
        if is_filling:
            assert_filled(place)
        else:
            assert_restored(place)


@pytest.mark.parametrize("point", [RestoreCrashPoint.FINISHED, RestoreCrashPoint.CLOSED])
def test_a_database_that_was_made_meanwhile_is_not_put_aside_unasked(place: Place, point: RestoreCrashPoint) -> None:
    try:
        restore_left(place, point, 1, WITHOUT_REPLACE)
        execute(maintenance_of(place, 0), f"CREATE DATABASE {DATABASE}")
        with pytest.raises(TargetExistsError, match=f"database {DATABASE}") as raised:
            resume(place)
        assert "rename or drop it" in raised.value.hint
        with pytest.raises(TargetExistsError) as shown:
            preview_resumed(place.fleet, place.target, RestoreRequest(NAME), Silent())
        assert shown.value.message == raised.value.message
        assert not [name for name in place.databases() if "_before_" in name]
        execute(maintenance_of(place, 0), f"DROP DATABASE {DATABASE}")
        resume(place)
        assert place.states() == ["new"] * SHARDS
    finally:
        drop_databases(place)


def test_a_database_that_was_loaded_and_is_gone_is_named(place: Place) -> None:
    def drop(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(RestoreCrashPoint.FINISHED), SHARDS):
            execute(maintenance_of(place, 1), f'DROP DATABASE "{beside(place, 1, "_restoring_")}" WITH (FORCE)')

    with pytest.raises(RestoredMissingError, match=f"node s2: database {DATABASE}_restoring_.* is missing"):
        restore_fleet(plan_restore(place.fleet, place.target, WITHOUT_REPLACE), Ready(place.spark), Watching(drop))
    assert (place.databases(), open_restores(place)) == (set(), [])


@pytest.mark.parametrize("is_stored", [True, False], ids=["writable", "read-only"])
def test_what_was_published_first_is_not_forgotten_without_its_record(
    place: Place, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    """In a store that accepts no writes it has the decision, too. No old database says that it was published."""
    if not is_stored:
        monkeypatch.setattr(cutline.snapshots.operations.leases, "begin", refuse_writes)
    with old_databases(place):
        execute(maintenance_of(place, 0), f"DROP DATABASE {DATABASE}")

        def lose_others(target: Target, *more: Any) -> bool:
            if target.shard != "s1":
                lose()
            return publish_database(target, *more)

        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.run.restore.publish_database", lose_others)
            with pytest.raises(NodeUnreachableError):
                restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        assert place.states()[0] == "new"
        (suffix,) = {name.rpartition("_")[2] for name in place.databases() if "_restoring_" in name}
        execute(maintenance_of(place, 0), f"COMMENT ON DATABASE {DATABASE} IS 'production'")
        for end in (abandon, resume):
            with pytest.raises(UnfinishedRestoreError, match=r"node s1: .* has no record of the restore") as raised:
                end(place)
        assert f"if it is the previous database, rename it to {DATABASE}_before_{suffix}, then" in raised.value.hint
        execute(maintenance_of(place, 0), *re.findall("(?:DROP|CREATE) DATABASE .*?;", raised.value.hint))
        resume(place)
        assert_restored(place)


def test_an_old_database_whose_successor_is_gone_gets_its_name_back(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, 2)
        shard = place.states().index("new")
        execute(maintenance_of(place, shard), f"DROP DATABASE {DATABASE}")
        with pytest.raises(UnfinishedRestoreError, match="which the restore created, is missing"):
            resume(place)
        abandon(place)
        assert_old(place)
