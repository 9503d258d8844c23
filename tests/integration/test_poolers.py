"""Connection poolers between a command and its nodes: what can't work through one is refused by name, at init.

What can works with the right values: a pooler that drops the startup parameter `options` has left sessions with the
settings of their role, whose triggers then acted on restored rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect
from cutline.nodes.encodings import RAW
from cutline.nodes.pinned_settings import PINNED_SETTINGS
from cutline.nodes.poolers import SessionUnfitError
from cutline.nodes.problems import NodeUnfitError
from cutline.nodes.watch import watch_nodes
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.restore.scope.scope import RestoreScope
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.ddl.dump import dump_archive
from cutline.wal.drain.peek import _ask, open_reader
from tests.commands.snapshot_runs import Runs, runs_on, sorted_copies
from tests.integration.conftest import SETTINGS
from tests.integration.refusing import create, execute
from tests.poolers.pgbouncer import COMMON, Pooler, pgbouncer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "pooled"
# Values that differ from those that Cutline's sessions have.
ODD = {
    "array_nulls": "off", "datestyle": "SQL, DMY", "timezone": "'Asia/Tokyo'", "bytea_output": "escape",
    "intervalstyle": "sql_standard", "extra_float_digits": "0", "xmlbinary": "hex", "transform_null_equals": "on",
    "search_path": "public", "statement_timeout": "'1h'", "default_transaction_read_only": "on",
    "session_replication_role": "origin", "transaction_timeout": "'1h'",
}  # fmt: skip
TABLES = (
    "CREATE TABLE item (id int PRIMARY KEY, names text[], said text)",
    "INSERT INTO item VALUES (1, ARRAY['a', NULL, 'NULL'], 'original')",
    "CREATE FUNCTION twist() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.said := 'changed'; RETURN NEW; END $$",
    "CREATE TRIGGER twist BEFORE INSERT ON item FOR EACH ROW EXECUTE FUNCTION twist()",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A primary of its own: its role has settings of its own."""
    directory = tmp_path_factory.mktemp("pooled") / "fleet"
    fleet = start_fleet(directory, shards=1, backups=0, settings=SETTINGS)
    try:
        yield fleet
    finally:
        stop_fleet(directory, delete=True)


@pytest.fixture(scope="module")
def runs(server: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """A snapshot of it, taken without a pooler; then its role gets odd settings."""
    dsn = server.primaries[0].dsn()
    execute(dsn, *TABLES)
    with runs_on(server, tmp_path_factory.mktemp("direct"), spark) as direct:
        direct.full(NAME)
        execute(dsn, *(f"ALTER ROLE postgres SET {name} = {value}" for name, value in ODD.items()))
        yield direct
        execute(dsn, "SET default_transaction_read_only = off", "ALTER ROLE postgres RESET ALL")


def through(fleet: Fleet, pooler: Pooler) -> Fleet:
    return replace(fleet, nodes=tuple(replace(one, dsn=pooler.dsn(one.dsn)) for one in fleet.nodes))


@pytest.fixture(scope="module")
def in_session_mode(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The fleet behind a pooler with pool_mode = session, which drops the startup parameter options."""
    with pgbouncer(tmp_path_factory.mktemp("pooler") / "session", runs.fleet.nodes[0].dsn, "session") as pooler:
        yield through(runs.fleet, pooler)


@pytest.mark.parametrize(
    ("ignored", "problem"),
    [
        (COMMON, "does not accept replication connections"),
        ("extra_float_digits", "does not accept replication connections"),
        (f"{COMMON},replication", "ignores the request for a replication connection"),
    ],
)
def test_init_and_create_refuse_a_pooler_without_replication_by_name(
    runs: Runs, tmp_path: Path, ignored: str, problem: str
) -> None:
    with pgbouncer(tmp_path / "pooler", runs.fleet.nodes[0].dsn, "session", ignored=ignored) as pooler:
        fleet = through(runs.fleet, pooler)
        for command in (lambda: initialise(fleet, Silent()), lambda: create(fleet, "other")):
            with pytest.raises(
                NodeUnfitError, match=f"node s1: its dsn connects through PgBouncer 1.18.0, which {problem}"
            ) as raised:
                command()
            assert raised.value.exit_code == 3
            assert "point the dsn at the server itself" in raised.value.hint


@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("ignored", [COMMON, f"{COMMON},replication"])
def test_a_pooler_that_keeps_no_session_is_refused_by_name(runs: Runs, tmp_path: Path, mode: str, ignored: str) -> None:
    """Before a lock is taken: it would stay on the pooler's session."""
    with pgbouncer(tmp_path / "pooler", runs.fleet.nodes[0].dsn, mode, ignored=ignored) as pooler:
        fleet = through(runs.fleet, pooler)
        restore = lambda: plan_and_restore(runs, fleet)  # noqa: E731
        for command in (lambda: initialise(fleet, Silent()), lambda: create(fleet, "other"), restore):
            with pytest.raises(
                SessionUnfitError, match=r"PgBouncer 1\.18\.0, which may run each transaction"
            ) as raised:
                command()
            assert raised.value.exit_code == 3
            assert "pool_mode = session" in raised.value.hint
    assert advisory_locks(runs.fleet.nodes[0].dsn) == 0


def test_a_session_that_others_share_is_found_in_a_pool_of_any_size(runs: Runs, tmp_path: Path) -> None:
    """With idle sessions in the pool, a client may be given the same one several times."""
    dsn = runs.fleet.nodes[0].dsn
    for number, pool_size in enumerate((2, 3, 6, 20)):
        with ExitStack() as stack:
            pooler = stack.enter_context(
                pgbouncer(tmp_path / f"pooler-{number}", dsn, "transaction", pool_size=pool_size)
            )
            # They leave as many idle sessions in the pool.
            clients = [stack.enter_context(closing(psycopg.connect(pooler.dsn(dsn)))) for _ in range(pool_size - 1)]
            for client in clients:
                client.execute("SELECT 1")
            for client in clients:
                client.commit()
            with pytest.raises(SessionUnfitError):
                connect(through(runs.fleet, pooler).nodes[0])


def test_a_pooler_that_hands_sessions_on_as_they_are_is_refused(runs: Runs, tmp_path: Path) -> None:
    """The application's next session would act as ours: without triggers, with locks."""
    with pgbouncer(tmp_path / "pooler", runs.fleet.nodes[0].dsn, "session", reset_query="") as pooler:
        with pytest.raises(SessionUnfitError, match="reuses sessions without resetting them") as raised:
            connect(through(runs.fleet, pooler).nodes[0])
        assert "server_reset_query = DISCARD ALL" in raised.value.hint


@pytest.mark.parametrize("encoding", ["UTF8", RAW])
def test_sessions_have_their_settings_although_the_pooler_drops_them(in_session_mode: Fleet, encoding: str) -> None:
    node = in_session_mode.nodes[0]
    options = "-c session_replication_role=replica -c role=pg_monitor"
    as_replica = replace(node, dsn=make_conninfo(node.dsn, options=options))
    with psycopg.connect(node.dsn) as application, connect(as_replica, client_encoding=encoding) as ours:
        assert {name: setting_of(ours, name) for name in PINNED_SETTINGS} == PINNED_SETTINGS
        assert setting_of(ours, "session_replication_role") == "replica"
        assert setting_of(ours, "transaction_timeout") == "0"
        assert setting_of(ours, "client_encoding") == encoding
        assert setting_of(ours, "role") == "pg_monitor"
        assert setting_of(application, "array_nulls") == "off"
    # What was set stays ours.
    with psycopg.connect(node.dsn) as application:
        assert setting_of(application, "session_replication_role") == "origin"
        assert setting_of(application, "search_path") == "public"


def test_the_session_that_reads_slots_has_its_settings(in_session_mode: Fleet) -> None:
    wanted = PINNED_SETTINGS | {"client_encoding": RAW, "transaction_timeout": "0"}
    with open_reader(in_session_mode.nodes[0]) as reader:
        found = _ask(reader, "SELECT " + ", ".join(f"current_setting('{name}')" for name in wanted))
    assert dict(zip(wanted, found, strict=True)) == wanted


def test_what_another_client_has_left_in_a_session_is_gone(runs: Runs, tmp_path: Path) -> None:
    """The pooler's own reset leaves temporary tables, which hide catalogs from queries."""
    reset = "RESET ALL; SELECT pg_advisory_unlock_all()"
    with pgbouncer(tmp_path / "pooler", runs.fleet.nodes[0].dsn, "session", reset_query=reset, pool_size=30) as pooler:
        node = through(runs.fleet, pooler).nodes[0]
        connect(node).close()
        with psycopg.connect(node.dsn, autocommit=True) as other:
            other.execute("SET default_transaction_read_only = off")
            other.execute("CREATE TEMP TABLE pg_class AS SELECT 'mine' AS relname")
            other.execute("PREPARE _pg3_0 AS SELECT 1")
            left = other.execute("SELECT pg_backend_pid()").fetchone()
        with ExitStack() as stack:
            for _ in range(5):
                ours = stack.enter_context(connect(node))
                if ours.execute("SELECT pg_backend_pid()").fetchone() == left:
                    break
            else:
                raise AssertionError("the pooler gave other sessions")
            assert ours.execute("SELECT count(*) > 100 FROM pg_class").fetchone() == (True,)
            assert ours.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)


def test_rows_are_restored_as_they_were_through_a_pooler_that_drops_settings(
    runs: Runs, in_session_mode: Fleet
) -> None:
    dsn = runs.fleet.nodes[0].dsn
    before = sorted_copies(dsn)
    execute(dsn, "SET default_transaction_read_only = off", "TRUNCATE item, account, transfer")
    plan_and_restore(runs, in_session_mode)
    assert sorted_copies(dsn) == before
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT said, names[2] IS NULL, names[3] FROM item").fetchone()
    assert row == ("original", True, "NULL")


def plan_and_restore(runs: Runs, target: Fleet) -> None:
    request = RestoreRequest(NAME, None, scope=RestoreScope(data_only=True))
    restore_fleet(plan_restore(runs.fleet, target, request), runs.spark, Silent())


def test_pg_dump_is_not_run_without_its_settings_and_what_to_set_is_said(
    runs: Runs, in_session_mode: Fleet, tmp_path: Path
) -> None:
    """Its sessions ask for settings that Cutline can't set there; the statements make them the role's."""
    dsn, node = runs.fleet.nodes[0].dsn, in_session_mode.nodes[0]
    with watch_nodes([]) as watch:
        with pytest.raises(NodeUnfitError, match="drops the settings that pg_dump requests") as raised:
            dump_archive(node, None, watch)
        grants: Any = raised.value.details["grants"]
        statements = [one["statement"] for one in grants]
        assert statements == [
            "ALTER ROLE \"postgres\" SET timezone = 'UTC';",
            "ALTER ROLE \"postgres\" SET bytea_output = 'hex';",
            "ALTER ROLE \"postgres\" SET xmlbinary = 'base64';",
        ]
        execute(dsn, "SET default_transaction_read_only = off", *statements)
        with pgbouncer(tmp_path / "pooler", dsn, "session") as pooler:
            pooled = dump_archive(through(runs.fleet, pooler).nodes[0], None, watch)
        assert len(pooled) == len(dump_archive(runs.fleet.nodes[0], None, watch))


def test_a_setting_that_can_t_be_set_is_named(in_session_mode: Fleet) -> None:
    node = in_session_mode.nodes[0]
    as_absent = replace(node, dsn=make_conninfo(node.dsn, options="-c role=absent"))
    with pytest.raises(SessionUnfitError, match='role "absent" does not exist'):
        connect(as_absent)


def advisory_locks(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        (count,) = connection.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'").fetchone() or (-1,)
    return int(count)


def setting_of(connection: psycopg.Connection[Any], name: str) -> str:
    (value,) = connection.execute(f"SELECT current_setting('{name}')".encode()).fetchone() or ("",)
    return str(value)
