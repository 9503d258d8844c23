"""What others do with tables while `restore --data-only` fills them."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from time import monotonic, sleep

import psycopg
import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.rows.filled_tables import TablesUnfitError
from cutline.restore.rows.held_tables import ALTERING, LOOK_SECONDS, SECONDS_MAX, STOP_SECONDS_MAX, refusing_waiting
from cutline.restore.rows.load import LoadError, TablesInUseError
from cutline.restore.rows.references import ForeignKeyViolatedError
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.watching import Watching
from tests.integration.refusing import execute
from tests.integration.restoring.ending import abandon, resume
from tests.integration.restoring.filled import (
    REQUEST,
    acting_at,
    assert_empty,
    assert_filled,
    in_use_by,
    leave,
    load,
    rows_of,
)
from tests.integration.restoring.target_place import NAME, SHARDS, Place


def test_nobody_alters_the_tables_while_they_are_filled(place: Place, filled: Node) -> None:
    refused: list[str] = []

    def alter() -> None:
        for statement in (
            "ALTER TABLE log RENAME TO mine",
            "ALTER TABLE log DISABLE TRIGGER refuse",
            "CREATE RULE keep AS ON DELETE TO log DO INSTEAD NOTHING",
            "DROP TABLE log",
        ):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                execute(filled.dsn, f"SET lock_timeout = 100; {statement}")
            refused.append(statement)

    load(place, acting_at(RestoreCrashPoint.LOADING, alter, SHARDS))
    assert len(refused) == 4
    assert_filled(place)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE log ENABLE ALWAYS TRIGGER refuse", 'trigger refuse of public.log'),
        ("CREATE RULE keep AS ON DELETE TO log DO INSTEAD NOTHING; ALTER TABLE log ENABLE REPLICA RULE keep",
         "rule keep of public.log"),
        ("ALTER TABLE log ALTER what TYPE varchar", "public.log.what is character varying instead of text"),
    ],
)  # fmt: skip
def test_what_is_altered_before_they_are_locked_is_found(place: Place, filled: Node, statement: str, said: str) -> None:
    with pytest.raises(TablesUnfitError, match=said):
        load(place, acting_at(RestoreCrashPoint.INTENT_STORED, lambda: execute(filled.dsn, statement)))
    assert rows_of(filled.dsn) == {"public.log": b"", "public.item": b""}


def wait_then(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act when the restore waits for writers."""

    def wait(seconds: float) -> None:
        act()
        sleep(seconds)

    monkeypatch.setattr("cutline.restore.rows.held_tables.sleep", wait)


def test_a_row_that_is_being_deleted_at_the_other_end_of_a_key_is_waited_for(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the table that refers to it is empty, nothing forbids it."""
    with psycopg.connect(filled.dsn) as other:
        wait_then(monkeypatch, other.commit)
        with pytest.raises(ForeignKeyViolatedError, match=r"\(n\) = \(1\) references a missing row of public.kind"):
            load(
                place,
                acting_at(RestoreCrashPoint.LOADING, lambda: other.execute("DELETE FROM kind WHERE id = 1"), SHARDS),
            )
    execute(filled.dsn, "INSERT INTO kind VALUES (1)")
    assert_empty(place)


def test_rows_that_are_being_inserted_when_it_begins_are_waited_for_and_kept(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until their transactions have ended the tables look empty; they are not called empty again."""
    with ExitStack() as stack:
        others = [stack.enter_context(psycopg.connect(dsn)) for dsn in place.dsns()]
        for other in others:
            other.execute("INSERT INTO item (id, n) VALUES (999, 1)")
        wait_then(monkeypatch, lambda: [other.commit() for other in others])
        watching = Watching()
        with pytest.raises(TablesUnfitError, match=r"node s[123]: .*are no longer empty: public\.item"):
            load(place, watching)
    assert not [one for one in watching.notes if "the restore was undone" in one]
    assert rows_of(filled.dsn)["public.item"] == b"999\t1\t\\N\n"


@pytest.mark.usefixtures("filled")
def test_a_row_that_was_added_before_a_restore_is_resumed_is_found(place: Place) -> None:
    leave(place, RestoreCrashPoint.INDEXING, 1)
    # At least one has not come further.
    for one in place.target.primaries:
        execute(one.dsn, "SET session_replication_role = replica; INSERT INTO log VALUES ('theirs')")
    with pytest.raises(LoadError, match=r"table public\.log has"):
        resume(place)
    for one in place.target.primaries:
        execute(one.dsn, "DELETE FROM log WHERE what = 'theirs'")
    resume(place)
    assert_filled(place)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_a_transaction_that_does_not_end_is_named_and_nothing_is_lost(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch, *, is_prepared: bool
) -> None:
    monkeypatch.setattr("cutline.restore.rows.held_tables.WRITERS_SECONDS_MAX", 1)
    with psycopg.connect(filled.dsn, autocommit=True) as other:
        other.execute("BEGIN")

        def write() -> None:
            other.execute("UPDATE kind SET id = 1 WHERE id = 1")
            if is_prepared:
                other.execute("PREPARE TRANSACTION 'theirs'")

        pid = other.info.backend_pid
        who = (
            r"prepared transactions \(see pg_prepared_xacts\)" if is_prepared else f"open transactions of session {pid}"
        )
        with pytest.raises(TablesInUseError, match=f"node s2: .*{who} wrote to them") as raised:
            load(place, acting_at(RestoreCrashPoint.LOADING, write, SHARDS))
        other.execute("ROLLBACK PREPARED 'theirs'" if is_prepared else "ROLLBACK")
    assert f"snapshot restore-resume {NAME}" in raised.value.hint
    resume(place)
    assert_filled(place)


def test_a_session_that_waits_to_alter_a_table_does_not_stop_everybody(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it the load waits, too, for which it waits itself."""
    monkeypatch.setitem(SECONDS_MAX, ALTERING, 2)
    altering = threading.Thread(target=execute, args=(filled.dsn, "ALTER TABLE log ADD CHECK (true)"))
    with pytest.raises(TablesInUseError, match=r"node s2: .*session [0-9]+ waited to alter them") as raised:
        load(place, acting_at(RestoreCrashPoint.LOADING, altering.start, SHARDS))
    assert f"snapshot restore-resume {NAME}" in raised.value.hint
    altering.join()
    resume(place)
    assert_filled(place)


def test_a_restore_that_has_lost_its_locks_is_not_finished(place: Place, filled: Node) -> None:
    end = (
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks"
        " WHERE relation = 'log'::regclass AND mode = 'ShareUpdateExclusiveLock'"
    )
    with pytest.raises(NodeUnreachableError):
        load(place, acting_at(RestoreCrashPoint.ROWS_LOADED, lambda: execute(filled.dsn, end)))
    resume(place)
    assert_filled(place)


def test_statistics_that_are_asked_for_stay(place: Place, filled: Node) -> None:
    load(place, request=replace(REQUEST, scope=structs.replace(REQUEST.scope, analyze=True)))
    with psycopg.connect(filled.dsn) as connection:
        query = "SELECT tablename, count(*) FROM pg_stats WHERE schemaname = 'public' GROUP BY 1"
        found = dict(connection.execute(query).fetchall())
    assert {"log": 1, "item": 5}.items() <= found.items()
    assert_filled(place)


def test_functions_that_others_planted_are_not_called(place: Place, filled: Node) -> None:
    """They would match better than those of pg_catalog, and run as the role that restores."""
    planted = [
        f"CREATE FUNCTION {one} LANGUAGE plpgsql AS $$BEGIN RAISE 'a planted function ran'; END$$"
        for one in (
            "convert_from(bytea, text) RETURNS text",
            "format(text, name, name) RETURNS text",
            "unnest(int[], bigint[]) RETURNS TABLE (a int, b bigint)",
            "set_config(text, varchar, boolean) RETURNS text",
        )
    ]
    # Its function has no search_path of its own, so the table is loaded with another path than the rest.
    checked = "CREATE FUNCTION ours(text) RETURNS bool LANGUAGE sql AS 'SELECT true'"
    for dsn in place.dsns():
        execute(dsn, *planted, checked, "ALTER TABLE log ADD CHECK (ours(what))")
    load(place, request=replace(REQUEST, scope=structs.replace(REQUEST.scope, analyze=True)))
    with psycopg.connect(filled.dsn) as connection:
        query = "SELECT count(*) FROM pg_stats WHERE schemaname = 'public' AND tablename = 'log'"
        assert connection.execute(query).fetchone() == (1,)
    assert_filled(place)


def test_rows_in_a_schema_that_took_the_name_of_another_are_noticed(place: Place, filled: Node) -> None:
    """A schema can be renamed whatever locks there are on its tables."""
    copies = "; ".join(
        f"CREATE TABLE public.{table} (LIKE real.{table} INCLUDING ALL)"
        for table in ("log", "item", "account", "transfer")
    )
    replica = "SET session_replication_role = replica"
    exchange = f"{replica}; ALTER SCHEMA public RENAME TO real; CREATE SCHEMA public; {copies}"
    with pytest.raises(TablesUnfitError, match=r"node s2: .*were replaced after the restore began to fill them"):
        load(place, acting_at(RestoreCrashPoint.LOADING, lambda: execute(filled.dsn, exchange), SHARDS))
    execute(filled.dsn, f"{replica}; DROP SCHEMA public CASCADE; ALTER SCHEMA real RENAME TO public")
    abandon(place)
    assert_empty(place)


def test_tables_at_the_other_ends_of_keys_are_not_waited_for_without_end(
    place: Place, filled: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.restore.rows.references.LOCK_SECONDS_MAX", 1)

    def lock(other: psycopg.Connection) -> None:
        other.execute("LOCK TABLE kind IN ACCESS EXCLUSIVE MODE")

    # Rows are counted, and writers waited for, before this point.
    error = in_use_by(place, filled.dsn, lock, RestoreCrashPoint.INDEXING)
    assert re.match(r"node s2: .*at the other ends of their foreign keys", error.message)
    resume(place)
    assert_filled(place)


def test_a_node_that_does_not_answer_keeps_no_block_from_ending(filled: Node) -> None:
    with psycopg.connect(filled.dsn, autocommit=True) as held:
        try:
            with refusing_waiting([(filled, held)], print):
                os.kill(held.info.backend_pid, signal.SIGSTOP)
                sleep(2 * LOOK_SECONDS)
                began = monotonic()
            assert monotonic() - began < 2 * STOP_SECONDS_MAX
        finally:
            os.kill(held.info.backend_pid, signal.SIGCONT)
