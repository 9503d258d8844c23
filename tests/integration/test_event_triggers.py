"""Event triggers of the databases: their functions see Cutline's DDL as any other, and what they refuse is theirs.

Many of these functions name tables without a schema, which they find by the search_path of the database's sessions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.publications import EventTriggerError
from cutline.nodes.read_only import resume_fleet
from cutline.snapshots.create.initialise import initialise
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "audited"
AUDITED = (
    "CREATE SCHEMA audit", "CREATE TABLE audit.ddl_log (id bigserial PRIMARY KEY, who text, tag text)",
    "CREATE FUNCTION audit.log_ddl() RETURNS event_trigger LANGUAGE plpgsql AS"
    " $$ BEGIN INSERT INTO ddl_log (who, tag) VALUES (current_user, tg_tag); END $$",
    "CREATE TABLE first (id int PRIMARY KEY)",
)  # fmt: skip
AUDIT = "CREATE EVENT TRIGGER audit_ddl ON ddl_command_end EXECUTE FUNCTION audit.log_ddl()"
UNAUDIT = "DROP EVENT TRIGGER audit_ddl"
# Whoever owns a schema of the search_path can make better matches of what statements call there.
PLANTED = (
    "CREATE TABLE public.ran (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, what text)",
    "CREATE FUNCTION public.evil(oid, int) RETURNS boolean LANGUAGE plpgsql AS"
    " $$ BEGIN INSERT INTO public.ran (what) VALUES ('oid = int'); RETURN $1 OPERATOR(pg_catalog.=) $2::oid; END $$",
    "CREATE OPERATOR public.= (LEFTARG = oid, RIGHTARG = int, FUNCTION = public.evil)",
    "CREATE OPERATOR public.<> (LEFTARG = oid, RIGHTARG = int, FUNCTION = public.evil)",
    "CREATE FUNCTION public.current_setting(unknown_text varchar) RETURNS text LANGUAGE plpgsql AS"
    " $$ BEGIN INSERT INTO public.ran (what) VALUES ('current_setting'); RETURN ''; END $$",
)  # fmt: skip


@pytest.fixture
def own(shared_fleet: EmbeddedFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with database_on(shared_fleet, "triggered", tmp_path_factory.mktemp("triggered")) as fleet:
        fleet = replace(fleet, nodes=fleet.primaries)
        execute(fleet.nodes[0].dsn, *AUDITED)
        with dropping_slots(fleet):
            yield fleet


@contextmanager
def audited(dsn: str) -> Iterator[None]:
    """The audit finds its table by the path of the database."""
    database = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    execute(dsn, f"ALTER DATABASE {database} SET search_path = audit, public", AUDIT)
    yield


def log_of(dsn: str) -> list[tuple[str, str]]:
    with psycopg.connect(dsn) as connection:
        return connection.execute("SELECT who, tag FROM audit.ddl_log ORDER BY id").fetchall()


def test_an_audit_sees_what_init_and_creates_do(own: Fleet, spark: SparkSession) -> None:
    dsn = own.nodes[0].dsn
    runs = Runs(own, Ready(spark))
    with audited(dsn):
        runs.init()
        assert log_of(dsn) == [
            ("postgres", tag) for tag in ("CREATE PUBLICATION", "ALTER PUBLICATION", "CREATE PUBLICATION")
        ]
        runs.full(NAME)
        execute(dsn, "CREATE TABLE second (id int PRIMARY KEY)", "INSERT INTO second VALUES (1)")
        commit = runs.increment(NAME)
        assert log_of(dsn)[3:] == [("postgres", "CREATE TABLE"), ("postgres", "ALTER PUBLICATION")]
        assert commit.definition_changes
        assert [group.table for group in commit.definition_changes.groups["s1"]] == ["second"]
        runs.full("end", terminal=True)
        assert log_of(dsn)[5:] == [("postgres", "COMMENT")]
        resume_fleet(own, Silent())
        assert log_of(dsn)[6:] == [("postgres", "COMMENT")]
        assert runs.check_one("end").conflicts == []


def test_nothing_but_the_statement_itself_runs_under_the_databases_path(own: Fleet, spark: SparkSession) -> None:
    dsn = own.nodes[0].dsn
    execute(dsn, *PLANTED)
    runs = Runs(own, Ready(spark))
    with audited(dsn):
        runs.init()
        runs.full(NAME)
        execute(dsn, "CREATE TABLE second (id int PRIMARY KEY)")
        runs.increment(NAME)
        with psycopg.connect(dsn) as connection:
            assert connection.execute("SELECT what FROM ran").fetchall() == []
            # It would have run.
            assert connection.execute("SELECT 0::oid = 0").fetchone() == (True,)
            assert connection.execute("SELECT what FROM ran").fetchall() == [("oid = int",)]


def test_what_an_event_trigger_refuses_is_said_of_it_at_once(own: Fleet, spark: SparkSession) -> None:
    dsn = own.nodes[0].dsn
    runs = Runs(own, Ready(spark))
    execute(dsn, AUDIT)
    lacking = (
        r"node s1: event trigger audit_ddl in database triggered, which calls audit.log_ddl\(\), rejected"
        r' CREATE PUBLICATION: relation "ddl_log" does not exist$'
    )
    with pytest.raises(EventTriggerError, match=lacking) as raised:
        runs.init()
    assert "ALTER FUNCTION audit.log_ddl() SET search_path" in raised.value.hint
    assert raised.value.exit_code == 3
    # That is what the hint says.
    execute(dsn, UNAUDIT, "ALTER FUNCTION audit.log_ddl() SET search_path = audit, pg_temp", AUDIT)
    runs.init()
    runs.full(NAME)
    execute(dsn, "CREATE TABLE second (id int PRIMARY KEY)")
    refusing = (
        "CREATE OR REPLACE FUNCTION audit.log_ddl() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$ BEGIN RAISE EXCEPTION 'no DDL at night' USING HINT = 'wait'; END $$"
    )
    execute(dsn, UNAUDIT, refusing, AUDIT)
    with pytest.raises(EventTriggerError, match=r"rejected ALTER PUBLICATION: no DDL at night$"):
        runs.increment(NAME)
    execute(dsn, UNAUDIT)
    runs.increment(NAME)


def test_a_role_that_the_audit_does_not_admit_is_not_said_to_own_too_little(own: Fleet) -> None:
    dsn = own.nodes[0].dsn
    execute(dsn, "DROP ROLE IF EXISTS publisher", "CREATE ROLE publisher LOGIN REPLICATION BYPASSRLS")
    try:
        execute(
            dsn, "GRANT pg_read_all_data, pg_read_all_stats TO publisher", "ALTER TABLE first OWNER TO publisher",
            "GRANT CREATE ON DATABASE triggered TO publisher", "DROP TABLE audit.ddl_log",
            "CREATE TABLE audit.ddl_log (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, who text, tag text)",
        )  # fmt: skip
        nodes = tuple(replace(one, dsn=make_conninfo(one.dsn, user="publisher")) for one in own.nodes)
        fleet = replace(own, nodes=nodes, groups=type(own.groups)(exclude=("audit.*",)))
        with audited(dsn):
            with pytest.raises(EventTriggerError, match="permission denied for") as raised:
                initialise(fleet, Silent())
            remedy = "ALTER FUNCTION audit.log_ddl() SECURITY DEFINER;"
            assert remedy in raised.value.hint
            with psycopg.connect(dsn) as connection:
                # The setting is there from 17 on.
                has_setting = connection.info.server_version >= 170000
            assert ('ALTER ROLE "publisher" SET event_triggers = off;' in raised.value.hint) is has_setting
            execute(dsn, remedy.rstrip(";"))
            initialise(fleet, Silent())
            assert log_of(dsn)[1:] == [
                ("postgres", tag) for tag in ("CREATE PUBLICATION", "ALTER PUBLICATION", "CREATE PUBLICATION")
            ]
            execute(dsn, UNAUDIT)
    finally:
        execute(dsn, "DROP OWNED BY publisher CASCADE", "DROP ROLE publisher")
