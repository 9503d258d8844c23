"""What a dump of the DDL leaves out, and sequences that are set during the cut.

The tests use a database of the shared fleet's first server, and expect what their own statements did there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import zstandard

import cutline.snapshots.create.cut_attempt as cut_attempt
import cutline.snapshots.ddl.dump as dump
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.nodes.publications import publication_names
from cutline.nodes.watch import watch_nodes
from cutline.restore.ddl.running import DdlRun
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.sequences import SEQUENCES_QUERY, read_sequences
from cutline.snapshots.records.commit import DDL, Commit
from cutline.storage.store import ObjectStore
from tests.commands.ddl_runs import dumped_ddl, make_ledger
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE = "dumped"
(OWN, _) = publication_names("0123abcd")
SEQUENCES_MANY = 450  # more than are read at once
SCHEMA = (
    "CREATE TABLE t (id int PRIMARY KEY)",
    f"CREATE PUBLICATION {OWN} FOR TABLE t",
    f"COMMENT ON PUBLICATION {OWN} IS 'how the node was before it was made read-only'",
    "CREATE PUBLICATION theirs FOR TABLE t",
    "COMMENT ON PUBLICATION theirs IS 'a comment'",
    "CREATE MATERIALIZED VIEW b AS SELECT 1 AS n",
    "CREATE MATERIALIZED VIEW a AS SELECT n FROM b",
    "CREATE MATERIALIZED VIEW unfilled AS SELECT 1 AS n WITH NO DATA",
    "CREATE FUNCTION saw() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'",
    "CREATE EVENT TRIGGER dumped_event ON ddl_command_end EXECUTE FUNCTION saw()",
    "COMMENT ON EVENT TRIGGER dumped_event IS 'a comment'",
)
KEYS = "SELECT conname FROM pg_constraint WHERE contype = 'p' AND oid >= 16384 AND conname <> 'ledger_pkey'"
PUBLICATIONS = """
SELECT pubname, prrelid::regclass::text, obj_description(p.oid, 'pg_publication')
  FROM pg_publication p JOIN pg_publication_rel ON prpubid = p.oid ORDER BY 1
"""
TRIGGERS = "SELECT evtname, obj_description(oid, 'pg_event_trigger') FROM pg_event_trigger"


def rows_of(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute(query.encode()).fetchall()


@pytest.fixture
def node(shared_fleet: EmbeddedFleet) -> Iterator[Node]:
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    execute(maintenance.dsn, f"CREATE DATABASE {DATABASE}")
    try:
        yield with_database(maintenance, DATABASE)
    finally:
        execute(maintenance.dsn, f"DROP DATABASE {DATABASE} WITH (FORCE)")


def test_every_section_holds_what_belongs_there(node: Node, tmp_path: Path) -> None:
    execute(node.dsn, *SCHEMA)
    restored = with_database(node, f"{DATABASE}_again")
    execute(node.dsn, f"CREATE DATABASE {DATABASE}_again TEMPLATE template0")
    try:
        with watch_nodes([node]) as watch:
            ddl = dumped_ddl(node, tmp_path, watch)
            assert ddl.views == ('"public"."b"', '"public"."a"')
            seen = []
            run = DdlRun(restored, ddl, watch)
            run.before_rows()
            ledger = make_ledger(restored)
            for step in (None, run.after_rows, run.last):
                if step:
                    step(ledger)
                seen.append(tuple(rows_of(restored.dsn, query) for query in (KEYS, PUBLICATIONS, TRIGGERS)))
            assert run.refusals == {}
    finally:
        execute(node.dsn, f"DROP DATABASE {DATABASE}_again WITH (FORCE)")
    # The comment that records a read-only node would make the restored database read-only.
    publications = [(OWN, "t", None), ("theirs", "t", "a comment")]
    assert seen == [
        ([], [], []),
        ([("t_pkey",)], publications, []),
        ([("t_pkey",)], publications, [("dumped_event", "a comment")]),
    ]


def test_many_sequences_are_read_with_their_current_values(node: Node) -> None:
    execute(node.dsn, *(f"CREATE SEQUENCE s{n} START {n + 1}" for n in range(SEQUENCES_MANY)))
    execute(
        node.dsn, "CREATE UNLOGGED SEQUENCE unlogged", "SELECT nextval('s7'), nextval('s7'), setval('s8', 99, false)"
    )
    with connect(node) as connection:
        reading = read_sequences(node, connection, 60)
        found = {one.name: (one.last_value, one.is_called) for one in reading.sequences}
    expected = {f"s{n}": (n + 1, False) for n in range(SEQUENCES_MANY)} | {"s7": (9, True), "s8": (99, False)}
    assert found == expected


def test_a_sequence_that_is_dropped_while_it_is_listed_is_not_taken_for_an_unreadable_one(node: Node) -> None:
    execute(node.dsn, "CREATE SEQUENCE dropped")
    with connect(node) as connection, connection.transaction():
        # The snapshot shows the sequence, but functions for privileges no longer do.
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        connection.execute("SELECT FROM pg_class")
        execute(node.dsn, "DROP SEQUENCE dropped")
        found = {row[2]: row[-1] for row in connection.execute(SEQUENCES_QUERY)}
    assert found["dropped"] is True


def test_a_sequence_that_is_set_back_after_the_cut_is_not_behind_it(
    node: Node, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sequence that is set back keeps its earlier value; if one is restarted, the cut is retried, and it restarts."""
    execute(
        node.dsn, "CREATE TABLE t (id serial PRIMARY KEY)", "CREATE SEQUENCE set_back",
        "SELECT setval('set_back', 70), setval('t_id_seq', 80)",
    )  # fmt: skip
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(replace(fleet, nodes=(node,)), Ready(spark))
    cuts: list[str] = []

    def make_cut(*arguments: Any) -> Any:
        cut = original(*arguments)
        if not cuts:
            # Only the sequence's row in pg_class shows this.
            execute(node.dsn, "TRUNCATE t RESTART IDENTITY")
        execute(node.dsn, "SELECT setval('set_back', 3)" if len(cuts) == 1 else "SELECT nextval('set_back')")
        cuts.append(cut.record.id)
        return cut

    original = cut_attempt.make_cut
    monkeypatch.setattr(cut_attempt, "make_cut", make_cut)
    with dropping_slots(runs.fleet):
        runs.init()
        commit = runs.full("sequences")
    assert len(cuts) == 2
    assert {one.name: (one.last_value, one.is_called) for one in commit.sequences["s1"]} == {
        "set_back": (71, True), "t_id_seq": (1, False),
    }  # fmt: skip


def test_a_restart_of_a_sequence_outside_the_cut_invalidates_nothing(
    node: Node, shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    """Nor is the DDL dumped again: it is the same."""
    execute(node.dsn, "CREATE TABLE t (id serial PRIMARY KEY)")
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(replace(fleet, nodes=(node,)), Ready(spark))

    def fill_again(reached: Reached) -> None:
        """Leave as many rows as there were restarts."""
        if reached.point in (CrashPoint.LOCKED, CrashPoint.SLOT_MADE, CrashPoint.SPARK_READY):
            restarts.append(reached.point)
            values = f"INSERT INTO t SELECT nextval('t_id_seq') FROM generate_series(1, {len(restarts)})"
            execute(node.dsn, "TRUNCATE t RESTART IDENTITY", values)

    restarts: list[str] = []
    with dropping_slots(runs.fleet):
        runs.init()
        for create in (create_full, create_increment):
            progress, before = Watching(fill_again), len(restarts)
            commit = create(runs.fleet, CreateRequest("restarted"), runs.spark, progress)
            assert len(restarts) > before
            assert not any("attempt" in note for note in progress.notes), progress.notes
            (sequence,) = commit.sequences["s1"]
            assert (sequence.last_value, sequence.is_called) == (len(restarts), True)
        assert commit.definition_changes
        assert not commit.definition_changes.objects


ALTERED = "ALTER TABLE t ADD v int DEFAULT 7"
ADDED = (
    "CREATE TABLE tenant (id int PRIMARY KEY REFERENCES t)", "CREATE INDEX ON t (id)", "CREATE VIEW seen AS TABLE t",
    "INSERT INTO tenant SELECT id FROM t",
)  # fmt: skip


@pytest.mark.parametrize(("statements", "attempts"), [(ADDED, 1), ((ALTERED,), 2)], ids=["added", "altered"])
def test_tables_may_be_added_while_the_ddl_is_dumped(
    node: Node,
    shared_fleet: EmbeddedFleet,
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    statements: tuple[str, ...],
    attempts: int,
) -> None:
    """The dump is that of the cut; the next increment has them."""
    execute(node.dsn, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1), (2)")
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    runs = Runs(replace(fleet, nodes=(node,)), Ready(spark))
    left = list(statements)

    def run_tool(name: str, *words: str, **options: Any) -> Any:
        # pg_dump takes the snapshot that exists already.
        execute(node.dsn, *left)
        left.clear()
        return original(name, *words, **options)

    original = dump.run_tool
    with dropping_slots(runs.fleet):
        runs.init()
        runs.full("chain")
        execute(node.dsn, "ALTER TABLE t ADD first int")
        progress = Watching()
        with monkeypatch.context() as patched:
            patched.setattr(dump, "run_tool", run_tool)
            commit = create_increment(runs.fleet, CreateRequest("chain"), runs.spark, progress)
        assert not left
        invalidated = [note for note in progress.notes if note.startswith("attempt ")]
        assert len(invalidated) == attempts - 1, progress.notes
        assert all("its catalogs changed while its DDL was dumped" in note for note in invalidated)
        store = runs.fleet.store.open()
        first = ddl_of(store, commit)
        assert (b'"tenant"' in first, b'"v" integer' in first) == (False, attempts == 2)
        second = ddl_of(store, create_increment(runs.fleet, CreateRequest("chain"), runs.spark, Silent()))
        assert (b'"tenant"' in second) == (attempts == 1)


def ddl_of(store: ObjectStore, commit: Commit) -> bytes:
    """Return the dump in a commit; b"" if it has none."""
    changes = commit.definition_changes
    bodies = [store.read(one.key) for one in changes.objects if one.kind == DDL] if changes else []
    return b"".join(zstandard.ZstdDecompressor().decompressobj().decompress(body) for body in bodies)
