"""Cutline's publications make no statement fail that did not fail before.

Another publication of the same table shows which statements PostgreSQL rejects, before Cutline publishes the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.fleet.config import Fleet, GroupRules
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect
from cutline.snapshots.create.initialise import initialise
from cutline.storage.errors import SnapshotError
from tests.commands.snapshot_runs import Ready, Runs
from tests.integration.own_database import own_database, restore_target
from tests.integration.refusing import create, execute, publication_name, refused
from tests.servers.dealt import NEWEST
from tests.servers.fleets import SharedFleets
from tests.servers.installed import require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# The DDL of the table kept.t, and whether kept.t is admissible.
TABLES = {
    "key": ("CREATE TABLE kept.t (id int PRIMARY KEY, v text)", True),
    "key-including": ("CREATE TABLE kept.t (id int, v text, PRIMARY KEY (id) INCLUDE (v))", True),
    "key-deferrable": ("CREATE TABLE kept.t (id int PRIMARY KEY DEFERRABLE, v text)", False),
    "key-deferred": ("CREATE TABLE kept.t (id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v text)", False),
    "no-key": ("CREATE TABLE kept.t (id int, v text)", False),
    "unique-is-no-key": ("CREATE TABLE kept.t (id int NOT NULL UNIQUE, v text)", False),
    "full": ("CREATE TABLE kept.t (id int, v text); ALTER TABLE kept.t REPLICA IDENTITY FULL", True),
    "nothing": ("CREATE TABLE kept.t (id int PRIMARY KEY, v text); ALTER TABLE kept.t REPLICA IDENTITY NOTHING", False),
    "by-index": (
        "CREATE TABLE kept.t (id int NOT NULL, v text); CREATE UNIQUE INDEX one ON kept.t (id);"
        " ALTER TABLE kept.t REPLICA IDENTITY USING INDEX one", True,
    ),
    "by-index-dropped": (
        "CREATE TABLE kept.t (id int PRIMARY KEY, v text); CREATE UNIQUE INDEX one ON kept.t (id);"
        " ALTER TABLE kept.t REPLICA IDENTITY USING INDEX one; DROP INDEX kept.one", False,
    ),
    "by-index-and-deferrable-key": (
        "CREATE TABLE kept.t (id int PRIMARY KEY DEFERRABLE, v text); CREATE UNIQUE INDEX one ON kept.t (id);"
        " ALTER TABLE kept.t REPLICA IDENTITY USING INDEX one", True,
    ),
    "generated": ("CREATE TABLE kept.t (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id * 2) STORED)", True),
    "generated-key": (
        "CREATE TABLE kept.t (id int, v text, g int GENERATED ALWAYS AS (id * 2) STORED PRIMARY KEY)", False,
    ),
    "generated-full": (
        "CREATE TABLE kept.t (id int, v text, g int GENERATED ALWAYS AS (id * 2) STORED);"
        " ALTER TABLE kept.t REPLICA IDENTITY FULL", False,
    ),
    "virtual-full": (
        "CREATE TABLE kept.t (id int, v text, g int GENERATED ALWAYS AS (id * 2) VIRTUAL);"
        " ALTER TABLE kept.t REPLICA IDENTITY FULL", False,
    ),
    "inherited-without-key": (
        "CREATE TABLE kept.above (id int PRIMARY KEY, v text); CREATE TABLE kept.t () INHERITS (kept.above)", False,
    ),
    "inherited-with-key": (
        "CREATE TABLE kept.above (id int PRIMARY KEY, v text);"
        " CREATE TABLE kept.t (PRIMARY KEY (id)) INHERITS (kept.above)", True,
    ),
    "partition-without-key": (
        "CREATE TABLE kept.above (id int, v text) PARTITION BY RANGE (id);"
        "CREATE TABLE kept.t PARTITION OF kept.above FOR VALUES FROM (0) TO (100);"
        "CREATE TABLE kept.other PARTITION OF kept.above (PRIMARY KEY (id)) FOR VALUES FROM (100) TO (200)", False,
    ),
    "partition-of-full": (
        "CREATE TABLE kept.above (id int, v text) PARTITION BY RANGE (id);"
        "ALTER TABLE kept.above REPLICA IDENTITY FULL;"
        "CREATE TABLE kept.t PARTITION OF kept.above FOR VALUES FROM (0) TO (100)", False,
    ),
}  # fmt: skip
ROWS = "INSERT INTO {} (id, v) SELECT n, 'x' FROM generate_series(1, 5) AS n"
# The error for a table without a key that would do is not one of a publication.
UPSERT = """DO $$ BEGIN
INSERT INTO {} (id, v) VALUES (1, 'y') ON CONFLICT DO NOTHING;
INSERT INTO {} (id, v) VALUES (1, 'y') ON CONFLICT (id) DO UPDATE SET v = 'updated';
EXCEPTION WHEN invalid_column_reference OR object_not_in_prerequisite_state THEN
IF SQLERRM !~ 'ON CONFLICT' THEN RAISE; END IF; END $$"""
# A trigger of the table itself that updates and deletes other rows of it.
CASCADE = """CREATE FUNCTION pg_temp.touch() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF pg_trigger_depth() = 1 THEN UPDATE {} SET v = 'touched' WHERE id = 2; DELETE FROM {} WHERE id = 3; END IF;
RETURN NULL; END $$;
CREATE TRIGGER touch AFTER INSERT ON {} FOR EACH ROW EXECUTE FUNCTION pg_temp.touch();
INSERT INTO {} (id, v) VALUES (6, 'x')"""
# Executed after every change of a table, on the table itself and through its parent.
WRITES = (
    "INSERT INTO {} (id, v) VALUES (50, 'x')",
    "UPDATE {} SET v = 'y' WHERE id = 50",
    "UPDATE {} SET id = 51 WHERE id = 50",
    "DELETE FROM {} WHERE id = 51",
    "INSERT INTO {} (id, v) SELECT n, 'x' FROM generate_series(1, 5) AS n; DELETE FROM {}",
    # Statements that choose what they do row by row, which PostgreSQL checks elsewhere than a plain UPDATE.
    f"{ROWS}; MERGE INTO {{}} AS t USING generate_series(3, 8) AS n ON t.id = n WHEN MATCHED AND n = 3 THEN DELETE"
    " WHEN MATCHED THEN UPDATE SET v = 'merged' WHEN NOT MATCHED THEN INSERT (id, v) VALUES (n, 'new')",
    f"{ROWS}; MERGE INTO {{}} AS t USING generate_series(3, 8) AS n ON t.id = n WHEN MATCHED THEN DO NOTHING"
    " WHEN NOT MATCHED THEN INSERT (id, v) VALUES (n, 'new')",
    f"{ROWS}; MERGE INTO {{}} AS t USING generate_series(3, 8) AS n ON t.id = n"
    " WHEN MATCHED THEN UPDATE SET id = n + 20",
    f"{ROWS}; {UPSERT}",
    f"{ROWS}; WITH gone AS (DELETE FROM {{}} RETURNING id, v) INSERT INTO {{}} (id, v) SELECT id + 10, v FROM gone",
    f"{ROWS}; DECLARE rows CURSOR FOR SELECT id FROM {{}} FOR UPDATE; FETCH rows;"
    " UPDATE {} SET v = 'here' WHERE CURRENT OF rows",
    f"{ROWS}; CREATE TEMP VIEW seen AS SELECT id, v FROM {{}}; UPDATE seen SET v = 'z'; DELETE FROM seen WHERE id = 1",
    r"""COPY {} (id, v) FROM PROGRAM 'printf "7\tx\n8\ty\n"' WHERE id > 7""",
    f"{ROWS}; {CASCADE}",
)
# A table from TABLES, and the statement by which it loses its identity once it is published.
LOSSES = {
    "nothing": ("key", "ALTER TABLE kept.t REPLICA IDENTITY NOTHING"),
    "key-dropped": ("key", "ALTER TABLE kept.t DROP CONSTRAINT t_pkey"),
    "index-dropped": ("by-index", "DROP INDEX kept.one"),
    "key-deferrable": ("key", "ALTER TABLE kept.t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id) DEFERRABLE"),
    "generated": ("full", "ALTER TABLE kept.t ADD g int GENERATED ALWAYS AS (id * 2) STORED"),
}
# From here on PostgreSQL rejects updates of a published table whose identity has a generated column.
GENERATED_VERSION = 180000


@pytest.fixture(scope="module", params=[16, 18])
def database(
    request: pytest.FixtureRequest, shared_fleets: SharedFleets, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    """On a version before and one after PostgreSQL changed what it rejects; 18 is the wheel's."""
    shared_fleet = shared_fleets(require_server(request.param) if request.param < NEWEST else None)
    with own_database(shared_fleet, tmp_path_factory.mktemp("writes"), "writes") as fleet:
        initialise(fleet, Silent())
        yield fleet


@pytest.fixture
def fleet(database: Fleet) -> Fleet:
    execute(database.nodes[0].dsn, "DROP SCHEMA IF EXISTS kept CASCADE", "CREATE SCHEMA kept")
    return database


def rejected_writes(dsn: str, name: str = "kept.t") -> list[str]:
    """The statements of WRITES that PostgreSQL rejects. All are rolled back."""
    found = []
    for statement in WRITES:
        with psycopg.connect(dsn) as connection:
            try:
                connection.execute(statement.replace("{}", name).encode())
            except (psycopg.errors.ObjectNotInPrerequisiteState, psycopg.errors.InvalidColumnReference):
                found.append(statement)
            connection.rollback()
    return found


def version_of(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        return connection.info.server_version


def with_rules(fleet: Fleet, *, exclude: tuple[str, ...] = (), append_only: tuple[str, ...] = ()) -> Fleet:
    return replace(fleet, groups=GroupRules(("kept.*",), exclude, append_only))


@pytest.mark.parametrize("name", TABLES)
def test_an_admissible_table_stays_writable_and_any_other_is_refused(fleet: Fleet, name: str) -> None:
    (node,) = fleet.nodes
    definition, is_admissible = TABLES[name]
    is_newest = version_of(node.dsn) >= GENERATED_VERSION
    if "VIRTUAL" in definition and not is_newest:
        pytest.skip("virtual columns came with 18")
    execute(node.dsn, definition)
    assert rejected_writes(node.dsn) == []
    execute(node.dsn, "CREATE PUBLICATION somebodys FOR TABLE ONLY kept.t")
    rejected = rejected_writes(node.dsn)
    execute(node.dsn, "DROP PUBLICATION somebodys")
    assert bool(rejected) == (not is_admissible and (is_newest or "GENERATED" not in definition))
    # A parent of a refused table is excluded: this test is about kept.t alone.
    found = with_rules(fleet, exclude=() if is_admissible else ("kept.above",))
    if is_admissible:
        initialise(found, Silent())
    else:
        with pytest.raises(SnapshotError) as raised:
            initialise(found, Silent())
        assert (raised.value.slug, raised.value.exit_code) == ("table-not-admissible", 3)
        assert "kept.t on s1" in raised.value.message
        assert 'ALTER TABLE "kept"."t" ' in raised.value.hint
        assert rejected_writes(node.dsn) == []
        initialise(with_rules(fleet, exclude=("kept.above",), append_only=("kept.t",)), Silent())
    assert rejected_writes(node.dsn) == []
    if "kept.above" in definition:
        assert rejected_writes(node.dsn, "kept.above") == []


@pytest.mark.parametrize("name", LOSSES)
def test_a_table_that_loses_its_identity_is_named_and_init_removes_it_from_the_publication(
    fleet: Fleet, name: str
) -> None:
    """Cutline can't keep PostgreSQL from rejecting the table's writes; the next create reports the table."""
    (node,) = fleet.nodes
    before, loss = LOSSES[name]
    if "GENERATED" in loss and version_of(node.dsn) < GENERATED_VERSION:
        pytest.skip("before 18 PostgreSQL rejects no update of a table whose identity is generated")
    execute(node.dsn, TABLES[before][0])
    fleet = with_rules(fleet)
    initialise(fleet, Silent())
    assert rejected_writes(node.dsn) == []
    execute(node.dsn, loss)
    assert rejected_writes(node.dsn) != []
    with refused(fleet, "table-not-admissible") as errors:
        create(fleet, "none")
    message = errors[0].message
    assert message.endswith(
        "; PostgreSQL rejects updates and deletes in kept.t on s1, because these tables are still published"
    )
    assert errors[0].hint.endswith("then remove tables without a replica identity from the publication: snapshot init")
    for rules in (with_rules(fleet, exclude=("kept.t",)), with_rules(fleet, append_only=("kept.t",))):
        initialise(rules, Silent())
        assert rejected_writes(node.dsn) == []


def test_a_new_partition_without_identity_stays_writable_and_is_refused(fleet: Fleet) -> None:
    (node,) = fleet.nodes
    execute(
        node.dsn,
        "CREATE TABLE kept.above (id int, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE kept.first PARTITION OF kept.above (PRIMARY KEY (id)) FOR VALUES FROM (100) TO (200)",
    )
    fleet = with_rules(fleet)
    initialise(fleet, Silent())
    execute(node.dsn, "CREATE TABLE kept.t PARTITION OF kept.above FOR VALUES FROM (0) TO (100)")
    assert rejected_writes(node.dsn) + rejected_writes(node.dsn, "kept.above") == []
    with refused(fleet, "table-not-admissible") as errors:
        create(fleet, "none")
    assert errors[0].message == "no usable replica identity, so updates and deletes can't be captured: kept.t on s1"
    # A row moves from the published partition to the unpublished one, and back.
    execute(node.dsn, "INSERT INTO kept.above VALUES (150, 'x')", "UPDATE kept.above SET id = id - 100",
            "UPDATE kept.above SET id = id + 100", "DELETE FROM kept.above")  # fmt: skip


@pytest.mark.parametrize("options", [
    "FOR ALL TABLES", "FOR ALL TABLES WITH (publish = 'insert')", "FOR TABLES IN SCHEMA kept",
    "FOR ALL TABLES WITH (publish_via_partition_root)", "FOR TABLE kept.above (id) WITH (publish_via_partition_root)",
])  # fmt: skip
def test_other_publications_reject_the_same_writes_as_before(fleet: Fleet, options: str) -> None:
    (node,) = fleet.nodes
    execute(
        node.dsn,
        "CREATE TABLE kept.above (id int PRIMARY KEY, v text) PARTITION BY RANGE (id)",
        "CREATE TABLE kept.part PARTITION OF kept.above FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE kept.t (id int, v text)",
    )
    fleet = with_rules(fleet, append_only=("kept.t",))
    execute(node.dsn, f"CREATE PUBLICATION somebodys {options}")
    try:
        before = {name: rejected_writes(node.dsn, name) for name in ("kept.t", "kept.part", "kept.above")}
        initialise(fleet, Silent())
        assert {name: rejected_writes(node.dsn, name) for name in before} == before
        with connect(node) as connection:
            query = "SELECT tablename FROM pg_publication_tables WHERE pubname ^@ %s ORDER BY 1"
            found = [name for (name,) in connection.execute(query, (publication_name(fleet),))]
        assert found == ["part", "t"]
    finally:
        execute(node.dsn, "DROP PUBLICATION somebodys")


def test_a_published_table_can_be_made_unlogged_once_it_is_removed_from_the_publication(fleet: Fleet) -> None:
    """Before 18, SET UNLOGGED is the only statement other than a write that PostgreSQL rejects for published tables."""
    (node,) = fleet.nodes
    execute(node.dsn, TABLES["key"][0])
    initialise(with_rules(fleet), Silent())
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="part of a publication"):
        execute(node.dsn, "ALTER TABLE kept.t SET UNLOGGED")
    execute(
        node.dsn, f"ALTER PUBLICATION {publication_name(fleet)} DROP TABLE kept.t", "ALTER TABLE kept.t SET UNLOGGED"
    )


@pytest.mark.parametrize(
    "statements",
    [
        # In one transaction, so that no change of the table can be missed.
        "ALTER PUBLICATION {} DROP TABLE kept.t; ALTER TABLE kept.t ALTER g SET EXPRESSION AS (id * 3);"
        " ALTER PUBLICATION {} ADD TABLE kept.t",
        "ALTER TABLE kept.t DROP g, ADD g int GENERATED ALWAYS AS (id * 3) VIRTUAL",
    ],
    ids=["unpublished", "added-again"],
)
def test_the_expression_of_a_virtual_column_is_changed_in_two_ways(
    fleet: Fleet, spark: SparkSession, statements: str
) -> None:
    """PostgreSQL 18 and newer reject SET EXPRESSION for such a column of a published table."""
    (node,) = fleet.nodes
    with psycopg.connect(node.dsn) as connection:
        if connection.info.server_version < GENERATED_VERSION:
            pytest.skip("virtual columns came with 18")
    execute(
        node.dsn, "CREATE TABLE kept.t (id int PRIMARY KEY, v text, g int GENERATED ALWAYS AS (id * 2) VIRTUAL)",
        "INSERT INTO kept.t SELECT n, 'x' FROM generate_series(1, 9) AS n",
    )  # fmt: skip
    initialise(with_rules(fleet), Silent())
    publication = publication_name(fleet)
    with pytest.raises(psycopg.errors.FeatureNotSupported, match="part of a publication"):
        execute(node.dsn, "ALTER TABLE kept.t ALTER g SET EXPRESSION AS (id * 3)")
    runs, name = Runs(fleet, Ready(spark)), f"virtual-{len(statements)}"
    runs.full(name)
    execute(node.dsn, "UPDATE kept.t SET v = 'y' WHERE id = 1", statements.replace("{}", publication))
    execute(node.dsn, "UPDATE kept.t SET v = 'z' WHERE id = 2")
    runs.increment(name)
    runs.restore(name, restore_target(fleet))
    query = "SELECT id, v, g FROM kept.t ORDER BY id"
    (source,), (target,) = fleet.nodes, restore_target(fleet).nodes
    with psycopg.connect(source.dsn) as ours, psycopg.connect(target.dsn) as theirs:
        rows = ours.execute(query).fetchall()
        assert rows[:3] == [(1, "y", 3), (2, "z", 6), (3, "x", 9)]
        assert theirs.execute(query).fetchall() == rows
