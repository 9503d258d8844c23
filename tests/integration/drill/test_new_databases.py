"""A drill restores what the source has changed about what every new database has: schema public and plpgsql."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import execute
from tests.servers.fleets import fleet_of
from tests.servers.installed import MAJORS, require_server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROLES = ("CREATE ROLE app_owner", "CREATE ROLE clerk")
GIVEN = ("ALTER SCHEMA public OWNER TO app_owner", "REVOKE USAGE ON SCHEMA public FROM PUBLIC")
# The new schema belongs to the superuser and has no privileges; pg_dump creates it no more than the first.
CREATED_AGAIN = ("DROP SCHEMA public", "CREATE SCHEMA public")
SCHEMA = (
    "GRANT USAGE ON SCHEMA public TO clerk WITH GRANT OPTION",
    "COMMENT ON SCHEMA public IS 'of the app'",
    "CREATE EXTENSION pg_trgm SCHEMA public",
    'CREATE SCHEMA "its own" AUTHORIZATION app_owner',
    'GRANT USAGE ON SCHEMA "its own" TO clerk',
    'CREATE EXTENSION citext SCHEMA "its own"',
    'CREATE TABLE public.item (id int PRIMARY KEY, name text, code "its own".citext)',
    "CREATE INDEX by_name ON public.item USING gin (name public.gin_trgm_ops)",
    "ALTER TABLE public.item OWNER TO clerk",
    "INSERT INTO public.item VALUES (1, 'one', 'A')",
    # It gets another number than PostgreSQL's own extension, so that pg_dump creates it.
    "DROP EXTENSION plpgsql",
    "CREATE EXTENSION plpgsql",
)
QUERY = """
SELECT string_agg(
         format('%s, %s, %s, %s', n.nspname, pg_get_userbyid(n.nspowner), obj_description(n.oid, 'pg_namespace'),
                (SELECT string_agg(one::text, ' ' ORDER BY one::text)
                   FROM unnest(coalesce(n.nspacl, acldefault('n', n.nspowner))) AS one)),
         '; ' ORDER BY n.nspname)
       || (SELECT string_agg(format('; %s in %s', extname, extnamespace::regnamespace), '' ORDER BY extname)
             FROM pg_extension)
  FROM pg_namespace n WHERE n.nspname IN ('public', 'its own')
"""


def schemas_of(dsn: str) -> str:
    """The schemas with their owners, comments and privileges, and the extensions."""
    with psycopg.connect(dsn) as connection:
        ((found,),) = connection.execute(QUERY.encode()).fetchall()
    return str(found)


@pytest.mark.parametrize("statements", [GIVEN, CREATED_AGAIN], ids=["another owner", "created again"])
def test_schema_public_with_extensions_keeps_its_owner_and_privileges(
    spark: SparkSession, tmp_path: Path, statements: tuple[str, ...]
) -> None:
    with fleet_of(tmp_path / "fleet", [require_server(major) for major in MAJORS], schema=False) as servers:
        more, found = "", list[str]()
        for node in servers.primaries:
            execute(node.dsn("postgres"), "CREATE DATABASE bank", *ROLES)
            execute(node.dsn(), *statements, *SCHEMA)
            found.append(schemas_of(node.dsn()))
            more += "\n[[drill.assertion]]\n" + "".join(
                f"{key} = {json.dumps(value)}\n"
                for key, value in (("node", node.id), ("sql", QUERY), ("expected", found[-1]))
            )
        assert "public, pg_database_owner" not in "".join(found)
        fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store", more=more)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full("snp", only_primary=True)
    code, document = run_here(fleet, "drill", "snp", spark=spark)
    assert (code, document.get("result")) == (0, "holds"), json.dumps(document)
    code, document = run_here(fleet, "check", "snp", "--restorable", spark=spark)
    assert (document["restorable"]["ddl"], document["restorable"]["ddl_detail"]) == ("run", None), document
    assert document["snapshots"][0]["conflicts"] == []
