"""One operation at a time: what a command reports about the running one, and which commands may not begin."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

import fleet.nodes.lock
from cli.watch.turn import LOST_HINT, RENEW_SECONDS, take_turn
from embedded.fleet import EmbeddedFleet
from embedded.server import EmbeddedNode, running_pid
from fleet.label import own_label
from fleet.nodes.lock import FleetBusyError, lock_fleet, lock_key
from fleet.nodes.sessions import open_sessions
from fleet.nodes.shut_down import shut_down
from tests.commands.snapshot_runs import Runs, run_command, runs_on
from tests.held.lock_holders import read_lock_holders
from tests.integration.refusing import refused, take_increment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "locked"
WAIT_SECONDS_MAX = 60
ENDED_SECONDS_MAX = 5.0


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
        f" (process {os.getpid()}), since {since}, from {where}"
    )
    assert error.details == {
        "node": primary.id, "command": "create", "snapshot": "daily", "operation": None, "user": getpass.getuser(),
        "host": host, "process": os.getpid(), "since": since, "from": where, "session": session,
    }  # fmt: skip
    assert f"pg_terminate_backend({session})" in error.hint


def test_another_applications_session_that_holds_the_lock_is_also_named(chain: Runs) -> None:
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name, "somebody's script"),
        refused(chain.fleet, "fleet-busy", 7) as errors,
    ):
        take_increment(chain.fleet, NAME)
    assert "of somebody's script, since " in errors[0].message
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
            "node s1: the watch's lock was lost; another watch may have begun, so this one begins anew: it takes the"
            " lock again, or stands by",
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
    monkeypatch.setattr(fleet.nodes.lock, "UNLOCK_SECONDS_MAX", 2.0)
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
def held_by_no_session(chain: Runs) -> Iterator[str]:
    """The lock of s1, held by a prepared transaction: as of a session that is ending, no session is shown for it."""
    dsn = chain.fleet.node("s1").dsn
    with psycopg.connect(dsn) as connection:
        connection.execute("SELECT pg_advisory_xact_lock(%s)", (lock_key(chain.fleet.name),))
        connection.execute("PREPARE TRANSACTION 'holds the lock'")
    try:
        yield dsn
    finally:
        with psycopg.connect(dsn, autocommit=True) as connection, suppress(psycopg.errors.UndefinedObject):
            connection.execute("ROLLBACK PREPARED 'holds the lock'")


def test_a_lock_whose_holder_is_just_ending_is_waited_for(
    chain: Runs, held_by_no_session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_holder, found = fleet.nodes.lock.find_holder, list[object]()

    def end_after_a_try(connection: psycopg.Connection[Any], key: int) -> object:
        """Nobody asks for the holder before a try has failed."""
        found.append(find_holder(connection, key))
        if len(found) == 1:
            with psycopg.connect(held_by_no_session, autocommit=True) as other:
                other.execute("ROLLBACK PREPARED 'holds the lock'")
        return found[-1]

    monkeypatch.setattr(fleet.nodes.lock, "find_holder", end_after_a_try)
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")) as lock,
    ):
        lock.check_held()
    assert found == [None]


def test_a_lock_that_no_session_holds_is_said_to_be_so(chain: Runs, held_by_no_session: str) -> None:
    del held_by_no_session
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        pytest.raises(FleetBusyError, match="s1: the fleet lock is held, but by no session") as raised,
        lock_fleet(sessions, chain.fleet.name, own_label("create", "daily")),
    ):
        pass
    assert "pg_prepared_xacts" in raised.value.hint
