"""What others do with tables while `restore --data-only` fills them, and until it is undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import sleep

import psycopg
import pytest
from msgspec import structs

from fleet.config import Node
from fleet.nodes.connections import NodeUnreachableError, with_database
from fleet.progress import Silent
from restore.abandoning import abandon_restore
from restore.crash_points import RestoreCrashPoint
from restore.data_only.checker import TablesUnfitError
from restore.data_only.filling import TablesChangedError
from restore.data_only.references import ForeignKeyViolatedError, KeyUntrustedError
from restore.request import RestoreRequest
from restore.restore import resume_restore
from restore.rows.ledger import LoadError, TablesInUseError
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.filled import (
    REQUEST,
    assert_empty,
    assert_filled,
    leave,
    load,
    rows_of,
    tables_to_fill,
)
from tests.integration.restoring.target_place import NAME, SHARDS, Place, drop_databases


def at(point: RestoreCrashPoint, act: Callable[[], object], count: int = 1) -> Watching:
    """Act at the point."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(point), count):
            act()

    return Watching(then)


def resume(place: Place) -> None:
    resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())


def abandon(place: Place) -> None:
    abandon_restore(place.fleet, place.target, NAME, print, Silent())


@pytest.fixture
def node(place: Place) -> Iterator[Node]:
    """The second target, with tables to fill as all have."""
    with tables_to_fill(place):
        yield place.target.primaries[1]


def test_nobody_alters_the_tables_while_they_are_filled(place: Place, node: Node) -> None:
    refused: list[str] = []

    def alter() -> None:
        for statement in (
            "ALTER TABLE log RENAME TO mine",
            "ALTER TABLE log DISABLE TRIGGER refuse",
            "CREATE RULE keep AS ON DELETE TO log DO INSTEAD NOTHING",
            "DROP TABLE log",
        ):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                execute(node.dsn, f"SET lock_timeout = 100; {statement}")
            refused.append(statement)

    load(place, at(RestoreCrashPoint.LOADING, alter, SHARDS))
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
def test_what_is_altered_before_they_are_locked_is_found(place: Place, node: Node, statement: str, said: str) -> None:
    with pytest.raises(TablesUnfitError, match=said):
        load(place, at(RestoreCrashPoint.INTENT_STORED, lambda: execute(node.dsn, statement)))
    assert rows_of(node.dsn) == {"public.log": b"", "public.item": b""}


def wait_then(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Act when the restore waits for writers."""

    def wait(seconds: float) -> None:
        act()
        sleep(seconds)

    monkeypatch.setattr("restore.data_only.held_tables.sleep", wait)


def test_a_row_that_is_being_deleted_at_the_other_end_of_a_key_is_waited_for(
    place: Place, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the table that refers to it is empty, nothing forbids it."""
    with psycopg.connect(node.dsn) as other:
        wait_then(monkeypatch, other.commit)
        with pytest.raises(ForeignKeyViolatedError, match=r"\(n\) = \(1\) refers to none of public.kind"):
            load(place, at(RestoreCrashPoint.LOADING, lambda: other.execute("DELETE FROM kind WHERE id = 1"), SHARDS))
    execute(node.dsn, "INSERT INTO kind VALUES (1)")
    assert_empty(place)


def test_a_row_that_is_being_inserted_when_it_begins_is_waited_for_and_kept(
    place: Place, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until its transaction has ended the table looks empty."""
    with psycopg.connect(node.dsn) as other:
        other.execute("INSERT INTO item (id, n) VALUES (999, 1)")
        wait_then(monkeypatch, other.commit)
        with pytest.raises(TablesUnfitError, match=r"node s2: .*are not empty any more: public\.item"):
            load(place)
    assert rows_of(node.dsn)["public.item"] == b"999\t1\t\\N\n"


@pytest.mark.usefixtures("node")
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
    place: Place, node: Node, monkeypatch: pytest.MonkeyPatch, *, is_prepared: bool
) -> None:
    monkeypatch.setattr("restore.data_only.held_tables.WRITERS_SECONDS_MAX", 1)
    with psycopg.connect(node.dsn, autocommit=True) as other:
        other.execute("BEGIN")

        def write() -> None:
            other.execute("UPDATE kind SET id = 1 WHERE id = 1")
            if is_prepared:
                other.execute("PREPARE TRANSACTION 'theirs'")

        pid = other.info.backend_pid
        who = r"prepared transactions \(see pg_prepared_xacts\)" if is_prepared else f"sessions {pid}"
        with pytest.raises(TablesInUseError, match=f"node s2: .*{who} have open transactions that wrote") as raised:
            load(place, at(RestoreCrashPoint.LOADING, write, SHARDS))
        other.execute("ROLLBACK PREPARED 'theirs'" if is_prepared else "ROLLBACK")
    assert f"snapshot restore {NAME} --resume" in raised.value.hint
    resume(place)
    assert_filled(place)


def test_a_session_that_waits_to_alter_a_table_does_not_stop_everybody(
    place: Place, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it the load waits, too, for which it waits itself."""
    monkeypatch.setattr("restore.data_only.held_tables.WAITING_SECONDS_MAX", 2)
    altering = threading.Thread(target=execute, args=(node.dsn, "ALTER TABLE log ADD CHECK (true)"))
    with pytest.raises(TablesInUseError, match=r"node s2: .*sessions [0-9]+ wait to alter them") as raised:
        load(place, at(RestoreCrashPoint.LOADING, altering.start, SHARDS))
    assert f"snapshot restore {NAME} --resume" in raised.value.hint
    altering.join()
    resume(place)
    assert_filled(place)


def test_a_restore_that_has_lost_its_locks_is_not_finished(place: Place, node: Node) -> None:
    end = (
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks"
        " WHERE relation = 'log'::regclass AND mode = 'ShareUpdateExclusiveLock'"
    )
    with pytest.raises(NodeUnreachableError):
        load(place, at(RestoreCrashPoint.ROWS_LOADED, lambda: execute(node.dsn, end)))
    resume(place)
    assert_filled(place)


def test_statistics_that_are_asked_for_stay(place: Place, node: Node) -> None:
    load(place, request=replace(REQUEST, scope=structs.replace(REQUEST.scope, analyze=True)))
    with psycopg.connect(node.dsn) as connection:
        query = "SELECT tablename, count(*) FROM pg_stats WHERE schemaname = 'public' GROUP BY 1"
        found = dict(connection.execute(query).fetchall())
    assert {"log": 1, "item": 5}.items() <= found.items()
    assert_filled(place)


def test_rows_in_a_schema_that_took_the_name_of_another_are_noticed(place: Place, node: Node) -> None:
    """A schema can be renamed whatever locks there are on its tables."""
    copies = "; ".join(
        f"CREATE TABLE public.{table} (LIKE real.{table} INCLUDING ALL)"
        for table in ("log", "item", "account", "transfer")
    )
    replica = "SET session_replication_role = replica"
    exchange = f"{replica}; ALTER SCHEMA public RENAME TO real; CREATE SCHEMA public; {copies}"
    with pytest.raises(TablesUnfitError, match=r"node s2: .*were replaced since the restore began to fill them"):
        load(place, at(RestoreCrashPoint.LOADING, lambda: execute(node.dsn, exchange), SHARDS))
    execute(node.dsn, f"{replica}; DROP SCHEMA public CASCADE; ALTER SCHEMA real RENAME TO public")
    abandon(place)
    assert_empty(place)


EVIL = """
CREATE TYPE m.key AS ENUM ('7');
CREATE FUNCTION m.evil(k m.key) RETURNS int LANGUAGE plpgsql
    AS $$ BEGIN ALTER ROLE mallory SUPERUSER; RETURN k::text::int; END $$;
CREATE CAST (m.key AS int) WITH FUNCTION m.evil(m.key) AS IMPLICIT;
CREATE TABLE m.refers (k m.key REFERENCES public.item)
"""


@pytest.mark.parametrize("is_early", [True, False])
def test_keys_of_roles_that_own_no_restored_table_are_not_verified(place: Place, node: Node, *, is_early: bool) -> None:
    """A cast of its type would run as our role."""
    execute(
        node.dsn,
        "DROP EVENT TRIGGER refuse",
        "CREATE ROLE mallory",
        "CREATE SCHEMA m AUTHORIZATION mallory",
        "GRANT REFERENCES, SELECT ON item TO mallory",
        "GRANT USAGE ON SCHEMA public TO mallory",
    )
    try:
        make = f"SET ROLE mallory; {EVIL}; SET ROLE NONE; SET session_replication_role = replica"
        make += "; INSERT INTO m.refers VALUES ('7')"
        if is_early:
            with pytest.raises(TablesUnfitError, match=r"refers_k_fkey of m.refers, which belongs to mallory"):
                load(place, at(RestoreCrashPoint.INTENT_STORED, lambda: execute(node.dsn, make)))
        else:
            said = "node s2: foreign key refers_k_fkey of table m.refers can't be verified"
            # While it runs, its locks let nobody add a key.
            leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
            execute(node.dsn, make)
            with pytest.raises(KeyUntrustedError, match=said):
                abandon(place)
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute("SELECT FROM pg_roles WHERE rolname = 'mallory' AND rolsuper").rowcount == 0
        execute(node.dsn, "DROP SCHEMA m CASCADE")
        if not is_early:
            abandon(place)
        assert_empty(place)
    finally:
        drop_databases(place)
        execute(with_database(node, "postgres").dsn, "DROP ROLE mallory")


def test_rows_that_refer_to_loaded_ones_keep_these_from_being_deleted(place: Place, node: Node) -> None:
    """`tag` is not restored; its key counts as valid, and stays so."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(node.dsn, "INSERT INTO tag SELECT max(id) FROM item")
    with pytest.raises(TablesChangedError, match=r"node s2: .*a row of public.tag refers to one of public.item"):
        abandon(place)
    assert rows_of(node.dsn)["public.item"]
    execute(node.dsn, "DELETE FROM tag")
    abandon(place)
    assert_empty(place)


def test_a_table_of_another_name_is_neither_emptied_nor_filled(place: Place, node: Node) -> None:
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(
        node.dsn,
        "SET session_replication_role = replica; ALTER TABLE log RENAME TO mine;"
        " CREATE TABLE log (what text); INSERT INTO mine VALUES ('my own row')",
    )
    with pytest.raises(TablesUnfitError, match="were replaced since the restore began"):
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
    with pytest.raises(TablesChangedError, match=r'table public.mine was "public"."log" when it was filled'):
        abandon(place)
    with psycopg.connect(node.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM mine WHERE what = 'my own row'").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM log").fetchone() == (0,)
    execute(node.dsn, "DROP TABLE log", "ALTER TABLE mine RENAME TO log")
    abandon(place)
    assert_empty(place)


def test_a_trigger_that_would_act_on_emptying_is_named(place: Place, node: Node) -> None:
    """On TRUNCATE of `log`; one on INSERT alone is not in the way."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(
        node.dsn,
        "ALTER TABLE log ENABLE ALWAYS TRIGGER refuse",
        "CREATE TRIGGER acts BEFORE INSERT ON item EXECUTE FUNCTION refuse()",
        "ALTER TABLE item ENABLE ALWAYS TRIGGER acts",
    )
    with pytest.raises(TablesChangedError, match=r"trigger refuse of public\.log would act"):
        abandon(place)
    assert rows_of(node.dsn)["public.log"]
    execute(node.dsn, "ALTER TABLE log ENABLE TRIGGER refuse")
    abandon(place)
    assert_empty(place)


def test_a_rule_that_would_keep_rows_is_named_when_they_are_to_be_deleted(place: Place, node: Node) -> None:
    """`item` is deleted from, because `tag` refers to it."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(
        node.dsn,
        "CREATE RULE keep AS ON DELETE TO item DO INSTEAD NOTHING",
        "ALTER TABLE item ENABLE ALWAYS RULE keep",
    )
    with pytest.raises(TablesChangedError, match=r"rule keep of public\.item would act"):
        abandon(place)
    assert rows_of(node.dsn)["public.item"]
    execute(node.dsn, "DROP RULE keep ON item")
    abandon(place)
    assert_empty(place)
