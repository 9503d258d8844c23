"""Captures a server's messages for `captured`: `python -m tests.fuzz.capture NAME DSN`.

The DSN names an empty database, on a server with wal_level logical and prepared transactions.
"""

from __future__ import annotations

import sys

import psycopg

from cutline.nodes.groups import number_groups, read_tables
from cutline.nodes.publications import ensure_publications, publication_names
from cutline.wal.cut.markers import Marker
from cutline.wal.segments.archive import Definition
from tests.fuzz.captured import Captured, store
from tests.integration.wal_follower import FLEET, RULES
from tests.wal.markers import write_marker

SLOT = "captured"
SCHEMA = r"""
CREATE TYPE mood AS ENUM ('ok', 'so "so"');
CREATE TABLE keyed (note text, id integer, mood mood, code varchar(8), big text, PRIMARY KEY (code, id));
ALTER TABLE keyed ALTER big SET STORAGE EXTERNAL;
CREATE SCHEMA "od d";
CREATE TABLE "od d"."Ta""ble" ("va lue" numeric(8, 2), "Schlüssel" text PRIMARY KEY, flags boolean[]);
CREATE TABLE by_index (a integer, b integer NOT NULL, c text);
CREATE UNIQUE INDEX by_index_b ON by_index (b);
ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b;
CREATE TABLE bag (x text, y integer);
ALTER TABLE bag REPLICA IDENTITY FULL;
CREATE TABLE append_only (x text);
CREATE TABLE nothing ();
ALTER TABLE nothing REPLICA IDENTITY FULL;
CREATE TABLE other (id integer PRIMARY KEY, v text);
"""
ROUND = r"""
BEGIN; INSERT INTO keyed VALUES (E'tab\tand\\', {n}, 'ok', 'k{n}', repeat('x{n}', 1500)), (NULL, {n}, NULL, '', '');
UPDATE keyed SET note = 'other' WHERE code = 'k{n}'; UPDATE keyed SET id = -{n} WHERE id = {n}; COMMIT;
INSERT INTO "od d"."Ta""ble" VALUES ({n}.25, 'ü€𝄞{n}', '{{t,f,NULL}}'), (NULL, E'\\N{n}', NULL);
UPDATE "od d"."Ta""ble" SET "Schlüssel" = '{n}' WHERE "Schlüssel" = 'ü€𝄞{n}';
INSERT INTO by_index VALUES ({n}, {n}, 'c'); UPDATE by_index SET b = {n} + 100 WHERE b = {n};
BEGIN; INSERT INTO bag VALUES ('a', {n}), ('a', {n}), (NULL, NULL); SAVEPOINT s; DELETE FROM bag; ROLLBACK TO s;
UPDATE bag SET x = 'b' WHERE y = {n}; DELETE FROM bag WHERE y IS NULL; COMMIT;
INSERT INTO append_only VALUES ('{n}'); INSERT INTO nothing DEFAULT VALUES; INSERT INTO other VALUES ({n}, 'v');
SELECT pg_logical_emit_message(true, 'others', 'content {n}'), pg_logical_emit_message(false, 'others', '');
BEGIN; SELECT pg_logical_emit_message(true, 'snapshot.gid', 'tag {n}'); DELETE FROM by_index; COMMIT;
BEGIN; DELETE FROM keyed WHERE id = -{n} AND code = ''; PREPARE TRANSACTION 'gid {n}';
BEGIN; INSERT INTO bag VALUES ('undone', {n}); PREPARE TRANSACTION 'ü {n}';
COMMIT PREPARED 'gid {n}'; ROLLBACK PREPARED 'ü {n}';
TRUNCATE bag, by_index; TRUNCATE other RESTART IDENTITY CASCADE;
"""


def capture(name: str, dsn: str) -> Captured:
    """Run some statements, and capture how the server decodes them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(SCHEMA)
        tables = number_groups({"s": read_tables(connection, RULES)}, 1)["s"]
        ensure_publications(connection, FLEET, tables)
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput', false, true)", [SLOT])
        try:
            for number in (1, 2):
                for statement in ROUND.format(n=number).split(";"):
                    connection.execute(statement.encode())
                write_marker(connection, Marker("chain", f"{number}", "finish"))
            names = ",".join(f'"{one}"' for one in publication_names(FLEET))
            found = connection.execute(
                "SELECT data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, 'proto_version', '3',"
                " 'publication_names', %s, 'messages', 'true')",
                [SLOT, names],
            ).fetchall()
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [SLOT])
    versions = tuple(Definition(table.oid, table.group) for table in tables if table.group.table != "other")
    return Captured(name, [row[0] for row in found], versions)


if __name__ == "__main__":
    store(capture(sys.argv[1], sys.argv[2]))
