"""Objects and settings of roles that do not exist, on PostgreSQL 15 to 18.

PostgreSQL lets nobody drop a role that owns an object or has privileges on it, but damaged catalogs have such objects.
A role may also be dropped after the full snapshot that has its large objects.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from tests.commands.in_process import run_here, run_with_stderr
from tests.commands.snapshot_runs import configure_fleet, drop_database, dropping_slots
from tests.integration.refusing import execute
from tests.tables.large_object_states import read_large_objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STAYS, GONE, DROPPED = "lo_stays", "lo_gone", "lo_dropped"
OBJECTS = (
    "CREATE TABLE t (id int PRIMARY KEY)",
    *(f"SELECT lo_from_bytea({oid}, 'object {oid}')" for oid in range(1, 7)),
    f"ALTER LARGE OBJECT 1 OWNER TO {GONE}",
    f"GRANT SELECT ON LARGE OBJECT 1 TO {STAYS}",
    "COMMENT ON LARGE OBJECT 1 IS 'of nobody'",
    f"GRANT SELECT, UPDATE ON LARGE OBJECT 2 TO {GONE}",
    f"GRANT UPDATE ON LARGE OBJECT 2 TO {STAYS}",
    f"GRANT SELECT ON LARGE OBJECT 3 TO {GONE} WITH GRANT OPTION",
    f"SET SESSION AUTHORIZATION {GONE}; GRANT SELECT ON LARGE OBJECT 3 TO {STAYS}; RESET SESSION AUTHORIZATION",
    f"ALTER LARGE OBJECT 4 OWNER TO {STAYS}",
    f"ALTER LARGE OBJECT 5 OWNER TO {DROPPED}",
    "REVOKE ALL ON LARGE OBJECT 6 FROM CURRENT_USER",
)
# What becomes of them: the owner, and the grants as PostgreSQL prints them.
EXPECTED = [
    ("postgres", [f"{STAYS}=r/postgres", "postgres=rw/postgres"], "of nobody"),
    ("postgres", [f"{STAYS}=w/postgres", "postgres=rw/postgres"], None),
    ("postgres", [f"{STAYS}=r/postgres", "postgres=rw/postgres"], None),
    (STAYS, None, None),
    ("postgres", None, None),
    ("postgres", None, None),
]


def fleet_of(embedded: EmbeddedFleet, path: Path, database: str) -> Fleet:
    configure_fleet(embedded, path, f"file://{path.parent}/store")
    path.write_text(path.read_text().replace("/bank?", f"/{database}?"))
    return load_fleet(path)


def lose_role(dsn: str) -> None:
    """Drop GONE as if what depends on it did not."""
    execute(
        dsn,
        f"DELETE FROM pg_shdepend WHERE refclassid = 'pg_authid'::regclass AND refobjid = '{GONE}'::regrole",
        f"DELETE FROM pg_authid WHERE rolname = '{GONE}'",
    )


@pytest.fixture
def fleet(mixed_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """A database with the objects on a server of each version."""
    servers = [node.dsn("postgres") for node in mixed_fleet.primaries]
    fleet = fleet_of(mixed_fleet, tmp_path / "fleet.toml", "orphans")
    for server, node in zip(servers, fleet.primaries, strict=True):
        execute(server, *(f"CREATE ROLE {role}" for role in (STAYS, GONE, DROPPED)), "CREATE DATABASE orphans")
        execute(node.dsn, *OBJECTS)
        lose_role(node.dsn)
    try:
        with dropping_slots(fleet):
            yield fleet
    finally:
        for server, node in zip(servers, fleet.primaries, strict=True):
            drop_database(node)
            execute(server, f"DROP ROLE IF EXISTS {STAYS}, {DROPPED}")


def oid_of_gone(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        ((oid,),) = connection.execute("SELECT lomowner::bigint FROM pg_largeobject_metadata WHERE oid = 1").fetchall()
    return int(oid)


def test_large_objects_of_roles_that_are_gone_are_restored_and_named(
    fleet: Fleet, mixed_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    target = fleet_of(mixed_fleet, tmp_path / "target.toml", "orphans_back")
    gone = {node.id: f"unknown (OID={oid_of_gone(node.dsn)})" for node in fleet.primaries}
    assert run_here(fleet, "init")[0] == 0
    for words in (("--dry-run",), ()):
        said = io.StringIO()
        code, _ = run_with_stderr(said, fleet, "create", "a", "--large-objects", *words, spark=spark)
        assert code == 0, said.getvalue()
        for node in fleet.primaries:
            assert f"node {node.id}: 1 large object has an owner that does not exist, such as 1" in said.getvalue()
            assert "ALTER LARGE OBJECT 1 OWNER TO" in said.getvalue()
    contents = [[row[:3] for row in read_large_objects(node.dsn)] for node in fleet.primaries]
    for node in fleet.primaries:
        execute(node.dsn, f"REASSIGN OWNED BY {DROPPED} TO {STAYS}", f"DROP ROLE {DROPPED}", "ALTER TABLE t ADD c int")
    assert run_here(fleet, "create", "a", "--incremental", spark=spark)[0] == 0
    code, document = run_here(fleet, "check", "a", spark=spark)
    assert document["snapshots"][0]["conflicts"] == []
    assert run_here(fleet, "restore", "a", "--to", str(target.path), "--dry-run")[0] == 0
    try:
        code, document = run_here(fleet, "restore", "a", "--to", str(target.path), "--yes", spark=spark)
        assert code == 0, document
        for node, expected in zip(target.primaries, contents, strict=True):
            found = read_large_objects(node.dsn)
            assert [row[:3] for row in found] == expected
            assert [row[3:] for row in found] == EXPECTED
            for role, oids in ((DROPPED, "1, such as 5"), (gone[node.id], "3, such as 1")):
                assert (
                    f"node {node.id}: there is no role {role}, which large objects name ({oids}): those that it owned"
                    " belong to the restoring role, and its privileges are left out; --role-map puts another role in"
                    " its place"
                ) in document["warnings"]
        maps = [word for name in {*gone.values(), DROPPED} for word in ("--role-map", f'"{name}"={STAYS}')]
        words = ("restore", "a", "--to", str(target.path), "--yes", "--replace", *maps)
        code, document = run_here(fleet, *words, spark=spark)
        assert code == 0, document
        for node in target.primaries:
            assert [row[3] for row in read_large_objects(node.dsn)][:5] == [STAYS, "postgres", "postgres", STAYS, STAYS]
    finally:
        for node in target.primaries:
            with psycopg.connect(make_conninfo(node.dsn, dbname="postgres"), autocommit=True) as connection:
                query = "SELECT datname FROM pg_database WHERE datname ^@ 'orphans_back'"
                for (name,) in connection.execute(query).fetchall():
                    connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


def test_an_object_without_an_owner_is_named_and_a_setting_of_a_missing_role_is_left_out(
    fleet: Fleet, spark: SparkSession
) -> None:
    for node in fleet.primaries:
        execute(node.dsn, f"CREATE ROLE {GONE}", "CREATE TABLE owned (id int PRIMARY KEY)")
        execute(node.dsn, f"ALTER TABLE owned OWNER TO {GONE}", f"ALTER ROLE {GONE} IN DATABASE orphans SET jit = off")
        lose_role(node.dsn)
    assert run_here(fleet, "init")[0] == 0
    code, document = run_here(fleet, "create", "b", spark=spark)
    assert code == 6, document
    node = next(node for node in fleet.primaries if document["message"].startswith(f"node {node.id}: pg_dump exited"))
    (find,) = re.findall("SELECT .*;", document["hint"])
    with psycopg.connect(node.dsn) as connection:
        assert connection.execute(find.encode()).fetchall() == [("owned",), ("owned_pkey",)]
    assert "then, as a superuser: ALTER … OWNER TO …;" in document["hint"]
    for node in fleet.primaries:
        execute(node.dsn, f"ALTER TABLE owned OWNER TO {STAYS}")
    code, document = run_here(fleet, "create", "b", spark=spark)
    assert code == 0, document
    _, document = run_here(fleet, "check", "b", spark=spark)
    assert document["snapshots"][0]["conflicts"] == []
    code, document = run_here(fleet, "restore", "b", "--replace", "--dry-run")
    assert code == 0, document


@pytest.mark.parametrize(
    "grant", [f"GRANT SELECT ON t TO {GONE}", f"ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {GONE}"]
)
def test_privileges_of_a_role_that_is_gone_are_refused_by_name_before_any_row(
    fleet: Fleet, spark: SparkSession, grant: str
) -> None:
    for node in fleet.primaries:
        execute(node.dsn, f"CREATE ROLE {GONE}", grant)
        lose_role(node.dsn)
    for words in (["init"], ["create", "c"]):
        code, document = run_here(fleet, *words, spark=spark)
        assert code == 0, document
    code, document = run_here(fleet, "restore", "c", "--replace", "--dry-run")
    assert code == 3, document
    for node in fleet.primaries:
        # pg_dump writes the number of the role.
        assert re.search(rf'node {node.id}: .*role "[0-9]+" does not exist \([^)]*GRANT', document["message"])
    assert "--allow-refused-ddl" in document["hint"]
