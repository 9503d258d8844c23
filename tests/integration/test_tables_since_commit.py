"""An increment takes tables that have not changed from the last commit, as it would read them from the catalogs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from cutline.fleet.config import Fleet, GroupRules, Node
from cutline.nodes.groups import Table
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.base_copy.copy_tables import amount_to_copy
from cutline.snapshots.create import prepare_tables
from cutline.snapshots.create.continuable import rules_since
from cutline.snapshots.ddl import table_changes
from cutline.snapshots.ddl.table_changes import (
    NodeTables,
    TableSelection,
    known_tables,
    read_fleet_tables,
    read_tables_since_commit,
)
from cutline.snapshots.records.proven_chains import read_chain
from cutline.spark.amount import Amount
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "kept"
RULES = '[groups]\nappend_only = ["public.log"]\n'
SCHEMA = (
    "CREATE TYPE mood AS ENUM ('good', 'bad')",
    "CREATE TYPE pair AS (one int, other mood)",
    "CREATE TABLE log (at int, what text)",
    "CREATE TABLE keyed (id int PRIMARY KEY, mood mood, pairs pair[], note xml)",
    "ALTER TABLE keyed ADD added text DEFAULT 'added'",
    "CREATE TABLE lines (what text)",
    "ALTER TABLE lines REPLICA IDENTITY FULL",
    "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    'CREATE TABLE "Odd name" ("a.b" int PRIMARY KEY)',
    "INSERT INTO log SELECT n, 'first' FROM generate_series(1, 50) AS n",
    "INSERT INTO keyed SELECT n, 'good' FROM generate_series(1, 50) AS n",
)
# What an application does without DDL, and what changes the file of a table.
WRITES = (
    "INSERT INTO keyed VALUES (100, 'bad', ARRAY[(1, 'good')::pair])",
    "INSERT INTO log VALUES (51, 'second')",
    "TRUNCATE lines",
    "VACUUM FULL log",
    "CREATE TEMPORARY TABLE passing (id int)",
    "ANALYZE",
)
# With the tables that are read after it.
DDL = (
    ("ALTER TABLE keyed ADD more int", {"public.keyed"}),
    ("ALTER TABLE keyed ALTER added SET DEFAULT 'another'", {"public.keyed"}),
    ("CREATE TABLE came (id int PRIMARY KEY)", {"public.came"}),
    ('DROP TABLE "Odd name"', set()),
    ("ALTER TYPE mood RENAME VALUE 'bad' TO 'worse'", {"public.keyed"}),
    ("ALTER TYPE pair RENAME ATTRIBUTE one TO first", {"public.keyed"}),
    ("ALTER TABLE lines ADD PRIMARY KEY (what)", {"public.lines"}),
    # It stores the value of the added column in the rows.
    ("VACUUM FULL keyed", {"public.keyed"}),
    (
        "ALTER PUBLICATION {publication} DROP TABLE keyed; ALTER PUBLICATION {publication} ADD TABLE keyed",
        {"public.keyed"},
    ),
    ("ALTER PUBLICATION {publication} DROP TABLE keyed", {"public.keyed"}),
)


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    with own_database(shared_fleet, tmp_path, NAME, RULES) as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        found = Runs(fleet, Ready(spark))
        found.init()
        yield found


def read(fleet: Fleet, rules: GroupRules | None = None) -> tuple[NodeTables, NodeTables]:
    """The primary's tables as an increment takes them, and as they are in the catalogs."""
    chain = read_chain(fleet.store.open(), NAME)
    selection = TableSelection(chain.full.fleet_id, rules or rules_since(chain, fleet))
    with open_sessions(fleet, fleet.nodes) as sessions:
        _, tables = read_tables_since_commit(sessions, selection, lambda: known_tables(chain))
        (taken,) = tables.values()
        (catalogs,) = read_fleet_tables(sessions, selection).values()
    return taken, catalogs


def assert_equal(taken: NodeTables, catalogs: NodeTables) -> None:
    assert taken.fingerprint == catalogs.fingerprint
    assert dict(taken.states) == dict(catalogs.states)
    assert {table.oid: table.group.definition() for table in taken.tables} == {
        table.oid: table.group.definition() for table in catalogs.tables
    }


def test_tables_without_ddl_are_those_of_the_last_commit(runs: Runs) -> None:
    runs.full(NAME)
    taken, catalogs = read(runs.fleet)
    assert not taken.read
    assert_equal(taken, catalogs)
    execute(runs.fleet.nodes[0].dsn, *WRITES)
    taken, catalogs = read(runs.fleet)
    assert not taken.read
    assert_equal(taken, catalogs)


@pytest.mark.parametrize(("statements", "changed"), DDL)
def test_tables_are_read_after_ddl(runs: Runs, statements: str, changed: set[str]) -> None:
    runs.full(NAME)
    publication = f"cutline_{read_chain(runs.fleet.store.open(), NAME).full.fleet_id}"
    execute(runs.fleet.nodes[0].dsn, *statements.format(publication=publication).split("; "))
    taken, catalogs = read(runs.fleet)
    assert {table.group.name for table in taken.read} == changed
    assert_equal(taken, catalogs)


def test_tables_are_read_if_the_rules_exclude_another_one(runs: Runs) -> None:
    runs.full(NAME)
    taken, catalogs = read(runs.fleet, GroupRules(exclude=("public.keyed",), append_only=("public.log",)))
    assert taken.read
    assert "public.keyed" not in taken.states
    assert_equal(taken, catalogs)


def test_tables_are_read_if_the_rules_include_another_one(runs: Runs) -> None:
    """The last increment excluded it, and no DDL has run since."""
    runs.full(NAME)
    rules = structs.replace(runs.fleet.groups, exclude=("public.keyed",))
    commit = Runs(replace(runs.fleet, groups=rules), runs.spark).increment(NAME)
    assert commit.definition_changes is not None
    assert read(runs.fleet, rules_since(read_chain(runs.fleet.store.open(), NAME), runs.fleet))[0].read
    taken, catalogs = read(runs.fleet)
    assert "public.keyed" in taken.states
    assert_equal(taken, catalogs)
    assert not read(runs.fleet, rules)[0].read
    copied = runs.increment(NAME)
    assert copied.definition_changes is not None
    assert [group.name for group in copied.definition_changes.groups["s1"]] == ["public.keyed"]


def test_a_table_that_must_be_copied_again_is_copied_by_its_size(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica identity was another one for some time, of which only the WAL has a trace."""
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)
    execute(
        dsn, "ALTER TABLE lines REPLICA IDENTITY DEFAULT", "INSERT INTO lines VALUES ('one'), ('two')",
        "ALTER TABLE lines REPLICA IDENTITY FULL",
    )  # fmt: skip
    assert not read(runs.fleet)[0].read
    sizes: list[int] = []

    def noting(nodes: Iterable[Node], tables: Mapping[str, Sequence[Table]]) -> Amount:
        sizes.extend(table.size_bytes for some in tables.values() for table in some)
        return amount_to_copy(nodes, tables)

    monkeypatch.setattr(prepare_tables, "amount_to_copy", noting)
    commit = runs.increment(NAME)
    assert commit.definition_changes is not None
    assert [group.name for group in commit.definition_changes.groups["s1"]] == ["public.lines"]
    assert len(sizes) == 1
    assert sizes[0] > 0
    expected, target = sorted_copies(dsn), restore_target(runs.fleet)
    runs.restore(NAME, target)
    assert sorted_copies(target.nodes[0].dsn) == expected


def test_values_may_contain_names_of_which_the_catalogs_of_the_database_say_nothing(runs: Runs) -> None:
    """A role that nothing in the database refers to."""
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    execute(dsn, "CREATE TABLE named (id int PRIMARY KEY, role regrole)", "CREATE ROLE kept_role")
    try:
        execute(dsn, "INSERT INTO named VALUES (1, 'kept_role')")
        runs.full(NAME)
        execute(dsn, "ALTER ROLE kept_role RENAME TO kept_renamed")
        taken, catalogs = read(runs.fleet)
        assert taken.read
        assert_equal(taken, catalogs)
    finally:
        execute(dsn, "DROP TABLE named", "DROP ROLE IF EXISTS kept_role, kept_renamed")


def test_an_increment_without_ddl_reads_no_definitions(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    (dsn,) = (node.dsn for node in runs.fleet.nodes)
    runs.full(NAME)

    def refuse(*_: object) -> NodeTables:
        raise AssertionError("the tables were read again")

    monkeypatch.setattr(table_changes, "read_node_tables", refuse)
    execute(dsn, *WRITES)
    first = runs.increment(NAME)
    # Of the states, those of two tables have changed: their files have.
    assert first.definition_changes is not None
    assert {state.table for state in first.definition_changes.tables["s1"]} == {"public.lines", "public.log"}
    execute(dsn, "UPDATE keyed SET mood = 'bad' WHERE id < 9")
    assert runs.increment(NAME).definition_changes is None
    expected = sorted_copies(dsn)
    target = restore_target(runs.fleet)
    runs.restore(NAME, target)
    assert sorted_copies(target.nodes[0].dsn) == expected
    assert runs.check(NAME).exit_code in (0, 4)


def test_a_table_is_missed_in_the_publication_that_it_joined_after_the_last_ddl(runs: Runs) -> None:
    """Then the rows of all catalogs are those at that DDL again, and the table is published no more."""
    runs.full(NAME)
    (node,), store = runs.fleet.nodes, runs.fleet.store.open()
    excluding = structs.replace(runs.fleet.groups, exclude=(*runs.fleet.groups.exclude, "public.came"))
    execute(node.dsn, "CREATE TABLE came (id int PRIMARY KEY)")
    Runs(replace(runs.fleet, groups=excluding), runs.spark).increment(NAME)
    stored = read_chain(store, NAME).fingerprint(node.id)
    changes = runs.increment(NAME).definition_changes
    assert changes is not None
    assert [group.name for group in changes.groups[node.id]] == ["public.came"]
    execute(node.dsn, f"ALTER PUBLICATION cutline_{read_chain(store, NAME).full.fleet_id} DROP TABLE came")
    taken, catalogs = read(runs.fleet)
    assert catalogs.fingerprint == stored == read_chain(store, NAME).fingerprint(node.id)
    assert taken.read
    assert taken.states["public.came"].membership == ""
    assert_equal(taken, catalogs)
