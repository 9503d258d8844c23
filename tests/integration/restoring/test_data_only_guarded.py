"""What others prepare against `restore --data-only`: their code, their locks, and copies of what it keeps."""

from __future__ import annotations

import re

import psycopg
import pytest

import cutline.snapshots.operations.leases
from cutline.fleet.config import Node
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.rows.filling import find_fillings
from cutline.restore.rows.held_tables import BLOCKING, SECONDS_MAX
from cutline.restore.rows.load import TablesInUseError
from cutline.restore.run.preview import preview_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import abandon_restore
from cutline.restore.unfinished.unfinished import UnfinishedRestoreError
from cutline.snapshots.operations.operation import PUBLISH, decide_restore
from cutline.snapshots.records.operation_records import read_intent
from cutline.storage.errors import SnapshotError
from cutline.storage.store import StoreUnreachableError
from tests.commands.in_process import run_here
from tests.integration.refusing import execute
from tests.integration.restoring.ending import abandon, resume
from tests.integration.restoring.filled import REQUEST, assert_empty, assert_filled, in_use_by, leave, load
from tests.integration.restoring.target_place import (
    NAME,
    SHARDS,
    Place,
    await_sessions_over,
    drop_databases,
    open_restores,
    restore_killed,
)

FUNCTION = "CREATE FUNCTION theirs({}) RETURNS bool LANGUAGE plpgsql IMMUTABLE AS 'BEGIN RETURN true; END'"


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            [FUNCTION.format("int"), "CREATE DOMAIN counted AS int CHECK (theirs(VALUE))", "RESET ROLE",
             "ALTER TABLE item ADD more_of_it counted[]"],
            ["function public.theirs(integer) of guest", "type public.counted of guest",
             "type public.counted[] of guest"],
        ),
        (
            [FUNCTION.format("text"), "RESET ROLE", "ALTER TABLE log ADD CHECK (theirs(what))"],
            ["function public.theirs(text) of guest"],
        ),
        (
            [FUNCTION.format("text"), "RESET ROLE", "SET session_replication_role = replica",
             "CREATE TABLE parted (what text) PARTITION BY LIST (theirs(what))",
             "ALTER TABLE parted ATTACH PARTITION log DEFAULT"],
            ["function public.theirs(text) of guest"],
        ),
        (
            ["CREATE DOMAIN theirs_too AS int", "RESET ROLE", "CREATE DOMAIN own AS int CHECK (VALUE::theirs_too > 0)",
             "CREATE TYPE pair AS (one int, other own)", "ALTER TABLE log ADD pair pair"],
            ["type public.theirs_too of guest"],
        ),
        (
            ["CREATE DOMAIN theirs_too AS text", "RESET ROLE", "CREATE INDEX ON log (((what::theirs_too)::text))"],
            ["type public.theirs_too of guest"],
        ),
        (
            ["CREATE FUNCTION theirs(text, text) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT bttextcmp($1, $2)'",
             "RESET ROLE", "CREATE OPERATOR CLASS ours FOR TYPE text USING btree AS OPERATOR 1 <, OPERATOR 2 <=,"
             " OPERATOR 3 =, OPERATOR 4 >=, OPERATOR 5 >, FUNCTION 1 theirs(text, text)",
             "CREATE INDEX ON log (what ours)"],
            ["function public.theirs(text,text) of guest"],
        ),
        (
            ["CREATE FUNCTION theirs(ours) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT 1'", "RESET ROLE",
             "CREATE CAST (ours AS int) WITH FUNCTION theirs(ours) AS IMPLICIT",
             "SET session_replication_role = replica", "CREATE TABLE naming (one ours REFERENCES item)"],
            ["function public.theirs(public.ours) of guest"],
        ),
        (
            ["CREATE TYPE theirs AS (n int)",
             "CREATE FUNCTION theirs_to(theirs) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1.n'",
             "CREATE CAST (theirs AS int) WITH FUNCTION theirs_to(theirs) AS IMPLICIT", "RESET ROLE",
             "SET session_replication_role = replica", "CREATE TABLE naming (one theirs REFERENCES item)"],
            ["function public.theirs_to(public.theirs) of guest", "type public.theirs of guest"],
        ),
        (
            [FUNCTION.format("text"), "RESET ROLE",
             "CREATE FUNCTION ours(text) RETURNS bool IMMUTABLE LANGUAGE sql BEGIN ATOMIC SELECT theirs($1); END",
             "ALTER TABLE log ADD CHECK (ours(what))"],
            ["function public.theirs(text) of guest"],
        ),
    ],
    ids=["domain", "function", "partition key", "cast", "index", "operator class", "cast function", "key", "body"],
)  # fmt: skip
def test_code_of_a_role_that_owns_no_restored_table_is_not_run(
    place: Place, filled: Node, made: list[str], said: list[str]
) -> None:
    """Whoever owns them may have them do anything at any time."""
    execute(filled.dsn, "CREATE ROLE guest", "GRANT CREATE ON SCHEMA public TO guest")
    try:
        execute(filled.dsn, "CREATE TYPE ours AS (n int)", "SET ROLE guest", *made)
        with pytest.raises(SnapshotError) as raised:
            preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())
        assert f"code of roles that own no restored table: {', '.join(said)}" in raised.value.message
        execute(filled.dsn, "REASSIGN OWNED BY guest TO postgres")
        preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())
    finally:
        drop_databases(place)
        execute(filled.dsn.replace("/shop", "/postgres"), "DROP OWNED BY guest", "DROP ROLE guest")


def test_a_cast_that_anybody_may_make_refuses_nothing(place: Place, filled: Node) -> None:
    """From a type of their own to that of a key: nothing here runs it."""
    execute(filled.dsn, "CREATE ROLE guest", "GRANT CREATE ON SCHEMA public TO guest")
    made = [
        "CREATE TYPE theirs AS (n int)",
        "CREATE FUNCTION theirs_to(theirs) RETURNS int IMMUTABLE LANGUAGE sql AS 'SELECT $1.n'",
        "CREATE CAST (theirs AS int) WITH FUNCTION theirs_to(theirs) AS IMPLICIT",
    ]
    try:
        execute(filled.dsn, "SET ROLE guest", *made)
        preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())
    finally:
        drop_databases(place)
        execute(filled.dsn.replace("/shop", "/postgres"), "DROP OWNED BY guest", "DROP ROLE guest")


def lock_sequence(other: psycopg.Connection) -> None:
    other.execute("ALTER SEQUENCE numbers CYCLE")


def test_who_keeps_rows_from_being_loaded_is_named(place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """COPY waits for a transaction that has inserted the same key."""
    monkeypatch.setitem(SECONDS_MAX, BLOCKING, 2)
    others: list[int] = []

    def insert(other: psycopg.Connection) -> None:
        others.append(other.info.backend_pid)
        other.execute("INSERT INTO account SELECT id, 1 FROM generate_series(10001, 20000) AS id")

    error = in_use_by(place, filled.dsn, insert, RestoreCrashPoint.LOADING, SHARDS)
    assert f"session {others[0]} blocked the load" in error.message
    assert error.message.startswith("node s2: ")
    assert f"snapshot restore-resume {NAME}" in error.hint
    resume(place)
    assert_filled(place)


def test_a_locked_sequence_is_not_waited_for_without_end(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.restore.run.loading.LOCK_SECONDS_MAX", 1)
    error = in_use_by(place, filled.dsn, lock_sequence, RestoreCrashPoint.DECIDED)
    assert re.match(r"node s2: .*or on sequences, for 1 s", error.message)
    assert "restore-abandon" not in error.hint
    resume(place)
    assert_filled(place)


def test_a_dry_run_waits_for_a_locked_table_for_a_bounded_time(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.restore.run.loading.LOCK_SECONDS_MAX", 1)
    with psycopg.connect(filled.dsn) as other:
        other.execute("LOCK TABLE account")
        with pytest.raises(TablesInUseError, match=r"node s2: .*held locks on .* for 1 s"):
            preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())


def test_resume_does_not_set_a_sequence_again(place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application may have taken values since: they must not come twice."""
    monkeypatch.setattr("cutline.restore.run.loading.LOCK_SECONDS_MAX", 1)
    in_use_by(place, filled.dsn, lock_sequence, RestoreCrashPoint.DECIDED)
    first = place.dsns()[0]
    # The snapshot has 99.
    execute(first, "SELECT nextval('numbers')")
    resume(place)
    with psycopg.connect(first) as connection:
        assert connection.execute("SELECT nextval('numbers')").fetchone() == (101,)


@pytest.mark.parametrize("is_stored", [True, False], ids=["writable", "read-only"])
def test_what_the_restore_kept_is_not_waited_for_without_end(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch, *, is_stored: bool
) -> None:
    """Such as by a pg_dump of the database, which locks every table."""
    monkeypatch.setattr("cutline.restore.rows.filling.LOCK_SECONDS_MAX", 1)

    def refuse(*_: object) -> None:
        raise StoreUnreachableError(url="s3://x", reason="403 AccessDenied")

    def dump(other: psycopg.Connection) -> None:
        ((suffix, _),) = find_fillings(other)[0].items()
        other.execute(f"LOCK TABLE cutline_restoring_{suffix}.ledger IN ACCESS SHARE MODE".encode())

    if not is_stored:
        monkeypatch.setattr(cutline.snapshots.operations.leases, "begin", refuse)
    error = in_use_by(place, filled.dsn, dump, RestoreCrashPoint.DECIDED)
    assert (open_restores(place) != []) == is_stored
    # That of the first node, with the decision if the store has none, is removed by now.
    with pytest.raises(UnfinishedRestoreError, match="has decided to keep its rows, so it can't be undone"):
        abandon(place)
    with pytest.raises(UnfinishedRestoreError) as raised:
        load(place)
    assert "restore-abandon" not in raised.value.hint
    assert re.match(r"node s2: the rows are restored, but .* held locks on its tables for 1 s", error.message)
    assert f"snapshot restore-resume {NAME}" in error.hint
    resume(place)
    assert_filled(place)


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("closed", "said"), [(1, "so it is unknown what the restore left there"), (SHARDS, "no unfinished restore")]
)
def test_nothing_is_said_of_rows_in_a_database_that_refuses_our_role(place: Place, closed: int, said: str) -> None:
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    shut = place.target.primaries[:closed]
    maintenance = {node.id: node.dsn.replace("/shop", "/postgres") for node in shut}
    for dsn in maintenance.values():
        execute(dsn, "ALTER DATABASE shop ALLOW_CONNECTIONS false")
    try:
        for end in (abandon, resume):
            with pytest.raises(UnfinishedRestoreError, match=said):
                end(place)
        assert len(open_restores(place)) == 1
    finally:
        for dsn in maintenance.values():
            execute(dsn, "ALTER DATABASE shop ALLOW_CONNECTIONS true")
    abandon(place)
    assert_empty(place)


def test_tables_of_others_are_not_read_to_warn_of_their_emptiness(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their owner could exchange the table for a view while we wait."""
    monkeypatch.setattr("cutline.restore.run.loading.LOCK_SECONDS_MAX", 1)
    execute(filled.dsn, "CREATE ROLE guest", "ALTER TABLE kind OWNER TO guest")
    try:
        with psycopg.connect(filled.dsn) as other:
            other.execute("LOCK TABLE kind")
            with pytest.raises(SnapshotError, match="can't be verified without running code of roles") as raised:
                preview_restore(plan_restore(place.fleet, place.target, REQUEST), Silent())
        assert "locked for" not in raised.value.message
    finally:
        drop_databases(place)
        execute(filled.dsn.replace("/shop", "/postgres"), "DROP ROLE guest")


def test_what_came_with_a_copy_of_another_database_is_not_acted_on(place: Place, filled: Node) -> None:
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    # As a copy of the database would have it.
    with psycopg.connect(filled.dsn, autocommit=True) as connection:
        ((suffix, _),) = find_fillings(connection)[0].items()
        for node in place.target.primaries:
            execute(node.dsn, f"UPDATE cutline_restoring_{suffix}.record SET place = '7/7'")
        assert find_fillings(connection) == (
            {}, [f"schema cutline_restoring_{suffix}, from a copy of another database"],
        )  # fmt: skip
        report = abandon_restore(place.fleet, place.target, NAME, print, Silent())
        # That the restore has left nothing here is recorded.
        assert (len(report.operations), report.emptied) == (1, [])
        assert connection.execute("SELECT count(*) > 0 FROM account").fetchone() == (True,)


def test_no_snapshot_is_taken_of_tables_that_are_half_filled(place: Place, filled: Node) -> None:
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    code, refused = run_here(place.target, "create", "half", "--dry-run")
    assert (code, refused["error"]) == (3, "node-unfit"), refused
    assert "belongs to an unfinished restore into existing tables" in refused["message"]
    assert f"snapshot --fleet {place.target.path} list" in refused["hint"]
    abandon(place)
    assert_empty(place)


def test_a_dry_run_of_resume_changes_nothing(place: Place, filled: Node) -> None:
    """Also where nothing is left of a restore, and the store still has it open."""
    restore_killed(place, RestoreCrashPoint.INTENT_STORED, 1, "--data-only")
    await_sessions_over(place)
    before = place.fleet.store.open().list("operations")
    code, refused = run_here(place.fleet, "restore-resume", NAME, "--to", str(place.target.path), "--dry-run")
    assert (code, refused["error"]) == (3, "nothing-unfinished")
    assert place.fleet.store.open().list("operations") == before
    code, _ = run_here(place.fleet, "restore-resume", NAME, "--to", str(place.target.path))
    assert code == 3
    assert len(place.fleet.store.open().list("operations")) == len(before) + 1


def test_a_decision_that_was_planted_in_the_store_keeps_nothing_from_being_undone(place: Place, filled: Node) -> None:
    """A restore decides only when all of its databases are finished."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    store = place.fleet.store.open()
    (operation,) = open_restores(place)
    assert decide_restore(store, read_intent(store, operation), PUBLISH) == PUBLISH
    abandon(place)
    assert_empty(place)
