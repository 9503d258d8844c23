"""An end of a restore that meets a session or a server of which nothing is scheduled any more."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import cutline.nodes.watch
from cutline.fleet.progress import Silent
from cutline.nodes.watch import SilentNodeError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.targets.target import TargetUnfitError
from cutline.restore.unfinished.undoing import abandon_restore, discard_old
from cutline.storage.errors import StoppedError
from tests.commands.snapshot_runs import Ready
from tests.integration.restoring.ending import REQUEST, restore_left, resume
from tests.integration.restoring.target_place import (
    DATABASE,
    NAME,
    SHARDS,
    Place,
    assert_old,
    assert_restored,
    maintenance_of,
    old_databases,
)
from tests.run.soak import first


@contextmanager
def suspended(process: int) -> Iterator[None]:
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_session_that_does_not_end_is_named_before_anything_is_decided(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.restore.targets.swap.END_MILLISECONDS_MAX", 300)
    with old_databases(place):
        restore_left(place, RestoreCrashPoint.FINISHED, SHARDS)
        with psycopg.connect(place.dsns()[1]) as session:
            pid = session.info.backend_pid
            with (
                suspended(pid),
                pytest.raises(TargetUnfitError, match=f"in database {DATABASE} could not be terminated: {pid}$"),
            ):
                resume(place)
        assert place.states() == ["old"] * SHARDS
        resume(place)
        assert_restored(place)


@pytest.mark.parametrize(
    ("end", "hook"),
    [
        (lambda place: discard_old(place.fleet, place.target, print, Silent()), "drop_database"),
        (lambda place: abandon_restore(place.fleet, place.target, NAME, print, Silent()), "put_back"),
    ],
    ids=["discard", "abandon"],
)
@pytest.mark.parametrize("how", first([SilentNodeError, KeyboardInterrupt]))
def test_an_end_does_not_wait_for_a_silent_node_without_end(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[Place], object],
    hook: str,
    how: type[BaseException],
) -> None:
    monkeypatch.setattr(cutline.nodes.watch, "SILENCE_SECONDS_MAX", 3.0 if how is SilentNodeError else 60.0)
    monkeypatch.setattr(cutline.nodes.watch, "PROBE_SECONDS", 0.5)
    timer = threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT))
    stopped: list[int] = []

    def stop(target: Any, connection: psycopg.Connection, *_: object) -> None:
        if target.shard == "s2":
            # As a server of which nothing is scheduled: its sessions, and those that are to come.
            with psycopg.connect(maintenance_of(place, 1)) as other:
                query = (
                    "SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()"
                )
                stopped.extend(pid for (pid,) in other.execute(query))
                (postmaster,) = other.execute(
                    "SELECT split_part(pg_read_file('postmaster.pid'), E'\\n', 1)::int"
                ).fetchone() or (0,)
            stopped.append(postmaster)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            if how is KeyboardInterrupt:
                timer.start()
            connection.execute("SELECT 1")

    with old_databases(place):
        if hook == "drop_database":
            restore_fleet(plan_restore(place.fleet, place.target, REQUEST), Ready(place.spark), Silent())
        else:
            restore_left(place, RestoreCrashPoint.RENAMED)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(f"cutline.restore.unfinished.undoing.{hook}", stop)
                began = time.monotonic()
                with pytest.raises((how, StoppedError)) as raised:
                    end(place)
                assert how in (raised.type, type(raised.value.__cause__))
                assert time.monotonic() - began < 20
        finally:
            for pid in reversed(stopped):
                os.kill(pid, signal.SIGCONT)
        end(place)
        if hook == "drop_database":
            assert place.databases() == {DATABASE}
        else:
            assert_old(place)
