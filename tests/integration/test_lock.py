"""One operation at a time: what a command reports about the running one, and which commands may not begin."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import cutline.nodes.lock
from cutline.cli.watch.turn import LOST_HINT, RENEW_SECONDS, take_turn
from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode, running_pid
from cutline.fleet.own_process import own_label
from cutline.nodes.connections import connect
from cutline.nodes.lock import FleetBusyError, lock_class, lock_fleet, take_lock
from cutline.nodes.open_sessions import shut_down
from cutline.nodes.sessions import open_sessions
from tests.commands.snapshot_runs import Runs, run_command, runs_on
from tests.held.lock_holders import read_lock_holders
from tests.integration.refusing import execute, refused, take_increment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "locked"
WAIT_SECONDS_MAX = 60
ENDED_SECONDS_MAX = 5.0


def database_role(dsn: str) -> str:
    return str(conninfo_to_dict(dsn)["user"])


@pytest.fixture(scope="module")
def chain(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with a new store and a full snapshot."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("lock"), spark) as runs:
        runs.full(NAME)
        yield runs


def test_a_busy_fleet_error_names_the_holder_of_the_lock(chain: Runs) -> None:
    primary = chain.fleet.primaries[0]
    host = socket.gethostname().partition(".")[0]
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")),
    ):
        ((session, since, address),) = read_lock_holders(primary.dsn)
        with refused(chain.fleet, "fleet-busy", 7) as errors:
            take_increment(chain.fleet, NAME)
    (error,) = errors
    where = address or "local socket"
    assert error.message == (
        f"node {primary.id}: another operation is running: create daily by {getpass.getuser()}@{host}"
        f" (process {os.getpid()}), as role {database_role(primary.dsn)}, since {since}, from {where}"
    )
    assert error.details == {
        "node": primary.id, "command": "create", "snapshot": "daily", "operation": None, "user": getpass.getuser(),
        "host": host, "process": os.getpid(), "role": database_role(primary.dsn), "since": since, "from": where,
        "session": session,
    }  # fmt: skip
    assert f"pg_terminate_backend({session})" in error.hint


def test_the_dry_run_of_a_restore_says_that_another_operation_is_running(chain: Runs) -> None:
    words = ("restore", NAME, "--replace", "--dry-run")
    nodes = ", ".join(node.id for node in chain.fleet.primaries)
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")),
    ):
        code, document = run_command(chain.fleet, *words)
        busy = [text for text in document["warnings"] if text.startswith("another operation is running")]
        assert (code, len(busy)) == (0, 1), document
        assert busy[0].startswith(f"another operation is running on {nodes}: create daily by {getpass.getuser()}@")
        assert busy[0].endswith("; until it ends, the restore is refused (exit code 7)")
        code, document = run_command(chain.fleet, "restore", NAME, "--replace", "--yes")
        assert (code, document["error"]) == (7, "fleet-busy")
    code, document = run_command(chain.fleet, *words)
    assert (code, [text for text in document["warnings"] if "is running" in text]) == (0, [])


def test_another_applications_session_that_holds_the_lock_is_also_named(chain: Runs) -> None:
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name, "somebody's script"),
        refused(chain.fleet, "fleet-busy", 7) as errors,
    ):
        take_increment(chain.fleet, NAME)
    role = database_role(chain.fleet.primaries[0].dsn)
    assert f"of somebody's script, as role {role}, since " in errors[0].message
    assert f"check what role {role} is doing there" in errors[0].hint
    assert errors[0].details["command"] is None


def test_a_busy_fleet_error_names_the_running_operation(chain: Runs) -> None:
    """One create waits for a transaction; a second create, in a subprocess, reports it."""
    operations = Path(chain.fleet.store.url.removeprefix("file://")) / "operations"
    before = set(operations.iterdir())
    with psycopg.connect(chain.fleet.primaries[0].dsn) as holding, ThreadPoolExecutor(1) as threads:
        holding.execute("UPDATE account SET balance = balance WHERE id = 1")
        creating = threads.submit(chain.full, "slow")
        try:
            deadline = time.monotonic() + WAIT_SECONDS_MAX
            while not (new := set(operations.iterdir()) - before):
                assert not creating.done()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            code, document = run_command(chain.fleet, "create", NAME, "--incremental")
        finally:
            holding.rollback()
        commit = creating.result(WAIT_SECONDS_MAX)
    assert (code, document["error"]) == (7, "fleet-busy")
    (operation,) = new
    details = document["details"]
    assert (details["command"], details["snapshot"], details["operation"], details["process"]) == (
        "create", "slow", operation.name, os.getpid(),
    )  # fmt: skip
    assert commit.operation == operation.name


def test_our_own_lost_session_does_not_keep_us_from_taking_the_lock_again(chain: Runs) -> None:
    dsn = chain.fleet.node("s1").dsn
    asleep = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s AND wait_event = 'PgSleep'"
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")) as lock,
    ):
        connection = sessions.connections["s1"]
        former = connection.info.backend_pid

        def sleep() -> None:
            with suppress(psycopg.OperationalError):
                connection.execute("SELECT pg_sleep(60)")

        sleeping = threading.Thread(target=sleep)
        sleeping.start()
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        with psycopg.connect(dsn, autocommit=True) as looking:
            while looking.execute(asleep, (former,)).fetchone() != (1,):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        shut_down(connection)
        sleeping.join(WAIT_SECONDS_MAX)
        lock.renew()
        assert lock.retaken
        lock.check_held()
        ((session, *_),) = read_lock_holders(dsn)
        assert session == sessions.connections["s1"].info.backend_pid != former


def test_a_watch_whose_lock_is_lost_says_that_it_is_the_watchs_lock(chain: Runs) -> None:
    said: list[tuple[str, str]] = []
    with take_turn(chain.fleet, lambda text, *, hint: said.append((text, hint))) as turn:
        turn._renewed_at = -RENEW_SECONDS
        assert turn.keep()
        for name in ("s1", "s2"):
            turn.lock.sessions.connections[name].execute("SELECT pg_advisory_unlock_all()")
        turn._renewed_at = -RENEW_SECONDS
        assert not turn.keep()
    assert said == [
        (
            "node s1: the watch lock was lost; another watch may have taken over, so this watch starts over: it takes"
            " the lock again, or stands by",
            LOST_HINT,
        )
    ]


@contextmanager
def suspended(node: EmbeddedNode) -> Iterator[None]:
    """Suspend the node's server, so that neither its sessions nor later ones get an answer."""
    with psycopg.connect(node.dsn(), autocommit=True) as session:
        rows = session.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend'").fetchall()
        stopped = [pid for (pid,) in rows if pid != session.info.backend_pid]
    stopped.append(running_pid(node) or 0)
    try:
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("is_lost", [False, True], ids=["session", "connecting"])
def test_an_interrupt_does_not_wait_for_a_silent_node(
    shared_fleet: EmbeddedFleet, chain: Runs, *, is_lost: bool
) -> None:
    """The interrupt comes while the lock's session is asked, or while a lost one is replaced."""
    silent = shared_fleet.primaries[1]
    interrupted: list[float] = []

    def interrupt() -> None:
        interrupted.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    def renew(stack: ExitStack) -> None:
        with (
            open_sessions(chain.fleet, chain.fleet.primaries) as sessions,
            lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")) as lock,
        ):
            stack.enter_context(suspended(silent))
            if is_lost:
                shut_down(sessions.connections[silent.id])
            threading.Timer(1.0, interrupt).start()
            lock.renew()

    with ExitStack() as stack, pytest.raises(KeyboardInterrupt):
        renew(stack)
    assert time.monotonic() - interrupted[0] < ENDED_SECONDS_MAX


def test_locks_of_silent_nodes_are_released_at_once(
    shared_fleet: EmbeddedFleet, chain: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cutline.nodes.lock, "UNLOCK_SECONDS_MAX", 2.0)
    with ExitStack() as stack:
        with (
            open_sessions(chain.fleet, chain.fleet.primaries) as sessions,
            lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")),
        ):
            for node in shared_fleet.primaries:
                stack.enter_context(suspended(node))
            began = time.monotonic()
        assert 2.0 <= time.monotonic() - began < 2.0 * len(shared_fleet.primaries)


@pytest.fixture
def powerless(chain: Runs) -> Iterator[psycopg.Connection[Any]]:
    """A session of s1 of a role that may connect, and nothing else."""
    dsn = chain.fleet.node("s1").dsn
    execute(dsn, "DROP ROLE IF EXISTS mallory", "CREATE ROLE mallory LOGIN")
    with closing(psycopg.connect(make_conninfo(dsn, user="mallory"), autocommit=True)) as session:
        yield session
    execute(dsn, "DROP ROLE mallory")


def seen_lock(session: psycopg.Connection[Any]) -> tuple[int, int]:
    """The number of a lock as any role sees it in pg_locks, and as the functions that take it have it."""
    rows = session.execute(
        "SELECT classid::bigint, objid::bigint FROM pg_locks"
        " WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
    ).fetchall()
    ((first, second),) = rows
    return first - (1 << 32) if first >= 1 << 31 else first, second


def test_locks_of_a_role_that_may_run_no_command_keep_nobody_out(
    chain: Runs, powerless: psycopg.Connection[Any]
) -> None:
    """It takes the lock that it has seen of an operation, others of the same class, and the class's own numbers."""
    with open_sessions(chain.fleet, chain.fleet.primaries) as sessions:
        with lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")):
            first, second = seen_lock(powerless)
            assert first == lock_class(chain.fleet.name)
            assert powerless.execute("SELECT pg_try_advisory_lock(%s, %s)", (first, second)).fetchone() == (False,)
        powerless.execute("SELECT pg_advisory_lock(%s, n) FROM generate_series(1, 99) n", (first,))
        powerless.execute("SELECT pg_advisory_lock(%s, %s)", (first, second))
        powerless.execute("SELECT pg_advisory_lock((%s::bigint << 32) | n) FROM generate_series(0, 9) n", (first,))
        powerless.execute("SELECT set_config('application_name', 'cutline create daily ops@db7:4711', false)")
        with lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")) as lock:
            lock.check_held()
        code, _ = run_command(chain.fleet, "create", NAME, "--incremental")
    assert code == 0


@pytest.mark.parametrize(
    "right",
    [
        "ALTER ROLE mallory REPLICATION",
        "ALTER ROLE mallory CREATEDB",
        "GRANT SET ON PARAMETER session_replication_role TO mallory",
    ],
)
def test_the_lock_of_a_role_that_may_run_commands_is_named_with_the_role(
    chain: Runs, powerless: psycopg.Connection[Any], right: str
) -> None:
    execute(chain.fleet.node("s1").dsn, right)
    powerless.execute("SELECT pg_advisory_lock(%s, 7)", (lock_class(chain.fleet.name),))
    try:
        with (
            open_sessions(chain.fleet, chain.fleet.primaries) as sessions,
            pytest.raises(FleetBusyError, match="as role mallory, since") as raised,
            lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")),
        ):
            pass
        assert raised.value.details["role"] == "mallory"
        assert f"pg_terminate_backend({powerless.info.backend_pid})" in raised.value.hint
    finally:
        execute(chain.fleet.node("s1").dsn, "REVOKE SET ON PARAMETER session_replication_role FROM mallory")


def test_a_prepared_transaction_is_no_operation(chain: Runs) -> None:
    dsn = chain.fleet.node("s1").dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s, 7)", (lock_class(chain.fleet.name),))
        connection.execute("PREPARE TRANSACTION 'holds a lock'")
    try:
        with (
            open_sessions(chain.fleet, chain.fleet.primaries) as sessions,
            lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")) as lock,
        ):
            lock.check_held()
    finally:
        execute(dsn, "ROLLBACK PREPARED 'holds a lock'")


@pytest.mark.parametrize("numbers", [(5, 8), (8, 5)], ids=["lower", "higher"])
def test_of_two_operations_that_register_at_once_one_gets_the_lock(
    chain: Runs, monkeypatch: pytest.MonkeyPatch, numbers: tuple[int, int]
) -> None:
    """Both have registered before either reads who else has: the lower number stays."""
    barrier, drawn = threading.Barrier(2), iter(numbers)
    register = cutline.nodes.lock._register

    def register_both(connection: psycopg.Connection[Any], name: str, label: str) -> int:
        number = register(connection, name, label)
        barrier.wait(WAIT_SECONDS_MAX)
        return number

    monkeypatch.setattr(cutline.nodes.lock, "draw_number", lambda: next(drawn))
    monkeypatch.setattr(cutline.nodes.lock, "_register", register_both)
    node = chain.fleet.node("s1")

    def take(name: str) -> tuple[str, int | None]:
        with closing(connect(node)) as connection:
            try:
                taken = take_lock(node, connection, chain.fleet.name, own_label("create", name))
            except FleetBusyError:
                return name, None
            is_over.wait(WAIT_SECONDS_MAX)
            return name, taken

    is_over = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(take, name) for name in ("first", "second")]
        done, _ = wait(both, WAIT_SECONDS_MAX, FIRST_COMPLETED)
        assert [one.result()[1] for one in done] == [None]
        is_over.set()
        assert sorted(one.result()[1] or 0 for one in both) == [0, min(numbers)]
