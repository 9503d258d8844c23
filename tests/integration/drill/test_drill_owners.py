"""A drill's role is not a superuser, but builds what owners and superusers had built with their privileges."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE = "drill_owners"
ROLES = ("drill_o1", "drill_o2", "drill_dba")
STATEMENTS = (
    "CREATE ROLE drill_o1",
    "CREATE ROLE drill_o2",
    "CREATE ROLE drill_dba SUPERUSER NOINHERIT",
    "CREATE SCHEMA s AUTHORIZATION drill_o1",
    "GRANT USAGE ON SCHEMA s TO PUBLIC",
    "GRANT CREATE ON SCHEMA public TO drill_o2",
    "SET ROLE drill_o1",
    "CREATE FUNCTION s.g(t text) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT lower(t)'",
    "CREATE FUNCTION s.f(t text) RETURNS text LANGUAGE plpgsql IMMUTABLE SET search_path = s"
    " AS 'BEGIN RETURN g(t); END'",
    # The rights of a function that only one role may call.
    "REVOKE ALL ON FUNCTION s.g(text) FROM PUBLIC",
    "GRANT EXECUTE ON FUNCTION s.g(text) TO drill_o2",
    "RESET ROLE",
    "SET ROLE drill_o2",
    "CREATE TABLE public.t_o2 (id int PRIMARY KEY, x text)",
    "INSERT INTO public.t_o2 VALUES (1, 'A')",
    "CREATE INDEX ix_o2 ON public.t_o2 (s.f(x))",
    "RESET ROLE",
    'CREATE TABLE s."Order" (id int PRIMARY KEY)',
    'ALTER TABLE s."Order" OWNER TO drill_o1',
    'INSERT INTO s."Order" VALUES (1), (2)',
    "SET ROLE drill_dba",
    'CREATE MATERIALIZED VIEW public.orders AS SELECT count(*) AS n FROM s."Order"',
    "CREATE FUNCTION public.first_order() RETURNS int LANGUAGE sql SECURITY DEFINER AS "
    "'SELECT min(id) FROM s.\"Order\"'",
    'CREATE VIEW public.ordered AS SELECT id FROM s."Order"',
    "RESET ROLE",
)
ASSERTIONS = """
[[drill.assertion]]
node = "s1"
sql = "SELECT n, first_order() FROM orders"
expected = [[2, 1]]

[[drill.assertion]]
node = "s1"
sql = "SELECT count(*) FROM ordered"
expected = 2
"""


@pytest.fixture
def owned(shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession) -> Iterator[tuple[Fleet, Runs]]:
    """A fleet of one shard with objects of two ordinary roles and of a superuser."""
    with database_on(shared_fleet, SOURCE, tmp_path, more=ASSERTIONS) as fleet:
        dsn = fleet.primaries[0].dsn
        try:
            execute(dsn, *STATEMENTS)
            with dropping_slots(fleet):
                runs = Runs(fleet, Ready(spark))
                runs.init()
                yield fleet, runs
        finally:
            execute(dsn, *(f"DROP OWNED BY {role} CASCADE" for role in ROLES))
            execute(with_database(fleet.primaries[0], "postgres").dsn, *(f"DROP ROLE {role}" for role in ROLES))


def test_indexes_and_views_have_the_privileges_of_their_owners(owned: tuple[Fleet, Runs], spark: SparkSession) -> None:
    fleet, runs = owned
    runs.full("snp", only_primary=True)
    code, document = run_here(fleet, "drill", "snp", spark=spark)
    assert (code, document["result"]) == (0, "holds"), document
    assert not [line for line in document["warnings"] if "orders" in line]


def test_the_hint_of_a_refused_drill_is_a_command_that_runs(owned: tuple[Fleet, Runs], spark: SparkSession) -> None:
    fleet, runs = owned
    execute(
        fleet.primaries[0].dsn,
        f"""CREATE FUNCTION only_here(t text) RETURNS text LANGUAGE plpgsql IMMUTABLE AS
        'BEGIN IF current_database() <> ''{SOURCE}'' THEN RAISE ''not here''; END IF; RETURN t; END'""",
        "CREATE INDEX ix_here ON t_o2 (only_here(x))",
    )
    runs.full("snp", only_primary=True)
    code, refused = run_here(fleet, "drill", "snp", spark=spark)
    assert code == 10, refused
    (line,) = [line for line in refused["hint"].splitlines() if line.startswith("to drill without them: ")]
    command, same_target = line.removeprefix("to drill without them: ").split("   ")
    words = shlex.split(command)
    # The command line of these tests names the file of the fleet itself.
    assert words[0] == "snapshot"
    assert "--create-roles" not in words
    assert "--to FILE" in same_target
    code, document = run_here(fleet, *words[words.index("drill") :], spark=spark)
    assert (code, document["result"]) == (4, "inconclusive"), document
