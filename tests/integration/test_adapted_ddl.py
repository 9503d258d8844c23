"""The steps of a restore by a role that is not a superuser: its rehearsal, its DDL, and its cleaning up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import psycopg
import pytest
from msgspec.structs import replace
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.nodes.connections import NodeUnreachableError, connect
from cutline.nodes.sessions import in_parallel
from cutline.nodes.watch import Watch, watch_nodes
from cutline.restore.ddl.ddl import refresh_views
from cutline.restore.ddl.running import DdlRun
from cutline.restore.ddl.unprivileged import adapt_ddl
from cutline.restore.plan.roles import check_memberships, read_our_name
from cutline.restore.run.rehearsal import refuse, rehearse
from cutline.restore.targets.databases import drop_database
from cutline.restore.targets.target import Target, TargetUnfitError, target_of
from tests.commands.ddl_runs import NOTHING, ddl_of, make_ledger
from tests.integration.refusing import execute

RESTORER, OTHER = "Restorer", "other_owner"
OPERATION = "20260101T000000Z-abcdef0123"
WAIT_SECONDS_MAX = 30
SLEEP = "SELECT pg_sleep(60);"
SLEEPING = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND query ~ 'pg_sleep|REFRESH' AND state = 'active'"
)


@pytest.fixture
def admin(shared_fleet: EmbeddedFleet) -> Iterator[str]:
    """A superuser's dsn, on a server that has the roles."""
    dsn = shared_fleet.primaries[0].dsn("postgres")
    execute(dsn, f'CREATE ROLE "{RESTORER}" LOGIN CREATEDB', f'CREATE ROLE {OTHER} ROLE "{RESTORER}"')
    try:
        yield dsn
    finally:
        execute(dsn, f'DROP ROLE "{RESTORER}"', f"DROP ROLE {OTHER}")


@pytest.fixture
def target(admin: str) -> Iterator[Target]:
    """The empty database of a restore, made and owned by the role."""
    target = target_of("s1", Node("s1", make_conninfo(admin, user=RESTORER, dbname="adapted")), (), OPERATION)
    execute(target.maintenance.dsn, f'CREATE DATABASE "{target.loading}" TEMPLATE template0')
    try:
        yield target
    finally:
        execute(admin, f'DROP DATABASE IF EXISTS "{target.loading}" WITH (FORCE)')


def ask(dsn: str, query: str, *values: str) -> object:
    with psycopg.connect(dsn) as connection:
        (answer,) = connection.execute(query.encode(), values).fetchone() or (None,)
    return answer


def as_admin(target: Target, admin: str) -> str:
    return make_conninfo(admin, dbname=target.loading)


def test_the_role_that_restores_keeps_what_it_has_as_an_owner(target: Target, admin: str) -> None:
    database = as_admin(target, admin)
    # As a schema that an extension made: no statement says who owns it.
    execute(target.loaded.dsn, 'CREATE SCHEMA "made"')
    ddl = adapt_ddl(
        ddl_of(
            f'CREATE TABLE "made"."t" ("id" integer);\nALTER TABLE "made"."t" OWNER TO "{RESTORER}";\n',
            f'CREATE PUBLICATION "ours";\nALTER PUBLICATION "ours" OWNER TO "{RESTORER}";\n'
            f'CREATE PUBLICATION "theirs";\nALTER PUBLICATION "theirs" OWNER TO "{OTHER}";\n',
        ),
        read_our_name(target),
    )
    with watch_nodes([target.maintenance]) as watch:
        run = DdlRun(target.loaded, ddl, watch)
        run.before_rows()
        run.after_rows(make_ledger(target.loaded))
    assert run.refusals == {}
    for role, expected in ((RESTORER, True), (OTHER, False)):
        assert ask(database, "SELECT has_database_privilege(%s, current_database(), 'CREATE')", role) is expected
        assert ask(database, "SELECT has_schema_privilege(%s, 'made', 'CREATE')", role) is expected
    assert ask(database, "SELECT pg_get_userbyid(pubowner) FROM pg_publication WHERE pubname = 'theirs'") == OTHER


def test_an_owners_name_is_no_statement_even_if_a_script_makes_backslashes_escapes(target: Target, admin: str) -> None:
    owner = "o\\'||pg_catalog.set_config('work_mem','65kB',false)||\\'"
    quoted = f'"{owner}"'
    execute(admin, f'CREATE ROLE {quoted} ROLE "{RESTORER}"')
    publication = f'CREATE PUBLICATION "theirs";\nALTER PUBLICATION "theirs" OWNER TO {quoted};\n'
    try:
        for setting in ("off", "on"):
            settings = f"SET standard_conforming_strings = {setting};\nSET escape_string_warning = off;\n"
            ddl = adapt_ddl(replace(ddl_of(post_data=publication), settings=settings), read_our_name(target))
            with watch_nodes([target.maintenance]) as watch:
                run = DdlRun(target.loaded, ddl, watch)
                run.after_rows(make_ledger(target.loaded))
            assert run.refusals == {}
            asked = "SELECT pg_get_userbyid(pubowner) FROM pg_publication WHERE pubname = 'theirs'"
            assert ask(as_admin(target, admin), asked) == owner
            execute(as_admin(target, admin), "DROP PUBLICATION theirs")
    finally:
        execute(as_admin(target, admin), f"DROP OWNED BY {quoted}")
        execute(admin, f"DROP ROLE {quoted}")


def test_the_owner_of_the_database_may_own_what_is_restored(target: Target, admin: str) -> None:
    pre_data = (
        'CREATE SCHEMA "app";\nALTER SCHEMA "app" OWNER TO "pg_database_owner";\n'
        'CREATE TABLE "app"."t" ("id" integer);\nALTER TABLE "app"."t" OWNER TO "pg_database_owner";\n'
    )
    adapted = adapt_ddl(ddl_of(pre_data), read_our_name(target))
    with psycopg.connect(target.maintenance.dsn) as connection, watch_nodes([target.maintenance]) as watch:
        check_memberships(target, connection, adapted.roles)
        assert rehearse(target, adapted, watch) == []
    owner = "SELECT pg_get_userbyid(relowner) FROM pg_class WHERE oid = 'app.t'::regclass"
    assert ask(as_admin(target, admin), owner) == "pg_database_owner"


def test_a_grant_without_effect_is_found_among_those_of_other_roles(target: Target) -> None:
    """Run as another role, a good grant is without effect, and a bad one has an effect."""
    execute(
        target.loaded.dsn,
        "CREATE SCHEMA app; CREATE TABLE app.a (id int); CREATE TABLE app.b (id int)",
        f"GRANT ALL ON SCHEMA app TO {OTHER}; ALTER TABLE app.a OWNER TO {OTHER}; GRANT SELECT ON app.b TO {OTHER}",
    )
    good, bad = "GRANT SELECT ON app.a TO pg_monitor;", "GRANT SELECT ON app.b TO pg_monitor;"
    statements = f"SET ROLE {OTHER};\n{good}\n{bad}\nRESET ROLE;\n{bad}\n"
    ddl = replace(ddl_of(statements, kind="ACL"), is_adapted=True)
    with watch_nodes([target.maintenance]) as watch, connect(target.maintenance) as connection:
        refused = rehearse(target, ddl, watch)
        with pytest.raises(TargetUnfitError, match="no privileges were granted"):
            refuse({target: refused}, {"s1": connection})
    assert [one.text() for one in refused] == [f'ACL public.made1: no privileges were granted for "b" ({bad})']


def test_a_session_lost_in_the_rehearsal_is_an_unreachable_node(target: Target) -> None:
    statements = "CREATE TABLE public.t (id int);\nSELECT pg_terminate_backend(pg_backend_pid());\nSELECT 2;\n"
    with watch_nodes([target.maintenance]) as watch, pytest.raises(NodeUnreachableError, match="node s1"):
        rehearse(target, ddl_of(statements), watch)


def test_a_database_that_can_not_be_dropped_is_a_refusal(target: Target, admin: str) -> None:
    refused = pytest.raises(TargetUnfitError, match=r"can't be dropped: database .* is being accessed by other users")
    with psycopg.connect(as_admin(target, admin)), connect(target.maintenance) as connection, refused:
        drop_database(target, connection, target.loading)


def run_after_rows(target: Target, watch: Watch) -> None:
    DdlRun(target.loaded, ddl_of(post_data=SLEEP), watch).after_rows(make_ledger(target.loaded))


def run_rehearsal(target: Target, watch: Watch) -> None:
    rehearse(target, ddl_of(SLEEP), watch)


def run_refresh(target: Target, watch: Watch) -> None:
    execute(
        target.loaded.dsn,
        "CREATE TABLE t (id int); CREATE MATERIALIZED VIEW v AS SELECT id, pg_sleep(60)::text FROM t",
        "INSERT INTO t VALUES (1)",
    )
    refresh_views(target.loaded, replace(NOTHING, views=("public.v",)), watch)


@pytest.mark.parametrize("work", [run_after_rows, run_rehearsal, run_refresh])
def test_an_interrupt_ends_the_sessions_that_run_ddl(
    target: Target, admin: str, work: Callable[[Target, Watch], None]
) -> None:
    def interrupt() -> None:
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while ask(admin, SLEEPING, target.loading) != 1 and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    began = time.monotonic()
    with watch_nodes([target.maintenance]) as watch:
        with pytest.raises(KeyboardInterrupt):
            in_parallel(partial(work, watch=watch), [target], watch.end_all)
        # Nothing that begins afterwards is waited for either.
        with pytest.raises(NodeUnreachableError):
            run_after_rows(target, watch)
    thread.join()
    assert time.monotonic() - began < WAIT_SECONDS_MAX
