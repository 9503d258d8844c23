"""The fingerprint of the catalogs: it differs after every DDL that a dump could show, and after nothing else.

The tests execute statements in a database on the shared fleet's first server.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import GroupRules, Node
from cutline.nodes.connections import connect
from cutline.nodes.publications import TableStamps, have_same_members
from cutline.nodes.watch import watch_nodes
from cutline.snapshots.ddl.ddl_archive import read_contents
from cutline.snapshots.ddl.dump import dump_archive
from cutline.snapshots.ddl.fingerprint import (
    CATALOGS,
    HASH_DIGITS,
    ONE_SNAPSHOT,
    USER_MAPPINGS,
    Moment,
    are_same_objects,
    has_only_added,
    is_unchanged,
    read_again,
    read_fingerprint,
    read_moment,
    read_rows,
)
from cutline.snapshots.ddl.table_changes import TableSelection, read_node_tables
from tests.run.soak import SOAK_SECONDS

DATABASE = "fingerprints"
READER = "fingerprints_reader"
OWN = "cutline_0123abcd"

SCHEMA = f"""
CREATE TABLE t (id int PRIMARY KEY, v text DEFAULT 'x', n int);
INSERT INTO t SELECT n, repeat('y', 3000), n FROM generate_series(1, 100) n;
CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id);
CREATE TABLE part PARTITION OF parted FOR VALUES FROM (0) TO (10);
CREATE TABLE loose (id int NOT NULL);
CREATE TABLE t2 (id int PRIMARY KEY);
ALTER TABLE t2 CLUSTER ON t2_pkey;
CREATE SEQUENCE s;
CREATE TABLE counted (id serial);
CREATE VIEW w AS SELECT id FROM t;
CREATE MATERIALIZED VIEW m AS SELECT id FROM t;
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TYPE pair AS (x int, y text);
CREATE DOMAIN positive AS int CHECK (value > 0);
CREATE FUNCTION f(int) RETURNS int LANGUAGE sql AS 'SELECT $1';
CREATE FUNCTION noted() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
CREATE FUNCTION saw() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END';
CREATE TRIGGER g AFTER INSERT ON t FOR EACH ROW EXECUTE FUNCTION noted();
CREATE RULE r AS ON DELETE TO loose DO INSTEAD NOTHING;
CREATE POLICY p ON t USING (true);
CREATE STATISTICS st ON id, n FROM t;
CREATE EVENT TRIGGER fingerprints_event ON ddl_command_end EXECUTE FUNCTION saw();
CREATE FOREIGN DATA WRAPPER nothing;
CREATE SERVER elsewhere FOREIGN DATA WRAPPER nothing;
CREATE PUBLICATION theirs FOR TABLE t;
CREATE PUBLICATION {OWN} FOR TABLE t;
CREATE TEXT SEARCH DICTIONARY d (TEMPLATE = simple);
CREATE EXTENSION hstore
"""
TABLES = 10_000 if SOAK_SECONDS else 50
TABLES_AT_ONCE = 500  # a transaction can't hold the locks of many more
# A change and its undo. Both change the fingerprint, and the undo does not restore it: the catalogs' rows are new.
CHANGES_AND_UNDOS = (
    ("ALTER TABLE t ADD c int", "ALTER TABLE t DROP c"),
    ("ALTER TABLE t ALTER v SET DEFAULT 'y'", "ALTER TABLE t ALTER v SET DEFAULT 'x'"),
    ("ALTER TABLE t RENAME v TO u", "ALTER TABLE t RENAME u TO v"),
    ("ALTER TABLE t ALTER n SET NOT NULL", "ALTER TABLE t ALTER n DROP NOT NULL"),
    ("ALTER TABLE t ALTER v TYPE varchar(5000)", "ALTER TABLE t ALTER v TYPE text"),
    ("ALTER TABLE t ALTER v SET STATISTICS 500", "ALTER TABLE t ALTER v SET STATISTICS -1"),
    ("ALTER TABLE t ALTER v SET STORAGE external", "ALTER TABLE t ALTER v SET STORAGE extended"),
    ("ALTER TABLE t RENAME TO q", "ALTER TABLE q RENAME TO t"),
    ("ALTER TABLE t DISABLE TRIGGER g", "ALTER TABLE t ENABLE TRIGGER g"),
    ("ALTER TABLE loose DISABLE RULE r", "ALTER TABLE loose ENABLE RULE r"),
    ("ALTER TABLE t CLUSTER ON t_pkey", "ALTER TABLE t SET WITHOUT CLUSTER"),
    ("ALTER TABLE t RENAME CONSTRAINT t_pkey TO k", "ALTER TABLE t RENAME CONSTRAINT k TO t_pkey"),
    (
        "ALTER TABLE parted DETACH PARTITION part",
        "ALTER TABLE parted ATTACH PARTITION part FOR VALUES FROM (0) TO (10)",
    ),
    ("GRANT SELECT (v) ON t TO fingerprints_reader", "REVOKE SELECT (v) ON t FROM fingerprints_reader"),
    ("ALTER POLICY p ON t USING (id > 0)", "ALTER POLICY p ON t USING (true)"),
    ("ALTER STATISTICS st SET STATISTICS 5", "ALTER STATISTICS st SET STATISTICS -1"),
    ("ALTER SEQUENCE s CACHE 5", "ALTER SEQUENCE s CACHE 1"),
    ("ALTER SEQUENCE s OWNED BY t.id", "ALTER SEQUENCE s OWNED BY NONE"),
    ("ALTER SEQUENCE s RESTART WITH 7", "ALTER SEQUENCE s RESTART WITH 1"),
    ("CREATE OR REPLACE VIEW w AS SELECT id FROM t WHERE id > 1", "CREATE OR REPLACE VIEW w AS SELECT id FROM t"),
    ("ALTER TYPE mood RENAME VALUE 'sad' TO 'bad'", "ALTER TYPE mood RENAME VALUE 'bad' TO 'sad'"),
    ("ALTER TYPE pair ADD ATTRIBUTE z int", "ALTER TYPE pair DROP ATTRIBUTE z"),
    ("ALTER DOMAIN positive SET NOT NULL", "ALTER DOMAIN positive DROP NOT NULL"),
    ("ALTER FUNCTION f(int) COST 5", "ALTER FUNCTION f(int) COST 100"),
    ("ALTER EVENT TRIGGER fingerprints_event DISABLE", "ALTER EVENT TRIGGER fingerprints_event ENABLE"),
    ("ALTER SERVER elsewhere OPTIONS (ADD a 'b')", "ALTER SERVER elsewhere OPTIONS (DROP a)"),
    (
        "ALTER PUBLICATION theirs SET (publish = 'insert')",
        "ALTER PUBLICATION theirs SET (publish = 'insert, update, delete, truncate')",
    ),
    ("ALTER TEXT SEARCH DICTIONARY d (Accept = false)", "ALTER TEXT SEARCH DICTIONARY d (Accept = true)"),
    ("ALTER SCHEMA public RENAME TO p2", "ALTER SCHEMA p2 RENAME TO public"),
    ("ALTER EXTENSION hstore SET SCHEMA pg_catalog", "ALTER EXTENSION hstore SET SCHEMA public"),
)
# A change and its undo. Both change the fingerprint; the undo may restore it.
CREATES_AND_DROPS = (
    ("CREATE TABLE u (id int)", "DROP TABLE u"),
    ("CREATE INDEX i ON t (n)", "DROP INDEX i"),
    ("CREATE SEQUENCE s2", "DROP SEQUENCE s2"),
    ("CREATE VIEW w2 AS SELECT 1", "DROP VIEW w2"),
    ("CREATE TYPE e AS ENUM ('a')", "DROP TYPE e"),
    ("CREATE DOMAIN d2 AS int", "DROP DOMAIN d2"),
    ("CREATE FUNCTION f2() RETURNS int LANGUAGE sql AS 'SELECT 1'", "DROP FUNCTION f2"),
    ("CREATE AGGREGATE a(int) (SFUNC = int4pl, STYPE = int)", "DROP AGGREGATE a(int)"),
    ("CREATE OPERATOR @#@ (LEFTARG = int, RIGHTARG = int, FUNCTION = int4pl)", "DROP OPERATOR @#@ (int, int)"),
    ("CREATE OPERATOR FAMILY fam USING btree", "DROP OPERATOR FAMILY fam USING btree"),
    ("CREATE CAST (mood AS int) WITH INOUT", "DROP CAST (mood AS int)"),
    ('CREATE COLLATION col FROM "C"', "DROP COLLATION col"),
    ("CREATE CONVERSION con FOR 'LATIN1' TO 'UTF8' FROM iso8859_1_to_utf8", "DROP CONVERSION con"),
    ("CREATE TEXT SEARCH CONFIGURATION c (PARSER = pg_catalog.default)", "DROP TEXT SEARCH CONFIGURATION c"),
    ("CREATE STATISTICS st2 ON id, n FROM t", "DROP STATISTICS st2"),
    ("CREATE TRIGGER g2 AFTER INSERT ON t EXECUTE FUNCTION noted()", "DROP TRIGGER g2 ON t"),
    ("CREATE RULE r2 AS ON INSERT TO loose DO INSTEAD NOTHING", "DROP RULE r2 ON loose"),
    ("CREATE POLICY p2 ON t USING (false)", "DROP POLICY p2 ON t"),
    ("CREATE PUBLICATION pub FOR TABLES IN SCHEMA public", "DROP PUBLICATION pub"),
    ("CREATE USER MAPPING FOR PUBLIC SERVER elsewhere", "DROP USER MAPPING FOR PUBLIC SERVER elsewhere"),
    ("CREATE FOREIGN TABLE ft (id int) SERVER elsewhere", "DROP FOREIGN TABLE ft"),
    ("CREATE ACCESS METHOD am TYPE TABLE HANDLER heap_tableam_handler", "DROP ACCESS METHOD am"),
    ("CREATE EXTENSION citext", "DROP EXTENSION citext"),
    ("ALTER EXTENSION hstore ADD FUNCTION f(int)", "ALTER EXTENSION hstore DROP FUNCTION f(int)"),
    ("ALTER FUNCTION f(int) DEPENDS ON EXTENSION hstore", "ALTER FUNCTION f(int) NO DEPENDS ON EXTENSION hstore"),
    ("COMMENT ON COLUMN t.v IS 'c'", "COMMENT ON COLUMN t.v IS NULL"),
    # Of the database itself, the properties count.
    (f"ALTER DATABASE {DATABASE} SET work_mem = '8MB'", f"ALTER DATABASE {DATABASE} RESET work_mem"),
    (
        f"ALTER ROLE fingerprints_reader IN DATABASE {DATABASE} SET work_mem = '8MB'",
        f"ALTER ROLE fingerprints_reader IN DATABASE {DATABASE} RESET work_mem",
    ),
    (f"COMMENT ON DATABASE {DATABASE} IS 'c'", f"COMMENT ON DATABASE {DATABASE} IS NULL"),
    (f"ALTER DATABASE {DATABASE} CONNECTION LIMIT 90", f"ALTER DATABASE {DATABASE} CONNECTION LIMIT -1"),
    (f"ALTER DATABASE {DATABASE} IS_TEMPLATE true", f"ALTER DATABASE {DATABASE} IS_TEMPLATE false"),
    (f"GRANT CREATE ON DATABASE {DATABASE} TO PUBLIC", f"REVOKE CREATE ON DATABASE {DATABASE} FROM PUBLIC"),
    (f"ALTER DATABASE {DATABASE} OWNER TO fingerprints_reader", f"ALTER DATABASE {DATABASE} OWNER TO CURRENT_USER"),
    (
        "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO PUBLIC",
        "ALTER DEFAULT PRIVILEGES REVOKE SELECT ON TABLES FROM PUBLIC",
    ),
    ("ALTER TABLE loose ADD CONSTRAINT k CHECK (id > 0)", "ALTER TABLE loose DROP CONSTRAINT k"),
    ("CREATE SCHEMA sc", "DROP SCHEMA sc"),
    # Of a relation's own row, only the contents count.
    ("ALTER TABLE t ENABLE ROW LEVEL SECURITY", "ALTER TABLE t DISABLE ROW LEVEL SECURITY"),
    ("ALTER TABLE t FORCE ROW LEVEL SECURITY", "ALTER TABLE t NO FORCE ROW LEVEL SECURITY"),
    ("ALTER TABLE t SET (fillfactor = 50)", "ALTER TABLE t RESET (fillfactor)"),
    ("ALTER TABLE t SET (toast.autovacuum_enabled = off)", "ALTER TABLE t RESET (toast.autovacuum_enabled)"),
    ("ALTER TABLE loose REPLICA IDENTITY FULL", "ALTER TABLE loose REPLICA IDENTITY DEFAULT"),
    ("REFRESH MATERIALIZED VIEW m WITH NO DATA", "REFRESH MATERIALIZED VIEW m"),
)
# Those of them that only add rows to the catalogs.
ADDITIONS = tuple(
    change
    for change, _ in CREATES_AND_DROPS
    if change.startswith(("CREATE ", "ALTER EXTENSION ", "ALTER FUNCTION ", "COMMENT ON COLUMN ", "ALTER DEFAULT "))
    or "ADD CONSTRAINT" in change
)
# Statements with no effect on any row that is hashed.
WITHOUT_TRACE = (
    "INSERT INTO t VALUES (1000, 'z', 1)", "UPDATE t SET n = n + 1", "DELETE FROM t WHERE id = 1000",
    "ANALYZE", "VACUUM", "VACUUM (FREEZE, ANALYZE) t", "CLUSTER t2", "REINDEX TABLE t",
    "TRUNCATE loose", "TRUNCATE part", "TRUNCATE counted RESTART IDENTITY", "SELECT nextval('s')",
    "SELECT setval('s', 9)", "REFRESH MATERIALIZED VIEW m",
    "BEGIN; CREATE TABLE never (id int); ALTER TABLE t ADD x int; ROLLBACK",
    "CREATE ROLE fingerprints_other; DROP ROLE fingerprints_other",
    # A terminal snapshot sets this one itself.
    f"ALTER DATABASE {DATABASE} SET default_transaction_read_only = off",
    f"ALTER DATABASE {DATABASE} RESET default_transaction_read_only",
    "VACUUM FREEZE pg_class", "VACUUM FREEZE pg_attribute", "VACUUM FULL pg_class", "REINDEX TABLE pg_attribute",
)  # fmt: skip
# Statements with no effect on a dump, but on rows of catalogs.
WITHOUT_EFFECT = (
    "VACUUM FULL t",
    "CREATE TEMP TABLE tt (id serial PRIMARY KEY, v text DEFAULT 'x', CHECK (id > 0)); CREATE INDEX ON tt (v)",
    "CREATE TEMP VIEW tv AS SELECT 1; CREATE TEMP SEQUENCE ts; COMMENT ON TABLE tt IS 'c'",
    "CREATE TYPE pg_temp.te AS ENUM ('a'); CREATE FUNCTION pg_temp.tf() RETURNS int LANGUAGE sql AS 'SELECT 1'",
    "CREATE TEMP TABLE heir () INHERITS (t)", "DROP TABLE heir", "VACUUM ANALYZE t",
    f"COMMENT ON PUBLICATION {OWN} IS 'frozen'", f"ALTER PUBLICATION {OWN} ADD TABLE loose",
)  # fmt: skip
# Catalogs of values and statistics. pg_class and pg_depend are in the fingerprint, but in queries of their own.
NOT_DUMPED = {
    "pg_statistic", "pg_statistic_ext_data", "pg_largeobject", "pg_largeobject_metadata", "pg_class", "pg_depend",
}  # fmt: skip


@pytest.fixture
def database(shared_fleet: EmbeddedFleet) -> Iterator[psycopg.Connection[object]]:
    maintenance = Node("s1", shared_fleet.primaries[0].dsn("postgres"))
    with connect(maintenance) as server:
        server.execute(f"CREATE DATABASE {DATABASE}")
        server.execute(f"CREATE ROLE {READER} LOGIN IN ROLE pg_read_all_data")
        try:
            with psycopg.connect(shared_fleet.primaries[0].dsn(DATABASE), autocommit=True) as connection:
                run(connection, *SCHEMA.split(";\n"))
                yield connection
        finally:
            server.execute(f"DROP DATABASE {DATABASE} WITH (FORCE)")
            server.execute(f"DROP ROLE {READER}")


def run(connection: psycopg.Connection[object], *statements: str) -> None:
    for statement in statements:
        connection.execute(statement.encode())


def test_every_ddl_changes_the_fingerprint_and_nothing_else_does(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object]
) -> None:
    with connect(Node("s1", shared_fleet.primaries[0].dsn(DATABASE))) as reader:
        seen = read_fingerprint(reader)

        def change_by(statement: str) -> bool:
            """Run the statement; return whether the objects change. Compare what is read again with the whole."""
            nonlocal seen
            with reader.transaction():
                run(reader, ONE_SNAPSHOT)
                _, moment = read_rows(reader)
            run(database, statement)
            with reader.transaction():
                run(reader, ONE_SNAPSHOT)
                is_same = is_unchanged(reader, moment, read_moment(reader))
            was, seen = seen, read_fingerprint(reader)
            assert not is_same or seen == was, statement
            assert read_again(reader, was) == seen, statement
            return not are_same_objects(was, seen)

        for statement in WITHOUT_TRACE:
            run(database, statement)
            assert read_fingerprint(reader) == seen, statement
        for statement in WITHOUT_EFFECT:
            assert not change_by(statement), statement
        for change, undo in CHANGES_AND_UNDOS:
            before = seen
            assert change_by(change), change
            assert change_by(undo), undo
            assert not are_same_objects(before, seen), (change, undo)
        for change, undo in CREATES_AND_DROPS:
            assert change_by(change), change
            assert change_by(undo), undo


def read_visible(reader: psycopg.Connection[object]) -> tuple[str, str]:
    """Return the fingerprint of a snapshot, and the transactions that it shows."""
    with reader.transaction():
        run(reader, ONE_SNAPSHOT)
        return read_fingerprint(reader), read_moment(reader).visible


@pytest.mark.parametrize("is_running", [False, True], ids=["alone", "beside a transaction"])
def test_added_objects_are_told_from_changed_ones(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object], *, is_running: bool
) -> None:
    """Also if an older transaction is still running: then its id is lower than those of many objects."""
    dsn = shared_fleet.primaries[0].dsn(DATABASE)
    with connect(Node("s1", dsn)) as reader, psycopg.connect(dsn) as other:
        if is_running:
            other.execute("SELECT pg_current_xact_id()")
        for change, undo in (*CHANGES_AND_UNDOS, *CREATES_AND_DROPS):
            was, visible = read_visible(reader)
            assert has_only_added(reader, was, visible), change
            # A new file changes no object, and so does not count.
            run(database, "TRUNCATE loose", change)
            assert has_only_added(reader, was, visible) == (change in ADDITIONS), change
            was, visible = read_visible(reader)
            run(database, undo)
            assert not has_only_added(reader, was, visible), undo


@pytest.mark.parametrize("savepoint", [False, True])
def test_an_object_of_a_transaction_that_was_running_is_added(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object], *, savepoint: bool
) -> None:
    """A snapshot has no ids of subtransactions: their objects look like older ones that have changed."""
    dsn = shared_fleet.primaries[0].dsn(DATABASE)
    with connect(Node("s1", dsn)) as reader, psycopg.connect(dsn) as other:
        other.execute("SELECT pg_current_xact_id()")
        if savepoint:
            other.execute("SAVEPOINT one")
        other.execute("CREATE TABLE early (id int)")
        run(database, "CREATE TABLE done (id int)")
        was, visible = read_visible(reader)
        other.commit()
        assert not are_same_objects(read_fingerprint(reader), was)
        assert has_only_added(reader, was, visible) == (not savepoint)
        run(database, "ALTER TABLE done ADD v int")
        assert not has_only_added(reader, was, visible)


def test_a_dump_shows_no_object_that_is_added_while_it_runs(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object]
) -> None:
    node = Node("s1", shared_fleet.primaries[0].dsn(DATABASE))

    def add(connection: psycopg.Connection[object]) -> None:
        # The snapshot of the dump begins with the first statement of its transaction.
        run(connection, "SELECT FROM pg_class")
        run(database, *ADDITIONS)

    with watch_nodes([node]) as watch:
        before, during, after = (entries_of(dump_archive(node, None, watch, check)) for check in (None, add, None))
    assert during == before
    assert len(after) >= len(before) + len(ADDITIONS) - 5


def entries_of(body: bytes) -> set[tuple[str, str, str, bytes]]:
    return {
        (entry.kind, entry.schema, entry.name, body[entry.begin : entry.end]) for entry in read_contents(body).entries
    }


@dataclass(frozen=True, slots=True)
class Moments:
    """A session that compares the catalogs with a moment."""

    connection: psycopg.Connection[object]

    def read(self) -> Moment:
        with self.connection.transaction():
            run(self.connection, ONE_SNAPSHOT)
            return read_rows(self.connection)[1]

    def is_same(self, was: Moment) -> bool:
        with self.connection.transaction():
            run(self.connection, ONE_SNAPSHOT)
            return is_unchanged(self.connection, was, read_moment(self.connection))


@pytest.fixture
def moments(shared_fleet: EmbeddedFleet) -> Iterator[Moments]:
    with connect(Node("s1", shared_fleet.primaries[0].dsn(DATABASE))) as connection:
        yield Moments(connection)


def test_other_transactions_change_no_catalog(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object], moments: Moments
) -> None:
    was = moments.read()
    assert moments.is_same(was)
    run(database, "INSERT INTO t VALUES (1000, 'x', 1)", "ANALYZE t", "DELETE FROM t WHERE id = 1000")
    assert moments.is_same(was)
    with connect(Node("s1", shared_fleet.primaries[0].dsn(DATABASE))) as other:
        assert not Moments(other).is_same(was)
    run(database, "COMMENT ON TABLE t IS 'changed'")
    assert not moments.is_same(was)


@pytest.mark.parametrize("ends", ["COMMIT", "ROLLBACK"])
def test_ddl_that_was_running_is_found_once_it_is_committed(
    database: psycopg.Connection[object], moments: Moments, ends: str
) -> None:
    """Also in subtransactions, of which a snapshot has no ids."""
    run(database, "BEGIN", "SELECT pg_current_xact_id()", "SAVEPOINT one", "ALTER TABLE t RENAME n TO m")
    # A snapshot names the transactions before the newest one that has ended.
    run(moments.connection, "SELECT pg_current_xact_id()")
    was = moments.read()
    assert moments.is_same(was)
    run(database, ends)
    assert moments.is_same(was) == (ends == "ROLLBACK")


def test_what_was_dropped_is_missed(database: psycopg.Connection[object], moments: Moments) -> None:
    """It leaves no row of the transaction that dropped it."""
    was = moments.read()
    run(database, "DELETE FROM pg_catalog.pg_description WHERE objoid = 'pg_catalog.int4pl'::regproc")
    assert not moments.is_same(was)


def test_after_many_transactions_nothing_is_certain(
    database: psycopg.Connection[object], moments: Moments, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = moments.read()
    run(database, *["SELECT pg_current_xact_id()"] * 3)
    assert moments.is_same(was)
    monkeypatch.setattr("cutline.snapshots.ddl.fingerprint.XIDS_MAX", 2)
    assert not moments.is_same(was)


def test_a_server_that_refuses_md5_is_read(shared_fleet: EmbeddedFleet, database: psycopg.Connection[object]) -> None:
    """OpenSSL refuses it in FIPS mode."""
    run(database, "ALTER FUNCTION pg_catalog.md5(text) RENAME TO no_md5", "CREATE TABLE naming (id regclass NOT NULL)",
        "ALTER TABLE naming REPLICA IDENTITY FULL")  # fmt: skip
    with connect(Node("s1", shared_fleet.primaries[0].dsn(DATABASE))) as reader:
        read = read_node_tables(reader, "s1", TableSelection(OWN.removeprefix("cutline_"), GroupRules()))
        state = read.states["public.t"]
        members = [TableStamps(state.oid, state.publication, state.membership)]
        assert have_same_members(reader, OWN.removeprefix("cutline_"), members)
    assert len(read.fingerprint) == 2 * HASH_DIGITS
    assert read.states["public.naming"].has_names


def test_a_role_that_reads_all_data_reads_the_same_fingerprint(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object]
) -> None:
    dsn = shared_fleet.primaries[0].dsn(DATABASE)
    with connect(Node("s1", dsn)) as owner, connect(Node("s1", dsn), user=READER) as reader:
        assert read_fingerprint(owner) == read_fingerprint(reader)


def test_a_role_that_may_not_read_user_mappings_sees_what_pg_dump_shows_it(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object]
) -> None:
    dsn = shared_fleet.primaries[0].dsn(DATABASE)
    run(database, f"REVOKE pg_read_all_data FROM {READER}")
    with connect(Node("s1", dsn)) as owner, connect(Node("s1", dsn), user=READER) as reader:
        assert reader.execute("SELECT has_table_privilege('pg_user_mapping', 'SELECT')").fetchone() == (False,)
        seen = [read_fingerprint(reader)]
        assert seen == [read_fingerprint(owner)]
        mapping = f"USER MAPPING FOR {READER} SERVER elsewhere"
        for change in (
            f"CREATE {mapping} OPTIONS (a 'hidden')", f"GRANT USAGE ON FOREIGN SERVER elsewhere TO {READER}",
            f"ALTER {mapping} OPTIONS (SET a 'b')",
        ):  # fmt: skip
            run(database, change)
            now = read_fingerprint(reader)
            assert now not in seen, change
            seen.append(now)
        run(database, "CREATE TABLE u (id int)")
        assert read_fingerprint(reader) not in seen


def test_no_catalog_is_forgotten(database: psycopg.Connection[object]) -> None:
    found = database.execute(
        "SELECT relname FROM pg_class WHERE relnamespace = 'pg_catalog'::regnamespace AND relkind = 'r'"
        " AND (NOT relisshared OR relname = 'pg_tablespace')"
    ).fetchall()
    names = {str(row[0]) for row in found}  # type: ignore[index]  # a row
    assert names - {"pg_subscription_rel"} == {catalog.name for catalog in (*CATALOGS, USER_MAPPINGS)} | NOT_DUMPED


def test_the_fingerprint_is_read_quickly(shared_fleet: EmbeddedFleet, database: psycopg.Connection[object]) -> None:
    """The long form has thousands of tables: a plan that compares all pairs of rows would be too slow."""
    for start in range(0, TABLES, TABLES_AT_ONCE):
        database.execute(
            f"DO $$ BEGIN FOR n IN {start + 1}..{min(start + TABLES_AT_ONCE, TABLES)} LOOP EXECUTE format('"
            "CREATE TABLE many_%s (id serial PRIMARY KEY, a text, b text NOT NULL, c int DEFAULT 1)', n);"
            " END LOOP; END $$".encode()
        )
    with connect(Node("s1", shared_fleet.primaries[0].dsn(DATABASE))) as reader:
        began = time.monotonic()
        read_fingerprint(reader)
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "statement",
    [
        f"ALTER DATABASE {DATABASE} OWNER TO {READER}",
        f"GRANT CONNECT ON DATABASE {DATABASE} TO {READER}",
        f"ALTER ROLE {READER} IN DATABASE {DATABASE} SET work_mem = '8MB'",
    ],
)
def test_a_new_name_of_a_role_that_only_the_database_itself_names_counts(
    shared_fleet: EmbeddedFleet, database: psycopg.Connection[object], statement: str
) -> None:
    with connect(Node("s1", shared_fleet.primaries[0].dsn(DATABASE))) as reader:
        run(database, statement)
        before = read_fingerprint(reader)
        run(database, f"ALTER ROLE {READER} RENAME TO {READER}_renamed")
        renamed = read_fingerprint(reader)
        run(database, f"ALTER ROLE {READER}_renamed RENAME TO {READER}")
        assert renamed != before == read_fingerprint(reader)
