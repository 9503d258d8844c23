"""Restores that are undone: what can be put back, who waits for whom, and which of two decisions counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest
from msgspec import structs

import cutline.snapshots.operations.leases
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError, database_name, with_database
from cutline.nodes.lock import FleetBusyError
from cutline.nodes.other_databases import read_old
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.ending import RestoreAbandonedError
from cutline.restore.run.preview import preview_resumed
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import REHEARSAL, RestoreCrashPoint
from cutline.restore.unfinished.undoing import OldDatabaseMissingError, abandon_restore, preview_abandon
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.records.end_marks import has_end
from cutline.snapshots.records.operation_records import read_decision
from cutline.storage.store import StoreUnreachableError
from cutline.wal.drain.slots import slot_name
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.ending import REQUEST, abandon, restore_left, resume
from tests.integration.restoring.target_place import (
    KILL_SECONDS_MAX,
    NAME,
    ROOT,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    drop_databases,
    old_databases,
    open_restores,
    plain_restore,
)
from tests.run.soak import first


def test_nothing_is_undone_unless_all_old_databases_can_be_put_back(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, SHARDS)
        gone = place.target.primaries[1]
        with psycopg.connect(with_database(gone, "postgres").dsn, autocommit=True) as connection:
            (old,) = read_old(gone, connection)
            connection.execute(f'DROP DATABASE "{old.database}"'.encode())
        with pytest.raises(OldDatabaseMissingError, match=old.database):
            abandon(place)
        assert place.states() == ["new"] * SHARDS
        resume(place)
        assert_restored(place)


def test_a_suspended_restore_that_was_undone_renames_nothing(place: Place) -> None:
    """Its sessions end while it is suspended: so another process may take its locks."""
    words = ["restore", NAME, "--to", str(place.target.path), "--replace", "--yes"]
    point = str(RestoreCrashPoint.CLOSED)
    program = [sys.executable, "-m", "tests.faults.signalled_command", "SIGSTOP", point, "1", "--"]
    with old_databases(place), subprocess.Popen(
        [*program, "--fleet", str(place.fleet.path), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, cwd=ROOT,
    ) as process:  # fmt: skip
        try:
            os.waitpid(process.pid, os.WUNTRACED)
            with pytest.raises(FleetBusyError, match="restore shop"):
                abandon(place)
            query = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE application_name ^@ 'cutline'"
            for node in place.target.primaries:
                execute(with_database(node, "postgres").dsn, query)
            abandon(place)
            assert place.states() == ["old"] * SHARDS
            process.send_signal(signal.SIGCONT)
            _, said = process.communicate(timeout=KILL_SECONDS_MAX)
        finally:
            process.kill()
        assert process.returncode not in (0, 70), said
        assert_old(place)
        store = place.fleet.store.open()
        last = sorted(one for one in store.list("operations/") if one.endswith("/decision.json"))[-1]
        decision = read_decision(store, last.split("/")[1])
        assert decision
        assert decision.decision == "abandon"


def test_the_decision_that_was_stored_first_counts(place: Place) -> None:
    """A restore that is undone while it closes the databases publishes none."""
    from cutline.snapshots.operations.operation import ABANDON, decide_restore

    plan = plan_restore(place.fleet, place.target, REQUEST)

    def then(reached: Reached) -> None:
        if reached.point == str(RestoreCrashPoint.CLOSED):
            assert decide_restore(place.fleet.store.open(), plan.intent, ABANDON) == ABANDON

    with old_databases(place):
        with pytest.raises(RestoreAbandonedError) as raised:
            restore_fleet(plan, Ready(place.spark), Watching(then))
        assert raised.value.exit_code == 7
        assert place.states() == ["old"] * SHARDS
        abandon(place)
        assert_old(place)


def test_an_undo_ends_the_chain_of_a_snapshot_of_what_was_published(place: Place) -> None:
    own, store = replace(place, target=place.fleet), place.fleet.store.open()
    restore_left(own, RestoreCrashPoint.RENAMED, SHARDS)
    try:
        chain = create_full(place.fleet, CreateRequest("meanwhile"), Ready(place.spark), Silent()).operation
        said, lines = preview_abandon(own.fleet, own.target, NAME, Silent())
    finally:
        report = abandon_restore(own.fleet, own.target, NAME, lambda _: None, Silent())
    assert len([line for line in lines if slot_name(chain) in line]) == SHARDS
    assert (
        said.slots_dropped
        == report.slots_dropped
        == [f"{node.id}: {slot_name(chain)}" for node in place.fleet.primaries]
    )
    assert has_end(store, "meanwhile", chain)


@pytest.mark.parametrize("end", first(["restore-resume", "restore-abandon --yes"]))
def test_a_restore_ends_as_a_whole(place: Place, tmp_path: Path, end: str) -> None:
    some = tmp_path / "some.toml"
    before, _, _ = place.target.path.read_text().rpartition("[[node]]")
    some.write_text(before)
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, SHARDS)
        code, document = run_here(place.fleet, *end.split(), NAME, "--to", str(some))
        assert (code, "s3" in document["message"]) == (2, True)
        assert place.states() == ["new"] * SHARDS
        abandon(place)
        assert_old(place)


def test_a_restore_whose_snapshot_is_deleted_can_be_undone_or_is_done(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_full(place.fleet, CreateRequest("brief"), Ready(place.spark), Silent())
    brief = structs.replace(REQUEST, name="brief")
    monkeypatch.setattr(cutline.snapshots.operations.leases.Lease, "is_running", lambda *_: False)
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.LOADING, SHARDS, brief)
        assert run_here(place.fleet, "delete", "brief", "--force", "--yes")[0] == 0
        assert len(open_restores(place)) == 1
        with pytest.raises(UnfinishedRestoreError, match=r"is deleted|was deleted") as raised:
            resume_restore(place.fleet, place.target, RestoreRequest("brief"), Ready(place.spark), Silent())
        assert "snapshot restore-abandon brief" in raised.value.hint
        abandon_restore(place.fleet, place.target, "brief", print, Silent())
        assert_old(place)
    create_full(place.fleet, CreateRequest("brief2"), Ready(place.spark), Silent())
    with old_databases(place):
        error = restore_left(place, RestoreCrashPoint.SLOTS_RELEASED, 1, structs.replace(REQUEST, name="brief2"))
        assert "restore-resume" in error.hint
        assert "restore-abandon" not in error.hint
        assert run_here(place.fleet, "delete", "brief2", "--force", "--yes")[0] == 0
        with pytest.raises(UnfinishedRestoreError, match="can't be undone"):
            abandon_restore(place.fleet, place.target, "brief2", print, Silent())
        with pytest.raises(UnfinishedRestoreError, match="can't be shown") as raised:
            preview_resumed(place.fleet, place.target, RestoreRequest("brief2"), Silent())
        assert raised.value.hint.split("\n")[0] == "to end it: snapshot restore-resume brief2"
        report = resume_restore(place.fleet, place.target, RestoreRequest("brief2"), Ready(place.spark), Silent())
        assert (report.rows > 0, len(report.aside)) == (True, SHARDS)
        assert place.comments() == []
        assert open_restores(place) == []


def test_the_end_of_a_published_restore_of_some_tables_names_the_others(place: Place) -> None:
    try:
        restore_left(place, RestoreCrashPoint.SLOTS_RELEASED, 1, RestoreRequest(NAME, groups=("public.item",)))
        code, text = run_and_capture(place.fleet, "restore-resume", NAME, "--to", str(place.target.path))
    finally:
        drop_databases(place)
    assert code == 0, text
    assert "left out: rows of 3 other tables on s2: public.account, public.log, public.transfer" in text


def test_the_end_of_a_published_restore_names_the_databases_set_aside(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.SLOTS_RELEASED, 1)
        code, text = run_and_capture(place.fleet, "restore-resume", NAME, "--to", str(place.target.path))
        assert code == 0, text
        # Nobody has taken snapshots of the databases that were set aside.
        assert "previous database kept: " in text
        assert "for further increments" not in text


def test_an_outcome_that_was_lost_is_recorded_by_the_next_command(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(*_: object, **__: object) -> None:
        raise StoreUnreachableError(url="s3://x", reason="503")

    with old_databases(place):
        with monkeypatch.context() as patch:
            patch.setattr(cutline.snapshots.operations.leases, "record_outcome", lose)
            restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        (operation,) = open_restores(place)
        with monkeypatch.context() as patch:
            patch.setattr("cutline.restore.unfinished.unfinished.record_outcome", lose)
            # A store that accepts no writes keeps nobody from restoring.
            assert plain_restore(place) is None
        assert (abandon(place).done, place.states()) == ([operation], ["new"] * SHARDS)
        assert_restored(place)


def test_what_users_may_have_entered_is_dropped_only_if_it_is_confirmed(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED, SHARDS)
        to = ("--to", str(place.target.path))
        code, refused = run_here(place.fleet, "restore-abandon", NAME, *to)
        assert (code, refused["error"]) == (2, "confirmation-missing")
        _, planned = run_here(place.fleet, "restore-abandon", NAME, *to, "--dry-run")
        assert "s1: database shop, which the restore published, will be dropped" in planned["to_confirm"]
        assert place.states() == ["new"] * SHARDS
        abandon(place)
        assert_old(place)


def test_an_undo_that_is_killed_can_only_be_repeated(place: Place) -> None:
    """When one of the restored databases is dropped, the restore can't be finished any more."""

    def then(reached: Reached) -> None:
        if reached.point == str(RestoreCrashPoint.ABANDONED):
            raise NodeUnreachableError("node s2: it is gone")

    with old_databases(place):
        restore_left(place, RestoreCrashPoint.RENAMED)
        with pytest.raises(NodeUnreachableError):
            abandon_restore(place.fleet, place.target, NAME, print, Watching(then))
        found = plain_restore(place)
        assert found
        assert "restore-resume" not in found.hint
        with pytest.raises(UnfinishedRestoreError, match="is being undone"):
            resume(place)
        abandon(place)
        assert_old(place)


def test_a_restore_that_ended_well_is_in_nobodys_way_before_its_records_are_removed(place: Place) -> None:
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.OUTCOME_STORED)
        assert len(place.comments()) == SHARDS
        assert plain_restore(place) is None
        with pytest.raises(UnfinishedRestoreError, match="no unfinished restore"):
            resume(place)


def test_a_database_is_not_dropped_for_its_name_alone(place: Place) -> None:
    """A restore gives its database a record before it creates anything in it."""
    node = place.target.primaries[0]
    loading = with_database(node, f"{database_name(node.dsn)}_restoring_abcdef0123")
    maintenance = with_database(node, "postgres").dsn
    with old_databases(place):
        execute(maintenance, f'CREATE DATABASE "{database_name(loading.dsn)}"')
        try:
            execute(loading.dsn, "CREATE TABLE mine (id int)")
            with pytest.raises(UnfinishedRestoreError, match="no record of a restore and is not empty") as raised:
                abandon(place)
            assert f'DROP DATABASE "{database_name(loading.dsn)}";' in raised.value.hint
            execute(loading.dsn, "SELECT FROM mine", "DROP TABLE mine")
            # As code of the source's owners can do it.
            execute(maintenance, f'ALTER DATABASE "{database_name(loading.dsn)}" IS_TEMPLATE true')
            assert abandon(place).dropped == [f"{node.id}: {database_name(loading.dsn)}"]
        finally:
            execute(maintenance, f'DROP DATABASE IF EXISTS "{database_name(loading.dsn)}"')


def test_what_a_killed_dry_run_leaves_is_dropped_by_the_next_one_and_by_a_restore(place: Place) -> None:
    node = place.target.primaries[0]
    name = f"{database_name(node.dsn)}_rehearsing_abcdef0123"
    maintenance = with_database(node, "postgres").dsn
    words = ("restore", NAME, "--to", str(place.target.path), "--replace", "--yes")
    with old_databases(place):
        for more in (("--dry-run",), ()):
            execute(maintenance, f'CREATE DATABASE "{name}"', f"COMMENT ON DATABASE \"{name}\" IS '{REHEARSAL}'")
            # Killed before it had its comment. One that another user has given such a name, and uses, stays.
            execute(maintenance, f'CREATE DATABASE "{name[:-1]}5"', f'CREATE DATABASE "{name[:-1]}4"')
            execute(with_database(node, f"{name[:-1]}4").dsn, "CREATE TABLE mine (id int)")
            assert run_here(place.fleet, *words, *more, spark=place.spark)[0] == 0
            with psycopg.connect(maintenance) as connection:
                found = connection.execute("SELECT datname FROM pg_database WHERE datname ~ '_rehearsing_'").fetchall()
            assert found == [(f"{name[:-1]}4",)]
            execute(maintenance, f'DROP DATABASE "{name[:-1]}4"')
