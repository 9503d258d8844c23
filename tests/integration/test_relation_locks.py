"""A create that reads or publishes a locked relation waits for a bounded time, then names the holder of the lock.

The tests use a database of the shared fleet's first shard, where only their own sessions hold locks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, LiteralString

import psycopg
import pytest

import cutline.nodes.relation_locks as relation_locks
import cutline.snapshots.ddl.table_changes as schema_changes
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect
from cutline.nodes.groups import read_tables
from cutline.nodes.publications import ensure_publications
from cutline.nodes.sessions import open_sessions
from cutline.nodes.watch import watch_nodes
from cutline.snapshots.base_copy.copy_ranges import CopyDestination, CopyTask, PageRange, copy_ranges
from cutline.snapshots.base_copy.copy_slots import open_exported
from cutline.snapshots.base_copy.large_objects import LargeObjectTask, copy_large_objects
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.create.sequences import read_sequences
from cutline.snapshots.ddl.dump import dump_archive
from cutline.snapshots.ddl.fingerprint import read_fingerprint
from cutline.snapshots.ddl.table_changes import TableSelection, publish_new_tables, read_fleet_tables
from cutline.storage.errors import SnapshotError, error_of
from cutline.storage.location import StoreLocation
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

LOCK_SECONDS = 1.0
SEEN_SECONDS_MAX = 60
EXCLUSIVE = "LOCK TABLE held IN ACCESS EXCLUSIVE MODE"
SESSION, PREPARED = "session {pid} of postgres", "prepared transaction 'holding'"
OF_PRIMARY = "a transaction of its primary"
DESTINATION = CopyDestination("locked", "op", StoreLocation("memory://locked"))


@pytest.fixture(scope="module")
def own(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with database_on(shared_fleet, "held", tmp_path_factory.mktemp("held")) as fleet:
        execute(
            fleet.primaries[0].dsn, "CREATE TABLE held (id int PRIMARY KEY, number serial)",
            "CREATE MATERIALIZED VIEW filled AS SELECT 1 AS n", "SELECT lo_create(1)",
        )  # fmt: skip
        yield fleet


@pytest.fixture(autouse=True)
def short_lock_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relation_locks, "LOCK_SECONDS_MAX", LOCK_SECONDS)
    monkeypatch.setattr(schema_changes, "LOCK_SECONDS_MIN", LOCK_SECONDS)


def dump(fleet: Fleet) -> None:
    (node,) = fleet.primaries
    with watch_nodes([node]) as watch:
        assert b"held" in dump_archive(node, None, watch)


def copy(fleet: Fleet) -> None:
    """Copy the table on the last node, as a task of the base copy does."""
    node = fleet.nodes[-1]
    with connect(node) as connection, connect(node) as holder:
        (table,) = read_tables(connection, GroupRules())
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        (exported,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
        task = CopyTask(node, 0, exported, (PageRange(table.group, table.oid),), DESTINATION, 0)
        if problem := copy_ranges(task).problem:
            raise error_of(problem)


def copy_all_large_objects(fleet: Fleet) -> None:
    (node,) = fleet.primaries
    with connect(node) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        (exported,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
        if problem := copy_large_objects(LargeObjectTask(node, 0, exported, 0, None, DESTINATION)).problem:
            raise error_of(problem)


def read(fleet: Fleet) -> None:
    (node,) = fleet.primaries
    with connect(node) as connection:
        assert [one.name for one in read_sequences(node, connection, LOCK_SECONDS).sequences] == ["held_number_seq"]


def publish(fleet: Fleet) -> None:
    with open_sessions(fleet, fleet.primaries) as sessions:
        selection = TableSelection("0123abcd", GroupRules())
        ensure_publications(sessions.primaries["s1"], selection.fleet_id, [])
        publish_new_tables(sessions, read_fleet_tables(sessions, selection), selection, 0, Silent())
        sessions.primaries["s1"].execute("DROP PUBLICATION cutline_0123abcd, cutline_0123abcd_append_only")


def fingerprint(fleet: Fleet) -> None:
    (node,) = fleet.primaries
    with connect(node) as holder:
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        (exported,) = holder.execute("SELECT pg_export_snapshot()").fetchone() or ("",)
        with open_exported(node, exported) as connection:
            read_fingerprint(connection)


def init(fleet: Fleet) -> None:
    initialise(fleet, Silent())


Work = Callable[[Fleet], None]


def test_holders_are_named_although_another_relation_was_dropped_meanwhile(own: Fleet) -> None:
    (node,) = own.primaries
    with psycopg.connect(node.dsn) as holder:
        holder.execute(EXCLUSIVE)
        error = relation_locks.locked_error(node, "copying 2 tables", ["public.dropped", "public.held"])
        pid = holder.info.backend_pid
    assert error.details["holders"] == [f"public.held ({SESSION.format(pid=pid)})"]


@pytest.mark.parametrize(
    ("locking", "relation", "work", "what"),
    [
        (EXCLUSIVE, "public.held", dump, "reading the DDL"),
        # pg_dump itself locks only tables, but asks for the definition of a view.
        ("REFRESH MATERIALIZED VIEW filled", "public.filled", dump, "reading the DDL"),
        (EXCLUSIVE, "public.held", copy, "copying public.held"),
        ("TRUNCATE held RESTART IDENTITY", "public.held_number_seq", read, "reading sequences"),
        ("LOCK TABLE pg_largeobject IN ACCESS EXCLUSIVE MODE", "pg_largeobject", copy_all_large_objects,
         "copying large objects"),
        ("LOCK TABLE pg_seclabel IN ACCESS EXCLUSIVE MODE", "pg_seclabel", fingerprint, "reading the catalogs"),
        ("LOCK TABLE held IN SHARE MODE", "public.held", publish, "publishing new tables"),
        ("LOCK TABLE held IN SHARE MODE", "public.held", init, "publishing tables"),
    ],
)  # fmt: skip
def test_the_holder_of_a_lock_is_named(own: Fleet, locking: str, relation: str, work: Work, what: str) -> None:
    fleet = replace(own, nodes=own.primaries)
    with psycopg.connect(fleet.primaries[0].dsn) as holder:
        holder.execute(locking.encode())
        assert_named(fleet, work, what, f"{relation} ({SESSION.format(pid=holder.info.backend_pid)})")
        holder.rollback()
        work(fleet)


def assert_named(fleet: Fleet, work: Work, what: str, holders: str) -> None:
    with pytest.raises(SnapshotError) as raised:
        work(fleet)
    node = fleet.nodes[-1].id
    assert (
        raised.value.message
        == f"node {node}: {what} waited {2 if work is read else 1} s for a lock; held now: {holders}"
    )
    assert (raised.value.slug, raised.value.exit_code, raised.value.details["node"]) == ("relation-locked", 3, node)


def test_a_prepared_transaction_and_a_waiting_session_are_named(own: Fleet) -> None:
    fleet = replace(own, nodes=own.primaries)
    dsn = fleet.primaries[0].dsn
    with psycopg.connect(dsn, autocommit=True) as holder, psycopg.connect(dsn) as reader, psycopg.connect(dsn) as owner:
        execute(dsn, f"BEGIN; {EXCLUSIVE}; PREPARE TRANSACTION 'holding'")
        try:
            assert_named(fleet, copy, "copying public.held", f"public.held ({PREPARED})")
        finally:
            holder.execute("ROLLBACK PREPARED 'holding'")
        # A session that waits for a reader makes all later ones wait.
        reader.execute("SELECT FROM held")
        owner.execute("SELECT 1")
        owner.pgconn.send_query(EXCLUSIVE.encode())
        await_lock(dsn)
        who = f"public.held ({SESSION.format(pid=owner.info.backend_pid)}, which is waiting itself)"
        assert_named(fleet, dump, "reading the DDL", who)
        reader.rollback()
        while owner.pgconn.get_result():
            pass


def test_on_a_standby_the_holder_is_a_transaction_of_its_primary(own: Fleet) -> None:
    primary, standby = own.nodes
    with psycopg.connect(primary.dsn) as holder:
        holder.execute(EXCLUSIVE.encode())
        # A commit flushes the lock's WAL record, so the standby receives it.
        execute(primary.dsn, "SELECT pg_logical_emit_message(true, 'committed', '')")
        await_lock(standby.dsn)
        assert_named(own, copy, "copying public.held", f"public.held ({OF_PRIMARY})")


def await_lock(dsn: str) -> None:
    """Wait until a session holds or awaits an ACCESS EXCLUSIVE lock on the table."""
    query = "SELECT FROM pg_locks WHERE mode = 'AccessExclusiveLock' AND relation = 'held'::regclass"
    with psycopg.connect(dsn, autocommit=True) as connection:
        deadline = time.monotonic() + SEEN_SECONDS_MAX
        while not connection.execute(query.encode()).fetchall():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_publishing_a_table_ends_no_index_that_is_created_concurrently(
    own: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a statement waits for older snapshots while it holds a lock that publishing waits for."""
    monkeypatch.setattr(schema_changes, "LOCK_SECONDS_MIN", SEEN_SECONDS_MAX)
    (node,) = own.primaries
    with (
        psycopg.connect(node.dsn) as writer,
        psycopg.connect(node.dsn, autocommit=True) as indexing,
        psycopg.connect(node.dsn, autocommit=True) as watching,
        ThreadPoolExecutor(max_workers=2) as threads,
    ):
        writer.execute("INSERT INTO held VALUES (77)")
        indexed = threads.submit(indexing.execute, "CREATE INDEX CONCURRENTLY indexed ON held (number)")
        await_value(watching, "SELECT count(*) FROM pg_stat_progress_create_index WHERE phase LIKE 'waiting%'", 1)
        published = threads.submit(publish, own)
        await_value(watching, "SELECT count(*) FROM pg_locks WHERE relation = 'held'::regclass AND NOT granted", 1)
        writer.rollback()
        indexed.result(SEEN_SECONDS_MAX)
        published.result(SEEN_SECONDS_MAX)
        watching.execute("DROP INDEX indexed")


def await_value(session: psycopg.Connection[Any], query: LiteralString, value: int) -> None:
    deadline = time.monotonic() + SEEN_SECONDS_MAX
    while session.execute(query).fetchone() != (value,):
        assert time.monotonic() < deadline
        time.sleep(0.05)
