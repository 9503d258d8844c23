"""A database in any encoding: names and values that no conversion preserves, and hostile settings of sessions.

Everything is bytes in the server's encoding.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg

from cutline.nodes.programs import tool

# Settings of a test's own session where those of the role are HOSTILE.
QUIET = {
    "search_path": "public", "statement_timeout": "0", "lock_timeout": "0", "idle_session_timeout": "0",
    "idle_in_transaction_session_timeout": "0", "default_transaction_read_only": "off",
    "default_transaction_isolation": "read\\ committed", "standard_conforming_strings": "on",
    "session_replication_role": "origin", "synchronous_commit": "local", "array_nulls": "on",
    "transform_null_equals": "off", "xmloption": "content", "bytea_output": "hex", "datestyle": "ISO",
    "intervalstyle": "postgres", "timezone": "UTC", "extra_float_digits": "1", "quote_all_identifiers": "off",
}  # fmt: skip
# Settings of a role or database that change what a session sees, prints or may do.
HOSTILE = {
    "search_path": "evil, pg_catalog, public", "statement_timeout": "'30s'", "lock_timeout": "'1s'",
    "idle_in_transaction_session_timeout": "'1s'", "idle_session_timeout": "'1s'",
    "default_transaction_read_only": "on", "default_transaction_isolation": "serializable",
    "standard_conforming_strings": "off", "row_security": "off", "session_replication_role": "replica",
    "default_toast_compression": "pglz", "synchronous_commit": "remote_apply", "array_nulls": "off",
    "transform_null_equals": "on", "xmloption": "document", "bytea_output": "escape", "datestyle": "'German'",
    "intervalstyle": "sql_standard", "timezone": "'Asia/Kolkata'", "extra_float_digits": "'-15'",
    "quote_all_identifiers": "on", "client_encoding": "'UTF8'", "log_statement": "'all'",
}  # fmt: skip
# Only 17 and later have transaction_timeout; the transactions that export slots' snapshots take longer than it allows.
TRANSACTION_TIMEOUT_VERSION = 170000
# A user's own functions and operators, before PostgreSQL's in the search_path: calling one of them fails.
EVIL = b"""
CREATE SCHEMA evil;
CREATE FUNCTION evil.no() RETURNS bool LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil was called'; END $$;
CREATE FUNCTION evil.equal(oid, oid) RETURNS bool LANGUAGE sql AS 'SELECT evil.no()';
CREATE FUNCTION evil.equal(name, name) RETURNS bool LANGUAGE sql AS 'SELECT evil.no()';
CREATE FUNCTION evil.equal(text, text) RETURNS bool LANGUAGE sql AS 'SELECT evil.no()';
CREATE OPERATOR evil.= (LEFTARG = oid, RIGHTARG = oid, FUNCTION = evil.equal);
CREATE OPERATOR evil.= (LEFTARG = name, RIGHTARG = name, FUNCTION = evil.equal);
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.equal);
CREATE FUNCTION evil.current_database() RETURNS name LANGUAGE sql AS 'SELECT evil.no()::text::name';
CREATE FUNCTION evil.current_setting(text) RETURNS text LANGUAGE sql AS 'SELECT evil.no()::text';
CREATE FUNCTION evil.pg_relation_size(oid) RETURNS bigint LANGUAGE sql AS 'SELECT evil.no()::int::bigint';
CREATE FUNCTION evil.convert_to(text, name) RETURNS bytea LANGUAGE sql AS 'SELECT evil.no()::text::bytea';
CREATE AGGREGATE evil.count(*) (SFUNC = int8inc, STYPE = int8, INITCOND = '1000000');
CREATE TABLE evil.pg_class (oid oid PRIMARY KEY);
"""

SCHEMA = b"""
CREATE TYPE "e{name}" AS ENUM ('{name}', '{odd}');
CREATE DOMAIN "d{name}" AS text CHECK (value <> 'not {odd}');
CREATE TABLE "t{name}" (
    "k{name}" text PRIMARY KEY, v text DEFAULT 'default {odd} \\', w text, n int NOT NULL, e "e{name}", d "d{name}",
    a text[], at timestamptz DEFAULT '2026-03-29 01:30:00+00', raw bytea DEFAULT '\\x5c00ff',
    CONSTRAINT "c{name}" CHECK (v <> 'never {odd}')
);
ALTER TABLE "t{name}" ALTER w SET STORAGE EXTERNAL;
COMMENT ON TABLE "t{name}" IS 'comment {odd}';
CREATE INDEX "i{name}" ON "t{name}" (n) WHERE v > '{odd}';
CREATE TABLE bag (v text COLLATE "POSIX", w text, n int);
ALTER TABLE bag REPLICA IDENTITY FULL;
ALTER TABLE bag ALTER w SET STORAGE EXTERNAL;
CREATE TABLE listed ("k{name}" varchar(40), c char(9), PRIMARY KEY ("k{name}", c)) PARTITION BY LIST ("k{name}");
CREATE TABLE listed_1 PARTITION OF listed FOR VALUES IN ('{odd}');
CREATE TABLE listed_2 PARTITION OF listed DEFAULT;
CREATE FUNCTION f() RETURNS text LANGUAGE sql AS $$ SELECT 'body {odd}'::text -- lines\r\n $$;
CREATE SEQUENCE "s{name}";
DROP ROLE IF EXISTS "r{name}";
CREATE ROLE "r{name}";
ALTER TABLE bag OWNER TO "r{name}";
GRANT SELECT ON listed TO "r{name}";
"""
CHANGES = (
    b"""
UPDATE "t{name}" SET n = n + 1;
UPDATE "t{name}" SET "k{name}" = "k{name}" || '{odd}' WHERE n % 3 = 0;
DELETE FROM "t{name}" WHERE n % 5 = 4;
UPDATE bag SET n = n + 1 WHERE n % 2 = 0;
DELETE FROM bag WHERE n = 5;
INSERT INTO bag VALUES ('{odd}', NULL, 0), ('{odd}', NULL, 0);
UPDATE listed SET c = '{odd}' WHERE "k{name}" = '{odd}';
SELECT nextval('"s{name}"') FROM generate_series(1, 5);
BEGIN;
SELECT pg_logical_emit_message(true, 'snapshot.gid', 'tag {name}');
INSERT INTO bag VALUES ('tagged {name}', NULL, 0);
COMMIT;
BEGIN;
INSERT INTO bag VALUES ('across {name}', NULL, 0);
PREPARE TRANSACTION 'across {name}';
BEGIN;
INSERT INTO bag VALUES ('own {odd}', NULL, 0);
PREPARE TRANSACTION 'own {odd}';
COMMIT PREPARED 'across {name}';
COMMIT PREPARED 'own {odd}';
""",
    b"""
ALTER TABLE "t{name}" ADD "x{name}" text DEFAULT 'for older rows {odd} \t';
ALTER TABLE bag ADD "x{name}" text DEFAULT '{odd}';
CREATE TABLE "new{name}" ("k{name}" text PRIMARY KEY DEFAULT '{odd}', v text);
INSERT INTO "new{name}" VALUES (DEFAULT, '{odd}');
UPDATE "t{name}" SET v = v || '{odd}', e = '{odd}' WHERE n % 2 = 0;
UPDATE "t{name}" SET n = n + 1;
TRUNCATE listed;
INSERT INTO listed VALUES ('{odd}', 'again'), ('{name}', '{odd}');
DELETE FROM bag WHERE n = 0 AND v = '{odd}';
""",
)
# Keys of a collation under which different bytes are equal; needs ICU, which does not support SQL_ASCII.
FOLDED_SCHEMA = b"""
CREATE COLLATION folding (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
CREATE TABLE folded (k text COLLATE folding PRIMARY KEY, v text COLLATE "de-x-icu", n int);
INSERT INTO folded VALUES ('a', 'a', 0), ('B', '{name}', 0), ('{name}', 'c', 0), ('d', 'd', 0);
"""
FOLDED_CHANGES = (
    b"""
UPDATE folded SET k = upper(k) WHERE k = 'A';
INSERT INTO folded VALUES ('D', 'again', 1) ON CONFLICT (k) DO UPDATE SET v = excluded.v, n = 1;
DELETE FROM folded WHERE k = 'b';
INSERT INTO folded VALUES ('b', 'other bytes', 1);
""",
    b"""
DROP TABLE folded;
DROP COLLATION folding;
""",
)
# Needs libxml; dropped before the state that is restored to a server that may lack it.
XML_SCHEMA = b"""
CREATE TABLE papers ("k{name}" text PRIMARY KEY, p xml DEFAULT '<{name}/>', q xml[]);
INSERT INTO papers VALUES ('{name}', '<{name} a="{name}">&#233;{name} &lt;</{name}>', '{<a/>,NULL}');
INSERT INTO papers VALUES ('b', '<?xml version="1.0" encoding="{encoding}" standalone="yes"?><b>{name}</b>');
INSERT INTO papers VALUES ('c', XMLPARSE(CONTENT 'text {name}<b/> and more'));
"""
XML_CHANGES = (
    b"""
UPDATE papers SET p = xmlelement(name "{element}", '{name}', p) WHERE "k{name}" = '{name}';
UPDATE papers SET q = ARRAY[p, p] WHERE "k{name}" = 'b';
INSERT INTO papers ("k{name}") VALUES ('of the default');
DELETE FROM papers WHERE "k{name}" = 'c';
""",
    b"""
DROP TABLE papers;
""",
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """An encoding: a name that can be converted to UTF-8, and values of bytes of which some can not."""

    encoding: str
    codec: str
    text: str
    odd: bytes
    values: tuple[bytes, ...]

    @property
    def name(self) -> bytes:
        """The name in the server's encoding."""
        return self.text.encode(self.codec)

    @property
    def element(self) -> bytes:
        """A name for XML elements: PostgreSQL converts it to UTF-8, which it can't from SQL_ASCII."""
        return b"element" if self.encoding == "SQL_ASCII" else self.name

    def script(self, template: bytes) -> list[bytes]:
        """The template's statements, split at semicolons that end a line."""
        whole = template.replace(b"{name}", self.name).replace(b"{odd}", self.odd)
        whole = whole.replace(b"{encoding}", self.codec.encode()).replace(b"{element}", self.element)
        return [one for one in (piece.strip(b"\n") for piece in whole.split(b";\n")) if one]

    def rows(self) -> list[bytes]:
        """Statements that fill the tables."""
        statements = []
        for number, value in enumerate([*self.values, b"plain", b""]):
            wide = b"repeat('%b', 3000 / greatest(octet_length('%b'), 1))" % (value, value)
            statements += [
                b"""INSERT INTO "t%b" VALUES ('%b', '%b', %b, %d, '%b', '%b', ARRAY[NULL, 'NULL', '%b'])"""
                % (self.name, value, value, wide, number, self.name, value, value),
                b"INSERT INTO bag VALUES ('%b', %b, %d)" % (value, wide, number),
                b"INSERT INTO listed VALUES ('%b', '%d')" % (value[:9], number),
            ]
        return [*statements, b"INSERT INTO listed VALUES ('%b', 'odd')" % self.odd]


HIGH = bytes(range(0x80, 0x100))
LATIN1 = Encoded("LATIN1", "latin-1", "größe", b"\x80\xc3\xa9", (HIGH, b"\xe9", b"\xc3\xa9", b"\xff"))
# Bytes that are not valid UTF-8 (truncated, a surrogate, never valid), and some that are.
SQL_ASCII = Encoded(
    "SQL_ASCII", "utf-8", "größe", b"\xff\xc3", (HIGH, b"\xe9", b"\xed\xa0\x80", "日本".encode(), b"\xfe\xff")
)
# 0x98 is not a character of WIN1251.
WIN1251 = Encoded("WIN1251", "cp1251", "имя", b"\x98\xff", (HIGH, b"\x98", "слово".encode("cp1251")))
# Half-width katakana, JIS X 0212, and codes to which the standards assign no character.
EUC_JP = Encoded(
    "EUC_JP",
    "euc_jp",
    "名前",
    b"\xa1\xc1\xfe\xfe",
    ("日本語".encode("euc_jp"), b"\x8e\xb1", b"\x8f\xb0\xa1", b"\xa9\xa1", b"\xf5\xa1"),
)
LATIN5 = Encoded("LATIN5", "iso8859-9", "ağaç", b"\xfd\x80", (HIGH, b"\xfd"))


@contextmanager
def session(dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """A session that sends and receives bytes in the server's encoding, unaffected by the settings of its role."""
    options = " ".join(f"-c {name}={value}" for name, value in QUIET.items())
    with psycopg.connect(dsn, options=options, client_encoding="SQL_ASCII", autocommit=True) as connection:
        if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
            connection.execute("SET transaction_timeout = 0")
        yield connection


def run(dsn: str, script: list[bytes]) -> None:
    """Execute the statements one by one."""
    with session(dsn) as connection:
        for statement in script:
            connection.execute(statement)


@contextmanager
def hostile_settings(*dsns: str) -> Iterator[None]:
    """Give the role every setting of HOSTILE on these servers while the block runs."""
    for dsn in dsns:
        with session(dsn) as connection:
            for name, value in HOSTILE.items():
                connection.execute(f"ALTER ROLE CURRENT_USER SET {name} = {value}".encode())
            if connection.info.server_version >= TRANSACTION_TIMEOUT_VERSION:
                connection.execute("ALTER ROLE CURRENT_USER SET transaction_timeout = '1s'")
    try:
        yield
    finally:
        for dsn in dsns:
            with session(dsn) as connection:
                connection.execute("ALTER ROLE CURRENT_USER RESET ALL")


def copies(dsn: str) -> dict[bytes, bytes]:
    """The rows of every table as PostgreSQL's own COPY prints and sorts them."""
    query = """
    SELECT format('%I.%I', n.nspname, c.relname) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE c.relkind = 'r' AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema' ORDER BY 1
    """
    with session(dsn) as connection:
        found = {}
        for (table,) in connection.execute(query).fetchall():
            statement = b'COPY (SELECT * FROM ONLY %b AS t ORDER BY t::text COLLATE "C") TO STDOUT' % table
            with connection.cursor().copy(statement) as copy:
                found[table] = b"".join(bytes(piece) for piece in copy)
        return found


def dump_ddl(dsn: str) -> bytes:
    """The DDL as pg_dump prints it; equal DDL gives equal bytes."""
    what = ["--schema-only", "--no-publications", "--restrict-key=0", "--encoding=SQL_ASCII"]
    command = [*tool("pg_dump"), *what, f"--dbname={dsn}"]
    return subprocess.run(command, capture_output=True, check=True).stdout
