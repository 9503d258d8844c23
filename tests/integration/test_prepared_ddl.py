"""Global transactions with DDL are in a state with all of it, or the cut waits for them: on the oldest and the newest.

Decoded WAL has no DDL, and the catalogs show that of a prepared transaction only once it is committed.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import Fleet, Node, load_fleet
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Noting, Silent
from cutline.nodes.relation_locks import PUBLISHING
from cutline.snapshots.create import prepared_transactions
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.prepared_transactions import DDL_QUERY
from cutline.snapshots.records.commit import Commit
from cutline.storage.errors import SnapshotError
from cutline.wal.drain.prepare_record import changes_catalogs
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import roll_back_prepared
from tests.integration.refusing import execute
from tests.run.soak import first
from tests.servers.installed import MAJORS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME, SOURCE, RESTORED = "torn", "torn", "torn_back"
SCHEMA = (
    "CREATE TABLE ledger (id int PRIMARY KEY, note text)",
    "CREATE TABLE renamed (id int PRIMARY KEY)",
    "INSERT INTO renamed VALUES (1), (2)",
    "CREATE TABLE dropped (id int PRIMARY KEY)",
    "INSERT INTO dropped VALUES (1)",
    "CREATE TABLE counted (id serial PRIMARY KEY)",
    "CREATE TABLE altered (id int PRIMARY KEY)",
    "CREATE TABLE numbered (id int PRIMARY KEY)",
    "CREATE SEQUENCE numbers",
    "CREATE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1'",
)
HINT = re.compile(r"^-- on node (\S+) in database ([^,:]+)[,:].*\n(COMMIT PREPARED '\S+';)$", re.MULTILINE)
NUMBERS = count(1)
# The DDL of a global transaction on the node where it stays prepared.
DDL = {
    "create": ("CREATE TABLE fresh (id int PRIMARY KEY)", "INSERT INTO fresh VALUES (1)"),
    "rename": (
        "ALTER TABLE renamed RENAME TO renamed_before", "CREATE TABLE renamed (id int PRIMARY KEY, v text)",
        "INSERT INTO renamed VALUES (7, 'new')", "INSERT INTO renamed_before VALUES (8)",
    ),
    "drop": ("DROP TABLE dropped",),
    "column": ("ALTER TABLE altered ADD v int DEFAULT 3", "INSERT INTO altered VALUES (5, 5)"),
    # None of these locks a table, and the last two lock nothing at all.
    "function": ("CREATE OR REPLACE FUNCTION one() RETURNS int LANGUAGE sql AS 'SELECT 1 + 0'",),
    "grant": ("GRANT SELECT ON numbered TO PUBLIC",),
    "schema": ("CREATE SCHEMA later",),
}  # fmt: skip
# What decoded WAL has, or nothing needs: a cut waits for none of it.
ROWS = (
    "UPDATE ledger SET note = 'x'", "LOCK TABLE numbered IN ACCESS EXCLUSIVE MODE", "SELECT nextval('numbers')",
    "SELECT lo_create(0)", "SELECT pg_advisory_xact_lock(1)", "SELECT * FROM renamed FOR UPDATE",
    "SAVEPOINT s; CREATE TABLE never (id int); ROLLBACK TO s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Pair:
    """A chain of two shards on servers of the oldest and the newest version, and where it is restored."""

    runs: Runs
    target: Fleet
    databases: tuple[str, str]

    def begin(self, doubtful: int, statements: tuple[str, ...]) -> str:
        """Run a transaction with the statements on the doubtful shard, where it stays prepared; return its gid."""
        number = next(NUMBERS)
        row = f"INSERT INTO ledger VALUES ({number}, 'global')"
        for place, more in ((doubtful, statements), (1 - doubtful, ())):
            execute(self.databases[place], "; ".join(["BEGIN", *more, row, f"PREPARE TRANSACTION 'torn-{number}'"]))
        execute(self.databases[1 - doubtful], f"COMMIT PREPARED 'torn-{number}'")
        return f"torn-{number}"

    def increment(self, wait_seconds: float = 0.0, retries: int = 0) -> Commit:
        request = CreateRequest(NAME, wait_seconds=wait_seconds, retries=retries)
        return create_increment(self.runs.fleet, request, self.runs.spark, Silent())

    def compare(self) -> None:
        """Restore the last increment, and compare it with the sources as they are now."""
        self.runs.restore(NAME, self.target)
        for dsn, node in zip(self.databases, self.target.nodes, strict=True):
            assert sorted_copies(node.dsn) == sorted_copies(dsn)
            assert catalogs(node.dsn) == catalogs(dsn)


def catalogs(dsn: str) -> list[Any]:
    """What the DDL of these tests changes beside tables."""
    query = """
        SELECT (SELECT prosrc FROM pg_proc WHERE proname = 'one'), to_regnamespace('later')::text,
               has_table_privilege('pg_monitor', 'numbered', 'SELECT')
        """
    with psycopg.connect(dsn) as connection:
        return connection.execute(query).fetchall()


@pytest.fixture
def pair(mixed_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Pair]:
    nodes = (mixed_fleet.primaries[0], mixed_fleet.primaries[-1])
    try:
        fleets = []
        for database in (SOURCE, RESTORED):
            text = f"name = 'torn'\nstore = 'file://{tmp_path}/store'\n"
            text += "".join(f"[[node]]\nid = '{node.id}'\ndsn = '{node.dsn(database)}'\n" for node in nodes)
            (tmp_path / f"{database}.toml").write_text(text)
            fleets.append(load_fleet(tmp_path / f"{database}.toml"))
        for node in nodes:
            execute(node.dsn("postgres"), f"CREATE DATABASE {SOURCE}")
            execute(node.dsn(SOURCE), *SCHEMA)
        with dropping_slots(fleets[0]):
            runs = Runs(fleets[0], Ready(spark))
            runs.init()
            runs.full(NAME)
            yield Pair(runs, fleets[1], (nodes[0].dsn(SOURCE), nodes[1].dsn(SOURCE)))
    finally:
        for node in nodes:
            drop_databases(node)


def drop_databases(node: EmbeddedNode) -> None:
    with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
        for (name,) in connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'torn'").fetchall():
            roll_back_prepared(node.dsn(name))
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@contextmanager
def refusing() -> Iterator[list[SnapshotError]]:
    errors: list[SnapshotError] = []
    with pytest.raises(SnapshotError) as raised:
        yield errors
    errors.append(raised.value)
    assert (raised.value.slug, raised.value.exit_code) == ("slot-wait", 3), raised.value.message


def follow(pair: Pair, error: SnapshotError) -> str:
    """Run the statement of the hint that fits: another node has committed the transaction; return it."""
    ((node, database, statement),) = HINT.findall(error.hint)
    assert database == SOURCE
    execute(pair.runs.fleet.node(node).dsn, statement)
    return str(statement)


def test_a_cut_is_made_again_once_the_transaction_is_committed(pair: Pair) -> None:
    gid = pair.begin(1, DDL["create"])
    committing = threading.Timer(1, execute, (pair.databases[1], f"COMMIT PREPARED '{gid}'"))
    committing.start()
    noting = Noting(Silent())
    request = CreateRequest(NAME, wait_seconds=60, retries=1)
    commit = create_increment(pair.runs.fleet, request, pair.runs.spark, noting)
    committing.join()
    assert (commit.increment, commit.cut.included_early) == (1, 0)
    assert [note for note in noting.notes if "attempt 1 of 2 was invalidated by DDL" in note]
    pair.compare()


def test_without_the_record_of_the_prepare_its_locks_count(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the WAL is gone, or a server lets nobody read it."""
    monkeypatch.setattr(prepared_transactions, "changes_catalogs", lambda *_: None)
    rows = pair.begin(0, (ROWS[0],))
    assert pair.increment().cut.included_early == 1
    ddl = pair.begin(0, DDL["create"])
    with refusing() as errors:
        pair.increment()
    assert f"'{ddl}'" in errors[0].message
    assert f"'{rows}'" not in errors[0].message


@pytest.mark.parametrize("doubtful", first([0, 1]), ids=lambda place: str(MAJORS[-place]))
def test_a_cut_includes_all_ddl_of_a_transaction_or_names_what_is_to_be_committed(pair: Pair, doubtful: int) -> None:
    node = pair.runs.fleet.nodes[doubtful].id
    for number, (name, statements) in enumerate(DDL.items()):
        gid = pair.begin(doubtful, statements)
        with refusing() as errors:
            pair.increment()
        assert f"node {node}: prepared transaction '{gid}'" in errors[0].message
        # Rows under its DDL can't be decoded, so that it is not known whether the cut would include it.
        is_known = "another node has committed these transactions" in errors[0].hint
        assert is_known != (f"-- otherwise:\nROLLBACK PREPARED '{gid}';" in errors[0].hint)
        assert is_known or name in ("rename", "column")
        assert follow(pair, errors[0]) == f"COMMIT PREPARED '{gid}';"
        assert pair.increment(retries=1).increment == number + 1
    pair.compare()


def test_a_cut_does_not_wait_for_rows_and_locks(pair: Pair) -> None:
    for number, statement in enumerate(ROWS):
        gid = pair.begin(number % 2, (statement,))
        cut = pair.increment().cut
        assert cut.included_early == 1
        execute(pair.databases[number % 2], f"COMMIT PREPARED '{gid}'")
    pair.compare()


def test_rows_under_ddl_that_is_not_decided_anywhere_are_waited_for_by_name(pair: Pair) -> None:
    """Its rows have a definition that no catalog shows: they can't be decoded before."""
    execute(pair.databases[0], f"BEGIN; {'; '.join(DDL['column'])}; PREPARE TRANSACTION 'alone'")
    with refusing() as errors:
        pair.increment()
    assert "prepared transaction 'alone'" in errors[0].message
    assert errors[0].hint.endswith(
        "if another node has committed it:\nCOMMIT PREPARED 'alone';\n-- otherwise:\nROLLBACK PREPARED 'alone';"
    )
    execute(pair.databases[0], "ROLLBACK PREPARED 'alone'")
    pair.increment(retries=1)
    pair.compare()


def test_a_restart_of_a_sequence_is_waited_for_by_name(pair: Pair) -> None:
    """Its value can't be read before, whoever has committed what."""
    gid = pair.begin(0, ("ALTER SEQUENCE numbers RESTART WITH 1000",))
    noting, began = Noting(Silent()), time.monotonic()
    with pytest.raises(
        SnapshotError, match=rf"waited 3 s .* public.numbers \(prepared transaction '{gid}'\)"
    ) as raised:
        create_increment(pair.runs.fleet, CreateRequest(NAME, wait_seconds=3), pair.runs.spark, noting)
    assert time.monotonic() - began < 30
    assert (raised.value.slug, raised.value.exit_code) == ("relation-locked", 3)
    assert "COMMIT PREPARED if another node has committed its part" in raised.value.hint
    assert raised.value.hint.endswith("; or wait longer: --wait SECONDS")
    (note,) = [one for one in noting.notes if gid in one]
    assert note.startswith("node s1: reading sequences waited 2 s for a lock; held now: public.numbers")
    assert note.endswith("; waiting for up to 3 s")
    execute(pair.databases[0], f"COMMIT PREPARED '{gid}'")
    assert {one.last_value for one in pair.increment().sequences["s1"] if one.name == "numbers"} == {1000}


# The statement, whether it changes catalogs, and whether its locks show that.
EFFECTS = (
    ("INSERT INTO ledger VALUES (100)", False, False),
    ("SELECT FROM ledger FOR UPDATE", False, False),
    ("SELECT nextval('numbers'), setval('numbers', 7)", False, False),
    ("SELECT lo_create(0)", False, False),
    ("SELECT lo_from_bytea(0, 'x')", False, False),
    ("SELECT pg_logical_emit_message(true, 'a', 'b')", False, False),
    ("SAVEPOINT s; DROP TABLE ledger; ROLLBACK TO s", False, False),
    # These two look like DDL by their locks alone.
    ("LOCK TABLE ledger IN SHARE MODE", False, True),
    ("TRUNCATE ledger", True, True),
    ("CREATE TABLE fresh (id int)", True, True),
    ("ALTER TABLE ledger RENAME TO other", True, True),
    ("ALTER TABLE ledger ADD v int", True, True),
    ("DROP TABLE dropped", True, True),
    ("CREATE INDEX ON ledger (note)", True, True),
    ("CREATE VIEW seen AS SELECT 1 AS one", True, True),
    ("CREATE POLICY p ON ledger", True, True),
    ("CREATE FUNCTION two() RETURNS int LANGUAGE sql AS 'SELECT 2'", True, True),
    ("DROP FUNCTION one()", True, True),
    ("CREATE TYPE mood AS ENUM ('good')", True, True),
    ("CREATE DOMAIN positive AS int CHECK (VALUE > 0)", True, True),
    ("COMMENT ON TABLE ledger IS 'x'", True, True),
    ("ALTER SEQUENCE numbers RESTART", True, True),
    ("TRUNCATE counted RESTART IDENTITY", True, True),
    ("CREATE SEQUENCE more", True, True),
    ("CREATE STATISTICS both_of ON id, note FROM ledger", True, True),
    ("ANALYZE ledger", True, True),
    ("REFRESH MATERIALIZED VIEW filled", True, True),
    ("CREATE EXTENSION hstore", True, True),
    ("ALTER SCHEMA public RENAME TO other", True, True),
    (f"ALTER DATABASE {SOURCE} SET work_mem = '1MB'", True, True),
    # Only the record of the PREPARE shows these.
    ("GRANT SELECT ON ledger TO PUBLIC, pg_monitor", True, False),
    ("CREATE SCHEMA later", True, False),
    ("CREATE PUBLICATION p", True, False),
    ("CREATE FOREIGN DATA WRAPPER w", True, False),
)


@pytest.mark.parametrize("major", MAJORS)
def test_ddl_is_known_by_the_record_of_the_prepare_and_most_of_it_by_locks(
    mixed_fleet: EmbeddedFleet, major: int
) -> None:
    server = mixed_fleet.primaries[MAJORS.index(major)]
    node = Node("s1", server.dsn(SOURCE))
    try:
        execute(server.dsn("postgres"), f"CREATE DATABASE {SOURCE}")
        execute(node.dsn, *SCHEMA, "CREATE MATERIALIZED VIEW filled AS SELECT 1 AS n")
        with psycopg.connect(node.dsn, autocommit=True) as connection:
            for statement, is_ddl, is_locked in EFFECTS:
                found = effects(node, connection, statement)
                assert found == (is_ddl, is_locked), statement
    finally:
        drop_databases(server)


def effects(node: Node, connection: psycopg.Connection[Any], statement: str) -> tuple[bool | None, bool]:
    """Prepare a transaction with the statement; return what its record and its locks show, and roll it back."""
    with psycopg.connect(node.dsn, autocommit=True) as session:
        session.execute(f"BEGIN; {statement}".encode())
        (position,) = session.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone() or ("",)
        session.execute("PREPARE TRANSACTION 'torn-effect'")
    connection.execute("SELECT pg_logical_emit_message(true, 'after', repeat('x', 100))")
    rows = connection.execute("SELECT transaction::text FROM pg_prepared_xacts WHERE gid = 'torn-effect'").fetchall()
    locking = connection.execute(DDL_QUERY, (list(PUBLISHING),)).fetchall()
    recorded = changes_catalogs(node, Lsn.parse(position), int(rows[0][0]))
    connection.execute("ROLLBACK PREPARED 'torn-effect'")
    return recorded, locking == rows
