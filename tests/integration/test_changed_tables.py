"""After DDL, only the tables that it changed are read again; what is known of all others is what the catalogs have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psycopg
import pytest

from cutline.fleet.config import Fleet, GroupRules
from cutline.nodes.groups import read_tables
from cutline.nodes.publications import PublicationChangedError, ensure_publications, publication_names
from cutline.nodes.sessions import Sessions, open_sessions
from cutline.snapshots.ddl.table_changes import (
    KnownTables,
    NodeTables,
    TableSelection,
    read_current_tables,
    read_fleet_tables,
    read_tables_since_commit,
)
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from cutline.embedded.fleet import EmbeddedFleet

FLEET_ID = "0123abcd"
KEYED, APPEND_ONLY = publication_names(FLEET_ID)
SELECTION = TableSelection(FLEET_ID, GroupRules(append_only=("public.log", "public.journal")))
SCHEMA = (
    "CREATE SCHEMA far",
    "CREATE TYPE mood AS ENUM ('good', 'bad')",
    "CREATE TYPE pair AS (one int, other mood)",
    "CREATE TYPE span AS RANGE (subtype = int)",
    "CREATE DOMAIN amount AS int CHECK (value >= 0)",
    "CREATE DOMAIN moods AS mood[]",
    "CREATE TYPE bare AS ENUM ()",
    "CREATE FUNCTION seven() RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 7'",
    "CREATE TABLE plain (id bigint PRIMARY KEY, name text NOT NULL, note varchar(9), price numeric(12,2))",
    "CREATE TABLE other (id bigint PRIMARY KEY, name text NOT NULL, note varchar(9), price numeric(12,2))",
    'CREATE TABLE far."Odd | näme" (id int PRIMARY KEY, "a b" text)',
    "CREATE TABLE moody (id int PRIMARY KEY, mood mood)",
    "CREATE TABLE paired (id int PRIMARY KEY, pairs pair[])",
    "CREATE TABLE masked (id int PRIMARY KEY, all_moods moods, spans span)",
    "CREATE TABLE paid (id int PRIMARY KEY, paid amount)",
    "CREATE TABLE bared (id int PRIMARY KEY, bare bare)",
    "CREATE TABLE marked (id int PRIMARY KEY, doc xml, texts text[])",
    "CREATE TABLE indexed (a int NOT NULL, b int NOT NULL, c int)",
    "CREATE UNIQUE INDEX indexed_a ON indexed (a)",
    "CREATE UNIQUE INDEX indexed_b ON indexed (b, a)",
    "ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_a",
    "CREATE TABLE lines (what text)",
    "ALTER TABLE lines REPLICA IDENTITY FULL",
    "CREATE TABLE log (at int, what text)",
    "CREATE TABLE computed (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)",
    "CREATE TABLE parent (id int PRIMARY KEY, kind text)",
    "CREATE TABLE child (id int PRIMARY KEY) INHERITS (parent)",
    "CREATE TABLE parted (id int PRIMARY KEY, what text) PARTITION BY RANGE (id)",
    "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
    "INSERT INTO plain SELECT n, 'name', 'note' FROM generate_series(1, 50) AS n",
    "INSERT INTO moody SELECT n, 'good' FROM generate_series(1, 50) AS n",
    "INSERT INTO paid SELECT n, n FROM generate_series(1, 50) AS n",
)


class Step(NamedTuple):
    """Statements, and the tables that must be read after them; those of `public` are named without it."""

    statements: str
    read: tuple[str, ...] = ()


# What DDL changes of a table that Cutline knows, and what it does not know: the dump contains that.
STEPS = (
    Step("ALTER TABLE plain ADD added int", ("plain",)),
    Step("ALTER TABLE plain ADD filled text DEFAULT 'x'", ("plain",)),
    Step("ALTER TABLE plain ADD made int DEFAULT seven()", ("plain",)),
    Step("CREATE OR REPLACE FUNCTION seven() RETURNS int LANGUAGE sql VOLATILE AS 'SELECT 8'"),
    Step("ALTER TABLE plain DROP made", ("plain",)),
    Step("ALTER TABLE plain ADD again int; ALTER TABLE plain DROP again; ALTER TABLE plain ADD again2 int", ("plain",)),
    Step("ALTER TABLE plain ALTER note TYPE varchar(19)", ("plain",)),
    Step("ALTER TABLE plain ALTER price TYPE numeric(12,4)", ("plain",)),
    Step("ALTER TABLE plain ALTER name TYPE text COLLATE \"C\"", ("plain",)),
    Step("ALTER TABLE plain RENAME note TO remark", ("plain",)),
    # Files change without DDL.
    Step("VACUUM FULL plain; TRUNCATE other"),
    Step("TRUNCATE other; ALTER TABLE plain DROP again2", ("other", "plain")),
    Step("ALTER TABLE other RENAME TO another", ("another",)),
    Step("ALTER TABLE another SET SCHEMA far", ("far.another",)),
    Step("ALTER SCHEMA far RENAME TO away", ("away.another", "away.Odd | näme")),
    Step("ALTER TABLE away.another RENAME TO x; ALTER TABLE plain RENAME TO another; ALTER TABLE away.x RENAME TO plain"
         "", ("another", "away.plain")),
    Step("ALTER TYPE mood ADD VALUE 'calm'", ("moody", "paired", "masked")),
    Step("ALTER TYPE mood RENAME VALUE 'bad' TO 'worse'", ("moody", "paired", "masked")),
    Step("ALTER TYPE mood RENAME TO temper", ("moody",)),
    Step("ALTER TYPE temper SET SCHEMA away", ("moody",)),
    Step("ALTER TYPE pair ADD ATTRIBUTE third xml", ("paired",)),
    Step("ALTER TYPE pair RENAME ATTRIBUTE one TO first", ("paired",)),
    Step("ALTER TYPE pair DROP ATTRIBUTE third", ("paired",)),
    Step("ALTER TYPE pair RENAME TO couple", ("paired",)),
    Step("ALTER TYPE span RENAME TO stretch", ("masked",)),
    Step("ALTER DOMAIN amount ADD CHECK (value < 1000)"),
    Step("ALTER DOMAIN amount RENAME TO sum_of_money", ("paid",)),
    Step("ALTER TYPE bare ADD VALUE 'first'", ("bared",)),
    Step("CREATE TYPE new AS ENUM ('x'); ALTER TABLE bared ADD new new", ("bared",)),
    Step("ALTER TABLE bared ALTER new TYPE text", ("bared",)),
    Step("ALTER TABLE marked ADD docs xml[]", ("marked",)),
    Step("ALTER TABLE marked DROP doc", ("marked",)),
    Step("ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_b", ("indexed",)),
    Step("ALTER TABLE indexed REPLICA IDENTITY FULL", ("indexed",)),
    Step("ALTER TABLE indexed ADD PRIMARY KEY (a); ALTER TABLE indexed REPLICA IDENTITY DEFAULT", ("indexed",)),
    Step("ALTER TABLE indexed DROP CONSTRAINT indexed_pkey; ALTER TABLE indexed ADD PRIMARY KEY (b)", ("indexed",)),
    Step("ALTER TABLE indexed DROP CONSTRAINT indexed_pkey; ALTER TABLE indexed ADD PRIMARY KEY (b) INCLUDE (a)"),
    Step("ALTER TABLE indexed DROP CONSTRAINT indexed_pkey; ALTER TABLE indexed ADD PRIMARY KEY (b, a)", ("indexed",)),
    Step("ALTER TABLE lines ADD PRIMARY KEY (what)", ("lines",)),
    Step("ALTER TABLE lines REPLICA IDENTITY DEFAULT", ("lines",)),
    Step("ALTER TABLE lines DROP CONSTRAINT lines_pkey; ALTER TABLE lines REPLICA IDENTITY FULL", ("lines",)),
    Step("ALTER TABLE log ADD more int", ("log",)),
    Step("INSERT INTO log VALUES (1); CREATE INDEX ON log (at)"),
    Step("ALTER TABLE computed ALTER twice DROP EXPRESSION", ("computed",)),
    Step("ALTER TABLE computed ADD thrice int GENERATED ALWAYS AS (id * 3) STORED", ("computed",)),
    Step("ALTER TABLE parent ADD inherited text", ("parent", "child")),
    Step("ALTER TABLE parent RENAME kind TO sort", ("parent", "child")),
    Step("ALTER TABLE child NO INHERIT parent", ("child",)),
    Step("ALTER TABLE parted ADD more text", ("parted_1", "parted_2")),
    Step("ALTER TABLE parted DETACH PARTITION parted_1", ("parted_1",)),
    Step("ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES FROM (0) TO (10)", ("parted_1",)),
    Step("CREATE TABLE parted_3 PARTITION OF parted FOR VALUES FROM (20) TO (30)", ("parted_3",)),
    Step("CREATE TABLE away.came (id int PRIMARY KEY, mood away.temper)", ("away.came",)),
    Step("CREATE TABLE journal (what text)", ("journal",)),
    Step("{publish}", ("parted_3", "away.came", "journal")),
    Step("DROP TABLE away.came; CREATE TABLE away.came (id int PRIMARY KEY, mood away.temper)", ("away.came",)),
    Step("DROP TABLE away.came"),
    Step("DROP TABLE parted_3; DROP TABLE journal; CREATE TABLE many_1 (id int PRIMARY KEY)", ("many_1",)),
    Step("ALTER TABLE many_1 SET UNLOGGED"),
    Step("ALTER TABLE many_1 SET LOGGED", ("many_1",)),
    Step("ALTER TABLE paid ADD CHECK (paid < 100); CREATE VIEW seen AS SELECT * FROM paid"),
    Step("GRANT SELECT ON paid TO PUBLIC; CREATE INDEX ON paid (paid); ALTER TABLE paid OWNER TO pg_database_owner"),
    Step("COMMENT ON TABLE paid IS 'money'; COMMENT ON COLUMN paid.paid IS 'how much'"),
    Step("ALTER TABLE paid ALTER paid SET NOT NULL", ("paid",)),
    Step("ALTER TABLE paid ALTER paid SET DEFAULT seven()", ("paid",)),
    Step("ALTER TABLE paid ALTER paid SET STATISTICS 7", ("paid",)),
    Step("ALTER TABLE paid ALTER COLUMN paid DROP DEFAULT", ("paid",)),
    Step("CREATE TABLE refers (id int PRIMARY KEY, of_paid int REFERENCES paid)", ("refers",)),
    Step("ALTER PUBLICATION {keyed} DROP TABLE paid", ("paid",)),
    Step("ALTER PUBLICATION {keyed} ADD TABLE paid", ("paid",)),
    Step("ALTER PUBLICATION {keyed} DROP TABLE paid; ALTER PUBLICATION {keyed} ADD TABLE paid", ("paid",)),
    Step("CREATE EXTENSION hstore; ALTER EXTENSION hstore ADD TABLE many_1"),
    Step("ALTER EXTENSION hstore DROP TABLE many_1", ("many_1",)),
    Step("ALTER TABLE many_1 ADD tags hstore", ("many_1",)),
    Step("ALTER EXTENSION hstore SET SCHEMA away", ("many_1",)),
    Step("DROP EXTENSION hstore CASCADE", ("many_1",)),
)  # fmt: skip


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    with own_database(shared_fleet, tmp_path, "changed") as fleet:
        execute(fleet.nodes[0].dsn, *SCHEMA)
        publish(fleet)
        yield fleet


def publish(fleet: Fleet) -> None:
    with psycopg.connect(fleet.nodes[0].dsn) as connection:
        ensure_publications(connection, FLEET_ID, read_tables(connection, SELECTION.rules))


def read(sessions: Sessions, selection: TableSelection = SELECTION) -> NodeTables:
    """All tables, from the catalogs."""
    (tables,) = read_fleet_tables(sessions, selection).values()
    return tables


def read_since(sessions: Sessions, was: NodeTables, selection: TableSelection = SELECTION) -> NodeTables:
    """The tables, if the last commit has those that `was` has; those that are not `read` are taken from there."""
    ((node, _),) = sessions.primaries.items()
    known = KnownTables({node: was.groups}, {node: was.states}, {node: was.fingerprint}, 0)
    return read_tables_since_commit(sessions, selection, lambda: known)[1][node]


def assert_equal(taken: NodeTables, catalogs: NodeTables, after: str) -> None:
    assert taken.fingerprint == catalogs.fingerprint, after
    assert dict(taken.states) == dict(catalogs.states), after
    assert {table.oid: table.group.definition() for table in taken.tables} == {
        table.oid: table.group.definition() for table in catalogs.tables
    }, after


def name_read(tables: NodeTables) -> list[str]:
    return sorted(table.group.name.removeprefix("public.") for table in tables.read)


def test_each_change_is_found_and_no_other_table_is_read(fleet: Fleet) -> None:
    (node,) = fleet.nodes
    with open_sessions(fleet, fleet.nodes) as sessions:
        was = read(sessions)
        for step in STEPS:
            if step.statements == "{publish}":
                publish(fleet)
            else:
                statements = step.statements.format(keyed=KEYED).split("; ")
                execute(node.dsn, *statements)
            taken = read_since(sessions, was)
            assert_equal(taken, read(sessions), step.statements)
            assert name_read(taken) == sorted(step.read), step.statements
            was = taken


def test_tables_whose_values_print_names_are_read_whatever_has_changed(fleet: Fleet) -> None:
    (node,) = fleet.nodes
    execute(node.dsn, "CREATE TABLE refers (id int PRIMARY KEY, of_class regclass, kinds regtype[])")
    publish(fleet)
    with open_sessions(fleet, fleet.nodes) as sessions:
        was = read(sessions)
        known = {node.id: NodeTables((), was.states, was.fingerprint, was.moment, was.groups)}
        for statement in ("CREATE VIEW another_view AS SELECT 1", "ALTER VIEW another_view RENAME TO renamed_view"):
            execute(node.dsn, statement)
            known = read_current_tables(sessions, SELECTION, known)
            assert_equal(known[node.id], read(sessions), statement)
            assert name_read(known[node.id]) == ["refers"]


def test_tables_that_the_rules_exclude_since_are_left_out(fleet: Fleet) -> None:
    (node,) = fleet.nodes
    selection = TableSelection(FLEET_ID, GroupRules(exclude=("public.pa*",), append_only=SELECTION.rules.append_only))
    with open_sessions(fleet, fleet.nodes) as sessions:
        was = read(sessions)
        execute(node.dsn, "ALTER TABLE paid ADD more int", "ALTER TABLE moody ADD more int")
        taken = read_since(sessions, was, selection)
        assert_equal(taken, read(sessions, selection), "")
        assert name_read(taken) == ["moody"]
        assert "public.plain" in taken.states
        assert not {"public.paid", "public.paired", "public.parted_1"} & taken.states.keys()
        # The rules include them again.
        again = read_since(sessions, taken)
        assert_equal(again, read(sessions), "")


def test_a_publication_that_was_altered_is_found(fleet: Fleet) -> None:
    (node,) = fleet.nodes
    with open_sessions(fleet, fleet.nodes) as sessions:
        was = read(sessions)
        execute(
            node.dsn, f"ALTER PUBLICATION {KEYED} SET (publish = 'insert')", "CREATE TABLE more (id int PRIMARY KEY)"
        )
        with pytest.raises(PublicationChangedError, match="was altered: it publishes insert"):
            read_since(sessions, was)


def test_a_table_with_a_column_list_counts_as_unpublished(fleet: Fleet) -> None:
    (node,) = fleet.nodes
    with open_sessions(fleet, fleet.nodes) as sessions:
        was = read(sessions)
        execute(
            node.dsn, f"ALTER PUBLICATION {KEYED} DROP TABLE plain",
            f"ALTER PUBLICATION {KEYED} ADD TABLE plain (id, name)", "CREATE TABLE more (id int PRIMARY KEY)",
        )  # fmt: skip
        now = read_since(sessions, was)
        assert {name for name, state in now.states.items() if not state.membership} == {"public.more", "public.plain"}
