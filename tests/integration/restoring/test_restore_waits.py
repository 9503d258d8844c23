"""A restore whose statements wait for others says for whom, ends in time, and is ended by the next command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import cutline.nodes.watch
import cutline.restore.targets.waits as waits
from cutline.fleet.progress import Silent
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.waits import TargetBlockedError
from cutline.restore.unfinished.undoing import abandon_restore, discard_old
from cutline.storage.errors import StoppedError
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.held.waiting_commits import APPLICATION, await_rows, commit_waiting
from tests.integration.restoring.ending import REQUEST, abandon, restore_left, resume
from tests.integration.restoring.filled import REQUEST as FILL
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    ROOT,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    maintenance_of,
    old_databases,
    open_restores,
)

# How long a stopped command may take, on a machine with other work.
STOP_SECONDS_MAX = 25.0
SHARD = 1
COMMITTING = "whose commit waits for a synchronous standby"


@contextmanager
def committing(place: Place) -> Iterator[int]:
    """Have an application's commit wait for a synchronous standby; yield its server process."""
    with commit_waiting(place.fleet.primaries[SHARD].dsn) as process:
        yield process


@contextmanager
def frozen_session(place: Place) -> Iterator[int]:
    """Have a session on the server of which nothing is scheduled; yield its process."""
    with psycopg.connect(place.fleet.primaries[SHARD].dsn, application_name=APPLICATION) as session:
        process = session.info.backend_pid
        os.kill(process, signal.SIGSTOP)
        try:
            yield process
        finally:
            os.kill(process, signal.SIGCONT)


@contextmanager
def database_locked(place: Place) -> Iterator[int]:
    """Have a transaction open that has changed the target's database; yield its server process."""
    with psycopg.connect(maintenance_of(place, SHARD), application_name=APPLICATION) as session:
        session.execute(f"COMMENT ON DATABASE {DATABASE} IS 'changed'".encode())
        yield session.info.backend_pid
        session.rollback()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cutline.nodes.watch, "PROBE_SECONDS", 0.5)
    monkeypatch.setattr(waits, "LOOK_SECONDS", 0.3)
    monkeypatch.setattr(waits, "WAIT_SECONDS_MAX", 8.0)


def drop_is_stuck(place: Place) -> Callable[[], list[Any]]:
    query = "SELECT FROM pg_stat_activity WHERE wait_event = 'ProcSignalBarrier' AND query LIKE 'DROP DATABASE%'"
    return lambda: await_rows(maintenance_of(place, SHARD), query)


def assert_named(texts: list[str], process: int, *words: str) -> None:
    """Check that one of the texts names the process for which a statement waits, and has the words."""
    named = [text for text in texts if f"process {process} (" in text]
    assert any(all(word in text for word in ("node s2: ", APPLICATION, *words)) for text in named), texts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_a_restore_that_is_stopped_while_it_waits_ends_within_seconds(place: Place, number: signal.Signals) -> None:
    words = ["--fleet", str(place.fleet.path), "--json", "restore", NAME, "--to", str(place.target.path), "--replace"]
    program = [sys.executable, "-c", "from cutline.cli.main import main; main()"]
    with old_databases(place):
        with committing(place) as process:
            command = subprocess.Popen(
                [*program, *words, "--yes"], cwd=ROOT, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            try:
                drop_is_stuck(place)()
                time.sleep(3 * waits.LOOK_SECONDS)
                command.send_signal(number)
                out, err = command.communicate(timeout=STOP_SECONDS_MAX)
            finally:
                command.kill()
            notes = [line["note"] for line in map(json.loads, err.splitlines()) if "note" in line]
            assert_named(notes, process, "DROP DATABASE", COMMITTING, "to end the wait: bring the standbys back")
            error = json.loads(out.splitlines()[-1])
            assert command.returncode == error["code"] == (8 if number == signal.SIGTERM else 130)
            assert error["message"].endswith("the restore was left unfinished")
            assert f"SELECT pg_cancel_backend({process});" in error["hint"].split("\n")
            assert f"restore-abandon {NAME}" in error["hint"]
            assert open_restores(place) == [error["details"]["unfinished"]]
            assert place.states() == ["old"] * SHARDS
        abandon(place)
        assert_old(place)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("block", [committing, frozen_session], ids=["commit", "frozen"])
def test_a_restore_that_waits_for_too_long_names_whom_and_can_be_resumed(
    place: Place, block: Callable[[Place], Any]
) -> None:
    with old_databases(place):
        with block(place) as process:
            watching = Watching()
            with pytest.raises(TargetBlockedError) as raised:
                restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), watching)
            assert_named([raised.value.message], process, "DROP DATABASE", "gave up after waiting")
            assert_named(watching.notes, process, "DROP DATABASE")
            ends = "pg_cancel_backend" if block is committing else "pg_terminate_backend"
            assert f"SELECT {ends}({process});" in raised.value.hint.split("\n")
            assert f"snapshot restore-resume {NAME}" in raised.value.hint
            assert raised.value.details["processes"] == [process]
            # What still waits can't be undone either, and says so in time.
            with pytest.raises(TargetBlockedError) as again:
                abandon_restore(place.fleet, place.target, NAME, lambda _: None, Silent())
            assert_named([again.value.message], process)
            assert again.value.hint.split("\n")[-1] == "then repeat the command"
        abandon(place)
        assert_old(place)


@pytest.mark.usefixtures("impatient")
def test_a_restore_that_gave_up_waiting_is_resumed(place: Place) -> None:
    with old_databases(place):
        with committing(place), pytest.raises(TargetBlockedError):
            restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        resume(place)
        assert_restored(place)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("point", [RestoreCrashPoint.FINISHED, RestoreCrashPoint.DECIDED])
def test_a_swap_that_waits_for_a_lock_names_who_holds_it(place: Place, point: RestoreCrashPoint) -> None:
    """At the closing of the old databases, and at the renaming, after which nothing may be undone."""
    with old_databases(place):
        restore_left(place, point, SHARDS if point == RestoreCrashPoint.FINISHED else 1)
        with database_locked(place) as process:
            watching = Watching()
            with pytest.raises(TargetBlockedError) as raised:
                resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), watching)
            assert_named([raised.value.message], process, "DATABASE", "gave up after waiting")
            assert_named(watching.notes, process, "idle in transaction", f"SELECT pg_terminate_backend({process});")
            assert f"snapshot restore-resume {NAME}" in raised.value.hint
        resume(place)
        assert_restored(place)


@pytest.mark.usefixtures("impatient")
def test_a_swap_that_is_stopped_while_it_waits_ends_within_seconds(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "WAIT_SECONDS_MAX", 600.0)
    monkeypatch.setattr(waits, "STOPPED_SECONDS_MAX", 1.0)

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (RestoreCrashPoint.DECIDED, 1):
            blocked.execute(f"COMMENT ON DATABASE {DATABASE} IS 'changed'".encode())
            threading.Timer(3.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    with old_databases(place):
        with psycopg.connect(maintenance_of(place, SHARD), application_name=APPLICATION) as blocked:
            began = time.monotonic()
            with pytest.raises(StoppedError) as raised:
                restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Watching(then))
            assert time.monotonic() - began < STOP_SECONDS_MAX
            assert f"snapshot restore-resume {NAME}" in raised.value.hint
            blocked.rollback()
        resume(place)
        assert_restored(place)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["discard", "rehearsal"])
def test_what_drops_databases_names_whom_it_waits_for(place: Place, how: str) -> None:
    watching = Watching()

    def discard() -> None:
        discard_old(place.fleet, place.target, lambda _: None, watching)

    def rehearse() -> None:
        preview_restore(plan_restore(place.fleet, place.target, REQUEST), watching)

    end = discard if how == "discard" else rehearse
    with old_databases(place):
        restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        with committing(place) as process:
            with pytest.raises(TargetBlockedError) as raised:
                end()
            assert_named([raised.value.message], process, "DROP DATABASE", COMMITTING)
            assert_named(watching.notes, process, "DROP DATABASE")
            assert raised.value.hint.split("\n")[-1] == "then repeat the command"
        end()
        left = {DATABASE} if how == "discard" else {name for name in place.databases() if "_rehearsing_" not in name}
        assert place.databases() == left


@pytest.mark.usefixtures("impatient")
def test_a_restore_into_existing_tables_names_the_locks_for_which_it_waits(place: Place, filled: Any) -> None:
    dsn = place.target.primaries[SHARD].dsn
    watching = Watching()
    with psycopg.connect(dsn, application_name=APPLICATION) as session:
        session.execute("LOCK TABLE item IN ACCESS EXCLUSIVE MODE")

        def release() -> None:
            while not watching.notes:
                time.sleep(0.05)
            session.rollback()

        threading.Thread(target=release, daemon=True).start()
        restore_fleet(plan_restore(place.fleet, place.target, FILL), Ready(place.spark), watching)
        assert_named(watching.notes[:1], session.info.backend_pid, "idle in transaction")


def test_values_in_a_statement_that_waits_are_not_shown() -> None:
    shown = waits.show_beginning("CREATE USER MAPPING FOR a SERVER b OPTIONS (password 'secret')")
    assert shown == "CREATE USER MAPPING FOR a SERVER b OPTIONS (password…"
