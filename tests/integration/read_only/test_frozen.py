"""A freeze makes a database read-only for all new sessions, older ones are ended, and a thaw restores the settings."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect
from cutline.nodes.other_sessions import end_sessions
from cutline.nodes.problems import NodeUnfitError
from cutline.nodes.read_only import check_freezable, freeze, is_on, read_frozen, read_record, thaw
from cutline.nodes.sessions import open_sessions
from tests.integration.read_only.frozen_nodes import (
    FLEET_ID,
    WRITE,
    await_closed,
    execute,
    may_write,
    read_settings,
    role,
)

CONNECT_SECONDS_MAX = 30


@pytest.mark.parametrize(
    "before",
    [
        [],
        ["ALTER DATABASE bank SET default_transaction_read_only = off"],
        ["ALTER DATABASE bank SET default_transaction_read_only = true", "ALTER DATABASE bank SET work_mem = '5MB'"],
        ["ALTER ROLE writer SET default_transaction_read_only = no"],
        ["ALTER ROLE writer IN DATABASE bank SET default_transaction_read_only = 0"],
        [
            "ALTER DATABASE bank SET default_transaction_read_only = on",
            "ALTER ROLE writer SET default_transaction_read_only = on",
            "ALTER ROLE writer IN DATABASE bank SET default_transaction_read_only = off",
            "ALTER ROLE writer IN DATABASE bank SET statement_timeout = 7000",
        ],
    ],
    ids=["nothing", "off", "on", "role", "role-in-database", "all"],
)
def test_nobody_may_write_to_a_frozen_database_and_a_thaw_restores_its_settings(node: Node, before: list[str]) -> None:
    with role(node, "writer") as dsn, ExitStack() as stack:
        stack.callback(execute, node, "ALTER DATABASE bank RESET ALL")
        execute(node, *before)
        was, could = read_settings(node), [may_write(node.dsn), may_write(dsn)]
        with connect(node) as connection:
            frozen = freeze(node, connection, FLEET_ID, "operation-1", "last")
            assert read_frozen(node, connection) == read_record(node, connection) == frozen
            assert [may_write(node.dsn), may_write(dsn)] == [False, False]
            assert thaw(node, connection, Silent(), operation="another") is None
            assert [may_write(node.dsn), may_write(dsn)] == [False, False]
            # Our own session can always write.
            connection.execute(WRITE)
            thawed = thaw(node, connection, Silent(), operation="operation-1")
            assert thawed
            assert (thawed.was, thawed.left) == (frozen, ())
            assert thaw(node, connection, Silent()) is None
        assert read_settings(node) == was
        assert [may_write(node.dsn), may_write(dsn)] == could


def test_settings_changed_by_hand_since_the_freeze_stay(node: Node) -> None:
    with role(node, "writer"), ExitStack() as stack:
        stack.callback(execute, node, "ALTER DATABASE bank RESET ALL")
        execute(node, "ALTER ROLE writer SET default_transaction_read_only = off")
        execute(node, "ALTER DATABASE bank SET default_transaction_read_only = off")
        with connect(node) as connection:
            freeze(node, connection, FLEET_ID, "operation-1", "last")
            execute(node, "ALTER DATABASE bank RESET default_transaction_read_only")
            assert read_frozen(node, connection) is None
            # A record without effect does not keep another freeze from recording the earlier settings.
            second = freeze(node, connection, FLEET_ID, "operation-2", "last")
            assert read_record(node, connection) == second
            execute(node, "ALTER DATABASE bank RESET default_transaction_read_only")
            assert thaw(node, connection, Silent())
            assert read_record(node, connection) is None
        settings = [row for row in read_settings(node) if row[1] != "comment"]
        assert settings == [("", "writer", "default_transaction_read_only=off")]


def test_a_dropped_role_keeps_nothing_frozen(node: Node) -> None:
    was = read_settings(node)
    with connect(node) as connection:
        with role(node, "writer"):
            execute(node, "ALTER ROLE writer SET default_transaction_read_only = off")
            freeze(node, connection, FLEET_ID, "operation-1", "last")
        assert thaw(node, connection, Silent())
    assert read_settings(node) == was


def test_sessions_that_begin_at_any_moment_are_read_only_or_ended(node: Node) -> None:
    """Clients connect without a pause during the freeze; no session that survives it may write."""
    stop = threading.Event()
    sessions: list[psycopg.Connection[Any]] = []

    def reconnect() -> None:
        while not stop.is_set():
            sessions.append(psycopg.connect(node.dsn, autocommit=True, application_name="tests"))
            if len(sessions) > 60:
                sessions.pop(0).close()

    threads = [threading.Thread(target=reconnect) for _ in range(3)]
    with connect(node) as connection, connect(node) as other:
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + CONNECT_SECONDS_MAX
        while len(sessions) < len(threads):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        freeze(node, connection, FLEET_ID, "operation-1", "last")
        ended, left = end_sessions(node, connection, None, 10, Silent())
        frozen_at = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
        stop.set()
        for thread in threads:
            thread.join()
        try:
            assert left == []
            assert ended >= 1
            with pytest.raises(psycopg.OperationalError):
                other.execute("SELECT 1")
            refused = 0
            for session in sessions:
                try:
                    session.execute(WRITE)
                except psycopg.errors.ReadOnlySqlTransaction:
                    refused += 1
                except psycopg.OperationalError:
                    continue
                else:
                    pytest.fail(f"a session wrote after {frozen_at}")
            assert refused
            await_closed(node, connection, *sessions)
            thawed = thaw(node, connection, Silent())
            # Sessions that began read-only would stay so.
            assert thawed
            assert thawed.ended == refused
        finally:
            for session in sessions:
                session.close()


@contextmanager
def beside_admin(node: Node) -> Iterator[tuple[psycopg.Connection[Any], psycopg.Connection[Any]]]:
    """Yield the only two sessions: of a role that may end all but superusers' sessions, and of a superuser."""
    with (
        role(node, "owner", "GRANT pg_signal_backend, pg_monitor TO owner") as dsn,
        psycopg.connect(dsn, autocommit=True) as connection,
        psycopg.connect(node.dsn, application_name="admin") as admin,
    ):
        await_closed(node, connection, admin)
        yield connection, admin


def test_a_session_that_may_not_be_ended_is_named(node: Node) -> None:
    with beside_admin(node) as (connection, admin):
        ended, left = end_sessions(node, connection, None, 1, Silent())
        assert [(one.pid, one.application, one.is_superuser) for one in left] == [
            (admin.info.backend_pid, "admin", True)
        ]
        assert ended == 0


def test_a_session_that_may_not_be_ended_may_end_by_itself(node: Node) -> None:
    with beside_admin(node) as (connection, admin):
        threading.Timer(0.3, admin.close).start()
        assert end_sessions(node, connection, None, 1, Silent()) == (1, [])


@pytest.mark.parametrize("text", ["on", "true", "yes", "1", "ON", "tr", "y", "off", "false", "no", "0", "of", "n"])
def test_a_setting_is_read_as_the_server_reads_it(node: Node, text: str) -> None:
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        connection.execute(f"SET default_transaction_read_only = '{text}'".encode())
        assert is_on(text) == (connection.execute("SHOW default_transaction_read_only").fetchone() == ("on",))


def test_everything_that_keeps_a_role_from_freezing_is_named_before_any_change(fleet: Fleet, node: Node) -> None:
    was = read_settings(node)
    with (
        role(node, "owner", "GRANT pg_monitor TO owner") as dsn,
        role(node, "writer"),
        closing(psycopg.connect(node.dsn, application_name="admin")) as admin,
    ):
        execute(node, "ALTER ROLE writer SET default_transaction_read_only = off")
        execute(node, "CREATE SUBSCRIPTION inbound CONNECTION 'dbname=nowhere' PUBLICATION p WITH (connect = false)")
        execute(node, "ALTER SUBSCRIPTION inbound ENABLE", "GRANT ALL ON DATABASE bank TO owner")
        try:
            limited = replace(fleet, nodes=(replace(node, dsn=dsn),))
            with open_sessions(limited, limited.nodes) as sessions, pytest.raises(NodeUnfitError) as caught:
                check_freezable(sessions, FLEET_ID)
        finally:
            execute(node, "ALTER SUBSCRIPTION inbound DISABLE")
            execute(node, "ALTER SUBSCRIPTION inbound SET (slot_name = NONE)", "DROP SUBSCRIPTION inbound")
        for problem in (
            "does not own database bank", f"does not own publication cutline_{FLEET_ID}", "can't end other roles",
            f"superusers' sessions: process {admin.info.backend_pid} (admin", "subscription inbound writes",
            "can't change role writer, which has its own default_transaction_read_only = off",
            "subscription inbound writes",
        ):  # fmt: skip
            assert problem in caught.value.message
        assert 'GRANT "pg_signal_backend" TO "owner";' in caught.value.hint
        assert 'ALTER SUBSCRIPTION "inbound" DISABLE;' in caught.value.hint
    assert read_settings(node) == was


def test_a_role_with_only_the_privileges_that_refusals_ask_for_can_freeze_and_thaw(fleet: Fleet, node: Node) -> None:
    grants = ["GRANT pg_monitor, pg_signal_backend TO owner", "ALTER DATABASE bank OWNER TO owner"]
    grants += [f"ALTER PUBLICATION cutline_{FLEET_ID} OWNER TO owner", "ALTER ROLE owner CREATEROLE"]
    with role(node, "writer"), role(node, "owner", *grants) as dsn:
        execute(node, "GRANT writer TO owner WITH ADMIN OPTION")
        execute(node, "ALTER ROLE writer SET default_transaction_read_only = off")
        was = read_settings(node)
        with connect(replace(node, dsn=dsn)) as connection:
            freeze(node, connection, FLEET_ID, "operation-1", "last")
            assert not may_write(node.dsn)
            assert not may_write(psycopg.conninfo.make_conninfo(node.dsn, user="writer"))
            await_closed(node, connection)
            assert end_sessions(node, connection, None, 5, Silent())[1] == []
            assert thaw(node, connection, Silent())
        assert read_settings(node) == was
        execute(node, "ALTER DATABASE bank OWNER TO postgres")
