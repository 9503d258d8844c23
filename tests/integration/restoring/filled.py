"""Databases that exist, with tables to fill: other DDL than the snapshot's, and a comment of their owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psycopg
import pytest

from cutline.embedded import bank
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError, with_database
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.rows.load import TablesInUseError
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.targets.databases import RestoreCrashPoint
from tests.commands.snapshot_runs import Ready, sorted_copies
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.target_place import DATABASE, NAME, Place, drop_databases, open_restores

REQUEST = RestoreRequest(NAME, scope=RestoreScope(data_only=True))
COMMENT = "the shop's books"
# Triggers that would refuse every row, keys, a generated column, one with a default, and tables of the target's own.
TABLES = f"""
{bank.SCHEMA}
CREATE TABLE kind (id int PRIMARY KEY);
INSERT INTO kind VALUES (0), (1);
CREATE SEQUENCE numbers;
CREATE TABLE item (body text, id int PRIMARY KEY, n int DEFAULT nextval('numbers') REFERENCES kind,
                   more int NOT NULL DEFAULT 5,
                   twice int GENERATED ALWAYS AS (n * 2) STORED);
CREATE TABLE log (what text);
CREATE INDEX ON item (n);
CREATE TABLE tag (item int REFERENCES item, account bigint REFERENCES account);
CREATE MATERIALIZED VIEW total AS SELECT sum(n) FROM item;
CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'the trigger acts'; END$$;
CREATE TRIGGER refuse BEFORE INSERT OR TRUNCATE ON log EXECUTE FUNCTION refuse();
CREATE FUNCTION refuse_ddl() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN RAISE 'the trigger acts'; END$$;
CREATE EVENT TRIGGER refuse ON ddl_command_start WHEN TAG IN ('CREATE SCHEMA', 'DROP SCHEMA', 'CREATE TABLE')
    EXECUTE FUNCTION refuse_ddl();
COMMENT ON DATABASE {DATABASE} IS '{COMMENT.replace("'", "''")}'
"""
COMMENT_QUERY = "SELECT shobj_description(oid, 'pg_database') FROM pg_database WHERE datname = current_database()"
SCHEMAS_QUERY = "SELECT count(*) FROM pg_namespace WHERE nspname ~ '^cutline'"
# The rows as the source prints them, from columns in another order.
ROWS = {"log": "public.log", "item": "(SELECT id, n, body FROM item)"}


def words(place: Place, *more: str) -> list[str]:
    return ["restore", NAME, "--to", str(place.target.path), *more]


def end_words(place: Place, command: str) -> list[str]:
    """The command line that ends the restore, by the command that does it."""
    return [command, NAME, "--to", str(place.target.path), *["--yes"] * (command == "restore-abandon")]


def load(place: Place, watching: Watching | None = None, request: RestoreRequest = REQUEST) -> None:
    restore_fleet(plan_restore(place.fleet, place.target, request), Ready(place.spark), watching or Silent())


def leave(place: Place, point: RestoreCrashPoint, count: int) -> NodeUnreachableError:
    """Load until a node goes away at the point; return the error."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(point), count):
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    with pytest.raises(NodeUnreachableError) as raised:
        load(place, Watching(then))
    return raised.value


def acting_at(point: RestoreCrashPoint, act: Callable[[], object], count: int = 1) -> Watching:
    """Act at the point."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(point), count):
            act()

    return Watching(then)


@contextmanager
def tables_to_fill(place: Place, more: str = "") -> Iterator[None]:
    """Have databases with empty tables on every shard; drop them at the end."""
    for node in place.target.primaries:
        execute(with_database(node, "postgres").dsn, f"CREATE DATABASE {DATABASE}")
        execute(node.dsn, TABLES, *[more] * bool(more))
    try:
        yield
    finally:
        drop_databases(place)


def rows_of(dsn: str, *tables: str) -> dict[str, bytes]:
    """The rows of the tables that are filled, as `sorted_copies` has those of the source."""
    found: dict[str, bytes] = {}
    with psycopg.connect(dsn) as connection:
        for table in tables or ROWS:
            statement = (
                f'COPY (SELECT * FROM {ROWS[table]} AS "this row" ORDER BY "this row"::text COLLATE "C") TO STDOUT'
            )
            with connection.cursor().copy(statement.encode()) as copy:
                found[f"public.{table}"] = b"".join(bytes(piece) for piece in copy)
    return found


def in_use_by(
    place: Place, dsn: str, act: Callable[[psycopg.Connection], object], point: RestoreCrashPoint, count: int = 1
) -> TablesInUseError:
    """Load while a session in the database acts at the point and stays in its transaction; return the error."""
    with psycopg.connect(dsn) as other:
        with pytest.raises(TablesInUseError) as raised:
            load(place, acting_at(point, lambda: act(other), count))
        other.rollback()
    return raised.value


def assert_filled(place: Place) -> None:
    """All rows and values are there, and nothing else of the restore."""
    for node, truth in zip(place.target.primaries, place.truth, strict=True):
        assert rows_of(node.dsn) == {table: truth[table] for table in ("public.log", "public.item")}
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute("SELECT last_value, is_called FROM numbers").fetchone() == (99, True)
            assert connection.execute("SELECT count(*) FROM item WHERE twice <> n * 2 OR more <> 5").fetchone() == (0,)
    assert_clean(place)


def assert_empty(place: Place) -> None:
    """The tables are as they were, and nothing of the restore is left."""
    for node in place.target.primaries:
        assert rows_of(node.dsn) == {"public.log": b"", "public.item": b""}
        assert sorted_copies(node.dsn)["public.kind"] == b"0\n1\n"
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute("SELECT is_called FROM numbers").fetchone() == (False,)
    assert_clean(place)


def assert_clean(place: Place) -> None:
    for node in place.target.primaries:
        with psycopg.connect(node.dsn) as connection:
            assert connection.execute(COMMENT_QUERY).fetchone() == (COMMENT,)
            assert connection.execute(SCHEMAS_QUERY).fetchone() == (0,)
            (made,) = connection.execute("SELECT count(*) FROM pg_indexes WHERE tablename = 'item'").fetchone() or (0,)
            assert made == 2
    assert place.databases() == {DATABASE}
    assert open_restores(place) == []
