"""If the target's server lacks something that a snapshot needs, it is named, and nothing of the restore stays there.

The source is a database on the shared fleet's first server, the target one on its second.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.targets.obstacles import ObstaclesError, TargetLacksError
from tests.commands.snapshot_runs import Ready, Runs, sorted_copies
from tests.integration.own_database import own_database
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "lacking"
# PostgreSQL lets superusers create tablespaces within the data directory.
TABLESPACE = ("SET allow_in_place_tablespaces = on", "CREATE TABLESPACE \"fast 'disks'\" LOCATION ''")
SCHEMA = (
    "CREATE TABLE placed (id int PRIMARY KEY USING INDEX TABLESPACE \"fast 'disks'\", v text)"
    " TABLESPACE \"fast 'disks'\"",
    "CREATE INDEX placed_v ON placed (v) TABLESPACE \"fast 'disks'\"",
    "CREATE TABLE spread (id int PRIMARY KEY) PARTITION BY LIST (id) TABLESPACE \"fast 'disks'\"",
    "CREATE TABLE spread_1 PARTITION OF spread FOR VALUES IN (1)",
    "CREATE TABLE elsewhere (id int PRIMARY KEY)",
    "CREATE MATERIALIZED VIEW summed TABLESPACE \"fast 'disks'\" AS SELECT 1 AS n",
    "INSERT INTO placed VALUES (1, 'a'), (2, 'b')",
    "INSERT INTO spread VALUES (1)",
)
# A collation of the server, as pg_import_system_collations makes them.
SYSTEM = "SET allow_system_table_mods = on"
HOUSE = f"{SYSTEM}; CREATE COLLATION pg_catalog.\"of the house\" (PROVIDER = libc, LOCALE = 'C')"
COLLATIONS = (HOUSE, 'CREATE TABLE sorted (v text COLLATE pg_catalog."of the house", id int PRIMARY KEY)')
# The row that SECURITY LABEL would write; the command itself needs a label provider, which is a loaded module.
LABEL = """
INSERT INTO pg_seclabel (objoid, classoid, objsubid, provider, label)
SELECT 'elsewhere'::regclass, 'pg_class'::regclass, 0, 'guard', 'secret'
"""
DDL = ("--schema-only", "--no-publications", "--restrict-key=same")


@pytest.fixture
def runs(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path) -> Iterator[Runs]:
    servers = [primary.dsn("postgres") for primary in shared_fleet.primaries]
    try:
        execute(servers[0], *TABLESPACE)
        with own_database(shared_fleet, tmp_path, "lacking") as fleet:
            execute(fleet.nodes[0].dsn, *SCHEMA)
            found = Runs(fleet, Ready(spark))
            found.init()
            yield found
    finally:
        for server in servers:
            with psycopg.connect(server) as connection:
                names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ 'lacking'").fetchall()
            execute(server, *(f'DROP DATABASE "{name}" WITH (FORCE)' for (name,) in names))
            execute(server, "DROP TABLESPACE IF EXISTS \"fast 'disks'\"")


def test_tablespaces_and_security_labels_come_back_where_the_target_has_them(
    runs: Runs, shared_fleet: EmbeddedFleet
) -> None:
    (source,) = runs.fleet.nodes
    server = shared_fleet.primaries[1].dsn("postgres")
    target = replace(runs.fleet, nodes=(replace(source, dsn=shared_fleet.primaries[1].dsn("lacking_back")),))
    runs.full(NAME)
    execute(source.dsn, "INSERT INTO placed VALUES (3, 'c')", LABEL)
    runs.increment(NAME)

    with pytest.raises(TargetLacksError, match=r"node s1 lacks tablespaces that the snapshot has: fast 'disks'$"):
        runs.restore(NAME, target, 0)
    execute(server, *TABLESPACE)
    runs.restore(NAME, target, 0)
    assert sorted_copies(target.nodes[0].dsn)["public.placed"] == b"1\ta\n2\tb\n"
    labelled = (': SECURITY LABEL public.TABLE "elsewhere": ', " (SECURITY LABEL FOR ")
    assert_refused(runs, target, 1, 'security label provider "guard" is not loaded', *labelled)

    execute(source.dsn, "DELETE FROM pg_seclabel")
    runs.increment(NAME)
    runs.restore(NAME, target)
    restored = target.nodes[0].dsn
    assert sorted_copies(restored) == sorted_copies(source.dsn)
    assert run_tool("pg_dump", *DDL, restored).stdout == run_tool("pg_dump", *DDL, source.dsn).stdout


def control_files(folder: Path, version: str) -> str:
    """An extension that only this folder has; the setting by which a server finds it (since PostgreSQL 18)."""
    (folder / "extension").mkdir(parents=True)
    (folder / "extension" / "rare.control").write_text(f"default_version = '{version}'\n")
    (folder / "extension" / f"rare--{version}.sql").write_text("CREATE FUNCTION rare() RETURNS int RETURN 1;\n")
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755)
    return f"ALTER SYSTEM SET extension_control_path = '{folder}:$system'"


@contextmanager
def with_setting(server: str, statement: str) -> Iterator[None]:
    try:
        execute(server, statement, "SELECT pg_reload_conf()", "SELECT pg_sleep(0.2)")
        yield
    finally:
        execute(server, "ALTER SYSTEM RESET extension_control_path", "SELECT pg_reload_conf()")


def test_what_the_server_lacks_is_named_at_once_and_another_version_is_a_warning(
    runs: Runs, shared_fleet: EmbeddedFleet
) -> None:
    (source,) = runs.fleet.nodes
    here, there = (primary.dsn("postgres") for primary in shared_fleet.primaries[:2])
    target = replace(runs.fleet, nodes=(replace(source, dsn=shared_fleet.primaries[1].dsn("lacking_back")),))
    with TemporaryDirectory() as name, with_setting(here, control_files(Path(name) / "1", "1.5")):
        Path(name).chmod(0o755)
        execute(source.dsn, "CREATE EXTENSION rare", *COLLATIONS)
        execute(here, "CREATE ROLE lacking_owner")
        try:
            execute(source.dsn, "ALTER TABLE elsewhere OWNER TO lacking_owner")
            execute(there, "DROP ROLE IF EXISTS lacking_owner")
            runs.full(NAME)
        finally:
            execute(source.dsn, "REASSIGN OWNED BY lacking_owner TO postgres")
            execute(here, "DROP ROLE lacking_owner")
        plan = plan_restore(runs.fleet, target, RestoreRequest(NAME))
        with pytest.raises(ObstaclesError) as raised:
            preview_restore(plan, Silent())
        assert [text.split(": ", 1)[1] for text in messages(raised.value)[:1]] == ["collation of the house"]
        assert messages(raised.value)[1].startswith("node s1 lacks roles that own ")
        assert messages(raised.value)[2:] == [
            "node s1 lacks extensions that the snapshot has: rare 1.5",
            "node s1 lacks tablespaces that the snapshot has: fast 'disks'",
        ]

        execute(there, *TABLESPACE, HOUSE)
        with with_setting(there, control_files(Path(name) / "2", "2.0")):
            plan = plan_restore(runs.fleet, target, RestoreRequest(NAME, create_roles=True))
            found = preview_restore(plan, Silent())
        execute(there, f'{SYSTEM}; DROP COLLATION pg_catalog."of the house"')
    assert found.warnings == [
        "node s1: extension rare will be created in version 2.0, the server's default; the snapshot has version 1.5,"
        " which the server does not have"
    ]


def messages(error: ObstaclesError) -> list[str]:
    obstacles = error.details["obstacles"]
    assert isinstance(obstacles, list)
    return [one["message"] for one in obstacles]


def assert_refused(runs: Runs, target: Fleet, increment: int, *said: str) -> None:
    """The restore is refused before any row is loaded, with the object, the server's reason and the statement."""
    before = databases(target)
    with pytest.raises(SchemaLoadError) as raised:
        runs.restore(NAME, target, increment)
    assert raised.value.message.startswith("node s1: the DDL was refused: ")
    assert raised.value.message.endswith("; no rows were loaded")
    assert [text for text in said if text not in raised.value.message] == []
    assert databases(target) == before


def databases(fleet: Fleet) -> set[str]:
    with psycopg.connect(with_database(fleet.nodes[0], "postgres").dsn) as connection:
        return {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
