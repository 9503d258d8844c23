"""Databases, roles, schemas and tables with names that are not ASCII, on PostgreSQL 15 and 18.

Some sessions of a restore exchange bytes with the server: psycopg sends only ASCII there, unless it is given bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from tests.chains.mixed_databases import slots_dropped
from tests.commands.in_process import run_here
from tests.integration.refusing import execute
from tests.run.quick_spark import with_spark
from tests.tables.encoded_tables import copies, dump_ddl, run, session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DATABASE, TARGET, LATIN = "Größe_日本", "Übung_東京", "Größe"
OWNER, OTHER, ADMIN = "büro", "事務所", "Käthe"
SCHEMA = (
    f'CREATE SCHEMA "Straße" AUTHORIZATION "{OWNER}"',
    f'SET ROLE "{OWNER}"',
    """CREATE FUNCTION "Straße"."zähle"(v text) RETURNS int LANGUAGE plpgsql IMMUTABLE
        AS $$ BEGIN RETURN length(v); END $$""",
    """CREATE TABLE "Straße"."表" ("schlüssel" int PRIMARY KEY, "größe" text,
        "länge" int GENERATED ALWAYS AS ("Straße"."zähle"("größe")) STORED)""",
    'CREATE INDEX "índice" ON "Straße"."表" ("größe")',
    'CREATE MATERIALIZED VIEW "Straße"."Übersicht" AS SELECT count(*) FROM "Straße"."表"',
    'CREATE SEQUENCE "Straße"."zähler"',
    'INSERT INTO "Straße"."表" SELECT g, \'größer \' || g FROM generate_series(1, 100) AS g',
    "RESET ROLE",
    f'GRANT SELECT ON "Straße"."表" TO "{OTHER}"',
)
CHANGES = (
    'UPDATE "Straße"."表" SET "größe" = \'日本\' WHERE "schlüssel" % 2 = 0',
    'SELECT nextval(\'"Straße"."zähler"\')',
)
OF_DATABASE = (
    f'ALTER DATABASE "{DATABASE}" OWNER TO "{OWNER}"',
    f"COMMENT ON DATABASE \"{DATABASE}\" IS 'größe'",
    f'ALTER DATABASE "{DATABASE}" SET "my.own" = \'größe\'',
    f'ALTER ROLE "{OWNER}" IN DATABASE "{DATABASE}" SET "my.own" = \'日本\'',
    f'GRANT CREATE ON DATABASE "{DATABASE}" TO "{OTHER}"',
)
PROPERTIES_QUERY = """
SELECT pg_get_userbyid(d.datdba), shobj_description(d.oid, 'pg_database'), d.datacl::text,
       ARRAY(SELECT s.setconfig::text || s.setrole::regrole::text FROM pg_db_role_setting s
              WHERE s.setdatabase = d.oid ORDER BY 1)
  FROM pg_database d WHERE d.datname = current_database()
"""


def write_fleet(path: Path, nodes: dict[str, str]) -> Fleet:
    """A fleet file of the nodes' dsns, with a store next to it."""
    text = f'name = "alphabets"\nstore = "file://{path.parent}/store"\n'
    text += with_spark("".join(f'[[node]]\nid = "{node}"\ndsn = {json.dumps(dsn)}\n' for node, dsn in nodes.items()))
    path.write_text(text)
    return load_fleet(path)


def state_of(dsn: str) -> tuple[object, ...]:
    with session(dsn) as connection:
        properties = connection.execute(PROPERTIES_QUERY.encode()).fetchall()
    return copies(dsn), dump_ddl(dsn), properties


@pytest.fixture
def servers(mixed_fleet: EmbeddedFleet) -> Iterator[dict[str, str]]:
    """The databases `postgres` of the oldest and the newest server, with the roles."""
    dsns = {node.id: node.dsn("postgres") for node in (mixed_fleet.primaries[0], mixed_fleet.primaries[-1])}
    roles = (OWNER, OTHER, ADMIN)
    for dsn in dsns.values():
        execute(dsn, *(f'CREATE ROLE "{role}" LOGIN' for role in roles), f'ALTER ROLE "{ADMIN}" SUPERUSER')
    try:
        yield {node: make_conninfo(dsn, user=ADMIN) for node, dsn in dsns.items()}
    finally:
        for dsn in dsns.values():
            with psycopg.connect(dsn, autocommit=True) as connection:
                query = "SELECT quote_ident(datname) FROM pg_database WHERE datname <> 'bank' AND oid >= 16384"
                for (name,) in connection.execute(query).fetchall():
                    connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
            execute(dsn, *(f'DROP ROLE "{role}"' for role in roles))


def create_databases(servers: dict[str, str], database: str, encodings: tuple[str, str]) -> dict[str, str]:
    dsns: dict[str, str] = {}
    for (node, server), encoding in zip(servers.items(), encodings, strict=True):
        execute(server, f"CREATE DATABASE \"{database}\" TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
        dsns[node] = make_conninfo(server, dbname=database)
    return dsns


@pytest.mark.parametrize("encodings", [("UTF8", "SQL_ASCII"), ("SQL_ASCII", "UTF8")], ids="-".join)
def test_names_that_are_not_ascii_go_through_every_command(
    servers: dict[str, str], spark: SparkSession, tmp_path: Path, encodings: tuple[str, str]
) -> None:
    dsns = create_databases(servers, DATABASE, encodings)
    fleet = write_fleet(tmp_path / "fleet.toml", dsns)
    target = write_fleet(
        tmp_path / "target.toml", {node: make_conninfo(dsn, dbname=TARGET) for node, dsn in dsns.items()}
    )

    def snapshot(*words: str) -> None:
        code, document = run_here(fleet, *words, spark=spark)
        assert code == 0, document

    def state() -> list[tuple[object, ...]]:
        return [state_of(node.dsn) for node in fleet.primaries]

    for dsn in dsns.values():
        execute(dsn, *OF_DATABASE, *SCHEMA)
    with slots_dropped(fleet):
        snapshot("init")
        snapshot("create", "a")
        for dsn in dsns.values():
            execute(dsn, *CHANGES)
        snapshot("create", "a", "--incremental")
        before = state()
        snapshot("status", "--nodes")
        snapshot("show", "a")
        snapshot("check", "a", "--live")
        for more in ((), ("--replace",)):
            snapshot("restore", "a", "--to", str(target.path), "--dry-run", *more)
            snapshot("restore", "a", "--to", str(target.path), "--yes", *more)
            assert [state_of(node.dsn) for node in target.primaries] == before
        snapshot("restore-discard", "--to", str(target.path), "--yes")
        snapshot("restore", "a", "--replace", "--yes")
        assert state() == before
        snapshot("create", "b", "--terminal")
        snapshot("resume")
        code, document = run_here(fleet, "drill", "a", spark=spark)
        assert (code, document["result"]) == (4, "inconclusive"), document
        snapshot("delete", "a", "--yes")
        given = [state_of(node.dsn) for node in target.primaries]
        mapped = ("--role-map", f"{OWNER}={OTHER}")
        snapshot("restore", "b", "--to", str(target.path), "--yes", "--replace", *mapped)
        for node in target.primaries:
            with session(node.dsn) as connection:
                query = "SELECT tableowner FROM pg_tables WHERE schemaname = 'Straße'"
                assert connection.execute(query.encode()).fetchall() == [(OTHER.encode(),)]
        assert given == before


def test_a_database_whose_encoding_does_not_have_its_name_is_refused(
    servers: dict[str, str], spark: SparkSession, tmp_path: Path
) -> None:
    dsns = create_databases(servers, LATIN, ("EUC_JP", "LATIN1"))
    fleet = write_fleet(tmp_path / "fleet.toml", dsns)
    code, document = run_here(fleet, "init")
    assert code == 3, document
    for node, encoding in (("s1", "EUC_JP"), ("s4", "LATIN1")):
        assert f"{node}: database {LATIN} has encoding {encoding}, and a name that is not ASCII" in document["message"]
    assert "ALTER DATABASE … RENAME TO …" in document["hint"]
    for server in servers.values():
        execute(server, f'ALTER DATABASE "{LATIN}" RENAME TO plain')
    fleet = write_fleet(
        tmp_path / "fleet.toml", {node: make_conninfo(dsn, dbname="plain") for node, dsn in dsns.items()}
    )
    target = write_fleet(tmp_path / "target.toml", dsns)
    with slots_dropped(fleet):
        assert run_here(fleet, "init")[0] == 0
        code, document = run_here(fleet, "create", "a", spark=spark)
        assert code == 0, document
        for command in (("--dry-run",), ("--yes",)):
            code, document = run_here(fleet, "restore", "a", "--to", str(target.path), *command)
            assert code == 3, document
            for node, encoding in (("s1", "EUC_JP"), ("s4", "LATIN1")):
                assert (
                    f"{node}: database {LATIN} can't be restored under this name: it has encoding {encoding}"
                    in (document["message"])
                )
            assert "database in ASCII" in document["hint"]


def test_a_role_of_a_database_in_another_encoding_stops_no_create_of_a_table_that_names_roles(
    servers: dict[str, str], spark: SparkSession, tmp_path: Path
) -> None:
    """The name of the role is not valid UTF-8. The stamp of the table covers all names that its values may print."""
    latin = create_databases(servers, "latin", ("LATIN1", "LATIN1"))
    dsns = create_databases(servers, "naming", ("UTF8", "UTF8"))
    fleet = write_fleet(tmp_path / "fleet.toml", dsns)
    target = write_fleet(
        tmp_path / "target.toml", {node: make_conninfo(dsn, dbname="back") for node, dsn in dsns.items()}
    )
    role = '"größe "'.encode("latin-1")
    try:
        for node, dsn in dsns.items():
            run(latin[node], [b"CREATE ROLE %b" % role])
            execute(
                dsn, "CREATE TABLE granted (id int PRIMARY KEY, who regrole)", "INSERT INTO granted VALUES (1, 'büro')"
            )
        with slots_dropped(fleet):
            for words in (("init",), ("create", "a"), ("create", "a", "--incremental")):
                code, document = run_here(fleet, *words, spark=spark)
                assert code == 0, document
                for dsn in dsns.values():
                    execute(dsn, "INSERT INTO granted SELECT max(id) + 1, '事務所' FROM granted")
            code, document = run_here(fleet, "restore", "a", "--to", str(target.path), "--yes", spark=spark)
            assert code == 0, document
            for node in target.primaries:
                with psycopg.connect(node.dsn, client_encoding="UTF8") as restored:
                    rows = restored.execute("SELECT id, who::text FROM granted ORDER BY id").fetchall()
                assert rows == [(1, '"büro"'), (2, '"事務所"'), (3, '"事務所"')]
    finally:
        for dsn in latin.values():
            run(dsn, [b"DROP ROLE IF EXISTS %b" % role])


def test_roles_of_the_database_itself_have_the_names_of_its_encoding(
    servers: dict[str, str], spark: SparkSession, tmp_path: Path
) -> None:
    """The restoring role's name has other bytes than the database's encoding has for it, and the owner's likewise."""
    dsns = create_databases(servers, "plain", ("LATIN1", "LATIN1"))
    fleet = write_fleet(tmp_path / "fleet.toml", dsns)
    target = write_fleet(
        tmp_path / "target.toml", {node: make_conninfo(dsn, dbname="back") for node, dsn in dsns.items()}
    )
    owner, grantee = '"rü"'.encode("latin-1"), '"sü"'.encode("latin-1")
    given = (
        b"CREATE ROLE %b" % owner, b"CREATE ROLE %b" % grantee, b"ALTER DATABASE plain OWNER TO %b" % owner,
        b"GRANT CREATE ON DATABASE plain TO %b" % grantee, b"COMMENT ON DATABASE plain IS 'n\xfctzlich'",
        b"ALTER DATABASE plain SET my.own = 'gr\xf6\xdfe'", b"ALTER ROLE %b IN DATABASE plain SET my.own = 'b'" % owner,
    )  # fmt: skip
    query = PROPERTIES_QUERY.encode()
    try:
        for dsn in dsns.values():
            run(dsn, list(given))
        with slots_dropped(fleet):
            assert run_here(fleet, "init")[0] == 0
            assert run_here(fleet, "create", "a", spark=spark)[0] == 0
            code, document = run_here(fleet, "restore", "a", "--to", str(target.path), "--yes", spark=spark)
            assert code == 0, document
            for source, node, warning in zip(fleet.primaries, target.primaries, document["warnings"], strict=True):
                # Only a session in the database itself can name its owner.
                said, _, script = warning.partition("; to alter it, run in it: ")
                assert said == f'node {node.id}: database back was not altered: role "rü" does not exist'
                execute(make_conninfo(node.dsn, client_encoding="UTF8"), script)
                with session(source.dsn) as ours, session(node.dsn) as theirs:
                    assert theirs.execute(query).fetchall() == ours.execute(query).fetchall()
            code, document = run_here(
                fleet, "restore", "a", "--to", str(target.path), "--yes", "--no-owner", "--replace", spark=spark
            )
            assert code == 0, document
            for node in target.primaries:
                with session(node.dsn) as restored:
                    ((_, _, privileges, _),) = restored.execute(query).fetchall()
                assert b'\\"s\xfc\\"=C/' in privileges
    finally:
        for dsn in dsns.values():
            with session(dsn) as connection:
                names = connection.execute(b"SELECT datname FROM pg_database WHERE datname ^@ 'back'").fetchall()
                for (name,) in names:
                    connection.execute(b"DROP DATABASE %b WITH (FORCE)" % name)
            roles = b"%b, %b" % (owner, grantee)
            run(
                dsn, [b"REASSIGN OWNED BY %b TO postgres" % roles, b"DROP OWNED BY %b" % roles, b"DROP ROLE %b" % roles]
            )
